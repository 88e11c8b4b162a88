"""Time accounting by phases of the training loop, and a progress bar.

The loop and its parts enter phases; metrics.py reads their seconds, watchdog.py reads the current phase from its own thread."""

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

PHASES = {  # name and description in messages; a phase that is not listed is described by its name
    "": "between phases",
    "start": "start",
    "data": "data loading",
    "compute": "forward and backward",
    "reduce": "gradient reduction",  # on CUDA also the wait for forward and backward
    "waiting": "gradient reduction, waiting for other groups",
    "quorum": "quorum of replica groups",
    "rebuild": "forming the process group of the replica groups",
    "heal": "receiving or sending the state",
    "optimizer": "optimizer step",
    "checkpoint": "checkpoint",
    "validation": "validation",
    "sample": "text sample",
    "trace": "trace of the profiler",
}
# WORK counts as goodput if the step is committed; otherwise the time in _COMPUTED counts as _LOST.
WORK, _COMPUTED, _LOST = ("compute", "reduce", "optimizer"), ("data", "compute"), "lost"
GROUP_PHASES = ("quorum", "rebuild", "heal", "waiting", _LOST)  # overhead of training with other groups
# Phases whose length is independent of a step's: time in nested phases counts for them, and they have the long timeout.
LONG_PHASES = frozenset({"start", "checkpoint", "validation", "sample", "trace"})


class Progress:
    """The current phase of this rank, and the seconds spent in each phase. Phases nest; time counts for the innermost phase, or for the
    outermost enclosing one of LONG_PHASES (data loading of a validation counts as validation). Only the constructing thread may
    enter one."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.seconds: dict[str, float] = {}
        self.goodput_s = 0.0  # seconds spent on committed steps; readable by any thread
        self._committed: dict[str, float] = {}  # `seconds` at the last commit
        self._clock = clock
        self._began = clock()
        self._mark = self._began  # time up to which seconds are accounted
        self._thread = threading.get_ident()
        # Replaced, never modified, so that other threads read a consistent stack without a lock.
        self._stack: tuple[tuple[str, float], ...] = ()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the block's seconds for `name`, without those of nested phases."""
        assert threading.get_ident() == self._thread, f"phase {name!r}: entered by a different thread"
        outer = self._stack
        self._account()
        self._stack = (*outer, (name, self._mark))
        try:
            yield
        finally:
            self._account()
            self._stack = outer

    def renew(self) -> None:
        """Restarts the watchdog's timeout of all open phases, while what they wait for makes progress."""
        self._account()
        self._stack = tuple((name, self._mark) for name, _ in self._stack)

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """Yields the items; the time of each wait for the next item counts for `name`."""
        end = object()
        while True:
            with self.phase(name):
                item = next(items, end)
            if item is end:
                return
            yield cast(T, item)

    def open_phases(self) -> tuple[tuple[str, float], ...]:
        """Returns name and seconds since entry of each open phase, outermost first."""
        stack, now = self._stack, self._clock()
        return tuple((name, now - since) for name, since in stack)

    def long_phase(self) -> tuple[str, float] | None:
        """Returns the description of the open phase of LONG_PHASES and the seconds since its entry; None: none is open. For any thread."""
        return next(((PHASES[name], seconds) for name, seconds in self.open_phases() if name in LONG_PHASES), None)

    def total(self) -> float:
        """Returns the seconds since construction."""
        return self._clock() - self._began

    def spent(self, *names: str) -> float:
        """Returns the seconds counted for the phases `names` together, including open ones."""
        self._account()
        return sum(self.seconds.get(name, 0.0) for name in names)

    def commit(self) -> None:
        """Counts the time in WORK so far as goodput: the step is committed."""
        self.goodput_s, self._committed = self.spent(*WORK), dict(self.seconds)

    def lose(self) -> None:
        """Counts the time of computations since the last commit as lost."""
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
    """Progress of one long task, in bytes: a bar on a terminal, otherwise a log line every few seconds."""

    def __init__(self, total: float, label: str, *, log: Log, clock: Clock = time.monotonic) -> None:
        self.done = 0.0
        self._total, self._label, self._log, self._clock = total, label, log, clock
        self._interval_s = 0.1 if log.is_terminal else 5.0
        self._began = self._shown = clock()

    def update(self, amount: float) -> None:
        self.done += amount
        self.show()

    def show(self, text: str = "") -> None:
        """Shows the progress, or `text` (of another process), once per interval."""
        now = self._clock()
        if now - self._shown >= self._interval_s:
            self._shown = now
            (self._log.overwrite if self._log.is_terminal else self._log.info)(text or self.text())

    def text(self) -> str:
        """Returns one line: label, bar, share, rate and remaining time at this rate."""
        seconds = self._clock() - self._began
        rate = self.done / seconds if seconds > 0 else 0.0
        share = min(1.0, self.done / self._total)
        left = f", {duration((self._total - self.done) / rate)} left" if rate > 0 and share < 1 else ""
        amount = f"{quantity(self.done)} of {quantity(self._total)} B, {quantity(rate)} B/s"
        bar = f"[{'#' * int(share * 20):.<20}]"
        return f"{self._label}: {bar} {share:4.0%}, {amount}{left}"

    def close(self) -> None:
        """Removes the bar from the terminal."""
        self._log.overwrite("")


def duration(seconds: float) -> str:
    """Formats seconds: 12 s, 3:05 (minutes), 2:03:05 (hours), 3 d 02:03 (days)."""
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
    """Formats a number with three digits and a decimal prefix: 950, 12.3k, 4.57M, 1.20G."""
    prefixes = ["", "k", "M", "G", "T"]
    while abs(value) >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    digits = 0 if abs(value) >= 99.5 or not prefixes[0] else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}{prefixes[0]}"


def as_ranges(noun: str, numbers: Sequence[int]) -> str:
    """Formats numbers as ranges: `rank 3`, `ranks 0-6, 9`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda at: at[1] - at[0])]
    text = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{noun}{'' if len(numbers) == 1 else 's'} {text}"
