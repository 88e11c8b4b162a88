"""Tests of the simulator: the virtual network and disk, injected bugs that it must detect, and many seeds."""
