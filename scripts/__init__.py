"""Programs that a person starts: installing, launching, generating, checking."""
