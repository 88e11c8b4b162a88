"""The loss at the head: in chunks or in vocabulary parts it equals the formula on whole logits, with less memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallelisms.execution import CompileConfig
from parallelisms.loss import head_loss
from training.loss import IGNORED, CrossEntropySum, cross_entropy_sum

B, T, C, V = 3, 11, 8, 61
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}  # relative error of a whole tensor, in its norm


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Returns hidden state, weight and labels: sequences with different numbers of targets, one without any."""
    draws = torch.Generator().manual_seed(0)
    h = torch.randn(B, T, C, generator=draws).to(dtype).requires_grad_()
    weight = torch.randn(V, C, generator=draws).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (B, T), generator=draws)
    labels[0], labels[1, :4] = IGNORED, IGNORED
    return h, weight, labels


def exact(h: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    """Returns loss and gradients by the formula in fp64."""
    h, weight = h.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    loss = F.cross_entropy(F.linear(h, weight).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return [loss.detach(), *torch.autograd.grad(loss, (h, weight))]


def another_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes the same loss by a different formula."""
    assert logits.ndim == 3 and labels.shape == logits.shape[:2]
    picked = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -picked[labels != IGNORED].sum()


def at_head(loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum, *, chunk_tokens: int, **compile: Any) -> Any:
    return head_loss(loss, chunk_tokens=chunk_tokens, loss_parallel=True, compile=CompileConfig(**compile))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("loss", [cross_entropy_sum, another_loss])
@pytest.mark.parametrize("chunk_tokens", [0, 1, 7, 11, 32, 33, 1000])
def test_chunks_give_loss_and_gradients_of_the_whole(loss: Any, chunk_tokens: int, dtype: torch.dtype) -> None:
    h, weight, labels = batch(dtype)
    got = at_head(loss, chunk_tokens=chunk_tokens)(h, weight, labels)
    grads = torch.autograd.grad(2 * got, (h, weight))  # the backward scales
    assert got.dtype == torch.float32 and [grad.dtype for grad in grads] == [dtype, dtype]
    want = exact(h, weight, labels)
    for value, reference in zip((got, *(grad / 2 for grad in grads)), want, strict=True):
        assert (value.double() - reference).norm() <= ROUNDING[dtype] * reference.norm()
    with torch.no_grad():
        torch.testing.assert_close(at_head(loss, chunk_tokens=chunk_tokens)(h, weight, labels), got)


def test_many_chunks_add_up_in_fp32() -> None:
    """A thousand chunks add a half each: in bf16 the sum would stop at 128."""
    h, weight = torch.ones(1024, 1, 1, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16).requires_grad_()
    at_head(chunk_tokens=1)(h, weight, torch.zeros(1024, 1, dtype=torch.long)).backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [-512.0, 512.0]


def test_a_batch_without_targets_is_zero() -> None:
    h, weight, labels = batch()
    loss = at_head(chunk_tokens=7)(h, weight, labels.fill_(IGNORED))
    loss.backward()
    assert loss == 0 and all(torch.equal(x.grad, torch.zeros_like(x)) for x in (h, weight))


class Watch(TorchDispatchMode):
    """Records the most elements of a tensor that any operation returns, and the number of matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))])
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_)
        return result


@pytest.mark.parametrize("loss", [cross_entropy_sum, another_loss])
def test_logits_never_exist_as_a_whole(loss: Any) -> None:
    h, weight, labels = batch()
    whole, chunks, look = Watch(), Watch(), Watch()
    with whole:
        at_head(loss, chunk_tokens=0)(h, weight, labels).backward()
    with chunks:
        at_head(loss, chunk_tokens=4)(h, weight, labels).backward()
    with look, torch.no_grad():
        at_head(loss, chunk_tokens=4)(h, weight, labels)
    assert whole.elements == B * T * V
    assert chunks.elements == max(V * C, 4 * V, B * T * C)  # the gradient of the weight is the largest
    assert look.elements == max(4 * V, B * T * C, V * C)


def test_one_chunks_logits_and_their_gradient_are_freed_before_the_next_ones_are_made() -> None:
    h, weight, labels = batch()
    alive = list[weakref.ref[Tensor]]()

    class Births(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.shape[-1:] == (V,) and len(x) != C]
            if func.overloadpacket is torch.ops.aten.mm and made:  # the next chunk's logits
                assert not [x for x in alive if x() is not None]
            alive.extend(map(weakref.ref, made))
            return result

    with Births():
        at_head(chunk_tokens=4)(h, weight, labels)
    assert alive


def test_no_gradient_is_made_that_nobody_wants() -> None:
    h, weight, labels = batch()

    def products(h: Tensor, weight: Tensor) -> int:
        with Watch() as seen:
            at_head(chunk_tokens=11)(h, weight, labels)
        return seen.products

    assert products(h, weight) == 3 * 3  # chunks, each with its logits and two gradients
    assert products(h, weight.detach()) == products(h.detach(), weight) == 2 * 3
    with torch.no_grad():
        assert products(h, weight) == 3


def test_a_backward_in_two_passes() -> None:
    """Some pipeline schedules delay weights: the input's gradient first, then the weight's, from one graph."""
    h, weight, labels = batch()
    expected = torch.autograd.grad(at_head(chunk_tokens=7)(h, weight, labels), (h, weight))
    loss = at_head(chunk_tokens=7)(h, weight, labels)
    (first,) = torch.autograd.grad(loss, h, retain_graph=True)
    (second,) = torch.autograd.grad(loss, weight)
    assert torch.equal(first, expected[0]) and torch.equal(second, expected[1])


def test_a_prime_number_of_tokens_compiles_the_loss_twice_in_all() -> None:
    """11 tokens in chunks of 4, 4 and 3 need two graphs; equal chunks need one."""
    h, weight, labels = batch()
    for tokens, shapes in ((11, 2), (8, 1)):
        graphs: list[Any] = []

        def backend(graph: Any, _: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph

        torch._dynamo.reset()
        loss = at_head(chunk_tokens=4, enable=True, backend=backend)
        for _ in range(3):
            loss(h[:1, :tokens], weight, labels[:1, :tokens]).backward()
        assert len(graphs) == shapes


def test_compiled_chunks_give_the_same() -> None:
    h, weight, labels = batch()
    loss = at_head(chunk_tokens=7, enable=True, backend="aot_eager")(h, weight, labels)
    for value, reference in zip((loss, *torch.autograd.grad(loss, (h, weight))), exact(h, weight, labels), strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=1e-5, atol=1e-5)


def by_parts(logits: Tensor, labels: Tensor, cuts: list[int]) -> list[Tensor]:
    """Returns the loss of each vocabulary part: a first pass collects the values that parts exchange, a second one delivers them."""
    edges = [0, *cuts, logits.shape[-1]]
    parts = [(logits[..., first:last], first) for first, last in zip(edges, edges[1:], strict=False)]
    shown: list[Tensor] = []

    def collect(values: Tensor) -> Tensor:
        shown.append(values)
        return values[None]

    for part, first in parts:
        cross_entropy_sum.vocab_parallel(part, labels, first=first, gather=collect)
    everyone = torch.stack(shown)
    return [
        cross_entropy_sum.vocab_parallel(part, labels, first=first, gather=lambda _: everyone) for part, first in parts
    ]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("cuts", [[], [31], [16, 32, 48], [1, 60]])
def test_parts_of_a_vocabulary_give_the_loss_of_all(cuts: list[int], dtype: torch.dtype) -> None:
    h, weight, labels = batch(dtype)
    logits = F.linear(h.detach(), weight.detach()).mul(5).requires_grad_()
    wide = logits.detach().double().requires_grad_()
    whole = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    losses = by_parts(logits, labels, cuts)
    for loss in losses:
        torch.testing.assert_close(loss.double(), whole, rtol=1e-6, atol=0)
    sum(losses).backward()  # the parts' gradients lie beside each other
    whole.backward()
    assert logits.grad is not None and wide.grad is not None
    assert (logits.grad.double() - wide.grad).norm() <= ROUNDING[dtype] * wide.grad.norm()


def test_a_label_that_no_part_holds_is_told() -> None:
    logits, labels = torch.zeros(1, 2, 6), torch.tensor([[3, 6]])
    assert all(loss.isinf() for loss in by_parts(logits, labels, [4]))


def test_logits_of_different_parts_may_differ_widely() -> None:
    logits = torch.tensor([[[0.0, 1.0, 500.0, -500.0]]])
    for loss in by_parts(logits, torch.tensor([[0]]), [2]):
        assert loss == 500.0


class Doubled(CrossEntropySum):
    """A loss of a fork, which says nothing of parts of the vocabulary."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return 2 * super().__call__(logits, labels)


def test_a_subclass_that_changes_the_formula_has_it_under_tensor_parallelism_too() -> None:
    h, weight, labels = batch()
    whole = at_head(chunk_tokens=0)(h, weight, labels)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)
        for loss, factor in ((cross_entropy_sum, 1), (Doubled(), 2)):
            torch.testing.assert_close(at_head(loss, chunk_tokens=0)(h, sharded, labels), factor * whole)
    finally:
        dist.destroy_process_group()
