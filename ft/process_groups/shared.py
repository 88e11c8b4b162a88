"""Tensors in memory that a child process maps.

A tensor that is in shared memory already (`empty`, or torch's `share_memory_`) is used without a copy. Any other tensor on the CPU is
copied into a buffer of shared memory before the operation if it is read, and back afterwards if it is written; these buffers are kept for
reuse. A tensor on a GPU is used without a copy: its storage is exported by torch's CUDA IPC, once for each child, which keeps it mapped. An
export increments a reference count; a child that is killed does not decrement it, so this process does.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing import reductions

from ft.process_groups.errors import ProcessGroupError

MIN_BYTES = 4096
_storage: Any = UntypedStorage  # whose stubs lack the methods that torch.multiprocessing calls
_settings_lock = threading.Lock()
# Result of UntypedStorage._share_cuda_, argument of _new_shared_cuda: device, handle, bytes, offset in bytes, file of the reference counter
# and offset in it, event, whether to wait for the event.
Export = tuple[Any, ...]
_COUNTER = slice(4, 6)
_PLAIN = b"c"  # the second byte of a handle, after its version: ShareableHandleType of CUDACachingAllocator.cpp; "e": expandable


@dataclass(frozen=True)
class SharedTensor:
    """A tensor in shared memory. `segment`: number of the mapped storage, 0 if there are no elements; `strides`, `offset`: in elements."""

    segment: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    device: torch.device


def empty(
    shape: tuple[int, ...] | int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns a tensor that a child can map: on a GPU outside of expandable segments, else outside of /dev/shm, which is often small."""
    shape = (shape,) if isinstance(shape, int) else shape
    if torch.device(device).type == "cuda":
        with plain_segments():
            return torch.empty(shape, dtype=dtype, device=device)
    return _contiguous(_memory(math.prod(shape) * dtype.itemsize), dtype, shape)


@contextmanager
def plain_segments() -> Iterator[None]:
    """Makes allocations on a GPU avoid expandable segments: to map one, a child needs the right to trace this process (pidfd_getfd) and a
    descriptor for each 20 MB. The settings also affect tensors of other threads meanwhile, which is harmless. torch's allocator then reuses
    no free block of such a segment (get_free_block of CUDACachingAllocator.cpp), but a MemPool does."""
    with _settings_lock:
        # torch 2.11 cannot tell the current settings: there those of the environment count
        settings_of = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
        at_start = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        settings = str(settings_of()) if settings_of is not None else at_start
        parts = settings.split(",")
        if not any(part.replace(" ", "") == "expandable_segments:True" for part in parts):
            yield
            return
        rest = [part for part in parts if not part.strip().startswith("expandable_segments")]
        torch.cuda.memory._set_allocator_settings(",".join([*rest, "expandable_segments:False"]))
        try:
            yield
        finally:
            torch.cuda.memory._set_allocator_settings(settings)


@dataclass
class Borrowed:
    """Resources of an operation until it ends: buffers, (tensor, copy) pairs to be copied back, and references that keep memory alive."""

    buffers: list[UntypedStorage] = field(default_factory=list)
    back: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


class SharedPoolOwner:
    """The parent's end, for one child. `send`: sends it a command (the name of a method of SharedPoolClient or ChildGroup), its arguments
    and descriptors. `release`: decrements the reference count of an export."""

    def __init__(self, send: Callable[..., None], release: Callable[..., None] = _storage._release_ipc_counter) -> None:
        self._send, self._release = send, release
        self._lock = threading.Lock()
        self._known: dict[int, tuple[reductions.StorageWeakRef, int]] = {}  # storage and segment number, by address
        self._exports: dict[int, Export] = {}  # by segment number, until the child confirms the unmapping
        self._free: dict[int, list[UntypedStorage]] = {}  # buffers by size
        self._count = 0
        self._closed = False

    def lend(self, tensor: Tensor, read: bool, written: bool, borrowed: Borrowed) -> SharedTensor:
        """Returns the tensor's place in shared memory, after a copy if needed; adds resources to `borrowed`. Raises ProcessGroupError."""
        shape = tuple(tensor.shape)
        if tensor.is_cuda or (tensor.is_shared() and tensor.numel()):
            number = self._number(tensor.untyped_storage()) if tensor.numel() else 0
            offset = int(tensor.storage_offset())
            return SharedTensor(number, tensor.dtype, shape, tensor.stride(), offset, tensor.device)
        # rounded up to a power of two or whole MiB, as buffers are kept by size
        count = tensor.numel() * tensor.element_size()
        size = -(-count // (1 << 20)) << 20 if count >= 1 << 20 else max(MIN_BYTES, 1 << (count - 1).bit_length())
        with self._lock:
            free = self._free.get(size)
            buffer = free.pop() if free else _memory(size)
        borrowed.buffers.append(buffer)
        copy = _contiguous(buffer, tensor.dtype, shape)
        if read:
            copy.copy_(tensor.detach())
        if written:
            borrowed.back.append((tensor.detach(), copy))
        return SharedTensor(self._number(buffer), copy.dtype, shape, copy.stride(), 0, copy.device)

    def give_back(self, borrowed: Borrowed, *, complete: bool) -> None:
        """Copies an operation's results back, and keeps its buffers for reuse; neither if it failed, as torch may still write to them."""
        if not complete:
            return
        for tensor, copy in borrowed.back:
            tensor.copy_(copy)
        with self._lock:
            for buffer in borrowed.buffers:
                self._free.setdefault(buffer.nbytes(), []).append(buffer)

    def dropped(self, numbers: Sequence[int]) -> None:
        """Forgets segments that the child has unmapped; it has decremented their counts itself."""
        with self._lock:
            for number in numbers:
                self._exports.pop(number, None)

    def close(self) -> None:
        """Drops the buffers, and decrements the counts of all exports. To be called when the child has ended."""
        with self._lock:
            self._closed = True
            exports, self._exports = list(self._exports.values()), {}
            self._free.clear()
            self._known.clear()
        for export in exports:
            self._release(*export[_COUNTER], device=export[0])

    def _number(self, storage: UntypedStorage) -> int:
        with self._lock:
            gone = [address for address, (alive, _) in self._known.items() if alive.expired()]
            old = [self._known.pop(address)[1] for address in gone]
            known = self._known.get(storage.data_ptr())
            number = self._introduce(storage) if known is None else known[1]
            if old:
                self._send("unmap", (old,))
            return number

    def _introduce(self, storage: UntypedStorage) -> int:
        if self._closed:
            raise ProcessGroupError("the child process is gone")
        self._count += 1
        if storage.is_cuda:
            export = self._exports[self._count] = storage._share_cuda_()
            if export[1][1:2] != _PLAIN:
                raise ProcessGroupError(
                    "a tensor for a child process lies in an expandable segment: allocate it by ProcessGroupBaby.empty, or disable these "
                    "(PYTORCH_ALLOC_CONF=expandable_segments:False)"
                )
            self._send("map_device", (self._count, export))
        else:
            descriptor, size = storage._share_fd_cpu_()  # a descriptor of the storage, which closes it
            self._send("map", (self._count, size), [descriptor])
        self._known[storage.data_ptr()] = reductions.StorageWeakRef(storage), self._count
        return self._count


class SharedPoolClient:
    """The child's end."""

    def __init__(self) -> None:
        self._segments: dict[int, UntypedStorage] = {}

    def map(self, number: int, size: int, descriptor: int) -> None:
        """Maps the memory, and closes the descriptor."""
        try:
            self._segments[number] = _storage._new_shared_fd_cpu(descriptor, size)
        finally:
            os.close(descriptor)

    def map_device(self, number: int, export: Export) -> None:
        torch.cuda._lazy_init()
        self._segments[number] = _storage._new_shared_cuda(*export)

    def unmap(self, numbers: list[int]) -> None:
        for number in numbers:
            del self._segments[number]

    def tensor(self, place: SharedTensor) -> Tensor:
        made = torch.empty(0, dtype=place.dtype, device=place.device)
        if not place.segment:
            return made.view(place.shape)
        return made.set_(self._segments[place.segment], place.offset, place.shape, place.strides)


def _contiguous(memory: UntypedStorage, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(0, dtype=dtype).set_(memory, 0, shape, torch.empty(shape, device="meta").stride())


def _memory(count: int) -> UntypedStorage:
    count = max(count, MIN_BYTES)
    if not hasattr(os, "memfd_create"):  # macOS
        return _storage._new_using_fd_cpu(count)
    descriptor = os.memfd_create("ft-tensor")
    try:
        os.ftruncate(descriptor, count)
        return _storage._new_shared_fd_cpu(descriptor, count)
    finally:
        os.close(descriptor)
