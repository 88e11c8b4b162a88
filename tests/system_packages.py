"""Software that tests bring; packages of the system only where that is wanted, for this may be somebody's own machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path


class Unavailable(Exception):
    """It cannot be had here, and why."""


def once(folder: Path, fill: Callable[[], None]) -> Path:
    """The folder, which the first call has `fill` make, whole or not at all. Raises Unavailable."""
    try:
        folder.parent.mkdir(exist_ok=True)
        with (folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                fill()
    except OSError as error:
        raise Unavailable(f"no place for it: {error}") from None
    return folder


def refusal() -> str:
    """Why nothing may be installed here, and how to have it; "": it may."""
    if os.environ.get("PHAROS_NO_INSTALL") == "1":
        return "PHAROS_NO_INSTALL=1"
    if os.environ.get("CI") == "true" or os.environ.get("PHAROS_TEST_INSTALL") == "1":
        return ""
    return "PHAROS_TEST_INSTALL=1 lets the tests bring it with apt-get, as CI=true does"
