"""Writes the rows of metrics.jsonl, samples.jsonl and the charts. With replica groups the group that the quorum names writes; the others
keep their rows in memory until they see them in the files.

The training thread appends rows; the background writer's thread (background_writer.py) writes them, so full, read-only or slow storage does
not delay a step, and a torn line is removed and written again. Rows are kept until they are in the files, up to KEPT_BYTES and KEPT_S. If a
process is killed, other groups still have its newest rows; a run of one group repeats the steps since its newest checkpoint, before which
it has written all rows (`sync`), unless storage of the run's folder failed then, or did not answer for SYNC_S.

All groups have the same losses and token counts, since reductions give all of them the same results; times and memory are the writer's, and
so is the gradient norm with a semi_sync_method. A new writer first writes the rows that the previous one did not write, and removes rows of
steps that were not committed: each step is in metrics.jsonl and samples.jsonl exactly once. A process that was stopped (SIGSTOP) and
continues still believes to be the writer, until it reads a newer quorum in the lease (writer_lease.py).

The newest rows (ROWS_KEPT, SENT_BYTES) are sent to healing groups and stored in each checkpoint, since a checkpoint may be of a step that
only its writer has committed. If that group dies, the others repeat the step, and the files get their row of it. If all groups die after
that, the job resumes from the checkpoint, and the next writer puts the checkpoint's rows in the place of those."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from training.background_writer import CLOSE_S, KEPT_BYTES, KEPT_S, BackgroundWriter
from training.progress import Clock
from training.sinks import METRICS, SAMPLES, Kind, LastKeptStep, Sinks, last_rows
from training.writer_lease import Quorum, acquire, is_superseded

ROWS_KEPT = 100  # at least; each quorum names the writer, so only the last few steps can be missing in the files
SYNC_S = 5.0  # longest wait of a checkpoint for the rows before it
FORMER_KINDS = {"journals": "metrics", "records": "samples"}  # in checkpoints of earlier versions
ROW_BYTES = 1000  # memory of a row, without its text
# most bytes of the rows that are sent, as a joiner accepts 8 MiB in all; a row of samples has some 30 for each of up to 8,192 slots
SENT_BYTES = 2 << 20


class Row(NamedTuple):
    """One row of a file, or the points of the charts at a step. A key of `scalars` that begins with "validation" makes it the row of a
    validation, which a step has beside its training row."""

    kind: Kind
    step: int
    scalars: Mapping[str, Any]

    @property
    def is_validation(self) -> bool:
        """Returns True for the row of a validation."""
        return any(name.startswith("validation") for name in self.scalars)


class _Superseded(Exception):
    """Raised if the writer of a newer quorum has opened the files."""


class _KeptRow(NamedTuple):
    number: int
    row: Row
    size_bytes: int
    at_s: float


class MetricsWriter:
    """Accepts the rows of a MetricsProcessor. `open_sinks(kept_step)`: opens a sinks.Sinks in `folder`. `writer_quorum`: returns the
    quorum in which this group is the writer at present. `shared`: other groups write into the same folder, one at a time."""

    def __init__(
        self,
        folder: Path,
        writer_quorum: Callable[[], Quorum | None],
        open_sinks: Callable[[LastKeptStep], Sinks],
        background_writer: BackgroundWriter,
        *,
        shared: bool = True,
        clock: Clock = time.monotonic,
        rows_kept: int = ROWS_KEPT,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self._folder = folder
        self._writer_quorum = writer_quorum
        self._open_sinks = open_sinks
        self._background_writer = background_writer
        self._shared = shared
        self._clock = clock
        self._rows_kept = rows_kept
        self._max_kept_bytes = kept_bytes
        self._lock = threading.Lock()  # for state shared by both threads; never held during file operations
        # rows in memory, also those that another group has to write, since that group may die
        self.kept: deque[_KeptRow] = deque()
        self._kept_bytes = self._last_number = 0
        self._first_pending = 1  # number of the first row that this group has to write and has not written
        self._quorum: Quorum | None = None  # in which this group writes, as of the newest row; None: another one does
        self._reopen = self._close_requested = False
        self._durable_until = self._synced_until = 0  # number of the newest row: that `sync` has named, that is durable
        self._written_until = 0  # up to this step all rows are in the files, from any group: they may be dropped
        self.lost = 0  # rows of this group that were dropped unwritten, for lack of room
        self.sinks: Sinks | None = None  # the open files; used only in the background writer's thread
        background_writer.register("metrics", self._write_pending, lambda: self.lost)

    def write(self, kind: Kind, step: int, scalars: Mapping[str, Any]) -> None:
        """Queues a row for the background writer."""
        row, quorum = Row(kind, step, dict(scalars)), self._writer_quorum()
        with self._lock:
            begins_step = kind == "metrics" and not row.is_validation
            if begins_step and self.kept and self.kept[-1].row.step >= step:  # the job has resumed from a checkpoint
                earlier = [kept for kept in self.kept if kept.row.step < step]
                pending = sum(kept.number >= self._first_pending for kept in earlier)
                self._replace_rows([kept.row for kept in earlier], pending=pending)
            self._append(row)
            self._quorum, self._close_requested = quorum, False
            if quorum is None:
                self._first_pending = self._last_number + 1
            self._drop_rows()
        self._background_writer.wake()

    def state_dict(self) -> dict[str, Any]:
        """Returns the newest rows, for a healing group or a checkpoint: the group that loads them may be the next writer."""
        rows, left_bytes = list[Row](), SENT_BYTES
        with self._lock:
            for kept in islice(reversed(self.kept), self._rows_kept):
                left_bytes -= kept.size_bytes
                if left_bytes < 0:
                    break
                rows.append(kept.row)
        return {"rows": json.dumps(rows[::-1])}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with self._lock:
            rows = ((FORMER_KINDS.get(kind, kind), *row) for kind, *row in json.loads(state["rows"]))
            self._replace_rows([Row(*row) for row in rows])

    def sync(self) -> None:
        """Makes the rows durable (fsync) if this group is the writer; waits up to SYNC_S for storage."""
        self._check_role()
        with self._lock:
            self._durable_until = self._last_number
        self._background_writer.wake()
        self._background_writer.flush(SYNC_S)

    def close(self) -> None:
        """Waits up to CLOSE_S for pending rows. May be called twice."""
        self._check_role()
        self._close_requested = True
        self._background_writer.wake()
        self._background_writer.flush(CLOSE_S)

    def _check_role(self) -> None:
        """Takes the writer role if it was assigned after the newest row, which may be the last one."""
        quorum = self._writer_quorum()
        with self._lock:
            if quorum is None or not self.kept:
                return
            if self._quorum is None:
                newest = self.kept[-1].row.step
                self._first_pending = next(kept.number for kept in self.kept if kept.row.step == newest)
            self._quorum = quorum

    # ---- rows in memory; called with the lock held

    def _append(self, row: Row) -> None:
        self._last_number += 1
        size_bytes = ROW_BYTES + len(str(row.scalars))
        self.kept.append(_KeptRow(self._last_number, row, size_bytes, self._clock()))
        self._kept_bytes += size_bytes

    def _replace_rows(self, rows: list[Row], pending: int = 0) -> None:
        """Replaces all rows in memory by `rows`, of which the last `pending` are still to be written."""
        self.kept.clear()
        self._kept_bytes, self._written_until, self._reopen = 0, 0, True
        for row in rows:
            self._append(row)
        self._first_pending = self._last_number + 1 - pending

    def _drop_rows(self) -> None:
        """Drops rows that are in the files, or exceed the limits."""
        oldest_s = self._clock() - KEPT_S
        while len(self.kept) > self._rows_kept:
            first = self.kept[0]
            is_written = first.number < self._first_pending and first.row.step <= self._written_until
            if not is_written and first.at_s >= oldest_s and self._kept_bytes <= self._max_kept_bytes:
                return
            self.kept.popleft()
            self._kept_bytes -= first.size_bytes
            if first.number >= self._first_pending:
                self.lost += 1
                self._first_pending = first.number + 1

    # ---- files; called in the background writer's thread

    def _write_pending(self) -> None:
        """Writes the pending rows, or closes the files if another group is the writer. Also closes them after an exception, for repair."""
        with self._lock:
            quorum, reopen, self._reopen = self._quorum, self._reopen, False
            durable_until = self._durable_until  # a `sync` during this call names rows that are not in `known`
            known = list(self.kept)
            rows = [kept for kept in known if kept.number >= self._first_pending]
        if quorum is None or reopen:
            self._close_files()
        if quorum is None:
            self._drop_written_rows()
            return
        try:
            is_ours = not rows or self._write_or_take_over(quorum, rows, known)
            if durable_until > self._synced_until and self.sinks is not None:
                self.sinks.sync()
                self._synced_until = durable_until
        except Exception:  # of any kind: some of the rows may be in the files
            self._close_files()
            raise
        if not is_ours or self._close_requested:
            self._close_files()
        if rows:
            with self._lock:
                self._first_pending = max(self._first_pending, rows[-1].number + 1)
                if is_ours and not self._reopen:  # the newest step may get more rows
                    self._written_until = max(self._written_until, rows[-1].row.step - 1)
                self._drop_rows()

    def _write_or_take_over(self, quorum: Quorum, rows: list[_KeptRow], known: list[_KeptRow]) -> bool:
        """Writes the pending rows, after opening the files if needed. `known`: all rows in memory at the time, since a rewind or a heal may
        replace them meanwhile. False: another group has become the writer."""
        if self.sinks is not None and self._write_rows(quorum, [kept.row for kept in rows]):
            return True
        self._close_files()
        if self._shared and not acquire(self._folder, quorum):
            return False
        try:
            missing = self._take_over(quorum, rows[0].row.step, [kept.row for kept in known])
        except _Superseded:
            return False
        return self._write_rows(quorum, missing)

    def _write_rows(self, quorum: Quorum, rows: Iterable[Row]) -> bool:
        assert self.sinks is not None
        with self.sinks.locked():
            if self.sinks.is_replaced() or (self._shared and is_superseded(self._folder, quorum)):
                return False
            for row in rows:
                self.sinks.write(*row)
        return True

    def _take_over(self, quorum: Quorum, step: int, known: list[Row]) -> list[Row]:
        """Opens the files and removes their rows from `step` on, or from the first earlier step whose row differs from this group's (the
        previous writer died in that step, and the others repeated it). Returns those of the `known` rows that are to be written. Raises
        _Superseded."""
        first = step

        def kept_step() -> int | None:
            nonlocal first  # the files are locked: a newer writer truncates them after this
            if self._shared and is_superseded(self._folder, quorum):
                raise _Superseded
            is_written = self._make_written_test(known[0].step, step - 1) if self._shared else lambda row: True
            first = min(row.step for row in known if row.step >= step or not is_written(row))
            return first - 1 or None

        self.sinks = self._open_sinks(kept_step)
        return [row for row in known if row.step >= first]

    def _make_written_test(self, since: int, until: int) -> Callable[[Row], bool]:
        """Returns a predicate for rows of steps up to `until`: True if the files have the row once. Times and memory differ between groups;
        the training data is the same in all and identifies a step. Charts are written after these files and are not read."""
        metrics = last_rows(self._folder / METRICS, since=since, until=until)
        samples = last_rows(self._folder / SAMPLES, since=since, until=until)
        found = Counter((row["step"], Row("metrics", row["step"], row).is_validation) for row in metrics)
        steps, trained = Counter(row["step"] for row in samples), {row["step"]: row for row in samples}

        def is_written(row: Row) -> bool:
            if row.kind == "samples":
                return steps[row.step] == 1 and trained[row.step] == {"step": row.step, **row.scalars}
            return row.kind == "charts" or found[row.step, row.is_validation] == 1

        return is_written

    def _drop_written_rows(self) -> None:
        """Drops rows that another group has written, after reading the ends of the files from time to time."""
        with self._lock:
            newest = self.kept[-1].row.step if self.kept else 0
            rows = self._rows_kept
            due = len(self.kept) >= 2 * rows and self.kept[len(self.kept) - rows].row.step > self._written_until
        if not due:
            return
        ends = [last_rows(self._folder / name, since=newest - rows, until=newest) for name in (METRICS, SAMPLES)]
        written_until = min(max((row["step"] for row in end), default=0) for end in ends)
        with self._lock:
            self._written_until = max(self._written_until, written_until)
            self._drop_rows()

    def _close_files(self) -> None:
        if self.sinks is not None:
            self.sinks.close()
            self.sinks = None
