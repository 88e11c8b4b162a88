"""torch's NCCL: formed with what torch reads from the environment, proved by a first sum, and aborted in a thread that has a deadline.

A communicator never blocks its caller, and this process watches its own operations: torch's watchdog and heartbeat monitor are switched off
wherever they could end this process, or delay the thread that ends a group.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ft.device import current_device, device_thread
from ft.process_groups.base import NEVER, GroupWork, Operation, ProcessGroup, failure_of, group_of, source_of
from ft.process_groups.errors import MustExit, ProcessGroupError, RendezvousFailed
from ft.process_groups.forming import Ended, Engine, Rendezvous

ABORT_LIMIT_S = 10.0  # then the process has to go
_environment_lock = threading.Lock()
POLL_S = 0.0005  # between two checks of the GPU's progress
NATIVE: Any = getattr(c10d, "ProcessGroupNCCL", None)  # None where torch is built without NCCL

# In force while ProcessGroupNCCL is constructed, in this process and in a child. Lines are those of ProcessGroupNCCL.hpp of torch 2.13.0,
# functions those of ProcessGroupNCCL.cpp (torch/csrc/distributed/c10d).
CONSTRUCTOR_SETTINGS = {
    # :67. handleException throws in the watchdog's thread, which ends the process, unless this is NoHandling.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # :73. The monitor of a process's first group (a child's is ours) polls the store each second for others that dump, and ends the process
    # when one does: HeartbeatMonitor::runLoop, checkDumpSignal.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # :101. The monitor ends the process when the watchdog's heartbeat stops: HeartbeatMonitor::runLoop, terminateProcess.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # :106. Without monitoring, too, a stopped heartbeat sets shouldDump_ (:1379), which is static and the default group's monitor obeys;
    # and then this one sleeps as long again, while who drops the group joins it. 23 days: runLoop counts milliseconds in an int.
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "2000000",
    # :120. After a failed work the watchdog sleeps four times this, 60 s by default, while who drops the group joins it:
    # Watchdog::runLoop, getDumpTimeout.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


class ProcessGroupNCCL(ProcessGroup):
    """NCCL in this process. `timeout` is kept by this process; NCCL's own watchdog is off. `device`: by default the current one of the
    thread that makes the group. A generation is formed in another thread, and in CUDA each thread begins with device 0."""

    KIND = "ft_nccl"

    def __init__(
        self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0, device: int | None = None
    ) -> None:
        super().__init__(timeout, rendezvous_s=rendezvous_s)
        self.device = current_device() if device is None else device

    def _build(self, rendezvous: Rendezvous) -> Engine:
        return form_nccl(rendezvous, self.device)


def process_settings(kind: str, rendezvous_s: float) -> dict[str, str]:
    """Environment of a trainer with such a group (config.py's GroupKind) before its default group is made.

    TORCH_NCCL_DUMP_ON_TIMEOUT: Watchdog::runLoop calls broadcastDumpSignal for each failed work, whatever ASYNC_ERROR_HANDLING says, and
    that sets shouldDump_ (ProcessGroupNCCL.hpp:1379), one for all groups of the process: a default group that dumps would end a process
    which has survived the failure, after TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, 8 minutes. The trainer's own watchdog dumps instead."""
    return {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", **nonblocking_settings(rendezvous_s)} if kind == "nccl" else {}


def nonblocking_settings(rendezvous_s: float) -> dict[str, str]:
    """How long a call waits for a communicator that does not come about, with its mutex: by default 30 minutes. Whole seconds. Read once
    in a process, at the first call that waits (nccl_nonblocking_timeout of NCCLUtils.cpp, declared in NCCLUtils.hpp:212), so it is never
    taken back. A blocking communicator, such as the default group's, is never in progress and does not wait by it."""
    return {"TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(rendezvous_s))}


def form_nccl(
    rendezvous: Rendezvous,
    number: int | None,
    *,
    kind: Any = NATIVE,
    group_of: Callable[..., dist.ProcessGroup] = group_of,
) -> Engine:
    """The engine of an NCCL group on the CUDA device of that number, once all are there and a first sum has ended."""
    if number is None or kind is None:
        raise ProcessGroupError("NCCL needs a CUDA device and a torch that is built with NCCL")
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    rendezvous.all_gather(device.index)
    options = kind.Options()
    options._timeout = NEVER
    options.config.blocking = 0
    os.environ.update(nonblocking_settings(rendezvous.limit_s))
    with _environment(CONSTRUCTOR_SETTINGS):
        backend = kind(rendezvous.store, rendezvous.rank, rendezvous.size, options)
    rendezvous.on_cancel(lambda: device_thread(backend.abort, name="ft-nccl-abort", device=number).start())
    backend.eager_connect_single_device(device)
    engine = NcclEngine(group_of(backend, "nccl", "cuda", rendezvous.rank, rendezvous.size), backend.abort, number)
    try:
        _sum_once(engine, rendezvous, device)
    except BaseException:
        engine.end()
        raise
    return engine


def _sum_once(engine: Engine, rendezvous: Rendezvous, device: torch.device) -> None:
    """torch connects when a communicator is first used, and its user waits with its mutex, which `abort` wants, too: so in this thread,
    which no other waits for. On a stream of its own: others may have work queued. Raises RendezvousFailed."""
    work = GroupWork("AllReduce", [])
    rendezvous.on_cancel(lambda: work.end(ProcessGroupError("cancelled")))
    with torch.cuda.stream(torch.cuda.Stream(device)):
        engine.start(Operation("allreduce", ([torch.ones(1, device=device)],)), work.end)
    try:
        work.wait(timedelta(seconds=rendezvous.left_s()))
    except TimeoutError:
        raise RendezvousFailed(f"a first sum has not ended within {rendezvous.limit_s:g} s") from None
    except ProcessGroupError as error:
        raise RendezvousFailed(f"the first sum failed: {error}") from None


class NcclEngine:
    """Checks the GPU's progress from a thread: no stream waits for a peer. NCCL ends operations in their order. `device`: its number."""

    def __init__(self, native: dist.ProcessGroup, abort: Callable[[], None], device: int) -> None:
        self._native: dist.ProcessGroup | None = native
        self._abort, self._device = abort, device
        self._started: queue.SimpleQueue[tuple[dist.Work, Operation, Ended] | None] = queue.SimpleQueue()
        self._poller = device_thread(self._poll, name="ft-nccl-poll", device=device)
        self._poller.start()

    def start(self, operation: Operation, ended: Ended) -> None:
        native = self._native
        if native is None:
            raise ProcessGroupError("the group was abandoned")
        self._started.put((operation.start(native), operation, ended))

    def interrupt(self) -> None:
        """Does nothing: `abort` may block, so `end` calls it."""

    def end(self) -> None:
        aborting = device_thread(self._abort, name="ft-nccl-abort", device=self._device)
        aborting.start()
        self._started.put(None)
        aborting.join(ABORT_LIMIT_S)
        self._poller.join(ABORT_LIMIT_S)
        if aborting.is_alive() or self._poller.is_alive():
            raise MustExit(f"NCCL's abort has not ended after {ABORT_LIMIT_S:g} s")
        self._native = None

    def _poll(self) -> None:
        while (item := self._started.get()) is not None:
            work, operation, ended = item
            while not work.is_completed():
                time.sleep(POLL_S)
            ended(failure_of(work.wait), source_of(work, operation))
            del work, item


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """For a constructor that has no arguments for them."""
    with _environment_lock:
        before = {name: os.environ[name] for name in settings if name in os.environ}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name in settings.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)
