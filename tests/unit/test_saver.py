"""The end of a run: no group reports it as finished before the last step is saved, and some group saves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ft.seam import GroupReleased
from tests.unit.checkpoint_job import steps_in
from tests.unit.test_checkpoint_groups import Group
from training.checkpoint import CheckpointFailed
from training.progress import Progress
from training.saver import GRACE_S, LAST_SAVE_RETRY_S, Saver

LAST = 4


class Manager:
    """The part of a manager that a Saver uses. `group` is the writer if its quorum is a number."""

    step, may_exit, rewinds = LAST, True, ()

    def __init__(self, group: Group) -> None:
        self.group, self.needs_new_quorum, self.finished = group, False, False
        self.told: list[bool] = []
        self.stays = True
        self.regroups: Callable[[], None] = lambda: None

    @property
    def writer_quorum(self) -> tuple[str, int] | None:
        return None if self.group.quorum is None else ("epoch", self.group.quorum)

    def regroup(self, until: int) -> None:
        assert until == LAST
        self.needs_new_quorum = False
        self.regroups()
        if not self.stays:
            raise GroupReleased(has_state=True)

    def finish(self, *, saved: bool) -> None:
        self.told.append(saved)


class End:
    """The end of a run in one group. `happens`: functions by time in seconds on its clock, which advances while it waits."""

    def __init__(self, folder: Path, quorum: int | None, **settings: Any) -> None:
        self.group = Group(folder, quorum, **settings)
        self.group.train(LAST)
        self.manager, self.said, self.told, self.now_s = Manager(self.group), list[str](), list[str](), 0.0
        self.asked, self.tries, self.happens = False, 0, dict[float, Callable[[], None]]()
        self.fails: Exception | None = None

    def make(self) -> None:
        Saver(
            self.group.checkpointer,
            self.manager,
            Progress(),
            sync=self._sync,
            report=self.told.append,
            info=self.said.append,
            clock=lambda: self.now_s,
            sleep=self._sleep,
        ).save_last(lambda: self.asked)

    def _sync(self) -> None:
        self.tries += 1
        if self.fails:
            raise self.fails

    def _sleep(self, seconds: float) -> None:
        assert self.now_s < 3600, "it waits for ever"
        self.now_s += seconds
        for at_s in [at_s for at_s in self.happens if at_s <= self.now_s]:
            self.happens.pop(at_s)()


def test_the_writer_saves_and_tells(tmp_path: Path):
    end = End(tmp_path, 1)
    end.make()
    assert steps_in(tmp_path) == [LAST] and end.manager.told == [True] and end.said == end.told == [] and end.now_s == 0


def test_others_wait_until_it_stands(tmp_path: Path):
    writer, other = End(tmp_path, 1), End(tmp_path, None)
    other.happens[100.0] = writer.make
    other.make()
    assert other.manager.told == [True] and other.tries == 0 and other.now_s == 100
    assert other.said == [f"step {LAST} is the last: waiting for another group to write its checkpoint"]


def test_groups_without_a_common_folder_hear_of_it(tmp_path: Path):
    other = End(tmp_path, None)
    other.happens[5.0] = lambda: setattr(other.manager, "finished", True)
    other.make()
    assert steps_in(tmp_path) == [] and other.manager.told == [True] and other.now_s == 5


def test_the_writer_dies_in_its_last_save_and_the_next_one_makes_it(tmp_path: Path):
    other = End(tmp_path, None)
    other.happens[5.0] = lambda: setattr(other.manager, "needs_new_quorum", True)
    other.manager.regroups = lambda: setattr(other.group, "quorum", 2)
    other.make()
    assert steps_in(tmp_path) == [LAST] and other.manager.told == [True] and other.tries == 1


def test_failing_storage_is_tried_until_it_works(tmp_path: Path):
    end = End(tmp_path, 1)
    message = "checkpoint: step 4 not saved: No space left on device"
    end.fails = CheckpointFailed(message)
    end.happens[5 * LAST_SAVE_RETRY_S + 1] = lambda: setattr(end, "fails", None)
    end.make()
    assert end.tries == 7 and steps_in(tmp_path) == [LAST] and end.manager.told == [True]
    [told] = end.told
    assert told == f"{message}; this is the last step: retried every 10 s until SIGTERM"


def test_failing_storage_is_tried_until_sigterm_and_nothing_is_finished(tmp_path: Path):
    end = End(tmp_path, 1)
    end.fails = OSError(28, "No space left on device")
    end.happens[100.0] = lambda: setattr(end, "asked", True)
    with pytest.raises(
        CheckpointFailed,
        match=r"No space left on device.*stopped before step 4, the last, was known to be saved",
    ):
        end.make()
    assert end.manager.told == [False] and steps_in(tmp_path) == []


def test_who_was_asked_to_leave_with_the_last_step_saves_it(tmp_path: Path):
    end = End(tmp_path, 1)
    end.asked = True
    end.make()
    assert steps_in(tmp_path) == [LAST] and end.manager.told == [True]


@pytest.mark.parametrize("stands", [True, False])
def test_who_waits_and_is_asked_to_leave_waits_a_little(tmp_path: Path, stands: bool):
    """All groups got SIGTERM: the writer needs a few more seconds."""
    writer, other = End(tmp_path, 1), End(tmp_path, None)
    other.asked = True
    if stands:
        other.happens[GRACE_S - 1] = writer.make
        other.make()
    else:
        with pytest.raises(CheckpointFailed, match="known to be saved"):
            other.make()
    assert other.manager.told == [stands]


def test_who_is_asked_to_leave_while_it_regroups_goes(tmp_path: Path):
    other = End(tmp_path, None)
    other.manager.needs_new_quorum = True
    other.manager.stays = False
    with pytest.raises(CheckpointFailed):
        other.make()
    assert other.manager.told == [False]


def test_where_nothing_is_to_be_saved_nobody_waits(tmp_path: Path):
    end = End(tmp_path, None, enable=False)
    end.make()
    assert end.manager.told == [True] and end.now_s == 0
