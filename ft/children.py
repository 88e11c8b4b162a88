"""Child processes of a rank, which must not receive its signals, and the kernel on which they run. Needs only the standard library;
training/ uses it, too."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LAUNCHER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def unsignalled() -> Iterator[None]:
    """Blocks a rank's signals (LAUNCHER_SIGNALS) in processes that this thread starts in the block, and in their children.

    A terminal or a scheduler sends these to every process of a job (Slurm's proctrack/linuxproc to those in sessions of their own, too).
    The rank handles them by saving a checkpoint, for which it needs the child. They are blocked, not ignored: a blocked signal stays
    blocked across fork and exec. Such a child ends when its pipe or socket is closed, with its parent, or by SIGKILL."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with(parent: int) -> None:
    """Makes Linux kill this child when the thread that started it ends; exits if it has ended already. `parent`: its process ID (pid)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of prctl(2)
    if os.getppid() != parent:
        os._exit(0)


def boot_id(proc: Path = Path("/proc")) -> str:
    """Returns the ID of the kernel's boot, the same in all containers of a machine; "": not known."""
    with suppress(OSError):
        return (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
