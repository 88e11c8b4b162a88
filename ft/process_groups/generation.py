"""One life of a process group, from the moment it stands until it is given up, and its operations under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from ft.process_groups.errors import Abandoned, GroupError
from ft.process_groups.group_init import Engine
from ft.process_groups.operations import Operation
from ft.process_groups.reaper import Reaper


class GroupWork(Work):
    """Ends once: with the operation (when its tensors are complete in memory, on a GPU too), with its failure, or when the group is given
    up. `wait` blocks the calling thread and no stream, so whoever waits can be woken."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = type(operation).__name__
        self.started_s = time.monotonic()
        self._outputs = operation.outputs_flat()
        devices = {tensor.device for tensor in self._outputs if tensor.is_cuda}
        self._future: Future[Any] = Future(devices=sorted(devices, key=str))
        self._claim = threading.Lock()
        self._ended = ended = threading.Event()
        self._future.add_done_callback(lambda _: ended.set())  # the first of its callbacks: others may call wait
        self._error: Exception | None = None
        self._source = -1

    def end(self, error: Exception | None, source: int = -1) -> bool:
        """The first call counts: whether this was it."""
        if not self._claim.acquire(blocking=False):
            return False
        self._error, self._source = error, source
        if error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(error)
        return True

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True at the end. Raises GroupError with the cause, or TimeoutError after `timeout` (0: the group's own limit)."""
        limit_s = timeout.total_seconds()
        if not self._ended.wait(limit_s if limit_s > 0 else None):
            raise TimeoutError(f"{self.operation} has not ended after {limit_s:g} s")
        if self._error is not None:
            raise type(self._error)(*self._error.args) from self._error
        return True

    def get_future(self) -> Future[Any]:
        """A future of the output tensors, set when they are complete in memory: a read after that, on any stream, sees the result."""
        return self._future

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def source_rank(self) -> int:
        """The sender of a received message; -1 for every other operation."""
        return self._source

    _source_rank = source_rank


class Generation:
    """Starts operations on the engine and ends their works. The first failure is the generation's: what is asked afterwards fails at once
    with it. What is under way may still complete, for a complete sum counts. torch's timeouts are off; the limit is kept here."""

    def __init__(self, engine: Engine, limit_s: float) -> None:
        self._engine: Engine | None = engine
        self._limit_s = limit_s
        self._lock = threading.RLock()  # the end of a work may ask for the next operation
        self._news = threading.Condition(self._lock)
        self._works: dict[int, GroupWork] = {}  # under way, the oldest first
        self._count = 0
        self._error: Exception | None = None
        self._over = False
        self._watch = threading.Thread(target=self._keep_limit, name="ft-group-limit", daemon=True)
        self._watch.start()

    @property
    def error(self) -> Exception | None:
        with self._lock:
            return self._error

    @property
    def waits_since_s(self) -> float | None:
        """When the oldest operation under way was started; None where there is none."""
        with self._lock:
            oldest = next(iter(self._works.values()), None)
            return oldest.started_s if oldest is not None else None

    @property
    def pending(self) -> int:
        """Operations under way."""
        with self._lock:
            return len(self._works)

    def start(self, operation: Operation) -> GroupWork:
        """Never raises, and never waits for a peer: a failure is the work's."""
        work = GroupWork(operation)
        with self._lock:
            engine, error = self._engine, self._error
            if error is None and engine is not None:
                self._count += 1
                number = self._count
                self._works[number] = work
                if len(self._works) == 1:
                    self._news.notify()
        if error is not None or engine is None:
            work.end(error or Abandoned("the group was given up"))
            return work
        try:
            engine.start(operation, partial(self._ended, number, work))
        except Exception as failure:  # noqa: BLE001 (torch raises what it likes; the cause goes to the work)
            self._ended(number, work, failure)
        return work

    def fail(self, error: Exception) -> None:
        """Nobody waits any longer. The engine may still be at work on the tensors."""
        with self._lock:
            self._error = self._error or error
            works, self._works = list(self._works.values()), {}
        for work in works:
            work.end(error)

    def interrupt(self, reason: str) -> None:
        """Wakes everybody. What is under way ends, and nothing can be started; the engine stays until it is given up."""
        with self._lock:
            engine = self._engine
        self.fail(Abandoned(reason))
        if engine is not None:
            engine.wake()

    def give_up(self, reason: str, reaper: Reaper, then: Callable[[], None] | None) -> None:
        """Wakes everybody, and hands the engine to the reaper. The second time changes nothing."""
        with self._lock:
            engine, self._engine = self._engine, None
            self._over = True
            self._news.notify()
        self.fail(Abandoned(reason))
        if engine is not None:
            engine.wake()
            reaper.take(partial(_end, [engine], self._watch), f"given up: {reason}", then)

    def _ended(self, number: int, work: GroupWork, error: Exception | None, source: int = -1) -> None:
        if error is not None and not isinstance(error, GroupError):
            error = GroupError(f"{work.operation}: {error}")  # without the traceback, which would keep the group alive
        with self._lock:
            self._works.pop(number, None)
            if error is not None:
                self._error = self._error or error
        work.end(error, source)

    def _keep_limit(self) -> None:
        while True:
            with self._lock:
                if self._over:
                    return
                oldest = next(iter(self._works.values()), None)
                left_s = None if oldest is None else oldest.started_s + self._limit_s - time.monotonic()
                if left_s is None or left_s > 0:
                    self._news.wait(left_s)
                    continue
                assert oldest is not None
                late, engine = oldest.operation, self._engine
            self.fail(GroupError(f"{late} has not ended after {self._limit_s:g} s"))
            if engine is not None:
                engine.wake()  # this process may wait for the engine itself: a child that is stopped takes no more commands
            del engine


def _end(only: list[Engine], watch: threading.Thread) -> None:
    engine = only.pop()
    engine.end()
    del engine
    watch.join()
