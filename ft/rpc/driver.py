"""Drives one machine of ft.protocol: events in, effects carried out in order, a tick when time has gone by.

One driver belongs to one asyncio loop, and only that loop's thread may feed it: no locks, and no two events at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ft.protocol import messages as m

EffectHandler = Callable[[Any], "asyncio.Future[None] | None"]  # a future: later effects wait until it is done
Observer = Callable[[float, m.Event, m.Out], None]
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Machine(Protocol):
    def handle(self, event: m.Event, now_s: float) -> m.Out: ...


def now_s() -> float:
    """Seconds on a clock that never runs back and, where there is such a one, goes on while the host sleeps."""
    return time.clock_gettime(_CLOCK)


class Driver:
    """`handlers` has one for every effect that the machine has. `observer` gets every event with what came out, for logs and records;
    `with_ticks` is called with each tick. A fault in the machine or an effect: `run` raises it, and whoever fed the event gets it, too."""

    def __init__(
        self,
        machine: Machine,
        handlers: Mapping[type[m.Effect], EffectHandler],
        *,
        tick_s: float,
        clock: Callable[[], float] = now_s,
        observer: Observer | None = None,
        with_ticks: Callable[[], None] | None = None,
    ) -> None:
        self.machine = machine
        self._handlers, self._observer, self._with_ticks = handlers, observer, with_ticks
        self._tick_s, self._clock = tick_s, clock
        self._effects: deque[m.Effect] = deque()
        self._busy = False  # inside an effect, or waiting for one
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def feed(self, event: m.Event) -> None:
        """May be called by an effect; the effects of `event` then come after those that are already waiting."""
        try:
            now = self._clock()
            out = self.machine.handle(event, now)
            if self._observer:
                self._observer(now, event, out)
            self._effects.extend(out.effects)
            if self._effects and not self._busy:
                self._carry_out()
        except BaseException as error:
            self._break(error)
            raise

    async def run(self) -> None:
        """Ticks until it is cancelled. Raises what went wrong in the machine or in an effect, wherever it was fed."""
        over, loop = threading.Event(), asyncio.get_running_loop()
        try:
            while not self._broken.done():
                due_s = self._clock() + self._tick_s
                # Slept in a thread: with a timer of its own the loop works out at each turn how long it may sleep, and sets a timer of the
                # kernel, too. A call takes eight turns: 3 to 9 % of a small round.
                slept = loop.run_in_executor(None, over.wait, self._tick_s)
                await asyncio.wait((self._broken, slept), return_when=asyncio.FIRST_COMPLETED)
                if self._clock() - due_s > self._tick_s:  # this process was stopped: what arrived meanwhile goes first
                    await asyncio.sleep(0.01)
                if not self._broken.done():
                    if self._with_ticks:
                        self._with_ticks()
                    self.feed(m.Tick())
            self._broken.result()
        finally:
            over.set()

    def _carry_out(self, waited_for: asyncio.Future[None] | None = None) -> None:
        if waited_for and waited_for.cancelled():
            return
        try:
            if waited_for:
                waited_for.result()
            self._busy = True
            while self._effects:
                effect = self._effects.popleft()
                if (unfinished := self._handlers[type(effect)](effect)) is not None:
                    unfinished.add_done_callback(self._carry_out)
                    return
            self._busy = False
        except BaseException as error:
            self._break(error)
            if not waited_for:
                raise

    def _break(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)
