"""What a rank is by itself: how fast it multiplies, what its clock says, how fast its folder takes and gives a checkpoint."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.futures import Future

from parallelisms.device import DIFFERENCES
from tools.cluster.speeds import settle
from tools.cluster.values import Team

PINGS = 10
MATMUL_S = 1.0  # all ranks multiply at the same time for this long, as in training


def matmul_flops(team: Team) -> tuple[float, float]:
    """Floating-point operations a second: bf16 on a GPU, fp32 on a CPU; the median of a second's products. And the share of that second in
    which this thread had a core: a core that is slow has all of it, a rank that other programs hold up has not."""
    n, dtype = DIFFERENCES[team.device.type].probe
    a, b = (torch.randn(n, n, dtype=dtype, device=team.device) for _ in range(2))
    a @ b
    settle(team.device)
    taken: list[float] = []
    had, began = time.thread_time(), time.perf_counter()
    end = began + MATMUL_S
    while len(taken) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        a @ b
        settle(team.device)
        taken.append(time.perf_counter() - start)
    share = (time.thread_time() - had) / (time.perf_counter() - began)
    return 2.0 * n**3 / statistics.median(taken), min(1.0, share)


def clock_offset(team: Team, peer: int) -> dict[str, float]:
    """How far this rank's clock is ahead of `peer`'s, as NTP finds it (RFC 5905, section 8): the quickest of some round trips.

    `error_s`, half of what that trip took, bounds the mistake. `peer` calls `tell_time`.
    """
    trips = []
    for _ in range(PINGS):
        left = time.time()
        dist.send(torch.zeros(1, dtype=torch.float64, device=team.device), peer, team.group)
        told = torch.zeros(2, dtype=torch.float64, device=team.device)
        dist.recv(told, peer, team.group)
        arrived, answered = told.tolist()
        back = time.time()
        trips.append(((back - left) - (answered - arrived), ((left - arrived) + (back - answered)) / 2))
    took, ahead = min(trips)
    return {"ahead_s": ahead, "error_s": max(took, 0.0) / 2}


def tell_time(team: Team, peer: int) -> None:
    """The other side of `clock_offset`."""
    for _ in range(PINGS):
        asked = torch.zeros(1, dtype=torch.float64, device=team.device)
        dist.recv(asked, peer, team.group)
        settle(team.device)
        arrived = time.time()
        dist.send(torch.tensor([arrived, time.time()], dtype=torch.float64, device=team.device), peer, team.group)


def try_folder(team: Team, folder: Path, size_bytes: int) -> dict[str, Any]:
    """Writes a checkpoint into `folder` and reads it back, each rank what its neighbour wrote.

    `write_s` and `read_s` are this rank's own, without the waiting for others; `wrong` says what was read that nobody wrote.
    Raises CheckpointException: it names the ranks that could not.
    """
    neighbour = team.beside(1)
    writer, reader = _Writer(folder), _Reader(folder)
    dcp.save({f"rank{team.rank}": _noise(team.rank, size_bytes)}, storage_writer=writer, process_group=team.group)
    got = {f"rank{neighbour}": torch.zeros_like(_noise(neighbour, size_bytes))}
    dcp.load(got, storage_reader=reader, process_group=team.group)
    same = torch.equal(got[f"rank{neighbour}"], _noise(neighbour, size_bytes))
    wrong = "" if same else f"what rank {neighbour} wrote was read with other bits"
    return {"write_s": writer.seconds, "read_s": reader.seconds, "bytes": size_bytes, "wrong": wrong}


def remove(folder: Path) -> None:
    """The checkpoint again; a folder that cannot be removed was told of when it could not be written."""
    shutil.rmtree(folder, ignore_errors=True)


def _noise(rank: int, size_bytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


class _Writer(dcp.FileSystemWriter):
    """Times what this rank writes, to the disk itself (fsync), and has the page cache forget it before it is read."""

    seconds = 0.0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        start = time.perf_counter()
        done = super().write_data(plan, planner)
        done.wait()
        self.seconds = time.perf_counter() - start
        if hasattr(os, "posix_fadvise"):
            for file in Path(self.path).glob("*.distcp"):
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return done


class _Reader(dcp.FileSystemReader):
    """Times what this rank reads."""

    seconds = 0.0

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        start = time.perf_counter()
        done = super().read_data(plan, planner)
        done.wait()
        self.seconds = time.perf_counter() - start
        return done
