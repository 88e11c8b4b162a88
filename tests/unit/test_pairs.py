"""bench/pairs.py: sides take turns, are compared inside a round, and say why they could not."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from bench.pairs import Failed, Worker, in_turns, ratio, table

ECHO = """
import json, os, sys, time
print("a library's greeting", flush=True)
print(json.dumps({"side": os.environ["SIDE"]}), flush=True)
for line in sys.stdin:
    print("noise", flush=True)
    print(json.dumps({"got": json.loads(line), "at": time.monotonic_ns()}), flush=True)
"""


@pytest.fixture
def sides() -> Iterator[list[Worker]]:
    workers = [Worker(name, [sys.executable, "-c", ECHO], {"SIDE": name}) for name in ("a", "b", "c")]
    assert [worker.answer() for worker in workers] == [{"side": name} for name in ("a", "b", "c")]
    yield workers
    for worker in workers:
        worker.close()


def test_sides_take_turns_and_every_other_round_is_reversed(sides: list[Worker]) -> None:
    answers = in_turns(sides, {"steps": 2}, rounds=3)
    assert all(answer["got"] == {"steps": 2} for given in answers.values() for answer in given)
    turns = sorted((answer["at"], name) for name, given in answers.items() for answer in given)
    assert "".join(name for _, name in turns) == "abc" + "cba" + "abc"


def test_a_ratio_is_taken_inside_a_round() -> None:
    assert str(ratio([2.0, 40.0, 9.0], [1.0, 10.0, 3.0])) == "3.00x (2.00-4.00)"


def test_a_side_that_dies_leaves_its_last_words() -> None:
    worker = Worker("dead", [sys.executable, "-c", "raise SystemExit('no module named x')"], {})
    with pytest.raises(Failed, match="no module named x"):
        worker.answer()
    worker.close()


def test_a_side_that_dies_between_two_turns_leaves_its_last_words() -> None:
    worker = Worker("dies", [sys.executable, "-c", "print('{}', flush=True); raise SystemExit('out of memory')"], {})
    assert worker.answer() == {}
    with pytest.raises(Failed, match="out of memory"):
        worker.ask({"steps": 1})
    worker.close()


def test_a_table_is_flush() -> None:
    assert table(("name", "n"), [("a", "10"), ("long name", "5")]) == "name        n\na          10\nlong name   5"


def test_a_side_that_takes_too_long_is_killed_and_says_so() -> None:
    worker = Worker("slow", [sys.executable, "-c", "import time; time.sleep(1e6)"], {}, limit_s=0.01)
    with pytest.raises(Failed, match=r"killed after 0 s"):
        worker.answer()
    worker.close()
