"""Decisions by device type: the rest of the program takes them from `DEVICE_TRAITS` and `Device`.

tests/unit/test_device.py lists the files that test the type elsewhere, and why. Calls that only one type has, such as those for pinned
memory, peer access and the allocator's counters (training/metrics.py), stay where they are used. models/ops.py, which imports only torch,
distinguishes CPUs itself; ft/device.py lists the devices with streams, for ft/."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class DeviceTraits:
    """Properties of a device type; the defaults are those of a CPU."""

    backend: str = "gloo"  # of collectives
    pins_batches: bool = False  # batches are in pinned memory, from which copies are asynchronous
    min_loss_chunk: int = 0  # smallest chunk of the loss, tokens; 0: as large as the memory bound allows
    has_fp32_addmm: bool = False  # one kernel can add a product of bf16 matrices to an fp32 matrix
    has_allocator: bool = False  # torch's caching allocator, with counters and a recorded history
    queues_work: bool = False  # operations are asynchronous, so that measurements need a synchronisation
    probe: tuple[int, torch.dtype] = (256, torch.float32)  # rows and dtype of matmuls that tools/cluster measures
    largest_message: int = 1 << 20  # bytes, of its link measurements; eight ranks on a laptop need under 500 MB
    location: str = "on CPUs"  # of the ranks, as part of a sentence


DEVICE_TRAITS = {
    "cpu": DeviceTraits(),
    "cuda": DeviceTraits(
        "nccl",
        pins_batches=True,
        min_loss_chunk=4096,
        has_fp32_addmm=True,
        has_allocator=True,
        queues_work=True,
        probe=(8192, torch.bfloat16),
        largest_message=1 << 26,
        location="on one CUDA GPU each",
    ),
}


@dataclass(frozen=True)
class Device:
    """The device of this rank."""

    torch_device: torch.device

    @property
    def type(self) -> str:
        return self.torch_device.type

    @property
    def traits(self) -> DeviceTraits:
        return DEVICE_TRAITS[self.type]

    @property
    def name(self) -> str:
        """The vendor's name of the device; for a CPU the first model name that the kernel lists."""
        if self.type == "cuda":
            return torch.cuda.get_device_name(self.torch_device)
        lines = ""
        with suppress(OSError):  # only Linux has /proc
            lines = Path("/proc/cpuinfo").read_text()
        named = re.search(r"^model name[ \t]*:[ \t]*(.*?)[ \t]*$", lines, re.MULTILINE)
        return named[1] if named else "CPU"

    def fast_bfloat16(self, capability: tuple[int, int] | None = None) -> bool:
        """Returns True if bf16 matmuls are faster than fp32: on CPUs with AMX or AVX512-BF16; on CUDA from Ampere on, or without
        a GPU, where the capability is (0, 0)."""
        if self.type == "cuda":
            capability = capability or cuda_capability(self.torch_device)
            return capability == (0, 0) or capability >= (8, 0)
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()

    def peak_rss_gib(self) -> float:
        """Returns the peak resident set of the process."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # macOS counts bytes, Linux KiB


def local_device_type() -> str:
    """Returns the type of the device that `pick_device` would choose, "cuda" or "cpu", without initialising it."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def cuda_capability(device: torch.device | int = 0) -> tuple[int, int]:
    """Returns the compute capability of a CUDA device, by default the first one; (0, 0): there is none."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def pick_device(local_rank: int, *, keep_memory: bool = True) -> Device:
    """Returns CUDA device `local_rank`, or the CPU if there is no CUDA; then, with `keep_memory`, calls keep_freed_memory()."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return Device(device)
    if keep_memory:
        keep_freed_memory()
    return Device(torch.device("cpu"))


# From malloc.h of the GNU C library; the values are part of its binary interface.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BYTES = 1 << 30
_LARGEST_THRESHOLD_BEFORE_2_35 = 32 << 20


def keep_freed_memory() -> bool:
    """Makes the GNU C library reuse freed memory; returns False with other libraries. A step frees and allocates the same hundreds of
    megabytes; by default most of them are returned to the kernel each time, which zeroes every page at first touch: a fifth of the step
    time of a model with 5.8 M parameters. The peak does not change. Allocations of more than 1 GiB are still returned."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES) != 1:  # macOS, Windows, musl
        return False
    return 1 in (mallopt(_M_MMAP_THRESHOLD, size) for size in (_LARGE_BYTES, _LARGEST_THRESHOLD_BEFORE_2_35))
