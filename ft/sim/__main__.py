"""Prints the simulator's new name."""

import sys

sys.exit("the simulator has moved: python -m tests.simulator " + " ".join(sys.argv[1:]))
