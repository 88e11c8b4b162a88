"""The events of a group: a line for each, kept over all starts, and the counts of the current start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.storage import AtOnce, Disk
from training.background_writer import EVENTS_FILE, Events


def test_a_line_for_each_event_over_all_starts(tmp_path: Path) -> None:
    folder = tmp_path / "groups" / "1"
    first = Events(folder, AtOnce(), wall_clock=lambda: 1.5)
    assert first.summary() == "" and not folder.exists(), "a job without groups has no such file"
    first("quorum", 0, quorum_id=1, groups=["0", "1", "2"], healing=["2", "1"])
    first("weights differ", 99, rank=1, groups=["2"])
    second = Events(folder, AtOnce(), wall_clock=lambda: 2.5)
    second("healed", 100, bytes=12)
    rows = [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]
    assert rows == [
        {"time": 1.5, "step": 0, "event": "quorum", "quorum_id": 1, "groups": ["0", "1", "2"], "healing": ["2", "1"]},
        {"time": 1.5, "step": 99, "event": "weights differ", "rank": 1, "groups": ["2"]},
        {"time": 2.5, "step": 100, "event": "healed", "bytes": 12},
    ]
    assert first.heals == 2
    assert first.summary() == "quorums 1, heals of this group 0, failed reductions 0, differences of weights 1"
    assert second.summary().startswith("quorums 0, heals of this group 1")


@pytest.mark.parametrize("room", [0, 20, 90])
def test_a_full_disk_tears_no_line_and_takes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    disk, background_writer = Disk(tmp_path, monkeypatch), AtOnce()
    events = Events(tmp_path, background_writer, wall_clock=lambda: 1.5)
    events("quorum", 0, quorum_id=1)
    with disk.full(room):
        for step in (1, 2, 3):
            events("failed", step, reason="x" * 30)
        assert [json.loads(line)["step"] for line in (tmp_path / EVENTS_FILE).read_text().splitlines()][:1] == [0]
    events("failed", 4)
    assert [json.loads(line)["step"] for line in (tmp_path / EVENTS_FILE).read_text().splitlines()] == [0, 1, 2, 3, 4]
    assert [words.split(":")[0].split(",")[0] for words in background_writer.said] == [
        "events cannot be written",
        "events can be written again",
    ]


def test_what_a_kill_left_of_a_line_is_taken_out(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_text('{"step": 1}\n{"ste')
    Events(tmp_path, AtOnce())("failed", 2)
    assert [json.loads(line)["step"] for line in (tmp_path / EVENTS_FILE).read_text().splitlines()] == [1, 2]
