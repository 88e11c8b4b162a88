"""Expert parallelism: each rank of the ep axis has some of the experts of a block, and rows go to the rank of their expert and back.

parallelize() applies it to each part of the model: parameters of Experts (models/contract.py) become DTensors on ep, and the module's
`dispatch_and_combine` is replaced. Every other parameter is sharded as without expert parallelism, and the ranks of ep have different
tokens. FSDP divides the parameters of a rank's experts over efsdp (parallelisms/mesh.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from models import ops
from models.contract import Experts, Model, Router, nearest
from parallelisms.mesh import CP, EP, TP, ParallelDims, ParallelismConfig


def apply_expert_parallel(part: Model, mesh: DeviceMesh, experts_mesh: DeviceMesh) -> None:
    """Shards the experts of `part`, on the meta device, over the ep axis of `experts_mesh`, and makes routers sum over sequences that ranks
    of `mesh` share."""
    from torch.distributed.tensor import Shard, distribute_tensor  # not needed to check a configuration

    ep_mesh, group = experts_mesh[EP], experts_mesh[EP].get_group().group_name
    shared = [str(mesh[axis].get_group().group_name) for axis in (CP, TP) if mesh[axis].size() > 1]
    for module in part.modules():
        if isinstance(module, Router) and shared:
            module.sum_over_sequence = partial(_sum, groups=shared)
        if isinstance(module, Experts) and ep_mesh.size() > 1:
            for name, parameter in list(module.named_parameters(recurse=False)):
                sharded = distribute_tensor(parameter, ep_mesh, [Shard(0)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(sharded))
            module.dispatch_and_combine = all_to_all_dispatch(module, ep_mesh.size(), group)  # type: ignore[assignment,method-assign]


def _sum(counts: Tensor, *, groups: list[str]) -> Tensor:
    collectives = torch.ops._c10d_functional
    for group in groups:
        counts = collectives.wait_tensor(collectives.all_reduce(counts, "sum", group))
    return counts


def all_to_all_dispatch(experts: Experts, ep: int, group: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns a `dispatch_and_combine` that sends each row to the rank of its expert and takes the result back: three all-to-alls, of
    counts and of rows both ways, and one host sync, since the host must know the sizes of the messages."""

    def dispatch_and_combine(rows: Tensor, counts: Tensor) -> Tensor:  # [M, C], [E]
        collectives = torch.ops._c10d_functional
        per_rank = len(counts) // ep
        even = [per_rank] * ep
        arriving = collectives.all_to_all_single(counts, even, even, group)
        arriving = collectives.wait_tensor(arriving)  # by rank, then by expert
        sizes = torch.stack((counts, arriving)).unflatten(1, (ep, per_rank)).sum(2)  # [2, ep]
        sent, received = ops.host_sizes(sizes, len(rows))
        rows = cast(Tensor, AllToAll.apply(rows, received, sent, group))  # by rank, then by expert
        expert = torch.arange(per_rank, device=rows.device).repeat(ep)
        expert = expert.repeat_interleave(arriving, output_size=len(rows))
        order = expert.argsort(stable=True)  # by expert, then by rank
        rows = experts(rows[order], arriving.unflatten(0, (ep, per_rank)).sum(0))
        return cast(Tensor, AllToAll.apply(rows[order.argsort()], sent, received, group))

    return dispatch_and_combine


class AllToAll(Function):
    """All-to-all of rows: `sent[r]` of them go to rank r, `received[r]` come from it, in the order of the ranks; its backward is the same
    in the other direction."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        ctx.received, ctx.sent, ctx.group = received, sent, group
        collectives = torch.ops._c10d_functional
        return collectives.wait_tensor(collectives.all_to_all_single(rows.contiguous(), received, sent, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        collectives = torch.ops._c10d_functional
        grad = collectives.all_to_all_single(grad.contiguous(), ctx.sent, ctx.received, ctx.group)
        return collectives.wait_tensor(grad), None, None, None


def check_experts(model: Model, degrees: ParallelDims, config: ParallelismConfig) -> None:
    """Raises ValueError if the experts of a whole `model` cannot be divided as `config` says."""
    degree, ranks = config.expert_parallel_degree, degrees.dp_shard * degrees.cp * degrees.tp
    cause = f"parallelism.expert_parallel_degree = {degree}: "
    experts = [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]
    if degree > 1 and not experts:
        raise ValueError(f"{cause}{type(model).__name__} has no experts; nearest: 1")
    if ranks % degree:
        raise ValueError(
            f"{cause}must divide the {ranks} ranks of dp_shard x cp x tp; nearest: {_nearest(degree, experts, ranks)}"
        )
    for name, module in experts:
        for leaf, parameter in module.named_parameters(recurse=False):
            count, rows = parameter.shape[:2]
            if count % degree:
                raise ValueError(
                    f"{cause}must divide the {count} experts of {name}; nearest: {_nearest(degree, experts, ranks)}"
                )
            shards = ranks // degree
            if count // degree % shards and rows % shards:
                raise ValueError(
                    f"{cause}{name}.{leaf} {list(parameter.shape)} has neither {degree} x {shards} experts nor rows divisible by {shards} "
                    f"shards; nearest: {_nearest(degree, experts, ranks, wide=degree)}"
                )


def _nearest(degree: int, experts: Iterable[tuple[str, Experts]], ranks: int, *, wide: int = 1) -> str:
    """Returns the degrees nearest to `degree` that divide `ranks` and all experts: "1 or 4"; if there are none, the widths that degree
    `wide` needs."""
    shapes = [parameter.shape for _, module in experts for parameter in module.parameters(recurse=False)]
    legal = (
        other
        for other in range(1, ranks + 1)
        if ranks % other == 0
        and all(s[0] % other == 0 and (s[0] % ranks == 0 or s[1] % (ranks // other) == 0) for s in shapes)
    )
    return nearest(degree, legal) or f"{wide}, with widths of model and experts in multiples of {ranks // wide}"
