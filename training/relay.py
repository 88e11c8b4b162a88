"""Figures of a run that several replica groups train: one of them writes, the others remember what they would have written.

Floor 3, between metrics.py and sinks.py. All groups have the same figures, for all have the same sums. When the role moves, whoever has it
now writes first what the one before did not come to write: no step is missing in metrics.jsonl, and none is there twice.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from training.sinks import Sinks

STEPS_KEPT = 100  # rows; who writes is known anew with every quorum, so few steps can be missing

Kind = Literal["journals", "charts"]


class Row(NamedTuple):
    kind: Kind
    step: int
    scalars: Mapping[str, float]

    @property
    def is_validation(self) -> bool:
        """A look at held-out text: a row of its own for the same step."""
        return any(name.startswith("validation") for name in self.scalars)


class Relay:
    """`open_sinks(resumed_step)` as sinks.open_sinks. `writes`: whether this group does, now."""

    def __init__(self, journal: Path, writes: Callable[[], bool], open_sinks: Callable[[int | None], Sinks]) -> None:
        self._journal, self._writes, self._open_sinks = journal, writes, open_sinks
        self._kept: deque[Row] = deque(maxlen=STEPS_KEPT)
        self._sinks: Sinks | None = None

    def sinks(self) -> Sinks:
        """What metrics.py writes to."""
        return Sinks((_End(self, "journals"),), (_End(self, "charts"),))

    def write(self, row: Row) -> None:
        self._kept.append(row)
        if not self._writes():
            self.close()
        elif self._sinks is not None:
            self._put(row)
        else:
            self._take_over(row.step)

    def close(self) -> None:
        if self._sinks is not None:
            self._sinks.close()
            self._sinks = None

    def _take_over(self, step: int) -> None:
        """What lies at this step and past it is of a life that ended before it was saved."""
        self._sinks = self._open_sinks(step - 1 or None)
        there = self._rows_there()
        for row in self._kept:
            if row.step == step or (row.step, row.is_validation) not in there:
                self._put(row)

    def _rows_there(self) -> set[tuple[int, bool]]:
        """Steps, and whether of a look at held-out text."""
        if not self._journal.exists():
            return set()
        rows = map(json.loads, self._journal.read_text(encoding="utf-8").splitlines()[-2 * STEPS_KEPT :])
        return {(row["step"], Row("journals", row["step"], row).is_validation) for row in rows}

    def _put(self, row: Row) -> None:
        assert self._sinks is not None
        for sink in getattr(self._sinks, row.kind):
            sink.write(row.step, row.scalars)


class _End:
    def __init__(self, relay: Relay, kind: Kind) -> None:
        self._relay = relay
        self._kind: Kind = kind

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._relay.write(Row(self._kind, step, dict(scalars)))

    def close(self) -> None:
        self._relay.close()
