"""Next-token cross-entropy, as a sum: training/optimizer.py divides once, by the global number of valid tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from models import ops
from parallelisms.device import DEVICE_TRAITS
from training.config import TrainingConfig

LARGE_VOCABULARY = 16_384  # from here on the logits are the largest activation
LARGE_LOGITS = 1 << 27  # elements of a chunk: 1,046 tokens of Llama 3's vocabulary, 256 MiB in bf16
IGNORED = -100  # a label that says: no target here


class CrossEntropySum:
    """Sum of -log p(label) over the valid labels, fp32. logits [B, T, V] in the compute dtype, labels [B, T] int64. The upcast to fp32 is
    in here and not in the model, so that a compiler can fuse it with the softmax, both ways."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ops.cross_entropy_sum(logits, labels, ignore_index=IGNORED)

    def of_part(self, logits: Tensor, labels: Tensor, *, first: int, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """The loss of the whole vocabulary, the same on every rank, from this rank's logits [B, T, local V] of the tokens `first`,
        `first` + 1, ...; it has their gradient. `gather` stacks the ranks' values of a tensor along a new dim 0, without gradients."""
        return ops.cross_entropy_sum_of_part(logits, labels, ignore_index=IGNORED, first=first, gather=gather)


cross_entropy_sum = CrossEntropySum()


def chunk_tokens(config: TrainingConfig, vocab_size: int, device_type: str) -> int:
    """training.loss_chunk_tokens resolved: tokens whose logits exist at once; 0: all of them. On CUDA a power of two: kernels of matrix
    products take tokens in tiles of 128 and more, and each chunk reads and writes the whole gradient of the weight once."""
    if config.loss_chunk_tokens >= 0 or vocab_size < LARGE_VOCABULARY:
        return max(0, config.loss_chunk_tokens)
    fit, least = LARGE_LOGITS // vocab_size, DEVICE_TRAITS[device_type].least_loss_chunk
    return max(least, 1 << (fit.bit_length() - 1)) if least else fit
