"""The interface for programs that were written for torchft."""
