"""torch's NCCL: forming ends with a first all-reduce as a test, and a group is aborted in a thread with a deadline.

Communicators are non-blocking, and this process watches its own operations: torch's watchdog and heartbeat monitor are disabled wherever
they could end this process or delay the thread that ends a group.
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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ft.device import current_device, device_thread
from ft.process_groups.base import (
    NEVER,
    UNSUPPORTED,
    GroupWork,
    Operation,
    ProcessGroup,
    failure_of,
    group_of,
    source_of,
)
from ft.process_groups.errors import MustExit, ProcessGroupError, RendezvousFailed
from ft.process_groups.forming import Ended, Engine, Rendezvous

ABORT_LIMIT_S = 10.0  # then the process must exit
_environment_lock = threading.Lock()
POLL_S = 0.0005  # between two checks of the GPU's progress
NATIVE: Any = getattr(c10d, "ProcessGroupNCCL", None)  # None where torch is built without NCCL

# Environment variables while ProcessGroupNCCL is constructed, in this process and in a child. Line numbers are those of
# ProcessGroupNCCL.hpp in torch 2.13.0, functions those of ProcessGroupNCCL.cpp (torch/csrc/distributed/c10d).
CONSTRUCTOR_SETTINGS = {
    # :67. handleException throws in the watchdog's thread, which ends the process, unless this is NoHandling.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # :73. The monitor of a process's first group (in a child that is ours) polls the store each second for ranks that dump, and ends the
    # process if one does: HeartbeatMonitor::runLoop, checkDumpSignal.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # :101. The monitor ends the process when the watchdog's heartbeat stops: HeartbeatMonitor::runLoop, terminateProcess.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # :106. Even without monitoring a stopped heartbeat sets shouldDump_ (:1379), which is static, and the default group's monitor obeys it;
    # this monitor then sleeps as long again, and dropping the group joins its thread. 23 days: runLoop counts milliseconds in an int.
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "2000000",
    # :120. After a failed work the watchdog sleeps four times this, by default 60 s in all, and dropping the group joins its thread:
    # Watchdog::runLoop, getDumpTimeout.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}


class ProcessGroupNCCL(ProcessGroup):
    """NCCL in this process. `timeout` is enforced by this process; torch's NCCL watchdog is disabled. `device`: by default the current
    device of the constructor's thread; a generation is formed in a different thread, and CUDA begins each thread on device 0."""

    KIND, DEVICE = "ft_nccl", "cuda"
    NOT_REDUCED = UNSUPPORTED

    def __init__(
        self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0, device: int | None = None
    ) -> None:
        super().__init__(timeout, rendezvous_s=rendezvous_s)
        self.device = current_device() if device is None else device

    def _build(self, rendezvous: Rendezvous) -> Engine:
        return form_nccl(rendezvous, self.device)


def process_settings(kind: str, rendezvous_s: float) -> dict[str, str]:
    """Returns environment variables for a trainer with that kind of group (config.ProcessGroupKind), to be set before its default group is
    made.

    TORCH_NCCL_DUMP_ON_TIMEOUT: Watchdog::runLoop calls broadcastDumpSignal for each failed work, whatever ASYNC_ERROR_HANDLING says, and
    that sets shouldDump_ (ProcessGroupNCCL.hpp:1379), which all groups of the process share: a default group that dumps would end a process
    that has survived the failure, after TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, 8 minutes. The trainer's own watchdog dumps instead."""
    return {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", **nonblocking_settings(rendezvous_s)} if kind == "nccl" else {}


def nonblocking_settings(rendezvous_s: float) -> dict[str, str]:
    """Returns the timeout, in whole seconds, of a call that waits for a communicator that is still in progress, and keeps its mutex
    meanwhile; by default 30 minutes. torch reads it once per process, at the first such call (nccl_nonblocking_timeout of NCCLUtils.cpp,
    declared in NCCLUtils.hpp:212), so it stays set. Blocking communicators, such as the default group's, do not use it."""
    return {"TORCH_NCCL_NONBLOCKING_TIMEOUT": str(math.ceil(rendezvous_s))}


def form_nccl(
    rendezvous: Rendezvous,
    index: int | None,
    *,
    backend_class: Any = NATIVE,
    group_of: Callable[..., dist.ProcessGroup] = group_of,
) -> Engine:
    """Forms an NCCL group on the CUDA device of that index, tests it by an all-reduce, and returns its engine."""
    if index is None or backend_class is None:
        raise ProcessGroupError("NCCL requires a CUDA device and a torch that is built with NCCL")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    rendezvous.all_gather(device.index)
    options = backend_class.Options()
    options._timeout = NEVER
    options.config.blocking = 0
    # A device has 32 streams of each priority, used in turn, and what is queued behind an all-reduce that waits for a peer waits, too: at
    # normal priority perhaps the very state that the peer needs. At high priority are only FSDP's gathers and reduce-scatters: a generation
    # that shares a stream with them overlaps less with the backward.
    options.is_high_priority_stream = True
    os.environ.update(nonblocking_settings(rendezvous.limit_s))
    with _environment(CONSTRUCTOR_SETTINGS):
        backend = backend_class(rendezvous.store, rendezvous.rank, rendezvous.size, options)
    rendezvous.on_cancel(lambda: device_thread(backend.abort, name="ft-nccl-abort", device=index).start())
    backend.eager_connect_single_device(device)
    engine = NcclEngine(group_of(backend, "nccl", "cuda", rendezvous.rank, rendezvous.size), backend.abort, index)
    try:
        _test(engine, rendezvous, device)
    except BaseException:
        engine.end()
        raise
    return engine


def _test(engine: Engine, rendezvous: Rendezvous, device: torch.device) -> None:
    """Makes a first all-reduce, at which torch connects the communicator. There this thread waits with a mutex held that `abort` takes,
    too: so it must be one for which no other waits. Uses a new stream, as others may have work queued. Raises RendezvousFailed."""
    work = GroupWork("AllReduce", [])
    rendezvous.on_cancel(lambda: work.end(ProcessGroupError("cancelled")))
    with torch.cuda.stream(torch.cuda.Stream(device)):
        engine.start(Operation("allreduce", ([torch.ones(1, device=device)],)), work.end)
    try:
        work.wait(timedelta(seconds=rendezvous.left_s()))
    except TimeoutError:
        raise RendezvousFailed(f"the first all-reduce has not ended within {rendezvous.limit_s:g} s") from None
    except ProcessGroupError as error:
        raise RendezvousFailed(f"the first all-reduce failed: {error}") from None


class NcclEngine:
    """A native NCCL group. A thread polls for the end of each operation, in order, so no stream waits for a peer. `device`: GPU index."""

    def __init__(self, native: dist.ProcessGroup, abort: Callable[[], None], device: int) -> None:
        self._native: dist.ProcessGroup | None = native
        self._abort, self._device = abort, device
        self._started: queue.SimpleQueue[tuple[dist.Work, Operation, Ended] | None] = queue.SimpleQueue()
        self._poller = device_thread(self._poll, name="ft-nccl-poll", device=device)
        self._poller.start()

    def start(self, operation: Operation, ended: Ended) -> None:
        native = self._native
        if native is None:
            raise ProcessGroupError("the process group was abandoned")
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
            ended(failure_of(partial(_wait, work)), source_of(work, operation))
            del work, operation, ended, item  # they would keep tensors until the next operation


def _wait(work: dist.Work) -> None:
    """Returns at the end of the work. Raises its error, or that of a check, such as a CUDA error of a different kernel."""
    while not work.is_completed():
        time.sleep(POLL_S)
    work.wait()


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Sets environment variables, for a constructor that has no arguments for these settings."""
    with _environment_lock:
        before = {name: os.environ[name] for name in settings if name in os.environ}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name in settings.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)
