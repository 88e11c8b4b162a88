"""The records that a job's ranks write under PHAROS_DRILL=1 (ft/recording.py), read while it runs.

Flow: drill_job.py waits by it, drill_rules.py judges by it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DiaryLine:
    event: str
    at_s: float
    pid: int
    step: int
    commit_id: str = ""
    digest: str = ""
    contributors: int = 0
    quorum_id: int = 0
    participants: Sequence[str] = ()  # names of groups
    heals: bool = False


class Diary:
    """The record of one group over all its lives: the lines of each rank, oldest first."""

    def __init__(self, name: str, folder: Path, ranks: int) -> None:
        self.name, self.folder = name, folder
        self.ranks: list[list[DiaryLine]] = [[] for _ in range(ranks)]
        self._read_to = [0] * ranks

    def read(self) -> None:
        """Reads what is there by now; a line that is not whole yet comes with the next call."""
        for rank, lines in enumerate(self.ranks):
            path = self.folder / f"diary.{rank}.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read_to[rank])
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read_to[rank] += len(whole)
            lines += [DiaryLine(**json.loads(line)) for line in whole.splitlines()]

    def since(self, at_s: float, *events: str, rank: int = 0) -> list[DiaryLine]:
        return [line for line in self.ranks[rank] if line.at_s >= at_s and line.event in events]

    @property
    def pids(self) -> list[int]:
        """The ranks' latest lives that have begun."""
        starts = [[line.pid for line in lines if line.event == "start"] for lines in self.ranks]
        return [pids[-1] for pids in starts if pids]

    @property
    def quorum(self) -> DiaryLine:
        """The newest that it took part in."""
        return next(line for line in reversed(self.ranks[0]) if line.event == "quorum")

    @property
    def step(self) -> int:
        """The last that it has committed."""
        return next((line.step for line in reversed(self.ranks[0]) if line.event == "commit"), 0)

    def is_compared(self, groups: int, interval: int) -> bool:
        """Since its latest life, and heal, began, so many groups have compared their weights, as they do every `interval` steps."""
        lines = self.ranks[0]
        since = max((number for number, line in enumerate(lines) if line.event in ("start", "healed")), default=0)
        compared = (line for line in lines[since:] if line.event == "commit" and line.step % interval == 0)
        return any(line.contributors == groups for line in compared)

    def is_with(self, groups: int, steps: int, since_s: float) -> bool:
        """Its last steps, so many since then, had the gradients of so many groups, on all its ranks."""
        for rank in range(len(self.ranks)):
            last = self.since(since_s, "commit", "start", rank=rank)[-steps:]
            if [line.contributors for line in last] != [groups] * steps:
                return False
        return True
