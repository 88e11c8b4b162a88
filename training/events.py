"""Events of a replica group, one JSON line each in <run>/groups/<id>/events.jsonl: for people, charts and proofs.

Floor 3. Every rank has one; the manager calls it (ft/telemetry.py names the events). Unlike metrics.jsonl, which has each step once
whatever happened, nothing is ever taken out of it. The file appears with the first event. The scribe (scribe.py) writes it; while storage
fails KEPT_BYTES or KEPT_S of lines are kept.

    {"time": 1795300000.1, "step": 199, "event": "weights differ", "rank": 0, "groups": ["1"]}
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from training.appended import AppendedFile, lines_from_end
from training.scribe import KEPT_BYTES, KEPT_S, Scribe

FILE_NAME = "events.jsonl"


class Events:
    """Events of one start of one rank. `counts`: by event; `heals`: of other groups and of this one. Any thread may tell."""

    def __init__(self, folder: Path, scribe: Scribe, *, wall_clock: Callable[[], float] = time.time) -> None:
        self.counts: Counter[str] = Counter()
        self.heals = 0
        self.lost = 0  # lines that there was no room for
        self._path, self._scribe, self._wall_clock = folder / FILE_NAME, scribe, wall_clock
        self._lock = threading.Lock()
        self._lines: deque[tuple[float, bytes]] = deque()  # that are not written, and since when
        self._bytes = 0
        scribe.serve("events", self._write, lambda: self.lost)

    def __call__(self, event: str, step: int, **what: object) -> None:
        now_s, healing = time.monotonic(), what.get("healing")
        line = {"time": round(self._wall_clock(), 3), "step": step, "event": event, **what}
        text = json.dumps(line).encode() + b"\n"
        with self._lock:
            self.counts[event] += 1
            self.heals += len(healing) if isinstance(healing, list) else 0
            self._lines.append((now_s, text))
            self._bytes += len(text)
            while self._bytes > KEPT_BYTES or self._lines[0][0] < now_s - KEPT_S:
                self._bytes -= len(self._lines.popleft()[1])
                self.lost += 1
        self._scribe.wake()

    def summary(self) -> str:
        """For the closing lines; empty where there are no groups."""
        if not self.counts:
            return ""
        words = {
            "quorum": "quorums",
            "healed": "heals of this group",
            "failed": "failed reductions",
            "weights differ": "differences of weights",
        }
        return ", ".join(f"{what} {self.counts[event]}" for event, what in words.items())

    def _write(self) -> None:
        """Writes the lines, in the scribe's thread. The group's other ranks write there, too: each whole lines, while it holds the file."""
        with self._lock:
            lines, lost = [line for _, line in self._lines], self.lost
        if not lines:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with closing(AppendedFile(self._path)) as file, file.held():
            file.look()
            _, torn = next(lines_from_end(file))
            if torn:  # by a kill, or by a full disk where nothing could be taken back
                file.cut(file.size_bytes - len(torn))
            file.append(b"".join(lines))
        with self._lock:
            for _ in range(len(lines) - (self.lost - lost)):
                self._bytes -= len(self._lines.popleft()[1])
