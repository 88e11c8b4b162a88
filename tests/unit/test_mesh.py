"""Degrees of the mesh axes: how they fill the ranks, the coordinate of each rank, and the errors if they do not fit."""

from __future__ import annotations

import pytest

from parallelisms.mesh import AXES, MeshCoordinate, ParallelDims, ParallelismConfig, degrees


def config(dp_replicate: int = 1, dp_shard: int = -1, cp: int = 1, tp: int = 1, pp: int = 1) -> ParallelismConfig:
    return ParallelismConfig(
        data_parallel_replicate_degree=dp_replicate,
        data_parallel_shard_degree=dp_shard,
        context_parallel_degree=cp,
        tensor_parallel_degree=tp,
        pipeline_parallel_degree=pp,
    )


def test_shards_take_what_the_others_leave():
    assert degrees(config(), 6) == ParallelDims(pp=1, dp_replicate=1, dp_shard=6, cp=1, tp=1)
    assert degrees(config(dp_replicate=2, cp=2, tp=2, pp=2), 32) == ParallelDims(2, 2, 2, 2, 2)
    assert degrees(config(dp_shard=3, tp=2), 6).data_parallel == 3


def test_seats_are_the_coordinates_of_a_mesh_in_the_order_of_the_axes():
    axes = ParallelDims(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    assert AXES == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert axes.coordinate(0) == MeshCoordinate(pp_rank=0, dp_rank=0, cp_rank=0, tp_rank=0)
    assert axes.coordinate(1) == MeshCoordinate(0, 0, 0, 1)
    assert axes.coordinate(2) == MeshCoordinate(0, 0, 1, 0)
    assert axes.coordinate(4) == MeshCoordinate(0, 1, 0, 0)
    assert axes.coordinate(12) == MeshCoordinate(0, 3, 0, 0)  # the second copy's first shard sees other sequences too
    assert axes.coordinate(24) == MeshCoordinate(1, 0, 0, 0)
    assert axes.coordinate(axes.world_size - 1) == MeshCoordinate(1, 5, 1, 1)
    assert len({axes.coordinate(rank) for rank in range(axes.world_size)}) == axes.world_size


def test_the_sequences_of_a_data_parallel_rank_are_counted_once():
    axes = ParallelDims(pp=2, dp_replicate=1, dp_shard=3, cp=2, tp=2)
    counting = [axes.coordinate(rank).dp_rank for rank in range(axes.world_size) if axes.coordinate(rank).counts_tokens]
    assert sorted(counting) == [0, 1, 2]


@pytest.mark.parametrize(
    ("asked", "world_size", "message"),
    [
        (
            config(dp_shard=3),
            4,
            (
                "parallelism.data_parallel_shard_degree = 3: the degrees must multiply to the number of ranks, 4; "
                "nearest: 4, or -1 for all that are left; or start 3 ranks (NPROC=3)"
            ),
        ),
        (
            config(dp_shard=3, tp=2),
            4,
            (
                "parallelism.data_parallel_shard_degree = 3: the degrees must multiply to the number of ranks, 4 "
                "(the other degrees take 2); nearest: 2, or -1 for all that are left; or start 6 ranks (NPROC=6)"
            ),
        ),
        (
            config(tp=3),
            4,
            (
                "parallelism.tensor_parallel_degree = 3: the degrees multiply to 3, which must divide the number of ranks, "
                "4; nearest: 2 or 4; or start a multiple of 3 ranks (NPROC=3)"
            ),
        ),
        (
            config(pp=2, tp=4),
            4,
            (
                "parallelism.pipeline_parallel_degree = 2: the degrees (with parallelism.tensor_parallel_degree = 4) "
                "multiply to 8, which must divide the number of ranks, 4; nearest: 1; or start a multiple of 8 ranks (NPROC=8)"
            ),
        ),
    ],
)
def test_degrees_that_do_not_fit_are_told_with_those_that_do(asked: ParallelismConfig, world_size: int, message: str):
    with pytest.raises(ValueError) as told:
        degrees(asked, world_size)
    assert str(told.value) == message


def test_names_the_axes_that_have_several_ranks():
    assert str(ParallelDims(1, 1, 2, 1, 4)) == "dp_shard 2 x tp 4"
    assert str(ParallelDims(1, 1, 1, 1, 1)) == "one rank"
