"""Batches by position, from text or token files: sources, cache, order, loader; dataset.py is the entry point.

A new source is added in find_source of sources.py (files) or open_data of dataset.py (streams)."""
