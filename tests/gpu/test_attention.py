"""Attention on CUDA: the kernels that it gets, and torch's ring attention between two devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from models import ops
from parallelisms.context import pieces_of_ranks, positions, ring_attention
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


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double().cpu() - want.double().cpu()).norm() / want.double().cpu().norm())


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(op.name())
        return op(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
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


def ring_errors(device: str, load_balancer: str, make: Callable[..., Any]) -> list[float]:
    """Of this rank's rows of the output and of the gradients of q, k, v, against attention over the whole sequence."""
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("load_balancer", ["headtail", "none"])
def test_the_ring_computes_attention_over_the_whole_sequence(load_balancer: str) -> None:
    with closing(Pool(2)) as pool:
        for errors in pool.run(2, ring_errors, "cuda", load_balancer, ring_attention):
            assert max(errors) < 2e-2
