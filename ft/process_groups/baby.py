"""Groups in a child process: whatever torch, a driver or a peer does to the child, this process only ever has to kill it.

The operations are those of inline.py, started in the child by the same code. Tensors lie in memory that both map (shared.py). The child
says when an operation has ended, physically; then the work and its future end here. To give up is to kill: the kernel closes its sockets,
the peers see it, and no thread of torch is left to wait for.
"""

from __future__ import annotations

import json
import pickle
import threading
import uuid
from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from ft.device import current_device, device_thread
from ft.process_groups import shared
from ft.process_groups.base import ProcessGroup
from ft.process_groups.channel import DROPPED, ENDED, FAILED, READY, Form, Map, MapDevice, Start, Unmap
from ft.process_groups.errors import GroupError, RendezvousFailed
from ft.process_groups.fork_server import Child, ForkServer, fork_server_of_this_process
from ft.process_groups.group_init import Ended, Engine, GroupInit
from ft.process_groups.operations import Operation
from ft.process_groups.rendezvous import address_of


class ProcessGroupBaby(ProcessGroup):
    """Base of both kinds."""

    NATIVE = ""

    def __init__(
        self, timeout: timedelta | float = 60.0, *, rendezvous_s: float = 10.0, interface: str | None = None
    ) -> None:
        super().__init__(timeout, rendezvous_s=rendezvous_s)
        self._interface = interface
        self._fork_server: ForkServer = fork_server_of_this_process()
        self._fork_server.warm()  # imports torch while this process goes on
        self.device = (
            current_device() if self.NATIVE == "nccl" else None
        )  # now: a generation is formed in another thread
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
        child = self._fork_server.child()
        group_init.at_giving_up(child.kill)
        self.child = child
        engine = ChildEngine(child, self.device)
        try:
            engine.form(
                Form(
                    self.NATIVE,
                    address,
                    rank,
                    size,
                    self.rendezvous_s,
                    self._interface,
                    self.device,
                    group_init.shape,
                    group_init.holders,
                )
            )
        except GroupError as error:
            if isinstance(error, RendezvousFailed):
                group_init.absent = error.absent
                if error.strangers:
                    group_init.refuse(error.strangers, str(error))
            engine.wake()
            engine.end()
            raise
        return engine


class ProcessGroupBabyGloo(ProcessGroupBaby):
    """gloo in a child process. `interface`: its network interface, such as eth0; by default the one that leads to the store."""

    KIND, NATIVE, IN_CHILD = "ft_baby_gloo", "gloo", True


class ProcessGroupBabyNCCL(ProcessGroupBaby):
    """NCCL in a child process, on what is the current device of the thread that makes the group."""

    KIND, NATIVE, IN_CHILD = "ft_baby_nccl", "nccl", True


class ChildEngine:
    """The parent's end of one child. A thread receives what it says. `device`: the number of the GPU that tensors lie on; None: on none."""

    def __init__(self, child: Child, device: int | None) -> None:
        self._child = child
        self._memory = shared.SharedPoolOwner(self._map, self._map_device, self._unmap)
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

    def form(self, command: Form) -> None:
        """Returns when the group stands. Raises RendezvousFailed."""
        self._send(command)
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
            self._send(Start(number, placed, _written(operation, lease)))

    def wake(self) -> None:
        self._child.kill()

    def end(self) -> None:
        self._child.end()
        self._receiver.join()
        self._memory.close()

    def _send(self, command: Form | MapDevice | Start | Unmap) -> None:
        try:
            self._child.channel.send(pickle.dumps(command))
        except OSError as error:
            raise GroupError(f"the child process is gone: {error}") from None

    def _map(self, number: int, size: int, descriptor: int) -> None:
        try:
            self._child.channel.send(pickle.dumps(Map(number, size)), [descriptor])
        except OSError as error:
            raise GroupError(f"the child process is gone: {error}") from None

    def _map_device(self, number: int, export: shared.Export) -> None:
        self._send(MapDevice(number, export))

    def _unmap(self, numbers: list[int]) -> None:
        self._send(Unmap(numbers))

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
            ended(GroupError(f"{type(operation).__name__}: the child process is gone"), -1)
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
        ended(None if error is None else GroupError(f"{type(operation).__name__}: {error}"), source)


def _written(operation: Operation, lease: shared.PoolLease) -> tuple[int, bytes] | None:
    """For tensors on a GPU: an event that the child waits for before it reads them."""
    devices = {tensor.device for tensor in operation.tensors_flat() if tensor.is_cuda}
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
