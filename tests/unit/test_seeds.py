"""Random numbers depend on what is computed: the slot, the step, and the rank's place on the axes that compute different things."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch

import train
from ft.seam import DataAssignment
from ft.start import SoloManager
from parallelisms.mesh import MeshCoordinate, ParallelDims
from training.data.loader import Batch
from training.progress import Progress


class Drawing(train.Run):
    """A rank whose model draws a number."""

    def __init__(self, seed: int, coordinate: MeshCoordinate) -> None:
        fakes: Any = SimpleNamespace
        self.config = fakes(training=fakes(seed=seed))
        self.manager, self.progress, self.coordinate = SoloManager(1), Progress(), coordinate
        self.world, self.device, self.signals = fakes(world_size=1), torch.device("cpu"), fakes(pending=0)
        self.pending_requests, self.save_overdue, self.budgets_end = 0, False, False
        self.drawn = list[float]()
        self.loader, self.model = fakes(load=self.load), fakes(forward_backward=self.draw)

    def load(self, slots: tuple[int, ...]) -> Iterator[Batch]:
        tokens = torch.zeros(1, 1, dtype=torch.int64)
        return (Batch(tokens, tokens, slot, (slot,), ends_slot) for slot in slots for ends_slot in (False, True))

    def draw(self, *_: torch.Tensor) -> torch.Tensor:
        self.drawn.append(torch.rand((), dtype=torch.float64).item())
        return torch.zeros(())


def drawn(seed: int, step: int, slot: int, coordinate: MeshCoordinate) -> list[float]:
    """Returns the numbers drawn by the two batches of the slot."""
    run = Drawing(seed, coordinate)
    run.compute_step(DataAssignment(step, (slot,)))
    return run.drawn


def test_the_same_work_draws_the_same_numbers():
    coordinate = MeshCoordinate(pp_rank=1, dp_rank=2, cp_rank=0, tp_rank=1)
    first = drawn(7, 3, 64, coordinate)
    torch.rand(5)  # whatever was drawn in between
    assert drawn(7, 3, 64, coordinate) == first


def test_other_work_draws_others():
    coordinates = [ParallelDims(2, 2, 2, 2, 1).coordinate(rank) for rank in range(16)]
    draws = [x for *work, at in product((0, 1), (0, 1), (0, 8), coordinates) for x in drawn(*work, at)]
    assert len(set(draws)) == len(draws) == 256


def test_tensor_parallel_ranks_draw_the_same():
    axes = ParallelDims(1, 1, 2, 1, 4)
    draws = {
        coordinate.dp_rank: {tuple(drawn(0, 0, 0, MeshCoordinate(0, coordinate.dp_rank, 0, tp))) for tp in range(4)}
        for coordinate in map(axes.coordinate, range(8))
    }
    assert [len(values) for values in draws.values()] == [1, 1] and draws[0] != draws[1]
