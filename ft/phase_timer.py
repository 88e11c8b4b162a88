"""What a manager tells of its time and of what happened to it, to whoever keeps the books (training/progress.py, training/events.py).

All of it is told in the trainer's thread. Seconds inside `phase` are that phase's alone, whatever phase lies around it:

    quorum    asking who takes part              rebuild   forming the process group to other groups
    heal      the state of others is on its way, to this group or from it
    waiting   in a reduction, for groups that are later than this one
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class PhaseTimer(Protocol):
    """Where the seconds go."""

    @property
    def goodput_s(self) -> float:
        """Spent on steps that were committed. Any thread may ask."""
        ...

    def phase(self, name: str) -> AbstractContextManager[None]: ...

    def long_phase(self) -> tuple[str, float] | None:
        """One whose length has nothing to do with a step's, in words, and the seconds since it began; None: it is none. Any thread may
        ask."""
        ...

    def move(self, seconds: float, from_phase: str, to_phase: str) -> None:
        """What was counted for one phase was another's."""
        ...

    def lose(self) -> None:
        """What was computed since the last commit was for nothing."""
        ...


class NoPhaseTimer:
    """Of a manager whose trainer keeps none."""

    goodput_s = 0.0

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def long_phase(self) -> tuple[str, float] | None:
        return None

    def move(self, seconds: float, from_phase: str, to_phase: str) -> None: ...

    def lose(self) -> None: ...


class Events(Protocol):
    """What happened to a group, by name: "quorum" (quorum_id, groups, healing), "heal" (sources), "healed" (bytes), "failed" (reason),
    "lost work", and "weights differ" (rank, groups; empty: nobody can tell whose), which any rank may see; the rest is told by rank 0."""

    def __call__(self, event: str, step: int, **what: object) -> None: ...


def ignore_event(event: str, step: int, **what: object) -> None:
    """Nobody listens."""
