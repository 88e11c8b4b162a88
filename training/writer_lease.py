"""The lease by which one of several replica groups writes what they share: metrics (metrics_writer.py) and checkpoints (checkpoint.py).

The manager names the writer, by a quorum. A group that was stopped, and wakes, believes what it was told before; so a group that begins to
write notes the quorum in the run's folder first, and one that finds a newer quorum there leaves the files alone."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path

from training.appended import replace_file

CLAIM = ".writer.json"  # in the run's folder: the quorum that the newest writer has its role by

Quorum = tuple[str, int]  # epoch, id: within an epoch ids only grow


def claim(folder: Path, quorum: Quorum) -> bool:
    """Notes it, unless a newer quorum's writer was here. A look and a note are not one: a group that is stopped between this and what it
    does next may still do that, and so does little at a time."""
    if is_over(folder, quorum):
        return False
    if _newest(folder) != quorum:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / CLAIM, json.dumps(quorum).encode())
    return True


def is_over(folder: Path, quorum: Quorum) -> bool:
    """A newer quorum's writer was here. One of another epoch is of a job that began anew: whoever comes later is right."""
    epoch, newest = _newest(folder)
    return epoch == quorum[0] and newest > quorum[1]


def _newest(folder: Path) -> Quorum:
    try:
        epoch, number = json.loads((folder / CLAIM).read_text(encoding="utf-8"))
        return str(epoch), int(number)
    except (FileNotFoundError, ValueError, TypeError):  # not there, or what a disk has made of it
        return "", 0


class WriterLease:
    """A group's right to save. `quorum`: by which it writes, now; None: it does not. One that has no others always may (Alone)."""

    shared = settled = True  # settled: what is saved is of the history that the others go on with

    def __init__(self, folder: Path, quorum: Callable[[], Quorum | None]) -> None:
        self._folder, self._quorum = folder, quorum
        self._taken, self.name = ("", 0), ""  # name: a suffix for folders that no other writer has

    @property
    def has_role(self) -> bool:
        """True when this group writes, as far as it knows."""
        return self._quorum() is not None

    def take(self) -> bool:
        """At the beginning of a save."""
        quorum = self._quorum()
        if quorum is None or not claim(self._folder, quorum):
            return False
        self._taken, self.name = quorum, f"-{quorum[0]}-{quorum[1]}"
        return True

    def is_over(self) -> bool:
        """Since `take`."""
        return is_over(self._folder, self._taken)

    def clears(self, name: str) -> bool:
        """True when this writer may remove the leftovers of one of that name: not those of a newer one."""
        epoch, _, number = name.removeprefix("-").rpartition("-")
        return epoch != self._taken[0] or int(number) <= self._taken[1]


class Alone(WriterLease):
    """The lease of one group that is all there is."""

    shared, has_role, name, late = False, True, "", False

    def __init__(self) -> None: ...

    def take(self) -> bool:
        return True

    def is_over(self) -> bool:
        return self.late

    def clears(self, name: str) -> bool:
        return not self.late


class Aside(Alone):
    """The lease of a group that goes while it waits, whichever has the role: what it saves is unsettled, and its last. A checkpoint of the
    same step or a later one is worth more, and stays."""

    shared, settled, late = True, False, True

    def __init__(self) -> None:
        self.name = f"-unsettled.{secrets.token_hex(4)}-0"
