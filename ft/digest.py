"""Digest of a rank's weights and buffers, by which groups compare them (protocol/compare.py): a few numbers that change with any bit.

A block's digest is the sum of its 64-bit integers; a tensor's is the sum of its blocks' digests, each multiplied by a different odd number;
all modulo 2**64, so the order in which a device adds makes no difference. A change of one integer always changes the tensor's digest;
several changes may cancel. It guards against errors of memory and arithmetic, not against attacks.

healing/format.py has a digest of its own, by numpy, for bytes in host memory. This one runs where the weights are, twice as fast on a CPU.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ft.buckets import to_local
from ft.protocol.compare import DIGEST_WORDS

BLOCK = 1 << 13  # integers (64 KiB), so that a device sums many blocks at once


def compared(parts: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the parameters and persistent buffers of modules, or the `parameters()` of others: what all groups must have equal. To be
    called for each digest, since a forward may put another tensor in the place of a buffer."""
    for part in parts:
        yield from part.parameters()
        yield from persistent_buffers(part)


def persistent_buffers(part: Any) -> Iterator[Tensor]:
    """Yields the persistent buffers of a module; none of another part."""
    for module in part.modules() if isinstance(part, nn.Module) else ():
        names = module._buffers.keys() - module._non_persistent_buffers_set
        yield from (module._buffers[name] for name in sorted(names) if module._buffers[name] is not None)  # type: ignore[misc]


def digest(tensors: Iterable[Tensor]) -> tuple[float, ...]:
    """Returns DIGEST_WORDS integers below 2**24, never all zero, for this rank's shards of `tensors`. Synchronises with the device once."""
    with torch.no_grad():
        sums = [_sum(to_local(tensor.detach())) for tensor in tensors]
        # with CPU offload the buffers lie on another device than the parameters
        per_tensor: list[int] = torch.stack([each.to(sums[0].device) for each in sums]).cpu().tolist() if sums else []
    spread = hashlib.blake2b(struct.pack(f"<{len(per_tensor)}q", *per_tensor), digest_size=3 * DIGEST_WORDS).digest()
    words = [float(int.from_bytes(spread[3 * i : 3 * i + 3], "little")) for i in range(DIGEST_WORDS)]
    return tuple(words) if any(words) else (1.0, *words[1:])


def _sum(tensor: Tensor) -> Tensor:
    """Returns the tensor's digest: an int64 of shape [] on its device."""
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    if octets.numel() % 8 or octets.storage_offset() % 8:
        octets = torch.nn.functional.pad(octets, (0, -octets.numel() % 8)).clone()
    integers = octets.view(torch.int64)
    end = integers.numel() // BLOCK * BLOCK  # end of the last full block
    blocks = torch.cat((integers[:end].view(-1, BLOCK).sum(1), integers[end:].sum().view(1)))
    return (blocks * torch.arange(1, 2 * blocks.numel(), 2, device=blocks.device)).sum()
