"""The driver of one state machine of ft.protocol: feeds events and ticks, and carries out the effects in order.

A driver belongs to one asyncio loop, and only that loop's thread may feed it: so it needs no locks, and handles one event at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ft.protocol import messages as m

EffectHandler = Callable[[Any], "asyncio.Future[None] | None"]  # if it returns a future, later effects wait for it
Observer = Callable[[float, m.Event, m.Out], None]
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Machine(Protocol):
    def handle(self, event: m.Event, now_s: float) -> m.Out: ...


def now_s() -> float:
    """Returns seconds of a clock that never goes back and, where the OS has one, runs while the host sleeps."""
    return time.clock_gettime(_CLOCK)


class Driver:
    """Driver of one machine. `handlers`: one for each class of its effects. `observer` gets each event and its output, for logs;
    `before_tick` is called before each tick. An error in the machine or a handler is raised by `run`, and by the `feed` that caused it."""

    def __init__(
        self,
        machine: Machine,
        handlers: Mapping[type[m.Effect], EffectHandler],
        *,
        tick_s: float,
        clock: Callable[[], float] = now_s,
        observer: Observer | None = None,
        before_tick: Callable[[], None] | None = None,
    ) -> None:
        self.machine = machine
        self._handlers, self._observer, self._before_tick = handlers, observer, before_tick
        self._tick_s, self._clock = tick_s, clock
        self._effects: deque[m.Effect] = deque()
        self._busy = False  # True: inside an effect's handler, or waiting for its future
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def feed(self, event: m.Event) -> None:
        """Handles an event. May be called by an effect's handler; the new effects then follow those that are waiting."""
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
        """Feeds ticks until it is cancelled. Raises the first error in the machine or in a handler."""
        over, loop = threading.Event(), asyncio.get_running_loop()
        try:
            while not self._broken.done():
                due_s = self._clock() + self._tick_s
                # A thread sleeps, since a timer of the loop costs time in each of its iterations, of which a quorum request takes eight:
                # 3 to 9 % of the time of a quorum of few groups.
                try:
                    slept = loop.run_in_executor(None, over.wait, self._tick_s)
                except RuntimeError:
                    # the interpreter ends and starts no thread any more; this one, a daemon, ends with it
                    return await self._broken
                await asyncio.wait((self._broken, slept), return_when=asyncio.FIRST_COMPLETED)
                if self._clock() - due_s > self._tick_s:  # this process was stopped: handle arrived messages first
                    await asyncio.sleep(0.01)
                if not self._broken.done():
                    if self._before_tick:
                        self._before_tick()
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
