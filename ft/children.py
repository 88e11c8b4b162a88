"""Processes that a rank starts for itself, and the signals that are not for them. Standard library alone; training/ takes it, too."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

LAUNCHER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def unsignalled() -> Iterator[None]:
    """Processes that this thread starts inside, and their children, never receive a rank's signals: SIGTERM, SIGINT, SIGUSR1.

    A terminal and a scheduler send these to every process of a job (Slurm's proctrack/linuxproc to those in sessions of their own, too).
    The rank answers, by saving; a child that died of it meanwhile would be the end of what is to be saved. Blocked and not ignored: a
    blocked signal stays blocked across fork and exec, so there is no moment at which the child is not safe. Such a child is ended by
    whatever it waits at (a pipe, a socket), by the death of its parent, or by SIGKILL."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LAUNCHER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def die_with(parent: int) -> None:
    """Ties a child to its parent, as its first call: Linux kills it as soon as the thread that started it is gone. Exits
    if that has happened before. parent: its process number."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of prctl(2)
    if os.getppid() != parent:
        os._exit(0)
