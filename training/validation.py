"""Loss on held-out documents: a fixed number of sequences, the same each time and for every layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
import torch.distributed as dist

from training.loss import IGNORED

if TYPE_CHECKING:
    from parallelisms.parallelize import Parallelized
    from training.data.loader import BatchSource
    from training.tokenizer import Tokenizer


@dataclass(frozen=True)
class ValidationConfig:
    """[validation]: loss on documents that are never trained on."""

    enable: Annotated[bool, "hold documents out and measure the loss on them"] = False
    freq: Annotated[int, "steps from one validation to the next; the last step is always validated", ">= 1"] = 100
    steps: Annotated[int, "batches of one validation, each of training's global size", ">= 1"] = 10


def validate(
    model: Parallelized,
    loader: BatchSource,
    tokenizer: Tokenizer,
    device: torch.device,
    *,
    slots: Iterable[int],
    counts_tokens: bool,
) -> tuple[float, float, int]:
    """The loss on `slots` of the held-out documents, over all ranks: nats per token, bits per byte (comparable across
    tokenizers) and the number of tokens. Of the ranks that see the same sequences one counts them."""
    token_bytes = torch.from_numpy(tokenizer.token_bytes()).to(device)  # [V] int64; 0 for BOS, EOS, PAD
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # nats, valid tokens, bytes
    for batch in loader.load(slots):
        inputs, labels = batch.inputs.to(device), batch.labels.to(device)
        valid = labels[labels != IGNORED] if counts_tokens else labels.new_empty(0)
        nats = model.evaluate(inputs, labels)
        sums += torch.stack((nats.double(), torch.tensor(valid.numel(), device=device), token_bytes[valid].sum()))
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
    nats, tokens, byte_count = sums.cpu().tolist()  # the one sync
    per_byte = nats / max(byte_count, 1)
    return nats / max(tokens, 1), per_byte / math.log(2), round(tokens)
