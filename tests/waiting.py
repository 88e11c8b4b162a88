"""Waits for a condition that a different thread or process makes true."""

from __future__ import annotations

import time
from collections.abc import Callable


def in_time(true: Callable[[], object], limit_s: float = 30.0) -> bool:
    """Returns True once `true` holds, False after `limit_s`, which allows for a busy machine and is below pytest's timeout."""
    until_s = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > until_s:
            return False
        time.sleep(0.01)
    return True
