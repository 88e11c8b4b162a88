"""Measurements: every operation, with numbers that can be checked exactly, and timed; links, matmuls, clocks, the folder of runs.

Small whole numbers and powers of two: sums and products of them are exact in fp32 in any order, so `==` is the test.
Seconds are per operation and size. A size is the largest buffer that a rank holds, as in nccl-tests.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.futures import Future

from parallelisms.device import DEVICE_TRAITS

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}
COUNT = 1021  # elements of a block: a prime, which no number of ranks or chunks divides
ROUNDS = 5
SHARED = ("all_gather", "reduce_scatter", "all_to_all", "scatter", "gather")
Pair = tuple[int, int]
ALL_PAIRS = 64  # ranks up to which every pair is measured
PINGS, TRIES = 10, 3
SMALLEST, GROWTH = 1 << 16, 4  # bytes of a try; they grow until one takes LONG_S
LONG_S = 0.02
MATMUL_S = 1.0  # all ranks multiply at the same time for this long, as in training


@dataclass(frozen=True)
class Team:
    """Ranks that do something together, and this one's place among them."""

    ranks: tuple[int, ...]  # global
    rank: int  # this one's global rank
    device: torch.device
    group: dist.ProcessGroup | None = None  # None: all ranks

    @property
    def size(self) -> int:
        return len(self.ranks)

    def beside(self, distance: int) -> int:
        """The global rank that is `distance` places further in the ring."""
        return self.ranks[(self.ranks.index(self.rank) + distance) % self.size]

    def parts(self, whole: Tensor, root: int) -> list[Tensor] | None:
        """The ranks' parts of a tensor, which share its memory; None on other ranks than the root."""
        return list(whole.chunk(self.size)) if self.rank == root else None


# The source rank of a block (-1: all ranks' numbers are in it), the block that arrived, and the expected one.
Results = Iterator[tuple[int, Tensor, Tensor]]
Check = Callable[[Team], Results]


def wrong(check: Check, team: Team) -> list[tuple[int, str]]:
    """Finds the ranks whose blocks are wrong at this rank, and how. All ranks of the team call it, and go on to its end."""
    found = []
    for source, got, expected in check(team):
        if not torch.equal(got, expected):
            differ = (got != expected).cpu()
            first, count = int(differ.nonzero()[0]), int(differ.sum())
            values = f"{got[first].item():g}, not {expected[first].item():g}"
            found.append((source, f"element {first} is {values} ({count} of {differ.numel()} differ)"))
    return found


def block(team: Team, source: int, destination: int = 0) -> Tensor:
    """The block of `source` for `destination`: (COUNT,) whole numbers below 1009."""
    return ((torch.arange(COUNT) * 31 + source * 101 + destination * 7) % 1009).float().to(team.device)


def term(team: Team, op: str, rank: int, count: int) -> Tensor:
    """The values of `rank` in a reduction: (count,). Products stay powers of two near 1, whatever the number of ranks."""
    elements = torch.arange(count)
    if op == "PRODUCT":
        return (2.0 ** ((elements + rank) % 3 - 1)).to(team.device)
    return ((elements * 7 + rank * 13) % 1009).float().to(team.device)


def send_in_turn(team: Team, sent: Tensor, got: Tensor) -> None:
    """Sends to the right and receives from the left; one end of every pair sends first."""
    if first := team.ranks.index(team.rank) % 2 == 0:
        dist.send(sent, team.beside(1), team.group)
    dist.recv(got, team.beside(-1), team.group)
    if not first:
        dist.send(sent, team.beside(1), team.group)


def exchange(team: Team, sent: Tensor, to: int, got: Tensor, source: int) -> None:
    both = [dist.P2POp(dist.irecv, got, source, team.group), dist.P2POp(dist.isend, sent, to, team.group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def ring_all_reduce(tensor: Tensor, op: str, team: Team) -> None:
    """All-reduce in place out of isend and irecv alone: in a ring, in chunks, so that every link carries 2 (n-1)/n of the tensor, which is
    one-dimensional and may have fewer elements than there are ranks. Two rounds of n-1 hops (Patarasuk and Yuan 2009, "Bandwidth optimal
    all-reduce algorithms"): in the first each chunk collects all ranks' numbers, in the second the finished chunks go round once more."""
    size, place = team.size, team.ranks.index(team.rank)
    chunks = tensor.tensor_split(size)
    for step in range(2 * (size - 1)):
        sent, mine = chunks[(place - step) % size], chunks[(place - step - 1) % size]
        got = torch.empty_like(mine)
        exchange(team, sent.contiguous(), team.beside(1), got, team.beside(-1))
        mine.copy_(COMBINE[op](mine, got) if step < size - 1 else got)


# Each operation on the buffers of a rank, (team, sent, got, root, reduction). Broadcast and the reductions of a whole buffer work in `got`.
CALLS: dict[str, Callable[[Team, Tensor, Tensor, int, str], object]] = {
    "send/recv": lambda team, sent, got, *_: send_in_turn(team, sent, got),
    "isend/irecv": lambda team, sent, got, *_: exchange(team, sent, team.beside(-1), got, team.beside(1)),
    "broadcast": lambda team, _, got, root, __: dist.broadcast(got, root, team.group),
    "scatter": lambda team, sent, got, root, _: dist.scatter(got, team.parts(sent, root), root, team.group),
    "gather": lambda team, sent, got, root, _: dist.gather(sent, team.parts(got, root), root, team.group),
    "reduce": lambda team, _, got, root, op: dist.reduce(got, root, getattr(dist.ReduceOp, op), team.group),
    "all_reduce": lambda team, _, got, __, op: dist.all_reduce(got, getattr(dist.ReduceOp, op), team.group),
    "ring all_reduce": lambda team, _, got, __, op: ring_all_reduce(got, op, team),
    "all_gather": lambda team, sent, got, *_: dist.all_gather_into_tensor(got, sent, team.group),
    "reduce_scatter": lambda team, sent, got, _, op: dist.reduce_scatter_tensor(
        got, sent, getattr(dist.ReduceOp, op), team.group
    ),
    "all_to_all": lambda team, sent, got, *_: dist.all_to_all_single(got, sent, group=team.group),
}


def moved(team: Team, op: str) -> Results:
    """Blocks that an operation takes from rank to rank; operations with a root have each rank as the root in turn."""
    sources = {"send/recv": [team.beside(-1)], "isend/irecv": [team.beside(1)]}.get(op, list(team.ranks))
    own = op in ("scatter", "all_to_all")  # each rank is sent a block of its own
    for root in team.ranks if op in ("broadcast", "scatter", "gather") else team.ranks[:1]:
        if op in ("broadcast", "scatter"):
            sources = [root]
        sent = torch.cat([block(team, team.rank, rank) for rank in team.ranks]) if own else block(team, team.rank)
        is_sent_in_place = op == "broadcast" and root == team.rank
        got = sent if is_sent_in_place else torch.zeros(COUNT * len(sources), device=team.device)
        CALLS[op](team, sent, got, root, "")
        if op != "gather" or root == team.rank:
            for source, part in zip(sources, got.split(COUNT), strict=True):
                yield source, part, block(team, source, team.rank if own else 0)


def combined(team: Team, op: str, reduction: str) -> Results:
    """Results of a reduction, by every root."""
    parts = team.size if op == "reduce_scatter" else 1
    for root in team.ranks if op == "reduce" else team.ranks[:1]:
        sent = term(team, reduction, team.rank, COUNT * parts)
        got = torch.zeros(COUNT, device=team.device) if parts > 1 else sent
        CALLS[op](team, sent, got, root, reduction)
        if op != "reduce" or root == team.rank:  # elsewhere the buffer may hold anything
            terms = [term(team, reduction, rank, COUNT * parts) for rank in team.ranks]
            expected = functools.reduce(COMBINE[reduction], terms).split(COUNT)
            yield -1, got, expected[team.ranks.index(team.rank) if parts > 1 else 0]


MOVES = ("send/recv", "isend/irecv", "broadcast", "scatter", "gather", "all_gather", "all_to_all")
CHECKS: dict[str, Check] = {
    **{op: functools.partial(moved, op=op) for op in MOVES},
    **{
        f"{op} {reduction}": functools.partial(combined, op=op, reduction=reduction)
        for op in ("reduce", "all_reduce", "reduce_scatter", "ring all_reduce")
        for reduction in COMBINE
    },
}


def bus_factor(op: str, size: int) -> float:
    """Bytes that the busiest link must carry per byte of the buffer: makes figures of different numbers of ranks comparable."""
    share = (size - 1) / size
    return 2 * share if "all_reduce" in op else share if op in SHARED else 1.0


def operations(team: Team, size_bytes: int) -> dict[str, Callable[[], object]]:
    """Each operation on buffers of its own kind; call one as often as you like."""
    part = max(1, size_bytes // 4 // team.size)
    whole, own = slice(None), slice(part)
    sent = {op: own if "gather" in op else whole for op in CALLS}
    got = {op: own if op in ("scatter", "reduce_scatter") else whole for op in CALLS}
    a, b = (torch.ones(part * team.size, device=team.device) for _ in range(2))
    return {
        op: functools.partial(call, team, a[sent[op]], b[got[op]], team.ranks[0], "MAX") for op, call in CALLS.items()
    }


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """The median of ROUNDS, after one that is not counted."""
    taken = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        run()
        settle(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def settle(device: torch.device) -> None:
    """Waits until the device has done its queue; a CPU has none."""
    if DEVICE_TRAITS[device.type].queues_work:
        torch.accelerator.synchronize(device)


def pairs(hosts: Sequence[str]) -> list[Pair]:
    """By rank's host. Of many ranks: those on one host, and between hosts those of equal place (one "rail" of network cards)."""
    everybody = itertools.combinations(range(len(hosts)), 2)
    if len(hosts) <= ALL_PAIRS:
        return list(everybody)
    place = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
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
    """Floating-point operations a second: bf16 on a GPU, fp32 on a CPU; the median of a second's matmuls. And the share of that second in
    which this thread had a core: a core that is slow has all of it, a rank that other programs hold up has not."""
    n, dtype = DEVICE_TRAITS[team.device.type].probe
    a, b = (torch.randn(n, n, dtype=dtype, device=team.device) for _ in range(2))
    a @ b
    settle(team.device)
    taken: list[float] = []
    had, began = time.thread_time(), time.perf_counter()
    while len(taken) < 5 or time.perf_counter() < began + MATMUL_S:
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
        dist.recv(torch.zeros(1, dtype=torch.float64, device=team.device), peer, team.group)
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
    got = torch.zeros_like(expected)
    dcp.load({f"rank{neighbour}": got}, storage_reader=reader, process_group=team.group)
    wrong = "" if torch.equal(got, expected) else f"what rank {neighbour} wrote was read with other bits"
    return {"write_s": writer.seconds, "read_s": reader.seconds, "wrong": wrong}


def _noise(rank: int, size_bytes: int) -> Tensor:
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


class _Writer(dcp.FileSystemWriter):
    """Times this rank's write, to the disk itself (fsync), and has the page cache forget the files before they are read."""

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
    seconds = 0.0

    def read_data(self, *plan: Any, **named: Any) -> Future[None]:
        start = time.perf_counter()
        (done := super().read_data(*plan, **named)).wait()
        self.seconds = time.perf_counter() - start
        return done
