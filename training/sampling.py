"""Text generation: token by token, with a cache of keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from models.contract import Model
from training.tokenizer import Tokenizer


@dataclass(frozen=True)
class SampleConfig:
    """[sample]: the text that a run prints at its end, and the defaults of scripts/generate.py."""

    tokens: Annotated[
        int, "length of the sample, tokens; 0: no sample, as with pipeline, context or tensor parallelism", ">= 0"
    ] = 200
    prompt: Annotated[str, 'text that the sample continues; "": from BOS alone'] = ""
    temperature: Annotated[float, "logits are divided by this; 0: always the most likely token", ">= 0"] = 0.8
    top_k: Annotated[int, "sample from the k most likely tokens; 0: from all", ">= 0"] = 50
    seed: Annotated[int, "seed of the sampling", ">= 0"] = 0


def why_no_text(model: Model) -> str:
    """Returns why `generate` cannot run this model, or ""."""
    lacks = type(model).new_cache is Model.new_cache
    return "the model has no new_cache (models/contract.py), which is needed to generate text" if lacks else ""


def sample_text(model: Model, tokenizer: Tokenizer, config: SampleConfig, seq_len: int, device: torch.device) -> str:
    """Returns what a run prints at its end: the prompt with its continuation, at most `seq_len` tokens, or why there is none; "" if
    `sample.tokens` is 0."""
    if reason := why_no_text(model):
        return f"no text sample: {reason}"
    prompt = torch.from_numpy(tokenizer.encode(config.prompt, bos=True)).long().to(device)
    if (length := min(config.tokens, seq_len - prompt.numel())) <= 0:
        text = f"no text sample: sample.prompt has {prompt.numel()} tokens with BOS, training.seq_len is {seq_len}"
        return text if config.tokens else ""
    model.eval()
    continuation = decode_after(tokenizer, prompt.tolist(), list(generate(model, prompt, config, length=length)))
    model.train()
    return f"text sample:\n{config.prompt}{continuation}"


def decode_after(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Returns the text that continues the text of `prompt`. SentencePiece's tokenizers leave out a space at the beginning of what they
    decode, so `ids` are not decoded alone."""
    return tokenizer.decode([*prompt, *ids])[len(tokenizer.decode(prompt)) :]


@torch.no_grad()
def generate(model: Model, prompt: Tensor, config: SampleConfig, *, length: int) -> Iterator[int]:
    """Yields `length` token ids that continue `prompt` [T] int64 (at least one token). With a sharded model every rank must consume all of
    them; equal seeds give equal text. Does not stop at EOS, since all ranks must run the same number of forwards."""
    generator = torch.Generator().manual_seed(config.seed)
    cache = model.new_cache(1, prompt.numel() + length)
    tokens = prompt.unsqueeze(0)  # [1, T]
    for _ in range(length):
        logits = model(tokens, cache=cache)[0, -1].float().cpu()  # [V]: the same draw on every device
        drawn = draw(logits, config, generator)
        yield drawn
        tokens = torch.tensor([[drawn]], device=prompt.device)


def draw(logits: Tensor, config: SampleConfig, generator: torch.Generator) -> int:
    """Samples one token id from logits [V] fp32."""
    if config.temperature == 0:
        return int(logits.argmax())
    logits = logits / config.temperature
    if 0 < config.top_k < logits.numel():
        logits[logits < logits.topk(config.top_k).values[-1]] = -torch.inf
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))
