"""A thread that writes files of metrics and events, so that full, read-only or slow storage holds up no step; and a group's events.

Each piece of work brings files up to date with rows in memory (MetricsWriter, Events); it fails as a whole, and is tried again until
it succeeds. Failure and recovery are reported once each."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from training.appended import AppendedFile, lines_from_end
from training.checkpoint_files import reason
from training.progress import Clock, duration

RETRY_S = 1.0
CLOSE_S = 20.0  # an end waits so long for storage
SLOW_S = 10.0  # a longer write of a few rows is reported
KEPT_BYTES, KEPT_S = 64 << 20, 3600.0  # rows that wait for storage, of one piece of work
FILE_NAME = "events.jsonl"  # in the group's folder; appears with the first event
Say = Callable[[str], None]


@dataclass
class _Work:
    name: str
    do: Callable[[], None]
    lost: Callable[[], int]  # rows so far that there was no room to remember
    failed_at: float | None = None
    told_lost: int = 0


class BackgroundWriter:
    """`say` reports trouble, and its end, in this thread or the caller's."""

    def __init__(self, say: Say, *, clock: Clock = time.monotonic, retry_s: float = RETRY_S) -> None:
        self._say, self._clock, self._retry_s = say, clock, retry_s
        self._works: list[_Work] = []
        self._changed = threading.Condition()
        self._asked = self._done = 0  # wakes, and up to which of them all is written
        self._closed = False
        self._busy_since: float | None = None
        self._told_slow = False
        self._thread: threading.Thread | None = None

    def register(self, name: str, do: Callable[[], None], lost: Callable[[], int] = lambda: 0) -> None:
        """`do` brings files up to date, in the thread, after each `wake`; it raises where it cannot."""
        self._works.append(_Work(name, do, lost))

    def wake(self) -> None:
        """There is something to write. Returns at once."""
        with self._changed:
            self._asked += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="background-writer", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            since = self._busy_since
        if since is not None and not self._told_slow and self._clock() - since > SLOW_S:
            self._told_slow = True
            waited = duration(self._clock() - since)
            self._say(f"storage has not taken a write for {waited}; what is new is kept in memory")

    @property
    def in_trouble(self) -> bool:
        """The last try of some work failed."""
        return any(work.failed_at is not None for work in self._works)

    def flush(self, timeout_s: float, *, patient: bool = False) -> bool:
        """True when all rows of before this call are written; at once False where storage is known to fail, unless `patient`."""
        with self._changed:
            asked = self._asked
            self._changed.wait_for(lambda: self._done >= asked or (self.in_trouble and not patient), timeout_s)
            return self._done >= asked

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Tries once more what failed, and ends. May be called twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._done < self._asked:
            failing = [work.name for work in self._works if work.failed_at is not None]
            names = " and ".join(failing) or "figures and events"
            self._say(f"{names}: the newest are lost, for storage has not come back before the end")

    def write_all(self) -> bool:
        """Does all work once; whether none of it failed."""
        for work in self._works:
            self._do(work)
        return not self.in_trouble

    def _run(self) -> None:
        while True:
            with self._changed:
                if self.in_trouble:
                    self._changed.wait_for(lambda: self._closed, self._retry_s)
                else:
                    self._changed.wait_for(lambda: self._closed or self._asked > self._done)
                asked, last = self._asked, self._closed
            written = self.write_all()
            with self._changed:
                self._done = asked if written else self._done
                self._changed.notify_all()
            if last:
                return

    def _do(self, work: _Work) -> None:
        self._busy_since = began = self._clock()
        try:
            work.do()
        except Exception as error:  # noqa: BLE001 (a damaged file, or W&B, raises what it likes: the thread is everybody's)
            if work.failed_at is None:
                work.failed_at = began
                cause = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                self._say(f"{work.name} cannot be written: {cause}; kept in memory, and tried again")
        else:
            gone, work.told_lost = work.lost() - work.told_lost, work.lost()
            if work.failed_at is not None or gone:
                after = "" if work.failed_at is None else f", after {duration(self._clock() - work.failed_at)}"
                rest = f"{gone} rows are lost, for there was no room to keep them" if gone else "nothing is lost"
                work.failed_at = None
                self._say(f"{work.name} are written again{after}; {rest}")
        self._busy_since = None
        if self._told_slow:
            self._told_slow = False
            self._say(f"storage takes writes again: the last one took {duration(self._clock() - began)}")


class Events:
    """Events of one start of one rank, one JSON line each in <run>/groups/<id>/events.jsonl (ft/telemetry.py names them); none is ever
    removed. `count_by_event`; `heals`: of other groups and of this one. Callable from any thread.

    {"time": 1795300000.1, "step": 199, "event": "weights differ", "rank": 0, "groups": ["1"]}
    """

    def __init__(
        self, folder: Path, background_writer: BackgroundWriter, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self.count_by_event: Counter[str] = Counter()
        self.heals = 0
        self.lost = 0  # lines that there was no room for
        self._path, self._background_writer, self._wall_clock = folder / FILE_NAME, background_writer, wall_clock
        self._lock = threading.Lock()
        self._lines: deque[tuple[float, bytes]] = deque()  # that are not written, and since when
        self._bytes = 0
        background_writer.register("events", self._write, lambda: self.lost)

    def __call__(self, event: str, step: int, **what: object) -> None:
        now_s, healing = time.monotonic(), what.get("healing")
        line = {"time": round(self._wall_clock(), 3), "step": step, "event": event, **what}
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
        """For the closing lines; empty where there are no groups."""
        if not self.count_by_event:
            return ""
        words = {
            "quorum": "quorums",
            "healed": "heals of this group",
            "failed": "failed reductions",
            "weights differ": "differences of weights",
        }
        return ", ".join(f"{what} {self.count_by_event[event]}" for event, what in words.items())

    def _write(self) -> None:
        """Writes the lines, in the background writer's thread. The group's other ranks write there, too: whole lines, under the file's
        lock."""
        with self._lock:
            lines, lost = [line for _, line in self._lines], self.lost
        if not lines:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with closing(AppendedFile(self._path)) as file, file.held():
            file.read_size()
            _, torn = next(lines_from_end(file))
            if torn:  # by a kill, or by a full disk where nothing could be taken back
                file.cut(file.size_bytes - len(torn))
            file.append(b"".join(lines))
        with self._lock:
            for _ in range(len(lines) - (self.lost - lost)):
                self._bytes -= len(self._lines.popleft()[1])
