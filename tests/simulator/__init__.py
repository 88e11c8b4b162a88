"""A virtual world for the real protocol code: one seed is one run, on every machine and Python. `python -m tests.simulator --help`."""
