"""The interface for programs, clients and lighthouses that were written for torchft. Nothing else in ft/ needs it but the group server."""
