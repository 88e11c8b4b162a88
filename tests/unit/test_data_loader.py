"""The loader: all ranks together read exactly the assigned positions, ahead of time; an error is raised in the step."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ft.children import LAUNCHER_SIGNALS
from tests.unit.data_corpus import files_config, open_small, write_jsonl
from training.config import DataloaderConfig
from training.data.loader import THREAD_NAME, Batch, BatchLoader, DataFailed, SlotPartition, make_batch, open_loader
from training.data.order import NO_TOKEN, DocumentOrder
from training.loss import IGNORED

SEQ_LEN = 4


class Counting:
    """Returns 10p, 10p + 1, ... as sequence p; records the requested positions, and fails at `bad`."""

    def __init__(self, bad: int = -1) -> None:
        self.asked: list[int] = []
        self.bad = bad

    def sequence(self, position: int) -> np.ndarray:
        if position == self.bad:
            raise OSError("the disk is gone")
        self.asked.append(position)
        return np.arange(10 * position, 10 * position + SEQ_LEN + 1, dtype=np.int64)


@contextmanager
def loader_of(sequences: Counting | DocumentOrder, **keys: int) -> Iterator[BatchLoader]:
    ahead = DataloaderConfig(**{key: keys.pop(key) for key in ("num_workers", "prefetch_factor") if key in keys})
    partition = SlotPartition(**{"slot_size": 4, "local_batch_size": 2, "dp_rank": 0, "dp_size": 1} | keys)
    with closing(open_loader(sequences, partition, ahead)) as loader:
        yield loader


def test_the_first_token_of_a_document_is_no_target() -> None:
    tokens = np.array([[5, 6, 7, 8, NO_TOKEN], [1, 2, 3, 4, 5]])
    batch = make_batch(tokens, (0, (0, 1), True), np.array([[0, 0, 2, 2, 4], [0, 1, 1, 1, 4]]))
    assert batch.labels.tolist() == [[6, IGNORED, 8, IGNORED], [IGNORED, 3, 4, IGNORED]]
    assert batch.inputs.tolist() == tokens[:, :-1].tolist()
    assert batch.document_starts is not None
    assert batch.document_starts.tolist() == [[0, 0, 2, 2], [0, 1, 1, 1]]
    one = make_batch(tokens, (0, (0, 1), True), np.array([[0, 0, 2, 2, 4], [0, 1, 1, 1, 4]]), separator=5)
    assert one.labels.tolist() == [[6, IGNORED, 8, IGNORED], [IGNORED, 3, 4, 5]], "5 ends a document, too"
    assert make_batch(tokens, (0, (0, 1), True)).labels.tolist() == [[6, 7, 8, IGNORED], [2, 3, 4, 5]]


def test_a_token_that_is_no_target_is_an_input() -> None:
    batch = make_batch(np.array([[~5, ~0, 7, ~8, 9], [1, 2, 3, NO_TOKEN, NO_TOKEN]]), (0, (0, 1), True))
    assert batch.inputs.tolist() == [[5, 0, 7, 8], [1, 2, 3, 0]]
    assert batch.labels.tolist() == [[IGNORED, 7, IGNORED, 9], [2, 3, IGNORED, IGNORED]]


@given(
    dp_size=st.integers(1, 4),
    local_batch_size=st.integers(1, 3),
    microbatches=st.integers(1, 3),
    numbers=st.lists(st.integers(0, 10**6), max_size=3, unique=True),
)
def test_all_ranks_together_read_exactly_the_dealt_positions(
    dp_size: int, local_batch_size: int, microbatches: int, numbers: list[int]
) -> None:
    slot_size = dp_size * local_batch_size * microbatches
    slots = [number * slot_size for number in numbers]
    read: dict[int, list[int]] = {slot: [] for slot in slots}
    for dp_rank in range(dp_size):
        with loader_of(
            Counting(), slot_size=slot_size, local_batch_size=local_batch_size, dp_rank=dp_rank, dp_size=dp_size
        ) as loader:
            batches = list(loader.load(slots))
        assert [batch.slot for batch in batches] == [slot for slot in slots for _ in range(microbatches)]
        for batch in batches:
            assert batch.inputs.shape == batch.labels.shape == (local_batch_size, SEQ_LEN)
            assert batch.inputs[:, 0].tolist() == [10 * position for position in batch.sequence_positions]
            read[batch.slot] += batch.sequence_positions
        assert [batch.ends_slot for batch in batches] == [*[False] * (microbatches - 1), True] * len(slots)
    assert read == {slot: list(range(slot, slot + slot_size)) for slot in slots}


def test_labels_are_the_inputs_one_further_on() -> None:
    with loader_of(Counting()) as loader:
        batch = next(loader.load([8]))
    assert batch.inputs.tolist() == [[80, 81, 82, 83], [90, 91, 92, 93]]
    assert batch.labels.tolist() == [[81, 82, 83, 84], [91, 92, 93, 94]]
    assert batch.inputs.dtype == batch.labels.dtype == torch.int64
    assert batch.inputs.is_contiguous() and batch.labels.is_contiguous()


def test_reads_ahead_but_not_further_than_told() -> None:
    reached, go_on, full = threading.Event(), threading.Event(), threading.Event()

    class Watched(Counting):
        def sequence(self, position: int) -> np.ndarray:
            if position == 2:
                reached.set()
                assert go_on.wait(30)
            if position == 10:
                full.set()
            return super().sequence(position)

    sequences = Watched()
    with loader_of(sequences, slot_size=8, local_batch_size=1, prefetch_factor=3) as loader:
        batches = loader.load([0])
        assert reached.wait(30), "the third batch is read without any being asked for"
        go_on.set()
        assert [batch.sequence_positions for batch in batches] == [(position,) for position in range(8)]
        loader.load([8])
        assert full.wait(30)
    assert max(sequences.asked) == 10, "its thread has ended by now"


def test_a_later_load_abandons_the_earlier_one() -> None:
    with loader_of(Counting()) as loader:
        earlier = loader.load([0, 4])
        next(earlier)
        later = loader.load([0, 4])
        assert [batch.sequence_positions for batch in later] == [(0, 1), (2, 3), (4, 5), (6, 7)]
        with pytest.raises(RuntimeError, match=r"^stale iterator: "):
            next(earlier)
        unread = loader.load([0])
    with pytest.raises(RuntimeError, match=r"^stale iterator: "):
        next(unread)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_failure_reaches_the_step_with_its_cause_and_the_loader_goes_on(num_workers: int) -> None:
    with loader_of(Counting(bad=2), num_workers=num_workers) as loader:
        batches = loader.load([0, 4])
        assert next(batches).sequence_positions == (0, 1)
        with pytest.raises(DataFailed, match=r"^reading data failed: (OSError: )?the disk is gone$") as caught:
            next(batches)
        assert isinstance(caught.value.__cause__, OSError)
        assert list(batches) == []
        assert [batch.sequence_positions for batch in loader.load([4])] == [(4, 5), (6, 7)]


def test_close_ends_the_thread() -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]

    before = threads()
    with loader_of(Counting()) as loader:
        (thread,) = set(threads()) - set(before)
        assert thread.daemon
        loader.load([0, 4])
    assert not thread.is_alive()
    assert threads() == before


def test_workers_give_the_same_batches_and_end(tmp_path: Path) -> None:
    texts = [f"document {number} of the corpus" for number in range(30)]
    corpus = open_small(files_config(write_jsonl(tmp_path / "a.jsonl", texts)), tmp_path / "cache")
    order = DocumentOrder(corpus, "train", held_out=0.1, seed=3, seq_len=SEQ_LEN)
    others = set(multiprocessing.active_children())  # another test's, for the whole session

    def workers() -> int:
        return len(set(multiprocessing.active_children()) - others)

    def flat(batches: Iterator[Batch]) -> list[object]:
        return [(b.slot, b.sequence_positions, b.inputs.tolist(), b.labels.tolist()) for b in batches]

    with loader_of(order) as loader, loader_of(order, num_workers=2) as working:
        assert workers() == 0, "workers start when they are needed"
        abandoned = working.load([40, 44])
        assert next(abandoned).sequence_positions == (40, 41)
        for slots in ([0, 4], [4000], []):
            assert flat(working.load(slots)) == flat(loader.load(slots))
        assert workers() == 2
        for worker in set(multiprocessing.active_children()) - others:
            for pid in (worker.pid, multiprocessing.forkserver._forkserver._forkserver_pid):  # type: ignore[attr-defined]
                for number in LAUNCHER_SIGNALS:  # a scheduler's, for the rank
                    os.kill(pid, number)
        assert flat(working.load([8, 12])) == flat(loader.load([8, 12]))
        with pytest.raises(RuntimeError, match=r"^stale iterator: "):
            next(abandoned)
        with pytest.raises(RuntimeError, match=r"^reading data failed: .*AssertionError") as caught:
            next(working.load([-8]))
        assert isinstance(caught.value.__cause__, AssertionError)
    assert workers() == 0


def test_workers_end_with_a_trainer_that_is_killed() -> None:
    """They hold its standard output, as long as they live."""
    program = """
from torch.utils.data import DataLoader
from training.data.loader import end_with_trainer, iterate
workers = {"num_workers": 1, "multiprocessing_context": "forkserver", "worker_init_fn": end_with_trainer}
batches = iterate(DataLoader([0, 1], persistent_workers=True, **workers))
next(batches)
print("reads", flush=True)
input()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stdout.readline() == "reads\n"
    process.kill()
    process.communicate(timeout=60)
