"""Seconds per operation and size. A size is the largest buffer that a rank holds, as in nccl-tests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from parallelisms.device import DIFFERENCES
from tools.cluster.ring import ring_all_reduce
from tools.cluster.values import Team

ROUNDS = 5


def bus_factor(op: str, size: int) -> float:
    """Bytes that the busiest link must carry per byte of the buffer: makes figures of different numbers of ranks comparable."""
    share = (size - 1) / size
    return {"all_reduce": 2 * share, "ring all_reduce": 2 * share}.get(op, share if op in SHARED else 1.0)


SHARED = ("all_gather", "reduce_scatter", "all_to_all", "scatter", "gather")


def operations(team: Team, size_bytes: int) -> dict[str, Callable[[], object]]:
    """Each operation on buffers of its own kind; call one as often as you like."""
    part = max(1, size_bytes // 4 // team.size)
    whole, piece = torch.ones(part * team.size, device=team.device), torch.ones(part, device=team.device)
    root, first = team.ranks[0], team.rank == team.ranks[0]
    pieces = list(whole.split(part)) if first else None
    left, right = team.beside(-1), team.beside(1)

    def send_recv() -> None:
        if team.ranks.index(team.rank) % 2 == 0:
            dist.send(whole, right, team.group)
            dist.recv(whole, left, team.group)
        else:
            got = torch.empty_like(whole)
            dist.recv(got, left, team.group)
            dist.send(whole, right, team.group)

    def isend_irecv() -> None:
        got = torch.empty_like(whole)
        both = [dist.P2POp(dist.irecv, got, right, team.group), dist.P2POp(dist.isend, whole, left, team.group)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return {
        "send/recv": send_recv,
        "isend/irecv": isend_irecv,
        "broadcast": lambda: dist.broadcast(whole, root, team.group),
        "scatter": lambda: dist.scatter(piece, pieces, root, team.group),
        "gather": lambda: dist.gather(piece, pieces, root, team.group),
        "reduce": lambda: dist.reduce(whole, root, dist.ReduceOp.MAX, team.group),
        "all_reduce": lambda: dist.all_reduce(whole, dist.ReduceOp.MAX, team.group),
        "ring all_reduce": lambda: ring_all_reduce(whole, "MAX", team.ranks, team.rank, team.group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, piece, team.group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(piece, whole, dist.ReduceOp.MAX, team.group),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=team.group),
    }


def seconds(run: Callable[[], object], device: torch.device, *, rounds: int = ROUNDS) -> float:
    """The median of `rounds`, after one that is not counted."""
    taken = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        run()
        settle(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def settle(device: torch.device) -> None:
    """Waits for what the device has been given; a CPU has done it already."""
    if DIFFERENCES[device.type].queues_work:
        torch.accelerator.synchronize(device)
