"""The loss from the hidden state, so that the logits of all tokens are never in memory at once. Two techniques, which compose:

    chunked loss          only the logits of `chunk_tokens` tokens exist at a time. A chunk's loss and its gradients for hidden state
                          and weight are computed together in the forward; the backward only scales them (Wijmans et al. 2024,
                          arXiv 2411.09009; Hsu et al. 2024, arXiv 2410.10989). For any loss that is a sum over tokens.
    vocabulary parallel   under tensor parallelism each rank has the logits of its rows of the weight, and ranks exchange two numbers
                          per token. For losses with a method `vocab_parallel`; for others the logits are gathered.

Letters: B batch, T tokens, C width, V vocabulary, N tokens of the whole batch, n tokens of a chunk."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Shard

from parallelisms.device import DEVICE_TRAITS
from parallelisms.execution import CompileConfig, LossFunction


def head_loss(
    loss: LossFunction, *, chunk_tokens: int, loss_parallel: bool, compile: CompileConfig
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Returns the loss that models.contract.Head calls: hidden [B, T, C], weight [V, C], labels [B, T] -> loss sum, fp32 scalar.
    `chunk_tokens`: tokens per chunk; 0: no chunks. A chunk is passed to `loss` as one sequence, [1, n, V]. Under tensor parallelism the
    weight is a DTensor with [Shard(0)], and the gradient of the hidden state is this rank's term of a sum over ranks."""
    wanted = compile.enable and "loss" in compile.components
    whole = torch.compile(loss, backend=compile.backend) if wanted else loss
    vocab_parallel: Callable[..., Tensor] | None = None
    # both must be of one class: for a subclass that overrides __call__ alone the logits are gathered
    pair = {"__call__", "vocab_parallel"}
    paired = pair <= next((vars(kind).keys() for kind in type(loss).__mro__ if pair & vars(kind).keys()), set())
    if loss_parallel and paired and hasattr(loss, "vocab_parallel"):  # see training/loss.py
        vocab_parallel = torch.compile(loss.vocab_parallel, backend=compile.backend) if wanted else loss.vocab_parallel

    def from_hidden(h: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        loss_of_logits = whole
        if isinstance(weight, DTensor):
            loss_of_logits = _loss_of_shards(whole, vocab_parallel, weight)
            weight = weight.to_local()  # [local V, C]
        if not 0 < chunk_tokens < labels.numel():
            return loss_of_logits(F.linear(h, weight), labels)
        h, labels = h.flatten(0, 1), labels.flatten()  # [N, C], [N]
        tokens = equal_chunks(len(labels), chunk_tokens)
        if torch.is_grad_enabled():
            return cast(Tensor, _ChunkedLoss.apply(h, weight, labels, loss_of_logits, tokens))
        pairs = zip(h.split(tokens), labels.split(tokens), strict=True)
        return torch.stack([loss_of_logits(F.linear(x, weight)[None], y[None]) for x, y in pairs]).sum()

    return from_hidden


def equal_chunks(tokens: int, most: int) -> int:
    """Returns the size of the fewest equal chunks of up to `most` tokens, so that a compiled loss has one shape. Returns `most`, with a
    smaller last chunk, if equal chunks would be more than twice as many."""
    least = -(-tokens // most)
    return next((tokens // count for count in range(least, 2 * least + 1) if tokens % count == 0), most)


class _ChunkedLoss(Function):
    """Computes by chunks: logits, loss, gradient of the logits, and from it those of the hidden state and of the weight."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, labels: Tensor, loss_of_logits: LossFunction, chunk_tokens: int
    ) -> Tensor:  # [N, C], [V, C], [N]
        total = torch.zeros((), dtype=torch.float32, device=h.device)
        grad_h = torch.empty_like(h) if ctx.needs_input_grad[0] else None
        # fp32, since each chunk adds to it
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, len(h), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = F.linear(h[part], weight).requires_grad_()  # [n, V]
            with torch.enable_grad():
                loss = loss_of_logits(logits[None], labels[part][None])
            (grad,) = torch.autograd.grad(loss, logits)
            if grad_h is not None:
                torch.mm(grad, weight, out=grad_h[part])
            if grad_weight is not None and grad.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad.t(), h[part])
            elif grad_weight is not None:
                fp32_addmm(grad_weight, grad.t(), h[part], fused=DEVICE_TRAITS[h.device.type].has_fp32_addmm)
            total += loss.detach()
            del logits, loss, grad  # frees the memory before the next chunk
        ctx.save_for_backward(grad_h, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # Not in place: a pipeline that splits the backward calls this twice
        grad_h, grad_weight = (None if g is None else g * grad_total.to(g.dtype) for g in ctx.saved_tensors)
        return grad_h, grad_weight, None, None, None


def fp32_addmm(total: Tensor, a: Tensor, b: Tensor, *, fused: bool) -> None:
    """Adds a [V, n] @ b [n, C], of a narrower dtype, to `total` [V, C] fp32 in place. `fused`: in one kernel, which neither rounds nor
    stores the product; else the product is rounded to its dtype."""
    if fused:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _loss_of_shards(whole: LossFunction, vocab_parallel: Callable[..., Tensor] | None, weight: DTensor) -> LossFunction:
    """Returns the loss as a function of the logits [B, T, local V] of this rank's rows of the head's weight, the same on every rank."""
    assert weight.placements == (Shard(0),), "FSDP must gather it, and tensor.py must shard it by rows"
    mesh, vocab_size = weight.device_mesh, weight.shape[0]

    def stack(values: Tensor) -> Tensor:
        collectives = torch.ops._c10d_functional  # by their names in the dispatcher, see context.py
        stacked = collectives.all_gather_into_tensor(values.contiguous(), mesh.size(), mesh.get_group().group_name)
        return cast(Tensor, collectives.wait_tensor(stacked)).view(mesh.size(), *values.shape)

    def gathered(logits: Tensor, labels: Tensor) -> Tensor:
        """Computes the loss from gathered logits; in the backward each rank keeps the gradient of its shard."""
        shape = torch.Size((*logits.shape[:-1], vocab_size))
        stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))  # given, since shards may be uneven
        parts = DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)
        return whole(parts.full_tensor(), labels)

    rows = -(-vocab_size // mesh.size())  # per rank; the last ranks may have fewer
    return partial(vocab_parallel, first=mesh.get_local_rank() * rows, gather=stack) if vocab_parallel else gathered
