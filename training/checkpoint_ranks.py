"""What several ranks, or two threads of one, need to save together: agreement, and a failure that is not lost.

Flow: checkpoint.py and checkpoint_restore.py ask; the gloo group here is the one that DCP's own collectives use too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from training.checkpoint_files import FileRecord

T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """What one rank says of its part of a save. `own`: the problem is this rank's, not what it heard of another's."""

    records: Sequence[FileRecord] = ()
    problem: str = ""
    own: bool = False


class Ranks:
    """Agreement between the ranks, over a gloo group of its own: a save in the background must not meet training."""

    def __init__(self, timeout: timedelta) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if several else 0
        self.world_size = dist.get_world_size() if several else 1
        self.group = dist.new_group(backend="gloo", timeout=timeout) if several else None

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
    """A thread that does one piece of work at a time and keeps its failure. The interpreter waits for it at exit."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._thread.submit(int).result()  # it exists from now on: starting it would hold up the first who needs it
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Returns at once. The work before must have been joined."""
        assert self._work is None
        self._work = self._thread.submit(work)

    @property
    def has_failed(self) -> bool:
        """True when the thread to be joined has ended, and not well. Waits for nothing."""
        return self._work is not None and self._work.done() and self._work.exception() is not None

    def join(self) -> None:
        """Returns when there is no work; raises, once, what it failed with.

        It waits as long as it takes: a disk's time has no bound, and waiting for other ranks has one of its own.
        """
        if self._work is not None:
            work, self._work = self._work, None
            work.result()

    def close(self) -> None:
        """Joins, and ends the thread. May be called twice."""
        try:
            self.join()
        finally:
            self._thread.shutdown()
