"""torchft's DistributedDataParallel: after a backward, .grad is the mean over replica groups."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ft.compat.manager import Manager

log = logging.getLogger("pharos.torchft")


class DistributedDataParallel(nn.Module):
    """The gradients of `module` go out in buckets while the backward computes the others. It returns when all sums are there, in whatever
    generation: a group that dies on the way costs time, and no step. Outside of no_sync there is one backward in a step.

    torch's further arguments are taken, and change nothing: buckets are the Manager's, unused parameters give zeros, buffers stay each
    group's own until it heals. Raises ValueError for a module without parameters to train.
    """

    def __init__(self, manager: Manager, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            raise ValueError("DistributedDataParallel: the module has no parameter to train")
        if kwargs:
            log.warning("DistributedDataParallel(%s) change nothing: ft sums by its own buckets", ", ".join(kwargs))
        self.module = module
        self._manager = manager
        self._sums = True
        self._in_backward = False
        manager.attach([module])

    def forward(self, *inputs: Any, **more: Any) -> Any:
        outputs = self.module(*inputs, **more)
        self._in_backward = False  # one that raised has not ended
        if self._sums and torch.is_grad_enabled():
            for tensor in _tensors(outputs):
                if tensor.requires_grad:
                    tensor.register_hook(self._backward_reached)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around forward and backward of all microbatches but the last: gradients add up in this group."""
        before, self._sums = self._sums, False
        try:
            yield
        finally:
            self._sums = before

    def _backward_reached(self, gradient: Tensor) -> None:
        """Of the outputs, the first that the backward comes to."""
        if not self._in_backward:
            self._manager.backward_begins()
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        """Called by autograd when all gradients are there, before `backward` returns."""
        self._in_backward = False
        self._manager.backward_ended()


def _tensors(value: Any) -> Iterator[Tensor]:
    """Wherever they are in what a module returned."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
