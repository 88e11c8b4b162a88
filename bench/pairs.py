"""Measuring two or more sides fairly: each in its own long-lived process, in turns, compared round by round.

A machine's speed drifts by more than the differences of interest. Two sides that run within seconds of each other see the
same machine, so the ratio inside a round is steady where the figures themselves are not.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """The median over rounds of one side's figure by another's, and its range."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f})"


def ratio(figures: Sequence[float], other: Sequence[float]) -> Ratio:
    """figures[i] / other[i] were measured in the same round i."""
    ratios = [a / b for a, b in zip(figures, other, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios))


class Failed(RuntimeError):
    """A side could not start or died, or an expected event did not come. The message says which, with the last words of the processes."""


class Worker:
    """A side's process. It reads one JSON request a line and answers with one JSON line; its first line says it is ready."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], *, limit_s: float | None = None
    ) -> None:
        """`env` is added to this process' environment. After `limit_s` seconds the side is killed; None: never."""
        self.name = name
        # not a pipe: one that nobody reads fills up and blocks the side
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **env},
        )
        self._limit_s, self._over = limit_s, False
        self._timer = threading.Timer(limit_s or 0.0, self._end)
        self._timer.daemon = True
        if limit_s is not None:
            self._timer.start()

    def _end(self) -> None:
        self._over = True
        self._process.kill()

    def ask(self, request: Any) -> Any:
        """Sends `request`, waits for its answer. Raises Failed."""
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise Failed(self._last_words()) from None
        return self.answer()

    def answer(self) -> Any:
        """The next line that is JSON (libraries print other things). Raises Failed."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise Failed(self._last_words())

    def close(self) -> None:
        """Ends the process and waits for it."""
        self._timer.cancel()
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _last_words(self) -> str:
        self._process.communicate()
        if self._over:
            return f"killed after {self._limit_s:.0f} s"
        self._stderr.seek(0)
        said = [line for line in self._stderr if line.strip()]
        return said[-1].strip() if said else f"exit code {self._process.returncode}"


@contextmanager
def members(program: str, count: int) -> Iterator[list[Worker]]:
    """Processes of one side that need each other: `program --worker`, which calls `serve`. Each is named by its rank."""
    command = [sys.executable, program, "--worker"]
    made = [Worker(str(rank), command, {"OMP_NUM_THREADS": "1"}) for rank in range(count)]
    try:
        for member in made:
            member.answer()
        yield made
    finally:
        for member in made:
            member.close()


def ask_all(members: Sequence[Worker], do: str, **arguments: Any) -> list[Any]:
    """All at once; each is told its rank, too."""
    with ThreadPoolExecutor(len(members)) as threads:
        requests = ({"do": do, "rank": rank, **arguments} for rank in range(len(members)))
        return list(threads.map(Worker.ask, members, requests))


def serve(member: object) -> None:
    """In a member's process: calls the method that each request names, whose answer is a dict."""
    print("{}", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(getattr(member, request.pop("do"))(**request)), flush=True)


def in_turns(workers: Sequence[Worker], request: Any, *, rounds: int) -> dict[str, list[Any]]:
    """Each worker's answers to `request`, by name, one a round. Every other round runs backwards: nobody is always first."""
    answers: dict[str, list[Any]] = {worker.name: [] for worker in workers}
    for index in range(rounds):
        for worker in workers if index % 2 == 0 else reversed(workers):
            answers[worker.name].append(worker.ask(request))
    return answers


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns padded to their widest cell; all but the first are flush right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
