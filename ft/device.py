"""Streams of devices, and threads that use a device. NCCL, and memory and events that processes share, are in process_groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

HAVE_STREAMS = {"cuda"}  # device types


def streams_of(device: torch.device) -> Any:
    """Returns the torch module with the streams and events of a device, such as torch.cuda; None for a device without streams (the CPU).
    Data that is written on one stream may be read on a different one only after an event."""
    return torch.get_device_module(device) if device.type in HAVE_STREAMS else None


def device_thread(target: Callable[..., object], *args: Any, name: str, device: int | None) -> threading.Thread:
    """Returns a daemon thread, not started, that calls `target` with `args` on the CUDA device of that index; None: without a device.

    CUDA begins every thread on device 0, where pinned memory, an event or a guard would create a context, in a different rank's memory."""

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        target(*args)

    return threading.Thread(target=run, name=name, daemon=True)


def future_devices(value: object) -> list[int | str | torch.device]:
    """Returns the devices of a future that may have `value`, or tensors on this thread's current device, so that waiting for it waits on a
    stream; empty without CUDA. No others: a callback takes a stream of each, which creates a context there, in other ranks' memory."""
    if not torch.cuda.is_initialized():
        return []
    found = [leaf.device for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.is_cuda]
    return [*dict.fromkeys([torch.device("cuda", torch.cuda.current_device()), *found])]


def current_device() -> int | None:
    """Returns the index of this thread's current CUDA device; None without CUDA."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None
