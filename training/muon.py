"""Muon (Jordan 2024, kellerjordan.github.io/posts/muon; Liu et al. 2025, arXiv 2502.16982) for sharded matrices and for experts.

The update of a matrix is its momentum with all singular values near 1, so it depends on the whole matrix: shards are gathered, each rank
orthogonalises the whole and applies its own shard of the result. The momentum itself is sharded as the parameter is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _adjust_lr


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Returns True for a matrix of a block, for a stack [E, A, B] of them, one per expert, and for the matrix of a router, which other
    implementations leave to AdamW; False for norms, embedding and head."""
    return name.startswith("layers.") and parameter.ndim in (2, 3)


def muon_step(state: Mapping[Any, Any], group: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Steps the parameters of a group that have a gradient, as torch.optim.Muon does, with the same names of settings. `dtype`: of the
    orthogonalisation and of what is gathered for it; torch's is bfloat16. Collective over the ranks that share a matrix, unless lr is 0:
    the step with which init_optim_state creates a state is each rank's own."""
    lr, momentum = group["lr"], group["momentum"]
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        tensors = (parameter, parameter.grad, state[parameter]["momentum_buffer"])
        weight, grad, buffer = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
        buffer.lerp_(grad, 1 - momentum)
        if not lr:
            continue
        update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        update = orthogonal_shard(update, parameter, steps=group["ns_steps"], dtype=dtype)
        weight.mul_(1 - lr * group["weight_decay"])
        weight.add_(update, alpha=-_adjust_lr(lr, group["adjust_lr_fn"], parameter.shape[-2:]))


def orthogonal_shard(update: Tensor, parameter: Tensor, *, steps: int, dtype: torch.dtype) -> Tensor:
    """Returns this rank's shard of the orthogonalised matrices of which `update` is the shard. Shards of whole experts stay where they
    are."""
    from torch.distributed.tensor import DTensor, Replicate  # see optimizer.py
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        return orthogonalize(update.to(dtype), steps=steps).to(update.dtype)
    mesh, kinds = parameter.device_mesh, list(parameter.placements)
    given = update.to(mesh.device_type, dtype)  # offloaded shards are on the CPU
    whole = DTensor.from_local(given, mesh, kinds, run_check=False, shape=parameter.shape, stride=parameter.stride())
    for axis, kind in enumerate(kinds):  # one by one: torch warns of several gathers in one call
        divides_experts = parameter.ndim == 3 and getattr(kind, "dim", None) == 0
        kinds[axis] = kind if divides_experts else Replicate()
        whole = whole.redistribute(placements=kinds)
    matrices = orthogonalize(whole.to_local(), steps=steps)
    _, (*_, row, column) = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
    rows, columns = update.shape[-2:]
    # an undivided axis begins at 0: torch's offset has no value in --explain, whose tensors are fake
    row, column = row * (rows < matrices.shape[-2]), column * (columns < matrices.shape[-1])
    return matrices[..., row : row + rows, column : column + columns].to(update.device, update.dtype)


def orthogonalize(matrices: Tensor, *, steps: int) -> Tensor:
    """Returns, for each matrix of [A, B] or [E, A, B], about U V' of its singular value decomposition U S V': the Newton-Schulz iteration
    of torch.optim.Muon, which has bfloat16 only and no stacks."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x if x.ndim == 3 else x.unsqueeze(0)
    x = x / x.flatten(1).norm(dim=1).clamp(min=EPS)[:, None, None]  # the largest singular value is then at most 1
    for _ in range(steps):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=DEFAULT_B, alpha=DEFAULT_C)
        x = torch.baddbmm(x, gram, x, beta=DEFAULT_A)
    x = x if matrices.ndim == 3 else x.squeeze(0)
    return x.mT if is_tall else x
