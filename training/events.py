"""What happened to a replica group, one JSON line each in <run>/groups/<id>/events.jsonl: for people, charts and proofs.

Floor 3. Every rank has one; the manager calls it (ft/accounts.py names the events). Unlike metrics.jsonl, which has each step once
whatever happened, nothing is ever taken out of it. The file appears with the first event.

    {"time": 1795300000.1, "step": 199, "event": "weights differ", "rank": 0, "groups": ["1"]}
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

FILE_NAME = "events.jsonl"


class Events:
    """Of one start of one rank. `counts`: by event; `heals`: of other groups and of this one."""

    def __init__(self, folder: Path, *, wall_clock: Callable[[], float] = time.time) -> None:
        self.counts: Counter[str] = Counter()
        self.heals = 0
        self._path, self._wall_clock = folder / FILE_NAME, wall_clock

    def __call__(self, event: str, step: int, **what: object) -> None:
        self.counts[event] += 1
        healing = what.get("healing")
        self.heals += len(healing) if isinstance(healing, list) else 0
        line = json.dumps({"time": round(self._wall_clock(), 3), "step": step, "event": event, **what})
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:  # one write: lines of several ranks do not mix
            file.write(line + "\n")

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
