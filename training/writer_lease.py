"""The lease by which one of several replica groups writes what they share: metrics (metrics_writer.py) and checkpoints (checkpoint.py).

A quorum names the writer. A group that was stopped, and wakes, believes what it was told before; so a group that begins to write notes
its quorum in the run's folder first, and one that finds a newer quorum there leaves the files alone."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path

from training.appended import replace_file

LEASE_FILE = ".writer.json"  # in the run's folder: the quorum of the newest writer

Quorum = tuple[str, int]  # epoch, id: within an epoch ids only grow


def acquire(folder: Path, quorum: Quorum) -> bool:
    """Notes the quorum, unless a newer one's writer was here. The check and the note are two steps: a group that is stopped between this
    and what it does next may still do that, and so does little at a time."""
    if is_superseded(folder, quorum):
        return False
    if _newest(folder) != quorum:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / LEASE_FILE, json.dumps(quorum).encode())
    return True


def is_superseded(folder: Path, quorum: Quorum) -> bool:
    """True when a newer quorum's writer was here. Another epoch is a job that began anew: the later comer is right."""
    epoch, newest = _newest(folder)
    return epoch == quorum[0] and newest > quorum[1]


def _newest(folder: Path) -> Quorum:
    try:
        epoch, number = json.loads((folder / LEASE_FILE).read_text(encoding="utf-8"))
        return str(epoch), int(number)
    except (FileNotFoundError, ValueError, TypeError):  # not there, or damaged by the disk
        return "", 0


class WriterLease:
    """A group's right to save. `quorum`: the one that makes this group the writer, now; None: another group is."""

    shared = settled = True  # settled: what is saved belongs to the history that the other groups continue

    def __init__(self, folder: Path, quorum: Callable[[], Quorum | None]) -> None:
        self._folder, self._quorum = folder, quorum
        self._acquired, self.name = ("", 0), ""  # name: a suffix for folders that no other writer has

    @property
    def has_role(self) -> bool:
        """True when this group writes, as far as it knows."""
        return self._quorum() is not None

    def acquire(self) -> bool:
        """To be called at the beginning of a save; False: another group is the writer."""
        quorum = self._quorum()
        if quorum is None or not acquire(self._folder, quorum):
            return False
        self._acquired, self.name = quorum, f"-{quorum[0]}-{quorum[1]}"
        return True

    def is_superseded(self) -> bool:
        """True when another group became the writer since `acquire`."""
        return is_superseded(self._folder, self._acquired)

    def may_remove(self, name: str) -> bool:
        """True when leftovers with this suffix are not those of a newer writer."""
        epoch, _, number = name.removeprefix("-").rpartition("-")
        return epoch != self._acquired[0] or int(number) <= self._acquired[1]


class UncheckedLease(WriterLease):
    """The lease of a group that shares its folder with no other. Not `settled`: that of a group which leaves while it waits for others; it
    saves once, whichever group is the writer, but a checkpoint of the same step or a later one is worth more, and stays."""

    has_role = True

    def __init__(self, *, settled: bool = True) -> None:
        self.settled, self.shared = settled, not settled
        self.name = "" if settled else f"-unsettled.{secrets.token_hex(4)}-0"

    def acquire(self) -> bool:
        return True

    def is_superseded(self) -> bool:
        return not self.settled

    def may_remove(self, name: str) -> bool:
        return self.settled
