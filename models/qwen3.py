"""Qwen3, dense (Yang et al. 2025, arXiv 2505.09388): Llama with a norm on each head of queries and keys, and a head width of its own.

As published, with head_dim = 128, norm_eps = 1e-6 and vocab_size = 151936:

    size    dim    n_layers  n_heads  n_kv_heads  hidden_dim  enable_weight_tying
    0.6B    1024   28        16       8           3072        true
    1.7B    2048   28        16       8           6144        true
    4B      2560   36        32       8           9728        true
    8B      4096   36        32       8           12288       false
    14B     5120   40        40       8           17408       false
    32B     5120   64        64       8           25600       false
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from models import llama

TP_PLAN = {**llama.TP_PLAN, "layers.*.attention.q_norm": "heads", "layers.*.attention.k_norm": "heads"}


@dataclass(frozen=True)
class Config(llama.Config):
    """[model] for Qwen3: Llama's keys and the width of a head. The defaults are a small model."""

    norm_eps: Annotated[float, "added to the mean square in RMSNorm", "> 0"] = 1e-6
    rope_theta: Annotated[float, "base of the rotary frequencies", "> 0"] = 1_000_000.0
    head_dim: Annotated[int, "width of a head D; n_heads * head_dim may differ from dim", ">= 2"] = 64

    def check_head_dim(self) -> None:
        if self.head_dim % 2:
            raise ValueError(
                f"model.head_dim = {self.head_dim}: must be even (rotary positions rotate pairs); "
                f"nearest: {self.head_dim - 1} or {self.head_dim + 1}"
            )


def build(config: Config, *, vocab_size: int, max_seq_len: int) -> llama.Llama:
    model = llama.build(config, vocab_size=vocab_size, max_seq_len=max_seq_len)
    for block in model.layers.values():
        block.attention = Qwen3Attention(config)
    model.tp_plan = TP_PLAN
    return model


class Qwen3Attention(llama.Attention):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.q_norm = llama.RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = llama.RMSNorm(config.head_dim, config.norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # [B, T, C]
        q, k, v = super().project(x)  # [B, T, H, D], [B, T, K, D] twice
        return self.q_norm(q), self.k_norm(k), v
