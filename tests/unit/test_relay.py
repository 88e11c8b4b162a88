"""Of several groups one writes the figures; when the role moves, no step is missing and none is there twice."""

from __future__ import annotations

import json
from pathlib import Path

from training.relay import Relay
from training.sinks import Sinks, open_sinks


class Group:
    def __init__(self, folder: Path, *, writes: bool) -> None:
        self.folder, self.writes = folder, writes
        self.relay = Relay(folder / "metrics.jsonl", lambda: self.writes, self.open)
        self.sinks = self.relay.sinks()

    def open(self, resumed_step: int | None) -> Sinks:
        return open_sinks(self.folder, tensorboard_folder="tb", resumed_step=resumed_step)

    def commits(self, step: int, *, looks: bool = False) -> None:
        self.sinks.journals[0].write(step, {"loss": float(step)})
        self.sinks.charts[0].write(step, {"loss_metrics/global_avg_loss": float(step)})
        if looks:
            self.sinks.journals[0].write(step, {"validation_loss": float(step)})


def rows(folder: Path) -> list[tuple[int, bool]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(row["step"], "validation_loss" in row) for row in map(json.loads, lines)]


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
