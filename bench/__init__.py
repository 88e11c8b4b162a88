"""Benchmarks against other frameworks, and checks of what the documentation claims: most files are a command with a table or a verdict."""
