"""How ranks of a check keep in step: through the store, never through what is being checked, and never without a deadline.

rank.py's working thread calls `meet` before everything it does with others, so all enter a collective within milliseconds
and whoever does not come is known by name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
LOOK_S = 0.5  # how often a rank that waits looks whether another has given up


class Silent(RuntimeError):
    """Ranks did not come; each with what it was last seen at."""

    def __init__(self, seen: dict[int, str]) -> None:
        super().__init__("ranks that did not come: " + ", ".join(map(str, seen)))
        self.seen = seen


class GivenUp(RuntimeError):
    """Another rank has met with a failure; it tells of it itself."""


class Control:
    """One rank's side. `step` and `deadline` (of the monotonic clock) are read by the thread that watches this one."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, *, timeout_s: float) -> None:
        self.step, self.deadline = "start", time.monotonic() + timeout_s
        self._store, self._rank, self._size, self._timeout_s = store, rank, world_size, timeout_s
        self._count = 0

    def meet(self, step: str, timeout_s: float = 0.0) -> None:
        """Returns when all ranks are at `step`. Raises Silent, GivenUp."""
        self._count += 1
        self.step = step
        wait_s = timeout_s or self._timeout_s
        self.deadline = time.monotonic() + wait_s + self._timeout_s  # to come here, and for what is done then
        self._store.set(f"at/{self._rank}", f"{self._count} {step}")
        if self._store.add(f"came/{self._count}", 1) == self._size:
            self._store.set(f"go/{self._count}", "")
        if not self._wait(f"go/{self._count}", wait_s):
            raise Silent(self._behind())
        self.deadline = time.monotonic() + self._timeout_s

    def agree(self, step: str, mine: Any, decide: Callable[[list[Any]], T]) -> T:
        """Returns rank 0's decision on what each rank says (JSON both). Raises Silent, GivenUp."""
        self._store.set(f"say/{self._count + 1}/{self._rank}", json.dumps(mine))
        self.meet(step)
        key = f"decision/{self._count}"
        if self._rank == 0:
            said = [json.loads(self._store.get(f"say/{self._count}/{rank}")) for rank in range(self._size)]
            self._store.set(key, json.dumps(decide(said)))
        elif not self._wait(key, self._timeout_s):
            raise Silent({0: step})
        decision: T = json.loads(self._store.get(key))
        return decision

    def _wait(self, key: str, timeout_s: float) -> bool:
        """Waits for `key`; False: it was not set in time. Raises GivenUp."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            # of a wait that ended, or a store that went: the deadline tells
            with suppress(dist.DistError, RuntimeError):
                self._store.wait([key], timedelta(seconds=min(LOOK_S, left)))
                return True
            if self._store.check(["given up"]):
                raise GivenUp("another rank gave up")
        return False

    def _behind(self) -> dict[int, str]:
        seen = {}
        for rank in range(self._size):
            at = self._store.get(f"at/{rank}").decode() if self._store.check([f"at/{rank}"]) else "0 nothing yet"
            count, _, step = at.partition(" ")
            if int(count) < self._count:
                seen[rank] = step
        return seen
