"""Compatibility with programs, clients and lighthouses that are written for torchft. In ft/ only the group server uses it."""
