"""training/data/store.py and orders of stores: reads return the written data, each sequence once an epoch, each source by its weight."""

from __future__ import annotations

import pickle
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from training.data.order import PATTERN, Mixture, MixtureSource, StoreOrder, pattern, permuted, rounded
from training.data.store import FORMAT, MAPPED, Store, StoreSettings, StoreWriter

WORDS = 10  # ids of a document


FROZEN = [269, 49, 104, 30, 451]  # first ids of sequences of the first version, seed 1


def settings(**changes: object) -> StoreSettings:
    given = {
        "format": FORMAT,
        "tokenizer": "t",
        "vocab_size": 60000,
        "text_key": "text",
        "held_out": 0.0,
        "dtype": "uint16",
    }
    return StoreSettings(**given | {"shard_tokens": 100, "files": (("a.txt", 1),)} | changes)  # type: ignore[arg-type]


def write(folder: Path, documents: int, *, held_out: float = 0.0, words: int = WORDS, shard_tokens: int = 100) -> Store:
    """Writes a store whose ids are 0, 1, 2, ...; a batch is two documents; every tenth document is held out."""
    writer = StoreWriter(folder, settings(held_out=held_out, shard_tokens=shard_tokens))
    for first in range(0, documents, 2):
        numbers = np.arange(first, min(first + 2, documents))
        ids = np.concatenate([np.arange(number * words, (number + 1) * words) for number in numbers])
        held = (numbers % 10 == 9) & (held_out > 0)
        writer.add(ids.astype(np.uint32), np.full(len(numbers), words), held)
        writer.end_batch(0, int(numbers[-1]) + 1)
    writer.finish()
    writer.close()
    return Store(folder, "training.dataset_path")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write(tmp_path_factory.mktemp("stores") / "store", 53, held_out=0.1)


def test_shards_have_their_documents_the_held_out_last(store: Store):
    shards = store.manifest.shards
    assert [shard.documents for shard in shards] == [10, 10, 10, 10, 10, 3]
    assert [shard.train_documents for shard in shards] == [9, 9, 9, 9, 9, 3]
    assert sum(len(ids) for ids in store.shards) == store.manifest.tokens == 530
    assert store.shards[1].tolist() == [*range(100, 190), *range(190, 200)]
    assert store.bounds(1).tolist() == list(range(0, 101, 10))
    assert not store.damaged_shards()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts descriptors by /proc")
def test_of_many_shards_a_process_maps_a_few_at_a_time(tmp_path: Path):
    """A shell lets a process have 1,024 descriptors: with 2^28 ids a shard, the stores of a mixture would end at 270 billion ids."""

    def descriptors() -> int:
        found = 0
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # that of this listing, and what another thread closes meanwhile
                found += path.readlink().is_relative_to(tmp_path.resolve())
        return found

    stores = [write(tmp_path / name, MAPPED + 32, shard_tokens=1) for name in ("a", "b")]
    assert sum(len(store.shards) for store in stores) == MAPPED + 32 and descriptors() == 0
    for store in stores:
        order = StoreOrder(store, "all", seed=1, seq_len=WORDS)
        for position in range(order.sequences_per_epoch):
            assert np.diff(order.sequence(position)).tolist() == [1] * WORDS
    assert descriptors() == MAPPED


@pytest.mark.parametrize("seq_len", [1, 7, 64])
@pytest.mark.parametrize(("part", "tokens"), [("train", 480), ("validation", 50), ("all", 530)])
def test_an_epoch_has_each_sequence_of_its_part_once(store: Store, part: str, tokens: int, seq_len: int):
    if (tokens - 1) // seq_len == 0:
        with pytest.raises(
            ValueError, match=r"^training.seq_len = 64: the store .* has 50 tokens for validation, too few"
        ):
            StoreOrder(store, part, seed=1, seq_len=seq_len)
        return
    order = StoreOrder(store, part, seed=1, seq_len=seq_len)
    spans = [(shard.train_tokens, shard.tokens) for shard in store.manifest.shards]
    pieces = {"train": [slice(0, a) for a, _ in spans], "validation": [slice(a, b) for a, b in spans]}
    cuts = pieces.get(part, [slice(None)] * len(spans))
    stream = np.concatenate([ids[cut] for ids, cut in zip(store.shards, cuts, strict=True)])
    count = order.sequences_per_epoch
    assert (len(stream), count) == (tokens, (tokens - 1) // seq_len)
    for epoch in range(3):
        found = [tuple(order.sequence(epoch * count + turn)) for turn in range(count)]
        starts = sorted(int(np.flatnonzero(stream == each[0])[0]) for each in found)
        assert starts == list(range(starts[0], starts[0] + count * seq_len, seq_len)) and starts[0] < seq_len
        assert all(each == tuple(stream[at : at + seq_len + 1]) for at, each in zip(starts, sorted(found), strict=True))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else(store: Store):
    def first(order: StoreOrder, epoch: int) -> list[list[int]]:
        at = epoch * order.sequences_per_epoch
        return [order.sequence(at + turn).tolist() for turn in range(8)]

    order, other = (StoreOrder(store, "train", seed=seed, seq_len=8) for seed in (1, 2))
    assert len({str(first(each, epoch)) for each in (order, other) for epoch in (0, 1)}) == 4
    assert first(pickle.loads(pickle.dumps(order)), 1) == first(order, 1)
    unseeded = StoreOrder(store, "validation", seed=None, seq_len=8)
    assert first(unseeded, 0)[:2] == [list(range(90, 99)), [*range(98, 100), *range(190, 197)]]
    assert [int(order.sequence(position)[0]) for position in (0, 1, 59, 60, 600)] == FROZEN, (
        "runs would resume with other data"
    )


@pytest.mark.parametrize("part", ["train", "validation"])
def test_documents_start_at_the_bounds_of_the_store(store: Store, part: str):
    order = StoreOrder(store, part, seed=1, seq_len=25)  # of ids in which document d is d * WORDS ... d * WORDS + 9
    for position in range(2 * order.sequences_per_epoch):
        tokens, starts = order.sequence(position), order.document_starts(position)
        begins = [index for index, token in enumerate(tokens.tolist()) if index == 0 or token % WORDS == 0]
        assert starts.tolist() == [max(begin for begin in begins if begin <= index) for index in range(26)]
        mixture = Mixture([MixtureSource(order, 1.0)])
        assert mixture.document_starts(position).tolist() == starts.tolist()


@pytest.mark.parametrize("skip", [[(3, 5)], [(0, 10)], [(8, 22), (20, 23), (52, 53)], [(9, 10), (45, 53), (0, 1)]])
def test_documents_that_are_left_out_are_in_no_sequence(store: Store, skip: list[tuple[int, int]]):
    order = pickle.loads(pickle.dumps(StoreOrder(store, "train", seed=1, seq_len=7, skip=skip)))
    numbers = [number for number in range(53) if not any(first <= number < end for first, end in skip)]
    stream = [d * WORDS + word for d in numbers if d % 10 != 9 for word in range(WORDS)]
    count = order.sequences_per_epoch
    assert (order.tokens_per_epoch, count) == (len(stream), (len(stream) - 1) // 7)
    for epoch in range(3):
        found = sorted(order.sequence(epoch * count + turn).tolist() for turn in range(count))
        at = stream.index(found[0][0])
        assert found == [stream[at + 7 * turn :][:8] for turn in range(count)] and at < 7
    whole = StoreOrder(store, "train", seed=1, seq_len=7)
    assert all(
        whole.sequence(p).tolist() == StoreOrder(store, "train", seed=1, seq_len=7, skip=[]).sequence(p).tolist()
        for p in range(60)
    )
    for position in range(count):
        tokens, starts = order.sequence(position), order.document_starts(position)
        assert order.documents(position) == list(dict.fromkeys(int(token) // WORDS for token in tokens))
        assert all(start in (0, i) or tokens[start] % WORDS == 0 for i, start in enumerate(starts))
        assert all(
            (start == i) for i, (token, start) in enumerate(zip(tokens, starts, strict=True)) if token % WORDS == 0
        )


@given(count=st.integers(1, 500), key=st.binary(min_size=16, max_size=16))
def test_it_permutes(count: int, key: bytes):
    assert sorted(permuted(index, count, key) for index in range(count)) == list(range(count))


weights = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=9)


@settings_of_hypothesis(max_examples=20)
@given(weights)
def test_rounded_weights_add_up_and_are_near(given_weights: list[float]):
    parts = rounded(given_weights)
    assert sum(parts) == PATTERN and min(parts) >= 1
    small = sum(part == 1 for part in parts)
    for weight, part in zip(given_weights, parts, strict=True):
        assert part == 1 or abs(part - weight * PATTERN / sum(given_weights)) <= 1 + small


@settings_of_hypothesis(max_examples=20)
@given(weights)
def test_every_prefix_of_the_pattern_has_the_weights_within_one(given_weights: list[float]):
    parts = rounded(given_weights)
    sources, prefix = pattern(parts), np.arange(1, PATTERN + 1)
    for source, part in enumerate(parts):
        assert np.abs(np.cumsum(sources == source) - prefix * part / PATTERN).max() < 1


class Numbered:
    """An order whose sequence is its own position."""

    seq_len = 1

    def sequence(self, position: int) -> np.ndarray:
        return np.array([position])


class TestMixture:
    def test_positions_of_a_source_count_up(self):
        mixture = Mixture([MixtureSource(Numbered(), weight) for weight in (3.0, 2.0, 5.0)])
        seen = Counter[int]()
        for position in range(2 * PATTERN + 100):
            source, index = mixture.find(position)
            assert index == seen[source] and mixture.sequence(position).tolist() == [index]
            seen[source] += 1
        assert mixture.end is None

    def test_a_source_whose_budget_ends_leaves_its_positions_to_the_others(self):
        limits = [20, None, 7000]
        mixture = Mixture([MixtureSource(Numbered(), 1.0, limit) for limit in limits])
        seen, ends = Counter[int](), dict[int, int]()
        for position in range(30_000):
            source, index = mixture.find(position)
            assert index == seen[source]
            seen[source] += 1
            ends[source] = position
        assert (seen[0], seen[2]) == (20, 7000) and mixture.end is None
        assert ends[0] < 65 and 14_000 < ends[2] < 14_025  # a third each, then a half each

    def test_all_budgets_end_where_it_says(self):
        mixture = Mixture([MixtureSource(Numbered(), weight, limit) for weight, limit in ((1.0, 30), (7.0, 5000))])
        assert mixture.end == 5030
        assert Counter(mixture.find(position)[0] for position in range(5030)) == {0: 30, 1: 5000}
        assert mixture.find(5030) == (1, 5000), "the last source goes on"

    def test_it_pickles(self, store: Store):
        mixture = Mixture([MixtureSource(StoreOrder(store, "train", seed=seed, seq_len=5), 1.0) for seed in (1, 2)])
        again = pickle.loads(pickle.dumps(mixture))
        assert all(np.array_equal(again.sequence(at), mixture.sequence(at)) for at in (0, 1, 5000))


def test_a_corpus_of_one_document_is_split(tmp_path: Path):
    store = write(tmp_path / "kept", 1, held_out=0.1, words=100, shard_tokens=1000)
    [shard] = store.manifest.shards
    assert (shard.documents, shard.train_documents, shard.train_tokens) == (2, 1, 90)
    assert store.bounds(0).tolist() == [0, 90, 100]
    full = write(tmp_path / "full", 8, held_out=0.25, shard_tokens=40)  # the last batch fills the last shard
    assert [shard.train_tokens for shard in full.manifest.shards] == [40, 20]
    writer = StoreWriter(tmp_path / "held", settings(held_out=0.1, shard_tokens=1000))
    writer.add(np.arange(100), np.array([100]), np.array([True]))
    assert [shard.train_tokens for shard in writer.finish().shards] == [90], "held out by its content, too"
    writer.close()


def test_a_killed_writer_goes_on_after_its_last_whole_shard(tmp_path: Path):
    whole = write(tmp_path / "whole", 53, held_out=0.1)
    killed = StoreWriter(tmp_path / "killed", settings(held_out=0.1))
    numbers = np.arange(26)
    for first in range(0, 26, 2):
        ids = np.arange(first * WORDS, (first + 2) * WORDS)
        killed.add(ids, np.full(2, WORDS), numbers[first : first + 2] % 10 == 9)
        killed.end_batch(0, first + 2)
    killed.close()
    with (tmp_path / "killed" / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"torn')
    with pytest.raises(
        ValueError, match="is not finished: run the same prepare_data command again, which continues it"
    ):
        Store(tmp_path / "killed", "training.dataset_path")
    again = StoreWriter(tmp_path / "killed", settings(held_out=0.1))
    assert (again.file, again.document, len(again.shards)) == (0, 20, 2)
    for first in range(20, 53, 2):
        numbers = np.arange(first, min(first + 2, 53))
        ids = np.arange(first * WORDS, (int(numbers[-1]) + 1) * WORDS)
        again.add(ids, np.full(len(numbers), WORDS), numbers % 10 == 9)
        again.end_batch(0, int(numbers[-1]) + 1)
    assert again.finish() == whole.manifest
    again.close()
    assert not Store(tmp_path / "killed", "").damaged_shards()


class TestRefusals:
    def test_no_store(self, tmp_path: Path):
        with pytest.raises(
            ValueError, match=r"^training.dataset_path: the token store .* has no manifest.json; make one with"
        ):
            Store(tmp_path / "none", "training.dataset_path")

    def test_another_tokenizer_and_a_small_vocabulary(self, store: Store):
        store.check_tokenizer("t", 600)
        with pytest.raises(ValueError, match=r"was made with another tokenizer than model.tokenizer_path"):
            store.check_tokenizer("u", 600)
        with pytest.raises(ValueError, match=r"has id 529, but model.vocab_size = 529; nearest: 530"):
            store.check_tokenizer("t", 529)

    @pytest.mark.parametrize("name", ["00000.bin", "00001.npy"])
    def test_damage(self, tmp_path: Path, name: str):
        store = write(tmp_path, 20)
        content = bytearray((tmp_path / name).read_bytes())
        content[-1] ^= 1
        (tmp_path / name).write_bytes(content)
        assert store.damaged_shards() == [int(name[:5])]

    @pytest.mark.parametrize(("name", "size"), [("00001.bin", 200), ("00001.npy", 128 + 8 * 11)])
    def test_a_file_that_is_too_short_or_missing(self, tmp_path: Path, name: str, size: int):
        write(tmp_path, 20)
        with (tmp_path / name).open("r+b") as file:
            file.truncate(size - 2)
        with pytest.raises(ValueError, match=rf"{name} has {size - 2} bytes instead of {size}; copy the store again"):
            Store(tmp_path, "training.dataset_path")
        (tmp_path / name).unlink()
        with pytest.raises(ValueError, match=rf"{name} is missing; copy the store again"):
            Store(tmp_path, "training.dataset_path")

    def test_two_writers_and_other_settings(self, tmp_path: Path):
        first = StoreWriter(tmp_path, settings())
        with pytest.raises(ValueError, match="another process is writing this store"):
            StoreWriter(tmp_path, settings())
        first.close()
        with pytest.raises(ValueError, match="has an unfinished store of other settings or sources"):
            StoreWriter(tmp_path, settings(text_key="body"))

    def test_a_store_that_another_process_finishes_between_the_look_and_the_lock(self, tmp_path: Path):
        class Finishes(type(tmp_path)):  # type: ignore[misc]
            def mkdir(self, *_: object, **__: object) -> None:
                write(tmp_path / "store", 8)

        with pytest.raises(ValueError, match="has a store already"):
            StoreWriter(Finishes(tmp_path / "store"), settings())
        assert not Store(tmp_path / "store", "").damaged_shards()
        assert not (tmp_path / "store" / "journal.jsonl").exists()


def test_a_lookup_does_not_depend_on_the_number_of_sequences():
    """The walk of the permutation stays short for any count."""
    for count in (2**20 + 1, 10**12 + 7, 2**40 - 1):
        assert len({permuted(index, count, b"k" * 16) for index in range(1000)}) == 1000
