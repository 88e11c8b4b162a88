"""A thread that writes metrics and events, so that full, read-only or slow storage delays no step. Events: such as heals and failures.

Each task (metrics, events, config.toml) writes from memory to files; if any of its writes fails, the task is retried until it succeeds.
Failure and recovery are reported once each."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from training.checkpoint_files import reason
from training.durable_files import AppendedFile, lines_from_end
from training.progress import Clock, duration

RETRY_S = 1.0
CLOSE_S = 20.0  # longest wait for storage at the end of the process
SLOW_S = 10.0  # a longer write is reported
KEPT_BYTES, KEPT_S = 64 << 20, 3600.0  # limits for the rows of one task that wait for storage
EVENTS_FILE = "events.jsonl"  # in the folder of the group, or of a run without groups; appears with the first event
Report = Callable[[str], None]


@dataclass
class _Task:
    name: str
    do: Callable[[], None]
    lost: Callable[[], int]  # returns the number of rows dropped so far for lack of room
    failed_at: float | None = None
    reported_lost: int = 0


class BackgroundWriter:
    """A thread that runs tasks, and retries those that fail. `report`: called when storage fails or recovers, in any thread."""

    def __init__(self, report: Report, *, clock: Clock = time.monotonic, retry_s: float = RETRY_S) -> None:
        self._report = report
        self._clock = clock
        self._retry_s = retry_s
        self._tasks: list[_Task] = []
        self._changed = threading.Condition()
        self._requested = self._done = 0  # number of `wake` calls, and of those whose rows are written
        self._closed = False
        self._busy_since: float | None = None
        self._slow_reported = False
        self._thread: threading.Thread | None = None

    def register(self, name: str, do: Callable[[], None], lost: Callable[[], int] = lambda: 0) -> None:
        """Adds a task: the thread calls `do` after each `wake`; it writes all pending rows or raises."""
        self._tasks.append(_Task(name, do, lost))

    def wake(self) -> None:
        """Requests a write of pending rows. Returns at once."""
        with self._changed:
            self._requested += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="background-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            since = self._busy_since
        if since is not None and not self._slow_reported and self._clock() - since > SLOW_S:
            self._slow_reported = True
            waited = duration(self._clock() - since)
            self._report(f"storage has not accepted a write for {waited}; new rows are kept in memory")

    @property
    def has_failed_task(self) -> bool:
        """Returns True if the last attempt of any task failed."""
        return any(task.failed_at is not None for task in self._tasks)

    def flush(self, timeout_s: float) -> bool:
        """Returns True once all rows queued so far are written; False after `timeout_s`, or if storage fails."""
        with self._changed:
            requested = self._requested
            self._changed.wait_for(lambda: self._done >= requested or self.has_failed_task, timeout_s)
            return self._done >= requested

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Lets the thread run every task once more and end, for `timeout_s` at most; reports rows that are lost. May be called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._done < self._requested:
            failing = [task.name for task in self._tasks if task.failed_at is not None]
            names = " and ".join(failing) or "metrics and events"
            self._report(f"{names}: the newest rows are lost, since storage has not recovered before the end")

    def write_all(self) -> bool:
        """Runs every task once; returns True if none failed."""
        for task in self._tasks:
            self._do(task)
        return not self.has_failed_task

    def _run(self) -> None:
        while True:
            with self._changed:
                if self.has_failed_task:
                    self._changed.wait_for(lambda: self._closed, self._retry_s)
                else:
                    self._changed.wait_for(lambda: self._closed or self._requested > self._done)
                requested, last = self._requested, self._closed
            written = self.write_all()
            with self._changed:
                self._done = requested if written else self._done
                self._changed.notify_all()
                # the report of a recovery is an event, which may come after the events were written
                if last and (not written or self._done == self._requested):
                    return

    def _do(self, task: _Task) -> None:
        self._busy_since = began = self._clock()
        try:
            task.do()
        except Exception as error:  # noqa: BLE001 (a damaged file or W&B can raise anything, and must not end the thread of all tasks)
            if task.failed_at is None:
                task.failed_at = began
                cause = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                self._report(f"{task.name} cannot be written: {cause}; kept in memory and retried")
        else:
            dropped, task.reported_lost = task.lost() - task.reported_lost, task.lost()
            if task.failed_at is not None or dropped:
                after = "" if task.failed_at is None else f", after {duration(self._clock() - task.failed_at)}"
                rest = (
                    f"{dropped} rows are lost, since there was no room to keep them" if dropped else "nothing is lost"
                )
                task.failed_at = None
                self._report(f"{task.name} can be written again{after}; {rest}")
        self._busy_since = None
        if self._slow_reported:
            self._slow_reported = False
            self._report(f"storage accepts writes again: the last one took {duration(self._clock() - began)}")


class Events:
    """Events of one launch of one rank (ft/telemetry.py lists them), appended as JSON lines to <run>/groups/<id>/events.jsonl, or to
    <run>/events.jsonl without replica groups. `heals`: number of heals, of other groups and of this one. Callable from any thread.

    {"time": 1795300000.1, "step": 199, "event": "weights differ", "rank": 0, "groups": ["1"]}
    """

    def __init__(
        self, folder: Path, background_writer: BackgroundWriter, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.count_by_event: Counter[str] = Counter()
        self.heals = 0
        self.lost = 0  # lines dropped for lack of room
        self._path = folder / EVENTS_FILE
        self._background_writer = background_writer
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._lines: deque[tuple[float, bytes]] = deque()  # unwritten lines, each with the time when it was added
        self._bytes = 0
        background_writer.register("events", self._write, lambda: self.lost)

    def __call__(self, event: str, step: int, **fields: object) -> None:
        now_s, healing = time.monotonic(), fields.get("healing")
        line = {"time": round(self._wall_clock(), 3), "step": step, "event": event, **fields}
        text = json.dumps(line).encode() + b"\n"
        with self._lock:
            self.count_by_event[event] += 1
            self.heals += len(healing) if isinstance(healing, list) else 0
            self._lines.append((now_s, text))
            self._bytes += len(text)
            while self._bytes > KEPT_BYTES or self._lines[0][0] < now_s - KEPT_S:
                self._bytes -= len(self._lines.popleft()[1])
                self.lost += 1
        self._background_writer.wake()

    def summary(self) -> str:
        """Returns counts for the closing summary; "" without replica groups."""
        labels = {
            "quorum": "quorums",
            "healed": "heals of this group",
            "failed": "failed reductions",
            "weights differ": "differences of weights",
        }
        if not any(self.count_by_event[event] for event in labels):  # a storage failure is an event of any run
            return ""
        return ", ".join(f"{label} {self.count_by_event[event]}" for event, label in labels.items())

    def _write(self) -> None:
        """Writes the lines, in the background writer's thread. Other ranks append complete lines to the same file, under its lock."""
        with self._lock:
            lines, lost = [line for _, line in self._lines], self.lost
        if not lines:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with closing(AppendedFile(self._path)) as file, file.locked():
            file.read_size()
            _, torn = next(lines_from_end(file))
            if torn:  # by a kill, or by a full disk if truncation failed
                file.truncate(file.size_bytes - len(torn))
            file.append(b"".join(lines))
        with self._lock:
            for _ in range(len(lines) - (self.lost - lost)):
                self._bytes -= len(self._lines.popleft()[1])
