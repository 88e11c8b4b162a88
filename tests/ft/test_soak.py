"""A short soak: processes, orders and checks of bench/soak.py, each kind of order at least once; it ends, and resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.soak import Done, judge_logs, soak


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
@pytest.mark.timeout(600)
def test_ten_changes_one_history(tmp_path: Path):
    """The first life of this seed begins with an eviction, the second with SIGKILL and a group that leaves."""
    assert soak(tmp_path, changes=3, kills=0, seed=215) == []
    assert soak(tmp_path, changes=10, kills=1, seed=215) == [], "in other processes, from the checkpoint"
    done = Done.read(tmp_path / "soak.json")
    assert done.lives == 2 and done.changes >= 10 and done.steps > 10
    assert done.orders.keys() == {"cut", "evict", "leave", "kill"}
    assert all(line.holds for line in judge_logs(tmp_path)), judge_logs(tmp_path)
    looks = [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text().splitlines()]
    assert [look["life"] for look in looks] == [1, 2] and all(look["group a: threads"] > 0 for look in looks)
