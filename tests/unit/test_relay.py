"""Of several groups one writes the figures; when the role moves, no step is missing and none is there twice."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from ft.protocol.ledger import Ledger
from scripts.samples import prove, read
from training.relay import ROWS_KEPT, Relay, Row
from training.sinks import Sinks, open_sinks


class Group:
    def __init__(self, folder: Path, *, writes: bool) -> None:
        self.folder, self.writes, self.quorum = folder, writes, ("epoch", 1)
        self.relay = Relay(folder, lambda: self.quorum if self.writes else None, self.open)
        self.sinks = self.relay.sinks()

    def open(self, resumed_step: int | None) -> Sinks:
        return open_sinks(self.folder, tensorboard_folder="tb", resumed_step=resumed_step)

    def commits(self, step: int, *, looks: bool = False, of: str = "ab") -> None:
        self.sinks.journals[0].write(step, {"loss": float(step)})
        self.sinks.charts[0].write(step, {"loss_metrics/global_avg_loss": float(step)})
        self.sinks.records[0].write(step, {"slots": {str(2 * step + n): owner for n, owner in enumerate(of)}})
        if looks:
            self.sinks.journals[0].write(step, {"validation_loss": float(step)})


def rows(folder: Path) -> list[tuple[int, bool]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [(row["step"], "validation_loss" in row) for row in map(json.loads, lines)]
    assert [step for step, look in found if not look] == list(owners(folder)), "both files have the same steps"
    return found


def owners(folder: Path) -> dict[int, str]:
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    found = {row["step"]: "".join(row["slots"].values()) for row in lines}
    assert len(found) == len(lines), "a step is there twice"
    return found


def test_the_writer_dies_before_it_wrote_and_another_fills_in(tmp_path: Path):
    a, b = Group(tmp_path, writes=True), Group(tmp_path, writes=False)
    for step in (1, 2, 3):
        a.commits(step)
        b.commits(step)
    for step in (4, 5):  # committed by both, but a was killed before a line of it was written
        b.commits(step, looks=step == 5)
    b.writes = True
    b.commits(6)
    assert rows(tmp_path) == [(1, False), (2, False), (3, False), (4, False), (5, False), (5, True), (6, False)]


def test_the_role_comes_and_goes(tmp_path: Path):
    groups = [Group(tmp_path, writes=False), Group(tmp_path, writes=False)]
    for step in range(1, 13):
        for number, group in enumerate(groups):
            group.writes = step // 3 % 2 == number
        for group in groups:
            group.commits(step)
    assert rows(tmp_path) == [(step, False) for step in range(1, 13)]


def test_what_lies_past_the_first_step_is_of_a_life_that_ended(tmp_path: Path):
    before = Group(tmp_path, writes=True)
    for step in range(1, 9):
        before.commits(step)
    before.relay.close()
    after = Group(tmp_path, writes=True)  # all groups began again at the checkpoint of step 5
    after.commits(6)
    assert rows(tmp_path) == [(step, False) for step in range(1, 7)]


def test_a_step_that_the_others_did_without_its_writer_is_taken_back(tmp_path: Path):
    """The one that wrote held all sums of step 4, died, and the others reduced that step again."""
    a, b = Group(tmp_path, writes=True), Group(tmp_path, writes=False)
    for step in (1, 2, 3):
        a.commits(step)
        b.commits(step)
    a.commits(4)
    b.commits(4, of="b")
    b.writes = True
    b.commits(5, of="b")
    assert owners(tmp_path) == {1: "ab", 2: "ab", 3: "ab", 4: "b", 5: "b"}


def test_one_that_was_stopped_and_wakes_writes_to_nobody(tmp_path: Path):
    a, b = Group(tmp_path, writes=True), Group(tmp_path, writes=False)
    for step in (1, 2):
        a.commits(step)
        b.commits(step)
    b.writes = True
    b.commits(3)
    b.relay.close()  # the job is over
    rows_of_b = rows(tmp_path)
    a.relay._put(Row("journals", 3, {"loss": 3.0}))
    assert rows(tmp_path) == rows_of_b == [(1, False), (2, False), (3, False)]


def test_one_that_was_stopped_for_long_takes_nothing_back(tmp_path: Path):
    """It wakes between the step and its figures, a writer by a quorum that is over; the others have gone on for longer than any of them
    remembers."""
    a, b = Group(tmp_path, writes=True), Group(tmp_path, writes=False)
    for step in range(1, ROWS_KEPT + 3):
        if step <= 2:
            a.commits(step)
        else:
            b.writes, b.quorum = True, ("epoch", 2)
        b.commits(step)
    a.commits(3)
    b.commits(ROWS_KEPT + 3)
    assert rows(tmp_path) == [(step, False) for step in range(1, ROWS_KEPT + 4)]


def test_a_new_job_writes_whatever_the_last_one_claimed(tmp_path: Path):
    """Its lighthouse has begun to count anew."""
    a = Group(tmp_path, writes=True)
    a.quorum = ("epoch", 7)
    a.commits(1)
    a.relay.close()
    b = Group(tmp_path, writes=True)
    b.quorum = ("another", 1)
    b.commits(2)
    assert rows(tmp_path) == [(1, False), (2, False)]


def test_a_job_that_goes_back_to_a_checkpoint_has_each_step_once(tmp_path: Path):
    """The groups live on; only what they had is gone."""
    a, b = Group(tmp_path, writes=True), Group(tmp_path, writes=False)
    for first in (1, 4):
        for step in range(first, 8):
            a.commits(step)
            b.commits(step, looks=step == 5)
    b.writes = True
    b.commits(8, of="b")
    assert rows(tmp_path) == [(step, look) for step in range(1, 9) for look in ({False, step == 5})]


def test_a_group_that_heals_can_fill_in_what_it_never_saw(tmp_path: Path):
    """Two die in a row: the writer before a line of steps 2 and 3 was written, then the one that had them."""
    a, b, healed = (Group(tmp_path, writes=writes) for writes in (True, False, True))
    a.commits(1)
    for step in (1, 2, 3):
        b.commits(step)
    healed.relay.load_state_dict(b.relay.state_dict())
    healed.commits(4)
    assert rows(tmp_path) == [(step, False) for step in (1, 2, 3, 4)]


# ------------------------------------------------------------------------------------------------ all die; a checkpoint goes on


LAST = ROWS_KEPT // 2 + 10  # step of the checkpoint; the first ones, and half of another, nobody remembers
LOOKS = 5


class History:
    """What a job has trained on: its ledger, and a row for each step."""

    def __init__(self) -> None:
        self.ledger, self.rows = Ledger(slot_size=2), dict[int, dict[str, Any]]()

    def step(self, number: int, *deal: str, dead: str = "") -> None:
        """Dealt to these; `dead` gave nothing."""
        dealt = self.ledger.deal(deal)
        self.ledger.commit([float(owner != dead) for owner in dealt.values()])
        slots = {str(slot): owner for slot, owner in dealt.items() if owner != dead}
        self.rows[number] = {"slot_size": 2, "slots": slots, "holes": list(self.ledger.holes)}

    def tell(self, group: Group, *steps: int) -> None:
        for step in steps:
            group.sinks.journals[0].write(step, {"loss": float(step)})
            group.sinks.records[0].write(step, self.rows[step])
            if step == LOOKS:
                group.sinks.journals[0].write(step, {"validation_loss": float(step)})


def lose(path: Path, lines: int) -> None:
    """The machine lost power: the last of them are gone, and of one there is a part."""
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[: len(whole) - lines]) + b'{"step": 9')


@pytest.mark.parametrize("lost", [(0, 0), (1, 0), (0, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("further", [-1, 0, 1, 3, 2 * ROWS_KEPT])
@pytest.mark.parametrize("of", ["one", "others"])
def test_a_checkpoint_brings_the_rows_of_its_steps(tmp_path: Path, of: str, further: int, lost: tuple[int, int]):
    """The last step is committed by a alone, which writes, and dies; the others make it anew, and go `further`, or not even that far. Then
    all die; of the files so many lines are `lost`. The newest checkpoint is of that step, of one or the others; each group has it again,
    and the role moves with each step."""
    a, b = Group(tmp_path, writes=True), Group(tmp_path, writes=False)
    alone = History()
    for step in range(1, LAST):
        alone.step(step, "a", "b", "c")
    others = deepcopy(alone)
    alone.step(LAST, "a", "b", "c")
    others.step(LAST, "a", "b", "c", dead="a")
    alone.tell(a, *range(1, LAST + 1))
    others.tell(b, *range(1, LAST))
    figures, history = a.relay.state_dict(), deepcopy(alone)
    if further >= 0:
        b.writes, b.quorum = True, ("epoch", 2)
        others.tell(b, LAST)
        if of == "others":
            figures, history = b.relay.state_dict(), deepcopy(others)
        for step in range(LAST + 1, LAST + 1 + further):
            others.step(step, "b", "c")
            others.tell(b, step)
    lose(tmp_path / "metrics.jsonl", lost[0])
    lose(tmp_path / "samples.jsonl", lost[1])

    groups = [Group(tmp_path, writes=False), Group(tmp_path, writes=False)]
    for group in groups:
        group.relay.load_state_dict(json.loads(json.dumps(figures)))
    steps = range(1, LAST + 4)
    for step in steps[LAST:]:
        history.step(step, "d", "e")
        for number, group in enumerate(groups):
            group.quorum, group.writes = ("another", step), number == step % 2
            history.tell(group, step)
    assert rows(tmp_path) == [(step, look) for step in steps for look in ({False, step == LOOKS})]
    written = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert written == [{"step": step, **history.rows[step]} for step in steps]
    assert prove(read(tmp_path / "samples.jsonl")).exact


def test_figures_are_on_disk_where_a_checkpoint_is_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink().name))
    a, b = Group(tmp_path, writes=True), Group(tmp_path, writes=False)
    for group in (a, b):
        group.commits(1)
        synced.clear()
        group.sinks.sync()
        assert set(synced) == ({"metrics.jsonl", "samples.jsonl"} if group is a else set())
