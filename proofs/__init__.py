"""What we claim of Pharos, each a command that shows it."""
