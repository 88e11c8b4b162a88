"""The process group of a replica group: who am I, how many are we, how do we talk.

The only place beside train.py that reads torchelastic's variables (RANK, WORLD_SIZE, LOCAL_RANK).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

import torch.distributed as dist

from parallelisms.device import Device, pick_device


@dataclass(frozen=True)
class CommConfig:
    """[comm]: timeouts of the collectives."""

    init_timeout_seconds: Annotated[int, "longest start: rendezvous, first step, checkpoint, seconds", ">= 1"] = 300
    train_timeout_seconds: Annotated[
        int, "longest later step, seconds; past it the hang is told and the run ends", ">= 1"
    ] = 100
    trace_buf_size: Annotated[int, "collectives that NCCL's flight recorder remembers; 0: off", ">= 0"] = 20_000

    def check(self) -> None:
        if self.train_timeout_seconds > self.init_timeout_seconds:
            raise ValueError(
                f"comm.train_timeout_seconds = {self.train_timeout_seconds}: must not exceed comm.init_timeout_seconds = "
                f"{self.init_timeout_seconds}, which covers the slower first step; nearest: {self.init_timeout_seconds}"
            )


BACKSTOP_S = 60  # what a collective waits beyond the longest timeout, so that the watchdog speaks first


@dataclass(frozen=True)
class World:
    """This rank's place in its replica group."""

    global_rank: int
    world_size: int
    local_rank: int
    device: Device
    store: dist.Store
    watch_store: dist.Store  # a connection of its own, for the thread that watches while the loop waits in `store`


def launched_rank() -> int:
    """This rank's number among those the launcher started; 0 for a plain `python train.py`."""
    return int(os.environ.get("RANK", "0"))


def launched_world_size() -> int:
    """How many ranks the launcher started; 1 for a plain `python train.py`."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(config: CommConfig) -> Iterator[World]:
    """Joins the process group that the launcher's variables describe (alone, without any network, where there are none).

    The group's own timeout is a backstop: the watchdog tells a hang and ends it sooner (training/watchdog.py).
    """
    global_rank, world_size = launched_rank(), launched_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = pick_device(local_rank)
    timeout = timedelta(seconds=config.init_timeout_seconds + BACKSTOP_S)
    if world_size == 1:
        store: dist.Store = dist.HashStore()
        dist.init_process_group(device.backend, store=store, rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(device.backend, timeout=timeout)
        store = dist.distributed_c10d._get_default_store()
    try:
        yield World(global_rank, world_size, local_rank, device, store, store.clone())  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()


def gather_texts(world: World, topic: str, text: str) -> list[str]:
    """What each rank says on `topic` (a name used once), by rank. Through the store: it works where a collective would not."""
    world.store.set(f"{topic}/{world.global_rank}", text)
    return [world.store.get(f"{topic}/{rank}").decode() for rank in range(world.world_size)]
