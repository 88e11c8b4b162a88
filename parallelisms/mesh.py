"""The device mesh and its axes, outermost first.

    pp            pipeline stages
    dp_replicate  replicas of the sharded model (HSDP, DDP)
    dp_shard      shards of the parameters (FSDP2)
    cp            shards of every sequence
    tp            shards of every matrix

FSDP shards over dp_shard and cp together: to the parameters, context-parallel ranks are data parallel. Fault tolerance adds no axis:
replica groups are data parallel to each other outside the mesh (ft/).

Experts have a second mesh over the same ranks. Two axes take the place of dp_shard, cp and tp, as all ranks of these have different tokens:

    efsdp         shards of the parameters of a rank's experts
    ep            parts of the experts of each block"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Annotated, Literal, NamedTuple

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from models.contract import nearest_divisors

PP, DP_REPLICATE, DP_SHARD, CP, TP = AXES = "pp", "dp_replicate", "dp_shard", "cp", "tp"
DP_SHARD_CP = "dp_shard_cp"  # dp_shard and cp as one axis: where FSDP shards
EFSDP, EP = "efsdp", "ep"


@dataclass(frozen=True)
class ParallelismConfig:
    """[parallelism]: parallel layout of one replica group."""

    data_parallel_replicate_degree: Annotated[
        int, "replicas of the sharded model: HSDP, or DDP if nothing is sharded", ">= 1"
    ] = 1
    data_parallel_shard_degree: Annotated[
        int, "ranks that shard the parameters (FSDP2); -1: the ranks left by the other degrees", ">= -1", "!= 0"
    ] = -1
    fsdp_reshard_after_forward: Annotated[
        Literal["default", "always", "never"],
        "free the gathered parameters between forward and backward; default: if there is more than one shard and no "
        "pipeline, which would gather them again for every microbatch",
    ] = "default"
    fsdp_blocks_per_group: Annotated[int, "transformer blocks whose parameters are gathered together", ">= 1"] = 1
    fsdp_forward_prefetch: Annotated[
        int,
        "groups of blocks (without their experts) gathered ahead in the forward; 0: torch's default, as far as the CPU runs ahead",
        ">= 0",
    ] = 0
    fsdp_backward_prefetch: Annotated[
        int,
        "groups of blocks (without their experts) gathered ahead in the backward; 0: torch's default, one group",
        ">= 0",
    ] = 0
    tensor_parallel_degree: Annotated[int, "ranks that shard matrices, and the sequence between blocks", ">= 1"] = 1
    disable_loss_parallel: Annotated[
        bool, "gather the logits before the loss; false: each rank keeps its shard of the vocabulary"
    ] = False
    enable_async_tensor_parallel: Annotated[
        bool, "overlap the collectives of tensor parallelism with its matmuls; needs compile.enable and NVLink"
    ] = False
    context_parallel_degree: Annotated[int, "ranks that shard every sequence", ">= 1"] = 1
    context_parallel_load_balancer: Annotated[
        Literal["headtail", "none"],
        "headtail: each rank has a piece of the head and one of the tail, which balances causal attention; none: one contiguous piece",
    ] = "headtail"
    context_parallel_rotate_method: Annotated[
        Literal["allgather", "ring"],
        "allgather: gathers keys and values of the whole sequence, any device; ring (alltoall in torchtitan): keys and values are "
        "sent from rank to rank: torch's ring attention (CUDA only), with training.document_mask one of this repository (any device)",
    ] = "allgather"
    expert_parallel_degree: Annotated[
        int, "ranks that divide the experts of a block; divides dp_shard x cp x tp", ">= 1"
    ] = 1
    pipeline_parallel_degree: Annotated[int, "ranks that each hold some of the layers", ">= 1"] = 1
    pipeline_parallel_schedule: Annotated[
        Literal["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"],
        "order of the microbatches' forwards and backwards",
    ] = "1F1B"
    pipeline_parallel_schedule_csv: Annotated[
        str, 'a file with one line of actions per rank, in place of pipeline_parallel_schedule; "": none'
    ] = ""
    pipeline_parallel_microbatch_size: Annotated[int, "sequences of one microbatch", ">= 1"] = 1
    pipeline_parallel_layers_per_stage: Annotated[
        int,
        "blocks of a stage, where embedding and head count as the two keys below say; 0: one stage per rank, two where the schedule "
        "needs several",
        ">= 0",
    ] = 0
    pipeline_parallel_first_stage_less_layers: Annotated[
        int, "number of blocks that the embedding counts as when blocks are split into stages", ">= 0"
    ] = 1
    pipeline_parallel_last_stage_less_layers: Annotated[
        int, "number of blocks that norm and output count as when blocks are split into stages", ">= 0"
    ] = 1
    module_fqns_per_model_part: Annotated[
        tuple[str, ...],
        'modules of each stage, one string per stage, such as "tok_embeddings layers.0 layers.1"; []: split by layer count',
    ] = ()


class ParallelDims(NamedTuple):
    """Size of each mesh axis, in the order of AXES."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int

    @property
    def world_size(self) -> int:
        return prod(self)

    @property
    def data_parallel(self) -> int:
        """The number of ranks with different sequences."""
        return self.dp_replicate * self.dp_shard

    def coordinate(self, global_rank: int) -> MeshCoordinate:
        ranks = []
        for size in reversed(self):
            global_rank, rank = divmod(global_rank, size)
            ranks.append(rank)
        tp_rank, cp_rank, dp_shard_rank, dp_replicate_rank, pp_rank = ranks
        return MeshCoordinate(pp_rank, dp_replicate_rank * self.dp_shard + dp_shard_rank, cp_rank, tp_rank)

    def __str__(self) -> str:
        """Formats the axes with several ranks: "dp_shard 2 x tp 2"."""
        return " x ".join(f"{axis} {size}" for axis, size in self._asdict().items() if size > 1) or "one rank"


@dataclass(frozen=True)
class MeshCoordinate:
    """One rank's coordinate in the mesh."""

    pp_rank: int
    dp_rank: int  # over dp_replicate and dp_shard: selects the sequences
    cp_rank: int
    tp_rank: int

    @cached_property
    def counts_tokens(self) -> bool:
        """Returns True on one of the ranks with the same sequences, which counts their tokens."""
        return self.pp_rank == self.cp_rank == self.tp_rank == 0


def degrees(config: ParallelismConfig, world_size: int) -> ParallelDims:
    """Returns the degrees of `config` on `world_size` ranks. Raises ValueError if their product is not `world_size`."""
    named = {
        "pipeline_parallel_degree": config.pipeline_parallel_degree,
        "data_parallel_replicate_degree": config.data_parallel_replicate_degree,
        "context_parallel_degree": config.context_parallel_degree,
        "tensor_parallel_degree": config.tensor_parallel_degree,
    }
    others, shards = prod(named.values()), config.data_parallel_shard_degree
    several = [f"parallelism.{name} = {degree}" for name, degree in named.items() if degree > 1]
    if world_size % others:
        cause, *rest = several
        beside = f" (with {' and '.join(rest)})" if rest else ""
        room, unused = divmod(world_size, others // (degree := int(cause.rpartition(" ")[2])))
        nearest = "" if unused else f"nearest: {nearest_divisors(room, degree)}; or "
        raise ValueError(
            f"{cause}: the degrees{beside} multiply to {others}, which must divide the number of ranks, {world_size}; "
            f"{nearest}start a multiple of {others} ranks (NPROC={others})"
        )
    left = world_size // others
    if shards not in (-1, left):
        beside = f" (the other degrees take {others})" if others > 1 else ""
        raise ValueError(
            f"parallelism.data_parallel_shard_degree = {shards}: the degrees must multiply to the number of ranks, {world_size}{beside}; "
            f"nearest: {left}, or -1 for all that are left; or start {shards * others} ranks (NPROC={shards * others})"
        )
    pp, dp_replicate, cp, tp = named.values()
    return ParallelDims(pp, dp_replicate, left, cp, tp)


def build_mesh(degrees: ParallelDims, device_type: str) -> DeviceMesh:
    """Returns the mesh over all ranks of the default process group, with all axes, also those of size 1."""
    return init_device_mesh(device_type, tuple(degrees), mesh_dim_names=AXES)


def data_parallel_mesh(mesh: DeviceMesh, *, hsdp: bool = False) -> DeviceMesh:
    """Returns the axes over which gradients are summed: [dp_replicate, dp_shard_cp] for HSDP, [dp_replicate] for DDP, or [dp_shard_cp]; the
    same with efsdp for an `expert_mesh`. `hsdp`: both axes, also where nothing is sharded."""
    shards = mesh[EFSDP] if EFSDP in (mesh.mesh_dim_names or ()) else mesh[DP_SHARD, CP]._flatten(DP_SHARD_CP)
    replicas = mesh[DP_REPLICATE]
    if replicas.size() == 1:
        return shards
    return replicas if shards.size() == 1 and not hsdp else DeviceMesh._concatenate([replicas, shards])


def expert_mesh(mesh: DeviceMesh, degree: int) -> DeviceMesh:
    """Returns the same ranks with the axes pp, dp_replicate, efsdp and ep, the last of `degree` ranks. Collective: makes process groups."""
    pp, replicas = mesh[PP].size(), mesh[DP_REPLICATE].size()
    axes = (PP, DP_REPLICATE, EFSDP, EP)
    return DeviceMesh(mesh.device_type, mesh.mesh.view(pp, replicas, -1, degree), mesh_dim_names=axes)
