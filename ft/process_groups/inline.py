"""Groups in this process: torch's gloo and NCCL, each of which can be woken.

gloo: its sockets are shut (gloo.py). NCCL: a communicator that never blocks its caller, aborted in a thread that has a deadline.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import Store

from ft.process_groups import sockets
from ft.process_groups.base import NEVER, ProcessGroup
from ft.process_groups.errors import GroupError, MustExit
from ft.process_groups.forming import Ended, Engine, Formation
from ft.process_groups.gloo import form_gloo
from ft.process_groups.meeting import Meeting
from ft.process_groups.native import Native, failure_of, group_of, source_of
from ft.process_groups.operations import Operation

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
    return NcclEngine(group_of(backend, "nccl", "cuda", meeting), backend.abort)


class NcclEngine(Native):
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
            ended(failure_of(work.wait), source_of(work, operation))
            del work, item


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
