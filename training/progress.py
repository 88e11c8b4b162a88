"""Accounting of time: phases of the loop, and a bar for long work.

The loop and its parts enter phases; metrics.py reads their seconds, watchdog.py the current one, from its own thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TypeVar, cast

from training.log import Log

Clock = Callable[[], float]
T = TypeVar("T")

PHASES = {  # of a run, and their description in messages; other names may be used, as their own description
    "": "between phases",
    "start": "start",
    "data": "data loading",
    "compute": "forward and backward",
    "reduce": "gradient reduction",
    "waiting": "gradient reduction, where other groups are waited for",
    "quorum": "quorum of replica groups",
    "rebuild": "process group of replica groups",
    "heal": "state from another group",
    "optimizer": "optimizer step",
    "checkpoint": "checkpoint",
    "validation": "validation",
    "sample": "text sample",
    "trace": "trace of the profiler",
}
# Phases that count as goodput if the step is committed; if it is dropped, what was computed counts as lost.
WORK, _COMPUTED, _LOST = ("compute", "reduce", "optimizer"), ("data", "compute"), "lost"
GROUP_PHASES = ("quorum", "rebuild", "heal", "waiting", _LOST)  # what it costs to train with other groups
# Their length has nothing to do with a step's: what happens inside is counted for them, and they get the long timeout.
LONG_PHASES = frozenset({"start", "checkpoint", "validation", "sample", "trace"})


class Progress:
    """The phase of this rank, and the seconds spent in each so far. Phases nest; a second is counted once: for the innermost phase, or for
    the outermost of LONG_PHASES around it (data for validation is validation's). The thread of construction enters, any thread reads."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self.goodput_s = 0.0  # spent on steps that were committed; any thread may ask
        self._committed: dict[str, float] = {}  # `seconds` at the last commit
        self._clock = clock
        self._began = clock()
        self._mark = self._began  # up to here every second is on some phase's account
        self._thread = threading.get_ident()
        # Replaced, never changed: one attribute read gives another thread a consistent stack without a lock.
        self._stack: tuple[tuple[str, float], ...] = ()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's seconds for `name`, less those of phases inside it."""
        assert threading.get_ident() == self._thread, f"phase {name!r}: entered by a foreign thread"
        outer = self._stack
        self._account()
        self._stack = (*outer, (name, self._mark))
        try:
            yield
        finally:
            self._account()
            self._stack = outer

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """The items; the time for which each is waited for counts for `name`."""
        end = object()
        while True:
            with self.phase(name):
                item = next(items, end)
            if item is end:
                return
            yield cast(T, item)

    def open_phases(self) -> tuple[tuple[str, float], ...]:
        """Name and seconds since entry of each open phase, outermost first."""
        stack, now = self._stack, self._clock()
        return tuple((name, now - since) for name, since in stack)

    def long_phase(self) -> tuple[str, float] | None:
        """The open one of LONG_PHASES, in words, and the seconds since it was entered. Any thread may ask."""
        return next(((PHASES[name], seconds) for name, seconds in self.open_phases() if name in LONG_PHASES), None)

    def total(self) -> float:
        """Seconds since this object was made."""
        return self._clock() - self._began

    def spent(self, *names: str) -> float:
        """Seconds counted for the phases `names` together, including those of a block that is still open."""
        self._account()
        return sum(self.seconds.get(name, 0.0) for name in names)

    def commit(self) -> None:
        """A step is committed: what was computed for it counts."""
        self.goodput_s, self._committed = self.spent(*WORK), dict(self.seconds)

    def lose(self) -> None:
        """Counts the time computed since the last commit as lost."""
        self._account()
        for name in _COMPUTED:
            self.move(self.seconds.get(name, 0.0) - self._committed.get(name, 0.0), name, _LOST)

    def move(self, seconds: float, from_phase: str, to_phase: str) -> None:
        self._account()
        for name, more in ((from_phase, -seconds), (to_phase, seconds)):
            self.seconds[name] = self.seconds.get(name, 0.0) + more

    def _account(self) -> None:
        now = self._clock()
        if self._stack:
            open_names = [name for name, _ in self._stack]
            name = next((name for name in open_names if name in LONG_PHASES), open_names[-1])
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._mark
        self._mark = now


class Bar:
    """Progress of one long piece of work, in bytes: a bar on a terminal, elsewhere a line every few seconds."""

    def __init__(self, total: float, label: str, *, log: Log, clock: Clock = time.monotonic) -> None:
        self.done = 0.0
        self._total, self._label, self._log, self._clock = total, label, log, clock
        self._interval_s = 0.1 if log.is_terminal else 5.0
        self._began = self._shown = clock()

    def update(self, amount: float) -> None:
        self.done += amount
        self.show()

    def show(self, text: str = "") -> None:
        """Shows the state, or that of another process, where the interval is over."""
        now = self._clock()
        if now - self._shown >= self._interval_s:
            self._shown = now
            (self._log.overwrite if self._log.is_terminal else self._log.info)(text or self.text())

    def text(self) -> str:
        """One line: label, picture, share, rate and the time that is left at this rate."""
        seconds = self._clock() - self._began
        rate = self.done / seconds if seconds > 0 else 0.0
        share = min(1.0, self.done / self._total)
        left = f", {duration((self._total - self.done) / rate)} left" if rate > 0 and share < 1 else ""
        amount = f"{quantity(self.done)} of {quantity(self._total)} B, {quantity(rate)} B/s"
        picture = f"[{'#' * int(share * 20):.<20}]"
        return f"{self._label}: {picture} {share:4.0%}, {amount}{left}"

    def close(self) -> None:
        """Removes the bar from the terminal."""
        self._log.overwrite("")


def duration(seconds: float) -> str:
    """12 s, 3:05 (minutes), 2:03:05 (hours), 3 d 02:03 as a reader wants it."""
    whole = int(seconds + 0.5)
    if whole < 60:
        return f"{whole} s"
    minutes, second = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{second:02}"
    hours, minute = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{hours // 24} d {hours % 24:02}:{minute:02}"


def quantity(value: float) -> str:
    """950, 12.3k, 4.57M, 1.20G: three figures and a decimal prefix."""
    prefixes = ["", "k", "M", "G", "T"]
    while abs(value) >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    digits = 0 if abs(value) >= 99.5 or not prefixes[0] else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{prefixes[0]}"


def spans(noun: str, numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-6, 9`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda at: at[1] - at[0])]
    text = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{noun}{'' if len(numbers) == 1 else 's'} {text}"
