"""The contract between Pharos and a model: the two places a fork touches are models/<name>.py and a TOML with `model.name = "<name>"`.

models/<name>.py holds
    Config                                        a frozen dataclass that extends ModelConfig: the [model] section
    build(config, *, vocab_size, max_seq_len)     -> Model, buildable under torch.device("meta")
    TP_PLAN                                       how tensor parallelism cuts each module, as plain strings; Model.tp_plan
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """The keys of [model] that every model has; each model's own Config adds its sizes."""

    name: Annotated[str, "the model's file: models/<name>.py"] = "llama"
    tokenizer_path: Annotated[str, 'a tokenizer.json, or "" for the built-in bytes (256 + BOS, EOS, PAD)'] = ""
    vocab_size: Annotated[int, "rows of the embedding; 0: the tokenizer's; may be larger, for divisibility", ">= 0"] = 0

    def check(self) -> None:
        """Raises ValueError ("model.key = value: ...") when the sizes contradict each other."""

    def check_tensor_parallel(self, degree: int) -> None:
        """Raises ValueError ("parallelism.tensor_parallel_degree = ...") when `degree` ranks cannot share heads and features evenly."""


class Model(nn.Module):
    """A pipeline-friendly model: a stage keeps some of the children, sets the others to None, and forward does the right thing."""

    dim: int  # C, the width of the hidden state
    tok_embeddings: nn.Module | None
    layers: nn.ModuleDict  # "0", "1", ...: a dict, so that names survive the deletion of other layers
    norm: nn.Module | None
    output: Head | None
    tp_plan: Mapping[str, str] = MappingProxyType({})  # module name, * for any part -> kind: parallelisms/tensor.py

    def forward(
        self, x: Tensor, cache: Any = None, *, labels: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Tokens [B, T] int64, or the hidden state [B, T, C] of the stage before -> logits [B, T, V] in the compute dtype (the loss
        upcasts), or a hidden state, or the sum of the losses against `labels` [B, T] if they are given and the head is here.

        `cache`: of `new_cache`, to be extended by these tokens. `positions` [T] int64: of these tokens in the sequence; None: one after the
        other, from the start or behind the cache. Each attention calls `self.attend(q, k, v)`, which context parallelism replaces."""
        raise NotImplementedError

    def init_weights(self, seed: int) -> None:
        """Fills every parameter and buffer; the values depend on (seed, name, row block) alone: models/init.py."""
        raise NotImplementedError

    def flops_per_token(self, seq_len: int) -> int:
        """Floating point operations of one trained token, forward and backward."""
        raise NotImplementedError

    def new_cache(self, batch: int, length: int) -> Any:
        """Keys and values for `batch` sequences of up to `length` tokens, empty. Needed to draw text, not to train."""
        raise NotImplementedError


class Head(nn.Linear):
    """The output projection [V, C]. Called with labels it gives the loss, so that the logits need not exist as a whole, and FSDP has the
    weight gathered exactly while the loss is computed."""

    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None  # of hidden [B, T, C], weight [V, C], labels [B, T]

    def forward(self, h: Tensor, labels: Tensor | None = None) -> Tensor:  # [B, T, C]
        if labels is None:
            return super().forward(h)  # [B, T, V]
        assert self.loss is not None, "parallelize() sets it"
        return self.loss(h, self.weight, labels)  # scalar


def nearest(wanted: int, legal: Iterable[int]) -> str:
    """The legal numbers, which ascend, below and above, as an error message offers them: "4 or 8"."""
    numbers = list(legal)
    return " or ".join(map(str, [n for n in numbers if n < wanted][-1:] + [n for n in numbers if n > wanted][:1]))


def nearest_divisors(total: int, wanted: int) -> str:
    """The divisors of `total` next to `wanted`, which is none."""
    return nearest(wanted, (d for d in range(1, total + 1) if total % d == 0))
