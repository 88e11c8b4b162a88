"""Digest of a rank's weights, by which groups compare them: a few numbers that change with any bit.

Flow: manager.py asks for it where the machine wants it in a tail; compare.py draws the conclusion. Every 64-bit word counts in
the sum of its block, every block's sum in the tensor's, times an odd number that tells where it lies; all modulo 2**64, so in whatever
order a device adds, the result is the same. Any change of one word changes it, for certain, and what more changes could cancel must lie in
one block. It guards against accidents of memory and arithmetic, not against people.

Not healing's digest (healing/format.py): that is numpy's, of bytes on their way through the host. This one is torch's alone, so that it
runs where the weights are; on a CPU it reads them at twice that one's speed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from ft.grad_buffers import local_of
from ft.protocol.compare import FIGURES

BLOCK = 1 << 13  # words: 64 KiB, of which a device has many at once


def digest(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """FIGURES whole numbers below 2**24, never all zero, of what this rank holds of `tensors`, in this order. Waits for the device once."""
    with torch.no_grad():
        sums = [_sum(local_of(tensor.detach())) for tensor in tensors]
        said: list[int] = torch.stack(sums).cpu().tolist() if sums else []
    spread = hashlib.blake2b(struct.pack(f"<{len(said)}q", *said), digest_size=3 * FIGURES).digest()
    figures = [float(int.from_bytes(spread[3 * i : 3 * i + 3], "little")) for i in range(FIGURES)]
    return tuple(figures) if any(figures) else (1.0, *figures[1:])


def _sum(tensor: Tensor) -> Tensor:
    """[]: an int64 on the tensor's device."""
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    if octets.numel() % 8 or octets.storage_offset() % 8:
        octets = torch.nn.functional.pad(octets, (0, -octets.numel() % 8)).clone()
    words = octets.view(torch.int64)
    whole = words.numel() // BLOCK * BLOCK
    blocks = torch.cat((words[:whole].view(-1, BLOCK).sum(1), words[whole:].sum().view(1)))
    return (blocks * torch.arange(1, 2 * blocks.numel(), 2, device=blocks.device)).sum()
