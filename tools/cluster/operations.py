"""Every operation: with numbers that can be checked exactly (whose block is wrong, and where it was seen), and timed.

Small whole numbers and powers of two: sums and products of them are exact in fp32 in any order, so `==` is the test.
Seconds are per operation and size. A size is the largest buffer that a rank holds, as in nccl-tests.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallelisms.device import DIFFERENCES

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}
COUNT = 1021  # elements of a block: a prime, which no number of ranks or chunks divides
ROUNDS = 5
SHARED = ("all_gather", "reduce_scatter", "all_to_all", "scatter", "gather")


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
        """The global rank so many places on in the circle."""
        return self.ranks[(self.ranks.index(self.rank) + distance) % self.size]


# Whose block it is (-1: all ranks' numbers are in it), what arrived, and what must.
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


def term(team: Team, op: str, rank: int, count: int = COUNT) -> Tensor:
    """The values of `rank` in a reduction: (count,). Products stay powers of two near 1, whatever the number of ranks."""
    elements = torch.arange(count)
    if op == "PRODUCT":
        return (2.0 ** ((elements + rank) % 3 - 1)).to(team.device)
    return ((elements * 7 + rank * 13) % 1009).float().to(team.device)


def reduced(team: Team, op: str, count: int = COUNT) -> Tensor:
    """The expected result of the reduction over the team."""
    return functools.reduce(COMBINE[op], [term(team, op, rank, count) for rank in team.ranks])


def send_in_turn(team: Team, sent: Tensor, got: Tensor) -> None:
    """Sends to the right and receives from the left; one end of every pair sends first."""
    if first := team.ranks.index(team.rank) % 2 == 0:
        dist.send(sent, team.beside(1), team.group)
    dist.recv(got, team.beside(-1), team.group)
    if not first:
        dist.send(sent, team.beside(1), team.group)


def exchange(team: Team, sent: Tensor, to: int, got: Tensor, source: int) -> None:
    """Sends and receives at once."""
    both = [dist.P2POp(dist.irecv, got, source, team.group), dist.P2POp(dist.isend, sent, to, team.group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def ring_all_reduce(tensor: Tensor, op: str, team: Team) -> None:
    """All-reduce out of isend and irecv alone: in a ring, in chunks, so that every link carries 2 (n-1)/n of the tensor.

    Two rounds of n-1 hops (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"): in the first each chunk
    collects all ranks' numbers on its way round, in the second the finished chunks go round once more.
    In place; `tensor` is one-dimensional and may have fewer elements than there are ranks. All ranks of the team call it.
    """
    size, place = team.size, team.ranks.index(team.rank)
    chunks = tensor.tensor_split(size)

    def hop(sent: int, received: int) -> Tensor:
        got = torch.empty_like(chunks[received % size])
        exchange(team, chunks[sent % size].contiguous(), team.beside(1), got, team.beside(-1))
        return got

    for step in range(size - 1):
        got = hop(place - step, place - step - 1)
        mine = chunks[(place - step - 1) % size]
        mine.copy_(COMBINE[op](mine, got))
    for step in range(size - 1):
        chunks[(place - step) % size].copy_(hop(place - step + 1, place - step))


def send_recv(team: Team) -> Results:
    """Each to its right."""
    left, got = team.beside(-1), torch.zeros(COUNT, device=team.device)
    send_in_turn(team, block(team, team.rank), got)
    yield left, got, block(team, left)


def isend_irecv(team: Team) -> Results:
    """Each to its left and from its right, both at once."""
    right, got = team.beside(1), torch.zeros(COUNT, device=team.device)
    exchange(team, block(team, team.rank), team.beside(-1), got, right)
    yield right, got, block(team, right)


def broadcast(team: Team) -> Results:
    for root in team.ranks:
        got = block(team, root) if root == team.rank else torch.zeros(COUNT, device=team.device)
        dist.broadcast(got, root, team.group)
        yield root, got, block(team, root)


def scatter(team: Team) -> Results:
    for root in team.ranks:
        blocks = [block(team, root, rank) for rank in team.ranks] if root == team.rank else None
        got = torch.zeros(COUNT, device=team.device)
        dist.scatter(got, blocks, root, team.group)
        yield root, got, block(team, root, team.rank)


def gather(team: Team) -> Results:
    for root in team.ranks:
        parts = [torch.zeros(COUNT, device=team.device) for _ in team.ranks] if root == team.rank else None
        dist.gather(block(team, team.rank, root), parts, root, team.group)
        for source, got in zip(team.ranks, parts or (), strict=False):
            yield source, got, block(team, source, root)


def all_gather(team: Team) -> Results:
    got = torch.zeros(COUNT * team.size, device=team.device)
    dist.all_gather_into_tensor(got, block(team, team.rank), team.group)
    for source, part in zip(team.ranks, got.split(COUNT), strict=True):
        yield source, part, block(team, source)


def all_to_all(team: Team) -> Results:
    got = torch.zeros(COUNT * team.size, device=team.device)
    dist.all_to_all_single(got, torch.cat([block(team, team.rank, rank) for rank in team.ranks]), group=team.group)
    for source, part in zip(team.ranks, got.split(COUNT), strict=True):
        yield source, part, block(team, source, team.rank)


def reduce(team: Team, op: str) -> Results:
    for root in team.ranks:
        got = term(team, op, team.rank)
        dist.reduce(got, root, getattr(dist.ReduceOp, op), team.group)
        if root == team.rank:  # elsewhere the buffer may hold anything
            yield -1, got, reduced(team, op)


def all_reduce(team: Team, op: str) -> Results:
    got = term(team, op, team.rank)
    dist.all_reduce(got, getattr(dist.ReduceOp, op), team.group)
    yield -1, got, reduced(team, op)


def reduce_scatter(team: Team, op: str) -> Results:
    got, whole = torch.zeros(COUNT, device=team.device), COUNT * team.size
    dist.reduce_scatter_tensor(got, term(team, op, team.rank, whole), getattr(dist.ReduceOp, op), team.group)
    yield -1, got, reduced(team, op, whole).split(COUNT)[team.ranks.index(team.rank)]


def ring(team: Team, op: str) -> Results:
    got = term(team, op, team.rank)
    ring_all_reduce(got, op, team)
    yield -1, got, reduced(team, op)


CHECKS: dict[str, Check] = {
    "send/recv": send_recv,
    "isend/irecv": isend_irecv,
    "broadcast": broadcast,
    "scatter": scatter,
    "gather": gather,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    **{f"reduce {op}": functools.partial(reduce, op=op) for op in COMBINE},
    **{f"all_reduce {op}": functools.partial(all_reduce, op=op) for op in COMBINE},
    **{f"reduce_scatter {op}": functools.partial(reduce_scatter, op=op) for op in COMBINE},
    **{f"ring all_reduce {op}": functools.partial(ring, op=op) for op in COMBINE},
}


def bus_factor(op: str, size: int) -> float:
    """Bytes that the busiest link must carry per byte of the buffer: makes figures of different numbers of ranks comparable."""
    share = (size - 1) / size
    return {"all_reduce": 2 * share, "ring all_reduce": 2 * share}.get(op, share if op in SHARED else 1.0)


def operations(team: Team, size_bytes: int) -> dict[str, Callable[[], object]]:
    """Each operation on buffers of its own kind; call one as often as you like."""
    part = max(1, size_bytes // 4 // team.size)
    whole, piece = torch.ones(part * team.size, device=team.device), torch.ones(part, device=team.device)
    root, first = team.ranks[0], team.rank == team.ranks[0]
    pieces = list(whole.split(part)) if first else None
    return {
        "send/recv": lambda: send_in_turn(team, whole, torch.empty_like(whole)),
        "isend/irecv": lambda: exchange(team, whole, team.beside(-1), torch.empty_like(whole), team.beside(1)),
        "broadcast": lambda: dist.broadcast(whole, root, team.group),
        "scatter": lambda: dist.scatter(piece, pieces, root, team.group),
        "gather": lambda: dist.gather(piece, pieces, root, team.group),
        "reduce": lambda: dist.reduce(whole, root, dist.ReduceOp.MAX, team.group),
        "all_reduce": lambda: dist.all_reduce(whole, dist.ReduceOp.MAX, team.group),
        "ring all_reduce": lambda: ring_all_reduce(whole, "MAX", team),
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
