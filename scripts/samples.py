#!/usr/bin/env python3
"""Which samples a run was trained on, by whom and at which step, and whether each was exactly once: `scripts/samples.py outputs/llama`.

    scripts/samples.py RUN [--step N | --position N] [--json]

Standard library only. Reads <run>/samples.jsonl, where each committed step has a line: its slots, each with the replica id of
the group whose gradients went in, and the holes, slots that were assigned to a group that died and have yet to be assigned again. A slot is
named by its first position in the data order, which goes on over epochs and counts sequences; it has `slot_size` of them. Groups that
step by themselves have a line each time that they have agreed; it stands for `steps` steps.

Exit code: 0 exactly once (or the step or position asked for was found); 1 not so; 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

FILE_NAME = "samples.jsonl"
SHOWN = 20  # ranges of one kind in a sentence


class Range(NamedTuple):
    """Positions, or steps, from `first` up to and not with `end`."""

    first: int
    end: int

    def __str__(self) -> str:
        return f"{self.first}-{self.end - 1}" if self.end - self.first > 1 else str(self.first)


@dataclass(frozen=True)
class SampleRow:
    """A step, or the last of several that groups have made by themselves."""

    step: int
    slot_size: int
    slots: dict[int, str]  # first position -> replica id
    holes: tuple[int, ...]
    count: int = 1

    @property
    def steps(self) -> Range:
        return Range(self.step - self.count + 1, self.step + 1)

    @property
    def positions(self) -> list[Range]:
        return join(self.range_of(slot) for slot in self.slots)

    def range_of(self, slot: int) -> Range:
        return Range(slot, slot + self.slot_size)


@dataclass(frozen=True)
class Era:
    """Steps that follow each other, by the same groups in the same order, over positions that follow each other."""

    steps: Range
    positions: list[Range]
    by: list[str]  # the owners of a step's slots, in the order of their positions
    holes: list[Range]  # what is open after the last of them


@dataclass(frozen=True)
class SampleProof:
    """The conclusion from all the rows. Exact: every position below the highest was trained once, but for `open`."""

    steps: int
    sequences: int
    missing: list[Range] = field(default_factory=list)
    doubled: list[Range] = field(default_factory=list)
    open: list[Range] = field(default_factory=list)  # holes of the last step, which the next assignment begins with
    wrong: list[str] = field(default_factory=list)  # the same, and what else is not as it must be, in words

    @property
    def exact(self) -> bool:
        return not self.wrong


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Which samples a run was trained on, and whether each exactly once.")
    parser.add_argument("run", type=Path, help="folder of the run, such as outputs/llama")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="what went into step N")
    which.add_argument("--position", type=int, metavar="N", help="when the sequence at position N was trained on")
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args(argv)
    path = arguments.run / FILE_NAME
    try:
        rows = read(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        print(f"samples: {path}: {why}", file=sys.stderr)
        return 2
    if arguments.step is not None or arguments.position is not None:
        return show_some(rows, step=arguments.step, position=arguments.position, as_json=arguments.json)
    table, found = eras(rows), prove(rows)
    if arguments.json:
        print(json.dumps({"exact": found.exact, **asdict(found), "table": [asdict(era) for era in table]}))
    else:
        print("\n".join([*lines_of(table), "", *sentences(rows, found)]))
    return 0 if found.exact else 1


def read(path: Path) -> list[SampleRow]:
    """In the file's order; a last line that is being written now is left out. Raises OSError, and ValueError, which names the line."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            break
        try:
            row = json.loads(line)
            slots = {int(slot): str(owner) for slot, owner in row["slots"].items()}
            if not slots:
                raise ValueError("a step without a slot")
            holes = tuple(map(int, row["holes"]))
            rows.append(SampleRow(int(row["step"]), int(row["slot_size"]), slots, holes, int(row.get("steps", 1))))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"line {number} is no line of {FILE_NAME}: {line.strip()[:100]}") from None
    if not rows:
        raise ValueError("no step is in it")
    return rows


def prove(rows: Sequence[SampleRow]) -> SampleProof:
    """Holds every position against every other; `rows` is not empty."""
    last = rows[-1]
    trained = sorted((row.range_of(slot), row.step) for row in rows for slot in row.slots)
    holes = join(last.range_of(slot) for slot in last.holes)
    gaps, doubled, wrong = list[Range](), list[Range](), list[str]()
    reach, reached_by = 0, 0  # all before it was seen; the last of it at this step
    for (first, end), step in trained:
        if first > reach:
            gaps.append(Range(reach, first))
        elif first < reach:
            doubled.append(again := Range(first, min(end, reach)))
            wrong.append(f"doubled: positions {again}, trained on at step {reached_by} and at step {step}")
        if end > reach:
            reach, reached_by = end, step
    missing = list(without(gaps, holes))
    still_open = list(without(holes, join(span for span, _ in trained)))
    wrong += [f"missing: positions {gap}, below the highest, and no holes of the last step" for gap in missing]
    filled = without(holes, still_open)
    wrong += [f"positions {hole} are holes of the last step, and were trained on" for hole in filled]
    steps = pairwise([Range(0, 1), *(row.steps for row in rows)])
    wrong += [f"step {after} comes after step {before}" for before, after in steps if after.first != before.end]
    sequences = sum(row.slot_size * len(row.slots) for row in rows)
    return SampleProof(sum(row.count for row in rows), sequences, missing, join(doubled), holes, wrong)


def join(ranges: Iterable[Range]) -> list[Range]:
    """Sorted; those that touch or overlap are one."""
    joined = list[Range]()
    for each in sorted(ranges):
        if joined and each.first <= joined[-1].end:
            joined[-1] = Range(joined[-1].first, max(joined[-1].end, each.end))
        else:
            joined.append(each)
    return joined


def without(ranges: Sequence[Range], taken: Sequence[Range]) -> Iterator[Range]:
    """Positions in `ranges` and not in `taken`; both as `join` gives them."""
    for first, end in ranges:
        for other in taken:
            if first < other.end and other.first < end:
                if first < other.first:
                    yield Range(first, other.first)
                first = other.end
        if first < end:
            yield Range(first, end)


def eras(rows: Iterable[SampleRow]) -> list[Era]:
    found = list[Era]()
    for row in rows:
        by, positions = [row.slots[slot] for slot in sorted(row.slots)], row.positions
        holes = join(row.range_of(slot) for slot in row.holes)
        before = found[-1] if found else None
        if before and (before.steps.end, before.by, before.holes) == (row.steps.first, by, holes):
            joined = join([*before.positions, *positions])
            if len(before.positions) == len(positions) == len(joined) == 1:
                found[-1] = Era(Range(before.steps.first, row.step + 1), joined, by, holes)
                continue
        found.append(Era(row.steps, positions, by, holes))
    return found


def lines_of(table: Sequence[Era]) -> list[str]:
    cells = [("steps", "positions", "by, in their order", "open holes")]
    for era in table:
        counts = Counter(era.by)  # in the order of their first slots; who has several is named once, with their number
        by = [owner if count == 1 else f"{owner} x {count}" for owner, count in counts.items()]
        cells.append((str(era.steps), listed(era.positions), " ".join(by), listed(era.holes)))
    widths = [max(len(line[column]) for line in cells) for column in range(3)]
    return ["  ".join([*map(str.ljust, line, widths), line[3]]).rstrip() for line in cells]


def listed(ranges: Sequence[Range]) -> str:
    return ", ".join(map(str, ranges[:SHOWN])) + (f" and {len(ranges) - SHOWN} more" if len(ranges) > SHOWN else "")


def sentences(rows: Sequence[SampleRow], found: SampleProof) -> list[str]:
    lives = {owner for row in rows for owner in row.slots.values()}
    groups = len({owner.partition(":")[0] for owner in lives})
    who = "1 group" if groups == 1 else f"{groups} groups"
    who += f" in {len(lives)} lives" if len(lives) > groups else ""
    what = f"{found.sequences:,} sequences in {found.steps:,} steps by {who}"
    if found.exact:
        end = max(span.end for row in rows for span in row.positions)
        but = f", but for the open holes {listed(found.open)}, which the next step begins with" if found.open else ""
        return [f"exact: {what}; every position from 0 to {end - 1} was trained on once{but}"]
    more = [f"and {len(found.wrong) - SHOWN} more"] if len(found.wrong) > SHOWN else []
    return [f"NOT exact: {what}", *(f"  {each}" for each in [*found.wrong[:SHOWN], *more])]


def show_some(rows: Sequence[SampleRow], *, step: int | None, position: int | None, as_json: bool) -> int:
    """The slots of one step, or all that one position was in."""
    found: list[dict[str, Any]] = [
        {"step": row.step, "positions": row.range_of(slot), "by": row.slots[slot]}
        | ({"steps": row.steps} if row.count > 1 else {})
        for row in rows
        for slot in sorted(row.slots)
        if (step is not None and row.steps.first <= step < row.steps.end)
        or (position is not None and slot <= position < slot + row.slot_size)
    ]
    if as_json:
        print(json.dumps(found))
    elif not found:
        print(f"step {step} is not in it" if step is not None else f"position {position} was not trained on")
    else:
        for each in found:
            print(f"step {each.get('steps', each['step'])}: positions {each['positions']}, by {each['by']}")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
