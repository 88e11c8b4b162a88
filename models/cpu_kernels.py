"""The operations of models/ops.py for CPUs in eager mode, where memory bandwidth limits a step: they process blocks that fit in a cache,
compute in fp32 within a block, and write each result once.

Letters as in models/ops.py; G = H / K query heads per key head; P and t are a block's share of B * K and of T."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

_BLOCK_ELEMENTS = 1 << 18  # fp32 elements of a block of rows: 1 MiB, in the second-level caches of two cores
_SCORE_BYTES = 1 << 22  # of a block's attention scores; with 1 MiB there are more calls, and a step takes 6 % longer
_QUERY_BLOCK = 128  # queries of a block; smaller blocks skip more of the masked half, larger ones need fewer calls


def _row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Yields slices of `rows` for blocks of about _BLOCK_ELEMENTS elements."""
    step = max(1, _BLOCK_ELEMENTS // max(1, width))
    return (slice(start, start + step) for start in range(0, rows, step))


class Fp32GradEmbedding(Function):
    """Adds up the gradients of a row in fp32. torch adds them up in the weight's dtype: a sum in bf16 stops growing after some hundred."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[None, Tensor]:
        grad = torch.ops.aten.embedding_dense_backward(grad_out.float(), *ctx.saved_tensors, ctx.rows, -1, False)
        return None, grad.to(grad_out.dtype)


class BlockedCausalAttention(Function):
    """Exact attention by blocks of queries; the backward recomputes the probabilities. Scores are rounded to q's dtype, the softmax is in
    fp32. Heads that share a key head are rows of one matmul, so that keys and values are not repeated."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None) -> Tensor:
        ctx.save_for_backward(q, k, v, document_starts)
        return cast(Tensor, CPU_ATTENTION(q, k, v, document_starts))

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, document_starts = ctx.saved_tensors
        heads = _Heads(q, k, v, document_starts)
        grad_out = grad_out.reshape(heads.q.shape)
        grad_q = torch.empty_like(heads.q)  # [B * K, G, T, D]
        grad_k = torch.zeros_like(heads.k, dtype=torch.float32)  # [B * K, S, D]; each block of queries adds to it
        grad_v = torch.zeros_like(grad_k)
        for part, rows, keys in heads.blocks():
            queries = heads.q[part, :, rows].flatten(1, 2)  # [P, G * t, D]
            grads = grad_out[part, :, rows].flatten(1, 2)  # [P, G * t, D]
            weights = heads.probabilities(queries, part, rows, keys)  # [P, G * t, seen]
            grad_v[part, keys] += weights.transpose(1, 2) @ grads
            grad_weights = grads @ heads.v[part, keys].transpose(1, 2)
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, q.dtype)
            grad_k[part, keys] += _scaled_bmm(grad_scores.transpose(1, 2), queries, heads.scale)
            grad_q[part, :, rows] = heads.split_heads(_scaled_bmm(grad_scores, heads.k[part, keys], heads.scale))
        return grad_q.view(q.shape), grad_k.view(k.shape).to(k.dtype), grad_v.view(v.shape).to(v.dtype), None


def attention_forward(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None) -> Tensor:
    """Returns attention [B, H, T, D] of q [B, H, T, D], k and v [B, K, S, D]; document_starts [B, T]: see ops.causal_attention."""
    heads = _Heads(q, k, v, document_starts)
    out = torch.empty_like(heads.q)  # [B * K, G, T, D]
    for part, rows, keys in heads.blocks():
        weights = heads.probabilities(heads.q[part, :, rows].flatten(1, 2), part, rows, keys)
        out[part, :, rows] = heads.split_heads(weights @ heads.v[part, keys])
    return out.view(q.shape)


def first_keys(document_starts: Tensor, size: int) -> list[list[int]]:
    """Returns, by sequence, the first key that any query of each block of `size` sees; document_starts [B, T] do not decrease. --explain,
    whose tensors have no values, replaces this function by one that returns zeros."""
    return cast(list[list[int]], document_starts[:, ::size].tolist())


# A custom operation, so that activation checkpointing keeps its result instead of those of the matmuls inside.
_LIBRARY = torch.library.Library("pharos", "DEF")
_LIBRARY.define("causal_attention(Tensor q, Tensor k, Tensor v, Tensor? document_starts) -> Tensor")
_LIBRARY.impl("causal_attention", attention_forward, "CPU")
_LIBRARY.impl("causal_attention", lambda q, k, v, document_starts: torch.empty_like(q), "Meta")  # shape inference
CPU_ATTENTION = torch.ops.pharos.causal_attention.default


class _Heads:
    """q, k, v of one attention call with B and K as one batch dim, and the iteration over their blocks."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None) -> None:
        batch, n_kv_heads, n_keys, width = k.shape
        self.q = q.reshape(batch * n_kv_heads, -1, q.shape[2], width)  # [B * K, G, T, D]
        self.k, self.v = k.reshape(-1, n_keys, width), v.reshape(-1, n_keys, width)  # [B * K, S, D]
        self.scale = width**-0.5
        self.mask = q.new_full((_QUERY_BLOCK, _QUERY_BLOCK), -math.inf).triu_(1)
        self.n_kv_heads, self.document_starts = n_kv_heads, document_starts

    def blocks(self) -> Iterator[tuple[slice, slice, slice]]:
        """Yields (slice of B * K, slice of queries, slice of the keys that any of them sees), with about _SCORE_BYTES of scores each; with
        documents, the heads of a block are of one sequence."""
        n_heads, group, n_queries, _ = self.q.shape
        queries = [slice(start, min(start + _QUERY_BLOCK, n_queries)) for start in range(0, n_queries, _QUERY_BLOCK)]
        before, together = self.k.shape[1] - n_queries, n_heads
        firsts = [[0] * len(queries)]
        if self.document_starts is not None:
            firsts, together = first_keys(self.document_starts, _QUERY_BLOCK), self.n_kv_heads
        for sequence, first in enumerate(firsts):
            keys = [slice(key, before + rows.stop) for key, rows in zip(first, queries, strict=True)]
            most = max((each.stop - each.start for each in keys), default=1)
            step = max(1, _SCORE_BYTES // max(1, group * _QUERY_BLOCK * most * self.q.element_size()))
            end = (sequence + 1) * together
            for head in range(sequence * together, end, step):
                for rows, seen in zip(queries, keys, strict=True):
                    yield slice(head, min(head + step, end)), rows, seen

    def split_heads(self, x: Tensor) -> Tensor:
        """Reshapes x [P, G * t, ...] to [P, G, t, ...]: the queries of all heads of a group are rows of one matmul."""
        return x.view(x.shape[0], self.q.shape[1], -1, x.shape[-1])

    def probabilities(self, queries: Tensor, part: slice, rows: slice, keys: slice) -> Tensor:
        """Returns the softmax of the scores of queries [P, G * t, D] on `keys`, [P, G * t, seen]; the last t keys are masked causally."""
        scores = _scaled_bmm(queries, self.k[part, keys].transpose(1, 2), self.scale)
        by_head = self.split_heads(scores)  # [P, G, t, seen]
        size = by_head.shape[2]
        by_head[..., -size:].add_(self.mask[:size, :size])
        if self.document_starts is not None:
            starts = self.document_starts[part.start // self.n_kv_heads, rows]  # [t]
            last = int(starts[-1])  # from there on all queries see the keys before them
            by_head[..., : last - keys.start].masked_fill_(torch.arange(keys.start, last) < starts[:, None], -math.inf)
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
