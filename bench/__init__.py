"""Measurements beside the peers, and proofs of what the documentation claims: each file is one command that prints a table or a verdict."""
