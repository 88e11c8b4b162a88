"""Memory that fault tolerance adds to that of the same training without it, per rank, as a formula for --explain and the docs.

Flow: tools/explain/command.py calls `memory` with meta tensors; gradients.py allocates that memory during training. Gradients as autograd
allocates them are not counted: kept gradients are these tensors themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ft.buckets import BUCKET_BYTES, KEPT_SETS, BucketLayout
from ft.config import FaultTolerance


def memory(tensors: Sequence[Tensor], settings: FaultTolerance, *, in_child: bool, slots: int = 0) -> dict[str, int]:
    """Returns bytes by purpose. `tensors`: the rank's shard of each parameter that is trained, in the order of registration, on any device.
    `in_child`: the process group runs in a child process. `slots`: slots of a step if each is reduced separately (deterministic_reduce),
    else 0."""
    keep, quantized = settings.keep_gradients, settings.should_quantize
    momentum = settings.semi_sync_method == "diloco" and settings.outer_momentum > 0
    layout = BucketLayout(
        [*tensors] * max(1, slots),
        bucket_bytes=BUCKET_BYTES,
        in_place=not keep and not in_child and not slots,
        device=torch.device("meta"),  # of a rank whose stages are frozen
        quantized=quantized,
    )
    one_set = sum(size * dtype.itemsize for (dtype, _), size in layout.sizes.items())
    gradients = sum(tensor.nbytes for tensor in tensors)
    residuals = 4 * sum(tensor.numel() for tensor in tensors) * quantized
    own = {  # with a semi_sync_method; a weight is as large as its gradient
        "always: the outer weights": gradients,
        "always: the outer optimizer's momentum": gradients * momentum,
        "while a fragment is reduced: this group's pseudo-gradients": -(-gradients // settings.num_fragments),
        "always: rounding errors of reductions in int8, kept in fp32": residuals,
        "while a fragment is reduced: rounding errors of its reduction": -(-residuals // settings.num_fragments),
    }
    return {
        f"always: {KEPT_SETS} sets of reduction buffers, used in turn": KEPT_SETS * one_set,
        "while an abandoned process group has not ended: one more set": one_set,
        f"while this group heals: reduced gradients of {settings.heal_backlog} steps": settings.heal_backlog * one_set,
        "while other groups heal from this one, at most": settings.heal_copy_bytes,
        f"if this group computes all {slots} slots: the kept gradients of each": max(0, slots - 1) * gradients * keep,
        **(own if settings.semi_sync_method != "none" else {}),
    }
