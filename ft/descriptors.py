"""The limit of open files of a process: it needs some for each replica group. Standard library only; scripts/ uses it, too."""

from __future__ import annotations

import resource
from collections.abc import Callable
from contextlib import suppress

Limits = tuple[int, int]  # soft, hard
# of a trainer or a launcher: eight in each of a thousand groups for a store, with room for gloo, files and joiners
MOST = 1 << 16


def raise_limit(
    wanted: int = MOST,
    limits: Limits | None = None,
    set_limits: Callable[[int, Limits], None] = resource.setrlimit,
) -> int:
    """Raises this process's limit of descriptors to `wanted`, or as far as it may be. `limits`: the present ones. Returns the limit, which
    may be resource.RLIM_INFINITY."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):
            set_limits(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return soft
