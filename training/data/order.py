"""The infinite order of training sequences: a pure function from a position to its tokens, with random access on any rank.

Epoch e concatenates the split's documents, shuffled by (seed, e), each between BOS and EOS, into a stream of N tokens. It is split into
(N - 1) // seq_len sequences; sequence i is tokens [i * seq_len, i * seq_len + seq_len + 1): seq_len inputs, and the targets shifted by
one. The last (N - 1) % seq_len tokens of the stream are dropped, which differ by epoch. Sequences are visited with a fixed stride
coprime to their number (`stride`), so that a batch is spread over the epoch."""

from __future__ import annotations

import math
import threading
from functools import lru_cache, partial

import numpy as np

from training.data.cache import BUCKETS, Corpus

_EPOCHS_KEPT = 2  # a step at the end of an epoch reads from two
SPLITS = ("train", "validation")


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """Returns a permutation of range(count), [count] int64, from Philox's raw stream, which numpy guarantees for all versions (NEP 19)."""
    key = (seed % (1 << 64)) | (epoch % (1 << 64)) << 64
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def buckets_of(split: str, held_out: float) -> range:
    """Returns the buckets (cache.bucket_of) whose documents are in `split`."""
    assert split in SPLITS, split
    first = round(held_out * BUCKETS)
    return range(first) if split == "validation" else range(first, BUCKETS)


def in_split(corpus: Corpus, split: str, held_out: float) -> np.ndarray:
    """Returns the indices of the documents in `split`, [n] int64. The split of a document depends on its content only."""
    buckets = buckets_of(split, held_out)
    return np.flatnonzero((corpus.buckets >= buckets.start) & (corpus.buckets < buckets.stop))


def stride(count: int) -> int:
    """Returns the distance between consecutive sequences in an epoch of `count`: about 0.618 * count, and coprime to it, so that each is
    visited (Fibonacci hashing: Knuth, The Art of Computer Programming, volume 3, 6.4). Neighbours in the stream are often from the same
    document, and batches of them highly correlated: configs/llama.toml had a loss of 2.3 around step 750 with them, and has 1.4 without."""
    wanted = max(1, round(count * (math.sqrt(5) - 1) / 2))
    return next(step for step in range(wanted, wanted + count) if math.gcd(step, count) == 1)


class Order:
    """Random access to the packed sequences of one split. Thread-safe; pickles without its arrays."""

    def __init__(self, corpus: Corpus, split: str, *, held_out: float, seed: int, seq_len: int) -> None:
        """`validation` is not shuffled: every validation sees the same sequences. Raises ValueError if `split` has no sequence."""
        self._rebuild = partial(Order, corpus, split, held_out=held_out, seed=seed, seq_len=seq_len)
        self._corpus, self._seed, self.seq_len = corpus, seed, seq_len
        self._shuffles = split == "train"
        self._documents = in_split(corpus, split, held_out)
        lengths = np.diff(corpus.bounds)[self._documents]
        self.tokens_per_epoch = int(lengths.sum())
        self.sequences_per_epoch = (self.tokens_per_epoch - 1) // seq_len
        if self.sequences_per_epoch < 1:
            raise ValueError(_too_little(split, self._documents, self.tokens_per_epoch, corpus, held_out, seq_len))
        self._stride = stride(self.sequences_per_epoch)
        self._lock = threading.Lock()
        self._layout = lru_cache(_EPOCHS_KEPT)(self._lay_out)

    def __reduce__(self) -> tuple[object, ...]:
        return self._rebuild, ()

    def sequence(self, position: int) -> np.ndarray:
        """Returns the tokens [seq_len + 1] int64 at `position` >= 0 of the infinite order."""
        assert position >= 0, position
        epoch, turn = divmod(position, self.sequences_per_epoch)
        index = turn * self._stride % self.sequences_per_epoch
        with self._lock:  # concurrent threads compute the layout of an epoch once
            ends, starts = self._layout(epoch if self._shuffles else 0)
        tokens = np.empty(self.seq_len + 1, dtype=np.int64)
        at, filled = index * self.seq_len, 0  # offset in the epoch's stream; tokens written
        document = int(np.searchsorted(ends, at, side="right"))
        while filled < len(tokens):
            end, start = int(ends[document]), int(starts[document])
            count = min(end - at, len(tokens) - filled)
            tokens[filled : filled + count] = self._corpus.read(start + at, count)
            at, filled, document = at + count, filled + count, document + 1
        return tokens

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns for each document its end in the epoch's stream, and the difference of its offsets in the corpus and in the stream."""
        documents = self._documents
        if self._shuffles:
            documents = documents[shuffled(len(documents), self._seed, epoch)]
        first = self._corpus.bounds[documents]
        lengths = self._corpus.bounds[documents + 1] - first
        ends = np.cumsum(lengths)
        return ends, first - (ends - lengths)


def _too_little(split: str, documents: np.ndarray, tokens: int, corpus: Corpus, held_out: float, seq_len: int) -> str:
    have = f"{corpus.meta.documents} documents and {corpus.meta.tokens} tokens"
    if len(documents):
        return (
            f"training.seq_len = {seq_len}: the {split} split has {tokens} tokens ({have} in all), too few for one "
            f"sequence; legal: 1 to {max(tokens - 1, 1)}, or add text"
        )
    setting = f"training.dataset_held_out = {held_out:g}"
    if split == "train":
        return (
            f"{setting}: nothing is left to train on ({have} in all); nearest: {int(corpus.buckets.max()) / BUCKETS:g}"
        )
    if len(corpus.buckets) == 1:
        return f"{setting}: the corpus is one document, none can be held out; add documents, or set validation.enable = false"
    return (
        f"{setting}: no document is held out ({have} in all); nearest: {(int(corpus.buckets.min()) + 1) / BUCKETS:g}, "
        "or set validation.enable = false"
    )
