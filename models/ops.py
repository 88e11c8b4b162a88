"""The arithmetic of a transformer block and of its loss, as functions of tensors; models/llama.py is built on them.

Each function is one formula with one contract on every device. CUDA, DTensors and anything under `torch.compile` take
torch's own kernels, which fuse. On a CPU in eager mode a step waits for memory more than for arithmetic: there the same
formula walks over blocks that stay in a core's cache, in fp32 inside a block, and writes each result once. `_in_blocks`
is the one place that chooses.

Matrix products take bf16 and accumulate in fp32; norms, rotations, softmax and loss compute in fp32 and round once.

Letters: B batch, T tokens, S tokens of keys and values, C width, H query heads, K key/value heads, G = H / K query
heads of one key head, D head dim, F feed-forward width, N rows (tokens of the whole batch), V vocabulary; P and t are
a block's part of B * K and of T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

_BLOCK_ELEMENTS = 1 << 18  # fp32 elements of a block of rows: 1 MiB, in the second-level caches of two cores
_SCORE_BYTES = 1 << 20  # attention scores of a block
_QUERY_BLOCK = 128  # queries of a block; fewer skip more of the masked half, more take fewer calls
_BLOCKS_UP_TO = 1024  # tokens; with more, torch's own attention on a CPU is as fast where it needs no mask


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in fp32, rounded to x's dtype.

    Zhang and Sennrich 2019, arXiv 1910.07467.
    """
    if _in_blocks(x):
        return _apply(_RMSNorm, x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Turns each pair (x[2i], x[2i+1]) of x [B, T, H, D] by its position's angle, in fp32.

    freqs_cis [T, D/2, 2] fp32 holds (cos, sin). Returned in x's dtype. RoFormer, Su et al. 2021, arXiv 2104.09864.
    """
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)  # [B, T, H, D/2, 2]
    freqs_cis = freqs_cis.unsqueeze(1)  # [T, 1, D/2, 2]
    if torch.compiler.is_compiling():  # the compiler fuses real arithmetic only
        (even, odd), (cos, sin) = pairs.unbind(-1), freqs_cis.unbind(-1)
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(freqs_cis))
    return turned.flatten(-2).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v -> [B, T, H, D] with q [B, T, H, D], k and v [B, S, K, D]; H is a multiple of K.

    The T queries are the last T of the S positions (S > T when keys come from a cache, or when other ranks hold the
    queries before); each sees itself and what is before it. Query head h reads key head h // (H / K). Memory is linear
    in T and S, except where a kernel must be given a mask [T, S]: S > T compiled for a CPU, or in fp32 on CUDA.
    """
    t, s = q.shape[1], k.shape[1]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, D], [B, K, S, D]
    grouped = q.shape[1] != k.shape[1]
    if (t == s <= _BLOCKS_UP_TO or 1 < t < s) and _in_blocks(q):
        out = _apply(_CausalAttention, q, k, v)
    elif t == s:
        # On Hopper and Blackwell torch itself tries cuDNN's attention first, the fastest there, from cuDNN 9.15.1 on, which the wheels of
        # torch 2.11 for CUDA 13 have: check_prefer_cudnn_attention and priority_order, from line 78 of
        # aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. Else flash is first: older ones fail for lengths that are no multiple
        # of 128, and an order that is set here (torch.nn.attention.sdpa_kernel) would overrule that guard.
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    elif t > 1 and aligns_last_rows(q.device.type, q.dtype, q.shape[-1]):
        out = _flash_last_rows(q, k, v)
    else:
        mask = None if t == 1 else _last_rows(t, s, q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return out.transpose(1, 2)  # [B, T, H, D]


def aligns_last_rows(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """True where flash attention takes T < S queries as the last T of S positions, without a mask. Called by its name, it pads no head."""
    kernel = head_dim % 8 == 0 and head_dim <= 256
    return device_type != "cpu" and dtype in (torch.bfloat16, torch.float16) and kernel


def _flash_last_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The operator that torch.nn.attention.bias.causal_lower_right ends in; its tensor subclass cannot be made inside a compiled graph."""
    result: tuple[Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    return result[0]


def _last_rows(t: int, s: int, device: torch.device) -> Tensor:
    """The last t rows of the causal mask [s, s]."""
    return torch.ones(t, s, dtype=torch.bool, device=device).tril(s - t)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020, arXiv 2002.05202)."""
    return F.silu(gate) * up


def cross_entropy_sum(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Sum of -log softmax(logits)[label] over the labels that are not `ignore_index`, fp32 scalar.

    logits [..., V] of any float dtype, labels [...] int64. The upcast to fp32 is in here: no fp32 copy of the logits
    outlives a block (eager, CPU) or exists at all (compiled).
    """
    logits, labels = logits.flatten(0, -2), labels.flatten()  # [N, V], [N]
    if _in_blocks(logits):
        return _apply(_CrossEntropySum, logits, labels, ignore_index)
    return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=ignore_index)


def cross_entropy_sum_of_part(
    logits: Tensor, labels: Tensor, ignore_index: int, *, first: int, gather: Callable[[Tensor], Tensor]
) -> Tensor:
    """cross_entropy_sum of a vocabulary that is cut over ranks, the same on each, with the gradient of this rank's logits.

    logits [..., V of this rank] of the tokens `first`, `first` + 1, ...; `gather` stacks the values of all ranks along a new
    dim 0. A label that no rank holds makes the loss infinite.
    """
    logits, labels = logits.flatten(0, -2).float(), labels.flatten()  # [N, V], [N]
    valid, column = labels != ignore_index, labels - first
    here = (column >= 0) & (column < logits.shape[-1])
    log_sum = logits.logsumexp(-1)  # [N], of this part
    target = logits.gather(-1, column.where(here, 0).unsqueeze(-1)).squeeze(-1)  # [N]
    with torch.no_grad():
        log_sums, targets = gather(torch.stack((log_sum, target.where(here, -math.inf)))).unbind(1)  # [ranks, N] each
        total_log_sum = log_sums.logsumexp(0)
        loss = (total_log_sum - targets.amax(0)).where(valid, 0.0).sum()
        share = (log_sum - total_log_sum).exp()  # of this part in the softmax's sum
    # The loss's slope in these logits: d log(sum of all) is a part's share of d log(sum of the part). Its value is taken off again.
    slope = (share * log_sum - target.where(here, 0.0)).where(valid, 0.0).sum()
    return loss + (slope - slope.detach())


def _in_blocks(x: Tensor) -> bool:
    """True when attention walks in blocks: plain CPU tensors in eager mode (a DTensor knows torch's operations only)."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu" and type(x) in _PLAIN


_PLAIN: set[type] = {Tensor, nn.Parameter}


@contextmanager
def walking(kind: type[Tensor]) -> Iterator[None]:
    """In here tensors of this type walk in blocks too: those without memory, which stand for a CPU's (train.py --explain)."""
    _PLAIN.add(kind)
    try:
        yield
    finally:
        _PLAIN.remove(kind)


def _apply(function: type[Function], *args: Any) -> Tensor:
    return cast(Tensor, function.apply(*args))


def _wide_copy(x: Tensor) -> Tensor:
    """An fp32 copy to work in; `float()` would hand back x itself where x is fp32."""
    return x.to(torch.float32, copy=True)


def _row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices over `rows` whose blocks hold about _BLOCK_ELEMENTS elements."""
    step = max(1, _BLOCK_ELEMENTS // max(1, width))
    return (slice(start, start + step) for start in range(0, rows, step))


class _CausalAttention(Function):
    """Exact attention by blocks of queries. The backward computes the probabilities again.

    The scores leave the product rounded to q's dtype, as in any unfused attention; their softmax is in fp32. Heads that
    share a key head are rows of one product, so keys and values are never repeated.
    """

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
        grad_k = torch.zeros_like(
            heads.k, dtype=torch.float32
        )  # [B * K, S, D], fp32 since each block of queries adds to it
        grad_v = torch.zeros_like(grad_k)
        for part, rows, seen in heads.blocks():
            queries = heads.q[part, :, rows].flatten(1, 2)  # [P, G * t, D]
            grads = grad_out[part, :, rows].flatten(1, 2)  # [P, G * t, D]
            weights = heads.probabilities(queries, part, seen)  # [P, G * t, seen]
            grad_v[part, :seen] += weights.transpose(1, 2) @ grads
            grad_weights = grads @ heads.v[part, :seen].transpose(1, 2)
            grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, q.dtype)
            grad_k[part, :seen] += _scaled_bmm(grad_scores.transpose(1, 2), queries, heads.scale)
            grad_q[part, :, rows] = heads.unrows(_scaled_bmm(grad_scores, heads.k[part, :seen], heads.scale))
        return grad_q.view(q.shape), grad_k.view(k.shape).to(k.dtype), grad_v.view(v.shape).to(v.dtype)


def _attention_forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, H, T, D], k and v [B, K, S, D] -> [B, H, T, D]."""
    heads = _Heads(q, k, v)
    out = torch.empty_like(heads.q)  # [B * K, G, T, D]
    for part, rows, seen in heads.blocks():
        weights = heads.probabilities(heads.q[part, :, rows].flatten(1, 2), part, seen)
        out[part, :, rows] = heads.unrows(weights @ heads.v[part, :seen])
    return out.view(q.shape)


# An operation of its own, so that activation checkpointing sees one result to keep and not the products inside.
_LIBRARY = torch.library.Library("pharos", "DEF")
_LIBRARY.define("causal_attention(Tensor q, Tensor k, Tensor v) -> Tensor")
_LIBRARY.impl("causal_attention", _attention_forward, "CPU")
_LIBRARY.impl("causal_attention", lambda q, k, v: torch.empty_like(q), "Meta")  # tensors without memory
CPU_ATTENTION = torch.ops.pharos.causal_attention.default


class _Heads:
    """q, k, v of one attention call with B and K as one batch dim, and the walk over their blocks."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        batch, n_kv_heads, n_keys, width = k.shape
        self.q = q.reshape(batch * n_kv_heads, -1, q.shape[2], width)  # [B * K, G, T, D]
        self.k, self.v = k.reshape(-1, n_keys, width), v.reshape(-1, n_keys, width)  # [B * K, S, D]
        self.scale = width**-0.5
        self.mask = q.new_full((_QUERY_BLOCK, _QUERY_BLOCK), -math.inf).triu_(1)

    def blocks(self) -> Iterator[tuple[slice, slice, int]]:
        """(some of B * K, some queries, how many keys the last of them sees), each block with about _SCORE_BYTES of scores."""
        n_heads, group, n_queries, _ = self.q.shape
        n_keys = self.k.shape[1]
        step = max(1, _SCORE_BYTES // max(1, group * _QUERY_BLOCK * n_keys * self.q.element_size()))
        for first in range(0, n_heads, step):
            for start in range(0, n_queries, _QUERY_BLOCK):
                end = min(start + _QUERY_BLOCK, n_queries)
                yield slice(first, first + step), slice(start, end), n_keys - n_queries + end

    def unrows(self, x: Tensor) -> Tensor:
        """x [P, G * t, ...] -> [P, G, t, ...]: the block's queries of all heads of a group are the rows of one product."""
        return x.view(x.shape[0], self.q.shape[1], -1, x.shape[-1])

    def probabilities(self, queries: Tensor, part: slice, seen: int) -> Tensor:
        """queries [P, G * t, D] -> softmax of their scores on the first `seen` keys, [P, G * t, seen]; the last t are causal."""
        scores = _scaled_bmm(queries, self.k[part, :seen].transpose(1, 2), self.scale)
        by_head = self.unrows(scores)  # [P, G, t, seen]
        size = by_head.shape[2]
        by_head[..., seen - size :].add_(self.mask[:size, :size])
        return torch.softmax(scores, -1)


def _scaled_bmm(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * (a @ b), scaled before the product is rounded."""
    return torch.baddbmm(a.new_empty(()), a, b, beta=0, alpha=scale)


class _RMSNorm(Function):
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
            unit, grad = _wide_copy(rows[part]).mul_(inverse[part]), _wide_copy(grads[part])
            product = grad * unit
            grad_weight += product.sum(0)
            slope = torch.mv(product, weight32).div_(-width).unsqueeze(-1)  # the part of the gradient along the row
            grad_x[part] = grad.mul_(weight32).addcmul_(unit, slope).mul_(inverse[part])
        return grad_x.view(x.shape), grad_weight.to(weight.dtype), None


class _CrossEntropySum(Function):
    """The gradient is made with the loss, while the row's softmax is in cache; the backward only scales it."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float32)
        grad = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        for part in _row_blocks(*logits.shape):
            block = logits[part].float()
            valid = labels[part].ne(ignore_index).unsqueeze(-1)  # [n, 1]
            label = labels[part].unsqueeze(-1).where(valid, 0)
            weights = torch.softmax(block, -1)
            # log of the softmax's sum, from the largest weight: that one is at least 1 / V, where others may be zero
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
