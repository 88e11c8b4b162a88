"""What Pharos asks of a model: the two places a fork touches are models/<name>.py and a TOML with `model.name = "<name>"`.

models/<name>.py holds
    Config                                        a frozen dataclass that extends ModelConfig: the [model] section
    build(config, *, vocab_size, max_seq_len)     -> nn.Module, buildable under torch.device("meta")

and the module that `build` returns keeps the pipeline-friendly contract
    tok_embeddings, norm, output                  children that may be None: a stage without one passes its input through
    layers                                        an nn.ModuleDict, so that names survive the deletion of other layers
    forward(x)                                    tokens [B, T] int64, or the hidden state [B, T, C] of the stage before
                                                  -> logits [B, T, V] in the compute dtype (the loss upcasts), or a hidden state
    init_weights(seed)                            fills every parameter and buffer; the values depend on (seed, name, row block) alone
    flops_per_token(seq_len) -> int               what one trained token costs, forward and backward
and, to be sampled from, forward takes `cache=`, made by the model's new_cache(batch, length).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class ModelConfig:
    """The keys of [model] that every model has; each model's own Config adds its sizes."""

    name: Annotated[str, "the model's file: models/<name>.py"] = "llama"
    tokenizer_path: Annotated[str, 'a tokenizer.json, or "" for the built-in bytes (256 + BOS, EOS, PAD)'] = ""
    vocab_size: Annotated[int, "rows of the embedding; 0: the tokenizer's; may be larger, for divisibility", ">= 0"] = 0

    def check(self) -> None:
        """Raises ValueError ("model.key = value: ...") when the sizes contradict each other."""


def nearest_divisors(total: int, wanted: int) -> str:
    """The divisors of `total` next to `wanted`, as an error message offers them: "4 or 8"."""
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = [d for d in divisors if d <= wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(map(str, below + above))
