"""What several ranks, or two threads of one, need to save together: agreement, and a failure that is not lost.

Flow: checkpoint.py and checkpoint_restore.py ask; the gloo group here is the one that DCP's own collectives use too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class Ranks:
    """Agreement between the ranks, over a gloo group of its own: a save in the background must not meet training."""

    def __init__(self, timeout: timedelta) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if several else 0
        self.world_size = dist.get_world_size() if several else 1
        self.group = dist.new_group(backend="gloo", timeout=timeout) if several else None

    @classmethod
    def alone(cls) -> Ranks:
        """One process, even where a process group exists."""
        ranks = cls.__new__(cls)
        ranks.rank, ranks.world_size, ranks.group = 0, 1, None
        return ranks

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank, on every rank."""
        values = [value] * self.world_size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def first(self, work: Callable[[], T]) -> T:
        """Rank 0 works; every rank returns what it returned or raises what it raised."""
        if self.group is None:
            return work()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except Exception as error:  # noqa: BLE001 (whatever it is: raised alone, it would leave the others waiting)
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result


class Background:
    """A thread that does one thing and whose failure is not lost. Not a daemon: the interpreter waits for its end."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint-writer")
        self._thread.start()

    def join(self) -> None:
        """Waits as long as it takes: a disk's time has no bound, and waiting for other ranks has one of its own."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised in `join`, by the thread that can act on it)
            self._error = error
