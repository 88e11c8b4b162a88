"""bench/goodput.py counts each committed step once, and claims no goal beyond the measurements."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import cast

import pytest

from bench.goodput import TOKENS, GoodputRun, KilledJob, figures, reached, verdicts
from bench.job import RecoveryJob, ReplicaGroup
from tests.unit.test_recovery import line


class FakeJob:
    def __init__(self, groups: list[ReplicaGroup], folder: Path) -> None:
        self.groups, self.folder = groups, folder


def job(tmp_path: Path, *texts: str, command: str = "") -> RecoveryJob:
    program = [sys.executable, "-c", command]
    groups = [ReplicaGroup(str(number), tmp_path, program, {}) for number in range(len(texts))]
    for group, text in zip(groups, texts, strict=True):
        (group.folder / "event_log.0.jsonl").write_text(text)
        group.read()
    return cast(RecoveryJob, FakeJob(groups, tmp_path))


def commits(*steps: tuple[int, int], at_s: float = 0.0) -> str:
    return "".join(line("commit", at_s + step, step, participants) for step, participants in steps)


def test_a_step_counts_once_with_as_many_as_took_part(tmp_path: Path):
    first, second = commits((1, 3), (2, 3), (3, 2), (4, 2)), commits((1, 3), (2, 3))
    made = KilledJob(job(tmp_path, first, second), 0.0)
    assert made.tokens(0) == 10 * TOKENS and made.tokens(2) == 4 * TOKENS


def test_what_a_restart_took_back_does_not_count(tmp_path: Path):
    """The run was at step 30 when the clock started and reached 33; it restarts from 20 and reaches 34."""
    before, after = (
        commits(*((step, 3) for step in range(1, 34))),
        commits(*((step, 3) for step in range(21, 35)), at_s=50),
    )
    made = KilledJob(job(tmp_path, before + line("start", 60.0, 20) + after), 0.0, 5.0)
    assert made.tokens(30) == 4 * 3 * TOKENS
    assert made.redone(30.5) == 3


def test_who_ended_is_started_again_and_a_restart_starts_all(tmp_path: Path):
    made = KilledJob(job(tmp_path, "", "", command="import sys; sys.stdin.read()"), 0.0, 5.0)
    try:
        made.start()
        groups = made.job.groups
        first = [group.process for group in groups]
        assert all(first) and made.ended() == [] and not any(group.runs for group in groups)
        made.kill(groups[0])
        assert all(process and process.returncode for process in first) and made.ended() == [], "they are to start"
        made.restart()
        assert all(group.process and group.process.poll() is None for group in groups)
        groups[1].process.communicate("")  # type: ignore[union-attr]
        assert made.ended() == [groups[1]]
    finally:
        for group in made.job.groups:
            group.kill()


def test_who_has_committed_in_this_life_runs(tmp_path: Path):
    [group] = job(tmp_path, line("commit", time.monotonic() - 9, 1), command="import sys; sys.stdin.read()").groups
    group.start()
    try:
        assert not group.runs
        with (group.folder / "event_log.0.jsonl").open("a") as log:
            log.write(line("commit", time.monotonic(), 2))
        group.read()
        assert group.runs
    finally:
        group.kill()
    assert not group.runs


def runs(*rates: float) -> list[GoodputRun]:
    return [GoodputRun(10.0, 10 * rate, kills=1) for rate in rates]


def test_goals_are_told_of_the_best_restart():
    seen = {
        "ours": runs(30, 30),
        "restart, every 1 s": runs(10, 10),
        "restart, every 5 s": runs(20, 24),
        "torchft": runs(20, 20),
    }
    assert verdicts(seen, 4.0, startup=False) == [
        "4 MB, ours / restart, every 5 s: 1.38x (1.25-1.50); goal: at least 1.3x, not shown (within the range)",
        "4 MB, ours / torchft: 1.50x (1.50-1.50); goal: at least 1.35x, reached",
    ]
    assert verdicts(seen, 100.0, startup=False)[1].endswith("goal: at least 2x, missed")
    assert verdicts(seen, 4.0, startup=True) == [
        "4 MB, ours / restart, every 5 s: 1.38x (1.25-1.50); goal: at least 2x, missed",
        "4 MB, ours / torchft: 1.50x (1.50-1.50)",
    ]
    assert verdicts({**seen, "torchft": []}, 4.0, startup=False)[1:] == [], "a way that failed proves nothing"
    assert figures([], 2)[-1] == "2 failed" and figures(runs(20), 2)[-1] == "1 failed"


@pytest.mark.parametrize(
    ("worst", "median", "said"), [(1.0, 0.9, "reached"), (1.01, 1.0, "not shown"), (1.2, 1.01, "missed")]
)
def test_a_bound_within_the_range_is_not_shown(worst: float, median: float, said: str):
    assert reached(worst, median).startswith(said)
