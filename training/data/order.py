"""The infinite order of training sequences: a pure function from a position to its tokens, with random access on any rank.

`DocumentOrder`, of a corpus in the cache: epoch e concatenates the split's documents, shuffled by (seed, e), each between BOS and EOS,
into a stream of N tokens. It is split into (N - 1) // seq_len sequences; sequence i is tokens [i * seq_len, i * seq_len + seq_len + 1):
seq_len inputs, and the targets shifted by one. The last (N - 1) % seq_len tokens of the stream are dropped; they are different ones in each
epoch. Sequences are visited with a fixed stride coprime to their number (`stride`), so that a batch is spread over the epoch. Time and
memory grow with the number of documents.

`StoreOrder`, of a token store of any size: epoch e is the stream of the store's shards, without the documents of `skip`, from an offset
below seq_len, split likewise, and its sequences are visited in the order of a permutation that is computed for one position at a time
(`permuted`).

`Mixture`, of several stores: the source of position p is entry p of a repeating pattern in proportion to their weights (`pattern`).

`SegmentedOrder`, of a run whose data changed by resume.allow: each change begins a new order, at the position that was reached then."""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Protocol

import numpy as np

from training.data.cache import BUCKETS, Corpus
from training.data.store import Store

_EPOCHS_KEPT = 2  # a step at the end of an epoch reads from two
SPLITS = ("train", "validation")
NO_TOKEN = ~0  # in a sequence: there is none
PATTERN = 4096  # positions of a mixture until its sources repeat; weights are rounded to 1/PATTERN
_ROUNDS = 4  # of the Feistel network: as many as make it a strong permutation (Luby and Rackoff, 1988)


class Order(Protocol):
    """Random access to sequences of tokens. Thread-safe; pickles without its arrays."""

    seq_len: int

    def sequence(self, position: int) -> np.ndarray:
        """Returns the tokens [seq_len + 1] int64 at `position` >= 0 of the infinite order. ~id: an input that is no target, as in a
        prompt; NO_TOKEN: there is none."""

    def document_starts(self, position: int) -> np.ndarray:
        """Returns for each token of `sequence(position)` the index in the sequence of its document's first token, [seq_len + 1] int64."""


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


def needs_token_split(corpus: Corpus, held_out: float) -> bool:
    """Returns True if the hashes of documents would leave a split empty, as with one document; then the last share of all tokens is held
    out."""
    held = np.count_nonzero(corpus.buckets < round(held_out * BUCKETS))
    return held_out > 0 and held in (0, len(corpus.buckets))


def document_spans(
    corpus: Corpus, split: str, held_out: float, *, may_split_by_tokens: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the offset of the first token and the length of each document in `split`, both [n] int64. `may_split_by_tokens`: where
    `needs_token_split` holds, the last share of all tokens is the validation split, and the document in which it begins is in both; else
    nothing would be held out. Found once for a corpus: the segments of a run's data share these arrays."""
    key = split, held_out, may_split_by_tokens
    if key not in corpus.spans:
        corpus.spans[key] = _find_document_spans(corpus, split, held_out, may_split_by_tokens)
    return corpus.spans[key]


def _find_document_spans(
    corpus: Corpus, split: str, held_out: float, may_split_by_tokens: bool
) -> tuple[np.ndarray, np.ndarray]:
    if not (may_split_by_tokens and needs_token_split(corpus, held_out)):
        documents = in_split(corpus, split, held_out)
        first = corpus.bounds[documents]
        return first, corpus.bounds[documents + 1] - first
    cut = corpus.tokens - max(1, round(held_out * corpus.tokens))
    document = int(np.searchsorted(corpus.bounds, cut, side="right")) - 1
    first = corpus.bounds[: document + 1] if split == "train" else np.append(cut, corpus.bounds[document + 1 : -1])
    ends = np.append(first[1:], cut if split == "train" else corpus.tokens)
    return first[ends > first], (ends - first)[ends > first]


def stride(count: int) -> int:
    """Returns the distance between consecutive sequences in an epoch of `count`: about 0.618 * count, and coprime to it, so that each is
    visited (Fibonacci hashing: Knuth, The Art of Computer Programming, volume 3, 6.4). Neighbours in the stream are often from the same
    document, and batches of them highly correlated: a longer run of configs/llama.toml had a loss of 2.3 around step 750 with them, and 1.4
    without."""
    wanted = max(1, round(count * (math.sqrt(5) - 1) / 2))
    return next(step for step in range(wanted, wanted + count) if math.gcd(step, count) == 1)


def pieces(ends: np.ndarray, at: int, left: int) -> Iterator[tuple[int, int, int]]:
    """Splits `left` tokens from offset `at` of a stream at the `ends` of its pieces. Yields (piece, offset in the stream, tokens) of each
    part."""
    piece = int(np.searchsorted(ends, at, side="right"))
    while left:
        count = min(int(ends[piece]) - at, left)
        yield piece, at, count
        at, left, piece = at + count, left - count, piece + 1


class DocumentOrder:
    """The order of one split of a corpus in the cache."""

    def __init__(
        self, corpus: Corpus, split: str, *, held_out: float, seed: int, seq_len: int, may_split_by_tokens: bool = False
    ) -> None:
        """`validation` is not shuffled: every validation sees the same sequences. `may_split_by_tokens`: see `document_spans`. Raises
        ValueError if `split` has no sequence."""
        self._rebuild = partial(
            DocumentOrder,
            corpus,
            split,
            held_out=held_out,
            seed=seed,
            seq_len=seq_len,
            may_split_by_tokens=may_split_by_tokens,
        )
        self._corpus, self._seed, self.seq_len = corpus, seed, seq_len
        self._shuffles = split == "train"
        self._first, self._lengths = document_spans(corpus, split, held_out, may_split_by_tokens=may_split_by_tokens)
        self.tokens_per_epoch = int(self._lengths.sum())
        self.sequences_per_epoch = (self.tokens_per_epoch - 1) // seq_len
        if self.sequences_per_epoch < 1:
            raise ValueError(_too_little(split, self.tokens_per_epoch, corpus, held_out, seq_len))
        self._stride = stride(self.sequences_per_epoch)
        self._lock = threading.Lock()
        self._layout = lru_cache(_EPOCHS_KEPT)(self._lay_out)

    def __reduce__(self) -> tuple[object, ...]:
        return self._rebuild, ()

    def sequence(self, position: int) -> np.ndarray:
        return np.concatenate([self._corpus.read(*part) for part in self._parts(position)]).astype(np.int64)

    def document_starts(self, position: int) -> np.ndarray:
        counts = [count for _, count in self._parts(position)]
        return np.repeat(np.cumsum([0, *counts[:-1]]), counts)

    def _parts(self, position: int) -> Iterator[tuple[int, int]]:
        """Yields the offset of the first token in the corpus, and the number of tokens, of each document of a sequence."""
        assert position >= 0, position
        epoch, turn = divmod(position, self.sequences_per_epoch)
        index = turn * self._stride % self.sequences_per_epoch
        with self._lock:  # concurrent threads compute the layout of an epoch once
            ends, starts = self._layout(epoch if self._shuffles else 0)
        for document, at, count in pieces(ends, index * self.seq_len, self.seq_len + 1):
            yield int(starts[document]) + at, count

    def left_over(self, position: int) -> int:
        """Returns how many sequences of the current epoch are not visited before `position`; 0 where an epoch begins."""
        return -position % self.sequences_per_epoch

    def _lay_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns for each document its end in the epoch's stream, and the difference of its offsets in the corpus and in the stream."""
        first, lengths = self._first, self._lengths
        if self._shuffles:
            documents = shuffled(len(first), self._seed, epoch)
            first, lengths = first[documents], lengths[documents]
        ends = np.cumsum(lengths)
        return ends, first - (ends - lengths)


def permuted(index: int, count: int, key: bytes) -> int:
    """Returns the image of `index` under a pseudo-random permutation of range(count), in constant time and memory: a Feistel network on
    the next even number of bits, repeated while its result is beyond the range (Black and Rogaway, 2002; at most four times on average)."""
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    while True:
        left, right = index >> half, index & ((1 << half) - 1)
        for number in range(_ROUNDS):
            mixed = blake2b(number.to_bytes(1, "little") + right.to_bytes(8, "little"), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & ((1 << half) - 1))
        index = left << half | right
        if index < count:
            return index


class StoreOrder:
    """The order of a part of a token store: "train", "validation" (what is held out) or "all"."""

    def __init__(
        self, store: Store, split: str, *, seed: int | None, seq_len: int, skip: Sequence[tuple[int, int]] = ()
    ) -> None:
        """`seed` None: in the order of the store, for validation. `skip`: ranges of documents that are left out, first to end; they are
        numbered over the shards. Raises ValueError if `split` has no sequence."""
        self._store, self._split, self._seed, self.seq_len, self._skip = store, split, seed, seq_len, skip
        self._spans = list(self._find_spans())  # shard, offset of the first token, and end of each piece of the stream
        self._ends = np.cumsum([end - first for _, first, end in self._spans])  # of the pieces in the stream
        self.tokens_per_epoch = int(self._ends[-1])
        self.sequences_per_epoch = (self.tokens_per_epoch - 1) // seq_len
        if self.sequences_per_epoch < 1:
            purpose = "validation" if split == "validation" else "training"
            if skip and self.tokens_per_epoch < 2:
                raise ValueError(f"training.skip: no text of the store {store.folder} is left for {purpose}")
            raise ValueError(
                f"training.seq_len = {seq_len}: the store {store.folder} has {self.tokens_per_epoch} tokens for "
                f"{purpose}{' besides training.skip' if skip else ''}, too few for one sequence; "
                f"legal: {_lengths(self.tokens_per_epoch)}"
            )

    def __reduce__(self) -> tuple[object, ...]:
        return partial(StoreOrder, seed=self._seed, seq_len=self.seq_len, skip=self._skip), (self._store, self._split)

    def _find_spans(self) -> Iterator[tuple[int, int, int]]:
        documents = 0  # of the shards before
        for number, shard in enumerate(self._store.manifest.shards):
            at = shard.train_tokens if self._split == "validation" else 0
            end = shard.train_tokens if self._split == "train" else shard.tokens
            for first, last in sorted(self._skip):
                first, last = max(first - documents, 0), min(last - documents, shard.documents)
                if first < last:
                    begin, until = (min(int(bound), end) for bound in self._store.bounds(number)[[first, last]])
                    if at < begin:
                        yield number, at, begin
                    at = max(at, until)
            yield number, at, end
            documents += shard.documents

    def sequence(self, position: int) -> np.ndarray:
        shards = self._store.shards
        return np.concatenate(
            [shards[shard][first : first + count] for shard, first, count in self._parts(position)]
        ).astype(np.int64)

    def document_starts(self, position: int) -> np.ndarray:
        starts, filled = np.zeros(self.seq_len + 1, dtype=np.int64), 0
        for shard, first, count in self._parts(position):
            bounds = self._store.bounds(shard)
            begins = bounds[slice(*np.searchsorted(bounds, (first, first + count)))] - first + filled
            starts[begins] = begins
            filled += count
        return np.maximum.accumulate(starts)

    def _parts(self, position: int) -> Iterator[tuple[int, int, int]]:
        """Yields the shard, the offset of the first token in it, and the number of tokens, of each part of a sequence."""
        assert position >= 0, position
        epoch, turn = divmod(position, self.sequences_per_epoch)
        offset = 0
        if self._seed is not None:
            key = self._seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
            turn = permuted(turn, self.sequences_per_epoch, key)
            # other sequences in each epoch; the tokens left over are those before the offset and after the last sequence
            spare = (self.tokens_per_epoch - 1) % self.seq_len
            offset = int.from_bytes(blake2b(b"offset", key=key, digest_size=8).digest(), "little") % (spare + 1)
        for piece, at, count in pieces(self._ends, offset + turn * self.seq_len, self.seq_len + 1):
            shard, _, end = self._spans[piece]
            yield shard, end - (int(self._ends[piece]) - at), count

    def documents(self, position: int) -> list[int]:
        """Returns the numbers, over the shards, of the documents of `sequence(position)`, in its order."""
        shards, found = self._store.manifest.shards, list[int]()
        for shard, first, count in self._parts(position):
            bounds, before = self._store.bounds(shard), sum(each.documents for each in shards[:shard])
            begin, end = np.searchsorted(bounds, first, side="right") - 1, np.searchsorted(bounds, first + count)
            found += range(before + int(begin), before + int(end))
        return found

    def left_over(self, position: int) -> int:
        """Returns how many sequences of the current epoch are not visited before `position`; 0 where an epoch begins."""
        return -position % self.sequences_per_epoch


def rounded(weights: Sequence[float]) -> list[int]:
    """Rounds weights to parts of PATTERN that add up to it (largest remainders), at least one each."""
    exact = [weight * PATTERN / sum(weights) for weight in weights]
    parts = [max(1, int(share)) for share in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for i in by_remainder[: max(0, PATTERN - sum(parts))]:
        parts[i] += 1
    while sum(parts) > PATTERN:  # weights near zero were raised to one part
        parts[parts.index(max(parts))] -= 1
    return parts


def pattern(parts: Sequence[int]) -> np.ndarray:
    """Returns the source of each position, [sum(parts)] int64, source i parts[i] times. In each prefix of n the number of every source is
    within one of n * parts[i] / sum(parts): the j-th of a source has a window of positions, and the open window that ends first gets the
    position, so that none is missed (Baruah et al., Proportionate progress, 1996)."""
    total, made, sources = sum(parts), [0] * len(parts), np.empty(sum(parts), dtype=np.int64)
    for position in range(total):
        open_windows = [i for i, part in enumerate(parts) if made[i] < part and made[i] * total // part <= position]
        source = min(open_windows, key=lambda i: (-(-(made[i] + 1) * total // parts[i]), i))
        sources[position] = source
        made[source] += 1
    return sources


@dataclass(frozen=True)
class MixtureSource:
    """A source of a mixture. `limit`: sequences until its budget ends; None: no budget."""

    order: StoreOrder
    weight: float
    limit: int | None = None


class _Interval:
    """Positions of a mixture from `first` on, until the budget of one more source has ended. `begun`: sequences of each source so far."""

    def __init__(self, first: int, sources: Sequence[MixtureSource], begun: Sequence[int]) -> None:
        self.first, self.begun = first, list(begun)
        self.active = [i for i, each in enumerate(sources) if each.limit is None or begun[i] < each.limit]
        self.parts = rounded([sources[i].weight for i in self.active])
        self._pattern = pattern(self.parts)
        self._earlier = np.empty(PATTERN, dtype=np.int64)  # by place in the pattern: earlier places of the same source
        self._turns = [np.flatnonzero(self._pattern == i) for i in range(len(self.active))]
        for turns in self._turns:
            self._earlier[turns] = np.arange(len(turns))
        limits = [self._budget_end(i, sources[source].limit) for i, source in enumerate(self.active)]
        self.end: int | None = min((end for end in limits if end is not None), default=None)

    def find(self, position: int) -> tuple[int, int]:
        """Returns the source of a position and the number of the sequence in it."""
        block, at = divmod(position - self.first, PATTERN)
        i = int(self._pattern[at])
        return self.active[i], self.begun[self.active[i]] + block * self.parts[i] + int(self._earlier[at])

    def counts(self, position: int) -> list[int]:
        """Returns the sequences of each source before a position."""
        block, at = divmod(position - self.first, PATTERN)
        counts = list(self.begun)
        for source, part, turns in zip(self.active, self.parts, self._turns, strict=True):
            counts[source] += block * part + int(np.searchsorted(turns, at))
        return counts

    def _budget_end(self, i: int, limit: int | None) -> int | None:
        """Returns the position at which a source would exceed its budget."""
        if limit is None:
            return None
        block, rank = divmod(limit - self.begun[self.active[i]], self.parts[i])
        return self.first + block * PATTERN + int(self._turns[i][rank])


class Mixture:
    """The order of several sources in proportion to their weights. When the budget of one ends, the others share its positions; when all
    have ended, at `end`, they go on as if there were no budgets: train.py stops before that."""

    def __init__(self, sources: Sequence[MixtureSource]) -> None:
        self.sources = list(sources)
        self.seq_len = sources[0].order.seq_len
        self._intervals = [_Interval(0, sources, [0] * len(sources))]
        while (last := self._intervals[-1]).end is not None:
            begun = last.counts(last.end)
            if all(each.limit is not None and count >= each.limit for each, count in zip(sources, begun, strict=True)):
                break
            self._intervals.append(_Interval(last.end, sources, begun))
        self.end = self._intervals[-1].end  # positions until all budgets end; None: never

    def __reduce__(self) -> tuple[object, ...]:
        return Mixture, (self.sources,)

    def find(self, position: int) -> tuple[int, int]:
        """Returns (source, number of the sequence in it) of a position, in constant time."""
        return self._interval(position).find(position)

    def sequence(self, position: int) -> np.ndarray:
        source, index = self.find(position)
        return self.sources[source].order.sequence(index)

    def document_starts(self, position: int) -> np.ndarray:
        source, index = self.find(position)
        return self.sources[source].order.document_starts(index)

    def left_over(self, position: int) -> int:
        """Returns the sum over sources of what is left over of their epochs."""
        counts = self._interval(position).counts(position)
        return sum(each.order.left_over(count) for each, count in zip(self.sources, counts, strict=True))

    def _interval(self, position: int) -> _Interval:
        return self._intervals[bisect_right(self._intervals, position, key=lambda interval: interval.first) - 1]


class SegmentedOrder:
    """The order of a run whose data changed by resume.allow. A sequence of an earlier segment that is trained on late, as a hole of the
    ledger, is cut to the present seq_len, or filled up with NO_TOKEN."""

    def __init__(self, segments: Sequence[tuple[int, Order | None]]) -> None:
        """`segments`: first position and order of each; None: its data is gone, and no position of it is read."""
        self.set(segments)

    def __reduce__(self) -> tuple[object, ...]:
        return SegmentedOrder, (self._segments,)

    def set(self, segments: Sequence[tuple[int, Order | None]]) -> None:
        """Replaces the segments, for later calls of `sequence` in this process; the last has the same seq_len."""
        first, order = segments[-1]
        assert order is not None, "the present segment has no order"
        self._segments, self.seq_len = list(segments), order.seq_len
        # the position at which all budgets have ended; None: never
        self.end = first + order.end if isinstance(order, Mixture) and order.end is not None else None

    def find(self, position: int) -> tuple[Order, int, int]:
        """Returns the order of one source that has the position, the number of that source, and the number of the sequence in it."""
        order, index = self._segment_of(position)
        if not isinstance(order, Mixture):
            return order, 0, index
        source, index = order.find(index)
        return order.sources[source].order, source, index

    def sequence(self, position: int) -> np.ndarray:
        order, index = self._segment_of(position)
        tokens, length = order.sequence(index), self.seq_len + 1
        if len(tokens) < length:
            tokens = np.pad(tokens, (0, length - len(tokens)), constant_values=NO_TOKEN)
        return tokens[:length]

    def document_starts(self, position: int) -> np.ndarray:
        order, index = self._segment_of(position)
        starts, length = order.document_starts(index), self.seq_len + 1
        if len(starts) < length:  # what fills a sequence up is a document by itself
            starts = np.pad(starts, (0, length - len(starts)), constant_values=len(starts))
        return starts[:length]

    def _segment_of(self, position: int) -> tuple[Order, int]:
        first, order = self._segments[bisect_right(self._segments, position, key=lambda segment: segment[0]) - 1]
        assert order is not None, f"position {position} is of an earlier segment of the data, which cannot be opened"
        return order, position - first


def _lengths(tokens: int) -> str:
    """Returns the sequence lengths that are legal for so many tokens, as text."""
    return f"1 to {tokens - 1}, or add text" if tokens > 1 else "none; add text"


def _too_little(split: str, tokens: int, corpus: Corpus, held_out: float, seq_len: int) -> str:
    have = f"{corpus.meta.documents} documents and {corpus.meta.tokens} tokens"
    if tokens:
        return (
            f"training.seq_len = {seq_len}: the {split} split has {tokens} tokens ({have} in all), too few for one "
            f"sequence; legal: {_lengths(tokens)}"
        )
    setting = f"training.dataset_held_out = {held_out:g}"
    if split == "train":
        return (
            f"{setting}: nothing is left to train on ({have} in all); nearest: {int(corpus.buckets.max()) / BUCKETS:g}"
        )
    return (
        f"{setting}: no document is held out ({have} in all); nearest: {(int(corpus.buckets.min()) + 1) / BUCKETS:g}, "
        "or set validation.enable = false"
    )
