"""Measurements of one rank: results and times of every operation, links, matmuls, clocks, the folder of runs.

Operations are tested on small integers and powers of two, whose sums and products are exact in fp32 in any order, so results must be equal.
Times are in seconds, per operation and size. A size is that of a rank's largest buffer, as in nccl-tests.
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
COUNT = 1021  # elements of a block: a prime, so that no number of ranks or chunks divides it
ROUNDS = 5
SHARED = ("all_gather", "reduce_scatter", "all_to_all", "scatter", "gather")
Pair = tuple[int, int]
ALL_PAIRS = 64  # maximum number of ranks for which every pair is measured
PINGS, TRIES = 10, 3
SMALLEST, GROWTH = 1 << 16, 4  # bytes of the first transfer, and its growth until one takes LONG_S
LONG_S = 0.02
MATMUL_S = 1.0  # duration of the matmuls, on all ranks at the same time as in training


@dataclass(frozen=True)
class Communicator:
    """A set of ranks that run collectives together, as seen by one of them."""

    ranks: tuple[int, ...]  # global
    rank: int  # global rank of this process
    device: torch.device
    group: dist.ProcessGroup | None = None  # None: all ranks

    @property
    def size(self) -> int:
        return len(self.ranks)

    def neighbour(self, distance: int) -> int:
        """Returns the global rank `distance` positions further in the ring."""
        return self.ranks[(self.ranks.index(self.rank) + distance) % self.size]

    def parts(self, whole: Tensor, root: int) -> list[Tensor] | None:
        """Returns views of each rank's part of the tensor; None on ranks other than the root."""
        return list(whole.chunk(self.size)) if self.rank == root else None


# The source rank of a block (-1: a reduction over all ranks), the received block, and the expected one.
Results = Iterator[tuple[int, Tensor, Tensor]]
Check = Callable[[Communicator], Results]


def wrong(check: Check, comm: Communicator) -> list[tuple[int, str]]:
    """Returns (source rank, description) of each wrong block at this rank. Collective: all ranks of `comm` call it."""
    found = []
    for source, got, expected in check(comm):
        if not torch.equal(got, expected):
            differ = (got != expected).cpu()
            first, count = int(differ.nonzero()[0]), int(differ.sum())
            values = f"{got[first].item():g}, not {expected[first].item():g}"
            found.append((source, f"element {first} is {values} ({count} of {differ.numel()} differ)"))
    return found


def block(comm: Communicator, source: int, destination: int = 0) -> Tensor:
    """Returns the block that `source` sends to `destination`: (COUNT,) integers below 1009."""
    return ((torch.arange(COUNT) * 31 + source * 101 + destination * 7) % 1009).float().to(comm.device)


def term(comm: Communicator, op: str, rank: int, count: int) -> Tensor:
    """Returns the input of `rank` to a reduction: (count,). Products stay powers of two near 1 for any number of ranks."""
    elements = torch.arange(count)
    if op == "PRODUCT":
        return (2.0 ** ((elements + rank) % 3 - 1)).to(comm.device)
    return ((elements * 7 + rank * 13) % 1009).float().to(comm.device)


def send_in_turn(comm: Communicator, sent: Tensor, got: Tensor) -> None:
    """Sends to the next rank of the ring and receives from the previous one. Even positions send first, which avoids a deadlock."""
    if first := comm.ranks.index(comm.rank) % 2 == 0:
        dist.send(sent, comm.neighbour(1), comm.group)
    dist.recv(got, comm.neighbour(-1), comm.group)
    if not first:
        dist.send(sent, comm.neighbour(1), comm.group)


def exchange(comm: Communicator, sent: Tensor, to: int, got: Tensor, source: int) -> None:
    both = [dist.P2POp(dist.irecv, got, source, comm.group), dist.P2POp(dist.isend, sent, to, comm.group)]
    for work in dist.batch_isend_irecv(both):
        work.wait()


def ring_all_reduce(tensor: Tensor, op: str, comm: Communicator) -> None:
    """All-reduces a one-dimensional tensor in place with isend and irecv: a ring over chunks, in which every link carries 2 (n-1)/n of the
    tensor. It may have fewer elements than there are ranks. Two passes of n-1 hops (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce
    algorithms"): the first reduces each chunk over all ranks, the second distributes the reduced chunks."""
    size, place = comm.size, comm.ranks.index(comm.rank)
    chunks = tensor.tensor_split(size)
    for step in range(2 * (size - 1)):
        sent, mine = chunks[(place - step) % size], chunks[(place - step - 1) % size]
        got = torch.empty_like(mine)
        exchange(comm, sent.contiguous(), comm.neighbour(1), got, comm.neighbour(-1))
        mine.copy_(COMBINE[op](mine, got) if step < size - 1 else got)


# Operations on the buffers of a rank: (comm, sent, got, root, reduction). Broadcast, reduce and all-reduce are in place, in `got`.
CALLS: dict[str, Callable[[Communicator, Tensor, Tensor, int, str], object]] = {
    "send/recv": lambda comm, sent, got, *_: send_in_turn(comm, sent, got),
    "isend/irecv": lambda comm, sent, got, *_: exchange(comm, sent, comm.neighbour(-1), got, comm.neighbour(1)),
    "broadcast": lambda comm, _, got, root, __: dist.broadcast(got, root, comm.group),
    "scatter": lambda comm, sent, got, root, _: dist.scatter(got, comm.parts(sent, root), root, comm.group),
    "gather": lambda comm, sent, got, root, _: dist.gather(sent, comm.parts(got, root), root, comm.group),
    "reduce": lambda comm, _, got, root, op: dist.reduce(got, root, getattr(dist.ReduceOp, op), comm.group),
    "all_reduce": lambda comm, _, got, __, op: dist.all_reduce(got, getattr(dist.ReduceOp, op), comm.group),
    "ring all_reduce": lambda comm, _, got, __, op: ring_all_reduce(got, op, comm),
    "all_gather": lambda comm, sent, got, *_: dist.all_gather_into_tensor(got, sent, comm.group),
    "reduce_scatter": lambda comm, sent, got, _, op: dist.reduce_scatter_tensor(
        got, sent, getattr(dist.ReduceOp, op), comm.group
    ),
    "all_to_all": lambda comm, sent, got, *_: dist.all_to_all_single(got, sent, group=comm.group),
}


def moved(comm: Communicator, op: str) -> Results:
    """Yields the results of an operation that moves blocks; with a root, each rank is the root once."""
    sources = {"send/recv": [comm.neighbour(-1)], "isend/irecv": [comm.neighbour(1)]}.get(op, list(comm.ranks))
    own = op in ("scatter", "all_to_all")  # each destination receives a different block
    for root in comm.ranks if op in ("broadcast", "scatter", "gather") else comm.ranks[:1]:
        if op in ("broadcast", "scatter"):
            sources = [root]
        sent = torch.cat([block(comm, comm.rank, rank) for rank in comm.ranks]) if own else block(comm, comm.rank)
        is_sent_in_place = op == "broadcast" and root == comm.rank
        got = sent if is_sent_in_place else torch.zeros(COUNT * len(sources), device=comm.device)
        CALLS[op](comm, sent, got, root, "")
        if op != "gather" or root == comm.rank:
            for source, part in zip(sources, got.split(COUNT), strict=True):
                yield source, part, block(comm, source, comm.rank if own else 0)


def combined(comm: Communicator, op: str, reduction: str) -> Results:
    """Yields the results of a reduction; with a root, each rank is the root once."""
    parts = comm.size if op == "reduce_scatter" else 1
    for root in comm.ranks if op == "reduce" else comm.ranks[:1]:
        sent = term(comm, reduction, comm.rank, COUNT * parts)
        got = torch.zeros(COUNT, device=comm.device) if parts > 1 else sent
        CALLS[op](comm, sent, got, root, reduction)
        if op != "reduce" or root == comm.rank:  # on other ranks the buffer is undefined
            terms = [term(comm, reduction, rank, COUNT * parts) for rank in comm.ranks]
            expected = functools.reduce(COMBINE[reduction], terms).split(COUNT)
            yield -1, got, expected[comm.ranks.index(comm.rank) if parts > 1 else 0]


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
    """Returns the bytes on the busiest link per byte of the buffer, as in nccl-tests: comparable for any number of ranks."""
    share = (size - 1) / size
    return 2 * share if "all_reduce" in op else share if op in SHARED else 1.0


def operations(comm: Communicator, size_bytes: int) -> dict[str, Callable[[], object]]:
    """Returns the operations, each bound to buffers of `size_bytes`; each may be called repeatedly."""
    part = max(1, size_bytes // 4 // comm.size)
    whole, own = slice(None), slice(part)
    sent = {op: own if "gather" in op else whole for op in CALLS}
    got = {op: own if op in ("scatter", "reduce_scatter") else whole for op in CALLS}
    a, b = (torch.ones(part * comm.size, device=comm.device) for _ in range(2))
    return {
        op: functools.partial(call, comm, a[sent[op]], b[got[op]], comm.ranks[0], "MAX") for op, call in CALLS.items()
    }


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """Returns the median time of ROUNDS calls, after one warmup call."""
    taken = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        run()
        settle(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def settle(device: torch.device) -> None:
    """Waits until the device has finished all queued work; a CPU has no queue."""
    if DEVICE_TRAITS[device.type].queues_work:
        torch.accelerator.synchronize(device)


def pairs(hosts: Sequence[str]) -> list[Pair]:
    """Returns the pairs to measure. `hosts`: by rank. Above ALL_PAIRS ranks: pairs on one host, and pairs of equal local rank ("rails")."""
    everybody = itertools.combinations(range(len(hosts)), 2)
    if len(hosts) <= ALL_PAIRS:
        return list(everybody)
    place = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    return [(a, b) for a, b in everybody if hosts[a] == hosts[b] or place[a] == place[b]]


def disjoint_rounds(chosen: Iterable[Pair], hosts: Sequence[str]) -> list[list[Pair]]:
    """Groups pairs into rounds; in a round each host occurs in at most one pair, so that measurements do not share a link."""
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


def measure(comm: Communicator, pair: Pair) -> dict[str, float]:
    """Measures the link from this rank to the other of the pair: `latency_s` (half of the shortest round trip), `bytes_s`."""
    first, second = pair
    if comm.rank == first:
        figures = _send(comm, second)
        _answer(comm, second)
        return figures
    _answer(comm, first)
    return _send(comm, first)


def _send(comm: Communicator, peer: int) -> dict[str, float]:
    """Measures as the sender: sends a header with the size, then the payload, and receives an answer. A size of 0 ends the exchange."""
    header, answer = torch.zeros(1, dtype=torch.int64, device=comm.device), torch.zeros(1, device=comm.device)

    def trip(size: int) -> float:
        payload = torch.zeros(size, dtype=torch.uint8, device=comm.device)
        header.fill_(size)
        settle(comm.device)
        start = time.perf_counter()
        dist.send(header, peer, comm.group)
        dist.send(payload, peer, comm.group)
        dist.recv(answer, peer, comm.group)
        settle(comm.device)
        return time.perf_counter() - start

    quickest = min(trip(1) for _ in range(PINGS + 1))
    size, taken = SMALLEST, trip(SMALLEST)
    while taken < LONG_S and size < DEVICE_TRAITS[comm.device.type].largest_message:
        size *= GROWTH
        taken = min(trip(size) for _ in range(TRIES))
    dist.send(header.zero_(), peer, comm.group)
    return {"latency_s": quickest / 2, "bytes_s": size / taken}  # `taken` includes header and answer, which are short


def _answer(comm: Communicator, peer: int) -> None:
    header, answer = torch.zeros(1, dtype=torch.int64, device=comm.device), torch.zeros(1, device=comm.device)
    while True:
        dist.recv(header, peer, comm.group)
        if (size := int(header.item())) == 0:
            return
        dist.recv(torch.empty(size, dtype=torch.uint8, device=comm.device), peer, comm.group)
        dist.send(answer, peer, comm.group)


def matmul_flops(comm: Communicator) -> tuple[float, float]:
    """Returns floating-point operations a second (bf16 on a GPU, fp32 on a CPU; median over MATMUL_S) and the share of that time in which
    this thread ran: near 1 on a core that is slow by itself, less on one that other programs use."""
    n, dtype = DEVICE_TRAITS[comm.device.type].probe
    a, b = (torch.randn(n, n, dtype=dtype, device=comm.device) for _ in range(2))
    a @ b
    settle(comm.device)
    taken: list[float] = []
    had, began = time.thread_time(), time.perf_counter()
    while len(taken) < 5 or time.perf_counter() < began + MATMUL_S:
        start = time.perf_counter()
        a @ b
        settle(comm.device)
        taken.append(time.perf_counter() - start)
    share = (time.thread_time() - had) / (time.perf_counter() - began)
    return 2.0 * n**3 / statistics.median(taken), min(1.0, share)


def clock_offset(comm: Communicator, peer: int) -> dict[str, float]:
    """Returns `ahead_s`, by which this rank's clock is ahead of `peer`'s, by the shortest round trip as in NTP (RFC 5905, section 8), and
    `error_s`, half of that round trip, which bounds the error. `peer` calls `answer_clock`."""
    trips = []
    for _ in range(PINGS):
        left = time.time()
        dist.send(torch.zeros(1, dtype=torch.float64, device=comm.device), peer, comm.group)
        reply = torch.zeros(2, dtype=torch.float64, device=comm.device)
        dist.recv(reply, peer, comm.group)
        arrived, answered = reply.tolist()
        back = time.time()
        trips.append(((back - left) - (answered - arrived), ((left - arrived) + (back - answered)) / 2))
    took, ahead = min(trips)
    return {"ahead_s": ahead, "error_s": max(took, 0.0) / 2}


def answer_clock(comm: Communicator, peer: int) -> None:
    """Answers the messages of `clock_offset` with this rank's time."""
    for _ in range(PINGS):
        dist.recv(torch.zeros(1, dtype=torch.float64, device=comm.device), peer, comm.group)
        settle(comm.device)
        arrived = time.time()
        dist.send(torch.tensor([arrived, time.time()], dtype=torch.float64, device=comm.device), peer, comm.group)


def measure_folder(comm: Communicator, folder: Path, size_bytes: int) -> dict[str, Any]:
    """Writes a checkpoint into `folder`; then each rank reads what its neighbour wrote. Returns `write_s` and `read_s`, without the waiting
    for other ranks, and `wrong`, the description of a mismatch or "". Raises CheckpointException, which names the ranks."""
    neighbour = comm.neighbour(1)
    writer, reader = _Writer(folder), _Reader(folder)
    dcp.save({f"rank{comm.rank}": _noise(comm.rank, size_bytes)}, storage_writer=writer, process_group=comm.group)
    expected = _noise(neighbour, size_bytes)
    got = torch.zeros_like(expected)
    dcp.load({f"rank{neighbour}": got}, storage_reader=reader, process_group=comm.group)
    wrong = "" if torch.equal(got, expected) else f"data that rank {neighbour} wrote was read with different bits"
    return {"write_s": writer.seconds, "read_s": reader.seconds, "wrong": wrong}


def _noise(rank: int, size_bytes: int) -> Tensor:
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(rank))


class _Writer(dcp.FileSystemWriter):
    """Times this rank's write with fsync, and drops the files from the page cache, so that reading reaches the disk."""

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
