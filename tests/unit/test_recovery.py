"""bench/recovery.py reads its verdicts from event logs: each kind of error is detected."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.job import EventLine, EventLog, JobSide, descendants, gaps, longest_gap
from bench.recovery import expendable, refused, unaccounted, verdict


def line(event: str, at_s: float, step: int, contributors: int = 2) -> str:
    return json.dumps({"event": event, "at_s": at_s, "step": step, "contributors": contributors}) + "\n"


def group(tmp_path: Path, number: int, text: str) -> Any:
    made = EventLog(str(number), tmp_path / str(number))
    made.folder.mkdir()
    (made.folder / "event_log.0.jsonl").write_text(text)
    made.read()
    return made


def commits(steps: range, participants: int = 2) -> str:
    return "".join(line("commit", float(step), step, participants) for step in steps)


def end(step: int, weight: float) -> EventLine:
    return EventLine("end", 99.0, step=step, weight=weight, digest="digest")


START = line("start", 0.0, 0)


def story(tmp_path: Path, first: str, second: str) -> list[str]:
    """Returns the contradictions in two groups' logs; the job begins with group 1's weights and ends at step 6."""
    groups = [group(tmp_path, 0, START + first), group(tmp_path, 1, START + second)]
    return unaccounted(groups, [end(6, 1 - 6 / 1024)] * 2)


def test_all_is_accounted_for(tmp_path: Path):
    assert story(tmp_path, commits(range(1, 7)), commits(range(1, 7))) == []


def test_a_life_that_ends_may_take_its_last_step_along(tmp_path: Path):
    """The step was lost with its group, and the survivors repeated it by themselves."""
    killed = commits(range(1, 4)) + START + commits(range(5, 7))
    others = commits(range(1, 3)) + commits(range(3, 5), participants=1) + commits(range(5, 7))
    assert story(tmp_path, killed, others) == []


def test_who_lacks_a_step_may_heal_to_it(tmp_path: Path):
    assert story(tmp_path, commits(range(1, 7)), commits(range(1, 3)) + commits(range(4, 7))) == []


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            commits(range(1, 3)) + commits(range(4, 7)),
            commits(range(1, 3)) + commits(range(4, 7)),
            ["step 3: committed by no group"],
        ),
        (commits(range(1, 7)), commits(range(1, 4)) + commits(range(3, 7)), ["group 1: 3, then 3"]),
        (commits(range(2, 7)), commits(range(2, 7)), ["step 1: committed by no group"]),
        (
            commits(range(1, 7)),
            commits(range(1, 7), participants=1),
            [f"step {n}: of [1, 2] groups" for n in range(1, 6)],
        ),
    ],
    ids=["left out", "done twice", "nobody's", "two histories"],
)
def test_what_does_not_add_up_is_seen(tmp_path: Path, first: str, second: str, said: list[str]):
    assert story(tmp_path, first, second) == said


def test_weights_tell_a_step_that_was_not_applied(tmp_path: Path):
    groups = [group(tmp_path, number, START + commits(range(1, 7))) for number in range(2)]
    assert unaccounted(groups, [end(6, 0 - 6 / 1024)]) == []
    assert unaccounted(groups, [end(6, 0 - 5 / 1024)]) == [f"weight {-5 / 1024} after 6 steps"]


def test_gaps_and_refusals_are_those_after_the_fault(tmp_path: Path):
    seen = [("commit", 1.0, 1), ("commit", 2.0, 2), ("abort", 2.5, 2), ("commit", 7.0, 3), ("commit", 8.0, 4)]
    made = group(tmp_path, 0, "".join(line(*what) for what in seen))
    assert gaps(made.since(0.0, "commit"), 3.0) == [5.0, 1.0]
    assert longest_gap([made], 7.5) == 1.0 and longest_gap([made], 2.1, 7.0) == 5.0
    assert (refused([made], 0.0), refused([made], 3.0)) == (1, 0)


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path):
    whole = line("commit", 2.0, 7)
    made = group(tmp_path, 0, START + whole[:20])
    assert [each.event for each in made.ranks[0]] == ["start"] and made.step == 0
    with (made.folder / "event_log.0.jsonl").open("a") as log:
        log.write(whole[20:])
    made.read()
    assert made.ranks[0][-1] == EventLine("commit", 2.0, step=7, contributors=2) and made.step == 7


def test_the_last_with_the_newest_step_is_spared(tmp_path: Path):
    """A group one step behind may still wait for the newest sums, so it counts as having them."""
    groups = [group(tmp_path, number, commits(range(step, step + 1))) for number, step in enumerate((9, 8, 3))]
    assert expendable(groups) == groups
    assert expendable([groups[0], groups[2]]) == [groups[2]]


def test_a_figure_that_is_no_number_misses_its_bound():
    ours = JobSide("ours")
    assert verdict(ours, {"gap": (0.9, 1.0), "lost": (0, 0)}) == "reached"
    assert verdict(ours, {"gap": (float("nan"), 1.0), "lost": (1, 0)}) == "missed: gap 1, lost 0"
    assert verdict(JobSide("torchft", "python"), {"gap": (9.0, 1.0)}) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_children_of_children_are_found():
    inner = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", inner], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        sleeper = int(process.stdout.readline())
        assert descendants(process.pid) == [sleeper]
        subprocess.run(["kill", str(sleeper)], check=True)
        process.kill()
