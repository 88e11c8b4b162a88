"""Tensors that a child process sees without a copy.

The child maps the same memory. A tensor that lies in shared memory already (`empty`, or torch's own `share_memory_`) is used where it is.
Any other is copied into a buffer of shared memory before the operation if it is read, and back afterwards if it is written; these buffers
are kept for the next time. A tensor on a GPU is used where it is: its storage is exported by torch's CUDA IPC, once for each child, which
keeps it mapped. An export is counted in the storage; a child that is killed does not give its count back, so this process does.
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
_map: Any = UntypedStorage  # its stubs miss what torch.multiprocessing calls
_settings_lock = threading.Lock()
# What UntypedStorage._share_cuda_ gives and _new_shared_cuda takes: device, handle, bytes, offset in bytes, the file of its counter and the
# place in it, event, whether to wait for the event.
Export = tuple[Any, ...]
_COUNTER = slice(4, 6)
_PLAIN = b"c"  # the second byte of a handle, after its version: ShareableHandleType of CUDACachingAllocator.cpp; "e": expandable


@dataclass(frozen=True)
class SharedTensor:
    """The place of a tensor in shared memory: segment (0: it has no elements) and strides; offset in elements."""

    segment: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    device: torch.device


def empty(
    shape: tuple[int, ...] | int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """A tensor in memory that a child can map: on a GPU, not of an expandable segment; else not of /dev/shm, which containers limit."""
    shape = (shape,) if isinstance(shape, int) else shape
    if torch.device(device).type == "cuda":
        with plain_segments():
            return torch.empty(shape, dtype=dtype, device=device)
    return _contiguous(_memory(math.prod(shape) * dtype.itemsize), dtype, shape)


@contextmanager
def plain_segments() -> Iterator[None]:
    """Keeps what is allocated on a GPU outside of expandable segments: to map one, a child must have the right to trace this process
    (pidfd_getfd), and takes a descriptor for each 20 MB. The settings are the process's, for tensors of other threads, too, which does no
    harm. torch's allocator gives out no free block of such a segment then (get_free_block of CUDACachingAllocator.cpp); a MemPool does."""
    with _settings_lock:
        # As they are in force; as they were at the start where torch does not tell (2.11).
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
class PoolLease:
    """Resources that one operation holds until it ends: buffers, tensors to be copied back, and references that keep memory alive."""

    buffers: list[UntypedStorage] = field(default_factory=list)
    back: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


class SharedPoolOwner:
    """The parent's side, for one child. `send`: sends it a command (a method of SharedPoolClient's, or baby.py's ChildGroup), its arguments
    and descriptors. `release` gives an export's count back."""

    def __init__(self, send: Callable[..., None], release: Callable[..., None] = _map._release_ipc_counter) -> None:
        self._send, self._release = send, release
        self._lock = threading.Lock()
        self._known: dict[int, tuple[reductions.StorageWeakRef, int]] = {}  # by address
        self._exports: dict[int, Export] = {}  # by number: mapped in the child, until it confirms the unmapping
        self._free: dict[int, list[UntypedStorage]] = {}  # buffers by size
        self._count = 0
        self._closed = False

    def lend(self, tensor: Tensor, read: bool, written: bool, lease: PoolLease) -> SharedTensor:
        """Returns where the child finds it. Copies it first if it must; `lease` remembers what that takes. Raises ProcessGroupError."""
        shape = tuple(tensor.shape)
        if tensor.is_cuda or (tensor.is_shared() and tensor.numel()):
            number = self._number(tensor.untyped_storage()) if tensor.numel() else 0
            offset = int(tensor.storage_offset())
            return SharedTensor(number, tensor.dtype, shape, tensor.stride(), offset, tensor.device)
        # rounded up to a power of two, or full MiB: buffers are kept by size
        count = tensor.numel() * tensor.element_size()
        size = -(-count // (1 << 20)) << 20 if count >= 1 << 20 else max(MIN_BYTES, 1 << (count - 1).bit_length())
        with self._lock:
            free = self._free.get(size)
            buffer = free.pop() if free else _memory(size)
        lease.buffers.append(buffer)
        copy = _contiguous(buffer, tensor.dtype, shape)
        if read:
            copy.copy_(tensor.detach())
        if written:
            lease.back.append((tensor.detach(), copy))
        return SharedTensor(self._number(buffer), copy.dtype, shape, copy.stride(), 0, copy.device)

    def give_back(self, lease: PoolLease, *, complete: bool) -> None:
        """After the operation: copies the results, and keeps the buffers for the next one; not of one that failed: torch may write on."""
        if not complete:
            return
        for tensor, copy in lease.back:
            tensor.copy_(copy)
        with self._lock:
            for buffer in lease.buffers:
                self._free.setdefault(buffer.nbytes(), []).append(buffer)

    def dropped(self, numbers: Sequence[int]) -> None:
        """The child has these no longer, and has given its counts back."""
        with self._lock:
            for number in numbers:
                self._exports.pop(number, None)

    def close(self) -> None:
        """Gives up the buffers, and gives back what the child has counted; the child is gone."""
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
                    "a tensor for a child process lies in an expandable segment: allocate it by ProcessGroupBaby.empty, or turn these off "
                    "(PYTORCH_ALLOC_CONF=expandable_segments:False)"
                )
            self._send("map_device", (self._count, export))
        else:
            descriptor, size = storage._share_fd_cpu_()  # the storage's own: not ours to close
            self._send("map", (self._count, size), [descriptor])
        self._known[storage.data_ptr()] = reductions.StorageWeakRef(storage), self._count
        return self._count


class SharedPoolClient:
    """The child's side."""

    def __init__(self) -> None:
        self._segments: dict[int, UntypedStorage] = {}

    def map(self, number: int, size: int, descriptor: int) -> None:
        """Maps the memory, and closes the descriptor."""
        try:
            self._segments[number] = _map._new_shared_fd_cpu(descriptor, size)
        finally:
            os.close(descriptor)

    def map_device(self, number: int, export: Export) -> None:
        torch.cuda._lazy_init()
        self._segments[number] = _map._new_shared_cuda(*export)

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
        return _map._new_using_fd_cpu(count)
    descriptor = os.memfd_create("ft-tensor")
    try:
        os.ftruncate(descriptor, count)
        return _map._new_shared_fd_cpu(descriptor, count)
    finally:
        os.close(descriptor)
