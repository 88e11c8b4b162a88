"""Process groups in a child process: a collective that hangs cannot be cancelled, but the child can be killed.

The operations are those of gloo.py and nccl.py, started in the child by the same code. Tensors lie in memory that both map (shared.py). The
child says when an operation has ended, physically; then the work and its future end here. To give up is to kill: the kernel closes its
sockets, the peers see it, and no thread of torch is left to wait for.

What a group says is the name of a method of ChildGroup with its arguments, pickled: a process to its own child. What the child says is
JSON: the child talks to the network, and nothing that comes from there is ever unpickled.
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ft.device import current_device, device_thread
from ft.process_groups import shared
from ft.process_groups.base import SIGNATURES, Operation, ProcessGroup
from ft.process_groups.errors import GroupError, RendezvousFailed
from ft.process_groups.fork_server import Channel, Child, ForkServer, fork_server_of_this_process
from ft.process_groups.forming import Ended, Engine, GroupInit, Rendezvous, address_of
from ft.process_groups.gloo import form_gloo
from ft.process_groups.nccl import form_nccl
from ft.protocol.messages import Shape

# Replies: [what, number, error, more]; more of FAILED: absent and mismatched ranks; of DROPPED: what `unmap` named; of ENDED: the sender.
READY, FAILED, ENDED, DROPPED = "ready", "failed", "ended", "dropped"


class ProcessGroupBaby(ProcessGroup):
    """Base of both kinds."""

    NATIVE = ""
    IN_CHILD = True

    def __init__(
        self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0, interface: str | None = None
    ) -> None:
        super().__init__(timeout, rendezvous_s=rendezvous_s)
        self._interface = interface
        self._fork_server: ForkServer = fork_server_of_this_process()
        self._fork_server.warm()  # imports torch while this process goes on
        # The device is known now: a generation is formed in another thread.
        self.device = current_device() if self.NATIVE == "nccl" else None
        self.child: Child | None = None  # of the newest generation

    @staticmethod
    def empty(
        shape: tuple[int, ...] | int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """A tensor that the child can use where it is, without a copy."""
        return shared.empty(shape, dtype, device)

    def prepare(self) -> None:
        self._fork_server.prepare()

    def _build(self, group_init: GroupInit, store: Store | str, rank: int, size: int) -> Engine:
        address = store if isinstance(store, str) else _address(group_init, store, rank)
        self.child = child = self._fork_server.child()
        group_init.at_giving_up(child.kill)
        engine = ChildEngine(child, self.device)
        place = address, rank, size, self.rendezvous_s
        try:
            engine.form(self.NATIVE, *place, self._interface, self.device, group_init.shape, group_init.holders)
        except GroupError as error:
            if isinstance(error, RendezvousFailed):
                group_init.absent = error.absent
                if error.mismatched:
                    group_init.refuse(error.mismatched, str(error))
            engine.wake()
            engine.end()
            raise
        return engine


class ProcessGroupBabyGloo(ProcessGroupBaby):
    """gloo in a child process. `interface`: its network interface, such as eth0; by default the one that leads to the store."""

    KIND, NATIVE = "ft_baby_gloo", "gloo"


class ProcessGroupBabyNCCL(ProcessGroupBaby):
    """NCCL in a child process, on what is the current device of the thread that makes the group."""

    KIND, NATIVE = "ft_baby_nccl", "nccl"


class ChildEngine:
    """The parent's end of one child. A thread receives what it says. `device`: the number of the GPU that tensors lie on; None: on none."""

    def __init__(self, child: Child, device: int | None) -> None:
        self._child = child
        self._memory = shared.SharedPoolOwner(self._send)
        self._order = threading.Lock()  # of operations: as they are numbered, so they are sent
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[Ended, shared.PoolLease, Operation]] = {}
        self._count = 0
        self._formed = threading.Event()
        self._problem: RendezvousFailed | None = None
        self._gone = False
        # It sets futures, which record events.
        self._receiver = device_thread(self._receive, name=f"ft-child-{child.pid}", device=device)
        self._receiver.start()

    def form(self, *arguments: Any) -> None:
        """As ChildGroup's; returns when the group stands. Raises RendezvousFailed."""
        self._send("form", arguments)
        self._formed.wait()
        if self._problem is not None:
            raise self._problem

    def start(self, operation: Operation, ended: Ended) -> None:
        lease = shared.PoolLease()
        with self._order:
            placed = operation.each(lambda tensor, read, written: self._memory.lend(tensor, read, written, lease))
            with self._lock:
                if self._gone:
                    raise GroupError("the child process is gone")
                self._count += 1
                number = self._count
                self._under_way[number] = (ended, lease, operation)
            self._send("start", (number, placed, _written(operation, lease)))

    def wake(self) -> None:
        self._child.kill()

    def end(self) -> None:
        self._child.end()
        self._receiver.join()
        self._memory.close()

    def _send(self, command: str, arguments: tuple[Any, ...], descriptors: Sequence[int] = ()) -> None:
        try:
            self._child.channel.send(pickle.dumps((command, arguments)), descriptors)
        except OSError as error:
            raise GroupError(f"the child process is gone: {error}") from None

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
            ended(GroupError(f"{SIGNATURES[operation.method].name}: the child process is gone"), -1)
        if not self._formed.is_set():
            self._problem = RendezvousFailed("the child process is gone")
            self._formed.set()

    def _ended(self, number: int, error: str | None, source: int) -> None:
        with self._lock:
            ended, lease, operation = self._under_way.pop(number)
        try:
            self._memory.give_back(lease, complete=error is None)
        except RuntimeError as problem:  # of torch: a tensor that cannot be written into
            error = str(problem)
        ended(None if error is None else GroupError(f"{SIGNATURES[operation.method].name}: {error}"), source)


def _written(operation: Operation, lease: shared.PoolLease) -> tuple[int, bytes] | None:
    """For tensors on a GPU: an event that the child waits for before it reads them."""
    devices = {tensor.device for tensor in (*operation.inputs(), *operation.outputs()) if tensor.is_cuda}
    if not devices:
        return None
    [device] = devices
    event = torch.cuda.Event(interprocess=True)
    event.record(torch.cuda.current_stream(device))
    lease.kept.append(event)
    return device.index, event.ipc_handle()


def _address(group_init: GroupInit, store: Store, rank: int) -> str:
    """The child needs a connection of its own, and torch does not tell a store's prefix: the members agree on a new one."""
    host, port = address_of(store)
    if rank == 0:
        store.set("child/prefix", uuid.uuid4().hex)
    while not store.check(["child/prefix"]):
        if group_init.given_up.wait(0.01):
            raise RendezvousFailed("given up", (0,))
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port}/{store.get('child/prefix').decode()}"


# ------------------------------------------------------------------------------------------------ in the child


class ChildGroup:
    """Carries out commands, one after the other, until its channel ends: a group of torch that may be killed at any moment, without loss
    to the process that trains. Descriptors that come with a command are its last arguments."""

    def __init__(self, channel: Channel, form_nccl: Callable[..., Engine] = form_nccl) -> None:
        self._channel, self._form_nccl = channel, form_nccl
        self._memory = shared.SharedPoolClient()
        self.map, self.map_device = self._memory.map, self._memory.map_device
        self.engine: Engine | None = None

    def serve(self) -> None:
        while (message := self._channel.receive()) is not None:
            command, arguments = pickle.loads(message[0])
            getattr(self, command)(*arguments, *message[1])

    def form(
        self,
        kind: str,
        store: str,
        rank: int,
        size: int,
        limit_s: float,
        interface: str | None,
        device: int | None,
        shape: Shape,
        holders: Sequence[int],
    ) -> None:
        """Builds the group, of gloo or NCCL; answered by READY or FAILED. `device`: of NCCL. In a thread: this one sees the end of the
        channel meanwhile."""

        def build(group_init: GroupInit) -> Engine:
            rendezvous = Rendezvous(group_init, store, rank, size, limit_s)
            return form_gloo(rendezvous, interface) if kind == "gloo" else self._form_nccl(rendezvous, device)

        def run() -> None:
            group_init = GroupInit("child", build, shape=shape, holders=holders)
            try:
                self.engine = build(group_init)
            except Exception as error:  # noqa: BLE001 (whatever it is, the parent tells it)
                self._reply(FAILED, 0, str(error), [group_init.absent, group_init.mismatched])
            else:
                self._reply(READY, 0, None, [])

        if device is not None:
            torch.cuda.set_device(device)  # of this thread: it maps memory, and starts operations
        threading.Thread(target=run, name="ft-form", daemon=True).start()

    def unmap(self, numbers: list[int]) -> None:
        """Answered by DROPPED."""
        self._memory.unmap(numbers)
        self._reply(DROPPED, 0, None, numbers)

    def start(self, number: int, placed: Operation, after: tuple[int, bytes] | None) -> None:
        """Starts an operation, with a SharedTensor for each tensor; answered by ENDED. `after`: a CUDA event of the parent, when it has
        written the tensors, for which this process' stream waits first."""

        def ended(error: Exception | None, source: int) -> None:
            self._reply(ENDED, number, None if error is None else str(error), source)

        try:
            if after is not None:
                device = torch.device("cuda", after[0])
                torch.cuda.current_stream(device).wait_event(torch.cuda.Event.from_ipc_handle(device, after[1]))
            assert self.engine is not None
            self.engine.start(placed.each(lambda place, read, written: self._memory.tensor(place)), ended)
        except Exception as error:  # noqa: BLE001 (whatever it is, the parent tells it)
            ended(error, -1)

    def _reply(self, *reply: Any) -> None:
        try:
            self._channel.send(json.dumps(reply).encode())
        except OSError:
            os._exit(0)  # the parent is gone
