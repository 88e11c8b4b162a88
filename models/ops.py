"""The arithmetic of a transformer block, as functions of tensors.

Letters: B batch, T tokens, S tokens of keys and values, C width, H query heads, K key/value heads, D head dim, F feed-forward width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, computed in fp32, returned in x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rope(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Turns each pair (x[2i], x[2i+1]) of x [B, T, H, D] by its position's angle; freqs_cis [T, D/2, 2] holds (cos, sin)."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # [B, T, H, D/2]
    cos, sin = freqs_cis[:, None, :, 0], freqs_cis[:, None, :, 1]  # [T, 1, D/2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with q [B, T, H, D], k and v [B, S, K, D]; H is a multiple of K.

    The T queries are the last T of the S positions (S > T when keys come from a cache); each sees itself and what is before it.
    """
    t, s = q.shape[1], k.shape[1]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, D]
    grouped = q.shape[1] != k.shape[1]
    if t == s:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    else:
        mask = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t) if t > 1 else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return out.transpose(1, 2)  # [B, T, H, D]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv 2002.05202)."""
    return F.silu(gate) * up
