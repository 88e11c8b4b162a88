"""Operations of a transformer block and of the loss, as functions of tensors.

CUDA, DTensors and compiled code use torch's kernels. CPUs in eager mode use those of models/cpu_kernels.py; `_in_blocks` chooses.
Matmuls accumulate in fp32; norms, rotations, softmax and loss compute in fp32 and round once, as does the gradient of embeddings
on CPUs.

Letters: B batch, T tokens, S tokens of keys and values, C width, H query heads, K key/value heads, D head dim, F feed-forward width, N rows
(tokens of the whole batch), V vocabulary."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from models import cpu_kernels

BLOCKWISE_TYPES: set[type] = {Tensor, nn.Parameter}  # tensor types computed in blocks; --explain adds its own
_BLOCKS_UP_TO = 1024  # tokens; for more, torch's attention on a CPU is as fast, unless it needs a mask


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Returns the rows `ids` of weight [V, C], in its dtype."""
    if weight.device.type == "cpu" and weight.dtype.itemsize < 4 and not torch.compiler.is_compiling():
        return cast(Tensor, cpu_kernels.Fp32GradEmbedding.apply(ids, weight))  # of DTensors, too
    return F.embedding(ids, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight over the last dim, in fp32, rounded to x's dtype (Zhang, Sennrich, arXiv 1910.07467)."""
    if _in_blocks(x):
        return cast(Tensor, cpu_kernels.BlockedRMSNorm.apply(x, weight, eps))
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotates each pair (x[2i], x[2i+1]) of x [B, T, H, D] by its position's angle, in fp32 (RoFormer, Su et al. 2021, arXiv 2104.09864);
    returns x's dtype. freqs_cis [T, D/2, 2], or [B, T, D/2, 2], fp32: (cos, sin)."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)  # [B, T, H, D/2, 2]
    freqs_cis = freqs_cis.unsqueeze(-3)  # [T, 1, D/2, 2], or with B
    if torch.compiler.is_compiling():  # the compiler fuses real arithmetic only
        (even, odd), (cos, sin) = pairs.unbind(-1), freqs_cis.unbind(-1)
        rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    else:
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(freqs_cis))
    return rotated.flatten(-2).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None) -> Tensor:
    """Returns softmax(q k^T / sqrt(D)) v, [B, T, H, D], for q [B, T, H, D], k and v [B, S, K, D]; H is a multiple of K. The T queries are
    the last T of the S positions; each attends to itself and earlier ones. Query head h uses key head h // (H / K). Memory is linear in T
    and S, except for kernels that need a mask [T, S]: S > T, compiled for a CPU or in fp32 on CUDA.

    document_starts [B, T] int64, which do not decrease: for each query the first of the S positions that it attends to, at most its own."""
    t, s = q.shape[1], k.shape[1]
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [B, H, T, D], [B, K, S, D]
    grouped = q.shape[1] != k.shape[1]
    if (document_starts is not None or t == s <= _BLOCKS_UP_TO or 1 < t < s) and _in_blocks(q):
        out = cast(Tensor, cpu_kernels.BlockedCausalAttention.apply(q, k, v, document_starts))
    elif document_starts is not None:
        out = document_attention(q, k, v, document_starts)
    elif t == s:
        # torch chooses the kernel: cuDNN's attention where it is the fastest (Hopper and Blackwell, from cuDNN 9.15.1 on), else flash
        # (priority_order in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp). Setting an order here would bypass its checks.
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    elif t > 1 and aligns_last_rows(q.device.type, q.dtype, q.shape[-1]):
        # As torch.nn.attention.bias.causal_lower_right, whose tensor subclass cannot be created inside a compiled graph
        out = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[0]
    else:
        # The last t rows of the causal mask [s, s]
        mask = None if t == 1 else torch.ones(t, s, dtype=torch.bool, device=q.device).tril(s - t)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return out.transpose(1, 2)  # [B, T, H, D]


def aligns_last_rows(device_type: str, dtype: torch.dtype, head_dim: int) -> bool:
    """Returns True if flash attention supports T < S queries as the last T of S positions without a mask; called directly, the kernel does
    not pad heads."""
    kernel = head_dim % 8 == 0 and head_dim <= 256
    return device_type != "cpu" and dtype in (torch.bfloat16, torch.float16) and kernel


def document_attention(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor) -> Tensor:
    """Computes causal_attention with documents, for tensors with heads first, [B, H, T, D]. On a CPU it needs a mask [B, T, S]. --explain
    replaces it by an attention that saves the same tensors."""
    t, s = q.shape[2], k.shape[2]
    queries, keys = torch.arange(s - t, s, device=q.device), torch.arange(s, device=q.device)
    if q.device.type != "cpu":
        return flex_attention(q, k, v, document_starts, queries, keys)
    mask = _document_mask(document_starts, queries, keys)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def attention_to_part(
    q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor, queries: Tensor, keys: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns attention [B, T, H, D] of q [B, T, H, D] at positions `queries` [T] to k and v [B, S, K, D] at positions `keys` [S], which
    are a part of the sequence, and the logarithm of the softmax's denominator, fp32 [B, T, H], by which the results of parts are added up:
    -inf, or nearly, where a query sees none of the keys."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if q.device.type != "cpu":
        out, more = flex_attention(q, k, v, document_starts, queries, keys, return_aux=flex.AuxRequest(lse=True))
        log_sum = more.lse
    else:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = (q @ k.mT).float() * q.shape[-1] ** -0.5  # [B, H, T, S]
        scores = scores.where(_document_mask(document_starts, queries, keys), torch.finfo(scores.dtype).min)
        out, log_sum = scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)
    return out.transpose(1, 2), log_sum.transpose(1, 2)


def _document_mask(document_starts: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Returns the mask [B, 1, T, S] of document_starts [B, T] and positions [T] and [S]."""
    seen = (keys <= queries[:, None]) & (keys >= document_starts[..., None])  # [B, T, S]
    return seen.unsqueeze(1)


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor, queries: Tensor, keys: Tensor, **options: Any
) -> Any:
    """Computes attention_to_part for tensors with heads first, [B, H, T, D], by torch's FlexAttention, which leaves out blocks of keys that
    no query of a block sees (Dong et al. 2024, arXiv 2412.05496). `options` and the result are those of torch's function."""
    kernel = flex.flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
    mask = block_mask(document_starts, queries, keys)
    return kernel(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1], **options)


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex.flex_attention, dynamic=False)  # not compiled, it holds all scores


def block_mask(document_starts: Tensor, queries: Tensor, keys: Tensor) -> flex.BlockMask:
    """Returns FlexAttention's mask, from the least and largest number in each block of 128: torch's create_block_mask evaluates it for each
    pair of a query and a key."""
    size, beyond = 128, 1 << 40  # F.pad takes a float; this one is exact

    def ends(x: Tensor, padding: int) -> tuple[Tensor, Tensor]:  # [..., n] -> [..., n / size]
        blocks = F.pad(x, (0, -x.shape[-1] % size), value=padding).unflatten(-1, (-1, size))
        return blocks.amin(-1), blocks.amax(-1)

    # padded so that no block with padding counts as full
    (low_query, high_query), (low_key, high_key) = ends(queries, -1), ends(keys, beyond)
    low_start, high_start = (x.unsqueeze(-1) for x in ends(document_starts, beyond))  # [B, T / size, 1]
    some = (low_key <= high_query[:, None]) & (high_key >= low_start)  # [B, T / size, S / size]
    full = (high_key <= low_query[:, None]) & (low_key >= high_start)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Returns how many blocks of keys a block of queries has, and their indices first, [B, 1, T / size, S / size]."""
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1).int().unsqueeze(1), order.int().unsqueeze(1)

    def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (keys[key] <= queries[query]) & (keys[key] >= document_starts[b, query])

    shape = len(queries), len(keys)
    return flex.BlockMask.from_kv_blocks(
        *listed(some & ~full), *listed(full), BLOCK_SIZE=size, mask_mod=sees, seq_lengths=shape
    )


def cross_entropy_sum(logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    """Returns the sum of -log softmax(logits)[label] over labels other than `ignore_index`, fp32 scalar. logits [..., V], any float dtype,
    labels [...] int64. The upcast to fp32 is here, so that compiled, or by blocks on a CPU, no fp32 copy of the logits exists."""
    logits, labels = logits.flatten(0, -2), labels.flatten()  # [N, V], [N]
    if _in_blocks(logits):
        return cast(Tensor, cpu_kernels.BlockedCrossEntropySum.apply(logits, labels, ignore_index))
    return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=ignore_index)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns x[rows of e] @ weight[e]^T for each e, [M, F], in x's dtype: x [M, C], its rows in the order of e, weight [E, F, C], counts
    int64 [E]. CUDA has one kernel for bf16, without a host sync; elsewhere a loop."""
    if x.device.type == "cuda" and x.dtype == torch.bfloat16 and not (x.shape[1] | weight.shape[1]) % 8:
        return grouped_kernel(x, weight, counts)
    [sizes] = host_sizes(counts[None], len(x))
    return torch.cat([F.linear(rows, w) for rows, w in zip(x.split(sizes), weight.unbind(), strict=True)])


def grouped_kernel(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Computes grouped_linear by torch's kernel, which reads counts on the device. Rows of x and weight must be multiples of 16 bytes."""
    return F.grouped_mm(x, weight.mT, offs=counts.cumsum(0).to(torch.int32))


def host_sizes(sizes: Tensor, total: int) -> list[list[int]]:
    """Copies `sizes`, int64 [n, parts], to the host; each row adds up to about `total`. The one device sync of a dispatch, and of each
    grouped_linear without the kernel: --explain, whose tensors have no values, replaces this function by an even division."""
    return cast(list[list[int]], sizes.tolist())


def _in_blocks(x: Tensor) -> bool:
    """Returns True for plain CPU tensors in eager mode (DTensors support only torch's operations)."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu" and type(x) in BLOCKWISE_TYPES
