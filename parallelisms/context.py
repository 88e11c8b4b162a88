"""Context parallelism: every rank has a shard of each sequence, and attention gathers the keys and values of the other ranks.

parallelize() applies it to each part of the model: a hook passes positions to its forward, and each attention's `attend`
(models/contract.py) is replaced. Everything else in a model computes token by token.

Letters as in models/ops.py; here T is the tokens of this rank, S those of the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.attention import SDPBackend, sdpa_kernel

from models import ops
from models.contract import Model
from parallelisms.expert import AllToAll
from parallelisms.mesh import ParallelismConfig

# q [B, T, H, D], k and v [B, T, K, D], document_starts [B, T] or None -> [B, T, H, D]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def apply_context_parallel(
    part: Model, mesh: DeviceMesh, config: ParallelismConfig, *, seq_len: int
) -> Callable[[Tensor], Tensor]:
    """Makes `part` compute on this rank's tokens; returns a function that selects these, [B, T], from tokens [B, S]."""
    pieces = pieces_of_ranks(mesh.size(), config.context_parallel_load_balancer)
    make = ring_attention if config.context_parallel_rotate_method == "ring" else gathering_attention
    attend = make(mesh, pieces)
    for attention in attentions(part, mesh.size()):
        attention.attend = attend
    local = positions(pieces, seq_len)[mesh.get_local_rank()].to(mesh.device_type)
    part.register_forward_pre_hook(lambda _, args, named: (args, {**named, "positions": local}), with_kwargs=True)
    return lambda tokens: tokens[:, local.to(tokens.device)]


def attentions(part: Model, degree: int) -> list[Any]:
    """Returns the modules that call `self.attend`. Raises ValueError for a model with layers but without such a module."""
    found = [module for module in part.modules() if hasattr(module, "attend")]
    if len(part.layers) and not found:
        raise ValueError(
            f"parallelism.context_parallel_degree = {degree}: {type(part).__name__} computes attention without `self.attend` "
            "(models/contract.py), which context parallelism replaces; nearest: 1"
        )
    return found


def check_attentions(model: Model, degree: int) -> None:
    """Raises ValueError as `attentions` does, and for an attention that context parallelism would change."""
    for module in attentions(model, degree):
        if module.attend is not ops.causal_attention:
            raise ValueError(
                f"parallelism.context_parallel_degree = {degree}: {type(module).__name__} has a `self.attend` of its own, in whose place "
                "context parallelism puts causal attention; a window can be given as document_starts (models/contract.py); nearest: 1"
            )


def pieces_of_ranks(cp: int, load_balancer: str) -> list[list[int]]:
    """Returns the indices of each rank's pieces of a sequence, which have equal lengths. The cost of a causal query is proportional to
    the tokens before it, so "headtail" balances the work: rank r has piece r from the head and 2 cp - 1 - r from the tail. "none": r."""
    return [[rank, 2 * cp - 1 - rank] if load_balancer == "headtail" else [rank] for rank in range(cp)]


def positions(pieces: list[list[int]], seq_len: int, device: torch.device | None = None) -> list[Tensor]:
    """Returns the positions in the sequence of each rank's tokens, in the order of its pieces: [T] int64 for each."""
    by_piece = torch.arange(seq_len, device=device).chunk(sum(map(len, pieces)))
    return [torch.cat([by_piece[piece] for piece in mine]) for mine in pieces]


def gathering_attention(mesh: DeviceMesh, pieces: list[list[int]]) -> Attend:
    """Returns exact causal attention for any device: one all-gather of keys and values, then each local piece attends to the tokens up to
    its end. The backward reduce-scatters the gradients of keys and values, in the compute dtype."""
    mine, cp, group = pieces[mesh.get_local_rank()], mesh.size(), mesh.get_group().group_name
    as_gathered = [piece for rank_pieces in pieces for piece in rank_pieces]
    in_order = [as_gathered.index(piece) for piece in range(len(as_gathered))]

    def attend(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None) -> Tensor:
        local = torch.stack((k, v), dim=2).transpose(0, 1)  # [T, B, 2, K, D]
        parts = cast(Tensor, _GatherSequence.apply(local, cp, group)).chunk(len(in_order))
        whole = torch.cat([parts[index] for index in in_order])  # [S, B, 2, K, D]
        k, v = whole.transpose(0, 1).unbind(2)  # [B, S, K, D]
        size = whole.shape[0] // len(in_order)
        ends = [(piece + 1) * size for piece in mine]
        starts = [None] * len(mine) if document_starts is None else document_starts.split(size, dim=1)
        queries = zip(q.split(size, dim=1), ends, starts, strict=True)
        return torch.cat([ops.causal_attention(q, k[:, :end], v[:, :end], first) for q, end, first in queries], dim=1)

    return attend


class _GatherSequence(Function):
    """All-gather of x [T, ...] to [cp * T, ...], in the order of the ranks; its backward is a reduce-scatter. Uses functional collectives,
    which can be compiled, by their names in the dispatcher, which are stable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: int, group: str) -> Tensor:
        ctx.cp, ctx.group = cp, group
        collectives = torch.ops._c10d_functional
        return collectives.wait_tensor(collectives.all_gather_into_tensor(x.contiguous(), cp, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        collectives = torch.ops._c10d_functional
        mine = collectives.reduce_scatter_tensor(grad.contiguous(), "sum", ctx.cp, ctx.group)
        return collectives.wait_tensor(mine), None, None


def ring_attention(mesh: DeviceMesh, pieces: list[list[int]]) -> Attend:
    """Returns ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values are sent from rank to rank, and no rank has those of the
    whole sequence. It is torch's experimental implementation, for CUDA's fused kernels only, which cannot mask documents; with documents it
    is `ring_of_documents`."""
    from torch.distributed.tensor.experimental import _context_parallel as torch_cp

    torch_cp.set_rotate_method("alltoall")
    torch_cp._cp_options.enable_load_balance = len(pieces[0]) > 1  # with pieces as in pieces_of_ranks
    torch_cp._enable_context_parallel_dispatcher()

    def attend(q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor | None = None) -> Tensor:
        if document_starts is not None:
            return ring_of_documents(q, k, v, document_starts, mesh, pieces)
        if q.dtype == torch.float32:  # only efficient attention has fp32, and it has no groups of heads
            k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (DTensor.from_local(x.transpose(1, 2), mesh, [Shard(2)], run_check=False) for x in (q, k, v))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):  # torch's ring has these
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)  # [B, H, S, D], Shard(2)
        return cast(DTensor, out).to_local().transpose(1, 2)

    return attend


def ring_of_documents(
    q: Tensor, k: Tensor, v: Tensor, document_starts: Tensor, mesh: DeviceMesh, pieces: list[list[int]]
) -> Tensor:
    """Computes the attention of this rank's queries [B, T, H, D] to each rank's keys and values as they arrive from the previous rank, for
    any device. Autograd keeps those of all ranks for the backward, unless activation checkpointing recomputes the attention."""
    cp, rank, group = mesh.size(), mesh.get_local_rank(), mesh.get_group().group_name
    places = positions(pieces, cp * q.shape[1], q.device)
    sent, received = ([2 * (other == peer % cp) for other in range(cp)] for peer in (rank + 1, rank - 1))
    pair = torch.stack((k, v))  # [2, B, T, K, D]
    # log_sum is finite from here on, since each query sees its own key
    out, log_sum = ops.attention_to_part(q, k, v, document_starts, places[rank], places[rank])
    out = out.float()
    for distance in range(1, cp):
        pair = cast(Tensor, AllToAll.apply(pair, received, sent, group))
        arrived, (k, v) = places[rank - distance], pair.unbind()
        part, part_log_sum = ops.attention_to_part(q, k, v, document_starts, places[rank], arrived)
        total = torch.logaddexp(log_sum, part_log_sum)
        out = out * (log_sum - total).exp().unsqueeze(-1) + part * (part_log_sum - total).exp().unsqueeze(-1)
        log_sum = total
    return out.to(q.dtype)
