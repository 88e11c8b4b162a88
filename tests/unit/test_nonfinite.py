"""Messages about a loss or gradient that is NaN or infinite."""

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch.distributed import HashStore

from parallelisms.distributed import gather_texts
from train import LocalStep, Run, SemiSyncRun
from training.loss import describe_nonfinite
from training.optimizer import Update


def test_nothing_is_said_of_what_is_finite() -> None:
    assert describe_nonfinite(0, [(0, (0, 1), 3.5)], {"weight": torch.ones(2)}) == ""


def test_the_loss_names_slot_and_positions() -> None:
    losses = [
        (96, range(96, 100), 3.5),
        (96, range(100, 104), math.nan),
        (200, (207,), math.inf),
        (200, (1, 5), math.nan),
    ]
    assert describe_nonfinite(3, losses, {}) == (
        "rank 3: loss nan at slot 96, positions 100-103; loss inf at slot 200, position 207; "
        "loss nan at slot 200, positions 1, 5"
    )


def test_the_gradient_names_its_parameter_and_the_text_it_came_from() -> None:
    gradients = {
        "tok_embeddings.weight": torch.tensor([1.0, math.nan, math.inf, -math.inf]),
        "layers.0.attention.wq.weight": torch.ones(3),
        "norm.weight": torch.tensor([math.inf, 2.0]),
    }
    assert describe_nonfinite(0, [(8, range(8, 12), 3.5)], gradients) == (
        "rank 0: gradient of tok_embeddings.weight (3 of 4 values: nan and inf); "
        "gradient of norm.weight (1 of 2 values: inf); its losses are finite (positions 8-11)"
    )


def test_a_stream_has_no_positions() -> None:
    assert describe_nonfinite(0, [(8, (), math.nan)], {}).endswith("nan at slot 8, in a stream, without positions")


def test_a_long_list_is_counted_instead() -> None:
    gradients = {f"layers.{n}.w": torch.tensor([math.nan]) for n in range(10)}
    text = describe_nonfinite(0, [(n, (n,), math.nan) for n in range(4)], gradients)
    assert "loss nan at slot 2, position 2; 1 more local batches; gradient of layers.0.w" in text
    assert text.endswith("gradient of layers.2.w (1 of 1 values: nan); 7 more parameters")


def test_a_step_without_this_group_names_what_it_left_out_each_time() -> None:
    """The group contributes zeros with on_spike = "stop"; the other groups commit the step."""
    said: list[str] = []
    run: Any = SimpleNamespace(
        world=SimpleNamespace(global_rank=0, world_size=1, store=HashStore()),
        config=SimpleNamespace(training=SimpleNamespace(on_spike="stop", steps=9)),
        progress=SimpleNamespace(phase=lambda name: nullcontext()),
        manager=SimpleNamespace(step=0, reduce=lambda *sums: sums, commit=lambda sums: object()),
        model=SimpleNamespace(parts=[]),
        log=SimpleNamespace(warning=lambda text, *values: said.append(text % values)),
    )
    run.nonfinite = partial(Run.nonfinite, run)
    losses: Any = [(SimpleNamespace(slot=40, sequence_positions=range(40, 48)), torch.tensor(math.nan))]
    for step in (4, 5):
        run.manager.begin_step = lambda until, step=step: SimpleNamespace(steps_before=step)
        run.compute_step = lambda _, step=step: LocalStep([8.0], math.nan, False, step, losses)
        with suppress(AttributeError):  # the update, which is not looked at here
            Run.train_step(run)
    line = "is committed without this group: rank 0: loss nan at slot 40, positions 40-47"
    assert said == [f"step 5 {line}", f"step 6 {line}"]


def test_a_step_that_is_made_again_has_new_texts() -> None:
    store = HashStore()
    worlds: list[Any] = [SimpleNamespace(global_rank=rank, world_size=2, store=store) for rank in range(2)]
    with ThreadPoolExecutor(2) as ranks:
        for attempt in ("first", "second"):
            waits = ranks.submit(gather_texts, worlds[0], "step 5", f"{attempt} of 0")
            wanted = [f"{attempt} of {rank}" for rank in range(2)]
            assert gather_texts(worlds[1], "step 5", wanted[1]) == waits.result() == wanted


def test_a_norm_may_be_too_great_where_each_gradient_is_finite() -> None:
    world = SimpleNamespace(global_rank=0, world_size=1, store=HashStore())
    run: Any = SimpleNamespace(world=world, model=SimpleNamespace(parts=[]))
    error = Run.nonfinite(run, LocalStep([1.0], 3.5, True, 4, []))
    assert str(error) == "step 5 not applied: the gradient norm is not finite"


@pytest.mark.parametrize("loss", [3.5, math.nan])
def test_a_group_that_steps_by_itself_keeps_such_a_gradient_until_it_is_named(loss: float) -> None:
    weight, found = torch.nn.Parameter(torch.ones(2)), list[object]()

    class Computed(Run):
        def compute_step(self, assignment: Any, batches: Any) -> LocalStep:
            found.append(weight.grad)
            weight.grad = torch.full((2,), math.nan)
            return LocalStep([8.0], loss, math.isfinite(loss), assignment.steps_before, [])

    class OverComputed(SemiSyncRun, Computed): ...

    run: Any = object.__new__(OverComputed)
    run.optimizer = torch.optim.SGD([weight])

    def update(step: int, tokens: float) -> Update:
        if not tokens:
            run.optimizer.zero_grad()
        return Update(math.nan, 0.0)

    run.optimizer_step = SimpleNamespace(step=update)
    run.progress, run.loader = MagicMock(), MagicMock()
    for step in (0, 8):
        assert not run.compute_step(SimpleNamespace(steps_before=step, slots=(0, 4))).finite
        assert weight.grad is not None
    assert found == [None, None], "and no later window has it"
