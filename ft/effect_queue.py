"""A machine that several threads tell what they have seen, and the one thread that does what it wants.

Notices come from a stream's thread, a heal's end from the fetch's, everything else from the trainer's own. Each is fed to the machine at
once, under a lock. What comes of it waits here until the trainer's thread takes it, in order: so no rule and no state of a step is ever
touched by two threads, and the loop of the trainer stays a loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from ft.protocol import messages as m
from ft.rpc.driver import Machine, Seen

TICK_S = 0.5


class EffectQueue:
    """`at_once` gets what may not wait (InterruptCollectives: the one who would take it may be the one who waits), in the thread that fed
    the event. `seen` gets every event with what came of it, in order: a record that can be replayed."""

    def __init__(
        self, machine: Machine, at_once: Callable[[m.InterruptCollectives], None], seen: Seen | None = None
    ) -> None:
        self._machine, self._at_once, self._seen = machine, at_once, seen
        self._news = threading.Condition()
        self._effects: deque[m.Effect] = deque()
        self._error: BaseException | None = None

    def feed(self, event: m.Event) -> None:
        """From any thread."""
        with self._news:
            now = time.monotonic()
            out = self._machine.handle(event, now)
            if self._seen:
                self._seen(now, event, out)
            self._effects.extend(effect for effect in out.effects if not isinstance(effect, m.InterruptCollectives))
            self._news.notify_all()
        for effect in out.effects:
            if isinstance(effect, m.InterruptCollectives):
                self._at_once(effect)

    def hear(self, event: m.Event) -> None:
        """`feed` for threads that have nobody to raise to: the trainer's thread gets what goes wrong."""
        try:
            self.feed(event)
        except BaseException as error:  # noqa: BLE001 (raised by `take`)
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Whoever takes next gets this."""
        with self._news:
            self._error = self._error or error
            self._news.notify_all()

    def next(self) -> m.Effect | None:
        """The effect that `take` would return now without waiting; None: it would wait."""
        with self._news:
            return self._effects[0] if self._effects else None

    def take(self) -> m.Effect:
        """The next thing to do. Waits for it, and tells the machine that time goes by. Raises what `fail` was given."""
        with self._news:
            if self._effects and self._error is None:
                return self._effects.popleft()
        effect = self.take_unless(lambda: False)
        assert effect is not None
        return effect

    def take_unless(self, enough: Callable[[], bool]) -> m.Effect | None:
        """`take`, or None where there is nothing to do and, after some event, `enough` holds."""
        while True:
            with self._news:
                self._news.wait_for(lambda: bool(self._effects or self._error) or enough(), TICK_S)
                if self._error is not None:
                    raise self._error
                if self._effects:
                    return self._effects.popleft()
                if enough():
                    return None
            self.feed(m.Tick())
