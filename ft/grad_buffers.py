"""Memory for sums: sets for the gradients of one attempt, and single buffers for tensors that a user hands over.

Sets are touched when they are made, so that no step waits for page faults, and taken in turns: a step's sums are in `.grad` while the next
one is summed into the other set. The thread that ends a process group may return memory, too.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ft.buckets import BucketLayout, Kind
from ft.process_groups import shared as shared_memory

READY = 2  # sets that are kept; more exist while an abandoned group or sums of a held step have one


class GradBuffers:
    """One set. `buckets`: each bucket's memory, the last one's with the whole tail. `sums`, by a gradient's index: its sum; `gradients`:
    the same memory as its `.grad` (a DTensor, if the parameter is one). Neither has those that are reduced in place."""

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
    """Single buffers by size. Those that a whole step does not take are freed. Thread-safe."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._lock = threading.Lock()
        self._given: dict[tuple[int, Kind], list[Tensor]] = {}
        self._before: dict[tuple[int, Kind], list[Tensor]] = {}

    def take(self, like: Tensor) -> Tensor:
        """A contiguous, uninitialised tensor of its shape, dtype and device."""
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
    """Zeroed memory. `shared`: a child process may map it."""
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
    """Returns `local`, as a DTensor if the parameter is one."""
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
