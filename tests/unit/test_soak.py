"""The verdict of the soak on its counts. The soak itself: tests/ft/test_soak.py (a short one), and `make soak`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.soak import SAMPLE, GrowthLine, judge, judge_logs, verdict


def looks(**what: Any) -> list[dict[str, Any]]:
    """Returns a hundred counts of one life. `what`: for each resource, its count as a function of the number of changes."""
    numbers = [SAMPLE * number for number in range(100)]
    return [
        {"life": 1, "changes": here, "here": here, "steps": 9 * here, **{name: f(here) for name, f in what.items()}}
        for here in numbers
    ]


def failed(lines: list[GrowthLine]) -> list[str]:
    return [line.what for line in lines if not line.holds]


def test_what_stays_as_it_is_holds():
    rows = looks(
        threads=lambda here: 40 + here // SAMPLE % 3, KiB=lambda here: 300_000 + 5 * (here < 100), files=lambda here: 6
    )
    assert [line.what for line in judge(rows)] == ["threads", "KiB", "files"] and not failed(judge(rows))


@pytest.mark.parametrize(
    ("what", "count"),
    [
        ("descriptors", lambda here: 60 + here // 500),
        ("store keys", lambda here: 48 + 6 * here),
        ("threads", lambda here: 40 + (here > 60 * SAMPLE) * 5),
        ("KiB", lambda here: 300_000 + 1.2 * here),
    ],
)
def test_what_grows_is_named(what: str, count: Any):
    rows = looks(**{what: count, "children": lambda here: 2})
    assert failed(judge(rows)) == [what]


def test_what_is_allocated_in_the_first_tenth_is_no_growth():
    assert not failed(judge(looks(KiB=lambda here: 200_000 + min(here, 9 * SAMPLE) * 100)))


@pytest.mark.parametrize(
    ("steps", "bad"),
    [([1, 2, 3, 4], []), ([1, 2, 4], ["metrics.jsonl: steps"]), ([1, 2, 2, 3], ["metrics.jsonl: steps"])],
)
def test_each_step_is_there_once(tmp_path: Path, steps: list[int], bad: list[str]):
    for name, its in (("metrics.jsonl", steps), ("samples.jsonl", [1, 2, 3])):
        (tmp_path / name).write_text("".join(json.dumps({"step": step}) + "\n" for step in its))
    assert failed(judge_logs(tmp_path)) == bad == failed(verdict(tmp_path))


def test_rows_that_get_longer_are_no_constant_cost(tmp_path: Path):
    for name in ("metrics.jsonl", "samples.jsonl"):
        rows = [{"step": step, "all": list(range(step // 10))} for step in range(1, 200)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert failed(judge_logs(tmp_path)) == ["metrics.jsonl: bytes a row", "samples.jsonl: bytes a row"]
