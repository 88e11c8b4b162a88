"""The gradient norm over every shard, and the one multiplication that divides and clips."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of the whole gradient, fp32, the same on every rank; a scalar on the parameters' device (no host sync)."""
    grads = local_gradients(parameters)
    norms = torch._foreach_norm(grads, 2, dtype=torch.float32)
    square = torch.stack(norms).square().sum()
    if dist.get_world_size() > 1:
        dist.all_reduce(square)  # every rank holds other rows of every parameter
    return square.sqrt()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiplies every gradient by `factor`, in place."""
    torch._foreach_mul_(local_gradients(parameters), factor)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shards of the gradients that exist."""
    return [g.to_local() if isinstance(g := p.grad, DTensor) else g for p in parameters if p.grad is not None]
