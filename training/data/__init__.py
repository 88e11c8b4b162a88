"""Batches by position, from text or token files: sources, cache, order, loader; dataset.py is the entry point.

A new source is a name in TrainingConfig.dataset and its checks (../config.py), and a branch of `find_source` in sources.py (files) or of
`open_data` in dataset.py (stores, streams: a subclass of _OrderedData or _Data). A key that changes the order of the data begins with
"dataset", "seed" or "seq_len", since DataSegment records these. Packing is an Order (order.py), a batch `make_batch` (loader.py). A new
format of text files needs its suffix in TEXT_SUFFIXES and its reader in `kinds` of TextSource.documents; `reading` must change if files
that could be read before give other documents.

Loss on a part of the tokens, such as the answers of a dialogue: a token that is no target is ~id in what the order's `sequence` returns.
The mark has to be in the cache, since a sequence may begin in the middle of a document: for instance in the highest bit of ids that
`_Writer.flush` of cache.py writes as uint32."""
