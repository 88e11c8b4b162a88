#!/usr/bin/env python3
"""Prints which replica group trained on which samples at which step, and checks exactly-once: `scripts/samples.py outputs/llama`.

    scripts/samples.py RUN [--step N | --position N] [--json]

Standard library only. Reads <run>/samples.jsonl, which has a line per committed step: its slots, each with the replica id of the group that
contributed the gradients; the holes, which are slots of a group that died, not assigned again yet; and the positions that training.skip or
training.on_spike leaves out: "skip" leaves out all slots of a step, "rewind" all since the checkpoint to which the run went back. The lines
after that checkpoint are those of the new branch, and the first of them says so. A slot is `slot_size` sequences, named by its first
position in the data order, which counts sequences and continues over epochs. With semi-synchronous training a line is a committed sync and
covers `steps` steps. The first line of a run that continues the data of another run's checkpoint (checkpoint.initial_load_path) says at
which position.

Exit code: 0 exactly once (or the given step or position was found); 1 otherwise; 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

SAMPLES_FILE = "samples.jsonl"
SHOWN = 20  # maximum number of ranges or errors that are printed


class Range(NamedTuple):
    """A half-open range of positions or steps: `end` is not included."""

    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.first}-{self.end - 1}" if self.end - self.first > 1 else str(self.first)


class RecordedRewind(NamedTuple):
    """Beginning of a branch: step `spiked` was a spike for the reason `why`, and the run went back to `step`."""

    step: int
    spiked: int
    why: str


class RunBegin(NamedTuple):
    """Position at which a run continues the data of another: those below `position` are the other's, except its `holes`."""

    position: int = 0
    holes: tuple[Range, ...] = ()


@dataclass(frozen=True)
class SampleRow:
    """A line of samples.jsonl: one step, or `count` steps between two syncs, of which `step` is the last."""

    step: int
    slot_size: int
    slots: dict[int, str]  # first position -> replica id
    holes: tuple[int, ...]
    count: int = 1
    skipped: tuple[Range, ...] = ()  # positions that this step left out for good (training.skip, training.on_spike)
    changed: dict[str, str] = field(default_factory=dict)  # settings that changed before this step: key -> "old -> new"
    begin: RunBegin | None = None  # in the first row of a run that continues another
    spike: str = ""  # why the step was not applied; "": it was
    rewind: RecordedRewind | None = None  # before this step, whose `skipped` has what was left out

    @property
    def steps(self) -> Range:
        return Range(self.step - self.count + 1, self.step + 1)

    @property
    def positions(self) -> list[Range]:
        return join(self.range_of(slot) for slot in self.slots)

    def range_of(self, slot: int) -> Range:
        return Range(slot, slot + self.slot_size)


@dataclass(frozen=True)
class TableRow:
    """A row of the printed table: consecutive steps over consecutive positions by the same replicas in the same order."""

    steps: Range
    positions: list[Range]
    by: list[str]  # replica ids of a step's slots, in the order of positions
    holes: list[Range]  # after the last of the steps


@dataclass(frozen=True)
class SampleProof:
    """Result of the exactly-once check: every position from the beginning of the run to the highest was trained on once, except `open` and
    `skipped`, and those holes that the run took over."""

    steps: int
    sequences: int
    missing: list[Range] = field(default_factory=list)
    doubled: list[Range] = field(default_factory=list)
    open: list[Range] = field(default_factory=list)  # holes of the last step; the next step gets them first
    skipped: list[Range] = field(default_factory=list)  # left out by training.skip or training.on_spike
    wrong: list[str] = field(default_factory=list)  # all violations as messages, those above included

    @property
    def exact(self) -> bool:
        return not self.wrong


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Prints the samples of a run, and checks exactly-once.")
    parser.add_argument("run", type=Path, help="folder of the run, such as outputs/llama")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="print the slots of step N")
    which.add_argument("--position", type=int, metavar="N", help="print the steps that trained on position N")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    path = arguments.run / SAMPLES_FILE
    try:
        rows = read(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        print(f"samples: {path}: {why}", file=sys.stderr)
        return 2
    if arguments.step is not None or arguments.position is not None:
        return show_some(rows, step=arguments.step, position=arguments.position, as_json=arguments.json)
    table, found = summarize(rows), prove(rows)
    if arguments.json:
        print(json.dumps({"exact": found.exact, **asdict(found), "table": [asdict(span) for span in table]}))
    else:
        print("\n".join([*lines_of(table), "", *sentences(rows, found)]))
    return 0 if found.exact else 1


def read(path: Path) -> list[SampleRow]:
    """Returns the rows in the order of the file, without an incomplete last line. Raises OSError, and ValueError, which names the line."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            slots = {int(slot): str(owner) for slot, owner in row["slots"].items()}
            spike = str(row.get("spike", ""))
            if not slots and not (spike and row["skipped"]):
                raise ValueError("a step without a slot")
            holes = tuple(map(int, row["holes"]))
            # "branch": the name of "changed" in rows of earlier versions; not the branch of a rewind
            changed = {str(key): str(change) for key, change in row.get("changed", row.get("branch", {})).items()}
            skipped = tuple(Range(int(first), int(end)) for first, end in row.get("skipped", ()))
            size, steps = int(row["slot_size"]), int(row.get("steps", 1))
            begin = None
            if "begin" in row:
                taken_over = tuple(Range(int(first), int(end)) for first, end in row["begin"]["holes"])
                begin = RunBegin(int(row["begin"]["position"]), taken_over)
            rewind = None
            if "rewind" in row:
                told = row["rewind"]
                rewind = RecordedRewind(int(told["back_to"]), int(told["from"]), str(told["why"]))
            rows.append(SampleRow(int(row["step"]), size, slots, holes, steps, skipped, changed, begin, spike, rewind))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"line {number} is not a line of {SAMPLES_FILE}: {line.strip()[:100]}") from None
    if not rows:
        raise ValueError("has no step")
    return rows


def prove(rows: Sequence[SampleRow]) -> SampleProof:
    """Checks all positions, holes and step numbers. `rows` must not be empty."""
    last, begin = rows[-1], rows[0].begin or RunBegin()
    before = Range(0, rows[0].steps.first if rows[0].begin else 1)  # the steps of the other run, or step 0
    theirs = [(span, before.end - 1) for span in without([Range(0, begin.position)], join(begin.holes))]
    trained = sorted([*theirs, *((row.range_of(slot), row.step) for row in rows for slot in row.slots)])
    holes = join(last.range_of(slot) for slot in last.holes)
    gaps, doubled, wrong = list[Range](), list[Range](), list[str]()
    reach, reached_by = 0, 0  # end of the positions so far, and the step that reached it
    for (first, end), step in trained:
        if first > reach:
            gaps.append(Range(reach, first))
        elif first < reach:
            doubled.append(again := Range(first, min(end, reach)))
            wrong.append(f"doubled: positions {again} were trained on at step {reached_by} and at step {step}")
        if end > reach:
            reach, reached_by = end, step
    skipped = join(span for row in rows for span in row.skipped)
    missing = list(without(list(without(gaps, holes)), skipped))
    still_open = list(without(holes, join(span for span, _ in trained)))
    wrong += [f"missing: positions {gap} were not trained on and are not holes of the last step" for gap in missing]
    filled = without(holes, still_open)
    wrong += [f"positions {hole} are holes of the last step, but were trained on" for hole in filled]
    untrue = without(skipped, list(without(skipped, join(span for span, _ in trained))))
    wrong += [f"positions {span} were skipped, but trained on" for span in untrue]
    wrong += [
        f"step {row.step} comes after a return to step {row.rewind.step}"
        for row in rows
        if row.rewind and row.steps.first != row.rewind.step + 1
    ]
    steps = pairwise([before, *(row.steps for row in rows)])
    wrong += [f"step {after} comes after step {before}" for before, after in steps if after.first != before.end]
    sequences = sum(row.slot_size * len(row.slots) for row in rows)
    return SampleProof(sum(row.count for row in rows), sequences, missing, join(doubled), holes, skipped, wrong)


def join(ranges: Iterable[Range]) -> list[Range]:
    """Sorts ranges and merges those that touch or overlap."""
    joined = list[Range]()
    for each in sorted(ranges):
        if joined and each.first <= joined[-1].end:
            joined[-1] = Range(joined[-1].first, max(joined[-1].end, each.end))
        else:
            joined.append(each)
    return joined


def without(ranges: Sequence[Range], taken: Sequence[Range]) -> Iterator[Range]:
    """Yields the positions in `ranges` that are not in `taken`; both must be sorted and disjoint, as from `join`."""
    for first, end in ranges:
        for other in taken:
            if first < other.end and other.first < end:
                if first < other.first:
                    yield Range(first, other.first)
                first = other.end
        if first < end:
            yield Range(first, end)


def summarize(rows: Iterable[SampleRow]) -> list[TableRow]:
    found = list[TableRow]()
    for row in rows:
        by, positions = [row.slots[slot] for slot in sorted(row.slots)], row.positions
        holes = join(row.range_of(slot) for slot in row.holes)
        before = found[-1] if found else None
        if before and (before.steps.end, before.by, before.holes) == (row.steps.first, by, holes):
            joined = join([*before.positions, *positions])
            if len(before.positions) == len(positions) == len(joined) == 1:
                found[-1] = TableRow(Range(before.steps.first, row.step + 1), joined, by, holes)
                continue
        found.append(TableRow(row.steps, positions, by, holes))
    return found


def lines_of(table: Sequence[TableRow]) -> list[str]:
    cells = [("steps", "positions", "groups, in slot order", "open holes")]
    for span in table:
        counts = Counter(span.by)  # in the order of first slots; a replica with several slots is named once
        by = [owner if count == 1 else f"{owner} x {count}" for owner, count in counts.items()]
        cells.append((str(span.steps), listed(span.positions), " ".join(by), listed(span.holes)))
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return ["  ".join([*map(str.ljust, line, widths), line[3]]).rstrip() for line in cells]


def listed(ranges: Sequence[Range]) -> str:
    return ", ".join(map(str, ranges[:SHOWN])) + (f" and {len(ranges) - SHOWN} more" if len(ranges) > SHOWN else "")


def sentences(rows: Sequence[SampleRow], found: SampleProof) -> list[str]:
    incarnations = {owner for row in rows for owner in row.slots.values()}
    groups = len({owner.partition(":")[0] for owner in incarnations})
    replicas = "1 group" if groups == 1 else f"{groups} groups"
    replicas += f" ({len(incarnations)} incarnations)" if len(incarnations) > groups else ""
    what = f"{found.sequences:,} sequences in {found.steps:,} steps by {replicas}"
    events = [
        f"settings changed from step {row.steps.first} on: {'; '.join(f'{key} {change}' for key, change in row.changed.items())}"
        for row in rows
        if row.changed
    ]
    if begin := rows[0].begin:
        holes = f", and with its holes {listed(begin.holes)}" if begin.holes else ""
        at = f"from position {begin.position} on{holes}"
        events.insert(0, f"begin: step {rows[0].steps.first} continues the data of another run's checkpoint {at}")
    events += [f"spike: step {row.steps} was not applied: {row.spike}" for row in rows if row.spike]
    events += [
        f"rewind: step {row.rewind.spiked} was not applied: {row.rewind.why}; back to step {row.rewind.step}"
        for row in rows
        if row.rewind
    ]
    if found.exact:
        end = max(span.end for row in rows for span in (*row.positions, *row.skipped))
        but = f", except the open holes {listed(found.open)}, which the next step gets first" if found.open else ""
        why = "training.skip or a spike" if any(row.spike or row.rewind for row in rows) else "training.skip"
        but += f", except {listed(found.skipped)}, which {why} leaves out" if found.skipped else ""
        first = rows[0].begin.position if rows[0].begin else 0
        return [f"exact: {what}; every position from {first} to {end - 1} was trained on once{but}", *events]
    more = [f"and {len(found.wrong) - SHOWN} more"] if len(found.wrong) > SHOWN else []
    return [f"NOT exact: {what}", *(f"  {each}" for each in [*found.wrong[:SHOWN], *more]), *events]


def show_some(rows: Sequence[SampleRow], *, step: int | None, position: int | None, as_json: bool) -> int:
    """Prints the slots of one step, or the slots that contain one position. Returns the exit code."""
    found: list[dict[str, Any]] = [
        {"step": row.step, "positions": row.range_of(slot), "by": row.slots[slot]}
        | ({"steps": row.steps} if row.count > 1 else {})
        for row in rows
        for slot in sorted(row.slots)
        if (step is not None and row.steps.first <= step < row.steps.end)
        or (position is not None and slot <= position < slot + row.slot_size)
    ]
    left_out = [
        f"step {row.step}: positions {listed(row.skipped)} left out{f': {why}' * bool(why)}"
        for row in rows
        for why in [row.rewind.why if row.rewind else row.spike]
        if ((row.spike or row.rewind) and step == row.step)
        or (position is not None and any(first <= position < end for first, end in row.skipped))
    ]
    if as_json:
        print(json.dumps(found))
    elif not found and position is not None and (begin := rows[0].begin) and position < begin.position:
        print(f"position {position} was not trained on here: this run continues another's data at {begin.position}")
    elif not found:
        none = (
            f"step {step} is not in {SAMPLES_FILE}" if step is not None else f"position {position} was not trained on"
        )
        print("\n".join(left_out or [none]))
    else:
        for each in found:
            print(f"step {each.get('steps', each['step'])}: positions {each['positions']}, by {each['by']}")
    return 0 if found else 1


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it
    sys.exit(main(sys.argv[1:]))
