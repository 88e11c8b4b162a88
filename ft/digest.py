"""Digest of a rank's weights, by which groups compare them (protocol/compare.py): a few numbers that change with any bit.

A tensor's digest is the sum of its blocks, each times an odd number of its own, and a block's is the sum of its 64-bit integers, all modulo
2**64: the order in which a device adds makes no difference. A change of one integer always changes the digest, and several can cancel each
other only within one block. It guards against errors of memory and arithmetic, not against attacks.

healing/format.py has a digest of its own, by numpy, for bytes in host memory. This one runs where the weights are, twice as fast on a CPU.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from ft.buckets import to_local
from ft.protocol.compare import DIGEST_WORDS

BLOCK = 1 << 13  # integers: 64 KiB, so that a device sums many blocks at once


def digest(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """DIGEST_WORDS whole numbers below 2**24, never all zero, for this rank's shards of `tensors`, in this order. Waits for the device
    once."""
    with torch.no_grad():
        sums = [_sum(to_local(tensor.detach())) for tensor in tensors]
        per_tensor: list[int] = torch.stack(sums).cpu().tolist() if sums else []
    spread = hashlib.blake2b(struct.pack(f"<{len(per_tensor)}q", *per_tensor), digest_size=3 * DIGEST_WORDS).digest()
    figures = [float(int.from_bytes(spread[3 * i : 3 * i + 3], "little")) for i in range(DIGEST_WORDS)]
    return tuple(figures) if any(figures) else (1.0, *figures[1:])


def _sum(tensor: Tensor) -> Tensor:
    """[]: an int64 on the tensor's device."""
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    if octets.numel() % 8 or octets.storage_offset() % 8:
        octets = torch.nn.functional.pad(octets, (0, -octets.numel() % 8)).clone()
    integers = octets.view(torch.int64)
    end = integers.numel() // BLOCK * BLOCK  # of the full blocks
    blocks = torch.cat((integers[:end].view(-1, BLOCK).sum(1), integers[end:].sum().view(1)))
    return (blocks * torch.arange(1, 2 * blocks.numel(), 2, device=blocks.device)).sum()
