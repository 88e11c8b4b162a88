"""The simulator has moved: python -m tests.simulator."""
