"""Helpers of the tests on GPUs: the conditions of a skip, and a kernel of a given duration."""

from __future__ import annotations

import pytest
import torch

one_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
two_devices = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices: NCCL refuses two ranks on one"
)

CYCLES_PER_S = 2_000_000_000  # about what the clock of a GPU makes; nothing here depends on how long a spin takes


def spin(seconds: float) -> torch.cuda.Event:
    """Launches a kernel on the current stream that computes nothing for about so long. Returns the event of its end."""
    torch.cuda._sleep(int(seconds * CYCLES_PER_S))
    event = torch.cuda.Event()
    event.record()
    return event


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the relative error."""
    known = want.double().cpu()
    return float((got.double().cpu() - known).norm() / known.norm())


def free_bytes() -> int:
    """Returns the free bytes of the device's memory, whichever process holds the rest."""
    return int(torch.cuda.mem_get_info()[0])
