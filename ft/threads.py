"""Threads that may touch a GPU. training/ takes them, too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


def device_thread(target: Callable[..., object], *args: Any, name: str, device: int | None) -> threading.Thread:
    """A daemon thread, not yet started, that calls `target` with `args` on the CUDA device of that number; None: it touches none.

    CUDA begins every thread with device 0, where pinned memory, an event or a guard would make a context: some hundred megabytes of a GPU
    that is another rank's."""

    def run() -> None:
        if device is not None:
            torch.cuda.set_device(device)
        target(*args)

    return threading.Thread(target=run, name=name, daemon=True)


def current_device() -> int | None:
    """This thread's CUDA device, where there is any."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None
