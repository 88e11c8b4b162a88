"""Fault injection in a trainer, for bench/ and tests: a bit flip in a weight, which only a comparison of weights detects, and a hang of the
main thread while the other threads and the replica group's server continue.

Requires PHAROS_DRILL=1 in the rank's environment. For a fault in group <id>, write the number of one of its ranks ("0") into
<run>/groups/<id>/corrupt (or hang) atomically, by a rename. That rank injects the fault after the current step and removes the file."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from training.log import Log

CORRUPT, HANG = "corrupt", "hang"  # file names


class FaultInjector:
    """Injects faults in one rank. `folder`: the replica group's; `global_rank`: the rank within the group."""

    def __init__(self, folder: Path, global_rank: int, weights: Iterable[Tensor], *, enabled: bool, log: Log) -> None:
        self._folder, self._rank, self._weights = folder, str(global_rank), weights
        self._enabled, self._log = enabled, log

    def step(self, step: int) -> None:
        """Injects requested faults; called after `step`, on every rank."""
        if not self._enabled:
            return
        if self._is_requested(CORRUPT):
            shards = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in self._weights)
            flip_bit(next(shard for shard in shards if shard.numel()))
            self._log.warning("drill: after step %d a bit of this rank's first weight was flipped", step)
            (self._folder / CORRUPT).unlink()
        if self._is_requested(HANG):
            self._log.warning("drill: after step %d the main thread of this rank sleeps for ever", step)
            (self._folder / HANG).unlink()
            while True:
                time.sleep(3600)

    def _is_requested(self, fault: str) -> bool:
        with suppress(FileNotFoundError):
            return (self._folder / fault).read_text(encoding="ascii").strip() == self._rank
        return False


def flip_bit(shard: Tensor) -> None:
    """Flips a bit in the middle of the mantissa of the element of largest magnitude: invisible in the loss, and not rounded away later."""
    with torch.no_grad():
        flat = shard.detach().view(-1)
        index = int(flat.abs().argmax())
        element = flat[index : index + 1].clone().view(torch.uint8)
        element[max(0, shard.dtype.itemsize - 3)] ^= 16  # little-endian: bit 12 of 23 in float32, 4 of 7 in bfloat16
        flat[index : index + 1] = element.view(shard.dtype)
