"""Faults inside a trainer, for bench/ and tests: one bit of one weight flips in memory, which only a comparison of weights finds; and the
main thread sleeps for ever, while all other threads, and the group's server, go on.

They need PHAROS_DRILL=1 in a rank's environment. Then, to flip a bit in group <id>, write the number of one of its ranks ("0") into
<run>/groups/<id>/corrupt in one instant (write another file, rename it). That rank flips the bit after the current step and removes the
file. The same with the file "hang"."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.log import Log

CORRUPT, HANG = "corrupt", "hang"  # the files


class FaultInjector:
    """The faults of one rank. `folder`: its group's; `group_rank`: its number there."""

    def __init__(self, folder: Path, group_rank: int, weights: Iterable[Tensor], *, enabled: bool, log: Log) -> None:
        self._folder, self._rank, self._weights = folder, str(group_rank), weights
        self._enabled, self._log = enabled, log

    def step(self, step: int) -> None:
        """At the boundary after `step`, on every rank."""
        if not self._enabled:
            return
        if self._is_ordered(CORRUPT):
            shards = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in self._weights)
            flip_bit(next(shard for shard in shards if shard.numel()))
            self._log.warning("drill: after step %d a bit of this rank's first weight was flipped", step)
            (self._folder / CORRUPT).unlink()
        if self._is_ordered(HANG):
            self._log.warning("drill: after step %d the main thread of this rank sleeps for ever", step)
            (self._folder / HANG).unlink()
            while True:
                time.sleep(3600)

    def _is_ordered(self, order: str) -> bool:
        with suppress(FileNotFoundError):
            return (self._folder / order).read_text(encoding="ascii").strip() == self._rank
        return False


def flip_bit(shard: Tensor) -> None:
    """Flips a bit in the middle of the mantissa of the element of largest magnitude: not seen in a loss, nor rounded away later."""
    with torch.no_grad():
        flat = shard.detach().view(-1)
        where = int(flat.abs().argmax())
        element = flat[where : where + 1].clone().view(torch.uint8)
        element[max(0, shard.dtype.itemsize - 3)] ^= 16  # little-endian: bit 12 of 23 in float32, 4 of 7 in bfloat16
        flat[where : where + 1] = element.view(shard.dtype)
