"""Batches by position, from text or token files: sources, cache, order, loader; dataset.py is the entry point.

A new source is added in `find_source` of sources.py (files) or `open_data` of dataset.py (streams). A new format of text files needs its
suffix in TEXT_SUFFIXES and its reader in `kinds` of TextSource.documents; `reading` changes if files that could be read before give other
documents."""
