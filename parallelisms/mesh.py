"""Where the ranks stand: the axes of the device mesh, outermost first.

Pharos' axis names, outer to inner, are pp, dp_replicate, dp_shard, cp, tp; an axis exists once a technique uses it.
Fault tolerance adds no axis here: replica groups are data parallel to each other outside of the mesh (ft/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

DP_SHARD = "dp_shard"


@dataclass(frozen=True)
class ParallelismConfig:
    """[parallelism]: how the ranks of one replica group share the work."""

    data_parallel_shard_degree: Annotated[
        int, "ranks that shard the parameters (FSDP2); -1: all of them", ">= -1", "!= 0"
    ] = -1
    fsdp_reshard_after_forward: Annotated[
        Literal["default", "always", "never"],
        "free the gathered parameters between forward and backward; default: when there is more than one shard",
    ] = "default"


def data_parallel_degree(config: ParallelismConfig, world_size: int) -> int:
    """How many ranks see different data. Raises ValueError when the degrees do not fill `world_size`."""
    degree = config.data_parallel_shard_degree
    if degree in (-1, world_size):
        return world_size
    raise ValueError(
        f"parallelism.data_parallel_shard_degree = {degree}: the degrees must multiply to the number of ranks, {world_size}; "
        f"nearest: {world_size}, or -1 for all of them; or start {degree} ranks (NPROC={degree})"
    )


def build_mesh(config: ParallelismConfig, device_type: str, world_size: int) -> DeviceMesh:
    """A mesh over all ranks of the default process group."""
    return init_device_mesh(device_type, (data_parallel_degree(config, world_size),), mesh_dim_names=(DP_SHARD,))
