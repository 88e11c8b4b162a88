"""Text or token files in, batches by position out: sources, cache, order, loader; dataset.py is the door."""
