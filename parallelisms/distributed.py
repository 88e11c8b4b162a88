"""The process group of a replica group: who am I, how many are we, how do we talk.

The only place beside train.py that reads torchelastic's variables (RANK, WORLD_SIZE, LOCAL_RANK).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal

import torch
import torch.distributed as dist

from parallelisms.device import Device, has_cuda, pick_device
from parallelisms.rendezvous import ENV, LEGAL, InitMethod, open_store


@dataclass(frozen=True)
class CommConfig:
    """[comm]: who carries the collectives, where the ranks meet, and timeouts."""

    backend: Annotated[
        Literal["auto", "gloo", "nccl", "mpi"], "the library of collectives; auto: nccl on GPUs, else gloo"
    ] = "auto"
    init_method: Annotated[
        str,
        "where ranks meet: env:// (as the launcher says), file:///path (new, on a shared disk), tcp://host:port (of rank 0)",
    ] = ENV
    init_timeout_seconds: Annotated[int, "longest start: rendezvous, first step, checkpoint, seconds", ">= 1"] = 300
    train_timeout_seconds: Annotated[
        int,
        "longest later step, seconds, without those in which other groups are waited for; past it the hang is told and the run ends",
        ">= 1",
    ] = 100
    trace_buf_size: Annotated[int, "collectives that NCCL's flight recorder remembers; 0: off", ">= 0"] = 20_000

    def check(self) -> None:
        self._check_backend()
        try:
            InitMethod.parse(self.init_method).check(longest_start_s=self.init_timeout_seconds)
        except ValueError as error:
            raise ValueError(
                f'comm.init_method = "{self.init_method}": {error}; it takes {LEGAL}; nearest: "{ENV}"'
            ) from None
        if self.train_timeout_seconds > self.init_timeout_seconds:
            raise ValueError(
                f"comm.train_timeout_seconds = {self.train_timeout_seconds}: must not exceed comm.init_timeout_seconds = "
                f"{self.init_timeout_seconds}, which covers the slower first step; nearest: {self.init_timeout_seconds}"
            )

    def _check_backend(self) -> None:
        if self.backend == "auto":
            return
        cause = unusable(self.backend)
        if cause:
            usable = [f'"{name}"' for name in BACKENDS if not unusable(name)]
            raise ValueError(f'comm.backend = "{self.backend}": {cause}; legal here: "auto", {", ".join(usable)}')


BACKENDS = ("gloo", "nccl", "mpi")


def unusable(backend: str) -> str:
    """Why this machine's torch cannot use it; empty if it can."""
    if not getattr(dist, f"is_{backend}_available")():
        return f"this torch ({torch.__version__}) was built without it"
    return "it needs a CUDA device, and there is none here" if backend == "nccl" and not has_cuda() else ""


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
    store: dist.Store = dist.HashStore()
    if world_size > 1:
        method = InitMethod.parse(config.init_method)
        store = open_store(method, global_rank=global_rank, world_size=world_size, timeout_s=timeout.total_seconds())
        store.set_timeout(timeout)
    join(
        config.backend if config.backend != "auto" else device.backend,
        store,
        global_rank=global_rank,
        world_size=world_size,
        timeout=timeout,
    )
    try:
        store = dist.PrefixStore("pharos", store)
        yield World(global_rank, world_size, local_rank, device, store, store.clone())  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()


def join(backend: str, store: dist.Store, *, global_rank: int, world_size: int, timeout: timedelta) -> None:
    """Makes the default process group. MPI has its own way to find the others, and asks no store."""
    if backend == "mpi":
        dist.init_process_group("mpi", timeout=timeout)
    else:
        dist.init_process_group(backend, store=store, rank=global_rank, world_size=world_size, timeout=timeout)


def host_group(world: World, *, timeout_s: float) -> dist.ProcessGroup | None:
    """A process group of all ranks for small tensors of the CPU, beside the one that trains; None for one rank alone. To be called by all
    ranks. timeout_s: of a collective; that of the world lies beyond it."""
    if world.world_size == 1:
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return group


def gather_texts(world: World, topic: str, text: str) -> list[str]:
    """Exchanges a text of each rank on `topic` (a name used once). Through the store: it works where a collective would not."""
    world.store.set(f"{topic}/{world.global_rank}", text)
    return [world.store.get(f"{topic}/{rank}").decode() for rank in range(world.world_size)]
