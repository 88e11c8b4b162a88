"""The operations of models/ops.py for CPUs in eager mode, where memory bandwidth limits a step: they process blocks that fit in a cache,
compute in fp32 within a block, and write each result once.

Letters as in models/ops.py; G = H / K query heads per key head; P and t are a block's share of B * K and of T."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

_BLOCK_ELEMENTS = 1 << 18  # fp32 elements of a block of rows: 1 MiB, in the second-level caches of two cores
_SCORE_BYTES = 1 << 20  # size of a block's attention scores
_QUERY_BLOCK = 128  # queries of a block; smaller blocks skip more of the masked half, larger ones need fewer calls


def _row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Yields slices of `rows` for blocks of about _BLOCK_ELEMENTS elements."""
    step = max(1, _BLOCK_ELEMENTS // max(1, width))
    return (slice(start, start + step) for start in range(0, rows, step))


class BlockedCausalAttention(Function):
    """Exact attention by blocks of queries; the backward recomputes the probabilities. Scores are rounded to q's dtype, the softmax is in
    fp32. Heads that share a key head are rows of one matmul, so that keys and values are not repeated."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return cast(Tensor, CPU_ATTENTION(q, k, v))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = ctx.saved_tensors
        heads = _Heads(q, k, v)
        grad_out = grad_out.reshape(heads.q.shape)
        grad_q = torch.empty_like(heads.q)  # [B * K, G, T, D]
        grad_k = torch.zeros_like(heads.k, dtype=torch.float32)  # [B * K, S, D]; each block of queries adds to it
        grad_v = torch.zeros_like(grad_k)
        for part, rows, seen in heads.blocks():
            queries = heads.q[part, :, rows].flatten(1, 2)  # [P, G * t, D]
            grads = grad_out[part, :, rows].flatten(1, 2)  # [P, G * t, D]
            weights = heads.probabilities(queries, part, seen)  # [P, G * t, seen]
            grad_v[part, :seen] += weights.transpose(1, 2) @ grads
            grad_weights = grads @ heads.v[part, :seen].transpose(1, 2)
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, q.dtype)
            grad_k[part, :seen] += _scaled_bmm(grad_scores.transpose(1, 2), queries, heads.scale)
            grad_q[part, :, rows] = heads.split_heads(_scaled_bmm(grad_scores, heads.k[part, :seen], heads.scale))
        return grad_q.view(q.shape), grad_k.view(k.shape).to(k.dtype), grad_v.view(v.shape).to(v.dtype)


def attention_forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns attention [B, H, T, D] of q [B, H, T, D], k and v [B, K, S, D]."""
    heads = _Heads(q, k, v)
    out = torch.empty_like(heads.q)  # [B * K, G, T, D]
    for part, rows, seen in heads.blocks():
        weights = heads.probabilities(heads.q[part, :, rows].flatten(1, 2), part, seen)
        out[part, :, rows] = heads.split_heads(weights @ heads.v[part, :seen])
    return out.view(q.shape)


# A custom operation, so that activation checkpointing keeps its result instead of those of the matmuls inside.
_LIBRARY = torch.library.Library("pharos", "DEF")
_LIBRARY.define("causal_attention(Tensor q, Tensor k, Tensor v) -> Tensor")
_LIBRARY.impl("causal_attention", attention_forward, "CPU")
_LIBRARY.impl("causal_attention", lambda q, k, v: torch.empty_like(q), "Meta")  # shape inference
CPU_ATTENTION = torch.ops.pharos.causal_attention.default


class _Heads:
    """q, k, v of one attention call with B and K as one batch dim, and the iteration over their blocks."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        batch, n_kv_heads, n_keys, width = k.shape
        self.q = q.reshape(batch * n_kv_heads, -1, q.shape[2], width)  # [B * K, G, T, D]
        self.k, self.v = k.reshape(-1, n_keys, width), v.reshape(-1, n_keys, width)  # [B * K, S, D]
        self.scale = width**-0.5
        self.mask = q.new_full((_QUERY_BLOCK, _QUERY_BLOCK), -math.inf).triu_(1)

    def blocks(self) -> Iterator[tuple[slice, slice, int]]:
        """Yields (slice of B * K, slice of queries, number of keys of the last query), with about _SCORE_BYTES of scores each."""
        n_heads, group, n_queries, _ = self.q.shape
        n_keys = self.k.shape[1]
        step = max(1, _SCORE_BYTES // max(1, group * _QUERY_BLOCK * n_keys * self.q.element_size()))
        for first in range(0, n_heads, step):
            for start in range(0, n_queries, _QUERY_BLOCK):
                end = min(start + _QUERY_BLOCK, n_queries)
                yield slice(first, first + step), slice(start, end), n_keys - n_queries + end

    def split_heads(self, x: Tensor) -> Tensor:
        """Reshapes x [P, G * t, ...] to [P, G, t, ...]: the queries of all heads of a group are rows of one matmul."""
        return x.view(x.shape[0], self.q.shape[1], -1, x.shape[-1])

    def probabilities(self, queries: Tensor, part: slice, seen: int) -> Tensor:
        """Returns the softmax of the scores of queries [P, G * t, D] on the first `seen` keys, [P, G * t, seen]; causal in the last t."""
        scores = _scaled_bmm(queries, self.k[part, :seen].transpose(1, 2), self.scale)
        by_head = self.split_heads(scores)  # [P, G, t, seen]
        size = by_head.shape[2]
        by_head[..., seen - size :].add_(self.mask[:size, :size])
        return torch.softmax(scores, -1)


def _scaled_bmm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns scale * (a @ b), scaled before rounding."""
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)


class BlockedRMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = weight.numel()
        rows, weight32 = x.reshape(-1, width), weight.float()
        out = torch.empty_like(rows)
        inverse = torch.empty(rows.shape[0], 1)  # [N, 1] fp32: 1 / root mean square of a row
        for part in _row_blocks(*rows.shape):
            block = rows[part].float()
            mean_square = torch.linalg.vector_norm(block, dim=-1, keepdim=True).square_().div_(width)
            inverse[part] = mean_square.add_(eps).rsqrt_()
            out[part] = block.mul(inverse[part]).mul_(weight32)
        ctx.save_for_backward(x, weight, inverse)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        width = weight.numel()
        rows, grads, weight32 = x.reshape(-1, width), grad_out.reshape(-1, width), weight.float()
        grad_x, grad_weight = torch.empty_like(rows), torch.zeros(width)
        for part in _row_blocks(*rows.shape):
            # copies, since `float()` returns fp32 tensors themselves
            unit, grad = (x[part].to(torch.float32, copy=True) for x in (rows, grads))
            unit.mul_(inverse[part])
            product = grad * unit
            grad_weight += product.sum(0)
            slope = torch.mv(product, weight32).div_(-width).unsqueeze(-1)  # the gradient's component along the row
            grad_x[part] = grad.mul_(weight32).addcmul_(unit, slope).mul_(inverse[part])
        return grad_x.view(x.shape), grad_weight.to(weight.dtype), None


class BlockedCrossEntropySum(Function):
    """Computes the gradient with the loss, while the softmax of the rows is in cache; the backward only scales it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float32)
        grad = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for part in _row_blocks(*logits.shape):
            block = logits[part].float()
            valid = labels[part].ne(ignore_index).unsqueeze(-1)  # [n, 1]
            label = labels[part].unsqueeze(-1).where(valid, 0)
            weights = torch.softmax(block, -1)
            # log of the denominator, from the largest weight, which is at least 1 / V; others may underflow
            log_sum = block.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
            total += (log_sum - block.gather(-1, label)).where(valid, 0.0).sum()
            if grad is not None:
                weights.scatter_add_(-1, label, weights.new_full(label.shape, -1.0))
                grad[part] = weights.mul_(valid.float())
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = ctx.saved_tensors
        return grad if grad_total == 1 else grad * grad_total.to(grad.dtype), None, None
