"""Compatibility with programs, clients and lighthouses that are written for torchft. In ft/ it is used only by the group server and the
modules with torchft's names (ft/__init__.py, data.py, ddp.py, optim.py, local_sgd.py, coordination.py, process_group.py,
checkpointing/)."""
