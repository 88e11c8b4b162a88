"""Tensors that a child process sees without a copy.

The child maps the same memory. A tensor that lies in shared memory already (`empty`, or torch's own `share_memory_`) is used where it is.
Any other is copied into a buffer of shared memory before the operation if it is read, and back afterwards if it is written; these buffers
are kept for the next time. On a GPU it is torch's own CUDA IPC.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing import reductions

LEAST_BYTES = 4096
_map: Any = UntypedStorage  # its stubs miss what torch.multiprocessing calls
Announce = Callable[
    [int, int, int], None
]  # number, bytes, descriptor: the child is to map that memory under that number


@dataclass(frozen=True)
class Place:
    """Where in shared memory a tensor lies: segment and strides; offset in elements."""

    segment: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class DevicePlace:
    """What torch needs to map a CUDA tensor of another process."""

    rebuild: Any
    arguments: tuple[Any, ...]


def empty(shape: tuple[int, ...] | int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor in memory that a child can map: not of /dev/shm, which containers keep small, where the system has another way."""
    shape = (shape,) if isinstance(shape, int) else shape
    return torch.empty(0, dtype=dtype).set_(
        _memory(math.prod(shape) * dtype.itemsize), 0, torch.Size(shape), _strides(shape)
    )


@dataclass
class Loan:
    """What one operation has taken until it ends: buffers, what is to be copied back, and what must not go meanwhile."""

    buffers: list[UntypedStorage] = field(default_factory=list)
    back: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)


class Lender:
    """The parent's side, for one child."""

    def __init__(self, announce: Announce, forget: Callable[[list[int]], None]) -> None:
        self._announce, self._forget = announce, forget
        self._lock = threading.Lock()
        self._known: dict[int, tuple[reductions.StorageWeakRef, int]] = {}  # by address
        self._free: dict[int, list[UntypedStorage]] = {}  # buffers by size
        self._count = 0

    def lend(self, tensor: Tensor, read: bool, written: bool, loan: Loan) -> Place | DevicePlace:
        """Where the child finds it. Copies it first if it must; `loan` remembers what that takes."""
        if tensor.is_cuda:
            return DevicePlace(*reductions.reduce_tensor(tensor.detach())[:2])
        if tensor.is_shared() and tensor.numel():
            number = self._number(tensor.untyped_storage())
            return Place(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        buffer = self._buffer(tensor.numel() * tensor.element_size())
        loan.buffers.append(buffer)
        copy = torch.empty(0, dtype=tensor.dtype).set_(buffer, 0, tensor.shape, _strides(tensor.shape))
        if read:
            copy.copy_(tensor.detach())
        if written:
            loan.back.append((tensor.detach(), copy))
        return Place(self._number(buffer), copy.dtype, tuple(copy.shape), copy.stride(), 0)

    def give_back(self, loan: Loan, *, complete: bool) -> None:
        """After the operation: copies the results, and keeps the buffers for the next one; not of one that failed, which torch may still
        be writing to."""
        if not complete:
            return
        for tensor, copy in loan.back:
            tensor.copy_(copy)
        with self._lock:
            for buffer in loan.buffers:
                self._free.setdefault(buffer.nbytes(), []).append(buffer)

    def close(self) -> None:
        """Gives up the buffers; the child is gone."""
        with self._lock:
            self._free.clear()
            self._known.clear()

    def _buffer(self, count: int) -> UntypedStorage:
        size = (
            max(LEAST_BYTES, 1 << max(0, count - 1).bit_length()) if count < 1 << 20 else -(-count // (1 << 20)) << 20
        )
        with self._lock:
            free = self._free.get(size)
            return free.pop() if free else _memory(size)

    def _number(self, storage: UntypedStorage) -> int:
        with self._lock:
            gone = [address for address, (alive, _) in self._known.items() if alive.expired()]
            old = [self._known.pop(address)[1] for address in gone]
            known = self._known.get(storage.data_ptr())
            if known is None:
                self._count += 1
                known = self._known[storage.data_ptr()] = (reductions.StorageWeakRef(storage), self._count)
                descriptor, size = storage._share_fd_cpu_()  # the storage's own: not ours to close
                self._announce(self._count, size, descriptor)
            if old:
                self._forget(old)
            return known[1]


class Borrower:
    """The child's side."""

    def __init__(self) -> None:
        self._segments: dict[int, UntypedStorage] = {}

    def add(self, number: int, size: int, descriptor: int) -> None:
        """Maps the memory, and closes the descriptor."""
        try:
            self._segments[number] = _map._new_shared_fd_cpu(descriptor, size)
        finally:
            os.close(descriptor)

    def drop(self, numbers: list[int]) -> None:
        for number in numbers:
            del self._segments[number]

    def tensor(self, place: Place | DevicePlace) -> Tensor:
        if isinstance(place, DevicePlace):
            return place.rebuild(*place.arguments)
        made = torch.empty(0, dtype=place.dtype)
        return made.set_(self._segments[place.segment], place.offset, place.shape, place.strides)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def _memory(count: int) -> UntypedStorage:
    count = max(count, LEAST_BYTES)
    if not hasattr(os, "memfd_create"):
        return _map._new_using_fd_cpu(count)
    descriptor = os.memfd_create("ft-tensor")
    try:
        os.ftruncate(descriptor, count)
        return _map._new_shared_fd_cpu(descriptor, count)
    finally:
        os.close(descriptor)
