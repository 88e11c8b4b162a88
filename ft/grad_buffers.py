"""Memory for sums: a set holds all sums of one attempt and is taken whole; single buffers serve tensors that a user hands over.

Sets are touched when they are made, so no step waits for the kernel to find pages, and taken in turns: what a step delivered lies in
`.grad` while the next one is summed into the other set. Whoever gives memory back may be a thread that ends a process group.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ft.buckets import BucketLayout, Kind
from ft.process_groups import shared as shared_memory

READY = 2  # sets that are kept; more while one is still with an abandoned group, or holds sums of a step to come


class GradBuffers:
    """One set. `buckets`: each bucket's memory, the last one's with room for the whole tail. `sums` and `gradients`, by number: where its
    sum goes, and the same memory as its `.grad` (a DTensor around it if the parameter is one); none for those that are reduced in place."""

    def __init__(self, layout: BucketLayout, parameters: Sequence[nn.Parameter], *, shared: bool) -> None:
        flat = {kind: zeros(size, *kind, shared=shared) for kind, size in layout.sizes.items()}
        *most, last = layout.buckets
        self.buckets = [flat[bucket.kind][bucket.start : bucket.stop] for bucket in most]
        self.buckets.append(flat[last.kind][last.start :])
        self.addresses = {memory.untyped_storage().data_ptr() for memory in flat.values()} - {0}
        self.sums: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        for index, start in layout.starts.items():
            local = local_of(parameters[index].detach())
            self.sums[index] = flat[local.dtype, local.device][start : start + local.numel()].view(local.shape)
            self.gradients[index] = like(parameters[index], self.sums[index])


class Buffers:
    """Single buffers by size. What a whole step does not ask for is freed. Thread-safe."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._lock = threading.Lock()
        self._given: dict[tuple[int, Kind], list[Tensor]] = {}
        self._before: dict[tuple[int, Kind], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """A contiguous tensor of its shape, dtype and device; its values are anybody's."""
        key = (like.numel(), (like.dtype, like.device))
        with self._lock:
            for free in (self._before, self._given):
                if buffers := free.get(key):
                    return buffers.pop().view(like.shape)
        return zeros(like.numel(), like.dtype, like.device, shared=self._shared).view(like.shape)

    def give(self, buffer: Tensor) -> None:
        with self._lock:
            self._given.setdefault((buffer.numel(), (buffer.dtype, buffer.device)), []).append(buffer.view(-1))

    def step_done(self) -> None:
        with self._lock:
            self._before, self._given = self._given, {}


def zeros(count: int, dtype: torch.dtype, device: torch.device, *, shared: bool) -> Tensor:
    """Memory that has been touched. `shared`: a child process may map it."""
    if shared:
        return shared_memory.empty(count, dtype, device).zero_()
    return torch.zeros(count, dtype=dtype, device=device)


def local_of(tensor: Tensor) -> Tensor:
    """Returns this rank's shard."""
    if hasattr(tensor, "to_local"):  # a DTensor; its module costs a second to import
        with torch.no_grad():
            local: Tensor = tensor.to_local()
            return local
    return tensor


def like(parameter: Any, local: Tensor) -> Tensor:
    """`local` as what the parameter is: itself, or a DTensor around it."""
    if not hasattr(parameter, "placements"):
        return local
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        return DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=shared_memory.strides(parameter.shape),
        )
