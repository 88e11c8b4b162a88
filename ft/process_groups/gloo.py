"""torch's gloo in this process: forming can be interrupted, and an ended group leaves no thread behind.

gloo has no usable way to end a group: abort interrupts no wait, and dropping the group waits for all pending operations. So its sockets are
shut down (sockets.py), in an order that makes gloo fail every operation. A child (baby.py) forms its group the same way, and is killed.
"""

from __future__ import annotations

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
from ft.process_groups.base import NEVER, UNSUPPORTED, Operation, ProcessGroup, failure_of, group_of, source_of
from ft.process_groups.errors import MustExit, ProcessGroupError, RendezvousFailed
from ft.process_groups.forming import Ended, Engine, Rendezvous
from ft.process_groups.sockets import Address

_Task = tuple[list[dist.Work], Operation, Ended]
ANSWER_S = 0.02  # time for gloo to answer what it has received, and to notice the shutdown
LINGER_S = 1.0  # time until sockets are closed: an earlier reset could discard data that the peer has not read
AGAIN_S = 0.5  # between two tries to duplicate sockets if no descriptors are left
CONNECTS = 5  # gloo waits this many times its timeout for a peer to connect (waitUntil in its transport/tcp/pair.cc)
NO_TAG = (1 << 31) - 1  # tag of a message that is never sent
HEARD_BYTES = 10 << 10  # of each other member while the group forms: more than the largest packet of Ethernet
NAMED = 8  # most members named in an error
log = logging.getLogger("pharos.group")


class ProcessGroupGloo(ProcessGroup):
    """gloo in this process."""

    KIND = "ft_gloo"
    NOT_REDUCED = UNSUPPORTED | {dtype for name, dtype in vars(torch).items() if name.startswith("float8_")}

    def __init__(self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0) -> None:
        if not sockets.DESCRIPTORS.is_dir():
            raise RuntimeError("ProcessGroupGloo requires /proc to find its sockets: use ProcessGroupBabyGloo here")
        super().__init__(timeout, rendezvous_s=rendezvous_s)

    def _build(self, rendezvous: Rendezvous) -> Engine:
        return form_gloo(rendezvous, timedelta(seconds=self.timeout_s + 1))


def form_gloo(
    rendezvous: Rendezvous,
    backstop: timedelta = NEVER,
    *,
    backend_class: Any = c10d.ProcessGroupGloo,
    listening_ends: Callable[..., tuple[Any, set[Address]]] = sockets.listening_ends,
) -> Engine:
    """Forms a gloo group on the network interface that leads to the store, and returns its engine. All connections are made here, so the
    store is not needed any more. `backstop`: timeout of a thread of gloo that cannot be interrupted: if a connection is reset while gloo's
    own thread answers a receiver, gloo does not fail that send, and its work stays pending."""
    before = _threads_of_gloo()
    host = sockets.local_address_for(rendezvous.store.host)
    device, local = listening_ends(lambda: c10d.ProcessGroupGloo.create_device(hostname=host, lazy_init=False))
    ports = rendezvous.all_gather(sorted(local))
    remote = {(host, port) for member in ports for host, port in member} - local
    rendezvous.on_cancel(lambda: sockets.shutdown_matching(local=local, remote=remote))
    options = backend_class._Options()
    options._devices = [device]
    options._threads = 2
    options._timeout = timedelta(seconds=rendezvous.left_s() / CONNECTS)  # connecting cannot be cancelled
    backend = backend_class(rendezvous.store, rendezvous.rank, rendezvous.size, options)
    rendezvous.store.close()
    _set_timeout(backend, timedelta(seconds=rendezvous.left_s()))
    _hear_from_all(backend, rendezvous)
    sockets.keep_alive(local=local, remote=remote)
    _set_timeout(backend, backstop)
    native = group_of(backend, "gloo", "cpu", rendezvous.rank, rendezvous.size)
    return GlooEngine(native, local, remote, _threads_of_gloo() - before)


def _set_timeout(backend: Any, timeout: timedelta) -> None:
    """Sets the timeout of operations that are started on the backend itself, and on the group around it."""
    backend._set_default_timeout(timeout)
    backend.set_timeout(timeout)


def _hear_from_all(backend: Any, rendezvous: Rendezvous) -> None:
    """Checks all connections by an exchange of ranks, while forming may still fail. gloo accepts any connection that sends the next number
    (8 bytes) as a member; and a link may lose all large packets, of an MTU that a switch or a tunnel lacks, though members connect. Either
    would be noticed only after collective_s. Raises RendezvousFailed.

    Waits for the future: torch leaks a hundred bytes for each thread that has waited for a work, and each call has a new thread."""
    ranks = torch.arange(rendezvous.size).unsqueeze(1).expand(-1, HEARD_BYTES // 8)  # int64: 8 bytes each
    heard, mine = torch.full(ranks.shape, -1), torch.full(ranks.shape, rendezvous.rank)
    try:
        backend.alltoall_base(heard, mine, [], [], c10d.AllToAllOptions()).get_future().wait()
    except RuntimeError as error:
        silent = [rank for rank, whole in enumerate((heard == ranks).all(1).tolist()) if not whole]
        named = ", ".join(map(str, silent[:NAMED])) + f" and {len(silent) - NAMED} more" * (len(silent) > NAMED)
        why = f"members have connected, but {HEARD_BYTES} bytes did not arrive from replica ranks {named}: {error}"
        raise RendezvousFailed(why) from None
    if not torch.equal(heard, ranks):
        raise RendezvousFailed(f"a connection is not the expected member's: ranks {heard[:, 0].tolist()}")


class GlooEngine:
    """A native gloo group, ended so that hardly any thread stays blocked. When a connection ends, gloo fails the operations that wait for
    it, but not a send that it could not write, nor a message that it has half read; their threads wait until the backstop. So connections
    are duplicated, and end in three steps: 1. the read side is shut down: gloo still answers what it has read, and no write fails; 2. a
    receive without a sender times out, at which gloo fails all pending works; 3. they are shut down, which peers see, and closed later.

    A killed peer may still leave a thread blocked; it sleeps, touches no tensor, and ends at the backstop. `stranded` limits them."""

    stranded: threading.Semaphore = threading.BoundedSemaphore(32)
    end_s = 2.0  # then the threads of works that have not ended are examined

    def __init__(self, native: dist.ProcessGroup, local: set[Address], remote: set[Address], threads: set[int]) -> None:
        self._native: dist.ProcessGroup | None = native
        self.local, self.remote, self._threads = local, remote, threads
        self._waiters = _Waiters()
        self._news = threading.Condition()
        self._open = 0  # number of works that have not ended
        self._ending: threading.Thread | None = None
        self._connections_ended = threading.Event()

    def start(self, operation: Operation, ended: Ended) -> None:
        native = self._native
        if native is None:
            raise ProcessGroupError("the process group was abandoned")

        def has_ended(error: Exception | None, source: int) -> None:
            self._count_down()
            ended(error, source)

        with self._news:
            self._open += 1
        try:
            work = operation.start(native)
            try:
                future = work.get_future()
            except RuntimeError:  # gloo's send, recv and reduce_scatter have none
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
        self._connections_ended.wait()
        last_reference, self._native = [self._native], None
        while not self._all_ended():
            if _are_asleep(self._threads | self._waiters.busy):
                if not self.stranded.acquire(blocking=False):
                    raise MustExit("too many ended gloo groups still have blocked threads")
                threading.Thread(
                    target=self._drop, args=(last_reference,), name="ft-gloo-stranded", daemon=True
                ).start()
                return
        last_reference.clear()  # joins torch's threads

    def _all_ended(self) -> bool:
        with self._news:
            return self._news.wait_for(lambda: self._open == 0, self.end_s)

    def _drop(self, last_reference: list[Any]) -> None:
        """Drops the group, which waits until the backstop of its blocked threads."""
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
            sockets.shutdown(connections, socket.SHUT_RD)
            time.sleep(ANSWER_S)
            if self._native is not None:
                _fail_all(self._native)
            sockets.shutdown(connections, socket.SHUT_RDWR)
        finally:
            self._connections_ended.set()
        time.sleep(LINGER_S)
        for sock in connections:
            sock.close()

    def _connections(self) -> list[socket.socket]:
        """Returns duplicates of all its sockets; waits while no descriptors are left, as else peers would not notice the end."""
        warned = False
        while True:
            with suppress(OSError):
                return sockets.duplicates(local=self.local, remote=self.remote)
            if not warned:
                warned = True
                log.warning(
                    "no file descriptors are left: the connections of an abandoned process group are closed once there are some"
                )
            time.sleep(AGAIN_S)


def _fail_all(native: dist.ProcessGroup) -> None:
    """Fails all pending operations: gloo does so when a receive times out."""
    for peer in range(native.size()):
        # the timeout, at which gloo fails them; or this connection has ended already: then the next peer's timeout does it
        with suppress(RuntimeError):
            if peer != native.rank():
                native.recv([torch.empty(1)], peer, NO_TAG).wait(timedelta(milliseconds=1))


def _are_asleep(threads: set[int]) -> bool:
    """True when none of these threads has run within a second or is runnable."""
    before = {thread: _runs(thread) for thread in threads}
    time.sleep(1.0)
    return all(runs == _runs(thread) and runs[:1] != "R" for thread, runs in before.items())


def _runs(thread: int) -> str:
    """Returns a thread's state and its counts of context switches; "": it has ended."""
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
    """Threads, each of which waits for one work at a time. They are reused: to start one for each work would cost both sides of a heal a
    tenth of their time. There are as many as were ever needed at once, as works may end in any order."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()  # at most one task for each free thread
        self._lock = threading.Lock()
        self._free = 0  # threads without a task
        self._closed = False
        self.busy: set[int] = set()  # kernel thread IDs

    def take(self, work: dist.Work, operation: Operation, ended: Ended) -> None:
        task = [work], operation, ended
        with self._lock:
            if self._free:
                self._free -= 1
                self._tasks.put(task)
                return
        threading.Thread(target=self._run, args=([task],), name="ft-gloo-wait", daemon=True).start()

    def close(self) -> None:
        """Ends each thread, once its work has ended."""
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
