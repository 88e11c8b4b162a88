"""Batches of the slots that a step was dealt, read ahead of the step. Owns no order and no position.

Flow: train.py asks its manager for a deal, then `load(deal.slots)`; order.py holds the tokens. streaming.py has the
same face.

Letters: B local batch size, T seq_len.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ft.children import unsignalled
from training.loss import IGNORED

THREAD_NAME = "pharos-data"
ABANDONED = "these batches were abandoned: the loader was closed, or asked for others since"


@dataclass(frozen=True)
class Batch:
    """One forward and backward of one rank: rows `positions` of `slot` (streams have no positions)."""

    inputs: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64, IGNORED where there is no target
    slot: int
    positions: tuple[int, ...]


class BatchSource(Protocol):
    """The interface of every loader, as train.py uses it."""

    def load(self, slots: Iterable[int]) -> Iterator[Batch]:
        """The microbatches of this rank, slot by slot; on every rank the same number.

        Abandons what an earlier call still owed.
        """

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Sequences(Protocol):
    """The part of an Order that the loader uses."""

    def sequence(self, position: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Cut:
    """Which rows of a slot this rank computes, and in which microbatches."""

    slot_size: int
    local_batch_size: int
    dp_rank: int
    dp_size: int

    def __post_init__(self) -> None:
        per_pass = self.local_batch_size * self.dp_size
        if self.slot_size % per_pass:
            below = self.slot_size // per_pass * per_pass
            near = " or ".join(str(size) for size in (below, below + per_pass) if size)
            raise ValueError(
                f"training.global_batch_size = {self.slot_size}: must be a multiple of training.local_batch_size = "
                f"{self.local_batch_size} times {self.dp_size} data-parallel ranks; nearest: {near}"
            )
        assert 0 <= self.dp_rank < self.dp_size, f"rank {self.dp_rank} of {self.dp_size}"

    @property
    def microbatches(self) -> int:
        """Batches of one slot on one rank."""
        return self.slot_size // (self.dp_size * self.local_batch_size)

    def positions(self, slot: int) -> list[tuple[int, ...]]:
        """Per microbatch; over all ranks together exactly slot .. slot + slot_size - 1."""
        rows = self.slot_size // self.dp_size
        first = slot + self.dp_rank * rows
        return [
            tuple(range(at, at + self.local_batch_size)) for at in range(first, first + rows, self.local_batch_size)
        ]


def make_batch(rows: np.ndarray, slot: int, positions: tuple[int, ...], no_target_ids: tuple[int, ...] = ()) -> Batch:
    """`rows` [B, T + 1] int64; a target in `no_target_ids` is IGNORED."""
    inputs, labels = rows[:, :-1].copy(), rows[:, 1:].copy()
    if no_target_ids:
        labels[np.isin(labels, no_target_ids)] = IGNORED
    return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), slot, positions)


Task = tuple[int, tuple[int, ...]]  # slot, positions of one microbatch


class _Reader(Dataset[Batch]):
    """(slot, positions) -> Batch; what the thread and the worker processes both run."""

    def __init__(self, order: Sequences, no_target_ids: tuple[int, ...]) -> None:
        self._order, self._no_target_ids = order, no_target_ids

    def __getitem__(self, task: Task) -> Batch:
        slot, positions = task
        rows = np.stack([self._order.sequence(position) for position in positions])
        return make_batch(rows, slot, positions, self._no_target_ids)


class Loader:
    """Prefetches exactly the slots it is asked for, by one thread, or by `num_workers` processes (from a forkserver).

    The batches are the same for any number of workers. Whoever makes a Loader closes it.
    """

    def __init__(
        self,
        order: Sequences,
        *,
        slot_size: int,
        local_batch_size: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        no_target_ids: tuple[int, ...] = (),
    ) -> None:
        """`slot_size` sequences are shared by `dp_size` ranks. Raises ValueError when they do not divide."""
        self._cut = Cut(slot_size, local_batch_size, dp_rank, dp_size)
        reader = _Reader(order, no_target_ids)
        self._pool: _Thread | _Workers = (
            _Workers(reader, num_workers, prefetch_factor, pin_memory)
            if num_workers
            else _Thread(reader, prefetch_factor, pin_memory)
        )

    def load(self, slots: Iterable[int]) -> Iterator[Batch]:
        """See BatchSource.load. Reading begins now, not at the first `next`; that raises a failure, with its cause."""
        return self._pool.run([(slot, positions) for slot in slots for positions in self._cut.positions(slot)])

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position is the manager's, one number for all ranks; any number of them may take it up."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"positions need no loader state, got {list(state)}"

    def close(self) -> None:
        self._pool.close()


class _Thread:
    """One thread, at most `depth` batches ahead."""

    def __init__(self, reader: _Reader, depth: int, pin_memory: bool) -> None:
        self._reader, self._depth = reader, depth
        # The thread must pin on this rank's device: by itself it would open a context on device 0.
        self._device = torch.accelerator.current_device_index() if pin_memory else None
        self._changed = threading.Condition()
        self._tasks: deque[Task] = deque()
        self._ready: deque[Batch | Exception] = deque()
        self._run = 0  # grows with each call of run, so that nothing of an abandoned one is handed out
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def run(self, tasks: list[Task]) -> Iterator[Batch]:
        with self._changed:
            assert not self._closed, "the loader is closed"
            self._run += 1
            self._tasks = deque(tasks)
            self._ready.clear()
            self._changed.notify_all()
            run = self._run
        return (self._take(run) for _ in tasks)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._tasks.clear()
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(timeout=10)

    def _take(self, run: int) -> Batch:
        with self._changed:
            while not self._ready and run == self._run and not self._closed:
                self._changed.wait(timeout=1.0)
                assert self._thread.is_alive(), "the data thread ends only when it is closed"
            if run != self._run or self._closed:
                raise RuntimeError(ABANDONED)
            result = self._ready.popleft()
            self._changed.notify_all()
        if isinstance(result, Exception):
            raise RuntimeError(f"reading training data failed: {result}") from result
        return result

    def _work(self) -> None:
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._tasks and len(self._ready) < self._depth))
                if self._closed:
                    return
                run, task = self._run, self._tasks.popleft()
            result = self._read(task)
            with self._changed:
                if run != self._run:
                    continue
                self._ready.append(result)
                self._changed.notify_all()

    def _read(self, task: Task) -> Batch | Exception:
        try:
            batch = self._reader[task]
            return batch if self._device is None else pinned(batch)
        except Exception as error:  # noqa: BLE001 - handed to the consumer, whose loop it must end
            return error


class _Workers:
    """torch's DataLoader over (slot, positions). Its processes live as long as it: a step is too short to start any."""

    def __init__(self, reader: _Reader, num_workers: int, prefetch_factor: int, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._tasks: list[Task] = []  # the DataLoader's sampler: read anew at each iter()
        self._run = 0
        self._loader: DataLoader[Batch] | None = DataLoader(
            reader,
            batch_size=None,
            sampler=self._tasks,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            persistent_workers=True,
            multiprocessing_context="forkserver",
        )
        self._batches: Iterator[Batch] | None = None

    def run(self, tasks: list[Task]) -> Iterator[Batch]:
        assert self._loader is not None, "the loader is closed"
        self._run += 1
        self._tasks[:] = tasks
        self._batches = iterate(self._loader)  # takes back what an earlier run still owed
        run = self._run
        return (self._take(run) for _ in tasks)

    def close(self) -> None:
        end_workers(self._loader)
        self._loader = self._batches = None

    def _take(self, run: int) -> Batch:
        if run != self._run or self._batches is None:
            raise RuntimeError(ABANDONED)
        try:
            batch = next(self._batches)
        except Exception as error:  # a worker's, passed on under its own type
            raise RuntimeError(f"reading training data failed: {error}") from error
        return pinned(batch) if self._pin_memory else batch


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """iter(loader). The first call starts its processes, out of reach of signals that are for the rank."""
    with unsignalled():
        resource_tracker.ensure_running()  # by itself: at its start it unblocks SIGTERM and SIGINT in the thread that starts it
    with unsignalled():
        return iter(loader)


def end_workers(loader: DataLoader[Any] | None) -> None:
    """Ends a DataLoader's processes now, not when the last exception that holds its iterator is forgotten."""
    iterator = getattr(loader, "_iterator", None)
    shutdown = getattr(iterator, "_shutdown_workers", None)  # torch has no public call
    if shutdown is not None:
        shutdown()
    for worker in getattr(iterator, "_workers", ()):
        if (
            worker.is_alive()
        ):  # it hangs in a read, and SIGTERM, which torch has sent it by now, is not for it (see unsignalled)
            worker.kill()


def pinned(batch: Batch) -> Batch:
    return replace(batch, inputs=batch.inputs.pin_memory(), labels=batch.labels.pin_memory())
