"""The gradient norm over every shard, and the one multiplication that divides and clips."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """L2 norm of the whole gradient, fp32, the same on every rank; a scalar on the ranks' device (no host sync).

    Every rank adds the squares of its own shards, but of a piece that several ranks hold only the first adds it: so one sum over
    all ranks counts everything once, whatever the axes, pipeline stages included.
    """
    parameters = [p for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(local_gradients(parameters), 2, dtype=torch.float32)
    once, device = [], "cpu"  # the kind of device whose backend serves the ranks
    for norm, parameter in zip(norms, parameters, strict=True):
        assert isinstance(parameter, DTensor), "parallelize() makes every parameter a DTensor"
        mesh, device = parameter.device_mesh, parameter.device_mesh.device_type
        place = mesh.get_coordinate()
        assert place is not None
        # No rank before this one holds the same piece: it is first on every axis that replicates the parameter.
        if all(here == 0 for here, kind in zip(place, parameter.placements, strict=True) if kind.is_replicate()):
            once.append(norm)
    square = torch.stack(once).square().sum() if once else torch.zeros(())
    square = square.to(device)  # offloaded shards lie elsewhere than where ranks meet
    if dist.get_world_size() > 1:
        dist.all_reduce(square)
    return square.sqrt()


def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiplies every gradient by `factor`, in place."""
    torch._foreach_mul_(local_gradients(parameters), factor)


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """This rank's shards of the gradients that exist."""
    return [g.to_local() if isinstance(g := p.grad, DTensor) else g for p in parameters if p.grad is not None]
