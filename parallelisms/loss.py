"""The loss at the head: from the hidden state, so that the logits need not exist as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from parallelisms.parallelize import CompileConfig, LossFunction


def head_loss(
    loss: LossFunction, *, chunk_tokens: int, compile: CompileConfig
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What models.contract.Head calls: hidden [B, T, C], weight [V, C], labels [B, T] -> loss sum, fp32 scalar."""
    if compile.enable and "loss" in compile.components:
        loss = torch.compile(loss, backend=compile.backend)

    def from_hidden(h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return loss(F.linear(h, weight), labels)

    return from_hidden
