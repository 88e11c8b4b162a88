"""A deterministic scheduler: threads of several simulated processes run one at a time on a virtual clock; and a disk whose operations may
fail, be slow, or kill the process.

A thread runs until it waits: in `sleep`, in a condition, in an operation of a slow disk. The thread with the earliest wake-up time runs
next; ties are broken at random, by the seed. `Disk.install` and writers.py replace what the code under test uses of `threading`, `time`,
`os` and `io`, so that it runs unchanged.
"""

from __future__ import annotations

import errno
import heapq
import io
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_close = os.close
REAL_S = 60.0  # a thread that runs for longer waits for something outside of the simulation


class Death(BaseException):
    """Death of a process: unwinds its thread; operations during unwinding have no effect."""


class Hang(AssertionError):
    """A run in which no thread can continue, or which takes too long."""


class Process:
    """A simulated process. `operations`: number of its disk operations; `dies_at`: the operation at which it dies instead."""

    def __init__(self, name: str) -> None:
        self.name, self.dead = name, False
        self.operations, self.dies_at = 0, -1
        self.opened: set[int] = set()


class Task:
    """A thread of a process; None: of the simulation itself."""

    def __init__(self, name: str, process: Process | None) -> None:
        self.name, self.process = name, process
        self.baton = threading.Semaphore(0)
        self.turn = 0  # counts its waits, so that what was to wake it from an earlier one does not
        self.done = False


class Baton:
    """The scheduler: threads, and the virtual clock in seconds."""

    def __init__(self, seed: int, limit_s: float) -> None:
        self.now_s, self.limit_s = 0.0, limit_s
        self.random = random.Random(seed)
        self.current: Task | None = None
        self.failure: BaseException | None = None
        self._queue: list[tuple[float, float, int, Task, int]] = []
        self._numbers = itertools.count()
        self._tasks: list[Task] = []
        self._over = threading.Semaphore(0)
        self.died: Callable[[Process], None] = lambda process: None

    def spawn(self, name: str, work: Callable[[], object], process: Process | None = None, after_s: float = 0) -> Task:
        task = Task(name, process)
        self._tasks.append(task)

        def run() -> None:
            task.baton.acquire()
            try:
                self._goes_on(task)
                work()
            except Death:
                pass
            except BaseException as error:  # noqa: BLE001 (handed to whoever plays the world)
                self.failure = self.failure or error
            task.done = True
            self._pass_on(None)

        threading.Thread(target=run, name=name, daemon=True).start()
        self._ready(task, self.now_s + after_s)
        return task

    def run(self) -> None:
        """Runs until all threads have ended. Raises the exception of a thread."""
        self._pass_on(None)
        if not self._over.acquire(timeout=REAL_S):
            raise Hang(f"{self.current and self.current.name} waits for something that is not of this world")
        if self.failure is not None:
            raise self.failure

    def time(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert self.current is not None
        self.current.turn += 1
        self._ready(self.current, self.now_s + seconds)
        self._pass_on(self.current)

    def wait(self, condition: Condition, timeout_s: float | None) -> None:
        task = self.current
        assert task is not None
        task.turn += 1
        condition.waiters.append((task, task.turn))
        if timeout_s is not None:
            self._ready(task, self.now_s + timeout_s)
        self._pass_on(task)

    def wake(self, task: Task, turn: int) -> None:
        if task.turn == turn:
            self._ready(task, self.now_s)

    def kill(self, process: Process) -> None:
        """Kills a process: its threads unwind when they would run next; raises Death if the caller is one of them."""
        if process.dead:
            return
        process.dead = True
        self.died(process)
        for task in self._tasks:
            if task.process is process and not task.done and task is not self.current:
                self._ready(task, self.now_s)
        for fd in process.opened:  # as the kernel does, locks and all
            _close(fd)
        process.opened.clear()

    def _ready(self, task: Task, at_s: float) -> None:
        heapq.heappush(self._queue, (at_s, self.random.random(), next(self._numbers), task, task.turn))

    def _pass_on(self, giver: Task | None) -> None:
        """Switches from `giver`, which waits, to the next thread. None: the thread ends."""
        task = self._next()
        self.current = task
        if task is None:
            self._over.release()
        elif task is not giver:
            task.baton.release()
        if giver is not None:
            if task is not giver:
                giver.baton.acquire()
            giver.turn += 1
            self._goes_on(giver)

    def _next(self) -> Task | None:
        while self._queue:
            at_s, _, _, task, turn = heapq.heappop(self._queue)
            if task.done or turn != task.turn:
                continue
            self.now_s = max(self.now_s, at_s)
            if self.now_s > self.limit_s and self.failure is None:
                self.failure = Hang(f"not over after {self.limit_s:g} s; {task.name} is next")
            return task
        waiting = [task for task in self._tasks if not task.done]
        if waiting and self.failure is None:
            self.failure = Hang(f"all wait: {', '.join(task.name for task in waiting)}")
        if not waiting:
            return None
        waiting[0].turn += 1
        return waiting[0]

    def _goes_on(self, task: Task) -> None:
        if self.failure is not None or (task.process is not None and task.process.dead):
            raise Death


class Condition:
    """Replaces threading.Condition; no other thread runs between two waits."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self.waiters: list[tuple[Task, int]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end_s = None if timeout is None else self._baton.now_s + timeout
        while not predicate():
            if end_s is not None and self._baton.now_s >= end_s:
                return False
            self._baton.wait(self, None if end_s is None else end_s - self._baton.now_s)
        return True

    def notify_all(self) -> None:
        waiters, self.waiters = self.waiters, []
        for task, turn in waiters:
            self._baton.wake(task, turn)


class Threading:
    """Replaces the module `threading`, and concurrent.futures.ThreadPoolExecutor."""

    def __init__(self, baton: Baton) -> None:
        self._baton = baton
        self.Lock = threading.Lock  # nobody waits in one: a thread that waits holds none

    def Condition(self) -> Condition:  # noqa: N802 (threading's)
        return Condition(self._baton)

    def Thread(self, *, target: Callable[[], object], name: str, daemon: bool) -> Any:  # noqa: N802 (threading's)
        return _Thread(self._baton, target, name)

    def ThreadPoolExecutor(self, max_workers: int, thread_name_prefix: str) -> Any:  # noqa: N802 (concurrent.futures')
        return _Executor(self._baton, thread_name_prefix)


class _Thread:
    def __init__(self, baton: Baton, target: Callable[[], object], name: str) -> None:
        assert baton.current is not None
        self._baton, self._target, self._process = baton, target, baton.current.process
        self._name = f"{self._process.name if self._process else ''} {name}"
        self._ended, self._is_over = Condition(baton), False

    def start(self) -> None:
        self._baton.spawn(self._name, self._run, self._process)

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait_for(lambda: self._is_over, timeout)

    def _run(self) -> None:
        self._target()
        self._is_over = True
        self._ended.notify_all()


class _Executor:
    """Runs each submitted call in a thread; callers submit one at a time."""

    def __init__(self, baton: Baton, name: str) -> None:
        self._baton, self._name = baton, name

    def submit(self, work: Callable[..., Any], *args: Any) -> Any:
        future = _Future(self._baton)

        def run() -> None:
            try:
                future.set_result(work(*args))
            except Exception as error:  # noqa: BLE001 (as the executor does)
                future.set_exception(error)
            future.ended.notify_all()

        _Thread(self._baton, run, self._name).start()
        return future

    def shutdown(self) -> None:
        pass


class _Future(Future[Any]):
    def __init__(self, baton: Baton) -> None:
        super().__init__()
        self.ended = Condition(baton)

    def result(self, timeout: float | None = None) -> Any:
        self.ended.wait_for(self.done)
        return super().result(0)


@dataclass
class Outage:
    """A storage failure from `since_s` to `until_s`, for processes that it `meets`. error 0: each operation takes `slow_s`; else writes
    fail, after `room` of them."""

    since_s: float
    until_s: float
    meets: Callable[[Process], bool]
    error: int = 0
    slow_s: float = 0.0
    room: int = 0


class Disk:
    """Real files under `folder`, with simulated failures of operations on them."""

    def __init__(self, baton: Baton, folder: Path) -> None:
        self._baton, self._folder = baton, str(folder)
        self.outages: list[Outage] = []
        self.seen: Counter[str] = Counter()
        self.looks: Callable[[Process, str], None] = lambda process, what: None  # before each operation

    def operation(self, name: str, path: object, *, writes: bool, process: Process | None = None) -> bool:
        """Simulates a disk operation. Returns False if the process is dead, so that it has no effect. Raises Death, OSError."""
        task = self._baton.current
        process = process or (task.process if task else None)
        if process is None:
            return True
        if process.dead:
            if task is None or task.process is not process:
                return False
            raise Death
        what = f"{name} {_kind(str(path))}"
        self.looks(process, what)
        process.operations += 1
        if process.operations == process.dies_at:
            self.seen[f"dies in {what}"] += 1
            self._baton.kill(process)
            raise Death
        now_s = self._baton.now_s
        for outage in self.outages:
            if outage.since_s <= now_s < outage.until_s and outage.meets(process):
                if outage.slow_s:
                    self.seen["slow"] += 1
                    self._baton.sleep(outage.slow_s)
                elif writes and outage.room > 0:
                    outage.room -= 1
                elif writes:
                    self.seen[errno.errorcode[outage.error]] += 1
                    raise OSError(outage.error, os.strerror(outage.error), str(path))
        return True

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replaces functions of `os` and `io` for the code under test."""
        for name, writes in _OPERATIONS.items():
            patch.setattr(os, name, self._watched(name, getattr(os, name), writes=writes))
        os_open, io_open = os.open, io.open

        def opens(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            process = self._of(path, dir_fd)
            if process is None:
                return os_open(path, flags, mode, dir_fd=dir_fd)
            writes = bool(flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT))
            self.operation("open", path, writes=writes)
            fd = os_open(path, flags, mode, dir_fd=dir_fd)
            process.opened.add(fd)
            return fd

        def closes(fd: int) -> None:
            process = self._baton.current.process if self._baton.current else None
            if process is not None and process.dead and fd not in process.opened:
                return  # the kernel has, and the number may be another's
            if process is not None:
                process.opened.discard(fd)
            _close(fd)

        def opens_file(path: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
            process = self._of(path, None)
            if process is None:
                return io_open(path, mode, *rest, **named)
            writes = "w" in mode or "a" in mode
            self.operation("open", path, writes=writes)
            if not writes:
                return io_open(path, mode, *rest, **named)
            raw = io.BufferedWriter(_Raw(self, process, path, mode.replace("b", "").replace("t", "")))
            return raw if "b" in mode else io.TextIOWrapper(raw, encoding="utf-8")

        patch.setattr(os, "open", opens)
        patch.setattr(os, "close", closes)
        patch.setattr(io, "open", opens_file)

    def _of(self, path: Any, dir_fd: int | None) -> Process | None:
        task = self._baton.current
        if task is None or task.process is None:
            return None
        if dir_fd is None and not (isinstance(path, int) or str(path).startswith(self._folder)):
            return None
        return task.process

    def _is_last(self) -> bool:
        process = self._baton.current.process if self._baton.current else None
        return process is not None and not process.dead and process.operations + 1 == process.dies_at

    def _watched(self, name: str, real: Callable[..., Any], *, writes: bool) -> Callable[..., Any]:
        is_sync = name == "fsync"

        def watched(path: Any = ".", *args: Any, **named: Any) -> Any:
            if self._of(path, named.get("dir_fd")) is not None:
                if name == "write" and self._is_last():
                    real(path, bytes(args[0])[: len(args[0]) // 2])
                self.operation(name, args[0] if name in ("rename", "replace") else path, writes=writes)
                if is_sync:
                    return None  # no machine fails here
            return real(path, *args, **named)

        return watched


class _Raw(io.FileIO):
    """The raw file below a buffer. Writes of a dead process are dropped."""

    def __init__(self, disk: Disk, process: Process, path: Any, mode: str) -> None:
        super().__init__(path, mode)
        self._disk, self._process = disk, process

    def write(self, data: Any) -> int:
        if self._process.dead or not self._disk.operation("write", self.name, writes=True, process=self._process):
            return len(data)
        return super().write(data)


_OPERATIONS = {
    "write": True,
    "ftruncate": True,
    "fsync": True,
    "rename": True,
    "replace": True,
    "mkdir": True,
    "rmdir": True,
    "unlink": True,
    "listdir": False,
    "scandir": False,
}


def _kind(path: str) -> str:
    """Returns the kind of a file, its name without numbers."""
    if path.isdigit():
        return "a file"
    parts = path.split("/")
    folder = next(
        (part.split("-")[0] + "".join(part.partition(".")[1:])[:8] for part in parts if part.startswith("step-")), ""
    )
    return f"{folder}/{parts[-1]}" if folder and not parts[-1].startswith("step-") else folder or parts[-1]
