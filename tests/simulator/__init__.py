"""Simulates a cluster around the real protocol code; a seed gives the same run on every machine and Python. `python -m tests.simulator
--help`."""
