"""scripts/samples.py as a user would run it, on made-up records: from any folder, before anything is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "samples.py"
A, B, C = "0:3c1868b9", "1:77aa01f2", "2:5d0e9c4b"
AGAIN = "1:e0b1f46d"  # the second life of B
MISSING = "missing: positions {} were not trained on and are not holes of the last step"
DOUBLED = "doubled: positions {} were trained on at step {} and at step {}"


def row(step: int, slots: dict[int, str], *holes: int, slot_size: int = 4) -> dict[str, Any]:
    owners = {str(slot): owner for slot, owner in slots.items()}
    return {"step": step, "slot_size": slot_size, "slots": owners, "holes": holes}


def three_groups(steps: int) -> list[dict[str, Any]]:
    return [row(n + 1, {12 * n: A, 12 * n + 4: B, 12 * n + 8: C}) for n in range(steps)]


def begun(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of a run that continues another's step 3, whose groups left the slot of B to the next step."""
    return [{**rows[0], "begin": {"position": 36, "holes": [[28, 32]]}}, *rows[1:]]


B_DIES = [  # in step 4; its slot is the first of the next assignment
    *three_groups(3),
    row(4, {36: A, 44: C}, 40),
    row(5, {40: A, 48: C}),
    row(6, {52: A, 56: C}),
    row(7, {60: A, 64: C}),
    row(8, {68: A, 72: AGAIN, 76: C}),
    row(9, {80: A, 84: AGAIN, 88: C}),
]


def samples(folder: Path, rows: list[dict[str, Any]], *arguments: str, tail: str = "") -> tuple[int, str, str]:
    (folder / "run").mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows) + tail
    (folder / "run" / "samples.jsonl").write_text(text)
    command = [sys.executable, "-I", "-S", SCRIPT, "run", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_hole_that_is_filled_later(tmp_path: Path):
    table = (
        f"steps  positions     groups, in slot order             open holes\n"
        f"1-3    0-35          {A} {B} {C}\n"
        f"4      36-39, 44-47  {A} {C}             40-43\n"
        f"5      40-43, 48-51  {A} {C}\n"
        f"6-7    52-67         {A} {C}\n"
        f"8-9    68-91         {A} {AGAIN} {C}\n"
    )
    exact = (
        "exact: 92 sequences in 9 steps by 3 groups (4 incarnations); every position from 0 to 91 was trained on once\n"
    )
    assert samples(tmp_path, B_DIES) == (0, f"{table}\n{exact}", "")
    being_written = '{"step": 8, "slo'
    assert samples(tmp_path, B_DIES, tail=being_written) == (0, f"{table}\n{exact}", "")


def test_a_hole_of_the_last_step_is_not_lost(tmp_path: Path):
    code, out, _ = samples(tmp_path, B_DIES[:4])
    assert code == 0 and "once, except the open holes 40-43, which the next step gets first" in out


@pytest.mark.parametrize("key", ["changed", "branch"])  # the second: its former name
def test_a_change_of_settings_is_told(tmp_path: Path, key: str):
    code, out, _ = samples(tmp_path, [row(1, {0: A}), {**row(2, {4: A}), key: {"optimizer.lr": "0.1 -> 0.2"}}])
    assert code == 0 and out.endswith("settings changed from step 2 on: optimizer.lr 0.1 -> 0.2\n")


def test_what_is_skipped_is_not_missing(tmp_path: Path):
    rows = [row(1, {0: A}), {**row(2, {12: A}), "skipped": [[4, 12]]}]
    code, out, _ = samples(tmp_path, rows)
    assert code == 0 and "once, except 4-11, which training.skip leaves out" in out


@pytest.mark.parametrize(
    ("rows", "wrong"),
    [
        (
            [row(1, {0: A}), {**row(2, {4: A}), "skipped": [[4, 8]]}],
            ["positions 4-7 were skipped, but trained on"],
        ),
        ([row(1, {0: A}), {**row(2, {12: A}), "skipped": [[4, 8]]}], [MISSING.format("8-11")]),
        ([*B_DIES[:4], row(5, {48: A, 52: C})], [MISSING.format("40-43")]),
        ([*three_groups(2), row(3, {16: A, 24: C}), row(4, {28: A})], [DOUBLED.format("16-19", 2, 3)]),
        # half of a slot, and a gap
        ([row(1, {0: A}, slot_size=8), row(2, {4: A, 12: B})], [DOUBLED.format("4-7", 1, 2), MISSING.format("8-11")]),
        ([row(1, {0: A, 4: B}, 4)], ["positions 4-7 are holes of the last step, but were trained on"]),
        ([row(1, {0: A}), row(3, {4: A})], ["step 3 comes after step 1"]),
        ([row(1, {0: A}), row(1, {4: A})], ["step 1 comes after step 1"]),
        ([row(1, {4: A})], [MISSING.format("0-3")]),
        (begun(row(4, {36: A})), [MISSING.format("28-31")]),
        (begun(row(4, {24: B, 28: A})), [DOUBLED.format("24-27", 3, 4)]),
        (begun(row(4, {28: A, 40: B})), [MISSING.format("36-39")]),
        (begun(row(4, {28: A, 36: B}), row(6, {40: A})), ["step 6 comes after step 4"]),
    ],
    ids=[
        *("skipped", "skipped in part", "missing", "doubled", "overlap", "hole", "step", "twice", "first"),
        *("begun: hole", "begun: doubled", "begun: gap", "begun: step"),
    ],
)
def test_what_is_not_exact_is_named(tmp_path: Path, rows: list[dict[str, Any]], wrong: list[str]):
    code, out, _ = samples(tmp_path, rows)
    assert code == 1
    lines = out.partition("NOT exact: ")[2].splitlines()[1:]
    assert [line for line in lines if not line.startswith("begin: ")] == [f"  {each}" for each in wrong]
    code, out, _ = samples(tmp_path, rows, "--json")
    assert code == 1 and json.loads(out)["wrong"] == wrong


def test_a_run_that_continues_the_data_of_another(tmp_path: Path):
    rows = begun(row(4, {28: A, 36: C}), row(5, {40: A, 44: C}))
    code, out, _ = samples(tmp_path, rows)
    assert code == 0 and out.splitlines()[-2:] == [
        "exact: 16 sequences in 2 steps by 2 groups; every position from 36 to 47 was trained on once",
        "begin: step 4 continues the data of another run's checkpoint from position 36 on, and with its holes 28-31",
    ]
    assert samples(tmp_path, rows, "--position", "3")[:2] == (
        1,
        "position 3 was not trained on here: this run continues another's data at 36\n",
    )
    assert "once, except the open holes 28-31" in samples(tmp_path, begun(row(4, {36: A, 40: C}, 28)))[1]


def test_for_programs(tmp_path: Path):
    found = json.loads(samples(tmp_path, B_DIES[:4], "--json")[1])
    assert (found["exact"], found["open"], found["missing"], found["doubled"]) == (True, [[40, 44]], [], [])
    assert found["table"][0] == {"steps": [1, 4], "positions": [[0, 36]], "by": [A, B, C], "holes": []}


def test_one_step_and_one_position(tmp_path: Path):
    assert samples(tmp_path, B_DIES, "--step", "4")[:2] == (
        0,
        f"step 4: positions 36-39, by {A}\nstep 4: positions 44-47, by {C}\n",
    )
    assert samples(tmp_path, B_DIES, "--position", "42")[:2] == (0, f"step 5: positions 40-43, by {A}\n")
    assert samples(tmp_path, B_DIES, "--position", "92")[:2] == (1, "position 92 was not trained on\n")
    assert samples(tmp_path, B_DIES, "--step", "10")[:2] == (1, "step 10 is not in samples.jsonl\n")
    assert json.loads(samples(tmp_path, B_DIES, "--step", "5", "--json")[1]) == [
        {"step": 5, "positions": [40, 44], "by": A},
        {"step": 5, "positions": [48, 52], "by": C},
    ]


def test_a_step_that_was_not_applied(tmp_path: Path):
    spike = {**row(2, {}), "skipped": [[8, 16]], "spike": "loss nan"}
    rows = [row(1, {0: A, 4: B}), spike, row(3, {16: A, 20: B})]
    code, out, _ = samples(tmp_path, rows)
    assert code == 0 and "2                     " not in out.splitlines()[1]
    assert out.endswith(
        "every position from 0 to 23 was trained on once, except 8-15, which training.skip or a spike leaves out\n"
        "spike: step 2 was not applied: loss nan\n"
    )
    assert samples(tmp_path, rows, "--position", "9")[:2] == (1, "step 2: positions 8-15 left out: loss nan\n")
    assert samples(tmp_path, rows, "--step", "2")[:2] == (1, "step 2: positions 8-15 left out: loss nan\n")
    assert samples(tmp_path, rows[1:2])[0] == 1  # step 1 is missing
    first = {**row(1, {}), "skipped": [[0, 8]], "spike": "loss nan"}
    assert samples(tmp_path, [first])[0] == 0
    code, out, _ = samples(tmp_path, [*rows, row(4, {12: A, 24: B})])
    assert code == 1 and "positions 12-15 were skipped, but trained on" in out
    assert samples(tmp_path, [rows[0], row(2, {}), rows[2]])[0] == 2  # no slot, and no reason


def test_a_way_back_to_a_checkpoint(tmp_path: Path):
    rewind = {"rewind": {"back_to": 1, "from": 3, "why": "loss nan"}, "skipped": [[8, 24]]}
    rows = [row(1, {0: A, 4: B}), {**row(2, {24: A, 28: B}), **rewind}, row(3, {32: A, 36: B})]
    code, out, _ = samples(tmp_path, rows)
    assert code == 0 and out.endswith(
        "every position from 0 to 39 was trained on once, except 8-23, which training.skip or a spike leaves out\n"
        "rewind: step 3 was not applied: loss nan; back to step 1\n"
    )
    assert samples(tmp_path, rows, "--position", "9")[:2] == (1, "step 2: positions 8-23 left out: loss nan\n")
    code, out, _ = samples(tmp_path, [rows[0], {**rows[1], "skipped": [[8, 20]]}, rows[2]])
    assert code == 1 and "positions 20-23 were not trained on" in out
    code, out, _ = samples(tmp_path, [rows[0], row(2, {8: A, 12: B}), {**row(3, {24: A, 28: B}), **rewind}])
    assert code == 1 and "step 3 comes after a return to step 1" in out and "8-15 were skipped, but trained on" in out


def test_a_group_with_several_slots_is_named_once(tmp_path: Path):
    out = samples(tmp_path, [row(1, {0: A, 4: B, 8: A})])[1]
    assert f"0-11       {A} x 2 {B}" in out


@pytest.mark.parametrize("tail", ['{"step": 8}\n', "[1]\n"])
def test_bad_input_is_one_line(tmp_path: Path, tail: str):
    said = f"samples: run/samples.jsonl: line 10 is not a line of samples.jsonl: {tail}"
    assert samples(tmp_path, B_DIES, tail=tail) == (2, "", said)
    assert samples(tmp_path, [], tail="")[::2] == (2, "samples: run/samples.jsonl: has no step\n")
    (tmp_path / "run" / "samples.jsonl").unlink()
    done = subprocess.run([sys.executable, SCRIPT, "run"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "samples: run/samples.jsonl: No such file or directory\n")
