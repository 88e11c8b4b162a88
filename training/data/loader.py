"""Loads the batches of a step, ahead of it. A slot is one group's batch of a step, named by the position of its first sequence.

Letters: B local batch size, T seq_len."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import resource_tracker
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ft.children import unsignalled
from training.config import DataloaderConfig
from training.data.order import Order

THREAD_NAME = "pharos-data"
Task = tuple[int, tuple[int, ...], bool]  # slot, positions of one microbatch, and whether it is the slot's last


@dataclass(frozen=True)
class Batch:
    """One forward and backward of one rank: rows `positions` of `slot` (streams have no positions)."""

    inputs: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64, loss.IGNORED where there is no target
    slot: int
    positions: tuple[int, ...]
    ends_slot: bool  # the last of this rank's


@dataclass(frozen=True)
class MicrobatchSampler:
    """The rows of a slot that this rank computes, in microbatches."""

    slot_size: int  # a multiple of local_batch_size * dp_size: configs/check.py
    local_batch_size: int
    dp_rank: int
    dp_size: int

    def tasks(self, slot: int) -> list[Task]:
        """One per microbatch; the positions of all ranks together are exactly slot .. slot + slot_size - 1."""
        rows, size = self.slot_size // self.dp_size, self.local_batch_size
        first = slot + self.dp_rank * rows
        return [
            (slot, tuple(range(at, at + size)), at + size == first + rows) for at in range(first, first + rows, size)
        ]


class BatchSource(ABC):
    """Loads batches for train.py. Its maker closes it."""

    def __init__(self, sampler: MicrobatchSampler, *, pin_memory: bool) -> None:
        self._sampler, self._pin_memory = sampler, pin_memory
        self._run = 0  # grows with each load, so that nothing of an abandoned one is handed out

    @abstractmethod
    def start(self, tasks: list[Task]) -> Callable[[], Batch]:
        """Begins to read these; each call of the function returned gives the next batch."""

    def load(self, slots: Iterable[int]) -> Iterator[Batch]:
        """The microbatches of this rank, slot by slot; on every rank the same number. Abandons the rest of an earlier call. Reading begins
        now, not at the first `next`; a failure is raised by `next`, with its cause."""
        tasks = [task for slot in slots for task in self._sampler.tasks(slot)]
        self._run += 1
        run, read = self._run, self.start(tasks)
        return (self._take(run, read) for _ in tasks)

    def close(self) -> None:
        self._run += 1

    def _take(self, run: int, read: Callable[[], Batch]) -> Batch:
        if run != self._run:
            raise RuntimeError("stale iterator: the loader was closed, or load() was called again")
        try:
            batch = read()
        except StopIteration:
            raise RuntimeError("the data stream holds no document of this split for this rank") from None
        except Exception as error:  # whatever storage, network, format or a worker raises
            raise RuntimeError(f"reading training data failed: {error}") from error
        return pinned(batch) if self._pin_memory else batch

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position is the manager's, one number for all ranks; any number of them may take it up."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"positions need no loader state, got {list(state)}"


def make_batch(rows: np.ndarray, task: Task) -> Batch:
    """`rows` [B, T + 1] int64."""
    return Batch(torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy()), *task)


class _Reader(Dataset[Batch]):
    """Task -> Batch, in the thread and in worker processes."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def __getitem__(self, task: Task) -> Batch:
        return make_batch(np.stack([self._order.sequence(position) for position in task[1]]), task)


def open_loader(
    order: Order, sampler: MicrobatchSampler, config: DataloaderConfig, *, pin_memory: bool = False
) -> BatchSource:
    """Prefetches exactly the slots it is asked for, by one thread or `num_workers` processes; the batches are the same."""
    kind = WorkerLoader if config.num_workers else ThreadLoader
    return kind(_Reader(order), sampler, config, pin_memory=pin_memory)


class ThreadLoader(BatchSource):
    """One thread, at most `prefetch_factor` batches ahead."""

    def __init__(
        self, reader: _Reader, sampler: MicrobatchSampler, config: DataloaderConfig, *, pin_memory: bool
    ) -> None:
        super().__init__(sampler, pin_memory=False)
        self._reader, self._depth = reader, config.prefetch_factor
        # The thread must pin on this rank's device: by itself it would open a context on device 0.
        self._device = torch.accelerator.current_device_index() if pin_memory else None
        self._asked = SimpleQueue[tuple[int, Task, SimpleQueue[Batch | Exception]] | None]()
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def start(self, tasks: list[Task]) -> Callable[[], Batch]:
        run, left, ready = self._run, iter(tasks), SimpleQueue[Batch | Exception]()

        def ask(count: int) -> None:
            for task in islice(left, count):
                self._asked.put((run, task, ready))

        def read() -> Batch:
            if isinstance(batch := ready.get(), Exception):
                raise batch
            ask(1)
            return batch

        ask(self._depth)
        return read

    def close(self) -> None:
        super().close()
        self._asked.put(None)
        self._thread.join(timeout=10)

    def _work(self) -> None:
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)
        while (asked := self._asked.get()) is not None:
            run, task, ready = asked
            if run != self._run:
                ready.put(RuntimeError("abandoned"))  # for a thread that waits for it yet
                continue
            try:
                batch = self._reader[task]
                ready.put(batch if self._device is None else pinned(batch))
            except Exception as error:  # noqa: BLE001 - handed to the consumer, whose loop it must end
                ready.put(error)


class WorkerLoader(BatchSource):
    """torch's DataLoader over tasks. Its processes live as long as it: a step is too short to start any."""

    def __init__(
        self, reader: _Reader, sampler: MicrobatchSampler, config: DataloaderConfig, *, pin_memory: bool
    ) -> None:
        super().__init__(sampler, pin_memory=pin_memory)
        self._tasks: list[Task] = []  # the DataLoader's sampler: read anew at each iter()
        self._loader: DataLoader[Batch] = DataLoader(
            reader,
            batch_size=None,
            sampler=self._tasks,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor,
            persistent_workers=True,
            multiprocessing_context="forkserver",
        )

    def start(self, tasks: list[Task]) -> Callable[[], Batch]:
        self._tasks[:] = tasks
        return iterate(self._loader).__next__  # discards batches of an earlier call that are still on their way

    def close(self) -> None:
        super().close()
        end_workers(self._loader)


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """iter(loader). The first call starts its processes, which start with the launcher's signals blocked."""
    with unsignalled():
        resource_tracker.ensure_running()  # by itself: at its start it unblocks SIGTERM and SIGINT in the thread that starts it
    with unsignalled():
        return iter(loader)


def end_workers(loader: DataLoader[Any]) -> None:
    """Ends a DataLoader's processes now, whatever still refers to its iterator."""
    iterator = getattr(loader, "_iterator", None)
    if shutdown := getattr(iterator, "_shutdown_workers", None):  # torch has no public call
        shutdown()
    for worker in getattr(iterator, "_workers", ()):
        if worker.is_alive():  # it hangs in a read, and the SIGTERM that torch has sent it is blocked (see unsignalled)
            worker.kill()


def pinned(batch: Batch) -> Batch:
    return replace(batch, inputs=batch.inputs.pin_memory(), labels=batch.labels.pin_memory())
