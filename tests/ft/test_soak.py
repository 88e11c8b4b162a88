"""A short soak: processes, orders and checks of proofs/soak.py, a dozen changes, two of them by SIGKILL; it ends, and goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from proofs.soak import Done, judge_logs, soak


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
@pytest.mark.timeout(600)
def test_a_dozen_changes_one_history(tmp_path: Path):
    assert soak(tmp_path, changes=6, kills=1, seed=1) == []
    assert soak(tmp_path, changes=12, kills=2, seed=1) == [], "in other processes, from the checkpoint"
    done = Done.read(tmp_path / "soak.json")
    assert done.lives == 2 and done.changes >= 12 and done.orders["kill"] >= 2 and done.steps > 12
    assert all(line.holds for line in judge_logs(tmp_path)), judge_logs(tmp_path)
    assert len((tmp_path / "soak.jsonl").read_text().splitlines()) == 2
