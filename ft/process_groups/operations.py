"""The operations of a process group: one dataclass per collective, with one small method that starts it on a group of torch.

base.py makes them of what torch calls; inline.py starts them here; baby.py sends them to a child, which starts them with the same method.
So whatever is tested on one kind is the code of all kinds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from ft.process_groups.errors import GroupError

Tensors = list[Tensor]


@dataclass(frozen=True)
class Operation:
    """Fields named in `reads` and `writes` hold tensors (a list, or a list of lists); all else is plain."""

    reads: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = ()

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        raise NotImplementedError

    def outputs_flat(self) -> Tensors:
        """The tensors that hold the result."""
        return [tensor for name in self.writes for tensor in flatten(getattr(self, name))]

    def tensors_flat(self) -> Tensors:
        names = dict.fromkeys((*self.reads, *self.writes))
        return [tensor for name in names for tensor in flatten(getattr(self, name))]

    def each(self, change: Callable[[Any, bool, bool], Any]) -> Any:
        """A copy with `change(tensor, is read, is written)` in place of every tensor."""
        names = dict.fromkeys((*self.reads, *self.writes))
        changed = {name: _each(getattr(self, name), change, name in self.reads, name in self.writes) for name in names}
        return replace(self, **changed)


def flatten(nested: Any) -> Tensors:
    """All tensors of a tensor, a list of tensors, or a list of lists."""
    if not isinstance(nested, list | tuple):
        return [nested]
    return [tensor for part in nested for tensor in (flatten(part) if isinstance(part, list | tuple) else (part,))]


def _each(nested: Any, change: Callable[[Any, bool, bool], Any], read: bool, written: bool) -> Any:
    if isinstance(nested, list | tuple):
        return [_each(part, change, read, written) for part in nested]
    return change(nested, read, written)


def options(kind: type[Any], *, op: str = "", **settings: Any) -> Any:
    """torch's options of a collective. `op`: the name of a ReduceOp."""
    made = kind()
    if op:
        made.reduceOp = getattr(dist.ReduceOp, op)
    for name, value in settings.items():
        setattr(made, name, value)
    return made


def reduction(op: Any) -> str:
    """The name of a ReduceOp ("SUM", "AVG", ...), or of that in torch's options; of None it is SUM. A string crosses a pipe, torch's enum
    does not. Raises ValueError."""
    if op is None:
        return "SUM"
    op = getattr(op, "reduceOp", op)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        if op == getattr(dist.ReduceOp, name):
            return name
    raise ValueError(f"reduce op {op}: must be one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR")


@dataclass(frozen=True)
class AllReduce(Operation):
    tensors: Tensors
    op: str = "SUM"
    reads = writes = ("tensors",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return group.allreduce(self.tensors, options(c10d.AllreduceOptions, op=self.op))


@dataclass(frozen=True)
class AllReduceCoalesced(Operation):
    tensors: Tensors
    op: str = "SUM"
    reads = writes = ("tensors",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return group.allreduce_coalesced(self.tensors, options(c10d.AllreduceCoalescedOptions, op=self.op))


@dataclass(frozen=True)
class Broadcast(Operation):
    tensors: Tensors
    root: int = 0
    root_tensor: int = 0
    reads = writes = ("tensors",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return group.broadcast(
            self.tensors, options(c10d.BroadcastOptions, rootRank=self.root, rootTensor=self.root_tensor)
        )


@dataclass(frozen=True)
class Reduce(Operation):
    tensors: Tensors
    op: str = "SUM"
    root: int = 0
    reads = writes = ("tensors",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return group.reduce(self.tensors, options(c10d.ReduceOptions, op=self.op, rootRank=self.root))


@dataclass(frozen=True)
class AllGather(Operation):
    outputs: list[Tensors]
    inputs: Tensors
    reads, writes = ("inputs",), ("outputs",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return group.allgather(self.outputs, self.inputs, c10d.AllgatherOptions())


@dataclass(frozen=True)
class AllGatherCoalesced(Operation):
    """Several tensors; outputs[rank][i] is rank's inputs[i]."""

    outputs: list[Tensors]
    inputs: Tensors
    reads, writes = ("inputs",), ("outputs",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return group.allgather_coalesced(self.outputs, self.inputs, c10d.AllgatherOptions())


@dataclass(frozen=True)
class AllGatherSingle(Operation):
    """Each output is the inputs of all ranks, one after the other."""

    outputs: Tensors
    inputs: Tensors
    reads, writes = ("inputs",), ("outputs",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        if len(self.inputs) == 1:
            return group._allgather_base(self.outputs[0], self.inputs[0], c10d.AllgatherOptions())
        return group.allgather_into_tensor_coalesced(self.outputs, self.inputs, c10d.AllgatherOptions())


@dataclass(frozen=True)
class Gather(Operation):
    outputs: list[Tensors]  # empty but at the root
    inputs: Tensors
    root: int = 0
    reads, writes = ("inputs",), ("outputs",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return group.gather(self.outputs, self.inputs, options(c10d.GatherOptions, rootRank=self.root))


@dataclass(frozen=True)
class Scatter(Operation):
    outputs: Tensors
    inputs: list[Tensors]  # empty but at the root
    root: int = 0
    reads, writes = ("inputs",), ("outputs",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return group.scatter(self.outputs, self.inputs, options(c10d.ScatterOptions, rootRank=self.root))


@dataclass(frozen=True)
class ReduceScatter(Operation):
    outputs: Tensors
    inputs: list[Tensors]
    op: str = "SUM"
    reads, writes = ("inputs",), ("outputs",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return group.reduce_scatter(self.outputs, self.inputs, options(c10d.ReduceScatterOptions, op=self.op))


@dataclass(frozen=True)
class ReduceScatterSingle(Operation):
    """Each rank's output is its part of the sum of the inputs."""

    outputs: Tensors
    inputs: Tensors
    op: str = "SUM"
    reads, writes = ("inputs",), ("outputs",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        how = options(c10d.ReduceScatterOptions, op=self.op)
        if len(self.inputs) == 1:
            return group._reduce_scatter_base(self.outputs[0], self.inputs[0], how)
        return group.reduce_scatter_tensor_coalesced(self.outputs, self.inputs, how)


@dataclass(frozen=True)
class AllToAll(Operation):
    outputs: Tensors
    inputs: Tensors
    reads, writes = ("inputs",), ("outputs",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return group.alltoall(self.outputs, self.inputs, c10d.AllToAllOptions())


@dataclass(frozen=True)
class AllToAllSingle(Operation):
    """output_splits, input_splits: rows to and from each rank; empty: equal parts."""

    outputs: Tensors
    inputs: Tensors
    output_splits: list[int]
    input_splits: list[int]
    reads, writes = ("inputs",), ("outputs",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return group.alltoall_base(
            self.outputs[0], self.inputs[0], self.output_splits, self.input_splits, c10d.AllToAllOptions()
        )


@dataclass(frozen=True)
class Barrier(Operation):
    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return group.barrier(c10d.BarrierOptions())


@dataclass(frozen=True)
class Send(Operation):
    tensors: Tensors
    to: int
    tag: int = 0
    reads = ("tensors",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return group.send(self.tensors, self.to, self.tag)


@dataclass(frozen=True)
class Receive(Operation):
    tensors: Tensors
    source: int | None  # None: of whoever sends first
    tag: int = 0
    writes = ("tensors",)

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        if self.source is None:
            return group.recv_anysource(self.tensors, self.tag)
        return group.recv(self.tensors, self.source, self.tag)


assert all(not kind.writes or fields(kind) for kind in Operation.__subclasses__())


# torch's own groups, of one backend each: for the engines of gloo and of NCCL alike


def failure_of(wait: Callable[[], Any]) -> Exception | None:
    """Returns the error without its traceback, whose frames hold the group; None where there is none."""
    try:
        wait()
    except Exception as error:  # noqa: BLE001 (torch raises what it likes; the cause goes to the work)
        return GroupError(_plain_words(str(error)))
    return None


def _plain_words(message: str) -> str:
    """Without the source line in front, and the advice and the stack of C++ behind."""
    message = message.split("\nException raised from", 1)[0].split(" This is typically caused", 1)[0]
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", message)


def source_of(work: dist.Work, operation: Operation) -> int:
    return work._source_rank() if isinstance(operation, Receive) and operation.source is None else -1


def group_of(backend: Any, name: str, device: str, rank: int, size: int) -> dist.ProcessGroup:
    """torch's ProcessGroup around one backend: it knows all the names that collectives have."""
    group = dist.ProcessGroup(c10d.HashStore(), rank, size)
    kind = getattr(dist.ProcessGroup.BackendType, name.upper())
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group
