"""Compatibility with programs, clients and lighthouses that are written for torchft. In ft/ the group server uses it, and the modules that
have torchft's names (ft/__init__.py, data.py, ddp.py, optim.py, local_sgd.py, coordination.py, process_group.py, checkpointing/)."""
