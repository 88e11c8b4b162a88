"""Process groups in a child process: a collective that hangs cannot be cancelled, but the child can be killed.

The child is killed when its generation is interrupted or abandoned (base.py): by the Manager, on a notice that a member is lost or the
generation has failed, and if a member is unreachable; when an operation takes longer than the group's timeout; and before the next
generation forms. Then the kernel closes its sockets, which peers notice, and no thread of torch is left to wait for.

The operations are those of gloo.py and nccl.py, started in the child by the same code, on memory that both processes map (shared.py). The
child replies when an operation has ended and its tensors are complete; then the work and its future end here.

A command is the name of a method of ChildGroup with its arguments, pickled: a process sends it to its own child. Replies are JSON: the
child talks to the network, and data that comes from there is never unpickled.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ft.device import current_device, device_thread
from ft.process_groups import shared
from ft.process_groups.base import SIGNATURES, Operation, ProcessGroup
from ft.process_groups.errors import ProcessGroupError, RendezvousFailed
from ft.process_groups.fork_server import Channel, Child, ForkServer, fork_server_of_this_process
from ft.process_groups.forming import Ended, Engine, Rendezvous
from ft.process_groups.gloo import ProcessGroupGloo, form_gloo
from ft.process_groups.nccl import ProcessGroupNCCL, form_nccl

# Replies: [kind, number, error, more]; more of FAILED: absent and mismatched ranks; of DROPPED: segments unmapped; of ENDED: source rank.
READY, FAILED, ENDED, DROPPED = "ready", "failed", "ended", "dropped"


class ProcessGroupBaby(ProcessGroup):
    """A process group in a child process. `NATIVE`: its backend, "gloo" or "nccl"."""

    NATIVE = ""
    IN_CHILD = True
    empty = staticmethod(shared.empty)  # makes a tensor that the child uses without a copy

    def __init__(self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0) -> None:
        if sys.platform == "linux":
            try:  # a child's pidfd tells when it writes no more to memory that it was lent
                os.close(os.pidfd_open(os.getpid()))
            except (AttributeError, OSError) as error:  # AttributeError: Python was built for an older kernel
                cause = getattr(error, "strerror", None) or error
                why = f"this kernel or container has no pidfd_open ({cause}), as Linux before 5.3"
                named = f'fault_tolerance.process_group = "baby_{self.NATIVE}"'
                raise ValueError(f'{named}: {why}; nearest: "{self.NATIVE}"') from None
        super().__init__(timeout, rendezvous_s=rendezvous_s)
        self._fork_server: ForkServer = fork_server_of_this_process()
        self._fork_server.warm()  # imports torch while this process goes on
        # the current device of this thread, as a generation is formed in a different one
        self.device = current_device() if self.DEVICE == "cuda" else None
        self.child: Child | None = None  # child of the newest generation

    def prepare(self) -> None:
        self._fork_server.prepare()

    def _build(self, rendezvous: Rendezvous) -> Engine:
        self.child = child = self._fork_server.child()
        rendezvous.on_cancel(child.kill)
        engine = ChildEngine(child, self.device)
        try:
            engine.form(self.NATIVE, self.device, *rendezvous.arguments)
        except ProcessGroupError as error:
            if isinstance(error, RendezvousFailed):
                rendezvous.absent = error.absent
                if error.mismatched:
                    rendezvous.refuse(error.mismatched, str(error))
            engine.interrupt()
            engine.end()
            raise
        return engine


class ProcessGroupBabyGloo(ProcessGroupBaby):
    """gloo in a child process."""

    KIND, NATIVE, NOT_REDUCED = "ft_baby_gloo", "gloo", ProcessGroupGloo.NOT_REDUCED


class ProcessGroupBabyNCCL(ProcessGroupBaby):
    """NCCL in a child process, on the device that is current in the constructor's thread."""

    KIND, DEVICE, NATIVE, NOT_REDUCED = "ft_baby_nccl", "cuda", "nccl", ProcessGroupNCCL.NOT_REDUCED


class ChildEngine:
    """The parent's end of one child. A thread receives its replies. `device`: index of the tensors' GPU; None: they are on the CPU."""

    def __init__(self, child: Child, device: int | None) -> None:
        self._child = child
        self._memory = shared.SharedPoolOwner(self._send)
        self._order = threading.Lock()  # operations are sent in the order of their numbers
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[Ended, shared.Borrowed, Operation]] = {}
        self._count = 0
        self._formed = threading.Event()
        self._problem: RendezvousFailed | None = None
        self._gone = False
        # this thread needs the device, as it sets futures, which record events
        self._receiver = device_thread(self._receive, name=f"ft-child-{child.pid}", device=device)
        self._receiver.start()

    def form(self, *arguments: Any) -> None:
        """Makes the child form the group (ChildGroup.form); returns when it has formed. Raises RendezvousFailed, or ProcessGroupError."""
        self._send("form", arguments)
        self._formed.wait()
        if self._problem is not None:
            raise self._problem

    def start(self, operation: Operation, ended: Ended) -> None:
        borrowed = shared.Borrowed()
        with self._order:
            placed = operation.map_tensors(
                lambda tensor, read, written: self._memory.lend(tensor, read, written, borrowed)
            )
            with self._lock:
                if self._gone:
                    raise ProcessGroupError("the child process is gone")
                self._count += 1
                number = self._count
                self._under_way[number] = (ended, borrowed, operation)
            self._send("start", (number, placed, _ready_event(operation, borrowed)))

    def interrupt(self) -> None:
        self._child.kill()

    def end(self) -> None:
        self._child.end()
        self._receiver.join()
        self._memory.close()

    def _send(self, command: str, arguments: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
        try:
            self._child.channel.send(pickle.dumps((command, arguments)), descriptors)
        except OSError as error:
            raise ProcessGroupError(f"the child process is gone: {error}") from None

    def _receive(self) -> None:
        while (message := self._child.channel.receive()) is not None:
            what, number, error, more = json.loads(message[0])
            if what == ENDED:
                self._ended(number, error, more)
            elif what == DROPPED:
                self._memory.dropped(more)
            elif what in (READY, FAILED):
                self._problem = None if what == READY else RendezvousFailed(error, *map(tuple, more))
                self._formed.set()
        with self._lock:
            self._gone = True
            left, self._under_way = list(self._under_way.values()), {}
        for ended, _, operation in left:
            ended(ProcessGroupError(f"{SIGNATURES[operation.method].name}: the child process is gone"), -1)
        if not self._formed.is_set():
            self._problem = RendezvousFailed("the child process is gone")
            self._formed.set()

    def _ended(self, number: int, error: str | None, source: int) -> None:
        with self._lock:
            ended, borrowed, operation = self._under_way.pop(number)
        try:
            self._memory.give_back(borrowed, complete=error is None)
        except RuntimeError as problem:  # torch's error for a tensor that must not be written
            error = str(problem)
        ended(None if error is None else ProcessGroupError(f"{SIGNATURES[operation.method].name}: {error}"), source)


def _ready_event(operation: Operation, borrowed: shared.Borrowed) -> tuple[int, bytes] | None:
    """Returns, for tensors on a GPU, an event that the child waits for before it reads them: (device index, handle)."""
    devices = {tensor.device for tensor in (*operation.inputs(), *operation.outputs()) if tensor.is_cuda}
    if not devices:
        return None
    [device] = devices
    event = torch.cuda.Event(interprocess=True)
    event.record(torch.cuda.current_stream(device))
    borrowed.kept.append(event)
    return device.index, event.ipc_handle()


class ChildGroup(shared.SharedPoolClient):
    """The child's end: carries out commands until its channel is closed. A command's descriptors are its last arguments."""

    def __init__(self, channel: Channel, form_nccl: Callable[..., Engine] = form_nccl) -> None:
        super().__init__()
        self._channel, self._form_nccl = channel, form_nccl
        self.engine: Engine | None = None

    def serve(self) -> None:
        while (message := self._channel.receive()) is not None:
            command, arguments = pickle.loads(message[0])
            getattr(self, command)(*arguments, *message[1])

    def form(self, kind: str, device: int | None, *arguments: Any) -> None:
        """Forms the group in a thread, as this one must notice when the channel is closed; replies READY or FAILED. `kind`: "gloo" or
        "nccl"; `device`: index of NCCL's; `arguments`: those of a Rendezvous."""

        def build(rendezvous: Rendezvous) -> Engine:
            try:
                forms = {"gloo": lambda: form_gloo(rendezvous), "nccl": lambda: self._form_nccl(rendezvous, device)}
                self.engine = forms[kind]()
            except Exception as error:
                self._reply(FAILED, 0, str(error), [rendezvous.absent, rendezvous.mismatched])
                raise
            self._reply(READY, 0, None, [])
            return self.engine

        if device is not None:
            torch.cuda.set_device(device)  # this thread maps memory and starts operations
        Rendezvous(build, *arguments).start()

    def unmap(self, numbers: list[int]) -> None:
        """Unmaps these segments; replies DROPPED."""
        super().unmap(numbers)
        self._reply(DROPPED, 0, None, numbers)

    def start(self, number: int, placed: Operation, after: tuple[int, bytes] | None) -> None:
        """Starts an operation, with a SharedTensor for each tensor; replies ENDED. `after`: the parent's CUDA event after its writes to the
        tensors (device index, handle), for which this process's stream waits."""

        def ended(error: Exception | None, source: int) -> None:
            self._reply(ENDED, number, None if error is None else str(error), source)

        try:
            if after is not None:
                device = torch.device("cuda", after[0])
                torch.cuda.current_stream(device).wait_event(torch.cuda.Event.from_ipc_handle(device, after[1]))
            assert self.engine is not None
            self.engine.start(placed.map_tensors(lambda place, read, written: self.tensor(place)), ended)
        except Exception as error:  # noqa: BLE001 (the parent reports it)
            ended(error, -1)

    def _reply(self, *reply: Any) -> None:
        try:
            self._channel.send(json.dumps(reply).encode())
        except OSError:
            os._exit(0)  # the parent is gone
