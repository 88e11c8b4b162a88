"""The writer of a run's metrics. Where several replica groups train it, one of them writes, and the others keep the rows in memory.

The trainer's thread appends rows; the background writer's (background_writer.py) writes them, so storage that is full, read-only or slow
holds up no step, and a torn line is removed and written anew. KEPT_BYTES or KEPT_S of rows are kept until they are in the files. The newest
rows of a process that is killed are kept by other groups; a run of one group has written all rows before its newest checkpoint (`sync`),
and repeats later steps.

All groups have the same metrics, for all have the same sums. When the role moves, the new writer first writes the rows that the one before
did not write, and removes rows of steps that did not hold: no step is missing in metrics.jsonl and samples.jsonl, and none is there twice.
A group that was stopped, and wakes, still takes itself for the writer; the lease (writer_lease.py) tells it that a newer quorum is there.

The newest rows go to groups that heal, and into each checkpoint (ROWS_KEPT), which may be of a step that its writer alone has committed. If
that one dies, the others repeat the step, and the files hold their row of it; if then all die, the job goes on from the checkpoint, and the
next writer puts back the rows that belong to it."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from training.background_writer import CLOSE_S, KEPT_BYTES, KEPT_S, BackgroundWriter
from training.progress import Clock
from training.sinks import METRICS, SAMPLES, Kind, ResumedStep, Sinks, last_rows
from training.writer_lease import Quorum, acquire, is_superseded

ROWS_KEPT = 100  # at least: every quorum names the writer, so few steps can be missing
SYNC_S = 5.0  # a checkpoint waits so long for rows before it
ROW_BYTES = 1000  # of memory, beside its text


class Row(NamedTuple):
    kind: Kind
    step: int
    figures: Mapping[str, Any]

    @property
    def is_validation(self) -> bool:
        """True for a validation, which has a row of its own for the same step."""
        return any(name.startswith("validation") for name in self.figures)


class _Over(Exception):
    """Raised when a newer quorum's writer has the files."""


class _Kept(NamedTuple):
    number: int
    row: Row
    size_bytes: int
    at_s: float


class MetricsWriter:
    """Takes the rows of a MetricsProcessor. `open_sinks(resumed_step)`: see sinks.Sinks, into `folder`. `writes`: the quorum that makes
    this group the writer, now. `shared`: other groups write into the same folder, one at a time."""

    def __init__(
        self,
        folder: Path,
        writes: Callable[[], Quorum | None],
        open_sinks: Callable[[ResumedStep], Sinks],
        background_writer: BackgroundWriter,
        *,
        shared: bool = True,
        clock: Clock = time.monotonic,
        rows_kept: int = ROWS_KEPT,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self._folder, self._writes, self._open_sinks = folder, writes, open_sinks
        self._background_writer, self._shared, self._clock = background_writer, shared, clock
        self._rows_kept, self._most_bytes = rows_kept, kept_bytes
        self._lock = threading.Lock()  # around what both threads have; never while a file is waited for
        self.kept: deque[_Kept] = deque()  # rows that are remembered
        self._kept_bytes = self._number = 0
        self._todo = 1  # the first row that is this group's to write, and not known to be in the files
        self._quorum: Quorum | None = None  # that made this group the writer, at the newest row; None: another was
        self._anew = self._wants_sync = self._closing = False
        self._there = 0  # up to this step all rows are in the files, whoever wrote them
        self.lost = 0  # rows that were this group's to write, and that there was no room for
        # The background writer's own:
        self.sinks: Sinks | None = None  # that are open
        background_writer.register("figures", self._catch_up, lambda: self.lost)

    def write(self, kind: Kind, step: int, scalars: Mapping[str, Any]) -> None:
        """Remembers it; the background writer writes it."""
        row, quorum = Row(kind, step, dict(scalars)), self._writes()
        with self._lock:
            begins_step = kind == "journals" and not row.is_validation
            if begins_step and self.kept and self.kept[-1].row.step >= step:  # the job has gone back to a checkpoint
                self._remember(kept.row for kept in self.kept if kept.row.step < step)
            self._append(row)
            self._quorum, self._closing = quorum, False
            if quorum is None:
                self._todo = self._number + 1
            self._forget()
        self._background_writer.wake()

    def state_dict(self) -> dict[str, Any]:
        """For a group that heals, or begins with this checkpoint: it may be the next to write."""
        with self._lock:
            return {"rows": json.dumps([kept.row for kept in self.kept][-self._rows_kept :])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            self._remember(Row(*row) for row in json.loads(state["rows"]))

    def sync(self) -> None:
        """Makes the rows durable where this group writes, and storage allows it within SYNC_S."""
        self._check_role()
        self._wants_sync = True
        self._background_writer.wake()
        self._background_writer.flush(SYNC_S)

    def close(self) -> None:
        """Waits up to CLOSE_S for what is not written. May be called twice."""
        self._check_role()
        self._closing = True
        self._background_writer.wake()
        self._background_writer.flush(CLOSE_S)

    def _check_role(self) -> None:
        """Takes over a role that came after the newest row, which may be the last."""
        quorum = self._writes()
        with self._lock:
            if quorum is None or not self.kept:
                return
            if self._quorum is None:
                newest = self.kept[-1].row.step
                self._todo = next(kept.number for kept in self.kept if kept.row.step == newest)
            self._quorum = quorum

    # ---- what is remembered: under the lock

    def _append(self, row: Row) -> None:
        self._number += 1
        size_bytes = ROW_BYTES + len(str(row.figures))
        self.kept.append(_Kept(self._number, row, size_bytes, self._clock()))
        self._kept_bytes += size_bytes

    def _remember(self, rows: Iterable[Row]) -> None:
        """Remembers these rows, and nothing else; none of them is new."""
        rows = list(rows)
        self.kept.clear()
        self._kept_bytes, self._there, self._anew = 0, 0, True
        for row in rows:
            self._append(row)
        self._todo = self._number + 1

    def _forget(self) -> None:
        """Drops rows that are in the files, or are too many."""
        oldest_s = self._clock() - KEPT_S
        while len(self.kept) > self._rows_kept:
            first = self.kept[0]
            is_written = first.number < self._todo and first.row.step <= self._there
            if not is_written and first.at_s >= oldest_s and self._kept_bytes <= self._most_bytes:
                return
            self.kept.popleft()
            self._kept_bytes -= first.size_bytes
            if first.number >= self._todo:
                self.lost += 1
                self._todo = first.number + 1

    # ---- the files: in the background writer's thread

    def _catch_up(self) -> None:
        """Writes the rows that are due, or closes the files if another group is the writer. May raise: then the files are opened anew, and
        torn lines are cut off."""
        with self._lock:
            quorum, anew, self._anew = self._quorum, self._anew, False
            rows = [kept for kept in self.kept if kept.number >= self._todo]
        if quorum is None or anew:
            self._close_files()
        if quorum is None:
            return self._forget_written()
        try:
            is_ours = not rows or self._put_or_take_over(quorum, rows)
            if self._wants_sync and self.sinks is not None:
                self.sinks.sync()
                self._wants_sync = False
        except Exception:  # whatever it is: some of the rows may be in the files
            self._close_files()
            raise
        if not is_ours or self._closing:
            self._close_files()
        if rows:
            with self._lock:
                self._todo = max(self._todo, rows[-1].number + 1)
                if is_ours and not self._anew:  # of the newest step there may be more rows to come
                    self._there = max(self._there, rows[-1].row.step - 1)
                self._forget()

    def _put_or_take_over(self, quorum: Quorum, rows: list[_Kept]) -> bool:
        """Writes the rows. False: another group is to write them by now."""
        if self.sinks is not None and self._put_all(quorum, [kept.row for kept in rows]):
            return True
        self._close_files()
        if self._shared and not acquire(self._folder, quorum):
            return False
        try:
            missing = self._take_over(quorum, rows[0].row.step, rows[-1].number)
        except _Over:
            return False
        return self._put_all(quorum, missing)

    def _put_all(self, quorum: Quorum, rows: Iterable[Row]) -> bool:
        assert self.sinks is not None
        with self.sinks.held():
            if self.sinks.replaced() or (self._shared and is_superseded(self._folder, quorum)):
                return False
            for row in rows:
                self.sinks.write(*row)
        return True

    def _take_over(self, quorum: Quorum, step: int, last: int) -> list[Row]:
        """Opens the files and cuts their rows from `step` on, or from the first earlier step whose row differs from this group's: the
        previous writer died with it, and the others repeated it. Returns the rows to write. Raises _Over."""
        with self._lock:
            known = [kept.row for kept in self.kept if kept.number <= last]
        first = step

        def resumed_step() -> int | None:
            nonlocal first  # the files are locked: a newer writer comes after this, and cuts anew
            if self._shared and is_superseded(self._folder, quorum):
                raise _Over
            written = self._written(known[0].step, step - 1) if self._shared else lambda row: True
            first = min(row.step for row in known if row.step >= step or not written(row))
            return first - 1 or None

        self.sinks = self._open_sinks(resumed_step)
        return [row for row in known if row.step >= first]

    def _written(self, since: int, until: int) -> Callable[[Row], bool]:
        """A test for rows of steps up to `until`: True when the files have it, once. Time and memory differ between groups; the training
        data is the same in all, and identifies a step. Charts are written after the journal, and not read."""
        metrics = last_rows(self._folder / METRICS, since=since, until=until)
        samples = last_rows(self._folder / SAMPLES, since=since, until=until)
        there = Counter((row["step"], Row("journals", row["step"], row).is_validation) for row in metrics)
        steps, trained = Counter(row["step"] for row in samples), {row["step"]: row for row in samples}

        def written(row: Row) -> bool:
            if row.kind == "records":
                return steps[row.step] == 1 and trained[row.step] == {"step": row.step, **row.figures}
            return row.kind == "charts" or there[row.step, row.is_validation] == 1

        return written

    def _forget_written(self) -> None:
        """Drops rows that another group has written by now; reads the files now and then."""
        with self._lock:
            newest = self.kept[-1].row.step if self.kept else 0
            rows = self._rows_kept
            due = len(self.kept) >= 2 * rows and self.kept[len(self.kept) - rows].row.step > self._there
        if not due:
            return
        ends = [last_rows(self._folder / name, since=newest - rows, until=newest) for name in (METRICS, SAMPLES)]
        there = min(max((row["step"] for row in end), default=0) for end in ends)
        with self._lock:
            self._there = max(self._there, there)
            self._forget()

    def _close_files(self) -> None:
        if self.sinks is not None:
            self.sinks.close()
            self.sinks = None
