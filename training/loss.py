"""Next-token cross-entropy, as a sum: whoever commits the step divides by the global count of valid tokens."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100  # a label that says: no target here


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log p(label) over the valid labels, fp32 scalar. logits [B, T, V] in the compute dtype, labels [B, T] int64.

    The upcast to fp32 is here and not in the model, so that a compiler can fuse it with the softmax, forward and backward.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED)
