"""Measurements beside the peers: each file is one command that prints a table."""
