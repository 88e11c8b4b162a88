"""Values and gradients of models/ops.py against the plain formulas in fp64, at sizes that no block divides."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from models import cpu_kernels, ops

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}  # relative error of a whole tensor, in its norm
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)
Formula = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.shape[-1])
    later = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(1 + k.shape[1] - q.shape[1])
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(later, -math.inf).softmax(-1), v)


def naive_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def naive_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    rows, columns = logits.flatten(0, -2), labels.view(-1, 1).clamp(min=0)
    return (rows.logsumexp(-1) - rows.gather(1, columns).squeeze(1))[labels.flatten() >= 0].sum()


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return ops.cross_entropy_sum(logits, labels, -100)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return ops.rms_norm(x, weight, 1e-5)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    """Returns values that `dtype` represents exactly, so that the reference starts from the same numbers."""
    return torch.randn(shape).to(dtype)


def heads(b: int, t: int, s: int, h: int, k: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    return [random(b, t, h, d, dtype=dtype), random(b, s, k, d, dtype=dtype), random(b, s, k, d, dtype=dtype)]


def assert_like(ours: Formula, naive: Formula, inputs: list[Tensor], *extra: Tensor) -> None:
    """Checks values and gradients against the fp64 formula within rounding; inputs stay unchanged; the same without gradients."""
    dtype = inputs[0].dtype
    leaves = [x.clone().requires_grad_() for x in inputs]
    exact_leaves = [x.double().requires_grad_() for x in inputs]
    out, exact = ours(*leaves, *extra), naive(*exact_leaves, *extra)
    assert out.shape == exact.shape
    grad_out = random(*exact.shape, dtype=out.dtype)
    grads = torch.autograd.grad(out, leaves, grad_out)
    exact_grads = torch.autograd.grad(exact, exact_leaves, grad_out.double())
    for got, want in zip((out, *grads), (exact, *exact_grads), strict=True):
        assert (got.double() - want).norm() <= ROUNDING[dtype] * (want.norm() + 1e-3)
    assert [grad.dtype for grad in grads] == [dtype] * len(grads)
    assert all(torch.equal(leaf, x) for leaf, x in zip(leaves, inputs, strict=True))
    with torch.no_grad():
        assert torch.equal(ours(*inputs, *extra), out)


@DTYPES
@pytest.mark.parametrize(
    "b, t, h, k, d",
    [
        (1, 1, 1, 1, 2),
        (2, 5, 4, 2, 8),
        (1, 127, 2, 2, 16),
        (3, 128, 3, 1, 6),
        (2, 129, 8, 4, 32),
        (5, 260, 6, 2, 10),
        (4, 300, 12, 6, 4),
    ],  # the last: three key heads of 24 at once
)
def test_attention(b: int, t: int, h: int, k: int, d: int, dtype: torch.dtype) -> None:
    assert_like(ops.causal_attention, naive_attention, heads(b, t, t, h, k, d, dtype))


def test_attention_of_large_scores_is_finite() -> None:
    q, k, v = [x.requires_grad_() for x in heads(1, 140, 140, 2, 1, 8, torch.float32)]
    out = ops.causal_attention(q * 100, k * 100, v)
    torch.testing.assert_close(out, naive_attention(q * 100, k * 100, v))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_attention_does_not_look_ahead() -> None:
    q, k, v = heads(1, 200, 200, 4, 2, 8, torch.float32)
    before = ops.causal_attention(q, k, v)
    k[:, 150:], v[:, 150:] = 9.0, 9.0
    after = ops.causal_attention(q, k, v)
    assert torch.equal(before[:, :150], after[:, :150]) and not torch.equal(before[:, 150:], after[:, 150:])


@DTYPES
@pytest.mark.parametrize("t, s", [(1, 37), (3, 37), (150, 290), (128, 1030)])
def test_attention_of_the_last_tokens(t: int, s: int, dtype: torch.dtype) -> None:
    assert_like(ops.causal_attention, naive_attention, heads(2, t, s, 4, 2, 8, dtype))


def test_attention_of_the_last_tokens_takes_no_memory_for_a_mask() -> None:
    t, s, sizes = 1024, 2048, list[int]()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = op(*args, **(kwargs or {}))
            sizes.append(out.numel() if isinstance(out, Tensor) else 0)
            return out

    q, k, v = heads(1, t, s, 1, 1, 8, torch.float32)
    with Sizes():
        ops.causal_attention(q, k, v)  # one operation to those who watch from outside
        cpu_kernels.attention_forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # and what is in it
    assert 0 < max(sizes) < t * s / 4


def test_flash_attention_is_given_no_mask_where_it_aligns_the_last_rows_itself() -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    assert [ops.aligns_last_rows("cuda", dtype, 64) for dtype in dtypes] == [True, True, False]
    assert not any(ops.aligns_last_rows("cpu", dtype, 64) for dtype in dtypes)
    # the kernel refuses them
    assert not any(ops.aligns_last_rows("cuda", torch.bfloat16, width) for width in (36, 264))


def test_a_compiled_block_attends_with_the_last_tokens_by_a_mask() -> None:
    q, k, v = heads(2, 3, 37, 4, 2, 8, torch.float32)
    compiled = torch.compile(ops.causal_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), naive_attention(q, k, v))


def test_a_compiled_block_traces_attention_over_the_last_rows_as_on_cuda() -> None:
    """Compiles on meta tensors, as one graph, with the compiler's limits. The mark of torch.nn.attention.bias cannot be traced."""
    q, k, v = (x.to("meta") for x in heads(2, 4, 16, 4, 2, 8, torch.bfloat16))
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    out = torch.compile(ops.causal_attention, backend=backend, fullgraph=True)(q, k, v)
    assert out.shape == q.shape and len(graphs) == 1
    assert "_scaled_dot_product_flash_attention" in graphs[0].code


def naive_document_attention(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor) -> Tensor:
    """Attention of each document by itself, for T = S."""
    out = torch.empty_like(q)
    for row, starts in enumerate(document_starts):
        for start in starts.unique().tolist():
            here = (slice(row, row + 1), starts == start)
            out[here] = naive_attention(q[here], k[here], v[here])
    return out


def documents(b: int, t: int, share: float) -> Tensor:
    """Returns starts [B, T] of documents of random lengths, 1 / share on average; the first sequence is one document."""
    begins = torch.rand(b, t) < share
    begins[0] = False
    return torch.arange(t).where(begins, 0).cummax(1).values


@DTYPES
@pytest.mark.parametrize(
    "b, t, h, k, d, share",
    [(2, 1, 2, 1, 8, 0.5), (3, 7, 4, 2, 8, 1.0), (4, 300, 4, 2, 16, 0.05), (2, 1100, 2, 1, 8, 0.005)],
)
def test_attention_of_documents(b: int, t: int, h: int, k: int, d: int, share: float, dtype: torch.dtype) -> None:
    starts = documents(b, t, share)
    assert_like(ops.causal_attention, naive_document_attention, heads(b, t, t, h, k, d, dtype), starts)


@pytest.mark.parametrize("t, s", [(3, 37), (150, 290), (128, 640)])
def test_attention_of_the_last_tokens_of_documents(t: int, s: int) -> None:
    q, k, v = heads(3, s, s, 4, 2, 8, torch.float32)
    starts = documents(3, s, 0.02)
    want = ops.causal_attention(q, k, v, starts)[:, -t:]
    torch.testing.assert_close(ops.causal_attention(q[:, -t:], k, v, starts[:, -t:]), want)
    compiled = torch.compile(ops.causal_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q[:, -t:], k, v, starts[:, -t:]), want)


@pytest.mark.parametrize("t, s", [(37, 37), (300, 300), (150, 290), (128, 640)])
def test_flex_attention_of_documents_gives_the_same(t: int, s: int) -> None:
    """The GPU trace, run on the CPU, where torch has only the forward; for the backward see tests/gpu/test_attention.py."""
    q, k, v = heads(3, t, s, 4, 2, 16, torch.float32)
    places = documents(3, s, 0.02)[:, -t:], torch.arange(s - t, s), torch.arange(s)
    flex = torch.compile(ops.flex_attention, backend="eager", fullgraph=True)
    out, more = flex(*(x.transpose(1, 2) for x in (q, k, v)), *places, return_aux=AuxRequest(lse=True))
    torch.testing.assert_close(out.transpose(1, 2), ops.causal_attention(q, k, v, places[0]))
    torch.testing.assert_close(more.lse.transpose(1, 2), ops.attention_to_part(q, k, v, *places)[1])
    mask = ops.block_mask(*places)
    theirs = create_block_mask(mask.mask_mod, 3, None, t, s, device="cpu")
    assert torch.equal(mask.to_dense(), theirs.to_dense())
    assert torch.equal(mask.full_kv_num_blocks, theirs.full_kv_num_blocks)


def test_attention_to_parts_adds_up_to_the_whole() -> None:
    """Keys in two parts, of which some queries see nothing."""
    q, k, v = heads(2, 20, 20, 4, 2, 8, torch.float32)
    leaves, starts, places = [x.requires_grad_() for x in (q, k, v)], documents(2, 20, 0.2), torch.arange(20)

    def in_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [ops.attention_to_part(q, k[:, at], v[:, at], starts, places, at) for at in (places[:9], places[9:])]
        total = torch.logaddexp(parts[0][1], parts[1][1])
        return sum((out * (log_sum - total).exp()[..., None] for out, log_sum in parts), torch.zeros(()))

    grad_out = torch.randn_like(q)
    outs = in_parts(*leaves), ops.causal_attention(*leaves, starts)
    got, want = ([out, *torch.autograd.grad(out, leaves, grad_out)] for out in outs)
    torch.testing.assert_close(got, want)


def test_documents_take_less_time_to_compute() -> None:
    """Time is taken as proportional to the number of computed scores."""
    sizes = dict[bool, int]()
    q, k, v = (x.transpose(1, 2) for x in heads(1, 1024, 1024, 1, 1, 8, torch.float32))
    for starts in (None, documents(2, 1024, 1 / 32)[1:]):
        made = 0

        class Scores(TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                nonlocal made
                out = op(*args, **(kwargs or {}))
                made += out.numel() if op is torch.ops.aten._softmax.default else 0
                return out

        with Scores():
            cpu_kernels.attention_forward(q, k, v, starts)
        sizes[starts is None] = made
    assert 0 < sizes[False] < sizes[True] / 2


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (3, 5, 256), (2, 300, 257)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_like(rms_norm, naive_rms_norm, [random(*shape, dtype=dtype) * 3, random(shape[-1], dtype=dtype)])


def test_rms_norm_of_a_strided_input_and_of_zeros() -> None:
    x = random(300, 6, 64, dtype=torch.float32).transpose(0, 1)
    assert_like(rms_norm, naive_rms_norm, [x, random(64, dtype=torch.float32)])
    assert torch.equal(ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5), torch.zeros(2, 8))


@DTYPES
def test_rope_turns_pairs_and_keeps_relative_angles(dtype: torch.dtype) -> None:
    angles = torch.outer(torch.arange(9.0), torch.tensor([1.0, 0.3, 0.01]))  # [T, D/2]
    freqs_cis = torch.stack((angles.cos(), angles.sin()), -1)

    def naive(x: Tensor) -> Tensor:
        even, odd, cos, sin = x[..., 0::2], x[..., 1::2], *freqs_cis.double().unsqueeze(1).unbind(-1)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    assert_like(lambda x: ops.rope(x, freqs_cis), naive, [random(2, 9, 3, 6, dtype=dtype)])
    strided = random(2, 3, 9, 6, dtype=dtype).transpose(1, 2)
    assert_like(lambda x: ops.rope(x, freqs_cis), naive, [strided])
    same = random(1, 1, 1, 6, dtype=torch.float32).expand(1, 9, 1, 6)
    turned = ops.rope(same, freqs_cis).flatten(1)
    products = (turned.view(9, 6)[1:] * turned.view(9, 6)[:-1]).sum(-1)
    assert all(abs(a - b) < 1e-4 for a, b in pairwise(products.tolist()))


@DTYPES
@pytest.mark.parametrize("n, vocab", [(1, 1), (5, 3), (131, 2048), (700, 259)])
def test_cross_entropy(n: int, vocab: int, dtype: torch.dtype) -> None:
    labels = torch.randint(0, vocab, (1, n))
    labels[0, ::3] = -100
    assert_like(cross_entropy, naive_cross_entropy, [random(1, n, vocab, dtype=dtype) * 3], labels)


def test_cross_entropy_of_an_impossible_label_is_finite_and_exact() -> None:
    logits = torch.tensor([[0.0, 300.0], [0.0, -300.0]])  # the softmax of the first row's label is zero in fp32
    assert ops.cross_entropy_sum(logits, torch.tensor([0, 0]), -100) == 300.0


def test_cross_entropy_without_a_label_is_zero_with_zero_gradient() -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = ops.cross_entropy_sum(logits, torch.full((2, 3), -100), -100)
    (grad,) = torch.autograd.grad(loss, logits)
    assert loss == 0 and torch.equal(grad, torch.zeros(2, 3, 5))


def test_cross_entropy_refuses_a_label_outside_the_vocabulary() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        ops.cross_entropy_sum(torch.zeros(2, 4), torch.tensor([1, 4]), -100)


def test_cross_entropy_tells_of_logits_that_are_not_finite() -> None:
    assert ops.cross_entropy_sum(torch.tensor([[0.0, math.nan]]), torch.tensor([0]), -100).isnan()


@settings(max_examples=25, deadline=None, derandomize=True)  # in bf16 a few of thousands cancel to nothing but rounding
@given(*[st.integers(1, most) for most in (3, 150, 3, 3, 9)], st.sampled_from(list(ROUNDING)))
def test_attention_of_any_shape(b: int, t: int, k: int, group: int, d: int, dtype: torch.dtype) -> None:
    assert_like(ops.causal_attention, naive_attention, heads(b, t, t, k * group, k, d, dtype))


def test_compiled_is_one_graph_and_gives_the_same() -> None:
    def block(x: Tensor, weight: Tensor, freqs_cis: Tensor, labels: Tensor) -> Tensor:
        h = ops.rope(ops.rms_norm(x, weight, 1e-5).view(2, 11, 4, 8), freqs_cis)
        h = ops.causal_attention(h, h[:, :, :2], h[:, :, :2]).flatten(-2)
        return ops.cross_entropy_sum(F.silu(h) * h, labels, -100)

    x, weight = torch.randn(2, 11, 32, requires_grad=True), torch.randn(32, requires_grad=True)
    angles = torch.randn(11, 4)
    extra = torch.stack((angles.cos(), angles.sin()), -1), torch.randint(0, 32, (2, 11))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    losses = [f(x, weight, *extra) for f in (block, compiled)]
    grads = [torch.autograd.grad(loss, (x, weight)) for loss in losses]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_meta_tensors_pass() -> None:
    x = torch.empty(2, 7, 4, 8, device="meta")
    assert ops.causal_attention(x, x, x).shape == x.shape
    assert F.linear(ops.rms_norm(x, x.new_empty(8), 1e-5), x.new_empty(3, 8)).shape == (2, 7, 4, 3)
