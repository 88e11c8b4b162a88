"""What happened to a group: a line for each event, kept over all starts, and the counts of this one."""

from __future__ import annotations

import json
from pathlib import Path

from training.events import FILE_NAME, Events


def test_a_line_for_each_event_over_all_starts(tmp_path: Path) -> None:
    folder = tmp_path / "groups" / "1"
    first = Events(folder, wall_clock=lambda: 1.5)
    assert first.summary() == "" and not folder.exists(), "a job without groups has no such file"
    first("quorum", 0, quorum_id=1, groups=["0", "1", "2"], healing=["2", "1"])
    first("weights differ", 99, rank=1, groups=["2"])
    second = Events(folder, wall_clock=lambda: 2.5)
    second("healed", 100, bytes=12)
    rows = [json.loads(line) for line in (folder / FILE_NAME).read_text().splitlines()]
    assert rows == [
        {"time": 1.5, "step": 0, "event": "quorum", "quorum_id": 1, "groups": ["0", "1", "2"], "healing": ["2", "1"]},
        {"time": 1.5, "step": 99, "event": "weights differ", "rank": 1, "groups": ["2"]},
        {"time": 2.5, "step": 100, "event": "healed", "bytes": 12},
    ]
    assert first.heals == 2
    assert first.summary() == "quorums 1, heals of this group 0, failed reductions 0, differences of weights 1"
    assert second.summary().startswith("quorums 0, heals of this group 1")
