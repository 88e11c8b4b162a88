"""torchft's ProcessGroupDummy, which has no peers, ErrorSwallowingProcessGroup, whose works never fail, and ManagedProcessGroup, a Manager
as a process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ft.process_groups.base import SIGNATURES, Collectives, GroupWork, Operation, ProcessGroup
from ft.process_groups.forming import Ended, Engine, Rendezvous

if TYPE_CHECKING:
    from ft.compat.manager import Manager


class ProcessGroupDummy(ProcessGroup):
    """A process group without peers: each operation ends at once, with outputs made of this member's inputs (an all-reduce changes
    nothing). For code that requires a process group before there is one, such as DDP's constructor."""

    KIND, DEVICE = "ft_dummy", ""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        super().__init__()
        self.configure("localhost:1/dummy", rank, world)

    def _build(self, rendezvous: Rendezvous) -> Engine:
        return _DummyEngine()


class _DummyEngine:
    def start(self, operation: Operation, ended: Ended) -> None:
        outputs, inputs = operation.outputs(), operation.inputs()
        if inputs and outputs and inputs[0] is not outputs[0]:
            given = torch.cat([tensor.detach().flatten() for tensor in inputs])
            place = 0
            for output in outputs:
                index = torch.arange(place, place + output.numel(), device=given.device) % given.numel()
                output.copy_(given[index].view(output.shape))
                place += output.numel()
        ended(None, -1)

    def interrupt(self) -> None:
        """Does nothing: no operation is ever pending."""

    def end(self) -> None:
        """Does nothing: there are no resources to release."""


class ErrorSwallowingProcessGroup(Collectives):
    """A process group whose works always succeed: after a failure the values are undefined, and `errored` has the cause, to be checked."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # missing in the stubs
        self._group = pg
        self._error: Exception | None = None
        self.rank, self.size, self.getBackendName = pg.rank, pg.size, pg.getBackendName  # type: ignore[method-assign]

    def configure(self, store: str, rank: int, size: int) -> None:
        self._error = None
        self._group.configure(store, rank, size)

    def abandon(self, reason: str = "abandoned", then: Callable[[], None] | None = None) -> None:
        self._group.abandon(reason, then)

    def shutdown(self, limit_s: float = 30.0) -> None:
        self._group.shutdown(limit_s)

    def errored(self) -> Exception | None:
        return self._error or self._group.errored()

    error = errored  # torchft's name

    def report_error(self, e: Exception) -> None:
        """Records a failure from elsewhere: later operations do nothing."""
        self._error = self._error or e

    def launch(self, operation: Operation) -> dist.Work:
        work = GroupWork(SIGNATURES[operation.method].name, operation.outputs())
        if self.errored() is not None:
            work.end(None)
            return work
        inner = self._group.launch(operation)

        def ended(future: Any) -> None:
            error = inner.exception()
            if error is not None:
                self.report_error(error)
            work.end(None, inner._source_rank())

        inner.get_future().add_done_callback(ended)
        return work


class ManagedProcessGroup(ProcessGroup):
    """A Manager as a process group, for code that takes torch's, such as FSDP's set_all_reduce_hook and a comm hook of torch's
    DistributedDataParallel: `allreduce` is Manager.allreduce, whose work never fails, and `size` the number of participants, 0
    before the first quorum. Other collectives are those of the Manager's process group, and may fail.

    FSDP and DDP copy the result into .grad, so a step in which an all-reduce has failed is dropped in all groups, as in torchft."""

    KIND, DEVICE = "ft_managed", ""

    def __init__(self, manager: Manager) -> None:
        super().__init__()
        self._manager = manager

    def launch(self, operation: Operation) -> dist.Work:
        if operation.method != "allreduce":
            return self._manager.core.process_group.launch(operation)
        [tensor] = operation.inputs()
        op = getattr(dist.ReduceOp, operation.settings["reduceOp"])
        return self._manager.allreduce(tensor, reduce_op=op, repeat=False)

    def errored(self) -> Exception | None:
        return self._manager.errored()

    def rank(self) -> int:
        return self._manager.participating_rank() or 0

    def size(self) -> int:
        return self._manager.num_participants()
