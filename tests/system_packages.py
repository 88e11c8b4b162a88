"""Installs software for tests; system packages only with the user's permission."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path


class Unavailable(Exception):
    """Software is not available; the message has the reason."""


def once(folder: Path, fill: Callable[[], None]) -> Path:
    """Returns `folder`; the first call creates it with `fill`, atomically. Raises Unavailable."""
    try:
        folder.parent.mkdir(exist_ok=True)
        with (folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                fill()
    except OSError as error:
        raise Unavailable(f"cannot be written: {error}") from None
    return folder


def refusal() -> str:
    """Returns the reason why nothing may be installed, and the remedy; "" if it may."""
    if os.environ.get("PHAROS_NO_INSTALL") == "1":
        return "PHAROS_NO_INSTALL=1"
    if os.environ.get("CI") == "true" or os.environ.get("PHAROS_TEST_INSTALL") == "1":
        return ""
    return "PHAROS_TEST_INSTALL=1 or CI=true lets the tests install it with apt-get"
