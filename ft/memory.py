"""Memory that fault tolerance takes of a rank, on top of the same training without it: a formula, for --explain and for docs.

Flow: tools/explain/command.py asks, with the parameters as tensors without memory; gradients.py then takes it. Tensors that autograd makes
are not in it: kept gradients are those, and live until the step holds, else until the optimizer has run."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ft.buckets import BUCKET_BYTES, KEPT_SETS, BucketLayout
from ft.config import FaultTolerance


def memory(tensors: Sequence[Tensor], settings: FaultTolerance, *, in_child: bool, slots: int = 0) -> dict[str, int]:
    """Bytes, each with what they are for. `tensors`: what the rank holds of each parameter, in the order of registration, on any device.
    `in_child`: the process group lives in a child. `slots`: of a step, where their sums are apart (deterministic_reduce)."""
    keep, quantized = settings.keep_gradients, settings.should_quantize
    momentum = settings.semi_sync_method == "diloco" and settings.outer_momentum > 0
    layout = BucketLayout(
        [*tensors] * max(1, slots),
        bucket_bytes=BUCKET_BYTES,
        in_place=not keep and not in_child and not slots,
        device=tensors[0].device,
        quantized=quantized,
    )
    one_set = sum(size * dtype.itemsize for (dtype, _), size in layout.sizes.items())
    gradients = sum(tensor.nbytes for tensor in tensors)
    left_out = 4 * sum(tensor.numel() for tensor in tensors) * quantized
    own = {  # of groups that step by themselves; a weight is as large as its gradient
        "always: the weights that groups agree on": gradients,
        "always: the outer optimizer's momentum": gradients * momentum,
        "while a fragment is summed: what this group gives to it": -(-gradients // settings.num_fragments),
        "always: what sums in int8 left out, in fp32": left_out,
        "while a fragment is summed: what its sum left out": -(-left_out // settings.num_fragments),
    }
    return {
        "always: two sets of sums, in turns": KEPT_SETS * one_set,
        "while an abandoned generation has not ended: one set more": one_set,
        f"while it heals: sums of {settings.heal_backlog} steps, held": settings.heal_backlog * one_set,
        "while others heal from it, at most": settings.heal_copy_bytes,
        f"alone with all {slots} slots: the gradients of each, kept": max(0, slots - 1) * gradients * keep,
        **(own if settings.semi_sync_method != "none" else {}),
    }
