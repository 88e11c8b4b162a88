"""Which of several replica groups may touch what they share: the run's figures (relay.py) and its checkpoints (checkpoint.py).

Floor 3. The manager says who writes, by a quorum. A group that was stopped, and wakes, believes what it was told before; so whoever begins
to write notes the quorum in the run's folder first, and one that finds a newer one there leaves the files alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from training.sinks import replace_file

CLAIM = ".writer.json"  # in the run's folder: the quorum that the newest writer has its role by

Quorum = tuple[str, int]  # epoch, id: within an epoch ids only grow


def claim(folder: Path, quorum: Quorum) -> bool:
    """Notes it, unless a newer quorum's writer was here. A look and a note are not one: a group that is stopped between this and what it
    does next may still do that, and so does little at a time."""
    if is_over(folder, quorum):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / CLAIM, json.dumps(quorum).encode())
    return True


def is_over(folder: Path, quorum: Quorum) -> bool:
    """A newer quorum's writer was here. One of another epoch is of a job that began anew: whoever comes later is right."""
    path = folder / CLAIM
    epoch, newest = json.loads(path.read_text(encoding="utf-8")) if path.exists() else ("", 0)
    return bool(epoch == quorum[0] and newest > quorum[1])


class Claim:
    """A group's right to save. `quorum`: by which it writes, now; None: it does not. One that has no others always may (Alone)."""

    shared = True

    def __init__(self, folder: Path, quorum: Callable[[], Quorum | None]) -> None:
        self._folder, self._quorum = folder, quorum
        self._taken: Quorum = ("", 0)

    def take(self) -> bool:
        """At the beginning of a save."""
        quorum = self._quorum()
        if quorum is None or not claim(self._folder, quorum):
            return False
        self._taken = quorum
        return True

    def is_over(self) -> bool:
        """Since `take`."""
        return is_over(self._folder, self._taken)

    @property
    def name(self) -> str:
        """What no other writer's is."""
        return f"-{self._taken[0]}-{self._taken[1]}"

    def clears(self, name: str) -> bool:
        """Whether what a writer of that name left lying is this one's to clear away: not what a newer one writes."""
        epoch, _, number = name.removeprefix("-").rpartition("-")
        return epoch != self._taken[0] or int(number) <= self._taken[1]


class Alone(Claim):
    shared, name = False, ""

    def __init__(self) -> None:
        """Of one group that is all there is."""

    def take(self) -> bool:
        return True

    def is_over(self) -> bool:
        return False

    def clears(self, name: str) -> bool:
        return True
