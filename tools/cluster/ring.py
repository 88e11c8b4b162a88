"""All-reduce out of isend and irecv alone: in a ring, in chunks, so that every link carries 2 (n-1)/n of the tensor.

Two rounds of n-1 hops (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"): in the first each chunk
collects all ranks' numbers on its way round, in the second the finished chunks go round once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
}


def ring_all_reduce(
    tensor: Tensor, op: str, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None = None
) -> None:
    """In place; `tensor` is one-dimensional and may have fewer elements than there are ranks. All `ranks` call it."""
    size, place = len(ranks), ranks.index(rank)
    right, left = ranks[(place + 1) % size], ranks[(place - 1) % size]
    chunks = tensor.tensor_split(size)

    def hop(sent: int, received: int) -> Tensor:
        got = torch.empty_like(chunks[received % size])
        both = [
            dist.P2POp(dist.irecv, got, left, group),
            dist.P2POp(dist.isend, chunks[sent % size].contiguous(), right, group),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        return got

    for step in range(size - 1):
        got = hop(place - step, place - step - 1)
        mine = chunks[(place - step - 1) % size]
        mine.copy_(COMBINE[op](mine, got))
    for step in range(size - 1):
        chunks[(place - step) % size].copy_(hop(place - step + 1, place - step))
