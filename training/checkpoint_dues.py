"""Saves that were due and are not there: one that failed is tried again, and who takes the role over makes up for who died in one.

Flow: checkpoint.py asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from training import checkpoint_files as files
from training.checkpoint_config import CheckpointConfig
from training.progress import Clock
from training.writer_lease import WriterLease

RETRY_S = 30.0  # from a save that failed to the next try


def in_thread(work: Callable[[], None]) -> None:
    """Nobody waits for it, not even an end."""
    threading.Thread(target=work, name="checkpoint-look", daemon=True).start()


class Dues:
    """Which saves were due and are not there. On rank 0; a look at the folder is a thread's, lest slow storage hold up a step."""

    def __init__(self, config: CheckpointConfig, folder: Path, claim: WriterLease, clock: Clock) -> None:
        self.since = 0  # the step that this start went on from: what was due before was another's
        self._config, self._folder, self._claim, self._clock = config, folder, claim, clock
        self._failed_at: float | None = None
        self._writes = False  # this group has the role
        self._there: int | None = None  # the newest save, when it took the role over

    def failed(self) -> None:
        """A save begins, and until `begun` it has failed."""
        self._failed_at = self._clock()

    def begun(self) -> None:
        self._failed_at = None
        self._there = None

    @property
    def is_failing(self) -> bool:
        """The last save failed; the same on all ranks."""
        return self._failed_at is not None

    def missed(self, step: int) -> bool:
        if self._failed_at is not None:
            return self._claim.has_role and self._clock() - self._failed_at >= RETRY_S
        if self._claim.has_role and not self._writes and self._claim.shared:
            in_thread(self._look)
        self._writes = self._claim.has_role
        if self._there is None or not self._writes:
            return False
        interval, first = self._config.interval, self._config.enable_first_step_checkpoint and step > 0
        due, there, self._there = max(step // interval * interval, int(first)), self._there, None
        return due > max(there, self.since)

    def newest(self) -> int:
        """Newest step of all that were saved, the weights alone, too; 0: none."""
        return max(files.newest(self._folder, kind=kind) or 0 for kind in ("full", "model"))

    def _look(self) -> None:
        self._there = self.newest()
