"""Figures of a run that several replica groups train: one of them writes, the others remember what they would have written.

Floor 3, between metrics.py and sinks.py. All groups have the same figures, for all have the same sums. When the role moves, whoever has it
now writes first what the one before did not come to write, and takes back what that one wrote of steps that did not hold: no step is
missing in metrics.jsonl and samples.jsonl, and none is there twice. A group that was stopped, and wakes, still counts itself the
writer; but the quorum that says so is over, and a newer one has been claimed in the run's folder (claim.py).

What is remembered goes to groups that heal, and into each checkpoint, for that may be of a step which its writer alone has committed. Where
that one dies the others make the step anew, and the files tell of theirs; if then all die, the job goes on from the checkpoint's, and
whoever writes first puts back the rows that belong to it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from training.claim import Quorum, claim
from training.sinks import METRICS, SAMPLES, Sinks, last_rows

ROWS_KEPT = 100  # who writes is known anew with every quorum, so few steps can be missing

Kind = Literal["journals", "charts", "records"]


class Row(NamedTuple):
    kind: Kind
    step: int
    figures: Mapping[str, Any]

    @property
    def is_validation(self) -> bool:
        """A look at held-out text: a row of its own for the same step."""
        return any(name.startswith("validation") for name in self.figures)


class Relay:
    """`open_sinks(resumed_step)` as sinks.open_sinks, into `folder`. `writes`: by which quorum this group does, now."""

    def __init__(
        self, folder: Path, writes: Callable[[], Quorum | None], open_sinks: Callable[[int | None], Sinks]
    ) -> None:
        self._folder, self._writes, self._open_sinks = folder, writes, open_sinks
        self._kept: deque[Row] = deque(maxlen=ROWS_KEPT)
        self._sinks: Sinks | None = None

    def sinks(self) -> Sinks:
        """What metrics.py writes to."""
        return Sinks((_End(self, "journals"),), (_End(self, "charts"),), (_End(self, "records"),))

    def write(self, row: Row) -> None:
        if any(_same_place(row, kept) and kept.step >= row.step for kept in self._kept):
            self.close()  # the job has gone back to a checkpoint
            self._keep(kept for kept in self._kept if kept.step < row.step)
        self._kept.append(row)
        quorum = self._writes()
        has_files = self._sinks is not None and not self._sinks.replaced()
        if quorum is None or not (has_files or claim(self._folder, quorum)):
            self.close()
        elif has_files:
            self._put(row)
        else:
            self._take_over(row.step)

    def state_dict(self) -> dict[str, Any]:
        """For a group that heals, or begins with this checkpoint: it may be the next to write."""
        return {"rows": json.dumps(list(self._kept))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.close()
        self._keep(Row(*row) for row in json.loads(state["rows"]))

    def sync(self) -> None:
        """Where this group writes."""
        if self._sinks is not None:
            self._sinks.sync()

    def close(self) -> None:
        if self._sinks is not None:
            self._sinks.close()
            self._sinks = None

    def _keep(self, rows: Iterable[Row]) -> None:
        self._kept = deque(rows, maxlen=ROWS_KEPT)

    def _take_over(self, step: int) -> None:
        """What lies at this step and past it is of a life that ended before it was saved; so is what lies before it, from the first step on
        that this group knows otherwise: the one before wrote it, and the others went on without it."""
        self.close()
        written = self._written(step - 1)
        first = min(row.step for row in self._kept if row.step >= step or not written(row))
        self._sinks = self._open_sinks(first - 1 or None)
        for row in self._kept:
            if row.step >= first:
                self._put(row)

    def _written(self, until: int) -> Callable[[Row], bool]:
        """Whether a row, of a step up to `until`, is in the files. Time and memory are each group's own; what was trained on is the same in
        all, and tells whether a step is the same step. Charts are written after the journal, and not read."""
        metrics = last_rows(self._folder / METRICS, 2 * ROWS_KEPT, until=until)
        samples = last_rows(self._folder / SAMPLES, ROWS_KEPT, until=until)
        there = {(row["step"], Row("journals", row["step"], row).is_validation) for row in metrics}

        def written(row: Row) -> bool:
            if row.kind == "records":
                return {"step": row.step, **row.figures} in samples
            return row.kind == "charts" or (row.step, row.is_validation) in there

        return written

    def _put(self, row: Row) -> None:
        assert self._sinks is not None
        for sink in getattr(self._sinks, row.kind):
            sink.write(row.step, row.figures)


class _End:
    def __init__(self, relay: Relay, kind: Kind) -> None:
        self._relay = relay
        self._kind: Kind = kind

    def write(self, step: int, scalars: Mapping[str, Any]) -> None:
        self._relay.write(Row(self._kind, step, dict(scalars)))

    def sync(self) -> None:
        self._relay.sync()

    def close(self) -> None:
        self._relay.close()


def _same_place(one: Row, other: Row) -> bool:
    """A step has one such row; of charts it may have several."""
    return one.kind == other.kind != "charts" and one.is_validation == other.is_validation
