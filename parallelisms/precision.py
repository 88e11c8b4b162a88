"""Which dtype does what: one rule, printed at start, the same for every layout."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from parallelisms.device import Device


@dataclass(frozen=True)
class Precision:
    master: torch.dtype = torch.float32  # the parameters that the optimizer updates, and its state
    compute: torch.dtype = torch.float32  # weights and activations in forward and backward
    reduce: torch.dtype = torch.float32  # gradients on the wire and in the accumulators

    def __str__(self) -> str:
        master, compute, reduce = (
            str(dtype).removeprefix("torch.") for dtype in (self.master, self.compute, self.reduce)
        )
        return (
            f"master weights and optimizer {master}; forward and backward {compute}; norms, softmax and loss float32; "
            f"gradient sums {reduce}"
        )


def choose_precision(master: str, compute: str, reduce: str, device: Device) -> Precision:
    """Names as in [training]; compute "auto" is bfloat16 where `device` multiplies faster in it, else float32."""
    if compute == "auto":
        compute = "bfloat16" if device.fast_bfloat16() else "float32"
    return Precision(getattr(torch, master), getattr(torch, compute), getattr(torch, reduce))
