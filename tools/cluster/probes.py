"""Measurements of one rank or link: a link's latency and rate, a rank's matrix products, its clock, and a checkpoint in its folder."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.futures import Future

from parallelisms.device import DEVICE_TRAITS
from tools.cluster.operations import Team, settle

Pair = tuple[int, int]
ALL_PAIRS = 64  # ranks up to which every pair is measured
PINGS, TRIES = 10, 3
SMALLEST, GROWTH = 1 << 16, 4  # bytes of a try; they grow until one takes LONG_S
LONG_S = 0.02
MATMUL_S = 1.0  # all ranks multiply at the same time for this long, as in training


def pairs(hosts: Sequence[str]) -> list[Pair]:
    """By rank's host. Of many ranks: those on one host, and between hosts those of equal place (one "rail" of network cards)."""
    everybody = itertools.combinations(range(len(hosts)), 2)
    if len(hosts) <= ALL_PAIRS:
        return list(everybody)
    seen: dict[str, int] = {}
    place = [seen[host] for host in hosts if seen.update({host: seen.get(host, -1) + 1}) is None]
    return [(a, b) for a, b in everybody if hosts[a] == hosts[b] or place[a] == place[b]]


def rounds(chosen: Iterable[Pair], hosts: Sequence[str]) -> list[list[Pair]]:
    """In a round no host is in two pairs, so that none measures the other's traffic."""
    made: list[tuple[list[Pair], set[str]]] = []
    for a, b in chosen:
        here = {hosts[a], hosts[b]}
        for members, busy in made:
            if not busy & here:
                members.append((a, b))
                busy |= here
                break
        else:
            made.append(([(a, b)], set(here)))
    return [members for members, _ in made]


def measure(team: Team, pair: Pair) -> dict[str, float]:
    """This rank's messages to the other one: `latency_s` (half a round trip, the best of some), `bytes_s`."""
    first, second = pair
    if team.rank == first:
        figures = _send(team, second)
        _answer(team, second)
        return figures
    _answer(team, first)
    return _send(team, first)


def _send(team: Team, peer: int) -> dict[str, float]:
    """A header with the size, the bytes, and an answer when they are there; a size of 0 ends it."""
    header, answer = torch.zeros(1, dtype=torch.int64, device=team.device), torch.zeros(1, device=team.device)

    def trip(size: int) -> float:
        payload = torch.zeros(size, dtype=torch.uint8, device=team.device)
        header.fill_(size)
        settle(team.device)
        start = time.perf_counter()
        dist.send(header, peer, team.group)
        dist.send(payload, peer, team.group)
        dist.recv(answer, peer, team.group)
        settle(team.device)
        return time.perf_counter() - start

    quickest = min(trip(1) for _ in range(PINGS + 1))
    size, taken = SMALLEST, trip(SMALLEST)
    while taken < LONG_S and size < DEVICE_TRAITS[team.device.type].largest_message:
        size *= GROWTH
        taken = min(trip(size) for _ in range(TRIES))
    dist.send(header.zero_(), peer, team.group)
    return {"latency_s": quickest / 2, "bytes_s": size / taken}  # header and answer counted in: little beside LONG_S


def _answer(team: Team, peer: int) -> None:
    header, answer = torch.zeros(1, dtype=torch.int64, device=team.device), torch.zeros(1, device=team.device)
    while True:
        dist.recv(header, peer, team.group)
        if (size := int(header.item())) == 0:
            return
        dist.recv(torch.empty(size, dtype=torch.uint8, device=team.device), peer, team.group)
        dist.send(answer, peer, team.group)


def matmul_flops(team: Team) -> tuple[float, float]:
    """Floating-point operations a second: bf16 on a GPU, fp32 on a CPU; the median of a second's products. And the share of that second in
    which this thread had a core: a core that is slow has all of it, a rank that other programs hold up has not."""
    n, dtype = DEVICE_TRAITS[team.device.type].probe
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
    """Seconds that this rank's clock is ahead of `peer`'s, as NTP finds it (RFC 5905, section 8): the quickest of some round trips.
    `error_s`, half of what that trip took, bounds the mistake. `peer` calls `tell_time`."""
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
    """Writes a checkpoint into `folder` and reads it back, each rank what its neighbour wrote. `write_s` and `read_s` are this rank's own,
    without the waiting for others; `wrong` describes what was read otherwise. Raises CheckpointException: it names the ranks."""
    neighbour = team.beside(1)
    writer, reader = _Writer(folder), _Reader(folder)
    dcp.save({f"rank{team.rank}": _noise(team.rank, size_bytes)}, storage_writer=writer, process_group=team.group)
    expected = _noise(neighbour, size_bytes)
    got = {f"rank{neighbour}": torch.zeros_like(expected)}
    dcp.load(got, storage_reader=reader, process_group=team.group)
    same = torch.equal(got[f"rank{neighbour}"], expected)
    wrong = "" if same else f"what rank {neighbour} wrote was read with other bits"
    return {"write_s": writer.seconds, "read_s": reader.seconds, "wrong": wrong}


def _noise(rank: int, size_bytes: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


class _Writer(dcp.FileSystemWriter):
    """Times what this rank writes, to the disk itself (fsync), and has the page cache forget it before it is read."""

    seconds = 0.0

    def write_data(self, *plan: Any, **named: Any) -> Future[Any]:
        start = time.perf_counter()
        (done := super().write_data(*plan, **named)).wait()
        self.seconds = time.perf_counter() - start
        for file in Path(self.path).glob("*.distcp") if hasattr(os, "posix_fadvise") else ():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return done


class _Reader(dcp.FileSystemReader):
    """Times what this rank reads."""

    seconds = 0.0

    def read_data(self, *plan: Any, **named: Any) -> Future[None]:
        start = time.perf_counter()
        (done := super().read_data(*plan, **named)).wait()
        self.seconds = time.perf_counter() - start
        return done
