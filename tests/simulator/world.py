"""Discrete-event simulation: a virtual clock, processes that die or stop, and random numbers from one seed.

The base of tests/simulator; independent of what is simulated.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
Do = Callable[..., None]


class Dice:
    """Random numbers for one purpose. Uses only `Random.random`, which gives the same bits on every Python since 3.2."""

    def __init__(self, seed: int, concern: str) -> None:
        self.random = Random(f"{seed}/{concern}").random

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random()

    def index(self, length: int) -> int:
        return int(self.random() * length)

    def pick(self, items: Sequence[T]) -> T:
        return items[int(self.random() * len(items))]


@dataclass(slots=True, eq=False)
class Process:
    """Something that can be killed (for good) or stopped (SIGSTOP: what arrives meanwhile waits for it)."""

    name: str
    host: str
    site: str  # its group: streams within a site do not break, and cuts run between sites
    alive: bool = True
    dark: bool = False  # its host lost power: no kernel is left to close a socket
    stopped: bool = False
    clock_s: float = 0.0  # what its host's clock shows beyond the world's: two hosts began at different times
    backlog: deque[tuple[Do, tuple[Any, ...]]] = field(default_factory=deque)
    at_death: list[Do] = field(default_factory=list)

    def now_s(self, world: World) -> float:
        """Returns the time on the process's clock, in seconds."""
        return world.now_s + self.clock_s


class World:
    """The event queue. `at` and `after` schedule calls; `run` executes them in order of time, ties in order of scheduling."""

    def __init__(self, seed: int, *, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.now_s = 0.0
        self.events = 0
        self.stopped: set[Process] = set()
        self.seen: Counter[str] = Counter()  # how often each fault, reason and transition occurred
        self.trace = trace
        self._heap: list[tuple[float, int, Process | None, Do, tuple[Any, ...]]] = []
        self._order = count()

    def dice(self, concern: str) -> Dice:
        """Returns random numbers of a concern's own stream, so that leaving a fault out changes the rest as little as may be."""
        return Dice(self.seed, concern)

    def after(self, delay_s: float, process: Process | None, do: Do, *args: Any) -> None:
        """Calls `do` unless `process` is dead by then; if it is stopped, after it is resumed. None: an act of the world."""
        heappush(self._heap, (self.now_s + delay_s, next(self._order), process, do, args))

    def run(self, until: Callable[[], bool]) -> None:
        """Runs events until `until` returns True."""
        heap = self._heap
        while heap and not until():
            self.now_s, _, process, do, args = heappop(heap)
            if process is not None:
                if not process.alive:
                    continue
                if process.stopped:
                    process.backlog.append((do, args))
                    continue
            do(*args)
            self.events += 1

    def kill(self, process: Process) -> None:
        if not process.alive:
            return
        self.stopped.discard(process)
        process.alive = process.stopped = False
        process.backlog.clear()
        for do in process.at_death:
            do()
        process.at_death.clear()

    def stop(self, process: Process) -> None:
        process.stopped = process.alive
        if process.alive:
            self.stopped.add(process)

    def resume(self, process: Process) -> None:
        """Resumes a process: what arrived meanwhile happens now, in its order."""
        self.stopped.discard(process)
        process.stopped = False
        for do, args in process.backlog:
            self.after(0.0, process, do, *args)
        process.backlog.clear()

    def note(self, who: str, text: str) -> None:
        """One line of the trace. Call it behind `if world.trace`, so that a run without one builds no strings."""
        if self.trace is not None:
            self.trace(f"{self.now_s:9.3f}  {who:<14} {text}")
