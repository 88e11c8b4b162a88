"""Context parallelism: every rank holds a part of each sequence."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.contract import Model
from parallelisms.mesh import ParallelismConfig


def whole_sequences(tokens: Tensor) -> Tensor:
    """The cut of a layout without context parallelism."""
    return tokens


def apply_context_parallel(
    part: Model, mesh: DeviceMesh, config: ParallelismConfig, *, seq_len: int
) -> Callable[[Tensor], Tensor]:
    """Makes the part compute on this rank's tokens; returns the cut that takes tokens [B, T] to them [B, T / cp]."""
    raise NotImplementedError
