"""Tables of pipeline schedules: the actions of each rank in order, from torch's schedules or a CSV file.

A table has one row of actions per rank, written as in torch's CSV files: 2F0 is the forward of stage 2 for microbatch 0; B is the
backward, I and W its halves (gradients of inputs and of weights); (0F4;3B1)OVERLAP_F_B are two actions that may overlap.
parallelisms/pipeline.py runs it. Needs no process group, and torch only for the tables of torch's own schedules."""

from __future__ import annotations

import csv
import re
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

ONE_STAGE = ("GPipe", "1F1B")  # one stage per rank; the others support several
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # stages go back and forth over the ranks: rank 0 has the first and the last
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = (*ONE_STAGE, "LoopedBFS", "Interleaved1F1B", *SPLIT_BACKWARD)

LENGTH = {"F": 1, "B": 2, "I": 1, "W": 1}  # time slots; the convention of the zero-bubble paper, arXiv 2401.10241
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One computation: `kind` is F, B, I or W."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Cell = tuple[Action, ...]  # one action, or several that may overlap
Table = list[list[Cell]]  # by rank, in order
Timeline = list[list[tuple[int, Action]]]  # by rank: the time slot in which each action starts


def table(schedule: str, pp: int, n_stages: int, n_microbatches: int) -> Table:
    """Returns the table of a schedule by name, or of a CSV file by path (ValueError: unreadable). Numbers: checked in pipeline_plan.py."""
    if schedule not in SCHEDULES:
        return read_csv(schedule)
    if schedule in ONE_STAGE:
        # GPipe: Huang et al. 2019, arXiv 1811.06965; 1F1B: PipeDream-Flush, Narayanan et al. 2021, arXiv 2104.04473
        rows: Table = []
        for rank in range(pp):
            forwards, backwards = ([(Action(rank, kind, m),) for m in range(n_microbatches)] for kind in "FB")
            ahead = min(pp - 1 - rank, n_microbatches) if schedule == "1F1B" else n_microbatches
            steady = zip(forwards[ahead:], backwards, strict=False)
            alternating = (cell for pair in steady for cell in pair)
            rows.append([*forwards[:ahead], *alternating, *backwards[n_microbatches - ahead :]])
        return rows
    from torch.distributed.pipelining.schedules import get_schedule_class

    # To build the table, torch only reads these attributes of a stage
    stage = SimpleNamespace(num_stages=n_stages, group_size=pp, group_rank=0, submod=None)
    order = get_schedule_class(schedule)([stage] * (n_stages // pp), n_microbatches).pipeline_order
    return [[parse(str(action)) for action in order[rank] if action is not None] for rank in range(pp)]


def read_csv(path: str) -> Table:
    """Reads a file in torch's compute-only format: one line per rank; empty cells are idle. Raises ValueError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}") from error
    rows = Table()
    try:
        for cells in csv.reader(lines):
            rows.append([parse(cell) for cell in cells if cell.strip()])
    except ValueError as error:
        raise ValueError(f"line {len(rows) + 1}: {error}") from error
    return rows


def parse(cell: str) -> Cell:
    """Parses "2F0" or "(0F4;3B1)OVERLAP_F_B". Raises ValueError."""
    text = cell.strip()
    overlap = re.fullmatch(r"\((.+)\)OVERLAP_F_B", text)
    matches = [_ACTION.fullmatch(part.strip()) for part in (overlap[1].split(";") if overlap else [text])]
    if not all(matches):
        raise ValueError(
            f'"{text}" is not an action; legal: stage, one of F B I W, microbatch, such as 0F0, or two as (0F1;3B0)OVERLAP_F_B'
        )
    return tuple(Action(int(m[1]), m[2], int(m[3])) for m in matches if m)


def cell_text(cell: Cell) -> str:
    """Formats a cell as `parse` reads it."""
    return str(cell[0]) if len(cell) == 1 else f"({';'.join(map(str, cell))})OVERLAP_F_B"


def stages_by_rank(rows: Table) -> list[list[int]]:
    """Returns the stages of each rank, in the order of the layers."""
    return [sorted({action.stage for cell in row for action in cell}) for row in rows]


def check_complete(rows: Table, *, pp: int, n_microbatches: int) -> None:
    """Raises ValueError, with the missing or repeated action, unless `pp` ranks run every microbatch through every stage once."""
    if len(rows) != pp:
        raise ValueError(f"has lines for {len(rows)} ranks; legal: one line for each of the {pp} ranks")
    owners: dict[int, int] = {}
    count: dict[Action, int] = {}
    for rank, row in enumerate(rows):
        for action in (action for cell in row for action in cell):
            count[action] = count.get(action, 0) + 1
            if owners.setdefault(action.stage, rank) != rank:
                raise ValueError(f"stage {action.stage} is on ranks {owners[action.stage]} and {rank}; legal: one rank")
            if action.microbatch >= n_microbatches:
                raise ValueError(
                    f"rank {rank} has {action}, but there are {n_microbatches} microbatches (training.local_batch_size / "
                    f"parallelism.pipeline_parallel_microbatch_size); legal: 0 to {n_microbatches - 1}"
                )
    for rank in set(range(pp)) - set(owners.values()):
        raise ValueError(f"rank {rank} has no stage; legal: at least one")
    for stage in range(max(owners) + 1):
        for microbatch in range(n_microbatches):
            f, b, i, w = (count.get(Action(stage, kind, microbatch), 0) for kind in "FBIW")
            if f != 1 or (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                raise ValueError(
                    f"stage {stage} computes microbatch {microbatch} with F {f}, B {b}, I {i}, W {w} times; "
                    "legal: F once, and B once or both I and W once"
                )


def timeline(rows: Table) -> Timeline:
    """Returns the earliest start of each action, if messages take no time. Raises ValueError for a deadlock."""
    last = max(stage for stages in stages_by_rank(rows) for stage in stages)
    ends: dict[Action, int] = {}  # the end of I also counts as that of B

    def needs(action: Action) -> list[Action]:
        stage, kind, microbatch = action
        if kind == "F":
            return [Action(stage - 1, "F", microbatch)] if stage > 0 else []
        if kind == "W":
            return [Action(stage, "I", microbatch)]
        return [Action(stage, "F", microbatch), *([Action(stage + 1, "B", microbatch)] if stage < last else [])]

    clock, left = [0] * len(rows), [deque(row) for row in rows]
    times: Timeline = [[] for _ in rows]
    progress = True
    while progress:
        progress = False
        for rank, cells in enumerate(left):
            while cells and ends.keys() >= (wanted := {need for action in cells[0] for need in needs(action)}):
                clock[rank] = max([clock[rank], *(ends[need] for need in wanted)])
                for action in cells.popleft():
                    times[rank].append((clock[rank], action))
                    clock[rank] += LENGTH[action.kind]
                    ends[action] = clock[rank]
                    if action.kind == "I":
                        ends[action._replace(kind="B")] = clock[rank]
                progress = True
    for rank, cells in enumerate(left):
        if cells:
            need = next(need for action in cells[0] for need in needs(action) if need not in ends)
            raise ValueError(f"deadlock: rank {rank} cannot compute {cell_text(cells[0])} before {need}")
    return times
