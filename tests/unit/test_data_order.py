"""The order: pure in (seed, epoch, position), complete in every epoch, with a held-out split that no order changes."""

from __future__ import annotations

import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data_corpus import document, files_config, open_small, write_jsonl
from training.config import TrainingConfig
from training.data.cache import BUCKETS, Corpus
from training.data.order import DocumentOrder, document_spans, in_split, needs_token_split, shuffled, stride

DOCUMENT_IDS = 37
HELD_OUT = 0.2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """A corpus in which no id occurs twice, so that a token identifies its place; two files of different types."""
    folder = tmp_path_factory.mktemp("ids")
    np.save(folder / "a.npy", np.arange(300, 4000, dtype=np.uint16))
    np.save(folder / "b.npy", np.arange(4000, 5000, dtype=np.uint32))
    config = TrainingConfig(dataset="tokens", dataset_path=str(folder))
    return open_small(config, folder / "cache", vocab_size=5000, limits={"PIECE_IDS": DOCUMENT_IDS})


def order_of(
    corpus: Corpus, *, split: str = "train", seed: int = 0, seq_len: int = 16, held_out: float = HELD_OUT
) -> DocumentOrder:
    return DocumentOrder(corpus, split, held_out=held_out, seed=seed, seq_len=seq_len)


def ids_of(corpus: Corpus, split: str) -> set[int]:
    return {i for number in in_split(corpus, split, HELD_OUT) for i in document(corpus, int(number))}


def line_of(order: DocumentOrder, epoch: int) -> list[np.ndarray]:
    """Returns an epoch's sequences in the order of its shuffled documents, before the stride."""
    count = order.sequences_per_epoch
    rows = {turn * stride(count) % count: order.sequence(epoch * count + turn) for turn in range(count)}
    assert sorted(rows) == list(range(count))  # each has its turn, once
    return [rows[index] for index in range(count)]


def test_a_batch_is_spread_over_the_epoch() -> None:
    """Eight adjacent sequences belong to one document; eight consecutive turns are at least a fifteenth of the epoch apart."""
    for count in (1, 2, 3, 10, 97, 43_210, 10**9):
        step = stride(count)
        assert 1 <= step <= max(count, 1) and np.gcd(step, count) == 1
    places = sorted(turn * stride(43_210) % 43_210 for turn in range(100, 108))
    assert min(after - before for before, after in pairwise(places)) > 43_210 / 15


def test_documents_start_where_the_corpus_has_a_bound(corpus: Corpus) -> None:
    order, bounds = order_of(corpus), set(corpus.bounds.tolist())
    where = {
        int(token): at for at, token in enumerate(corpus.read(0, 3700).tolist() + corpus.read(3700, 1000).tolist())
    }
    for position in range(0, 2 * order.sequences_per_epoch, 5):
        tokens, starts = order.sequence(position).tolist(), order.document_starts(position).tolist()
        begins = [index for index, token in enumerate(tokens) if index == 0 or where[token] in bounds]
        assert starts == [max(begin for begin in begins if begin <= index) for index in range(len(tokens))]


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("epoch", [0, 1, 3])
@pytest.mark.parametrize("seq_len", [1, 16, 37, 200])
def test_an_epoch_holds_each_token_once(corpus: Corpus, seq_len: int, epoch: int, split: str) -> None:
    rows = line_of(order_of(corpus, split=split, seq_len=seq_len), epoch)
    assert all(row.shape == (seq_len + 1,) and row.dtype == np.int64 for row in rows)
    assert all(before[-1] == after[0] for before, after in pairwise(rows))
    inputs = [int(i) for row in rows for i in row[:-1]]
    assert len(set(inputs)) == len(inputs)
    everything = ids_of(corpus, split)
    assert set(inputs) <= everything
    assert len(everything) - len(inputs) <= seq_len


def test_documents_stay_whole_and_in_their_own_order(corpus: Corpus) -> None:
    line = np.concatenate([row[:-1] for row in line_of(order_of(corpus), 0)])
    breaks = np.flatnonzero(np.diff(line) != 1) + 1
    starts = {document(corpus, int(number))[0] for number in in_split(corpus, "train", HELD_OUT)}
    assert {int(i) for i in line[breaks]} <= starts
    assert len(breaks) > len(starts) / 2


@given(
    positions=st.lists(st.integers(0, 10**7), min_size=1, max_size=8),
    seed=st.integers(0, 2**64),
    seq_len=st.integers(1, 100),
)
def test_a_sequence_does_not_depend_on_what_was_asked_before(
    corpus: Corpus, positions: list[int], seed: int, seq_len: int
) -> None:
    used = order_of(corpus, seed=seed, seq_len=seq_len)
    for position in positions:
        used.sequence(position)
    for position in reversed(positions):
        fresh = order_of(corpus, seed=seed, seq_len=seq_len)
        assert used.sequence(position).tolist() == fresh.sequence(position).tolist()


def test_a_copy_in_another_process_gives_the_same(corpus: Corpus) -> None:
    order = order_of(corpus, seed=7)
    pickled = pickle.dumps(order)
    assert len(pickled) < 3000
    again: DocumentOrder = pickle.loads(pickled)
    assert again.sequence(1234).tolist() == order.sequence(1234).tolist()


def test_shuffles_differ_by_epoch_and_by_seed_but_validation_stays(corpus: Corpus) -> None:
    order = order_of(corpus, seq_len=3000)
    epochs = {tuple(order.sequence(epoch * order.sequences_per_epoch).tolist()) for epoch in range(5)}
    seeds = {tuple(order_of(corpus, seed=seed, seq_len=3000).sequence(0).tolist()) for seed in range(5)}
    assert len(epochs) == len(seeds) == 5
    held = order_of(corpus, split="validation")
    assert held.sequence(0).tolist() == held.sequence(held.sequences_per_epoch).tolist()
    assert held.sequence(0).tolist() == order_of(corpus, split="validation", seed=3).sequence(0).tolist()


def test_the_shuffle_is_this_one_for_ever() -> None:
    """The shuffle never changes: runs resume by position, so another permutation would repeat some documents and omit others."""
    assert shuffled(8, seed=0, epoch=0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
    assert shuffled(8, seed=0, epoch=1).tolist() == [5, 3, 7, 2, 4, 1, 0, 6]
    assert shuffled(8, seed=2**63, epoch=5).tolist() == [6, 0, 5, 7, 2, 4, 3, 1]
    assert sorted(shuffled(1000, seed=3, epoch=9).tolist()) == list(range(1000))


def test_splits_are_disjoint_and_complete_and_follow_the_content_alone(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(300)]

    def held_out(name: str, texts: list[str]) -> set[str]:
        corpus = open_small(files_config(write_jsonl(tmp_path / name, texts)), tmp_path / "cache")
        splits = [
            {bytes(document(corpus, int(number))[1:-1]).decode() for number in in_split(corpus, split, HELD_OUT)}
            for split in ("train", "validation")
        ]
        assert splits[0] | splits[1] == set(texts)
        assert not splits[0] & splits[1]
        return splits[1]

    forwards = held_out("a.jsonl", texts)
    assert 0.1 < len(forwards) / len(texts) < 0.3
    assert held_out("b.jsonl", texts[::-1]) == forwards
    assert held_out("c.jsonl", [*texts[:150], "another"]) - {"another"} == forwards & set(texts[:150])


def test_validation_stays_held_out_when_a_larger_share_is(corpus: Corpus) -> None:
    held = [set(in_split(corpus, "validation", share).tolist()) for share in (0.0, 0.1, 0.3, 0.999)]
    assert all(less < more for less, more in pairwise(held))
    assert held[0] == set()


class TestTooLittle:
    def test_for_the_sequence(self, corpus: Corpus) -> None:
        tokens = len(ids_of(corpus, "train"))
        order_of(corpus, seq_len=tokens - 1)
        with pytest.raises(ValueError) as caught:
            order_of(corpus, seq_len=tokens)
        assert str(caught.value) == (
            f"training.seq_len = {tokens}: the train split has {tokens} tokens (128 documents and 4700 tokens in all), "
            f"too few for one sequence; legal: 1 to {tokens - 1}, or add text"
        )

    def test_nothing_held_out(self, corpus: Corpus) -> None:
        nearest = (int(corpus.buckets.min()) + 1) / BUCKETS
        with pytest.raises(ValueError) as caught:
            order_of(corpus, split="validation", held_out=0.0)
        assert str(caught.value) == (
            "training.dataset_held_out = 0: no document is held out (128 documents and 4700 tokens in all); "
            f"nearest: {nearest:g}, or set validation.enable = false"
        )
        order_of(corpus, split="validation", held_out=nearest)

    def test_nothing_left_to_train_on(self, tmp_path: Path) -> None:
        corpus = open_small(files_config(write_jsonl(tmp_path / "a.jsonl", ["one", "two"])), tmp_path / "cache")
        nearest = int(corpus.buckets.max()) / BUCKETS
        with pytest.raises(ValueError) as caught:
            order_of(corpus, held_out=0.999, seq_len=1)
        assert str(caught.value) == (
            "training.dataset_held_out = 0.999: nothing is left to train on (2 documents and 10 tokens in all); "
            f"nearest: {nearest:g}"
        )
        order_of(corpus, held_out=nearest, seq_len=1)

    def test_a_single_document(self, tmp_path: Path) -> None:
        """The end of the document is held out, if held-out tokens are requested."""
        (tmp_path / "a.txt").write_text("all there is" * 100)
        corpus = open_small(files_config(tmp_path), tmp_path / "cache")
        with pytest.raises(ValueError, match=r"^training.dataset_held_out = 0.01: no document is held out "):
            order_of(corpus, split="validation", held_out=0.01)
        train, held_out = (
            DocumentOrder(corpus, split, held_out=0.1, seed=0, seq_len=1, may_split_by_tokens=True)
            for split in ("train", "validation")
        )
        assert (train.tokens_per_epoch, held_out.tokens_per_epoch) == (1082, 120)
        assert held_out.sequence(0).tolist() == corpus.read(1082, 2).tolist()
        assert {train.sequence(position)[0] for position in range(1081)} == set(corpus.read(0, 1081).tolist())

    def test_few_documents_none_held_out_by_content(self, tmp_path: Path) -> None:
        """The last share of all tokens is held out: the end of one document, and all later ones."""
        texts = ["first " * 9, "second " * 9, "third"]
        corpus = open_small(files_config(write_jsonl(tmp_path / "a.jsonl", texts)), tmp_path / "cache")
        assert needs_token_split(corpus, 0.001) and not needs_token_split(corpus, 0.0)
        for share, documents in ((0.001, 1), (0.05, 1), (0.1, 2)):
            if needs_token_split(corpus, share):
                first, lengths = document_spans(corpus, "validation", share, may_split_by_tokens=True)
                others, more = document_spans(corpus, "train", share, may_split_by_tokens=True)
                assert len(first) == documents and lengths.sum() + more.sum() == corpus.tokens
                assert others[-1] + more[-1] == first[0]


def test_the_documents_of_a_split_are_found_once(tmp_path: Path) -> None:
    """Each segment of a run's data has an order, which would have arrays of its own: gigabytes in each rank, with a large corpus."""
    path = write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(50)])
    corpus = open_small(files_config(path), tmp_path / "cache")
    first, lengths = document_spans(corpus, "train", 0.2)
    again = document_spans(corpus, "train", 0.2)
    assert again[0] is first and again[1] is lengths
    others = [document_spans(corpus, "validation", 0.2), document_spans(corpus, "train", 0.5)]
    assert len({len(first), *(len(spans[0]) for spans in others)}) == 3
