"""Text or token files in, batches by position out: sources, cache, order, loader; dataset.py is the entry point.

A new source: find_source in sources.py (files), or open_data in dataset.py (streams)."""
