"""Next-token cross-entropy, as a sum: training/optimizer.py divides once, by the global number of valid tokens; and the error message for
a loss or a gradient that is NaN or infinite: rank, parameter, position in the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite

import torch
from torch import Tensor

from models import ops
from parallelisms.device import DEVICE_TRAITS
from training.config import TrainingConfig
from training.progress import spans

LARGE_VOCABULARY = 16_384  # from here on the logits are the largest activation
LARGE_LOGITS = 1 << 27  # elements of a chunk: 1,046 tokens of Llama 3's vocabulary, 256 MiB in bf16
IGNORED = -100  # a label that says: no target here
_NAMED = 3  # how many of each are listed; the first tell the story


class CrossEntropySum:
    """Sum of -log p(label) over the valid labels, fp32. logits [B, T, V] in the compute dtype, labels [B, T] int64. The upcast to fp32 is
    in here and not in the model, so that a compiler can fuse it with the softmax, both ways."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ops.cross_entropy_sum(logits, labels, ignore_index=IGNORED)

    def of_part(self, logits: Tensor, labels: Tensor, *, first: int, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss of the whole vocabulary, the same on every rank, from this rank's logits [B, T, local V] of ids from `first` on; it has
        their gradient. `gather` stacks ranks' values along a new dim 0, without gradients. A label that no rank holds makes it infinite."""
        logits, labels = logits.flatten(0, -2).float(), labels.flatten()  # [N, V], [N]
        valid, column = labels != IGNORED, labels - first
        here = (column >= 0) & (column < logits.shape[-1])
        log_sum = logits.logsumexp(-1)  # [N], of this part
        target = logits.gather(-1, column.where(here, 0).unsqueeze(-1)).squeeze(-1)  # [N]
        with torch.no_grad():
            log_sums, targets = gather(torch.stack((log_sum, target.where(here, -inf)))).unbind(1)  # [ranks, N] each
            total_log_sum = log_sums.logsumexp(0)
            loss = (total_log_sum - targets.amax(0)).where(valid, 0.0).sum()
            share = (log_sum - total_log_sum).exp()  # of this part in the softmax's sum
        # The loss's slope in these logits: d log(sum of all) is a part's share of d log(sum of the part). Its value is taken off again.
        slope = (share * log_sum - target.where(here, 0.0)).where(valid, 0.0).sum()
        return loss + (slope - slope.detach())


cross_entropy_sum = CrossEntropySum()


def chunk_tokens(config: TrainingConfig, vocab_size: int, device_type: str) -> int:
    """training.loss_chunk_tokens resolved: tokens whose logits exist at once; 0: all of them. On CUDA a power of two: kernels of matrix
    matmuls take tokens in tiles of 128 and more, and each chunk reads and writes the whole gradient of the weight once."""
    if config.loss_chunk_tokens >= 0 or vocab_size < LARGE_VOCABULARY:
        return max(0, config.loss_chunk_tokens)
    fit, least = LARGE_LOGITS // vocab_size, DEVICE_TRAITS[device_type].least_loss_chunk
    return max(least, 1 << (fit.bit_length() - 1)) if least else fit


class NonFinite(RuntimeError):
    """A loss or a gradient is not a number. Nothing was applied."""


def describe_nonfinite(
    rank: int,
    step: int,
    losses: Sequence[tuple[int, Sequence[int], float]],
    named_gradients: Mapping[str, Tensor | None],
) -> str:
    """One line on what is not finite on `rank`, or "". `losses`: slot, positions (sequence indices) and loss sum of each microbatch that
    it has run in `step`, which was not taken. `named_gradients`: local; reduced ones may show another rank's. Waits for the device."""
    bad_losses = [
        f"loss {loss} at slot {slot}, {_positions(positions)}" for slot, positions, loss in losses if not isfinite(loss)
    ]
    bad_gradients = []
    for name, gradient in named_gradients.items():
        if gradient is not None and (wrong := gradient.numel() - int(gradient.isfinite().sum())):
            found = {"nan": gradient.isnan(), "inf": gradient.isinf()}
            kinds = [kind for kind, which in found.items() if bool(which.any())]
            bad_gradients.append(f"gradient of {name} ({wrong} of {gradient.numel()} values: {' and '.join(kinds)})")
    parts = [*_first(bad_losses, "microbatches"), *_first(bad_gradients, "parameters")]
    if bad_gradients and losses and not bad_losses:
        run = ", ".join(_positions(positions) for _, positions, _ in losses[:_NAMED])
        parts.append(f"its losses are finite ({run}{', ...' if len(losses) > _NAMED else ''})")
    return f"step {step} not taken, rank {rank}: {'; '.join(parts)}" if parts else ""


def _first(texts: list[str], noun: str) -> list[str]:
    more = len(texts) - _NAMED
    return texts[:_NAMED] + ([f"{more} more {noun}"] if more > 0 else [])


def _positions(positions: Sequence[int]) -> str:
    return spans("position", positions) if positions else "in the order of a stream"
