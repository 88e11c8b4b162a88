"""Devices that queue their work on streams, and threads that may touch one. Memory and events that processes share, and NCCL, are in
process_groups.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

HAVE_STREAMS = {"cuda"}  # kinds of devices


def streams_of(device: torch.device) -> Any:
    """The torch module with the streams and events of a device, such as torch.cuda: what is written on one stream is read on others only
    after an event. None for a device without streams (the CPU)."""
    return torch.get_device_module(device) if device.type in HAVE_STREAMS else None


def device_thread(target: Callable[..., object], *args: Any, name: str, device: int | None) -> threading.Thread:
    """A daemon thread, not yet started, that calls `target` with `args` on the CUDA device of that number; None: it touches none.

    CUDA begins every thread with device 0, where pinned memory, an event or a guard would make a context, in another rank's memory."""

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        target(*args)

    return threading.Thread(target=run, name=name, daemon=True)


def current_device() -> int | None:
    """This thread's CUDA device, where there is any."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None
