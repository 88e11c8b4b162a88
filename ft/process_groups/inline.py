"""Groups in this process: torch's gloo and NCCL, each of which can be woken.

gloo: its sockets are shut (sockets.py). NCCL: a communicator that never blocks its caller, aborted in a thread that has a deadline.
"""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from ft.process_groups import sockets
from ft.process_groups.base import NEVER, ProcessGroup
from ft.process_groups.errors import GroupError, MustExit
from ft.process_groups.forming import Ended, Engine, Formation
from ft.process_groups.meeting import Meeting
from ft.process_groups.operations import Operation, Receive
from ft.process_groups.sockets import Address

_Task = tuple[list[dist.Work], Operation, Ended]
ABORT_LIMIT_S = 10.0  # for NCCL; then the process has to go
POLL_S = 0.0005  # between looks at the GPU's progress


class ProcessGroupGloo(ProcessGroup):
    """gloo in this process. `interface`: its network interface, such as eth0; by default the one that leads to the store."""

    KIND = "ft_gloo"

    def __init__(
        self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0, interface: str | None = None
    ) -> None:
        if not sockets.can_be_found():
            raise RuntimeError("in-process gloo needs /proc to find its sockets: use ProcessGroupBabyGloo here")
        super().__init__(timeout, rendezvous_s=rendezvous_s)
        self._interface = interface

    def _build(self, formation: Formation, store: Store | str, rank: int, size: int) -> Engine:
        meeting = Meeting(formation, store, rank, size, self.rendezvous_s)
        return form_gloo(formation, meeting, self._interface, timedelta(seconds=self.timeout_s + 1))


class ProcessGroupNCCL(ProcessGroup):
    """NCCL in this process. `timeout` is kept by this process; NCCL's own watchdog is off. `device`: by default the current one of the
    thread that makes the group. A generation is formed in another thread, and in CUDA each thread begins with device 0."""

    KIND = "ft_nccl"

    def __init__(
        self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0, device: int | None = None
    ) -> None:
        super().__init__(timeout, rendezvous_s=rendezvous_s)
        self.device = current_device() if device is None else device

    def _build(self, formation: Formation, store: Store | str, rank: int, size: int) -> Engine:
        return form_nccl(formation, Meeting(formation, store, rank, size, self.rendezvous_s), self.device)


def form_gloo(formation: Formation, meeting: Meeting, interface: str | None, backstop: timedelta = NEVER) -> Engine:
    """The engine of a gloo group, once all are there. All its connections are made here, so what stands needs the store no longer.

    `backstop`: after which a thread of gloo that nobody can wake ends by itself. There is such a case: when a connection is reset while
    gloo's own thread answers to a receiver's word, it forgets to fail that send, and who waits for it waits on.
    """
    kind: Any = c10d.ProcessGroupGloo
    if sockets.can_be_found():
        device, near = sockets.listening_ends(lambda: _gloo_device(interface, meeting.host))
    else:
        device, near = _gloo_device(interface, meeting.host), set()  # in a child: it is killed, not woken
    ports = meeting.gather(sorted(near))
    far = {(host, port) for member in ports for host, port in member} - near
    formation.at_giving_up(lambda: sockets.shut(near=near, far=far) if near else None)
    options = kind._Options()
    options._devices = [device]
    options._threads = 2
    options._timeout = timedelta(seconds=meeting.left_s())  # to connect; nobody can call it off
    backend = kind(meeting.store, meeting.rank, meeting.size, options)
    meeting.close()
    backend._set_default_timeout(backstop)
    backend.set_timeout(backstop)
    native = _group_of(backend, "gloo", "cpu", meeting)
    return GlooEngine(native, near, far)


def current_device() -> int | None:
    """This thread's CUDA device, where there is any."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def form_nccl(formation: Formation, meeting: Meeting, number: int | None) -> Engine:
    """The engine of an NCCL group on the CUDA device of that number, once all are there."""
    if number is None or not dist.is_nccl_available():
        raise GroupError("NCCL needs a CUDA device and a torch that is built with NCCL")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    meeting.gather(device.index)
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = NEVER
    options.config.blocking = 0
    with _environment({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}):
        backend = c10d.ProcessGroupNCCL(meeting.store, meeting.rank, meeting.size, options)
    formation.at_giving_up(lambda: threading.Thread(target=backend.abort, name="ft-nccl-abort", daemon=True).start())
    backend.eager_connect_single_device(device)
    return NcclEngine(_group_of(backend, "nccl", "cuda", meeting), backend.abort)


class _Native:
    """What the engines of both kinds have in common: a group of torch, started and watched."""

    def __init__(self, native: dist.ProcessGroup) -> None:
        self._native: dist.ProcessGroup | None = native

    def start(self, operation: Operation, ended: Ended) -> None:
        native = self._native
        if native is None:
            raise GroupError("the group was given up")
        self._watch(operation.start(native), operation, ended)

    def _watch(self, work: dist.Work, operation: Operation, ended: Ended) -> None:
        raise NotImplementedError


class GlooEngine(_Native):
    def __init__(self, native: dist.ProcessGroup, near: set[Address], far: set[Address]) -> None:
        super().__init__(native)
        self._near, self._far = near, far
        self._waiters = _Waiters()

    def wake(self) -> None:
        if self._near:
            sockets.shut(near=self._near, far=self._far)

    def end(self) -> None:
        self._waiters.close()
        self._native = (
            None  # joins torch's threads: all works have failed by then, or are complete, or meet the backstop
        )

    def _watch(self, work: dist.Work, operation: Operation, ended: Ended) -> None:
        try:
            future = work.get_future()
        except RuntimeError:  # gloo's messages and its reduce_scatter have none
            self._waiters.take(work, operation, ended)
            return
        future.add_done_callback(lambda done: ended(_failure(done.wait), -1))


class _Waiters:
    """Threads, each of which waits for one work at a time. Who has waited is kept for the next work: a start costs both sides of a heal a
    tenth of their time. There are as many as were ever needed at once, for a work may end before those that came first."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()  # one for each free thread that is wanted
        self._lock = threading.Lock()
        self._count = self._free = 0  # threads that were started; those that nothing is meant for
        self._closed = False

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
            _wait(*task)
            del task  # the tensors
            with self._lock:
                if self._closed:
                    return
                self._free += 1
            task = self._tasks.get()


class NcclEngine(_Native):
    """Looks at the GPU's progress from a thread: no stream ever waits for a peer. NCCL ends operations in their order."""

    def __init__(self, native: dist.ProcessGroup, abort: Callable[[], None]) -> None:
        super().__init__(native)
        self._abort = abort
        self._started: queue.SimpleQueue[tuple[dist.Work, Operation, Ended] | None] = queue.SimpleQueue()
        self._poller = threading.Thread(target=self._poll, name="ft-nccl-poll", daemon=True)
        self._poller.start()

    def wake(self) -> None:
        """Nothing that is quick: `abort` may block, so it is part of the end."""

    def end(self) -> None:
        aborting = threading.Thread(target=self._abort, name="ft-nccl-abort", daemon=True)
        aborting.start()
        self._started.put(None)
        aborting.join(ABORT_LIMIT_S)
        self._poller.join(ABORT_LIMIT_S)
        if aborting.is_alive() or self._poller.is_alive():
            raise MustExit(f"NCCL's abort has not ended after {ABORT_LIMIT_S:g} s")
        self._native = None

    def _watch(self, work: dist.Work, operation: Operation, ended: Ended) -> None:
        self._started.put((work, operation, ended))

    def _poll(self) -> None:
        while (item := self._started.get()) is not None:
            work, operation, ended = item
            while not work.is_completed():
                time.sleep(POLL_S)
            ended(_failure(work.wait), _source(work, operation))
            del work, item


def _wait(only: list[dist.Work], operation: Operation, ended: Ended) -> None:
    work = only.pop()
    error = _failure(work.wait)
    source = _source(work, operation) if error is None else -1
    del work  # before anybody is told: it holds torch's group
    ended(error, source)


def _failure(wait: Callable[[], Any]) -> Exception | None:
    """What went wrong, without the traceback: its frames hold the group."""
    try:
        wait()
    except Exception as error:  # noqa: BLE001 (torch raises what it likes; the cause goes to the work)
        return GroupError(_plain_words(str(error)))
    return None


def _plain_words(message: str) -> str:
    """Without the source line in front, and the advice and the stack of C++ behind."""
    message = message.split("\nException raised from", 1)[0].split(" This is typically caused", 1)[0]
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", message)


def _source(work: dist.Work, operation: Operation) -> int:
    return work._source_rank() if isinstance(operation, Receive) and operation.source is None else -1


def _gloo_device(interface: str | None, towards: str | None) -> Any:
    """By its interface, or by an address of this machine. No name is looked up but that of this host, where there is no store to go by."""
    kind = c10d.ProcessGroupGloo
    if interface:
        return kind.create_device(interface=interface, lazy_init=False)
    if towards:
        return kind.create_device(hostname=sockets.towards(towards), lazy_init=False)
    return kind.create_default_device(lazy_init=False)


def _group_of(backend: Any, name: str, device: str, meeting: Meeting) -> dist.ProcessGroup:
    """torch's ProcessGroup around one backend: it knows all the names that collectives have."""
    group = dist.ProcessGroup(c10d.HashStore(), meeting.rank, meeting.size)
    kind = getattr(dist.ProcessGroup.BackendType, name.upper())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group


_environment_lock = threading.Lock()


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """For a constructor that has no arguments for them."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
