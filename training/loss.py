"""Next-token cross-entropy, as a sum: whoever commits the step divides by the global count of valid tokens."""

from __future__ import annotations

from torch import Tensor

from models import ops

IGNORED = -100  # a label that says: no target here


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log p(label) over the valid labels, fp32. logits [B, T, V] in the compute dtype, labels [B, T] int64.

    The upcast to fp32 is in here and not in the model, so that a compiler can fuse it with the softmax, both ways.
    """
    return ops.cross_entropy_sum(logits, labels, ignore_index=IGNORED)
