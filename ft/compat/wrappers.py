"""torchft's DistributedDataParallel, Optimizer and DistributedSampler: wrappers of a training loop's model, optimizer and data."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as _DistributedSampler

from ft.optim_state import init_optim_state

if TYPE_CHECKING:
    from ft.compat.manager import Manager

log = logging.getLogger("pharos.torchft")


class DistributedDataParallel(nn.Module):
    """A module for which .grad is the mean over replica groups after a backward. Gradients are sent in buckets while the backward computes
    others. The backward ends when all reductions are complete; a failed group costs time, but no step if groups have one rank. A step has
    one backward outside of no_sync.

    torch's further arguments are accepted, and have no effect: buckets are the Manager's, unused parameters send zeros, and each group has
    its own buffers until it heals. Raises ValueError for a module without parameters to train.
    """

    def __init__(self, manager: Manager, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError("DistributedDataParallel: the module has no parameter to train")
        if kwargs:
            log.warning("DistributedDataParallel: %s: no effect, as buckets are the Manager's", ", ".join(kwargs))
        self.module = module
        self._manager = manager
        self.require_backward_grad_sync = True  # torch's name
        self._in_backward = False
        manager.attach([module])

    def forward(self, *inputs: Any, **more: Any) -> Any:
        outputs = self.module(*inputs, **more)
        self._in_backward = False  # a backward that raised has not reset it
        if self.require_backward_grad_sync and torch.is_grad_enabled():
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_reached)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context for forward and backward of all microbatches except for the last: gradients are only accumulated in this group."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def _backward_reached(self, gradient: Tensor) -> None:
        """Hook of every output: the first that the backward reaches begins to send gradients."""
        if not self._in_backward:
            self._manager.backward_begins()
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Called by autograd when all gradients are complete, before `backward` returns."""
        self._in_backward = False
        self._manager.backward_ended()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a module's output. Unlike torch's own search, it supports all mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))


class Optimizer(torch.optim.Optimizer):
    """Begins a step in zero_grad, and steps only if it is committed. Has the wrapped optimizer's attributes. Closures are unsupported."""

    _step_supports_amp_scaling = False  # GradScaler would set a fused optimizer's scale on this object

    def __init__(self, manager: Manager, optim: torch.optim.Optimizer) -> None:
        # without torch's constructor, as all state is the wrapped optimizer's
        self.manager, self.optim = manager, optim
        self.state_dict, self.load_state_dict = optim.state_dict, optim.load_state_dict  # type: ignore[method-assign]
        self.add_param_group = optim.add_param_group  # type: ignore[method-assign]
        self._is_new = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes gradients and begins the step. The first call creates the optimizer's state, into which a joining group receives."""
        self.optim.zero_grad(set_to_none)
        if self._is_new:
            for one in getattr(self.optim, "optimizers", [self.optim]):  # torchtitan's container has no own state
                init_optim_state(one)
            self._is_new = False
        self.manager.start_quorum()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Steps the optimizer if the step is committed."""
        if closure is not None:
            raise ValueError("Optimizer.step: closure is not supported, as the gradients are reduced already")
        if self.manager.should_commit():
            self.optim.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optim"], name)  # param_groups, state, defaults, hooks

    def __repr__(self) -> str:
        return f"Optimizer({self.optim!r})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("Optimizer cannot be copied or pickled, as it has a Manager of this process")


class DistributedSampler(_DistributedSampler[Any]):
    """torch's DistributedSampler over all ranks of all groups: `group_rank` of `num_replicas` ranks of group `replica_rank` of
    `num_replica_groups`. The order is a function of (seed, epoch), set by set_epoch; all ranks together draw the whole dataset, some
    samples twice where it does not divide evenly, or with drop_last all but a remainder.

    Replica groups have fixed numbers here, and while one is missing, its share of the epoch is not trained on. Under train.py the ledger
    assigns positions instead (ft/protocol/step.py), and no sample is lost with a group.

    `group_rank` and `num_replicas` default to those of the default process group, or to one rank. `replica_group` and `rank` are older
    names of `replica_rank` and `group_rank`. Raises TypeError for missing or double arguments, ValueError for numbers out of range.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        replica_rank: int | None = None,
        num_replica_groups: int | None = None,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        replica_group: int | None = None,
        rank: int | None = None,
    ) -> None:
        group = _one_of("replica_rank", replica_rank, "replica_group", replica_group)
        place = _one_of("group_rank", group_rank, "rank", rank)
        if group is None or num_replica_groups is None:
            raise TypeError("DistributedSampler requires replica_rank and num_replica_groups")
        in_group = dist.is_available() and dist.is_initialized()
        if num_replicas is None:
            num_replicas = dist.get_world_size() if in_group else 1
        if place is None:
            place = dist.get_rank() if in_group else 0
        _check("replica_rank", group, "num_replica_groups", num_replica_groups)
        _check("group_rank", place, "num_replicas", num_replicas)
        self.global_rank, self.global_world_size = place + num_replicas * group, num_replicas * num_replica_groups
        super().__init__(dataset, self.global_world_size, self.global_rank, shuffle, seed, drop_last)


def _one_of(name: str, value: int | None, older: str, older_value: int | None) -> int | None:
    if value is not None and older_value is not None:
        raise TypeError(f"DistributedSampler: {name} and {older} are the same; give one")
    return older_value if value is None else value


def _check(name: str, value: int, of: str, many: int) -> None:
    if not 0 <= value < many:
        raise ValueError(f"{name} = {value} of {of} = {many}: must be from 0 to {many - 1}")
