"""What a person starts: installing, launching, generating, checking."""
