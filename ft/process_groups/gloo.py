"""torch's gloo in this process: formed where it can be woken, and ended without a thread left behind.

Its own ways of ending do not do: abort wakes nobody, and dropping a group waits for all that is pending in it. So its sockets are ended
(sockets.py), in an order that its code leaves no gap in. baby.py's child forms it the same way, and is killed instead.
"""

from __future__ import annotations

import itertools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ft.process_groups import sockets
from ft.process_groups.base import NEVER, Operation, ProcessGroup, failure_of, group_of, source_of
from ft.process_groups.errors import MustExit, ProcessGroupError, RendezvousFailed
from ft.process_groups.forming import Ended, Engine, Rendezvous
from ft.process_groups.sockets import Address

_Task = tuple[list[dist.Work], Operation, Ended]
ANSWER_S = 0.02  # for gloo to answer what it has heard, and to hear the end
LINGER_S = 1.0  # then a connection that was shut is closed: what the peer sends after that resets it, over what it has not read yet
AGAIN_S = 0.5  # between two tries to get descriptors
CONNECTS = 5  # so many of its timeouts gloo gives a peer to connect (waitUntil in its transport/tcp/pair.cc)
NO_TAG = (1 << 31) - 1  # of a message that is never sent
log = logging.getLogger("pharos.group")


class ProcessGroupGloo(ProcessGroup):
    """gloo in this process."""

    KIND = "ft_gloo"

    def __init__(self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0) -> None:
        if not sockets.DESCRIPTORS.is_dir():
            raise RuntimeError("in-process gloo needs /proc to find its sockets: use ProcessGroupBabyGloo here")
        super().__init__(timeout, rendezvous_s=rendezvous_s)

    def _build(self, rendezvous: Rendezvous) -> Engine:
        return form_gloo(rendezvous, timedelta(seconds=self.timeout_s + 1))


def form_gloo(
    rendezvous: Rendezvous,
    backstop: timedelta = NEVER,
    *,
    kind: Any = c10d.ProcessGroupGloo,
    listening_ends: Callable[..., tuple[Any, set[Address]]] = sockets.listening_ends,
) -> Engine:
    """The engine of a gloo group, on the network interface that leads to the store, once all are there. All its connections are made here,
    so it needs the store no longer. `backstop`: after which a thread of gloo that cannot be woken ends by itself: when a connection is
    reset while gloo's own thread answers to a receiver, it forgets to fail that send, and its waiter waits on."""
    before = _threads_of_gloo()
    host = sockets.local_address_for(rendezvous.store.host)
    device, local = listening_ends(lambda: c10d.ProcessGroupGloo.create_device(hostname=host, lazy_init=False))
    ports = rendezvous.all_gather(sorted(local))
    remote = {(host, port) for member in ports for host, port in member} - local
    rendezvous.on_cancel(lambda: sockets.shut(local=local, remote=remote))
    options = kind._Options()
    options._devices = [device]
    options._threads = 2
    options._timeout = timedelta(seconds=rendezvous.left_s() / CONNECTS)  # cannot be called off
    backend = kind(rendezvous.store, rendezvous.rank, rendezvous.size, options)
    rendezvous.store.close()
    _set_timeout(backend, timedelta(seconds=rendezvous.left_s()))
    _hear_from_all(backend, rendezvous)
    _set_timeout(backend, backstop)
    native = group_of(backend, "gloo", "cpu", rendezvous.rank, rendezvous.size)
    return GlooEngine(native, local, remote, _threads_of_gloo() - before)


def _set_timeout(backend: Any, timeout: timedelta) -> None:
    """For what is asked of it by name, and of the group around it."""
    backend._set_default_timeout(timeout)
    backend.set_timeout(timeout)


def _hear_from_all(backend: Any, rendezvous: Rendezvous) -> None:
    """gloo takes whoever connects to its port and sends the next number, 8 bytes, for a member: a stray connection would have its place
    until a sum has waited for collective_s. So each sends its rank to each other while forming may still fail. Raises RendezvousFailed.

    Waits for the future: torch keeps a hundred bytes for ever for each thread that has waited for a work, and this one is new each time."""
    heard, mine = torch.empty(rendezvous.size, dtype=torch.int64), torch.full((rendezvous.size,), rendezvous.rank)
    backend.alltoall_base(heard, mine, [], [], c10d.AllToAllOptions()).get_future().wait()
    if not torch.equal(heard, torch.arange(rendezvous.size)):
        raise RendezvousFailed(f"somebody answers for others: ranks {heard.tolist()}")


class GlooEngine:
    """A native gloo group, ended so that hardly any thread is stuck. When a connection ends, gloo fails the operations that wait for it,
    but forgets a send that it could not write and a message that it has half read; their threads wait until the backstop. So connections
    are duplicated, and end in three steps: 1. the read side is shut: gloo still answers what it has read, and no write fails; 2. a receive
    without a sender times out, at which gloo fails all pending work; 3. they are closed, and peers see the end.

    A peer that is killed may still leave a thread behind. Once it is seen to sleep it touches no tensor, and is left to the backstop.
    `stranded`: limits how many ended groups of this process may have threads of torch that are still blocked, until their backstop."""

    stranded: threading.Semaphore = threading.BoundedSemaphore(32)
    end_s = 2.0  # after which the threads of a work that has not ended are examined

    def __init__(self, native: dist.ProcessGroup, local: set[Address], remote: set[Address], threads: set[int]) -> None:
        self._native: dist.ProcessGroup | None = native
        self.local, self.remote, self._threads = local, remote, threads
        self._waiters = _Waiters()
        self._news = threading.Condition()
        self._open = 0  # works that have not ended
        self._ending: threading.Thread | None = None
        self._has_ended = threading.Event()

    def start(self, operation: Operation, ended: Ended) -> None:
        native = self._native
        if native is None:
            raise ProcessGroupError("the group was abandoned")

        def has_ended(error: Exception | None, source: int) -> None:
            self._count_down()
            ended(error, source)

        with self._news:
            self._open += 1
        try:
            work = operation.start(native)
            try:
                future = work.get_future()
            except RuntimeError:  # gloo's messages and its reduce_scatter have none
                self._waiters.take(work, operation, has_ended)
            else:
                future.add_done_callback(lambda done: has_ended(failure_of(done.wait), -1))
        except BaseException:
            self._count_down()
            raise

    def interrupt(self) -> None:
        with self._news:
            if self._ending is not None:
                return
            self._ending = threading.Thread(target=self._end_connections, name="ft-gloo-end", daemon=True)
        self._ending.start()

    def end(self) -> None:
        self._waiters.close()
        if self._ending is not None:
            self._has_ended.wait()
        last_reference, self._native = [self._native], None
        with self._news:
            ended = self._news.wait_for(lambda: self._open == 0, self.end_s)
        while not ended and self._ending is not None:
            if _are_asleep(self._threads | self._waiters.busy):
                if not self.stranded.acquire(blocking=False):
                    raise MustExit("too many groups of gloo have left threads behind")
                threading.Thread(
                    target=self._drop, args=(last_reference,), name="ft-gloo-stranded", daemon=True
                ).start()
                return
            with self._news:
                ended = self._news.wait_for(lambda: self._open == 0, self.end_s)
        last_reference.clear()  # joins torch's threads

    def _drop(self, last_reference: list[Any]) -> None:
        """Drops the group when the thread that it left behind has met its backstop."""
        last_reference.clear()  # joins torch's threads
        self.stranded.release()

    def _count_down(self) -> None:
        with self._news:
            self._open -= 1
            self._news.notify_all()

    def _end_connections(self) -> None:
        connections: list[socket.socket] = []
        try:
            connections = self._connections()
            sockets.end(connections, socket.SHUT_RD)
            time.sleep(ANSWER_S)
            if self._native is not None:
                _fail_all(self._native)
            sockets.end(connections, socket.SHUT_RDWR)
        finally:
            self._has_ended.set()
        time.sleep(LINGER_S)
        for sock in connections:
            sock.close()

    def _connections(self) -> list[socket.socket]:
        """All of its connections. Where no descriptors are left it waits for some: else no peer would hear of the end."""
        for tries in itertools.count():
            with suppress(OSError):
                return sockets.duplicates(local=self.local, remote=self.remote)
            if not tries:
                log.warning(
                    "no descriptors are left: the connections of a group that was abandoned are ended once there are some"
                )
            time.sleep(AGAIN_S)
        raise AssertionError("unreachable")


def _fail_all(native: dist.ProcessGroup) -> None:
    """Fails all pending operations: gloo does so when a receive times out."""
    for peer in range(native.size()):
        # that nothing has come; or that this connection has ended, and another one has to serve
        with suppress(RuntimeError):
            if peer != native.rank():
                native.recv([torch.empty(1)], peer, NO_TAG).wait(timedelta(milliseconds=1))


def _are_asleep(threads: set[int]) -> bool:
    """True when none of these threads has run for a second, nor wants to."""
    before = {number: _runs(number) for number in threads}
    time.sleep(1.0)
    return all(runs == _runs(number) and runs[:1] != "R" for number, runs in before.items())


def _runs(thread: int) -> str:
    """Its state, and how often it has run so far; empty: it is gone."""
    try:
        lines = Path(f"/proc/self/task/{thread}/status").read_text().splitlines()
    except OSError:
        return ""
    return " ".join(line.split(":")[1].strip() for line in lines if line.startswith(("State", "voluntary", "nonvol")))


def _threads_of_gloo() -> set[int]:
    found = set()
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has ended
            if "gloo" in path.read_text():
                found.add(int(path.parent.name))
    return found


class _Waiters:
    """Threads, each of which waits for one work at a time. Who has waited is kept for the next work: a start costs both sides of a heal a
    tenth of their time. There are as many as were ever needed at once, for a work may end before those that came first."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()  # one for each free thread that is wanted
        self._lock = threading.Lock()
        self._count = self._free = 0  # threads that were started; those that nothing is meant for
        self._closed = False
        self.busy: set[int] = set()  # threads, as the kernel numbers them

    def take(self, work: dist.Work, operation: Operation, ended: Ended) -> None:
        task = [work], operation, ended
        with self._lock:
            if self._free:
                self._free -= 1
                self._tasks.put(task)
                return
            self._count += 1
            name = f"ft-gloo-{self._count}"
        threading.Thread(target=self._run, args=([task],), name=name, daemon=True).start()

    def close(self) -> None:
        """They end, each when its work has."""
        with self._lock:
            self._closed = True
            for _ in range(self._free):
                self._tasks.put(None)
            self._free = 0

    def _run(self, first: list[_Task]) -> None:
        task: _Task | None = first.pop()
        while task is not None:
            self.busy.add(threading.get_native_id())
            only, operation, ended = task
            work = only.pop()
            error = failure_of(work.wait)
            source = source_of(work, operation) if error is None else -1
            del work  # before its end is reported: it refers to torch's group
            ended(error, source)
            del task, operation, ended  # the tensors
            self.busy.discard(threading.get_native_id())
            with self._lock:
                if self._closed:
                    return
                self._free += 1
            task = self._tasks.get()
