"""Process groups of several processes: every operation against what it must give, torch's own ways in, giving up, forming anew.

Each test runs for every kind: what is tested on gloo is the code of NCCL, but for the few lines that name it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.torch_version import TorchVersion

from ft.compat.process_groups import ErrorSwallowingProcessGroup
from ft.process_groups.baby import ChildEngine, ProcessGroupBabyGloo, ProcessGroupBabyNCCL
from ft.process_groups.base import Generation, GroupWork, ProcessGroup
from ft.process_groups.errors import ProcessGroupError, RendezvousFailed
from ft.process_groups.fork_server import Child
from ft.process_groups.forming import Rendezvous
from ft.process_groups.gloo import GlooEngine, ProcessGroupGloo
from ft.process_groups.nccl import ProcessGroupNCCL
from ft.process_groups.store import StoreClient, serve
from tests.multiproc.pool import Pool

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="in-process gloo needs /proc"),
    pytest.mark.timeout(600),  # a busy machine takes its time to import torch
]

GPUS = torch.cuda.device_count()
enough_gpus = pytest.mark.skipif(GPUS < 3, reason=f"NCCL needs a GPU per rank; there are {GPUS} of 3")
KINDS = ["gloo", "baby_gloo", *(pytest.param(kind, marks=enough_gpus) for kind in ("nccl", "baby_nccl"))]
SIZE = 3
LIMIT_S = 300.0  # for a whole run: who is slow because the machine is busy does not fail
_servers: list[TCPStore] = []  # of this worker; its groups may still be on their way out when a test is over


def make(kind: str, limit_s: float = 600.0, rendezvous_s: float = 120.0) -> ProcessGroup:
    if "nccl" in kind:
        torch.cuda.set_device(dist.get_rank())
        return {"nccl": ProcessGroupNCCL, "baby_nccl": ProcessGroupBabyNCCL}[kind](limit_s, rendezvous_s=rendezvous_s)
    classes = {"gloo": ProcessGroupGloo, "baby_gloo": ProcessGroupBabyGloo}
    return classes[kind](limit_s, rendezvous_s=rendezvous_s)


def server() -> str:
    """One store for all ranks of the run, host:port/; the first serves it."""
    port = torch.zeros((), dtype=torch.int64)
    if dist.get_rank() == 0:
        _servers.append(serve())
        port.fill_(_servers[-1].port)
    dist.broadcast(port, 0)
    return f"127.0.0.1:{int(port)}/"


def formed(kind: str, limit_s: float = 600.0) -> tuple[ProcessGroup, str]:
    group, address = make(kind, limit_s), server()
    group.configure(address + "first", dist.get_rank(), dist.get_world_size())
    dist.barrier()  # who gives up at once would fail the others while they still connect
    return group, address


def device(kind: str) -> str:
    return "cuda" if "nccl" in kind else "cpu"


def raised(error: type[Exception], action: object) -> str:
    try:
        action()  # type: ignore[operator]
    except error as problem:
        return str(problem)
    raise AssertionError("nothing was raised")


# ---------------------------------------------------------------------------------------------- truths


def every_operation(kind: str) -> None:
    group, _ = formed(kind)
    rank, to = dist.get_rank(), device(kind)
    ranks = range(SIZE)
    gloo = "gloo" in kind

    def given(by: int, *shape: int) -> torch.Tensor:
        """Returns the values that a rank contributes: its own, exact in fp32."""
        count = torch.Size(shape or (4,)).numel()
        return ((torch.arange(count) + 1.0) * 10**by).view(shape or (4,)).to(to)

    total = sum(given(r) for r in ranks)
    # in a tensor of its own, in a part of another one, in shared memory
    strided = torch.zeros(4, 3, device=to)[:, 1]
    spots = [torch.empty(4, device=to), torch.empty(10, device=to)[3:7]]
    if gloo:
        spots += [strided.contiguous(), torch.empty(4).share_memory_(), ProcessGroupBabyGloo.empty(9)[2:6]]
    for spot in spots:
        work = group.allreduce([spot.copy_(given(rank))])
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
        assert spot.equal(total) and work.get_future().value()[0] is spot and work.result()[0] is spot

    for op, expected in {"MAX": given(2), "MIN": given(0), "PRODUCT": given(0) * given(1) * given(2)}.items():
        options = dist.AllreduceOptions()
        options.reduceOp = getattr(dist.ReduceOp, op)
        group.allreduce([value := given(rank)], options).wait()
        assert value.equal(expected), op
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8):
        group.allreduce([value := torch.full((5,), rank + 1, dtype=dtype, device=to)]).wait()
        assert value.dtype == dtype and value.eq(6).all(), dtype

    several = [given(rank), given(rank, 2, 3)]
    group.allreduce_coalesced(several).wait()
    assert several[0].equal(total) and several[1].equal(sum(given(r, 2, 3) for r in ranks))

    for root in ranks:
        group.broadcast([value := given(rank)], root=root).wait()
        assert value.equal(given(root))
        options = dist.ReduceOptions()
        options.rootRank = root
        group.reduce([value := given(rank)], options).wait()
        assert rank != root or value.equal(total)

        options = dist.GatherOptions()
        options.rootRank = root
        out = [torch.zeros(4, device=to) for _ in ranks]
        group.gather([out] if rank == root else [], [given(rank)], options).wait()
        assert rank != root or all(part.equal(given(r)) for r, part in enumerate(out))

        options = dist.ScatterOptions()
        options.rootRank = root
        parts = [given(r) + root for r in ranks]
        group.scatter([value := torch.zeros(4, device=to)], [parts] if rank == root else [], options).wait()
        assert value.equal(given(rank) + root)

    out = [torch.zeros(4, device=to) for _ in ranks]
    group.allgather([out], [given(rank)]).wait()
    assert all(part.equal(given(r)) for r, part in enumerate(out))
    whole = torch.zeros(12, device=to)
    group.all_gather_single(whole, given(rank)).wait()
    assert whole.equal(torch.cat([given(r) for r in ranks]))
    wholes = [torch.zeros(12, device=to), torch.zeros(6, device=to)]
    group.allgather_into_tensor_coalesced(wholes, [given(rank), given(rank, 2)]).wait()
    assert wholes[1].equal(torch.cat([given(r, 2) for r in ranks]))

    mine = sum(given(r, 12) for r in ranks).view(3, 4)[rank]
    group.reduce_scatter_single(value := torch.zeros(4, device=to), given(rank, 12)).wait()
    assert value.equal(mine)
    group.reduce_scatter([value := torch.zeros(4, device=to)], [list(given(rank, 3, 4))]).wait()
    assert value.equal(mine)
    outs = [torch.zeros(4, device=to), torch.zeros(1, device=to)]
    group.reduce_scatter_tensor_coalesced(outs, [given(rank, 12), given(rank, 3)]).wait()
    assert outs[0].equal(mine) and outs[1].equal(sum(given(r, 3) for r in ranks)[rank : rank + 1])

    if not gloo or TorchVersion(torch.__version__) >= "2.12":  # torch 2.11's gloo has only the form for one tensor
        out = [torch.zeros(2, device=to) for _ in ranks]
        group.alltoall(out, list(given(rank, 3, 2))).wait()
        assert all(part.equal(given(r, 3, 2)[rank]) for r, part in enumerate(out))
    group.alltoall_base(value := torch.zeros(3, device=to), given(rank, 3), [], []).wait()
    assert value.equal(torch.stack([given(r, 3)[rank] for r in ranks]))
    # rank r gives k + 1 rows to rank k
    uneven = torch.zeros(3 * (rank + 1), device=to)
    group.alltoall_base(uneven, given(rank, 6), [rank + 1] * 3, [1, 2, 3]).wait()
    start = sum(range(1, rank + 1))
    assert uneven.equal(torch.cat([given(r, 6)[start : start + rank + 1] for r in ranks]))

    right, left = (rank + 1) % SIZE, (rank - 1) % SIZE
    sent, received = given(rank), torch.zeros(4, device=to)
    works = [group.send([sent], right, 7), group.recv([received], left, 7)]
    assert all(work.wait() for work in works) and received.equal(given(left))
    if gloo:
        if rank == 0:
            got = {}
            for _ in range(2):
                work = group.recv_anysource([received], 8)
                work.wait()
                got[work.source_rank()] = received.clone()
            assert sorted(got) == [1, 2] and all(value.equal(given(r)) for r, value in got.items())
        else:
            group.send([given(rank)], 0, 8).wait()

    group.barrier().wait()
    # many under way at once, in the order in which they were started
    values = [given(rank) + index for index in range(50)]
    for work in [group.allreduce([value]) for value in values]:
        work.wait()
    assert all(value.equal(total + 3 * index) for index, value in enumerate(values))
    chained = group.allreduce([given(rank)]).get_future().then(lambda future: future.value()[0] / SIZE)
    assert chained.wait().equal(total / SIZE)
    assert group.errored() is None and group.waits_since_s is None
    group.barrier().wait()
    group.shutdown(LIMIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_every_operation_gives_what_it_must(pool: Pool, kind: str):
    pool.run(SIZE, every_operation, kind, timeout_s=LIMIT_S)


# ---------------------------------------------------------------------------------------------- torch's ways in


def torchs_ways(kind: str) -> None:
    import torch.distributed._functional_collectives as funcol

    group, address = formed(kind)
    group.register("groups")
    rank, to = dist.get_rank(), device(kind)
    value = torch.full((3,), rank + 1.0, device=to)
    dist.all_reduce(value, group=group)
    assert value.eq(6).all()
    work = dist.all_reduce(value, group=group, async_op=True)
    assert work is not None and work.wait() and value.eq(18).all()
    whole = torch.zeros(3, device=to)
    dist.all_gather_into_tensor(whole, torch.full((1,), float(rank), device=to), group=group)
    assert whole.tolist() == [0, 1, 2]
    part = torch.zeros(1, device=to)
    dist.reduce_scatter_tensor(part, torch.arange(3.0, device=to), group=group)
    assert part.item() == 3 * rank

    ours = torch.full((2,), rank + 1.0, device=to)
    assert funcol.wait_tensor(funcol.all_reduce(ours, "sum", group)).eq(6).all() and ours.eq(rank + 1).all()
    assert funcol.wait_tensor(funcol.all_gather_tensor(ours, 0, group))[:2].eq(1 if group.size() > 1 else 0).all()

    mesh = DeviceMesh.from_group(group, to)
    # torch knows it as a group of one, whatever its size is today
    assert mesh.size() == 1 and mesh.get_group() is group
    dist.all_reduce(value, group=mesh.get_group())
    assert value.eq(54).all()

    group.abandon("on to the next")
    group.configure(address + "second", rank, dist.get_world_size())
    dist.all_reduce(value, group=group)  # registered still
    assert value.eq(162).all()
    dist.barrier()
    group.unregister()
    group.shutdown(LIMIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_torch_takes_it_for_a_group(pool: Pool, kind: str):
    pool.run(SIZE, torchs_ways, kind, timeout_s=LIMIT_S)


def hook_of_ddp(kind: str) -> list[list[float]]:
    """DDP around a swallowing group, its buckets by a hook: the gradients are sums over the ranks."""
    inner, _ = formed(kind)
    group = ErrorSwallowingProcessGroup(inner)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to(device(kind))
    wrapped = torch.nn.parallel.DistributedDataParallel(model)

    def reduce(_, bucket):  # DDP compares annotations with types, and finds strings
        return group.allreduce([bucket.buffer()]).get_future().then(lambda future: future.value()[0])

    wrapped.register_comm_hook(None, reduce)
    wrapped(torch.full((1, 3), dist.get_rank() + 1.0, device=device(kind))).sum().backward()
    inner.abandon("the rest does nothing")
    wrapped(torch.full((1, 3), 1.0, device=device(kind))).sum().backward()
    assert "the rest does nothing" in str(group.errored())
    dist.barrier()
    group.shutdown(LIMIT_S)
    return model.weight.grad.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hook_of_ddp_gets_its_sums_and_no_exception(pool: Pool, kind: str):
    for gradient in pool.run(SIZE, hook_of_ddp, kind, timeout_s=LIMIT_S):
        assert gradient == [[7.0] * 3] * 2  # 1 + 2 + 3, and 1 of its own: nothing was reduced any more


# ---------------------------------------------------------------------------------------------- giving up


def waiter_is_woken(kind: str) -> None:
    """Rank 2 never joins. Rank 0 waits for the work, rank 1 for the future; both are given up from another thread."""
    group, address = formed(kind)
    rank = dist.get_rank()
    freed = threading.Event()
    if rank < 2:
        work = group.allreduce([torch.ones(1 << 20, device=device(kind))])
        abandons = threading.Timer(0.2, group.abandon, ("member c is lost", freed.set))
        abandons.start()
        waits = work.wait if rank == 0 else work.get_future().wait
        assert "member c is lost" in raised(ProcessGroupError, waits) or "Connection" in str(work.exception())
        assert freed.wait(LIMIT_S), "torch still holds the tensor"
        abandons.join()
        assert group.errored() is not None
        assert raised(ProcessGroupError, group.barrier().wait)
    dist.barrier()
    group.configure(address + "second", rank, SIZE)
    group.allreduce([value := torch.ones(2, device=device(kind))]).wait()
    assert value.eq(SIZE).all() and group.errored() is None
    dist.barrier()
    group.shutdown(LIMIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_abandon_wakes_who_waits(pool: Pool, kind: str):
    pool.run(SIZE, waiter_is_woken, kind, timeout_s=LIMIT_S)


def one_never_comes(kind: str) -> None:
    """The last rank is absent: one attempt runs out of time, the next is called off by a notice; then all come."""
    group, address = make(kind), server()
    rank = dist.get_rank()
    if rank < 2:
        absent: tuple[int, ...] = ()
        while not absent:  # on a busy machine, not even the store is reached in the first of these
            group.rendezvous_s = group.rendezvous_s * 4 if group.rendezvous_s < 60 else 0.25
            try:
                group.configure(f"{address}a{group.rendezvous_s}", rank, SIZE)
            except RendezvousFailed as failure:
                absent = failure.absent
        assert 2 in absent and rank not in absent, absent
        group.rendezvous_s = 600.0
        notice = threading.Timer(0.2, group.interrupt, ("member c is lost", 2))
        notice.start()
        address_b = address + "b"
        words = raised(RendezvousFailed, lambda: group.configure(address_b, rank, SIZE, quorum_id=2))
        assert "member c is lost" in words or "no longer wanted" in words
        notice.join()
    dist.barrier()
    group.rendezvous_s = 120.0
    group.configure(address + "c", rank, SIZE)
    group.allreduce([value := torch.ones(2, device=device(kind))]).wait()
    assert value.eq(SIZE).all()
    dist.barrier()
    group.shutdown(LIMIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_who_never_comes_holds_nobody(pool: Pool, kind: str):
    pool.run(SIZE, one_never_comes, kind, timeout_s=LIMIT_S)


def own_limit(kind: str) -> None:
    group, _ = formed(kind, limit_s=0.3)
    if dist.get_rank() < 2:
        problem = raised(ProcessGroupError, group.allreduce([torch.ones(4, device=device(kind))]).wait)
        assert "AllReduce did not complete within 0.3 s" in problem and problem == str(group.errored())
    dist.barrier()
    group.shutdown(LIMIT_S)


@pytest.mark.parametrize("kind", KINDS)
def test_an_operation_has_a_limit(pool: Pool, kind: str):
    pool.run(SIZE, own_limit, kind, timeout_s=LIMIT_S)


def starts_in_any_order(kind: str) -> None:
    """Members are threads of this one process. The seed decides their number, their order, and their pauses before the start."""
    store, stand = serve(), []
    groups = [make(kind) for _ in range(5)]
    for seed in range(20):
        chance = random.Random(seed)
        size = chance.randint(3, 5)
        order, pauses_s = chance.sample(range(size), size), [chance.choice([0, 0, 0.01, 0.1]) for _ in range(size)]

        def start(rank: int, number: int = seed, size: int = size) -> float:
            groups[rank].configure(f"127.0.0.1:{store.port}/{number}", rank, size)
            groups[rank].allreduce([value := torch.full((5,), rank + 1.0)]).wait()
            return float(value[0])

        with ThreadPoolExecutor(size) as threads:
            sums = []
            for rank, pause_s in zip(order, pauses_s, strict=True):
                sums.append(threads.submit(start, rank))
                time.sleep(pause_s)
        stand.append([answer.result() for answer in sums] == [size * (size + 1) / 2] * size)
        for group in groups:  # all have what they asked for
            group.abandon("on to the next start")
    assert stand == [True] * 20
    for group in groups:
        group.shutdown(LIMIT_S)


@pytest.mark.parametrize("kind", ["gloo", "baby_gloo"])
def test_starts_in_any_order_all_form(pool: Pool, kind: str):
    pool.run(1, starts_in_any_order, kind, timeout_s=LIMIT_S)


# ---------------------------------------------------------------------------------------------- forming anew


def forms_anew(kind: str, times: int, address: str) -> tuple[list[int], list[int], float]:
    """Returns early and late counts of this process (descriptors, threads, children, generations and their objects), and the MiB by which
    it has grown in between. The store is another process's, which may close it at any time."""
    group = make(kind)
    rank = dist.get_rank()
    early, memory = list[int](), 0.0
    value = torch.empty(1 << 20, device=device(kind))  # of 4 MiB: whatever keeps one per generation shows
    for index in range(times):
        group.configure(f"{address}{index}", rank, SIZE)
        group.allreduce([value.fill_(rank + index)]).wait()
        assert value.eq(3 + 3 * index).all()
        dist.barrier()
        if index % 3 == 1:  # with an operation that is pending
            if rank:
                group.allreduce([torch.empty(1 << 20, device=device(kind))])
            dist.barrier()
        if index in (19, times - 1):
            dist.barrier()
            group.abandon("counted")
            assert group.reaper.wait(LIMIT_S / 2)
            for thread in threading.enumerate():
                if thread.name == "ft-gloo-end":
                    thread.join(LIMIT_S / 2)
            gc.collect()
            parts = sum(isinstance(thing, PARTS) for thing in gc.get_objects())
            threads = threads_left(early[1] if early else sys.maxsize)
            now, grown = [count("fd"), threads, children(), parts], resident_mib() - memory
            early, memory = early or now, resident_mib()
            dist.barrier()  # who goes on closes connections here, too
    dist.barrier()
    group.shutdown(LIMIT_S)
    return early, now, grown


PARTS = (Rendezvous, Generation, GlooEngine, ChildEngine, StoreClient, GroupWork, Child)


def resident_mib() -> float:
    """Returns the memory of data, since pages of libraries come in as their code first runs, once malloc has given back what it only keeps
    for later: each thread that came and went had an arena."""
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) / 2**10


def count(what: str) -> int:
    return len(list(Path("/proc/self", what).iterdir()))


def threads_left(most: int) -> int:
    """Counts threads of this process. Linux lists one for a moment after it was joined, hence the wait if there are more than `most`."""
    until_s = time.monotonic() + LIMIT_S / 30
    while (number := count("task")) > most and time.monotonic() < until_s:
        time.sleep(0.01)
    return number


def children() -> int:
    """Counts the children of this process and their children."""
    parents = parents_of_all()
    mine = [pid for pid, parent in parents.items() if parent == os.getpid()]
    return len(mine) + sum(parent in mine for parent in parents.values())


def parents_of_all() -> dict[int, int]:
    """Returns the parent of each live process, by pid."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if stat[0] != "Z":
            parents[int(folder.name)] = int(stat[1])
    return parents


@pytest.mark.parametrize("kind", KINDS)
def test_forming_fifty_times_leaks_nothing(pool: Pool, kind: str):
    store = serve()
    for early, late, grown_mib in pool.run(
        SIZE, forms_anew, kind, 50, f"127.0.0.1:{store.port}/", timeout_s=2 * LIMIT_S
    ):
        assert late[1] <= early[1], "threads; those that were ending may have been counted early"
        assert (late[0], *late[2:]) == (early[0], *early[2:])
        assert grown_mib < 16, "thirty generations of 4 MiB each, one in three with another 4 MiB under way"


def store_is_silent(kind: str) -> None:
    """Meets at a store that accepts the connection and sends nothing, as the kernel does for a stopped process."""
    group = make(kind)
    group.prepare()
    notice = threading.Timer(0.4, group.interrupt, ("the store is silent", 1))
    with socket.create_server(("127.0.0.1", 0)) as host:
        address = f"127.0.0.1:{host.getsockname()[1]}/a"
        notice.start()
        words = raised(RendezvousFailed, lambda: group.configure(address, 0, SIZE, quorum_id=1))
        assert "the store is silent" in words or "no longer wanted" in words
        assert group.reaper.wait(LIMIT_S / 2), "a thread is stuck in the store"


@pytest.mark.parametrize("kind", KINDS)
def test_a_silent_store_holds_nobody(pool: Pool, kind: str):
    pool.run(1, store_is_silent, kind, timeout_s=LIMIT_S)
