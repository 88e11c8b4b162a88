"""Context parallelism: every rank holds a part of each sequence, and attention fetches the keys and values of the others.

parallelize() applies it to each part of the model: positions go into its forward, and each attention's `attend` (models/contract.py) is
replaced. Everything else in a model computes token by token.

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
from parallelisms.mesh import ParallelismConfig

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [B, T, H, D], k and v [B, T, K, D] -> [B, T, H, D]


def apply_context_parallel(
    part: Model, mesh: DeviceMesh, config: ParallelismConfig, *, seq_len: int
) -> Callable[[Tensor], Tensor]:
    """Makes the part compute on this rank's tokens; returns the function that takes tokens [B, S] to them [B, T]."""
    pieces = pieces_of_ranks(mesh.size(), config.context_parallel_load_balancer)
    make = ring_attention if config.context_parallel_rotate_method == "ring" else gathering_attention
    attend = make(mesh, pieces)
    for attention in attentions(part, mesh.size()):
        attention.attend = attend
    here = positions(pieces, seq_len)[mesh.get_local_rank()].to(mesh.device_type)
    part.register_forward_pre_hook(lambda _, args, named: (args, {**named, "positions": here}), with_kwargs=True)
    return lambda tokens: tokens[:, here.to(tokens.device)]


def attentions(part: Model, degree: int) -> list[Any]:
    """The modules that call `self.attend`. Raises ValueError for a model that has layers and none of these."""
    found = [module for module in part.modules() if hasattr(module, "attend")]
    if len(part.layers) and not found:
        raise ValueError(
            f"parallelism.context_parallel_degree = {degree}: {type(part).__name__} computes attention without `self.attend` "
            "(models/contract.py), which context parallelism replaces; nearest: 1"
        )
    return found


def pieces_of_ranks(cp: int, load_balancer: str) -> list[list[int]]:
    """The pieces of a sequence that each rank holds, by number; all have the same length. A causal query costs as many products as there
    are tokens before it, so "headtail" gives rank r one from the head, r, and one from the tail, 2 cp - 1 - r: even work. "none": r."""
    return [[rank, 2 * cp - 1 - rank] if load_balancer == "headtail" else [rank] for rank in range(cp)]


def positions(pieces: list[list[int]], seq_len: int) -> list[Tensor]:
    """Positions in the sequence of each rank's tokens, in the order in which it holds them: [T] int64 for each."""
    by_piece = torch.arange(seq_len).chunk(sum(map(len, pieces)))
    return [torch.cat([by_piece[piece] for piece in mine]) for mine in pieces]


def gathering_attention(mesh: DeviceMesh, pieces: list[list[int]]) -> Attend:
    """Exact causal attention on any device: one collective gathers keys and values of the whole sequence, then each local piece attends to
    the tokens before and in it. The backward sums their gradients over the ranks, in the compute dtype; each rank gets those it owns."""
    mine, cp, group = pieces[mesh.get_local_rank()], mesh.size(), mesh.get_group().group_name
    as_gathered = [piece for rank_pieces in pieces for piece in rank_pieces]
    in_order = [as_gathered.index(piece) for piece in range(len(as_gathered))]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        local = torch.stack((k, v), dim=2).transpose(0, 1)  # [T, B, 2, K, D]
        parts = cast(Tensor, _GatherSequence.apply(local, cp, group)).chunk(len(in_order))
        whole = torch.cat([parts[place] for place in in_order])  # [S, B, 2, K, D]
        k, v = whole.transpose(0, 1).unbind(2)  # [B, S, K, D]
        size = whole.shape[0] // len(in_order)
        ends = [(piece + 1) * size for piece in mine]
        pairs = zip(q.split(size, dim=1), ends, strict=True)
        return torch.cat([ops.causal_attention(q, k[:, :end], v[:, :end]) for q, end in pairs], dim=1)

    return attend


class _GatherSequence(Function):
    """x [T, ...] of each rank -> [cp * T, ...], in the order of the ranks. Its gradient is the sum over ranks of each one's rows.
    Functional collectives, so that a compiler sees them; by their names in the dispatcher, which are stable."""

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
    """torch's experimental ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values go from rank to rank, and no rank holds
    those of the whole sequence. CUDA's fused kernels only."""
    from torch.distributed.tensor.experimental import _context_parallel as torch_cp

    torch_cp.set_rotate_method("alltoall")
    torch_cp._cp_options.enable_load_balance = len(pieces[0]) > 1  # its order of pieces is that of pieces_of_ranks
    torch_cp._enable_context_parallel_dispatcher()

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[2] != k.shape[2]
        q, k, v = (DTensor.from_local(x.transpose(1, 2), mesh, [Shard(2)], run_check=False) for x in (q, k, v))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):  # those that the ring knows
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)  # [B, H, S, D], Shard(2)
        return cast(DTensor, out).to_local().transpose(1, 2)

    return attend
