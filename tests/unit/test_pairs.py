"""bench/pairs.py: sides alternate, are compared within a round, and report why they failed; a peer's model in bench/step.py; the
requirements of bench/curve.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bench import curve
from bench.pairs import Failed, Worker, asking, in_turns, parser, ratio, renew, spread, table
from bench.step import move

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
    answers = in_turns(asking(sides, steps=2), 2, warm=1)
    assert all(answer["got"] == {"steps": 2} for given in answers.values() for answer in given)
    turns = sorted((answer["at"], name) for name, given in answers.items() for answer in given)
    assert "".join(name for _, name in turns) == "cba" + "abc"


def test_a_peer_keeps_its_complex_rotations() -> None:
    model = torch.nn.Linear(2, 2)
    model.register_buffer("freqs_cis", torch.polar(torch.ones(4), torch.arange(4.0)), persistent=False)
    move(model, torch.device("cpu"), torch.bfloat16)
    assert (model.weight.dtype, model.freqs_cis.dtype) == (torch.bfloat16, torch.complex64)


def test_a_flag_has_the_type_of_its_default() -> None:
    flags = parser("words", rounds=(7, "turns"), sizes="2,4", brief=False, write=(Path, "a page"))
    found = flags.parse_args(["--rounds", "3", "--write", "a.md"])
    assert vars(found) == {"rounds": 3, "sizes": "2,4", "brief": False, "write": Path("a.md")}


def test_a_ratio_is_taken_inside_a_round() -> None:
    assert str(ratio([2.0, 40.0, 9.0], [1.0, 10.0, 3.0])) == "3.00x (2.00-4.00)"
    assert spread([0.002, 0.04, 0.009], ".1f", 1e3) == "9.0 (2.0-40.0)"


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


def test_figures_stand_under_their_heading_once(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Goodput\n\nwords\n")
    renew(page, "With kills", "two cores", "1.3x")
    renew(page, "Without kills", "two cores", "1.01x")
    renew(page, "With kills", "one core", "1.4x")
    text = page.read_text()
    assert text.startswith("# Goodput\n\nwords\n\n## With kills\n\n20") and "1.3x" not in text
    assert text.index("1.4x") < text.index("## Without kills") < text.index("1.01x")


@pytest.mark.skipif(find_spec("torchtitan") is not None, reason="it would train for minutes")
def test_a_curve_without_its_peer_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        curve.main([])
    assert ended.value.code == 2 and f"{sys.executable} has no torchtitan" in capsys.readouterr().err
