"""Initial values that do not depend on the layout.

Each parameter is cut into blocks of BLOCK_ROWS rows. Block b of parameter `name` is drawn on the CPU by a generator seeded with
(seed, name, b), so a rank draws only the blocks that it holds a piece of, and one process, any sharding, any device and a seed
checkpoint agree bit for bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from models.contract import Model

BLOCK_ROWS = 128


@torch.no_grad()
def normal_(parameter: Tensor, name: str, seed: int, *, std: float, cut: float = math.inf) -> None:
    """Fills `parameter` (a tensor, or the local part of a DTensor) with N(0, std^2), truncated at `cut` standard deviations.

    `name` is the fully qualified name in the whole model. The draw is fp32; the result is cast to the parameter's dtype.
    """
    if parameter.is_meta:
        return  # nothing to fill: `draw` has given memory to another one
    local, rows, columns = _local_part(parameter)
    for first, block in _row_blocks(parameter.shape, name, seed, rows, std=std, cut=cut):
        lower, upper = max(first, rows.start), min(first + len(block), rows.stop)
        held = (slice(lower - first, upper - first), *columns)
        local[lower - rows.start : upper - rows.start].copy_(block[held])


def draw(model: Model, tensor: Tensor, seed: int) -> Tensor:
    """The values that `init_weights` gives to one parameter or buffer of a model on the meta device: it alone takes memory.

    `model` is afterwards as it was before.
    """
    real = torch.empty_like(tensor, device="cpu")
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, real)  # in place: under whatever names the model holds `tensor`, it has memory now
    try:
        model.init_weights(seed)
    finally:
        torch.utils.swap_tensors(tensor, real)
    return real.detach()


def _local_part(parameter: Tensor) -> tuple[Tensor, slice, tuple[slice, ...]]:
    """The tensor to fill, the rows of the whole parameter that it holds, and its slices along the other dims."""
    # Here and not above: it takes half as long to import as torch, and checking the settings needs none of it.
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(parameter, DTensor):
        return parameter, slice(0, parameter.shape[0]), tuple(slice(None) for _ in parameter.shape[1:])
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    held = [slice(start, start + length) for start, length in zip(offset, shape, strict=True)]
    return parameter.to_local(), held[0], tuple(held[1:])


def _row_blocks(
    shape: torch.Size, name: str, seed: int, rows: slice, *, std: float, cut: float
) -> Iterator[tuple[int, Tensor]]:
    """(first row, values) of each block that overlaps `rows`."""
    if rows.start >= rows.stop:  # more ranks than rows: nothing is held here
        return
    for index in range(rows.start // BLOCK_ROWS, (rows.stop - 1) // BLOCK_ROWS + 1):
        first = index * BLOCK_ROWS
        block = torch.empty((min(BLOCK_ROWS, shape[0] - first), *shape[1:]), device="cpu", dtype=torch.float32)
        generator = torch.Generator().manual_seed(_block_seed(seed, name, index))
        if math.isinf(cut):
            block.normal_(0.0, std, generator=generator)
        else:
            torch.nn.init.trunc_normal_(block, 0.0, std, -cut * std, cut * std, generator=generator)
        yield first, block


def _block_seed(seed: int, name: str, block: int) -> int:
    """63 bits that any (seed, name, block) maps to, the same in every process and Python."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()[:8], "big") >> 1
