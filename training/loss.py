"""Next-token cross-entropy, as a sum (training/optimizer.py divides once, by the global number of valid tokens), and the error message for
a loss or gradient that is NaN or infinite: rank, parameter, position in the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite

import torch
from torch import Tensor

from models import ops
from parallelisms.device import DEVICE_TRAITS
from training.config import TrainingConfig
from training.progress import as_ranges

LARGE_VOCABULARY = 16_384  # from this size on the logits are the largest activation
# elements of a chunk of logits: 1,046 tokens of Llama 3's vocabulary, 256 MiB in bf16; but at least min_loss_chunk of the device
LARGE_LOGITS = 1 << 27
IGNORED = -100  # label of a position without a target
_NAMED = 3  # values of each kind that a message lists


class CrossEntropySum:
    """Sum of -log p(label) over the valid labels, fp32. logits [B, T, V] in the compute dtype, labels [B, T] int64. The upcast to fp32 is
    here and not in the model, so that a compiler can fuse it with the softmax, in forward and backward."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ops.cross_entropy_sum(logits, labels, ignore_index=IGNORED)

    def vocab_parallel(
        self, logits: Tensor, labels: Tensor, *, first: int, gather: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Returns the loss over the whole vocabulary, the same on every rank, from this rank's logits [B, T, local V] of ids from `first`
        on, differentiable in them. `gather` stacks ranks' values along a new dim 0, without gradients. Inf if no rank has a label's id."""
        logits, labels = logits.flatten(0, -2).float(), labels.flatten()  # [N, V], [N]
        valid, column = labels != IGNORED, labels - first
        is_local = (column >= 0) & (column < logits.shape[-1])
        log_sum = logits.logsumexp(-1)  # [N], over this rank's ids
        target = logits.gather(-1, column.where(is_local, 0).unsqueeze(-1)).squeeze(-1)  # [N]
        with torch.no_grad():
            log_sums, targets = gather(torch.stack((log_sum, target.where(is_local, -inf)))).unbind(1)  # [ranks, N]
            total_log_sum = log_sums.logsumexp(0)
            loss = (total_log_sum - targets.amax(0)).where(valid, 0.0).sum()
            share = (log_sum - total_log_sum).exp()  # this rank's share of the softmax's denominator
        # A surrogate with the loss's gradient in these logits (d total_log_sum = sum over ranks of share * d log_sum); its value cancels.
        surrogate = (share * log_sum - target.where(is_local, 0.0)).where(valid, 0.0).sum()
        return loss + (surrogate - surrogate.detach())


cross_entropy_sum = CrossEntropySum()  # the LossFunction of every run; ops.cross_entropy_sum is its formula


def chunk_tokens(config: TrainingConfig, vocab_size: int, device_type: str) -> int:
    """Returns the chunk size for training.loss_chunk_tokens, in tokens; 0: no chunks. On CUDA a power of two: matmul kernels use tiles of
    128 tokens and more, and each chunk reads and writes the whole gradient of the weight once."""
    if config.loss_chunk_tokens >= 0 or vocab_size < LARGE_VOCABULARY:
        return max(0, config.loss_chunk_tokens)
    fit, minimum = LARGE_LOGITS // vocab_size, DEVICE_TRAITS[device_type].min_loss_chunk
    return max(minimum, 1 << (fit.bit_length() - 1)) if minimum else fit


class NonFinite(RuntimeError):
    """A loss or a gradient is NaN or infinite. The step was not applied."""


def describe_nonfinite(
    rank: int,
    losses: Sequence[tuple[int, Sequence[int], float]],
    named_gradients: Mapping[str, Tensor],
) -> str:
    """Returns one line that names the non-finite values on `rank`, or "". `losses`: slot, positions (sequence indices) and loss sum of each
    local batch of a step. `named_gradients`: local shards, which may be sums over ranks. Syncs the device."""
    bad_losses = [
        f"loss {loss} at slot {slot}, {_positions(positions)}" for slot, positions, loss in losses if not isfinite(loss)
    ]
    bad_gradients = []
    for name, gradient in named_gradients.items():
        if wrong := gradient.numel() - int(gradient.isfinite().sum()):
            found = {"nan": gradient.isnan(), "inf": gradient.isinf()}
            kinds = [kind for kind, which in found.items() if bool(which.any())]
            bad_gradients.append(f"gradient of {name} ({wrong} of {gradient.numel()} values: {' and '.join(kinds)})")
    parts = [*_first(bad_losses, "local batches"), *_first(bad_gradients, "parameters")]
    if bad_gradients and losses and not bad_losses:
        run = ", ".join(_positions(positions) for _, positions, _ in losses[:_NAMED])
        parts.append(f"its losses are finite ({run}{', ...' if len(losses) > _NAMED else ''})")
    return f"rank {rank}: {'; '.join(parts)}" if parts else ""


def _first(texts: list[str], noun: str) -> list[str]:
    more = len(texts) - _NAMED
    return texts[:_NAMED] + ([f"{more} more {noun}"] if more > 0 else [])


def _positions(positions: Sequence[int]) -> str:
    return as_ranges("position", positions) if positions else "in a stream, without positions"
