"""Transcripts of the pure machines: what goes in, what must come out and why. No sleep, no socket, no torch."""
