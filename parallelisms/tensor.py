"""Tensor parallelism: the matrices of a block cut over ranks, by the plan beside the model."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from models.contract import Model


def apply_tensor_parallel(part: Model, mesh: DeviceMesh, *, loss_parallel: bool) -> None:
    raise NotImplementedError
