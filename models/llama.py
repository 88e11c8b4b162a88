"""Llama 3: grouped-query attention, rotary positions, RMSNorm, SwiGLU (Touvron et al. 2023, arXiv 2302.13971; Grattafiori et al. 2024,
arXiv 2407.21783).

Letters: B batch, T tokens (of this rank), C model width, H query heads, K key/value heads, D head dim, F feed-forward width,
V vocabulary. A trailing comment gives the new shape.

For pipeline stages, the top-level forward is a loop over children; the layers are in a ModuleDict, so that deleting some does not
rename the others; embedding, norm and output may be None."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import ops
from models.contract import Head, Model, ModelConfig, nearest_divisors
from models.init import normal_

TP_PLAN = {  # module -> kind of sharding under tensor parallelism: parallelisms/tensor.py
    "tok_embeddings": "embedding",
    "layers.*.attention_norm": "sequence",
    "layers.*.attention": "gather",
    "layers.*.attention.wq": "column",
    "layers.*.attention.wk": "column",
    "layers.*.attention.wv": "column",
    "layers.*.attention.wo": "row",
    "layers.*.ffn_norm": "sequence",
    "layers.*.feed_forward": "gather",
    "layers.*.feed_forward.w1": "column",
    "layers.*.feed_forward.w3": "column",
    "layers.*.feed_forward.w2": "row",
    "norm": "sequence",
    "output": "head",
}


@dataclass(frozen=True)
class Config(ModelConfig):
    """[model] for Llama. The defaults are a small model."""

    dim: Annotated[int, "model width C", ">= 1"] = 256
    n_layers: Annotated[int, "transformer blocks", ">= 1"] = 6
    n_heads: Annotated[int, "query heads H", ">= 1"] = 8
    n_kv_heads: Annotated[int, "key and value heads K; divides n_heads", ">= 1"] = 4
    hidden_dim: Annotated[int, "feed-forward width F", ">= 1"] = 768
    norm_eps: Annotated[float, "added to the mean square in RMSNorm", "> 0"] = 1e-5
    rope_theta: Annotated[float, "base of the rotary frequencies", "> 0"] = 500_000.0
    rope_scaling: Annotated[float, "Llama 3.1 factor for long contexts; 1: no scaling", ">= 1"] = 1.0
    rope_low_freq: Annotated[float, "wavelengths above rope_original_seq_len / this are scaled fully", "> 0"] = 1.0
    rope_high_freq: Annotated[float, "wavelengths below rope_original_seq_len / this are not scaled", "> 0"] = 4.0
    rope_original_seq_len: Annotated[int, "context length before scaling, tokens", ">= 1"] = 8192
    enable_weight_tying: Annotated[bool, "embedding and output share one matrix, as in Llama 3.2 1B and 3B"] = False

    @property
    def head_dim(self) -> int:  # D
        return self.dim // self.n_heads

    def check(self) -> None:
        self.check_head_dim()
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.n_kv_heads = {self.n_kv_heads}: must divide model.n_heads = {self.n_heads}; "
                f"nearest: {nearest_divisors(self.n_heads, self.n_kv_heads)}"
            )
        if self.rope_high_freq <= self.rope_low_freq:
            raise ValueError(
                f"model.rope_high_freq = {self.rope_high_freq}: must be above model.rope_low_freq = {self.rope_low_freq}; "
                "Llama 3.1 uses 4.0 and 1.0"
            )

    def check_head_dim(self) -> None:
        if self.dim % 2:
            raise ValueError(f"model.dim = {self.dim}: must be even; nearest: {self.dim - 1 or 2} or {self.dim + 1}")
        if (self.dim // 2) % self.n_heads:
            raise ValueError(
                f"model.n_heads = {self.n_heads}: must divide model.dim = {self.dim} into heads of an even width (rotary positions rotate "
                f"pairs); nearest: {nearest_divisors(self.dim // 2, self.n_heads)}"
            )

    def tensor_parallel_sizes(self) -> dict[str, int]:
        """Returns the keys whose sizes tensor parallelism must divide."""
        return {"n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads, "hidden_dim": self.hidden_dim}

    def check_tensor_parallel(self, degree: int) -> None:
        shared = self.tensor_parallel_sizes()
        uneven = [f"model.{name} = {count}" for name, count in shared.items() if count % degree]
        if uneven:
            raise ValueError(
                f"parallelism.tensor_parallel_degree = {degree}: must divide {' and '.join(uneven)}; "
                f"nearest: {nearest_divisors(math.gcd(*shared.values()), degree)}"
            )


def build(config: Config, *, vocab_size: int, max_seq_len: int) -> Llama:
    """Returns the whole model, uninitialised: build it under torch.device("meta"), shard it, call `to_empty`, then `init_weights`."""
    return Llama(config, vocab_size, max_seq_len)


class Llama(Model):
    tp_plan = TP_PLAN
    freqs_cis: Tensor

    COMPUTED_BUFFERS = ("freqs_cis",)

    def __init__(self, config: Config, vocab_size: int, max_seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.dim = config.dim
        self.max_seq_len = max_seq_len
        self.tok_embeddings = Embedding(vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = Head(config.dim, vocab_size, bias=False)
        self.tied = config.enable_weight_tying
        self.tie_weights()
        table = torch.empty(max_seq_len, config.head_dim // 2, 2)  # [T, D/2, 2]
        self.register_buffer("freqs_cis", table, persistent=True)

    def forward(
        self,
        x: Tensor,
        cache: Cache | None = None,
        *,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:  # tokens [B, T], or [B, T, C] in a later stage
        if document_starts is not None:
            if positions is None:
                positions = torch.arange(document_starts.shape[1], device=document_starts.device)
            positions = positions - document_starts  # [B, T], which restart at each document
        freqs_cis = self.freqs_cis if positions is None else self.freqs_cis[positions]  # [T, D/2, 2], or with B
        h = self.tok_embeddings(x) if self.tok_embeddings is not None else x  # [B, T, C]
        for name, block in self.layers.items():
            h = block(h, freqs_cis, cache[name] if cache is not None else None, document_starts)
        h = self.norm(h) if self.norm is not None else h
        return self.output(h, labels=labels) if self.output is not None else h  # [B, T, V], or the loss

    def new_cache(self, batch: int, length: int) -> Cache:
        shape = (batch, length, self.config.n_kv_heads, self.config.head_dim)  # [B, T, K, D]
        return {name: LayerCache(shape) for name in self.layers}

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Initialises as torchtitan does for Llama 3: normal, of standard deviation 1 in the embedding; 0.02 in projections, with
        wo, w2 and w3 scaled by depth; 1/sqrt(C) in the head, also if it is the embedding, truncated at 3 sigma; norms 1."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            elif name.startswith("tok_embeddings") and not self.tied:
                normal_(parameter, name, seed, std=1.0)
            elif not name.startswith("layers"):
                normal_(parameter, name, seed, std=self.config.dim**-0.5, truncation=3.0)
            else:
                layer, kind = int(name.split(".")[1]), name.removesuffix(".weight").split(".")[-1]
                depth = math.sqrt(2 * (layer + 1)) if kind in ("wo", "w2", "w3") else 1.0
                normal_(parameter, name, seed, std=0.02 / depth)
        self.freqs_cis.copy_(rotary_table(self.config, self.max_seq_len))

    def flops_per_token(self, seq_len: int) -> int:
        """Returns 6 flops per weight (4 if frozen; of the embedding, a lookup, only if it is also the head) plus 12 * L * H * D * T for the
        attention scores, without a discount for the causal mask (the usual convention, PaLM appendix B, arXiv 2204.02311)."""
        lookups = () if self.tied else ("tok_embeddings.weight",)
        return (
            sum(matmul_flops(p) for name, p in self.named_parameters() if name not in lookups)
            + 12 * len(self.layers) * self.config.n_heads * self.config.head_dim * seq_len
        )


def matmul_flops(weight: nn.Parameter) -> int:
    """Returns the flops of a weight per token: 2 each in the forward, for the gradient of the input and, unless frozen, for its own."""
    return (6 if weight.requires_grad else 4) * weight.numel()


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self, h: Tensor, freqs_cis: Tensor, cache: LayerCache | None = None, document_starts: Tensor | None = None
    ) -> Tensor:  # [B, T, C]
        h = h + self.attention(self.attention_norm(h), freqs_cis, cache, document_starts)
        return h + self.feed_forward(self.ffn_norm(h))


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)
        self.attend = ops.causal_attention  # context parallelism replaces it

    def forward(
        self, x: Tensor, freqs_cis: Tensor, cache: LayerCache | None = None, document_starts: Tensor | None = None
    ) -> Tensor:  # [B, T, C]
        q, k, v = self.project(x)
        start = cache.length if cache is not None else 0
        freqs = freqs_cis[..., start : start + q.shape[1], :, :]  # [T, D/2, 2], or with B
        q, k = ops.rope(q, freqs), ops.rope(k, freqs)
        if cache is not None:
            k, v = cache.append(k, v)  # [B, start + T, K, D]
        out = self.attend(q, k, v, document_starts)  # [B, T, H, D]
        return self.wo(out.flatten(-2))  # [B, T, C]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [B, T, C]
        # -1, not H or K: under tensor parallelism a rank has only some of the heads
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # [B, T, H, D]
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))  # [B, T, K, D]
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))  # [B, T, K, D]
        return q, k, v


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C]
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # SwiGLU (Shazeer 2020, arXiv 2002.05202)


class Embedding(nn.Embedding):
    """torch's Embedding, with the operation of models/ops.py."""

    def forward(self, input: Tensor) -> Tensor:  # tokens [B, T]
        return ops.embedding(input, self.weight)  # [B, T, C]


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, with the operation of models/ops.py."""

    eps: float  # torch allows None

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps)


class LayerCache:
    """Keys and values of one layer for the tokens so far; the memory is allocated once, on the first append."""

    def __init__(self, shape: tuple[int, int, int, int]) -> None:
        self.shape, self.length = shape, 0  # [B, T, K, D]; tokens
        self._pairs: Tensor | None = None  # [2, B, T, K, D]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k and v [B, T, K, D] and returns all keys and values; dtype and device are those of the first append."""
        if self._pairs is None:
            self._pairs = k.new_empty(2, *self.shape)
        start, end = self.length, self.length + k.shape[1]
        assert end <= self.shape[1], f"the cache has room for {self.shape[1]} tokens, {end} were appended"
        self._pairs[0, :, start:end] = k
        self._pairs[1, :, start:end] = v
        self.length = end
        return self._pairs[0, :, :end], self._pairs[1, :, :end]


Cache = dict[str, LayerCache]


def rotary_table(config: Config, length: int) -> Tensor:
    """Returns cos and sin of position * frequency, fp32 [length, D/2, 2] (Su et al. 2021, arXiv 2104.09864; scaling as in Llama 3.1)."""
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu")  # [D/2]
    freqs = config.rope_theta ** (-pairs / config.head_dim)
    if config.rope_scaling > 1:  # long wavelengths are scaled, short ones are not, those between are interpolated
        turns = config.rope_original_seq_len * freqs / (2 * math.pi)  # turns within the original context
        keep = (turns - config.rope_low_freq) / (config.rope_high_freq - config.rope_low_freq)
        keep = keep.clamp(0, 1)
        freqs = freqs * (keep + (1 - keep) / config.rope_scaling)
    angles = torch.outer(torch.arange(length, dtype=torch.float64, device="cpu"), freqs)  # [T, D/2]
    return torch.stack((angles.cos(), angles.sin()), dim=-1).float()  # [T, D/2, 2]
