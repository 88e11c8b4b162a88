"""Collectives of Python objects between the ranks of a replica group, on the host: checkpoints agree by them on what is on disk."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class RankCollectives:
    """Collectives of Python objects over a separate gloo process group, which DCP uses too. If a rank dies the others raise RuntimeError,
    or wait until the launcher, the watchdog or the timeout ends them. Nothing catches the error: the process ends, with exit code 1. What
    the save had written is removed by the next launch as it loads, with replica groups after the next save."""

    def __init__(self) -> None:
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # for the files of the slowest rank in a save or load, and the requests of rank 0 to a store
        timeout = timedelta(minutes=30)
        self.group = dist.new_group(backend="gloo", timeout=timeout) if self.world_size > 1 else None

    def all_gather(self, value: T) -> list[T]:
        """Returns the values of all ranks, by rank, on every rank."""
        values = [value] * self.world_size
        if self.group is not None:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def problem(self, problem: str) -> str:
        """Returns the problem of the lowest rank that has one; "": no rank has one."""
        return next(filter(None, self.all_gather(problem)), "")

    def on_rank0(self, work: Callable[[], T]) -> T:
        """Calls `work` on rank 0; every rank returns its result or raises its exception."""
        if self.group is None:
            return work()
        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = work()
            except Exception as error:  # noqa: BLE001 (an exception on rank 0 only would leave the other ranks waiting)
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]
