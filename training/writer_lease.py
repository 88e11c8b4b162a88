"""Lease of the replica group that writes the shared files: metrics (metrics_writer.py) and checkpoints (checkpoint.py).

A quorum names the writer. A process that was stopped (SIGSTOP) and continues still believes to be the writer. Therefore a group records its
quorum in the run's folder before it writes, and does not write if it finds a newer quorum there."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from pathlib import Path

from training.durable_files import replace_file

LEASE_FILE = ".writer.json"  # in the run's folder: quorum of the newest writer

FETCH = "-fetch"  # beginning of the suffix of what a group copies out of an object store

Quorum = tuple[str, int]  # epoch, id; ids grow within an epoch


def acquire(folder: Path, quorum: Quorum) -> bool:
    """Records the quorum and returns True, unless a newer quorum is recorded. Not atomic: a process stopped after this call may still
    make its next write when it continues, so each write after an `acquire` must be small or guarded again."""
    if is_superseded(folder, quorum):
        return False
    if _newest(folder) != quorum:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / LEASE_FILE, json.dumps(quorum).encode())
    return True


def is_superseded(folder: Path, quorum: Quorum) -> bool:
    """Returns True if a newer quorum of the same epoch is recorded; a different epoch means that the job was restarted since."""
    epoch, newest = _newest(folder)
    return epoch == quorum[0] and newest > quorum[1]


def _newest(folder: Path) -> Quorum:
    try:
        epoch, number = json.loads((folder / LEASE_FILE).read_text(encoding="utf-8"))
        return str(epoch), int(number)
    except (FileNotFoundError, ValueError, TypeError):  # missing or damaged
        return "", 0


class WriterLease:
    """A group's right to save. `quorum`: returns the quorum in which this group is the writer at present; None: another group is."""

    shared = True
    outside_quorum = False  # True: perhaps the saved step is not part of the job's history

    def __init__(self, folder: Path, quorum: Callable[[], Quorum | None]) -> None:
        self._folder = folder
        self._quorum = quorum
        self._acquired = ("", 0)
        self.suffix = ""  # of folder names, unique to this writer

    @property
    def has_role(self) -> bool:
        """Returns True if this group is the writer, as far as it knows."""
        return self._quorum() is not None

    def acquire(self) -> bool:
        """Records this group's quorum before a save; returns False if another group is the writer."""
        quorum = self._quorum()
        if quorum is None or not acquire(self._folder, quorum):
            return False
        self._acquired, self.suffix = quorum, f"-{quorum[0]}-{quorum[1]}"
        return True

    def is_superseded(self) -> bool:
        """Returns True if another group became the writer after `acquire`."""
        return is_superseded(self._folder, self._acquired)

    def may_remove(self, suffix: str) -> bool:
        """Returns True unless leftovers with this suffix are those of a newer writer, or of a group's copy out of an object store, which
        its next launch continues."""
        if suffix.startswith(FETCH):
            return False
        epoch, _, number = suffix.removeprefix("-").rpartition("-")
        return epoch != self._acquired[0] or int(number) <= self._acquired[1]


class SoloLease(WriterLease):
    """The lease of a run without replica groups, which shares its folder with no other group. Reads no file."""

    shared, has_role = False, True

    def __init__(self) -> None:
        self.suffix = ""

    def acquire(self) -> bool:
        return True

    def is_superseded(self) -> bool:
        return False

    def may_remove(self, suffix: str) -> bool:
        return True


class OutsideQuorumLease(WriterLease):
    """The lease of a group that leaves while it waits for others, outside of a quorum: it saves once in the shared folder, writer or not.
    The other groups may have repeated its step, so the save replaces no checkpoint of the same or a later step, and removes nothing. Reads
    no file."""

    outside_quorum = True
    has_role = True

    def __init__(self) -> None:
        self.suffix = f"-outside_quorum.{secrets.token_hex(4)}-0"

    def acquire(self) -> bool:
        return True

    def is_superseded(self) -> bool:
        return True

    def may_remove(self, suffix: str) -> bool:
        return False
