"""Every operation once with numbers that can be checked exactly: whose block is wrong, and where it was seen.

Small whole numbers and powers of two: sums and products of them are exact in fp32 in any order, so `==` is the test.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tools.cluster.ring import COMBINE, ring_all_reduce

COUNT = 1021  # elements of a block: a prime, which no number of ranks or chunks divides
REDUCE = tuple(COMBINE)


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


@dataclass(frozen=True)
class Wrong:
    """A result that is not what it must be. `source`: the rank whose block it is; -1: all ranks' numbers are in it."""

    op: str
    source: int
    at: int
    how: str


Check = Callable[[Team], Iterator[Wrong]]


def block(team: Team, source: int, destination: int = 0) -> Tensor:
    """What `source` has for `destination`: (COUNT,) whole numbers below 1009."""
    return ((torch.arange(COUNT) * 31 + source * 101 + destination * 7) % 1009).float().to(team.device)


def term(team: Team, op: str, rank: int, count: int = COUNT) -> Tensor:
    """What `rank` puts into a reduction: (count,). Products stay powers of two near 1, whatever the number of ranks."""
    elements = torch.arange(count)
    if op == "PRODUCT":
        return (2.0 ** ((elements + rank) % 3 - 1)).to(team.device)
    return ((elements * 7 + rank * 13) % 1009).float().to(team.device)


def reduced(team: Team, op: str, count: int = COUNT) -> Tensor:
    """What the reduction over the team must give."""
    return functools.reduce(COMBINE[op], [term(team, op, rank, count) for rank in team.ranks])


def difference(got: Tensor, expected: Tensor) -> str:
    """Empty if they are equal."""
    if torch.equal(got, expected):
        return ""
    differ = (got != expected).cpu()
    first = int(differ.nonzero()[0])
    return f"element {first} is {got[first].item():g}, not {expected[first].item():g} ({int(differ.sum())} of {differ.numel()} differ)"


def send_recv(team: Team) -> Iterator[Wrong]:
    """Each to its right, one end of every pair sends first."""
    left, right = team.beside(-1), team.beside(1)
    got = torch.zeros(COUNT, device=team.device)
    steps = [lambda: dist.send(block(team, team.rank), right, team.group), lambda: dist.recv(got, left, team.group)]
    for step in steps if team.ranks.index(team.rank) % 2 == 0 else reversed(steps):
        step()
    yield from _wrong(team, "send/recv", left, got, block(team, left))


def isend_irecv(team: Team) -> Iterator[Wrong]:
    """Each to its left and from its right, both at once."""
    left, right = team.beside(-1), team.beside(1)
    got = torch.zeros(COUNT, device=team.device)
    sent = block(team, team.rank)
    both = [dist.P2POp(dist.irecv, got, right, team.group), dist.P2POp(dist.isend, sent, left, team.group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    yield from _wrong(team, "isend/irecv", right, got, block(team, right))


def broadcast(team: Team) -> Iterator[Wrong]:
    for root in team.ranks:
        got = block(team, root) if root == team.rank else torch.zeros(COUNT, device=team.device)
        dist.broadcast(got, root, team.group)
        yield from _wrong(team, "broadcast", root, got, block(team, root))


def scatter(team: Team) -> Iterator[Wrong]:
    for root in team.ranks:
        blocks = [block(team, root, rank) for rank in team.ranks] if root == team.rank else None
        got = torch.zeros(COUNT, device=team.device)
        dist.scatter(got, blocks, root, team.group)
        yield from _wrong(team, "scatter", root, got, block(team, root, team.rank))


def gather(team: Team) -> Iterator[Wrong]:
    for root in team.ranks:
        parts = [torch.zeros(COUNT, device=team.device) for _ in team.ranks] if root == team.rank else None
        dist.gather(block(team, team.rank, root), parts, root, team.group)
        for source, got in zip(team.ranks, parts or (), strict=False):
            yield from _wrong(team, "gather", source, got, block(team, source, root))


def all_gather(team: Team) -> Iterator[Wrong]:
    got = torch.zeros(COUNT * team.size, device=team.device)
    dist.all_gather_into_tensor(got, block(team, team.rank), team.group)
    for source, part in zip(team.ranks, got.split(COUNT), strict=True):
        yield from _wrong(team, "all_gather", source, part, block(team, source))


def all_to_all(team: Team) -> Iterator[Wrong]:
    got = torch.zeros(COUNT * team.size, device=team.device)
    dist.all_to_all_single(got, torch.cat([block(team, team.rank, rank) for rank in team.ranks]), group=team.group)
    for source, part in zip(team.ranks, got.split(COUNT), strict=True):
        yield from _wrong(team, "all_to_all", source, part, block(team, source, team.rank))


def reduce(team: Team, op: str) -> Iterator[Wrong]:
    for root in team.ranks:
        got = term(team, op, team.rank)
        dist.reduce(got, root, getattr(dist.ReduceOp, op), team.group)
        if root == team.rank:  # elsewhere the buffer may hold anything
            yield from _wrong(team, f"reduce {op}", -1, got, reduced(team, op))


def all_reduce(team: Team, op: str) -> Iterator[Wrong]:
    got = term(team, op, team.rank)
    dist.all_reduce(got, getattr(dist.ReduceOp, op), team.group)
    yield from _wrong(team, f"all_reduce {op}", -1, got, reduced(team, op))


def reduce_scatter(team: Team, op: str) -> Iterator[Wrong]:
    got, whole = torch.zeros(COUNT, device=team.device), COUNT * team.size
    dist.reduce_scatter_tensor(got, term(team, op, team.rank, whole), getattr(dist.ReduceOp, op), team.group)
    expected = reduced(team, op, whole).split(COUNT)[team.ranks.index(team.rank)]
    yield from _wrong(team, f"reduce_scatter {op}", -1, got, expected)


def ring(team: Team, op: str) -> Iterator[Wrong]:
    got = term(team, op, team.rank)
    ring_all_reduce(got, op, team.ranks, team.rank, team.group)
    yield from _wrong(team, f"ring all_reduce {op}", -1, got, reduced(team, op))


def _wrong(team: Team, op: str, source: int, got: Tensor, expected: Tensor) -> Iterator[Wrong]:
    if how := difference(got, expected):
        yield Wrong(op, source, team.rank, how)


CHECKS: dict[str, Check] = {
    "send/recv": send_recv,
    "isend/irecv": isend_irecv,
    "broadcast": broadcast,
    "scatter": scatter,
    "gather": gather,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    **{f"reduce {op}": functools.partial(reduce, op=op) for op in REDUCE},
    **{f"all_reduce {op}": functools.partial(all_reduce, op=op) for op in REDUCE},
    **{f"reduce_scatter {op}": functools.partial(reduce_scatter, op=op) for op in REDUCE},
    **{f"ring all_reduce {op}": functools.partial(ring, op=op) for op in REDUCE},
}
