"""Attention on CUDA: the kernels that it gets, documents by FlexAttention, and torch's ring attention between two devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from models import ops
from parallelisms.context import pieces_of_ranks, positions, ring_attention
from tests.gpu.devices import error, one_device, two_devices
from tests.multiproc.pool import Pool

S = 512


def heads(t: int, device: str, requires_grad: bool = True) -> list[Tensor]:
    """q, k, v in bf16, four query heads to a key head."""
    draws = torch.Generator().manual_seed(0)
    shapes = (2, t, 8, 64), (2, S, 2, 64), (2, S, 2, 64)
    return [torch.randn(s, generator=draws).to(device, torch.bfloat16).requires_grad_(requires_grad) for s in shapes]


def with_gradients(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> list[Tensor]:
    out = attend(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), grad_out)]


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(op.name())
        return op(*args, **(kwargs or {}))


@one_device
@pytest.mark.parametrize("t", [S, 128])
def test_the_last_queries_take_flash_attention_and_no_mask(t: int) -> None:
    grad_out = torch.randn(2, t, 8, 64, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    with Names() as names:
        got = with_gradients(ops.causal_attention, *heads(t, "cuda"), grad_out)
    assert any("flash_attention" in name or "cudnn_attention" in name for name in names.seen), names.seen
    assert not any("tril" in name for name in names.seen)
    exact = with_gradients(
        ops.causal_attention, *[x.double().detach().requires_grad_() for x in heads(t, "cpu")], grad_out.double().cpu()
    )
    assert all(error(a, b) < 1e-2 for a, b in zip(got, exact, strict=True))


def document_starts(t: int) -> Tensor:
    """Returns the starts [2, t] for the last t of S queries: of one document, and of several, some of which begin before them."""
    begins = torch.zeros(2, S, dtype=torch.bool)
    begins[1, [3, 140, 141, 300, 430]] = True
    return torch.arange(S).where(begins, 0).cummax(1).values[:, -t:]


@one_device
@pytest.mark.parametrize("t", [S, 128, 100])
def test_documents_are_masked_forward_and_backward(t: int) -> None:
    grad_out = torch.randn(2, t, 8, 64, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    starts = document_starts(t)
    on_device = partial(ops.causal_attention, document_starts=starts.cuda())
    got = with_gradients(on_device, *heads(t, "cuda"), grad_out)
    exact = with_gradients(
        partial(ops.causal_attention, document_starts=starts),
        *[x.double().detach().requires_grad_() for x in heads(t, "cpu")],
        grad_out.double().cpu(),
    )
    assert all(error(a, b) < 1e-2 for a, b in zip(got, exact, strict=True))


def in_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention to the keys in two parts, as the ring of documents adds them up; some queries see nothing of one part."""
    starts, places = document_starts(S).to(q.device), torch.arange(S, device=q.device)
    parts = [
        ops.attention_to_part(q, k[:, at], v[:, at], starts, places, at) for at in (places[: S // 2], places[S // 2 :])
    ]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    first, second = (out.float() * (log_sum - total).exp()[..., None] for out, log_sum in parts)
    return (first + second).to(q.dtype)


@one_device
def test_parts_of_documents_add_up_forward_and_backward() -> None:
    grad_out = torch.randn(2, S, 8, 64, generator=torch.Generator().manual_seed(1)).to("cuda", torch.bfloat16)
    whole = partial(ops.causal_attention, document_starts=document_starts(S).cuda())
    got, want = (with_gradients(attend, *heads(S, "cuda"), grad_out) for attend in (in_parts, whole))
    assert all(error(a, b) < 2e-2 for a, b in zip(got, want, strict=True))


def ring_errors(device: str, load_balancer: str, make: Callable[..., Any]) -> list[float]:
    """Returns the errors of this rank's rows of the output and of the gradients of q, k, v, against attention over the whole sequence."""
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank)
    group = dist.new_group(backend="nccl" if device == "cuda" else "gloo")
    mesh = DeviceMesh.from_group(group, device)
    pieces = pieces_of_ranks(2, load_balancer)
    here = positions(pieces, S)[rank].to(device)
    whole = heads(S, device)
    grad_out = torch.randn(2, S, 8, 64, generator=torch.Generator().manual_seed(1)).to(device, torch.bfloat16)
    mine = [x[:, here].detach().requires_grad_() for x in whole]
    got = with_gradients(make(mesh, pieces), *mine, grad_out[:, here])
    want = with_gradients(ops.causal_attention, *whole, grad_out)
    return [error(a, b[:, here]) for a, b in zip(got, want, strict=True)]


@two_devices
@pytest.mark.parametrize("load_balancer", ["headtail", "none"])
def test_the_ring_computes_attention_over_the_whole_sequence(load_balancer: str) -> None:
    with closing(Pool(2)) as pool:
        for errors in pool.run(2, ring_errors, "cuda", load_balancer, ring_attention):
            assert max(errors) < 2e-2
