"""Differences between devices, in one place. Everything else is one code path.

`DEVICE_TRAITS` has what the rest of the program must decide by the kind of device; tests/unit/test_device.py lists the lines that ask for a
kind elsewhere, and why. What is one natural call of torch.cuda stays in its place, such as the allocator's counters (training/metrics.py).
models/ops.py, which knows of torch alone, asks for a CPU or not; ft/device.py says for ft/ which devices have streams."""

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
    """One kind of device beside the others; the defaults are a CPU's."""

    backend: str = "gloo"  # the library of collectives that serves it
    pins_batches: bool = False  # batches wait in pinned memory: the copy from there does not hold the host up
    min_loss_chunk: int = 0  # tokens that a chunk of the loss has at least; 0: as many as the memory bound allows
    has_fp32_addmm: bool = False  # a product of bf16 matrices is added to an fp32 one within its own kernel
    has_allocator: bool = False  # of torch's own, with counters, and a history that can be dumped
    queues_work: bool = False  # an operation returns before it is computed: a measurement waits, and the host is free
    probe: tuple[int, torch.dtype] = (256, torch.float32)  # rows, dtype: matrices by which tools/cluster measures speed
    largest_message: int = 1 << 20  # bytes, by which it measures links: eight ranks on a laptop keep within 500 MB
    words: str = "on CPUs"  # where ranks are, in a sentence


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
        words="on one CUDA GPU each",
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
        """The model of the device, as vendors write it; for a CPU the first model name that the kernel lists."""
        if self.type == "cuda":
            return torch.cuda.get_device_name(self.torch_device)
        lines = ""
        with suppress(OSError):  # no /proc: not Linux
            lines = Path("/proc/cpuinfo").read_text()
        named = re.search(r"^model name[ \t]*:[ \t]*(.*?)[ \t]*$", lines, re.MULTILINE)
        return named[1] if named else "CPU"

    def fast_bfloat16(self, capability: tuple[int, int] | None = None) -> bool:
        """True when bf16 matmuls are faster than fp32 here: CUDA since Ampere, which a GPU that is not here (--explain) is taken
        for; CPUs with AMX or AVX512-BF16."""
        if self.type == "cuda":
            capability = capability or cuda_capability(self.torch_device)
            return capability == (0, 0) or capability >= (8, 0)
        return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()

    def memory_gib(self) -> float:
        """Peak of the process's resident set."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # macOS counts bytes, Linux KiB


def local_device_type() -> str:
    """The kind of device that `pick_device` would pick: "cuda" or "cpu". Takes none into use."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def cuda_capability(device: torch.device | int = 0) -> tuple[int, int]:
    """Compute capability of a CUDA device, this machine's first one; (0, 0): there is none."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


def pick_device(local_rank: int, *, keep_memory: bool = True) -> Device:
    """CUDA device `local_rank` where there is one, else the CPU, whose freed memory this process then keeps for the next step."""
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
    """Asks the GNU C library to use freed memory again; False where it cannot be asked. A step frees and allocates the same hundreds of
    megabytes, and by default most of them go back to the kernel each time, which zeroes every page again at first touch: a fifth of the
    time of a step of 5.8 M parameters. The peak stays what it was. Single allocations of more than 1 GiB still go back."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or mallopt(_M_TRIM_THRESHOLD, _LARGE_BYTES) != 1:  # macOS, Windows, musl
        return False
    return 1 in (mallopt(_M_MMAP_THRESHOLD, size) for size in (_LARGE_BYTES, _LARGEST_THRESHOLD_BEFORE_2_35))
