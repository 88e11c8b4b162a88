"""Drives one machine of ft.protocol: events in, effects carried out in order, a tick when time has gone by.

One driver belongs to one asyncio loop, and only that loop's thread may feed it: no locks, and no two events at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from ft.protocol import messages as m

Carry = Callable[[Any], "asyncio.Future[None] | None"]  # a future: later effects wait until it is done
Seen = Callable[[float, m.Event, m.Out], None]
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Machine(Protocol):
    def handle(self, event: m.Event, now_s: float) -> m.Out: ...


def now_s() -> float:
    """Seconds on a clock that never runs back and, where there is such a one, goes on while the machine sleeps."""
    return time.clock_gettime(_CLOCK)


class Driver:
    """`carry` has a function for every effect that the machine has. `seen` gets every event with what came out, for logs and records;
    `with_ticks` is called with each tick.

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
        with_ticks: Callable[[], None] | None = None,
    ) -> None:
        self.machine = machine
        self._carry, self._tick_s, self._clock, self._seen, self._with_ticks = carry, tick_s, clock, seen, with_ticks
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
        metronome = PeriodicTimer(self._tick_s, self._tick)
        try:
            await asyncio.wait([self._broken])
            self._broken.result()
        finally:
            metronome.close()

    def _tick(self, late_s: float) -> None:
        if late_s > self._tick_s:  # this process was stopped: what arrived meanwhile goes first
            asyncio.get_running_loop().call_later(0.01, self._tick, 0.0)
        elif not self._broken.done():
            try:
                if self._with_ticks:
                    self._with_ticks()
                self.feed(m.Tick())
            except Exception as error:  # noqa: BLE001 (run raises it)
                self._break(error)

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


class PeriodicTimer:
    """Calls `beat` on this loop every `every_s`, with the seconds by which it comes late, until it is closed or the loop is.

    A thread, and no timer of the loop: while one is set, the loop works out at each of its turns how long it may sleep, and has the kernel
    set a timer, too. A call takes eight turns: three to nine hundredths of the CPU of a small round.
    """

    def __init__(self, every_s: float, beat: Callable[[float], None]) -> None:
        self._every_s, self._beat, self._loop = every_s, beat, asyncio.get_running_loop()
        self._due_s = now_s() + every_s
        self._over = threading.Event()
        self._rung = False  # and not heard yet: a busy loop is rung for once
        threading.Thread(target=self._run, name="metronome", daemon=True).start()

    def close(self) -> None:
        self._over.set()

    def _run(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            while not self._over.wait(self._every_s):
                if not self._rung:
                    self._rung = True
                    self._loop.call_soon_threadsafe(self._hear)

    def _hear(self) -> None:
        self._rung = False
        if not self._over.is_set():
            late_s, self._due_s = now_s() - self._due_s, now_s() + self._every_s
            self._beat(late_s)
