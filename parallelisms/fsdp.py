"""FSDP2, HSDP and DDP: the data-parallel axes of the mesh, and bf16 compute over fp32 parameters.

With a sharding axis only: FSDP; with a replicating axis too: HSDP; with a replicating axis only: DDP, by torch's `replicate`. FSDP is
also applied on one rank, for mixed precision, and so that every parameter of every run is a DTensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor, Shard

from models.contract import Experts, Model, Router
from parallelisms.device import DEVICE_TRAITS
from parallelisms.execution import Precision
from parallelisms.mesh import DP_REPLICATE, EP, PP, ParallelismConfig, data_parallel_mesh


def apply_fsdp(
    part: Model,
    mesh: DeviceMesh,
    experts_mesh: DeviceMesh | None,
    config: ParallelismConfig,
    *,
    precision: Precision,
    cpu_offload: bool,
) -> None:
    """Wraps `part`; each Router (in fp32) and each Experts (over `experts_mesh`) is an FSDP unit of its own. Gradients are summed over
    ranks, not averaged: training/optimizer.py divides by the global number of valid tokens."""
    dense = data_parallel_mesh(mesh)
    sparse = data_parallel_mesh(experts_mesh) if experts_mesh is not None else dense
    if mesh[PP].size() > 1 and dense.mesh_dim_names == (DP_REPLICATE,) and sparse.mesh_dim_names != (DP_REPLICATE,):
        # experts are sharded over tp, nothing else is. torch's stage (2.11 to 2.13) reduces only the gradients of units that were made as
        # its root was, by `replicate` or by fully_shard, so all have to be made by fully_shard
        dense = data_parallel_mesh(mesh, hsdp=True)
    choice = config.fsdp_reshard_after_forward
    always, by_shards = choice == "always", choice == "default" and mesh[PP].size() == 1
    # the size of the last axis, the shards; with DDP alone the replicas, and `replicate` uses neither `reshard` nor `shards`
    reshard = always or (by_shards and dense.size(dense.ndim - 1) > 1)
    # experts may be sharded where nothing else is, as over tp
    reshard_experts = reshard or (by_shards and sparse.size(sparse.ndim - 1) > 1)

    def wrap(
        modules: Sequence[nn.Module],
        *,
        reshard: bool,
        axes: DeviceMesh = dense,
        dtypes: tuple[torch.dtype, torch.dtype] = (precision.compute, precision.reduce),
    ) -> None:
        shards = axes.size(axes.ndim - 1)
        # One rank reduces nothing, so its gradients need no cast, unless it accumulates the microbatches of a pipeline
        reduce = dtypes[1] if axes.size() > 1 or mesh[PP].size() > 1 else None
        options: dict[str, Any] = {
            "mesh": axes,
            # inputs are not cast: the embedding's output has the compute dtype already, and freqs_cis must stay fp32
            "mp_policy": MixedPrecisionPolicy(dtypes[0], reduce, cast_forward_inputs=False),
            "offload_policy": CPUOffloadPolicy() if cpu_offload else OffloadPolicy(),
        }

        def placement(parameter: nn.Parameter) -> Shard | None:
            """Returns the placement of a parameter; None: torch's default, dim 0."""
            if isinstance(modules[0], Experts) and experts_mesh is not None:
                count = parameter.shape[0] // experts_mesh[EP].size()
                return Shard(int(count % shards > 0))
            if not isinstance(parameter, DTensor) or parameter.placements != (Shard(0),):
                return None
            dim = shard_dim(parameter.shape, tp=parameter.device_mesh.size(), shards=shards)
            assert dim is not None, "check_plan() of parallelisms/tensor.py rejects it"
            return Shard(dim)

        if axes.mesh_dim_names == (DP_REPLICATE,):
            replicate(list(modules), **options)
        else:
            fully_shard(list(modules), reshard_after_forward=reshard, shard_placement_fn=placement, **options)
        leader = cast(FSDPModule, modules[0])  # the first module has the FSDP state of its list
        # Sums, not means: without a factor torch divides by the number of ranks, which for one rank is 1; with a factor it uses PREMUL_SUM,
        # which gloo does not support, unless SUM is forced.
        if axes.size() > 1:
            leader.set_gradient_divide_factor(cast(float, NoDivideFactor()))
        elif DEVICE_TRAITS[mesh.device_type].queues_work:  # saves 1 % of a step; without a clear effect on a CPU
            group: Any = leader._get_fsdp_state()._fsdp_param_group  # private names, those of torch 2.11 to 2.13
            leader.set_custom_reduce_scatter(NoOpReduceScatter(group))
        leader.set_force_sum_reduction_for_comms(True)

    for module in part.modules():
        if isinstance(module, Router):
            wrap([module], reshard=reshard, dtypes=(torch.float32, torch.float32))
        elif isinstance(module, Experts):
            wrap([module], reshard=reshard_experts, axes=sparse)
    groups = list(fsdp_param_groups(part, config.fsdp_blocks_per_group))
    for group in groups:
        is_last = part.output is not None and part.output in group  # needed again as soon as the backward starts
        wrap(group, reshard=reshard and (not is_last or always))
    wrap([part], reshard=reshard)
    # Number of FSDP's parameter groups gathered ahead of the one that computes. 0 is torch's default: in the forward as far as the CPU runs
    # ahead of the device, in the backward one group.
    forward, backward = config.fsdp_forward_prefetch, config.fsdp_backward_prefetch
    leaders = [cast(FSDPModule, group[0]) for group in groups]
    for index, leader in enumerate(leaders):
        if forward:
            leader.set_modules_to_forward_prefetch(leaders[index + 1 : index + 1 + forward])
        if backward:
            leader.set_modules_to_backward_prefetch(leaders[max(0, index - backward) : index][::-1])


def alias_unsharded_to_sharded(part: nn.Module) -> None:
    """Makes the unsharded parameters aliases of the sharded ones if there is one shard and no cast, which saves torch's copy before each
    use. Called after to_empty(). The private names are those of torch 2.11 to 2.13."""
    for module in part.modules():
        group: Any = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group and group.mesh_info.mesh.size() == 1 else ():
            same_dtype = group.mp_policy.param_dtype in (None, parameter.sharded_param.dtype)
            plain = not hasattr(parameter._sharded_local_tensor, "fsdp_pre_all_gather")  # float8 has it
            if same_dtype and plain and not parameter.offload_to_cpu:
                parameter.all_gather_outputs = [parameter._sharded_param_data]
                # without arguments bool does nothing, and is no call of a Python function
                parameter.free_unsharded_param = bool


def reshard_all(parts: Iterable[nn.Module]) -> None:
    """Frees weights that a forward without a backward has gathered; a later forward would otherwise use them after a heal of the shards."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def shard_dim(shape: Sequence[int], *, tp: int, shards: int) -> int | None:
    """Returns the dim on which FSDP shards a parameter that TP shards by rows: 0 if the TP shards are equal, else 1 if the columns divide
    evenly, else None. If unequal shards are sharded again on dim 0 (259 rows, 2 ranks, 3 shards), torch 2.13 gathers wrong rows."""
    if shards == 1 or shape[0] % tp == 0:
        return 0
    return 1 if len(shape) > 1 and shape[1] % shards == 0 else None


def fsdp_param_groups(part: Model, blocks_per_group: int) -> Iterable[list[nn.Module]]:
    """Yields the modules whose parameters are gathered together, in the order of the forward pass: the embedding, every `blocks_per_group`
    blocks, norm and output. An embedding that is also the head's weight is in one group with them. The root module has the rest."""
    ends = [m for m in (part.tok_embeddings, part.norm, part.output) if m is not None]
    first = len(ends) if part.tied else int(part.tok_embeddings is not None)
    if first:
        yield ends[:first]
    blocks = list(part.layers.values())
    for start in range(0, len(blocks), blocks_per_group):
        yield blocks[start : start + blocks_per_group]
    if ends[first:]:
        yield ends[first:]


class NoOpReduceScatter(ReduceScatter):
    """Reduce-scatter for one rank, whose output is its input: torch copies the one to the other (foreach_reduce of _fsdp_collectives.py,
    torch 2.11 to 2.13), and copying a tensor to itself does nothing. The order of the streams is that of torch's own output."""

    def __init__(self, group: Any) -> None:
        """`group`: the FSDPParamGroup that reduces; its streams exist from the first forward on."""
        self._group = group
        self._input: Tensor | None = None

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """torch calls it twice for each reduction: for the input, then, on the stream of the reduction, for the output."""
        if self._input is not None:
            output, self._input = self._input, None
            return output
        streams, reduction = torch.get_device_module(device), self._group.comm_ctx.reduce_scatter_stream
        # torch frees the output while that stream may still cast, add or copy it, which is safe in memory of that stream only
        with streams.stream(reduction):
            self._input = torch.empty(*size, dtype=dtype, device=device)
        streams.current_stream().wait_stream(reduction)  # which may still read what was in this memory before
        return self._input

    def __call__(self, *arguments: Any, **options: Any) -> None:
        raise AssertionError("not called for one rank")


class NoDivideFactor:
    """A factor of 1 for which torch makes no division. With one shard it computes `gradients / factor` (foreach_reduce of
    _fsdp_collectives.py, torch 2.11 to 2.13), a pass over all gradients with a temporary copy; with more it compares the factor with 1."""

    def __rtruediv__(self, gradients: Tensor) -> Tensor:
        return gradients

    def __eq__(self, other: object) -> bool:
        return other == 1

    __hash__ = None  # type: ignore[assignment]
