"""Drives one machine of ft.protocol: events in, effects carried out in order, a tick when time has gone by.

One driver belongs to one asyncio loop, and only that loop's thread may feed it: no locks, and no two events at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ft.protocol import messages as m

Carry = Callable[[Any], "asyncio.Future[None] | None"]  # a future: later effects wait until it is done
Seen = Callable[[float, m.Event, m.Out], None]


class Machine(Protocol):
    def handle(self, event: m.Event, now_s: float) -> m.Out: ...


def now_s() -> float:
    """Seconds on a clock that never runs back and, where there is such a one, goes on while the machine sleeps."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class Driver:
    """`carry` has a function for every effect that the machine has. `seen` gets every event with what came out, for logs and records.

    A fault inside the machine or an effect is ours: `run` raises it, and whoever fed the event gets it, too.
    """

    def __init__(
        self,
        machine: Machine,
        carry: Mapping[type[m.Effect], Carry],
        *,
        tick_s: float,
        clock: Callable[[], float] = now_s,
        seen: Seen | None = None,
    ) -> None:
        self.machine = machine
        self._carry, self._tick_s, self._clock, self._seen = carry, tick_s, clock, seen
        self._effects: deque[m.Effect] = deque()
        self._busy = False  # inside an effect, or waiting for one
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def feed(self, event: m.Event) -> None:
        """May be called by an effect; the effects of `event` then come after those that are already waiting."""
        try:
            now = self._clock()
            out = self.machine.handle(event, now)
            if self._seen:
                self._seen(now, event, out)
            if out.effects:
                self._effects.extend(out.effects)
                if not self._busy:
                    self._carry_out()
        except BaseException as error:
            self._break(error)
            raise

    async def run(self) -> None:
        """Ticks until it is cancelled. Raises what went wrong in the machine or in an effect, wherever it was fed."""
        due = self._clock() + self._tick_s
        while True:
            await asyncio.wait([self._broken], timeout=max(0.0, due - self._clock()))
            if self._broken.done():
                return self._broken.result()
            if self._clock() - due > self._tick_s:  # this process was stopped: what arrived meanwhile goes first
                await asyncio.sleep(0.01)
            self.feed(m.Tick())
            due = max(due + self._tick_s, self._clock())

    def _carry_out(self) -> None:
        self._busy = True
        while self._effects:
            effect = self._effects.popleft()
            unfinished = self._carry[type(effect)](effect)
            if unfinished is not None:
                unfinished.add_done_callback(self._go_on)
                return
        self._busy = False

    def _go_on(self, finished: asyncio.Future[None]) -> None:
        if finished.cancelled():
            return
        try:
            finished.result()
            self._carry_out()
        except BaseException as error:  # noqa: BLE001 (run raises it)
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)
