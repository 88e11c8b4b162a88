"""Random numbers follow from what is computed: the slot, the step, and the rank's place on the axes that compute different things."""

from __future__ import annotations

from itertools import product

import torch

from parallelisms.mesh import Degrees, MeshCoordinate
from parallelisms.seeds import seed_slot


def drawn(seed: int, step: int, slot: int, coordinate: MeshCoordinate) -> float:
    seed_slot(seed, step, slot, coordinate)
    return torch.rand((), dtype=torch.float64).item()


def test_the_same_work_draws_the_same_numbers():
    coordinate = MeshCoordinate(pp_rank=1, dp_rank=2, cp_rank=0, tp_rank=1)
    first = drawn(7, 3, 64, coordinate)
    torch.rand(5)  # whatever was drawn in between
    assert drawn(7, 3, 64, coordinate) == first


def test_other_work_draws_others():
    coordinates = [Degrees(2, 2, 2, 2, 1).coordinate(rank) for rank in range(16)]
    draws = [drawn(*work, coordinate) for *work, coordinate in product((0, 1), (0, 1), (0, 8), coordinates)]
    assert len(set(draws)) == len(draws) == 128


def test_tensor_parallel_ranks_draw_the_same():
    axes = Degrees(1, 1, 2, 1, 4)
    draws = {
        coordinate.dp_rank: {drawn(0, 0, 0, MeshCoordinate(0, coordinate.dp_rank, 0, tp)) for tp in range(4)}
        for coordinate in map(axes.coordinate, range(8))
    }
    assert [len(values) for values in draws.values()] == [1, 1] and draws[0] != draws[1]
