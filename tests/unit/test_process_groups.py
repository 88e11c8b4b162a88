"""Process groups in one process: addresses, sockets, the reaper, forming, shared memory, special kinds."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import re
import resource
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from ft.compat.process_groups import ErrorSwallowingProcessGroup, ProcessGroupDummy
from ft.descriptors import MOST
from ft.process_groups import shared, sockets
from ft.process_groups.baby import ENDED, ChildEngine, ProcessGroupBabyGloo, ProcessGroupBabyNCCL
from ft.process_groups.base import GroupWork, Operation, ProcessGroup, Reaper, reduction
from ft.process_groups.errors import Abandoned, MustExit, ProcessGroupError, RendezvousFailed
from ft.process_groups.fork_server import Channel, Child
from ft.process_groups.forming import Ended, Engine, Rendezvous
from ft.process_groups.gloo import GlooEngine, ProcessGroupGloo, form_gloo
from ft.process_groups.nccl import ProcessGroupNCCL
from ft.process_groups.store import StoreClient, parse, serve
from ft.quantized import CollectiveQueue
from tests.unit.fakes import replace_system_call, set_device_module
from tests.waiting import in_time

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")


@pytest.mark.parametrize("address", ["", "host", "host:", "host:0/a", "host:65536/a", "::1:80/a", "a b:1/x", ":80/x"])
def test_what_is_no_store_address(address: str):
    with pytest.raises(ValueError, match="host:port/prefix"):
        parse(address)
    with pytest.raises(ValueError, match="host:port/prefix"):
        ProcessGroupDummy().configure(address, 0, 1)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_that_cannot_be(rank: int, size: int):
    with pytest.raises(ValueError, match=f"rank {rank} of {size}"):
        ProcessGroupDummy().configure("localhost:1/x", rank, size)


@linux
def test_only_the_sockets_of_the_group_are_shut():
    def connected(server: socket.socket) -> tuple[socket.socket, socket.socket]:
        return socket.create_connection(server.getsockname()), server.accept()[0]

    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_server(("127.0.0.1", 0)) as others:
        near_side, far_side = connected(ours)
        stranger, its_peer = connected(others)
        with near_side, far_side, stranger, its_peer:
            # the accepted end; the one that listens is left
            assert sockets.shutdown_matching(local={ours.getsockname()}) == 1
            assert near_side.recv(1) == b""
            stranger.sendall(b"x")
            assert its_peer.recv(1) == b"x"
            again, accepted = connected(ours)
            with again, accepted:
                # and the connection before, whose end is dead
                assert sockets.shutdown_matching(remote={ours.getsockname()}) == 2
                assert accepted.recv(1) == b""


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """Lets this process open no further descriptor meanwhile."""
    free = os.dup(0)  # all below are in use
    os.close(free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@linux
def test_a_process_without_descriptors_finds_no_sockets():
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_connection(ours.getsockname()):
        with no_descriptors_left():
            with pytest.raises(OSError, match="Too many open files"):
                sockets.duplicates(remote={ours.getsockname()})
            assert sockets.shutdown_matching(remote={ours.getsockname()}) == 0
        assert sockets.shutdown_matching(remote={ours.getsockname()}) == 1


@linux
def test_a_group_that_is_given_up_without_descriptors_ends_when_there_are_some(caplog: pytest.LogCaptureFixture):
    store, freed, group = serve(), threading.Event(), ProcessGroupGloo()
    group.configure(f"127.0.0.1:{store.port}/alone", 0, 1)
    with no_descriptors_left():
        group.abandon("it failed", then=freed.set)
        assert in_time(lambda: "no file descriptors are left" in caplog.text)
        assert not freed.is_set()
    assert freed.wait(20) and group.reaper.wait(20)


@linux
def test_new_sockets_are_told_by_what_they_are():
    with socket.create_server(("127.0.0.1", 0)) as server:
        made, local = sockets.listening_ends(lambda: socket.create_server(("127.0.0.1", 0)))
        with made:
            assert local == {made.getsockname()} and server.getsockname() not in local


@linux
def test_a_server_of_another_thread_is_never_taken_for_a_part_of_a_group():
    """Otherwise its connections would be shut down with the group, as happened to a store of the same process."""
    others, devices = list[socket.socket](), list[socket.socket]()

    def make() -> socket.socket:
        if len(others) < 2:
            others.append(socket.create_server(("127.0.0.1", 0)))  # as another thread does it just then
        devices.append(socket.create_server(("127.0.0.1", 0)))
        return devices[-1]

    made, local = sockets.listening_ends(make)
    assert (made, local) == (devices[2], {made.getsockname()})
    for sock in (*others, *devices):
        sock.close()


@linux
def test_a_process_that_cannot_see_its_sockets_forms_gloo_without_their_addresses(tmp_path: Path):
    """A child without /proc cannot list its sockets; it is killed at the end, so they are not needed."""
    store, native = serve(), partial(sockets.listening_ends, descriptors=tmp_path / "none")
    forming = Rendezvous(partial(form_gloo, listening_ends=native), f"127.0.0.1:{store.port}/alone", 0, 1, 120.0)
    forming.start()
    engine, ended = forming.wait(120.0), queue.SimpleQueue[Exception | None]()
    assert isinstance(engine, GlooEngine) and not engine.local
    engine.start(Operation("allreduce", ([torch.ones(1)],)), lambda error, source: ended.put(error))
    assert ended.get(timeout=60) is None
    engine.interrupt()
    engine.end()


@linux
def test_members_between_which_only_small_packets_pass_are_named_while_the_group_forms():
    """They connect and answer probes: else the first all-reduce would wait until collective_s, in each generation anew."""
    store, sizes = serve(), list[int]()

    class LosesLargePackets(dist.ProcessGroupGloo):  # type: ignore[misc]
        def alltoall_base(self, heard: torch.Tensor, mine: torch.Tensor, *more: Any) -> Any:
            sizes.append(heard.nbytes // len(heard))
            for member in (0, self.rank()):
                heard[member] = member
            heard[1, 0] = 1  # the first packet was small
            raise RuntimeError("timed out")

    def form(rank: int) -> str:
        forming = Rendezvous(
            partial(form_gloo, backend_class=LosesLargePackets), f"127.0.0.1:{store.port}/three", rank, 3, 120.0
        )
        forming.start()
        with pytest.raises(RendezvousFailed) as failure:
            forming.wait(120.0)
        return str(failure.value)

    with ThreadPoolExecutor(3) as threads:
        why = list(threads.map(form, range(3)))
    said = "members have connected, but 10240 bytes did not arrive from replica ranks"
    assert why == [f"{said} {ranks}: timed out" for ranks in ("1, 2", "2", "1")]
    assert min(sizes) > 9216, "more than a jumbo frame"


@linux
def test_an_idle_connection_of_gloo_is_probed_by_the_kernel():
    """Else a firewall forgets it, in a round of semi-synchronous training or a long save, and the next all-reduce never ends."""
    store = serve()

    def form(rank: int) -> GlooEngine:
        forming = Rendezvous(form_gloo, f"127.0.0.1:{store.port}/pair", rank, 2, 120.0)
        forming.start()
        engine = forming.wait(120.0)
        assert isinstance(engine, GlooEngine)
        return engine

    with ThreadPoolExecutor(2) as threads:
        engines = list(threads.map(form, range(2)))
    for engine in engines:
        found = sockets.duplicates(local=engine.local, remote=engine.remote)
        assert found and all(sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for sock in found)
        assert {sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) for sock in found} == {60}
        for sock in found:
            sock.close()
    for engine in engines:
        engine.interrupt()
    for engine in engines:
        engine.end()


@linux
def test_a_process_that_begins_to_listen_all_the_time_gets_no_device():
    made = list[socket.socket]()
    with pytest.raises(OSError, match="other threads of this process"):
        sockets.listening_ends(lambda: made.extend(socket.create_server(("127.0.0.1", 0)) for _ in range(2)))
    for sock in made:
        sock.close()


def test_a_process_with_a_group_may_open_as_many_files_as_the_machine_lets_it():
    """A shell lets it open 1,024, fewer than a job of a few hundred groups needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    try:
        ProcessGroupDummy()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (
            MOST if hard == resource.RLIM_INFINITY else min(MOST, hard),
            hard,
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_reaper_counts_what_does_not_end():
    reaper, hold, freed = Reaper(), threading.Event(), threading.Semaphore(0)
    for number in range(3):
        reaper.take(lambda: (hold.wait(), freed.release()), f"generation {number}")
    with pytest.raises(MustExit, match=r"3 generations .* more than 2.*generation 0; generation 1; generation 2"):
        reaper.check(most=2)
    assert not reaper.wait(0.01) and not freed.acquire(blocking=False)
    hold.set()
    assert reaper.wait(10)
    assert all(freed.acquire(timeout=10) for _ in range(3))
    reaper.check(most=0)


def test_an_end_that_fails_stays_pending_and_frees_nothing(caplog: pytest.LogCaptureFixture):
    def end() -> None:
        raise RuntimeError("the driver hangs")

    group, freed = FakeGroup(), threading.Event()
    group.engine.end = end  # type: ignore[method-assign]
    group.abandon("enough", freed.set)
    assert not group.reaper.wait(0.2) and not freed.is_set()
    with pytest.raises(MustExit, match="abandoned: enough"):
        group.reaper.check(most=0)
    assert "the driver hangs" in caplog.text


class FakeEngine:
    """An engine whose operations end when the test calls `finish`."""

    def __init__(self) -> None:
        self.started: list[tuple[Operation, Ended]] = []
        self.woken = self.ended = 0

    def start(self, operation: Operation, ended: Ended) -> None:
        if operation.method == "send":
            raise RuntimeError("no such rank")
        self.started.append((operation, ended))

    def finish(self, index: int, error: Exception | None = None) -> None:
        self.started[index][1](error, -1)

    def interrupt(self) -> None:
        self.woken += 1

    def end(self) -> None:
        self.ended += 1


class FakeGroup(ProcessGroup):
    """A group that is formed at once, on `engine`."""

    def __init__(self, limit_s: float = 600.0) -> None:
        super().__init__(limit_s)
        self.engine = FakeEngine()
        self.configure("localhost:1/fake", 0, 1)

    def _build(self, rendezvous: Rendezvous) -> Engine:
        return self.engine


def test_the_first_failure_is_the_generations_and_what_is_complete_counts():
    group = FakeGroup()
    engine = group.engine
    first, second, third = (group.allreduce([torch.zeros(1)]) for _ in range(3))
    engine.finish(1, RuntimeError("connection reset"))
    assert str(group.errored()) == "AllReduce: connection reset"
    engine.finish(0)
    assert first.wait() and first.is_success()
    for late in (second, group.barrier()):
        with pytest.raises(ProcessGroupError, match="AllReduce: connection reset"):
            late.wait()
    assert not third.is_completed() and group.waits_since_s is not None and len(engine.started) == 3
    group.abandon("enough")
    with pytest.raises(Abandoned, match="enough"):
        third.wait()
    assert group.reaper.wait(10) and (engine.woken, engine.ended) == (1, 1)
    group.abandon("again")
    assert (engine.woken, engine.ended) == (1, 1)


def test_an_interrupted_generation_still_owns_its_buffers():
    group = FakeGroup()
    done, open_work = (group.allreduce([torch.zeros(1)]) for _ in range(2))
    group.engine.finish(0)
    group.interrupt("member x is lost")
    assert done.is_success() and (group.engine.woken, group.engine.ended) == (1, 0)
    for work in (open_work, group.barrier()):
        with pytest.raises(Abandoned, match="member x is lost"):
            work.wait()
    freed = threading.Event()
    group.abandon("it failed", then=freed.set)
    assert freed.wait(10) and group.engine.ended == 1


def test_what_cannot_be_started_is_a_failed_work():
    group = FakeGroup()
    with pytest.raises(ProcessGroupError, match="Send: no such rank"):
        group.send([torch.zeros(1)], 99).get_future().wait()
    group.shutdown()


def test_the_limit_wakes_who_waits():
    """The engine is interrupted, too: a stopped child reads no commands, which blocks their sender."""
    group = FakeGroup(limit_s=0.05)
    with pytest.raises(ProcessGroupError, match=r"AllReduce did not complete within 0.05 s"):
        group.allreduce([torch.zeros(1)]).wait(timedelta(seconds=20))
    group.shutdown(10)
    assert group.engine.woken == 2, "by the limit, and by who gave it up"


def test_a_wait_with_a_limit_of_its_own_leaves_the_group_alone():
    group = FakeGroup()
    work = group.barrier()
    assert group.waits_since_s is not None
    with pytest.raises(TimeoutError, match="Barrier did not complete"):
        work.wait(timedelta(milliseconds=1))
    assert group.errored() is None
    group.engine.finish(0)
    assert work.wait() and group.waits_since_s is None
    group.shutdown()


def test_a_formation_that_hangs_is_given_up_from_another_thread():
    hold, engine = threading.Event(), FakeEngine()

    def build(rendezvous: Rendezvous) -> FakeEngine:
        rendezvous.absent = (2, 5)
        hold.wait()
        return engine

    rendezvous = Rendezvous(build, "localhost:1/test", 0, 3, 600.0)
    rendezvous.on_cancel(hold.set)
    rendezvous.start()
    threading.Thread(target=rendezvous.cancel, args=("member x is lost",)).start()
    with pytest.raises(RendezvousFailed, match="member x is lost; absent: replica ranks 2, 5") as failure:
        rendezvous.wait(600)
    assert failure.value.absent == (2, 5)
    rendezvous.end()  # an engine that came too late is ended, too
    assert (engine.woken, engine.ended) == (1, 1)


@pytest.mark.parametrize("told_first", [False, True])
def test_a_fingerprint_that_differs_is_the_cause_whoever_found_it_out_first(told_first: bool):
    """Another member that sees the mismatch abandons the generation, and this member may learn of that first."""
    refused = threading.Event()

    def build(rendezvous: Rendezvous) -> FakeEngine:
        if told_first:
            rendezvous.cancel("the generation failed")
        rendezvous.refuse((2,), "replica rank 2 differs from the job in optimizer.lr")
        if not told_first:
            rendezvous.cancel("the generation failed")
        refused.set()
        raise RendezvousFailed("given up")

    rendezvous = Rendezvous(build, "localhost:1/test", 0, 3, 600.0)
    rendezvous.start()
    assert refused.wait(30)
    with pytest.raises(RendezvousFailed, match="replica rank 2 differs from the job in optimizer") as failure:
        rendezvous.wait(600)
    assert failure.value.mismatched == (2,)
    rendezvous.end()


def test_a_member_of_another_fingerprint_knows_it_before_the_others_fail():
    """Their failure abandons the generation everywhere, which would end this member's comparison."""
    server, groups, fail_or_wait = serve(), list[ProcessGroup](), threading.Event()

    class Store(StoreClient):
        late = False

        def multi_get(self, keys: Sequence[str]) -> list[bytes]:
            if keys[0] == "fingerprint/0" and self.late:
                fail_or_wait.wait()
            return super().multi_get(keys)

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            if keys[0] == "mismatched/2":
                fail_or_wait.set()
            super().wait(keys, timeout)

    class Compares(ProcessGroup):
        def _build(self, rendezvous: Rendezvous) -> Engine:
            rendezvous.store = store = Store(rendezvous.arguments[0], 60.0)
            store.late = rendezvous.rank == 2
            rendezvous.all_gather("")
            return FakeEngine()

    def configure(rank: int) -> tuple[int, ...]:
        with pytest.raises(RendezvousFailed) as failure:
            groups[rank].configure(f"127.0.0.1:{server.port}/a", rank, 3, fingerprint=(("optimizer.lr", "112"[rank]),))
        groups[2].interrupt("the generation failed")
        fail_or_wait.set()
        return failure.value.mismatched

    groups += (Compares(rendezvous_s=60.0) for _ in range(3))
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(configure, range(3))) == [(2,)] * 3


def test_a_prefix_serves_once():
    store = serve()
    for number in range(2):
        rendezvous = Rendezvous(lambda it: FakeEngine(), f"127.0.0.1:{store.port}/a", 0, 1, 60.0)
        if number == 0:
            assert rendezvous.all_gather("first") == ["first"]
        else:
            with pytest.raises(RendezvousFailed, match="rank 0 has already joined under this prefix"):
                rendezvous.all_gather("second")
        rendezvous.store.close()


def test_who_is_absent_is_named():
    store, limit_s, absent = serve(), 0.05, ()
    while not absent:  # on a busy machine, the store is not reached in the first of these
        rendezvous = Rendezvous(lambda it: FakeEngine(), f"127.0.0.1:{store.port}/{limit_s}", 1, 3, limit_s)
        with contextlib.suppress(OSError), pytest.raises(RendezvousFailed, match=f"within {limit_s:g} s") as failure:
            rendezvous.all_gather("here")
        absent, limit_s = rendezvous.absent, 2 * limit_s
        rendezvous.store.close()
    assert absent == failure.value.absent == (0, 2)


def test_a_channel_carries_messages_and_descriptors():
    channel, theirs = Channel.pair()
    other = Channel(theirs)
    reading, writing = os.pipe()
    big = os.urandom(1 << 20)
    sender = threading.Thread(target=lambda: (channel.send(b"fd", [writing]), channel.send(big)))
    sender.start()
    first = other.receive()
    assert first is not None and first[0] == b"fd"
    os.write(first[1][0], b"through it")
    assert os.read(reading, 100) == b"through it"
    assert other.receive() == (big, [])
    sender.join()
    channel.hang_up()
    assert other.receive() is None
    for descriptor in (reading, writing, *first[1]):
        os.close(descriptor)
    channel.close()
    other.close()


@linux
def test_a_channel_that_is_being_hung_up_is_not_closed():
    """From a closed channel the descriptor may go to another socket, which would be shut down."""
    done = list[str]()

    def hang_up() -> None:
        ending.start()
        ending.join(0.2)  # `end` waits for this function, but for no other
        done.append("hung up")

    channel: Any = SimpleNamespace(hang_up=hang_up, close=lambda: done.append("closed"))
    fork_server: Any = SimpleNamespace(reap=lambda: None)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        child = Child(process.pid, channel, fork_server)
        ending = threading.Thread(target=child.end)
        child.kill()
        ending.join()
    assert done == ["hung up", "closed"]


@linux
def test_lent_tensors_are_the_same_memory():
    pool_client = shared.SharedPoolClient()
    forgotten: list[int] = []

    def tell(command: str, arguments: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
        if command == "unmap":
            forgotten.extend(*arguments)
        else:
            getattr(pool_client, command)(*arguments, *map(os.dup, descriptors))

    owner = shared.SharedPoolOwner(tell)
    borrowed = shared.Borrowed()
    whole = shared.empty((4, 6)).fill_(1.0)
    view = whole[1:3, ::2]
    theirs = pool_client.tensor(owner.lend(view, True, True, borrowed))
    theirs.fill_(7.0)
    assert view.eq(7.0).all() and whole.eq(1.0).sum() == 24 - 6 and not borrowed.buffers
    assert owner.lend(whole, True, False, borrowed).segment == 1  # the same segment, announced once
    of_torch = torch.zeros(5).share_memory_()
    pool_client.tensor(owner.lend(of_torch, True, True, borrowed)).add_(2)
    assert of_torch.eq(2).all() and not borrowed.buffers

    private = torch.arange(6.0).view(2, 3).t()
    copy = pool_client.tensor(owner.lend(private, True, True, borrowed))
    assert copy.equal(private)
    copy.mul_(10)
    owner.give_back(borrowed, complete=True)
    assert private.equal(torch.arange(6.0).view(2, 3).t() * 10)
    empty = pool_client.tensor(owner.lend(torch.empty(0, 3), True, True, again := shared.Borrowed()))
    assert empty.shape == (0, 3)
    assert again.buffers[0].data_ptr() == borrowed.buffers[0].data_ptr()  # the buffer is used again

    del whole, view, theirs
    owner.lend(of_torch, True, True, borrowed)
    assert forgotten == [1]
    pool_client.unmap(forgotten)


class ChildWithoutProcess:
    """A child without a process, for its engine; `theirs`: the end that the process would have."""

    pid = 0

    def __init__(self) -> None:
        self.channel, theirs = Channel.pair()
        self.theirs = Channel(theirs)

    def kill(self) -> None:
        self.channel.hang_up()

    def end(self) -> None:
        self.channel.close()
        self.theirs.close()


@linux
def test_a_result_that_cannot_be_written_is_that_operations_failure():
    """The receiving thread continues."""
    child, answers = ChildWithoutProcess(), queue.SimpleQueue[Exception | None]()
    engine = ChildEngine(child, None)  # type: ignore[arg-type]
    for number, tensor in enumerate((torch.ones(1).expand(4), torch.ones(4)), 1):
        engine.start(Operation("allreduce", ([tensor],)), lambda error, source: answers.put(error))
        child.theirs.send(json.dumps([ENDED, number, None, -1]).encode())
    with pytest.raises(ProcessGroupError, match="AllReduce: unsupported operation: more than one element"):
        raise answers.get(timeout=20) or AssertionError("it has been written")
    assert answers.get(timeout=20) is None
    engine.interrupt()
    engine.end()


def test_buffers_of_a_failed_operation_are_not_used_again():
    owner = shared.SharedPoolOwner(lambda *_: None)
    value, borrowed, again = torch.ones(3), shared.Borrowed(), shared.Borrowed()
    owner.lend(value, True, True, borrowed)
    borrowed.back[0][1].fill_(9)
    owner.give_back(borrowed, complete=False)
    owner.lend(value, True, True, again)
    assert value.eq(1).all() and borrowed.buffers[0].data_ptr() != again.buffers[0].data_ptr()


class Gpu:
    """Host memory that stands in for a GPU's. `_share_cuda_` counts an export, which the receiver releases."""

    def __init__(self) -> None:
        self.exports: list[int] = []
        self.released: list[tuple[bytes, int, int]] = []
        self.told: list[tuple[str, tuple[Any, ...]]] = []

    def owner(self) -> shared.SharedPoolOwner:
        return shared.SharedPoolOwner(lambda *told: self.told.append(told), self.release)

    def release(self, handle: bytes, offset: int, device: int) -> None:
        self.released.append((handle, offset, device))

    def tensor(self, tensor: torch.Tensor, kind: bytes = b"c") -> Any:
        return SimpleNamespace(
            **{name: getattr(tensor, name) for name in ("dtype", "shape", "numel", "stride", "storage_offset")},
            is_cuda=True,
            device=torch.device("cuda", 2),
            untyped_storage=lambda: self.storage(tensor.untyped_storage(), kind),
        )

    def storage(self, storage: torch.UntypedStorage, kind: bytes) -> Any:
        def share() -> tuple[Any, ...]:
            self.exports.append(storage.data_ptr())
            handle = b"\x03" + kind + bytes(64)
            return 2, handle, storage.nbytes(), 512, b"/counter", len(self.exports), b"event", True

        same = {name: getattr(storage, name) for name in ("data_ptr", "_weak_ref")}
        return SimpleNamespace(is_cuda=True, _share_cuda_=share, **same)


def test_the_memory_of_a_gpu_is_exported_once_for_each_child():
    gpu, scratch = Gpu(), [torch.zeros(1000), torch.zeros(500)]
    for child in (1, 2):
        owner = gpu.owner()
        for number in range(1000):
            whole = gpu.tensor(scratch[number % 2][number % 500 :])
            place = owner.lend(whole, True, True, shared.Borrowed())
            assert (place.segment, place.offset, place.strides) == (1 + number % 2, number % 500, (1,))
            assert place.device == whole.device
        assert len(gpu.exports) == len(gpu.told) == 2 * child
        assert [(what, arguments[0]) for what, arguments in gpu.told] == [("map_device", 1), ("map_device", 2)] * child
        owner.close()  # the child was killed
        assert [(offset, device) for _, offset, device in gpu.released] == [(n, 2) for n in range(1, 2 * child + 1)]
        with pytest.raises(ProcessGroupError, match="gone"):
            owner.lend(gpu.tensor(scratch[0]), True, True, shared.Borrowed())


def test_a_child_gives_back_itself_what_it_is_told_to_drop():
    gpu = Gpu()
    owner, kept, value = gpu.owner(), torch.zeros(10), torch.zeros(10)
    for tensor in (kept, value):
        owner.lend(gpu.tensor(tensor), True, True, shared.Borrowed())
    del value, tensor
    owner.lend(gpu.tensor(kept), True, True, shared.Borrowed())
    assert gpu.told[2:] == [("unmap", ([2],))]
    owner.dropped([2])  # its answer
    owner.close()
    assert [offset for _, offset, _ in gpu.released] == [1]


def test_an_expandable_segment_is_not_lent():
    gpu = Gpu()
    owner = gpu.owner()
    with pytest.raises(ProcessGroupError, match="lies in an expandable segment"):
        owner.lend(gpu.tensor(torch.zeros(10), b"e"), True, True, shared.Borrowed())
    owner.close()
    assert not gpu.told and len(gpu.released) == 1


@pytest.mark.filterwarnings("ignore:.*allocator_settings:FutureWarning")
@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="this torch does not tell")
@pytest.mark.parametrize(
    ("settings", "plain"),
    [
        ("expandable_segments:False", "expandable_segments:False"),
        ("expandable_segments:True", "expandable_segments:False"),
        (
            "roundup_power2_divisions:[256:1,512:2], expandable_segments: True,max_split_size_mb:64",
            "roundup_power2_divisions:[256:1,512:2],max_split_size_mb:64,expandable_segments:False",
        ),
    ],
)
def test_shared_memory_of_a_gpu_lies_outside_expandable_segments(settings: str, plain: str):
    """The settings are restored, also after an out-of-memory error."""
    before = torch._C._accelerator_getAllocatorSettings()
    torch.cuda.memory._set_allocator_settings(settings)
    try:
        with contextlib.suppress(torch.OutOfMemoryError), shared.plain_segments():
            assert torch._C._accelerator_getAllocatorSettings() == plain
            raise torch.OutOfMemoryError
        assert torch._C._accelerator_getAllocatorSettings() == settings
    finally:
        torch.cuda.memory._set_allocator_settings(before)


def test_torch_has_what_memory_of_a_gpu_is_shared_by():
    """The private functions of torch that are only called with a GPU exist in this version."""
    for name in ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter"):
        assert callable(getattr(torch.UntypedStorage, name))


def test_a_dummy_ends_everything_at_once():
    group = ProcessGroupDummy(rank=0, world=2)
    value = torch.arange(4.0)
    assert group.allreduce([value]).wait() and value.tolist() == [0, 1, 2, 3]
    assert group.broadcast_one(tensor=value, root=0).wait() and value.tolist() == [0, 1, 2, 3]
    gathered = [torch.zeros(4), torch.zeros(4)]
    group.allgather([gathered], [value]).wait()
    assert all(part.equal(value) for part in gathered)
    whole = torch.zeros(8)
    group.all_gather_single(whole, value).wait()
    assert whole.tolist() == [0, 1, 2, 3] * 2
    part = torch.zeros(2)
    assert group.reduce_scatter_single(part, value).get_future().wait()[0].tolist() == [0, 1]
    assert group.barrier().wait() and (group.rank(), group.size()) == (0, 2)
    group.shutdown()


def test_a_group_says_why_it_is_of_no_use():
    group = ProcessGroupDummy()
    assert group.errored() is None
    group.abandon("member b is lost", then=(freed := threading.Event()).set)
    assert freed.wait(10)
    assert isinstance(group.errored(), Abandoned) and "member b is lost" in str(group.errored())
    with pytest.raises(Abandoned, match="member b is lost"):
        group.allreduce([torch.zeros(1)]).wait()
    group.configure("localhost:1/x", 1, 3)
    assert group.errored() is None and (group.rank(), group.size()) == (1, 3)
    group.shutdown()


def test_a_word_that_came_before_the_formation_is_not_lost():
    group = ProcessGroupDummy()
    group.interrupt("member b is lost", 7)
    assert group.errored() is None, "it was said of another generation"
    with pytest.raises(RendezvousFailed, match="no longer wanted"):
        group.configure("localhost:1/x", 0, 2, quorum_id=7)
    group.configure("localhost:1/x", 0, 2, quorum_id=8)
    group.interrupt("member b is lost", 7)
    assert group.errored() is None, "a late word is of its own generation alone"
    group.interrupt("member b is lost", 8)
    assert isinstance(group.errored(), Abandoned)
    group.configure("localhost:1/x", 0, 2, quorum_id=9)
    group.interrupt("the group's server is gone")
    assert isinstance(group.errored(), Abandoned)
    group.shutdown()


def test_a_generation_that_forms_meanwhile_is_awaited_or_ended():
    group = FakeGroup()
    group.configure("localhost:1/x", 0, 1, wait=False)
    assert group.errored() is not None, "no operation is launched before wait_formed"
    assert group.waits_since_s is None, "its owner does something else: no member is waited for, and none is probed"
    group.wait_formed()
    assert group.errored() is None
    for end in (lambda: group.configure("localhost:1/x", 0, 1), group.shutdown):
        group.configure("localhost:1/x", 0, 1, wait=False)
        assert group.reaper.wait(10)
        ended_before = group.engine.ended
        end()
        assert group.reaper.wait(10) and group.engine.ended == ended_before + 1, "it ends although nothing awaits it"
    with pytest.raises(RendezvousFailed, match="shut down"):
        group.wait_formed()


@linux
@pytest.mark.timeout(240)  # without a core in time gloo may leave a thread in each round, which costs GlooEngine.end_s
def test_no_end_waits_for_the_backstop():
    """Each generation is abandoned during small all-reduces, by one member after the other; gloo lost a wakeup in one of eight of them."""
    store = serve()
    for number in range(12):
        groups = [ProcessGroupGloo(timeout=600.0, rendezvous_s=60.0) for _ in range(3)]
        begun, address = threading.Barrier(4), f"127.0.0.1:{store.port}/e/{number}/0"
        members = [
            threading.Thread(target=_sum_until_it_ends, args=(group, address, rank, begun))
            for rank, group in enumerate(groups)
        ]
        for member in members:
            member.start()
        begun.wait(60)
        for group in groups:
            group.abandon("a member is lost")
        assert all(group.reaper.wait(60) for group in groups)
        for member in members:
            member.join(60)


def _sum_until_it_ends(group: ProcessGroupGloo, address: str, rank: int, begun: threading.Barrier) -> None:
    group.configure(address, rank, 3)
    group.allreduce([torch.ones(64)]).wait()
    begun.wait(60)
    with contextlib.suppress(ProcessGroupError):
        while True:
            for work in [group.allreduce([torch.ones(64)]) for _ in range(8)]:
                work.wait()


@linux
def test_a_thread_that_gloo_leaves_behind_holds_no_buffer():
    """The group is left to the backstop once the thread sleeps; the number of such groups is limited, after which the process must exit."""
    forgotten, awake, asleep = threading.Event(), threading.Event(), threading.Event()

    def runs() -> None:
        while not awake.is_set():
            pass
        asleep.set()
        forgotten.wait(60)

    thread = threading.Thread(target=runs)
    thread.start()

    class Native:
        """A stand-in for torch's group, whose destructor joins its thread."""

        def size(self) -> int:
            return 0

        def barrier(self, *options: object) -> GroupWork:
            return GroupWork("Barrier", [])  # which is forgotten

        def __del__(self) -> None:
            thread.join()

    stranded = threading.Semaphore(1)

    def engine() -> GlooEngine:
        local, threads = {("127.0.0.1", 1)}, {thread.native_id or 0}
        made = GlooEngine(Native(), local, set(), threads)  # type: ignore[arg-type]
        made.stranded, made.end_s = stranded, 0.01
        made.start(Operation("barrier"), lambda error, source: None)
        made.interrupt()
        return made

    reaper, freed = Reaper(), [threading.Event(), threading.Event()]

    def then(end: Callable[[], None], may_be_taken_over: threading.Event) -> None:
        end()
        may_be_taken_over.set()

    for each in freed:
        reaper.take(partial(then, engine().end, each), "a generation")
    assert not freed[0].wait(2.5), "the thread runs: it may be at work on the tensors"
    awake.set()
    assert asleep.wait(60)
    assert in_time(lambda: any(each.is_set() for each in freed))
    assert not reaper.wait(1.5), "one more is too many"
    forgotten.set()
    thread.join(60)


def test_too_many_that_do_not_end_and_no_more_are_formed():
    group, hold = ProcessGroupDummy(), threading.Event()
    group.rendezvous_s = 0.01  # which is also what an end may take
    for number in range(5):
        group.reaper.take(hold.wait, f"generation {number}")
    with pytest.raises(MustExit, match="must exit"):
        group.configure("localhost:1/x", 0, 1)
    with pytest.raises(MustExit, match=r"5 generations .* more than 0"):
        group.shutdown(limit_s=0.01)
    hold.set()
    assert group.reaper.wait(10)


def test_errors_are_swallowed_and_remembered():
    inner = ProcessGroupDummy()
    group = ErrorSwallowingProcessGroup(pg=inner)
    assert group.allreduce([torch.zeros(1)]).wait() and group.errored() is group.error() is None
    group.report_error(e=RuntimeError("seen elsewhere"))
    assert group.error() is group.errored()
    assert group.allreduce([torch.zeros(1)]).wait() and "seen elsewhere" in str(group.errored())
    group.configure("localhost:1/x", 0, 1)
    assert group.errored() is None
    inner.abandon("lost")
    assert group.allreduce([value := torch.ones(1)]).get_future().wait()[0] is value
    assert "lost" in str(group.errored())


@pytest.mark.parametrize("op", [dist.ReduceOp.MAX, dist.ReduceOp(dist.ReduceOp.MAX)])
def test_reduce_ops_cross_as_names(op: object):
    assert reduction(op) == "MAX"


def test_a_reduce_op_that_cannot_cross():
    with pytest.raises(ValueError, match="must be one of SUM"):
        reduction(dist._make_nccl_premul_sum(2.0))


@pytest.mark.skipif(sys.platform != "linux", reason="macOS has no pidfds, and children go without")
def test_children_without_pidfds_are_refused(monkeypatch: pytest.MonkeyPatch):
    replace_system_call(monkeypatch, "pidfd_open", lambda pid: os.close(-1))
    said = (
        'fault_tolerance.process_group = "baby_gloo": this kernel or container has no pidfd_open (Bad file descriptor)'
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        ProcessGroupBabyGloo()


@pytest.mark.parametrize("kind", [ProcessGroupNCCL, ProcessGroupBabyNCCL])
def test_nccl_without_a_device_is_told(kind: type[ProcessGroupNCCL] | type[ProcessGroupBabyNCCL]):
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    group = kind(rendezvous_s=20.0)
    with pytest.raises(RendezvousFailed, match=r"NCCL requires a CUDA device|CUDA"):
        group.configure(f"127.0.0.1:{server.port}/{kind.__name__}", 0, 1)
    assert "CUDA" in str(group.errored())
    group.shutdown()


def test_a_group_of_a_gpu_is_of_the_device_of_the_thread_that_made_it(monkeypatch: pytest.MonkeyPatch):
    """A generation is formed in a separate thread, and each thread of CUDA begins with device 0."""
    current, in_force = threading.local(), list[tuple[str, int]]()
    current.device = 3
    cuda = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: getattr(current, "device", 0),
        set_device=lambda number: in_force.append((threading.current_thread().name, number)),
    )
    set_device_module(monkeypatch, cuda)
    assert [kind().device for kind in (ProcessGroupNCCL, ProcessGroupBabyNCCL)] == [3, 3]
    assert ProcessGroupNCCL(device=1).device == 1
    engine = ChildEngine(ChildWithoutProcess(), 3)  # type: ignore[arg-type]
    engine.interrupt()
    engine.end()
    lane = CollectiveQueue(ProcessGroupDummy())
    lane.close()
    lane.join()
    assert in_force == [("ft-child-0", 3), ("ft-quantized", 3)]  # the threads that set futures, and that round


class Disturbed(ProcessGroupGloo):
    """A gloo group formed with replaced parts of torch and of sockets.py."""

    def __init__(self, *given: Any, rendezvous_s: float, **parts: Any) -> None:
        super().__init__(*given, rendezvous_s=rendezvous_s)
        self.parts = parts

    def _build(self, rendezvous: Rendezvous) -> Engine:
        return form_gloo(rendezvous, **self.parts)


@linux
def test_a_stray_connection_in_a_members_place_costs_one_forming():
    """gloo takes a stray connection that sends the next number (8 bytes) before the member does for that member."""
    strays = list[socket.socket]()

    def is_read(stray: socket.socket) -> bool:
        ends = sockets.duplicates(remote=[stray.getsockname()])
        unread = [fcntl.ioctl(end, termios.FIONREAD, bytes(4)) for end in ends]
        for end in ends:
            end.close()
        return unread == [bytes(4)]

    def disturbed(make: Any) -> Any:
        device, local = sockets.listening_ends(make)
        # Both members, in the first forming: one listens for the other, and which goes by their addresses.
        if len(strays) < 6:
            mine = [socket.create_connection(next(iter(local))) for _ in range(3)]
            strays.extend(mine)
            for number, stray in enumerate(mine):
                stray.sendall(number.to_bytes(8, sys.byteorder))
            in_time(lambda: all(map(is_read, mine)))  # gloo's thread has taken them before any member comes
        return device, local

    store = serve()
    groups = [Disturbed(600.0, rendezvous_s=1.0, listening_ends=disturbed) for _ in range(2)]

    def together(do: Callable[[int], None]) -> list[BaseException | None]:
        with ThreadPoolExecutor(2) as pool:
            return [future.exception(120) for future in [pool.submit(do, rank) for rank in range(2)]]

    def form_and_sum(rank: int) -> None:
        groups[rank].configure(f"127.0.0.1:{store.port}/{groups[0].rendezvous_s}", rank, 2)
        try:
            groups[rank].allreduce([torch.ones(1)]).wait()
        except ProcessGroupError:
            groups[rank].abandon("it failed")
            raise

    problems = together(form_and_sum)
    assert all(isinstance(problem, ProcessGroupError) for problem in problems), problems
    assert any(isinstance(problem, RendezvousFailed) for problem in problems), problems
    for group in groups:
        group.rendezvous_s = 120.0
    assert together(form_and_sum) == [None, None]
    for group in groups:
        group.shutdown()
    for stray in strays:
        stray.close()


@linux
def test_a_peer_that_never_connects_is_waited_for_no_longer_than_forming_may_take():
    """gloo waits five times its timeout for a first connection, without a way to interrupt it. An all-reduce may then take the remaining
    time: it is an all-to-all over all connections, in the forming thread."""
    asked, threads = list[float](), list[str]()

    class Asked(dist.ProcessGroupGloo):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            asked.append(options._timeout.total_seconds())
            super().__init__(store, rank, size, options)

        def set_timeout(self, timeout: timedelta) -> None:
            asked.append(timeout.total_seconds())
            super().set_timeout(timeout)

        def alltoall_base(self, *given: Any) -> Any:
            threads.append(threading.current_thread().name)
            return super().alltoall_base(*given)

    store, group = serve(), Disturbed(600.0, rendezvous_s=100.0, backend_class=Asked)
    group.configure(f"127.0.0.1:{store.port}/alone", 0, 1)
    group.shutdown()
    (to_connect, to_hear, _), [thread] = asked, threads
    assert 0 < 5 * to_connect <= 100 and to_connect < to_hear <= 100 and thread.startswith("ft-form-")
