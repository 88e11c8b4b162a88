"""The drill's checks: failures that they must detect, in made-up event logs; and the injected faults, determined by the seed."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.drill import read_arguments
from bench.drill_faults import (
    KINDS,
    Incident,
    bitwise_equal,
    figures_complete,
    ledger_exact,
    longest_gap_s,
    loss_of_twin,
    next_commit_s,
    plan,
    survivors_went_on,
)
from bench.job import EventLine, EventLog, rows

FAULT = Incident(
    kind="kill",
    target="group 2",
    hit=frozenset("2"),
    survivors=frozenset("01"),
    at_s=10.0,
    step=10,
    back_s=20.0,
    live=frozenset("012"),
)


def commit(step: int, *, digest: str = "", commit_id: str = "", at_s: float = 0.0, pid: int = 1) -> EventLine:
    """A commit of step n at second n."""
    return EventLine(
        "commit", at_s or float(step), pid, step, commit_id or f"c{step}", digest or f"w{step}", contributors=3
    )


def event_logs(**changed: Sequence[EventLine]) -> dict[str, EventLog]:
    """Three groups that commit steps 1 to 20; group 2 is dead from 10 to 15. g0=..., g1=..., g2=...: lines instead."""
    lines = {name: [commit(step) for step in range(1, 21)] for name in "01"}
    again = [EventLine("start", 12.0, 2, 0), EventLine("healed", 14.5, 2, 14)]
    lines["2"] = [*lines["0"][:9], *again, *(commit(step, pid=2) for step in range(15, 21))]
    made = {name: EventLog(name, Path(name), 1) for name in lines}
    for name, event_log in made.items():
        event_log.ranks[0] = list(changed.get(f"g{name}", lines[name]))
    return made


STEADY = event_logs()["0"].ranks[0]


def test_a_job_that_did_well():
    well = event_logs()
    assert survivors_went_on(well, [FAULT], {}).holds and bitwise_equal(well, [FAULT]).holds
    assert next_commit_s(well, FAULT) == 0.0 and longest_gap_s(well, FAULT) == 1.0
    assert "6 or more steps of all groups" in bitwise_equal(well, [FAULT]).words


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([*STEADY[:11], EventLine("refused", 11.5, 1, 11), *STEADY[11:]], "kill: group 1 refused at step 11, after 11"),
        ([*STEADY[:11], EventLine("start", 11.5, 2, 0), *STEADY[11:]], "kill: group 1 start at step 0, after 11"),
        ([*STEADY[:11], EventLine("healed", 11.5, 1, 12), *STEADY[12:]], "kill: group 1 healed at step 12, after 11"),
        ([*STEADY[:11], *STEADY[12:]], "kill: group 1 has no step between 11 and 13"),
        (STEADY[:9], "kill: group 1 has committed nothing since"),
    ],
)
def test_what_a_survivor_may_not(lines: list[EventLine], words: str):
    verdict = survivors_went_on(event_logs(g1=lines), [FAULT], {12: set("02")})
    assert not verdict.holds and words in verdict.words
    assert str(verdict).startswith("NO ")


def test_a_step_that_a_survivor_has_from_another_is_not_lost_if_its_own_gradients_are_in_it():
    healed = event_logs(g1=[*STEADY[:11], EventLine("healed", 11.5, 1, 12), *STEADY[12:]])
    verdict = survivors_went_on(healed, [FAULT], {12: set("01")})
    assert verdict.holds and "1 steps received from a survivor whose all-reduces were complete" in verdict.words
    far = event_logs(g1=[*STEADY[:11], EventLine("healed", 12.5, 1, 13), *STEADY[13:]])
    assert not survivors_went_on(far, [FAULT], {12: set("01"), 13: set("01")}).holds


def test_one_bit_of_one_group_after_one_step():
    other = [replace(line, digest="x") if line.step == 7 else line for line in STEADY]
    verdict = bitwise_equal(event_logs(g1=other), [FAULT])
    assert not verdict.holds and "group 1, rank 0, step 7: different weights" in verdict.words


def test_two_histories_are_none_but_a_commit_that_nobody_went_on_from_is_no_history():
    forked = [replace(line, commit_id="x", digest="y") if line.step in (7, 8) else line for line in STEADY]
    verdict = bitwise_equal(event_logs(g1=forked), [FAULT])
    assert not verdict.holds and "group 1, rank 0 continued from a different commit of step 7" in verdict.words
    lost = [*STEADY[:9], commit(10, commit_id="x", digest="y"), *event_logs()["2"].ranks[0][9:]]
    assert bitwise_equal(event_logs(g2=lost), [FAULT]).holds


def test_steps_that_a_checkpoint_did_not_have_are_another_history():
    again = [
        EventLine("start", 21.0, 2, 0),
        *(commit(step, commit_id=f"d{step}", at_s=step + 15.0, pid=2) for step in range(8, 30)),
    ]
    all_dead = replace(FAULT, kind="all", at_s=20.5, survivors=frozenset(), hit=frozenset("012"), back_s=45.0)
    both = [*STEADY, *again]
    restarted = event_logs(g0=both, g1=both, g2=both)
    assert bitwise_equal(restarted, [FAULT, all_dead]).holds
    assert next_commit_s(restarted, all_dead) == 2.5
    later = replace(FAULT, at_s=30.0, back_s=40.0)
    assert survivors_went_on(restarted, [FAULT, later], {}).holds
    assert not bitwise_equal(restarted, [FAULT]).holds


def test_steps_between_the_order_to_kill_all_and_their_death_are_of_the_old_history():
    ordered = replace(FAULT, kind="all", at_s=18.5, survivors=frozenset(), hit=frozenset("012"), back_s=45.0)
    late = [*STEADY, commit(21, at_s=21.0)]  # steps 19 to 21, before it dies
    again = [
        EventLine("start", 22.0, 2, 0),
        *(commit(step, commit_id=f"d{step}", at_s=step + 15.0, pid=2) for step in range(18, 30)),
    ]
    restarted = event_logs(g0=[*late, *again], g1=[*late, *again], g2=[*late, *again])
    assert bitwise_equal(restarted, [FAULT, ordered]).holds


def test_a_flipped_bit_counts_until_it_is_mended():
    flipped = replace(FAULT, kind="corrupt")
    harmed = [replace(line, digest="x") if 9 <= line.step < 14 else line for line in STEADY]
    mended = [*harmed[:13], EventLine("healed", 13.5, 1, 13), *harmed[13:]]
    assert bitwise_equal(event_logs(g2=mended), [flipped]).holds
    assert not bitwise_equal(event_logs(g2=mended), [FAULT]).holds
    late = [replace(line, digest="x") if line.step == 15 else line for line in mended if line.event == "commit"]
    assert not bitwise_equal(event_logs(g2=[*late[:13], EventLine("healed", 13.5, 1, 13), *late[13:]]), [flipped]).holds


def test_a_fault_after_which_the_groups_never_were_together():
    verdict = bitwise_equal(event_logs(g2=STEADY[:9]), [FAULT])
    assert not verdict.holds and "after a fault no step was committed by all groups" in verdict.words
    assert not bitwise_equal({"0": event_logs()["0"]}, []).holds, "nothing was compared"


def write(folder: Path, name: str, rows: Sequence[dict[str, object]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def look(tokens: int, loss: float) -> list[dict[str, object]]:
    return [{"step": tokens, "tokens": tokens}, {"step": tokens, "validation_loss": loss}]


@pytest.mark.parametrize(("loss", "holds"), [(2.01, True), (1.99, True), (2.03, False), (1.97, False)])
def test_the_loss_beside_the_twins_after_as_many_tokens(tmp_path: Path, loss: float, holds: bool):
    run = write(tmp_path / "run", "metrics.jsonl", [*look(10, 9.0), *look(150, loss)])
    twin = write(tmp_path / "twin", "metrics.jsonl", [*look(100, 3.0), *look(200, 1.0)])
    assert loss_of_twin(run, twin).holds is holds
    short = write(tmp_path / "short", "metrics.jsonl", [*look(50, 2.0), *look(100, 2.0)])
    assert not loss_of_twin(run, short).holds


def test_a_row_that_is_being_written_is_none(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    assert rows(tmp_path) == [{"step": 1}]


def test_figures_that_are_complete(tmp_path: Path):
    found = [{"step": step, "loss": 1.0} for step in range(1, 6)]
    assert figures_complete(write(tmp_path, "metrics.jsonl", found)).holds
    lost = figures_complete(write(tmp_path, "metrics.jsonl", found[:2] + found[3:]))
    assert not lost.holds and "4 follows 2" in lost.words


def test_the_ledger(tmp_path: Path):
    rows = [{"step": step, "slot_size": 2, "slots": {str(2 * step - 2): "0:a"}, "holes": []} for step in (1, 2, 3)]
    assert ledger_exact(write(tmp_path, "samples.jsonl", rows)).holds
    rows[1]["slots"] = {"0": "0:a"}
    assert not ledger_exact(write(tmp_path, "samples.jsonl", rows)).holds


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_is_injected_in_an_order_that_the_seed_decides(seed: int):
    kinds = list(KINDS)
    variants = plan(kinds, random.Random(seed))
    assert variants == plan(kinds, random.Random(seed))
    assert sorted(variants) == sorted(variant for kind in KINDS.values() for variant in kind.variants)
    assert variants.index("add") < variants.index("drain")
    assert plan(["drain", "kill"], random.Random(seed)) == ["kill", "drain"], "else one group less for the others"
    assert plan(["drain", "kill"], random.Random(seed), first=False) == ["kill"]
    assert len({tuple(plan(kinds, random.Random(other))) for other in range(20)}) > 15


def test_a_brief_drill_has_the_first_fault_of_each_kind():
    assert sorted(plan(list(KINDS), random.Random(1), brief=True)) == sorted(
        next(iter(k.variants)) for k in KINDS.values()
    )


@pytest.mark.parametrize(
    ("faults", "override", "slots"),
    [
        ("kill,add", (), "fault_tolerance.slots_per_step=4"),
        ("kill", (), "fault_tolerance.slots_per_step=3"),
        ("kill,add", ("--fault_tolerance.keep_global_batch", "false"), ""),
    ],
)
def test_run_and_twin_make_the_same_steps(faults: str, override: tuple[str, ...], slots: str):
    """The number of slots is the largest number of groups, unless the command line lets steps shrink with the groups."""
    asked = read_arguments(["x.toml", "--groups=3", f"--faults={faults}", *override])
    for argv in (asked.argv("drill"), asked.argv("twin", training__steps=9)):
        assert [word for word in argv if "slots_per_step" in word] == ([f"--{slots}"] if slots else [])
        assert ("--fault_tolerance.keep_global_batch=true" in argv) == bool(slots)
