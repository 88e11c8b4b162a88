"""One start at a time: two that write into one run's folder would take each other's checkpoints for leftovers.

Floor 3. train.py holds the lock on global rank 0 for as long as the run goes on.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from pathlib import Path


class RunLock:
    """Held from construction to `close`, or to the death of the process, however it dies. Raises ValueError if another has it."""

    def __init__(self, run_folder: Path) -> None:
        run_folder.mkdir(parents=True, exist_ok=True)
        self._file = (run_folder / "lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            self._file.close()
            raise ValueError(
                f"job.name: {run_folder} is being trained by {owner}; wait for it, stop it, or start another run with "
                "--job.name NAME"
            ) from None
        except OSError:  # a file system without locks: better an unguarded run than none
            return
        with suppress(OSError):  # on a full disk it has no owner's name, and holds all the same
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
            self._file.flush()

    def close(self) -> None:
        """Gives the lock back. May be called twice."""
        with suppress(OSError):
            self._file.close()
