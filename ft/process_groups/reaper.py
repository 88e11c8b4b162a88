"""Ends generations that were given up, off the thread that gave them up.

A group that was abandoned has threads in torch that may still write into its buffers, and dropping it waits for them. Nobody who trains
may wait for that. So each is ended in a thread of its own, and `then` is called when its buffers are free. An end that does not come
(a driver that hangs) is counted: past `most`, the process has to exit, since neither memory nor sockets come back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ft.process_groups.errors import MustExit

logger = logging.getLogger(__name__)

MOST = 4


class Reaper:
    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._changed = threading.Condition()
        self._pending: dict[int, str] = {}
        self._count = 0

    def take(self, end: Callable[[], None], what: str, then: Callable[[], None] | None = None) -> None:
        """Calls `end` in a thread, and then `then`. `what` names it in errors. Returns at once.

        The caller keeps no reference to the group: the last one is dropped in that thread.
        """
        with self._changed:
            self._count += 1
            number = self._count
            self._pending[number] = what
        threading.Thread(target=self._end, args=(number, end, then), name=f"ft-reaper-{number}", daemon=True).start()

    @property
    def pending(self) -> int:
        with self._changed:
            return len(self._pending)

    def check(self, limit_s: float = 0.0) -> None:
        """Raises MustExit when more than `most` generations have not ended, nor do within the limit."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._pending) <= self._most, limit_s):
                raise MustExit(
                    f"{len(self._pending)} generations were given up and have not ended, more than {self._most}: this process must "
                    f"exit ({'; '.join(self._pending.values())})"
                )

    def wait(self, limit_s: float) -> bool:
        """Waits until all have ended; False: some have not within the limit."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, limit_s)

    def _end(self, number: int, end: Callable[[], None], then: Callable[[], None] | None) -> None:
        try:
            end()
        except Exception:
            # It stays pending: nobody knows what it still holds.
            logger.exception("the end of a generation failed: %s", self._pending[number])
            return
        del end
        try:
            if then is not None:
                then()
        finally:
            with self._changed:
                del self._pending[number]
                self._changed.notify_all()
