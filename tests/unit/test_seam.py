"""What every manager promises the training loop. Each kind of manager is one more entry of MANAGERS."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ft import Seam, SoloManager

MANAGERS: dict[str, Callable[[], Seam]] = {"solo": lambda: SoloManager(slot_size=8)}


@pytest.fixture(params=MANAGERS)
def manager(request: pytest.FixtureRequest):
    made = MANAGERS[request.param]()
    yield made
    made.close()


def committed(manager: Seam, tokens: float = 100.0, loss_sum: float = 250.0):
    manager.begin_step()
    return manager.commit(manager.reduce([tokens], loss_sum, True))


def test_a_commit_divides_by_the_tokens_that_went_in(manager: Seam):
    commit = committed(manager)
    assert (commit.divisor, commit.mean_loss, commit.contributors, commit.quorum_size) == (100.0, 2.5, (0,), 1)


def test_step_and_data_move_on_commit_only(manager: Seam):
    first = manager.begin_step()
    assert manager.begin_step() == first and manager.step == 0
    sums = manager.reduce([100.0], 250.0, True)
    assert manager.step == 0
    manager.commit(sums)
    assert manager.step == 1
    assert manager.begin_step().slots == (first.slots[0] + 8,)


def test_a_step_that_cannot_hold_changes_nothing(manager: Seam):
    before, state = manager.begin_step(), manager.state_dict()
    assert manager.commit(manager.reduce([100.0], float("nan"), False)) is None
    assert (manager.begin_step(), manager.state_dict()) == (before, state)


def test_a_step_without_a_target_is_no_step(manager: Seam):
    manager.begin_step()
    with pytest.raises(RuntimeError, match="step 1: none of the sequences from 0 on has a target to learn"):
        manager.commit(manager.reduce([0.0], 0.0, True))


def test_the_cursor_survives_a_restart(manager: Seam):
    for _ in range(3):
        committed(manager)
    state = manager.state_dict()
    assert state == {"step": 3, "position": 24}
    resumed = SoloManager(slot_size=4)  # another batch size goes on at the same sequence
    resumed.load_state_dict(state)
    assert resumed.begin_step() == type(resumed.begin_step())(3, (24,))


def test_a_name_is_registered_once(manager: Seam):
    manager.register("model", dict, lambda state: None)
    with pytest.raises(ValueError, match='"model" is registered already'):
        manager.register("model", dict, lambda state: None)


def test_leaving_and_closing_twice_are_harmless(manager: Seam):
    manager.attach([])
    manager.leave()
    manager.close()
    manager.close()
