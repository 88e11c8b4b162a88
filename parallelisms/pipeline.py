"""Pipeline parallelism: the layers one rank after the other, microbatches on their way through them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from models.contract import Model
from parallelisms.mesh import ParallelismConfig


def split(model: Model, mesh: DeviceMesh, config: ParallelismConfig) -> list[Model]:
    """This rank's stages, in the order of the layers."""
    raise NotImplementedError


class Pipeline:
    """The face of a parallelized model over a pipeline schedule."""

    def __init__(
        self,
        parts: list[Model],
        mesh: DeviceMesh,
        config: ParallelismConfig,
        cut: Callable[[Tensor], Tensor],
        *,
        counts: bool,
        local_batch_size: int,
        hidden_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`hidden_tokens`: of the hidden state [B, T, C] that travels between stages, whose dtype is `dtype`."""
        self.parts = parts
        raise NotImplementedError

    def forward_backward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError

    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        raise NotImplementedError
