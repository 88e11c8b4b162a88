"""Prefetching loaders. A slot is the batch of one replica group in one step, named by the position of its first sequence.

Letters: B local batch size, T seq_len."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import parent_process, resource_tracker
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ft.children import unsignalled
from training.config import DataloaderConfig
from training.data.order import NO_TOKEN, Order
from training.loss import IGNORED
from training.tokenizer import Tokenizer

THREAD_NAME = "pharos-data"
Task = tuple[int, tuple[int, ...], bool]  # slot, positions of one local batch, True for the last of the slot


@dataclass(frozen=True)
class Batch:
    """One local batch of a rank, for one forward and backward: the sequences at `sequence_positions` of `slot` (empty for streams)."""

    inputs: Tensor  # [B, T] int64
    labels: Tensor  # [B, T] int64; loss.IGNORED: no target
    slot: int
    sequence_positions: tuple[int, ...]  # in the data
    ends_slot: bool  # True for this rank's last local batch of the slot
    document_starts: Tensor | None = None  # [B, T] int64, with training.document_mask: models.contract.Model.forward

    def to(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns inputs, labels and document starts on `device`; pinned memory is copied without waiting."""
        starts = self.document_starts
        return (
            self.inputs.to(device, non_blocking=True),
            self.labels.to(device, non_blocking=True),
            starts if starts is None else starts.to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class SlotPartition:
    """Divides the sequences of a slot among ranks and into local batches, each of one forward and backward pass."""

    slot_size: int  # a multiple of local_batch_size * dp_size (configs/check.py)
    local_batch_size: int
    dp_rank: int
    dp_size: int

    def tasks(self, slot: int) -> list[Task]:
        """Returns one task per local batch of this rank; the positions of all ranks together are slot ... slot + slot_size - 1."""
        rows, size = self.slot_size // self.dp_size, self.local_batch_size
        first = slot + self.dp_rank * rows
        return [
            (slot, tuple(range(at, at + size)), at + size == first + rows) for at in range(first, first + rows, size)
        ]


class DataFailed(Exception):
    """Data cannot be read: the message names the cause."""


class BatchLoader(ABC):
    """Base of the loaders. The caller that opens one closes it."""

    def __init__(self, partition: SlotPartition, *, pin_memory: bool) -> None:
        self._partition, self._pin_memory = partition, pin_memory
        self._load_id = 0  # number of the newest load: batches of earlier ones are discarded

    @abstractmethod
    def start(self, tasks: list[Task]) -> Callable[[], Batch]:
        """Starts reading `tasks`; each call of the returned function returns the next batch."""

    def load(self, slots: Iterable[int]) -> Iterator[Batch]:
        """Returns an iterator over this rank's local batches, slot by slot, equally many on every rank. Discards the rest of earlier calls.
        Reading starts at once, not at the first `next`; `next` raises DataFailed if data cannot be read; RuntimeError for other errors, and
        after a later call."""
        tasks = [task for slot in slots for task in self._partition.tasks(slot)]
        self._load_id += 1
        load_id, read = self._load_id, self.start(tasks)
        return (self._take(load_id, read) for _ in tasks)

    def renew(self) -> None:  # noqa: B027 (nothing to do, where the order is not copied)
        """Makes the next `load` read from the present order, which has changed."""

    def close(self) -> None:
        self._load_id += 1

    def _take(self, load_id: int, read: Callable[[], Batch]) -> Batch:
        if load_id != self._load_id:
            raise RuntimeError("stale iterator: the loader was closed, or load() was called again")
        try:
            batch = read()
        except StopIteration:
            raise DataFailed("the data stream has no document of this split for this rank") from None
        except (OSError, ValueError) as error:  # of storage, network or format
            *_, cause = str(error).splitlines() or [type(error).__name__]  # of a worker: the last line of its traceback
            raise DataFailed(f"reading data failed: {cause}") from error
        except Exception as error:  # of a worker or of this code: shown with its traceback
            raise RuntimeError(f"reading data failed: {error}") from error
        return pinned(batch) if self._pin_memory else batch

    def state_dict(self) -> dict[str, Any]:
        """Returns {}: the position is part of the manager's state, one number that any number of ranks can resume from."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert not state, f"positions need no loader state, got {list(state)}"


def separator_of(tokenizer: Tokenizer) -> int:
    """Returns the id that is both BOS and EOS, NO_TOKEN if they are two."""
    return tokenizer.bos_id if tokenizer.bos_id == tokenizer.eos_id else NO_TOKEN


def make_batch(
    rows: np.ndarray, task: Task, document_starts: np.ndarray | None = None, *, separator: int = NO_TOKEN
) -> Batch:
    """Splits `rows` [B, T + 1] int64 into inputs and labels, shifted by one. ~id gives input `id` and label IGNORED. With
    `document_starts`, [B, T + 1] int64, a label that is the first token of a document is IGNORED, too, except for `separator` (one
    token for BOS and EOS), which also ends the document before it: a model that never has it as a target does not learn to end one."""
    inputs, labels = np.maximum(rows[:, :-1], ~rows[:, :-1]), np.where(rows[:, 1:] < 0, IGNORED, rows[:, 1:])
    if document_starts is None:
        return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), *task)
    begins = document_starts[:, 1:] == np.arange(1, rows.shape[1])
    labels[begins & (rows[:, 1:] != separator)] = IGNORED
    return Batch(torch.from_numpy(inputs), torch.from_numpy(labels), *task, torch.from_numpy(document_starts[:, :-1]))


class _Reader(Dataset[Batch]):
    """Reads the batch of a task, in the thread or in worker processes."""

    def __init__(self, order: Order, document_mask: bool, separator: int) -> None:
        self._order, self._document_mask, self._separator = order, document_mask, separator

    def __getitem__(self, task: Task) -> Batch:
        rows = np.stack([self._order.sequence(position) for position in task[1]])
        if not self._document_mask:
            return make_batch(rows, task)
        starts = np.stack([self._order.document_starts(position) for position in task[1]])
        return make_batch(rows, task, starts, separator=self._separator)


def open_loader(
    order: Order,
    partition: SlotPartition,
    config: DataloaderConfig,
    *,
    document_mask: bool = False,
    separator: int = NO_TOKEN,
    pin_memory: bool = False,
) -> BatchLoader:
    """Opens a loader that prefetches only the requested slots, in one thread or `num_workers` processes, with the same batches.
    `separator`: see `make_batch`."""
    loader_class = WorkerLoader if config.num_workers else ThreadLoader
    return loader_class(_Reader(order, document_mask, separator), partition, config, pin_memory=pin_memory)


class ThreadLoader(BatchLoader):
    """Prefetches in one thread, at most `prefetch_factor` batches ahead."""

    def __init__(
        self, reader: _Reader, partition: SlotPartition, config: DataloaderConfig, *, pin_memory: bool
    ) -> None:
        super().__init__(partition, pin_memory=False)
        self._reader, self._depth = reader, config.prefetch_factor
        # The thread must pin memory for this rank's device; by default it would open a context on device 0.
        self._device = torch.accelerator.current_device_index() if pin_memory else None
        self._requests = SimpleQueue[tuple[int, Task, SimpleQueue[Batch | Exception]] | None]()
        self._thread = threading.Thread(target=self._work, name=THREAD_NAME, daemon=True)
        self._thread.start()

    def start(self, tasks: list[Task]) -> Callable[[], Batch]:
        load_id, left, ready = self._load_id, iter(tasks), SimpleQueue[Batch | Exception]()

        def request(count: int) -> None:
            for task in islice(left, count):
                self._requests.put((load_id, task, ready))

        def read() -> Batch:
            if isinstance(batch := ready.get(), Exception):
                raise batch
            request(1)
            return batch

        request(self._depth)
        return read

    def close(self) -> None:
        super().close()
        self._requests.put(None)
        self._thread.join(timeout=10)

    def _work(self) -> None:
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)
        while (entry := self._requests.get()) is not None:
            load_id, task, ready = entry
            if load_id != self._load_id:
                ready.put(RuntimeError("abandoned"))  # for a consumer that still waits
                continue
            try:
                batch = self._reader[task]
                ready.put(batch if self._device is None else pinned(batch))
            except Exception as error:  # noqa: BLE001 - raised in the consumer
                ready.put(error)


class WorkerLoader(BatchLoader):
    """torch's DataLoader over tasks, with persistent workers, since a step is too short to start processes."""

    def __init__(
        self, reader: _Reader, partition: SlotPartition, config: DataloaderConfig, *, pin_memory: bool
    ) -> None:
        super().__init__(partition, pin_memory=pin_memory)
        self._tasks: list[Task] = []  # the DataLoader's sampler, read again at each iter()
        self._loader: DataLoader[Batch] = DataLoader(
            reader,
            batch_size=None,
            sampler=self._tasks,
            num_workers=config.num_workers,
            prefetch_factor=config.prefetch_factor,
            persistent_workers=True,
            multiprocessing_context="forkserver",
            worker_init_fn=end_with_trainer,
        )

    def start(self, tasks: list[Task]) -> Callable[[], Batch]:
        self._tasks[:] = tasks
        return iterate(self._loader).__next__  # discards batches of an earlier call that are in flight

    def renew(self) -> None:
        end_workers(self._loader)  # they have a copy of the order as it was
        self._loader._iterator = None

    def close(self) -> None:
        super().close()
        end_workers(self._loader)


def end_with_trainer(worker: int) -> None:
    """Ends this worker when its trainer is gone. torch's worker watches the process that forked it: the fork server, which lives as long as
    a worker does."""

    def wait() -> None:
        if trainer := parent_process():
            trainer.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def unsignalled_workers() -> Iterator[None]:
    """Blocks the launcher's signals in the workers that a DataLoader starts in the block, and in the server that forks them."""
    with unsignalled():
        resource_tracker.ensure_running()  # separately, since its start unblocks SIGTERM and SIGINT in this thread
    with unsignalled():
        yield


def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
    """Returns iter(loader); the first call for a loader starts its workers."""
    with unsignalled_workers():
        return iter(loader)


def end_workers(loader: DataLoader[Any]) -> None:
    """Ends a DataLoader's workers now, even if its iterator is still referenced."""
    iterator = getattr(loader, "_iterator", None)
    if shutdown := getattr(iterator, "_shutdown_workers", None):  # torch has no public method
        shutdown()
    for worker in getattr(iterator, "_workers", ()):
        if worker.is_alive():  # it hangs in a read, and torch's SIGTERM is blocked (see unsignalled)
            worker.kill()


def pinned(batch: Batch) -> Batch:
    starts = batch.document_starts
    starts = starts if starts is None else starts.pin_memory()
    return replace(batch, inputs=batch.inputs.pin_memory(), labels=batch.labels.pin_memory(), document_starts=starts)
