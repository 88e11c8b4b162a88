"""Compares two or more sides (implementations or settings): each in its own long-lived process, alternating, with ratios per round.

A machine's speed drifts by more than the differences of interest. Two sides that run within seconds of each other have the same conditions,
so the ratio within a round is steadier than the values themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


def parser(doc: str | None, **flags: Any) -> argparse.ArgumentParser:
    """Returns a parser. `flags`: name -> default, type if there is no default, or False for a switch; or a pair of that and help."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, what in flags.items():
        default, text = what if isinstance(what, tuple) else (what, None)
        kind = default if isinstance(default, type) else type(default)
        how: Any = {"action": "store_true"} if default is False else {"type": kind}
        if not isinstance(default, type):
            how["default"] = default
        made.add_argument(f"--{name.replace('_', '-')}", help=text, **how)
    return made


class Ratio(NamedTuple):
    """The ratio of one side to a second one: median over rounds, and range."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


def ratio(figures: Sequence[float], other: Sequence[float]) -> Ratio:
    """Returns the ratio of `figures` to `other`; elements of equal index are from the same round."""
    ratios = [a / b for a, b in zip(figures, other, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


class Failed(RuntimeError):
    """A process could not start or died, or an expected event did not occur. The message has the last output of the processes."""


class Worker:
    """The process of a side. It answers each line with a JSON request by a JSON line; a first JSON line means that it is ready."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], *, limit_s: float | None = None, cwd: Path | None = None
    ) -> None:  # fmt: skip
        """`env` is added to this process' environment. The side is killed after `limit_s` seconds; None: never."""
        self.name = name
        # not a pipe, which would fill up and block the side
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True,
            cwd=cwd, env={**os.environ, **env},
        )  # fmt: skip
        self.pid, self._limit_s, self._over = self._process.pid, limit_s, False
        self._timer = threading.Timer(limit_s or 0.0, self._end)
        self._timer.daemon = True
        if limit_s is not None:
            self._timer.start()

    def _end(self) -> None:
        self._over = True
        self._process.kill()

    def ask(self, request: Any) -> Any:
        """Sends `request` and returns the answer. Raises Failed."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed(self.end_of_stderr()) from None
        return self.answer()

    def answer(self) -> Any:
        """Returns the next line of JSON, and skips other output. Raises Failed."""
        while line := self.line():
            if line.startswith("{"):
                return json.loads(line)
        raise Failed(self.end_of_stderr())

    def line(self) -> str:
        """Returns the next line of output; "" if the process has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def close(self) -> None:
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def end_of_stderr(self, lines: int = 1) -> str:
        """Waits for the end of the process. Returns the last lines of its stderr or, if there are none, its exit code."""
        self._process.communicate()
        if self._over:
            return f"killed after {self._limit_s:.0f} s"
        self._stderr.seek(0)
        written = [line for line in self._stderr if line.strip()]
        return "".join(written[-lines:]).strip() or f"exit code {self._process.returncode}"


@contextmanager
def workers(commands: Mapping[str, Sequence[str]], **env: str) -> Iterator[list[Worker]]:
    """Starts a process per command, by name, and yields them when all are ready."""
    with ExitStack() as stack:
        made = [stack.enter_context(closing(Worker(name, command, env))) for name, command in commands.items()]
        for one in made:
            one.answer()
        yield made


def ask_all(members: Sequence[Worker], do: str, **arguments: Any) -> list[Any]:
    """Sends a request to all members at once, with the rank of each. Returns the answers."""
    with ThreadPoolExecutor(len(members)) as threads:
        requests = ({"do": do, "rank": rank, **arguments} for rank in range(len(members)))
        return list(threads.map(Worker.ask, members, requests))


def serve(member: object, ready: Any = None) -> None:
    """Serves requests on stdin: prints `ready`, then calls the method of `member` that a request names and prints its result, a dict."""
    print(json.dumps(ready or {}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(member, request.pop("do"))(**request)), flush=True)


def in_turns(sides: Mapping[str, Callable[[], T]], rounds: int, *, warm: int = 0) -> dict[str, list[T]]:
    """Calls each side once per round. Returns the results after `warm` warmup rounds. Every other round is in reverse order."""
    given: dict[str, list[T]] = {name: [] for name in sides}
    for index in range(warm + rounds):
        for name in list(sides)[:: -1 if index % 2 else 1]:
            result = sides[name]()
            given[name] += [result] if index >= warm else []
    return given


def asking(sides: Iterable[Worker], **request: Any) -> dict[str, Callable[[], Any]]:
    """Returns sides for `in_turns` that send this request."""
    return {worker.name: partial(worker.ask, request) for worker in sides}


def spread(figures: Sequence[float], form: str, scale: float = 1.0) -> str:
    """Formats the median and the range."""
    middle, low, high = (format(scale * f(figures), form) for f in (statistics.median, min, max))
    return f"{middle} ({low}-{high})"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a table; all columns but the first are right-aligned."""
    lines = [list(header), *map(list, rows)]
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    form = "  ".join([f"{{:<{first}}}", *(f"{{:>{width}}}" for width in others)])
    return "\n".join(form.format(*line) for line in lines)


def machine() -> str:
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def renew(page: Path, heading: str, what: str, text: str) -> None:
    """Replaces the section with this heading by the text and the date, or appends it to the page."""
    new = f"## {heading}\n\n{datetime.now(timezone.utc).date()}, {what}:\n\n{text}\n"
    parts = re.split(r"(?m)^(?=## )", page.read_text(encoding="utf-8") if page.exists() else "")
    there = next((index for index, part in enumerate(parts) if part.startswith(f"## {heading}\n")), len(parts))
    parts[there : there + 1] = [new]
    page.write_text("\n".join(part.strip("\n") + "\n" for part in parts if part), encoding="utf-8")


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))
