"""Run.check_budgets: when a run stops because the budgets of its data's sources end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ft.protocol.step import Ledger
from ft.seam import Commit
from tests.unit.fakes import Lines
from train import Run
from training.config import SkipConfig, TrainingConfig

SIZE = 4  # sequences of a slot, in one step


def budgets_end(*, step: int, end: int, groups: int = 1, inner_steps: int = 1, steps: int = 100) -> bool:
    """Returns True if the run stops after the commit that reaches `step`, of steps without holes by `groups` groups."""
    size = SIZE * inner_steps
    first = (step // inner_steps - 1) * groups * size
    slots = tuple((first + number * size, str(number)) for number in range(groups))
    commit = Commit(1.0, (0,), 1.0, groups, slots=slots, holes=())
    config = SimpleNamespace(training=TrainingConfig(steps=steps))
    run: Any = SimpleNamespace(
        slot_size=SIZE,
        inner_steps=inner_steps,
        config=config,
        world=SimpleNamespace(global_rank=0),
        log=Lines(),
        budgets_end=False,
    )
    Run.check_budgets(run, step, commit, end)
    assert bool(run.log.warnings) is run.budgets_end
    return bool(run.budgets_end)


@pytest.mark.parametrize("inner_steps", [1, 10])
def test_budgets_that_last_exactly_end_no_run(inner_steps: int) -> None:
    reached = range(inner_steps, 100, inner_steps)
    assert not any(budgets_end(step=step, end=100 * SIZE, inner_steps=inner_steps) for step in reached)


@pytest.mark.parametrize("inner_steps", [1, 10])
def test_two_groups_stop_while_two_more_steps_fit(inner_steps: int) -> None:
    reached = range(inner_steps, 100, inner_steps)
    stop = next(step for step in reached if budgets_end(step=step, end=100 * SIZE, groups=2, inner_steps=inner_steps))
    assert 2 * (stop + 2 * inner_steps) <= 100 < 2 * (stop + 3 * inner_steps)


@pytest.mark.parametrize("first", range(3, 40, 3))
@pytest.mark.parametrize("length", [1, 4, 9])
def test_what_skip_leaves_out_is_no_part_of_what_is_left(first: int, length: int) -> None:
    spans = [(first + 2, first + length + 2), (first, first + 1)]  # in one slot, in two, or overlapping
    documents = SkipConfig(1, 50, source="documents, not positions")
    training = TrainingConfig(skip=(*(SkipConfig(*span) for span in spans), documents))
    ledger, end = Ledger(SIZE, skip_ranges=spans), 40
    slots = list[int]()
    while (slot := min(ledger.assign(["0"]))) + SIZE <= end:
        slots.append(slot)
        ledger.commit([1.0])
    for number, slot in enumerate(slots, 1):
        assert training.sequences_left(slot + SIZE, end, SIZE) == (len(slots) - number) * SIZE
