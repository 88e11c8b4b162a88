"""Initial values that do not depend on the parallel layout.

Each parameter is divided into blocks of BLOCK_ROWS rows, or of one slice where it has three dims. Block b of parameter `name` is drawn on
the CPU by a generator seeded with (seed, name, b): a rank draws only its blocks, and the values are bit-identical for any sharding and
device."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.contract import Model

BLOCK_ROWS = 128


class NoInit(TorchFunctionMode):
    """Leaves out torch.nn.init, for `with torch.device("meta"), NoInit():`. Modules call it when they are built; on the meta device it
    computes nothing, but takes milliseconds for each, and imports the compiler, a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def normal_(parameter: Tensor, name: str, seed: int, *, std: float, truncation: float = math.inf) -> None:
    """Fills `parameter`, or this rank's shard, with N(0, std^2), drawn in fp32, truncated at `truncation` * std. `name`: in the model."""
    if parameter.is_meta:
        return  # `draw` initialises one parameter of a meta model
    # Imported here, since it takes half as long as importing torch, and checking a configuration does not need it.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, shape, offset = parameter, tuple(parameter.shape), (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        local, sharding = parameter.to_local(), (parameter.shape, parameter.device_mesh, parameter.placements)
        shape, offset = compute_local_shape_and_global_offset(*sharding)
    start, stop = offset[0], offset[0] + shape[0]  # rows of the whole parameter in this shard
    columns = [slice(begin, begin + length) for begin, length in zip(offset[1:], shape[1:], strict=True)]
    block_rows = BLOCK_ROWS if parameter.ndim < 3 else 1
    for index in range(start // block_rows, -(-stop // block_rows) if start < stop else 0):
        first = index * block_rows
        rows = min(block_rows, parameter.shape[0] - first)
        block = torch.empty((rows, *parameter.shape[1:]), device="cpu", dtype=torch.float32)
        # a 63-bit hash of (seed, name, block), the same in every process
        digest = hashlib.sha256(f"{seed}/{name}/{index}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        if math.isinf(truncation):
            block.normal_(0.0, std, generator=generator)
        else:
            torch.nn.init.trunc_normal_(block, 0.0, std, -truncation * std, truncation * std, generator=generator)
        lower, upper = max(first, start), min(first + rows, stop)
        held = (slice(lower - first, upper - first), *columns)
        local[lower - start : upper - start].copy_(block[held])


@torch.no_grad()
def draw(model: Model, tensor: Tensor, seed: int) -> Tensor:
    """Returns the initial values of one parameter or buffer of a model on the meta device; the model does not change."""
    real = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, real)  # in place: every reference of the model to `tensor` now has memory
    try:
        model.init_weights(seed)
    finally:
        torch.utils.swap_tensors(tensor, real)
    return real.detach()
