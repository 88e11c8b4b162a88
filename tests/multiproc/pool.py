"""Ranks for tests: forks of a server that has imported torch (preload.py), which run one function after another.

    def halves(rank_scale: float) -> list[float]:                 # module level, in the test file
        ...                                                       # dist is initialised: gloo, this rank's own number

    def test_halves(pool):                                        # the fixture of conftest.py
        first, second = pool.run(2, halves, 0.5)                  # what each rank returned, by rank

A run has a process group of its own, on a FileStore of its own, so nothing is left over from the run before and no port
is guessed. A rank that raises fails the test with its own traceback; ranks that then hang are killed and replaced: the
next test finds a pool that works.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.job import Forked
from ft.children import die_with

_ROOT = Path(__file__).resolve().parents[2]
_SHOWN = 20_000  # last characters of a worker's output: the stacks of its threads, in Python and in C++
_GRACE_S = 5.0  # how long other ranks may go on after one has failed: gloo tells them of a closed connection at once


class WorkerError(AssertionError):
    """A rank raised, died or did not come back; the message holds every failed rank's own traceback or last output."""


class Pool:
    """Up to `most` ranks. Workers start when first asked for and live until `close`."""

    def __init__(self, most: int = 4) -> None:
        self._most = most
        self._workers: list[_Worker] = []
        self._folder = tempfile.TemporaryDirectory(prefix="pharos-pool-")
        self._runs = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Calls `function(*args)` on `world_size` ranks in a fresh process group; returns their results, by rank.

        `function` must be at module level of a file; arguments and results are pickled. Raises WorkerError.
        """
        assert 1 <= world_size <= self._most, f"a pool of {self._most} cannot run {world_size} ranks"
        self._start(world_size)
        self._runs += 1
        store = str(Path(self._folder.name) / f"store-{self._runs}")
        file, name = function.__code__.co_filename, function.__name__
        ranks = self._workers[:world_size]
        try:
            for rank, worker in enumerate(ranks):
                worker.send(_Task(file, name, args, rank, world_size, store, timeout_s))
            answers = _collect(ranks, timeout_s)
        except BaseException:  # such as pytest-timeout's: a late answer must not be taken for one of the next run
            for rank, worker in enumerate(ranks):
                worker.abort()
                print(f"rank {rank} of {world_size}: {worker.last_output()}")
                worker.stop()
                self._workers.remove(worker)
            raise
        for worker, answer in zip(ranks, answers, strict=True):
            # died, still in there, or out of step: of no use to the next test
            if not isinstance(answer, _Answer) or not answer.fit:
                worker.stop()
                self._workers.remove(worker)
        problems = [(rank, problem) for rank, answer in enumerate(answers) if (problem := _problem(answer))]
        if problems:
            raise WorkerError("\n".join(f"rank {rank} of {world_size}: {problem}" for rank, problem in problems))
        return [answer.value for answer in answers if isinstance(answer, _Answer)]

    def close(self) -> None:
        """Ends every worker. May be called twice."""
        while self._workers:
            self._workers.pop().stop()
        self._folder.cleanup()

    def _start(self, count: int) -> None:
        while len(self._workers) < count:
            self._workers.append(_Worker(Path(self._folder.name)))


@dataclass(frozen=True)
class _Task:
    file: str
    name: str
    args: tuple[Any, ...]
    rank: int
    world_size: int
    store: str
    timeout_s: float


@dataclass(frozen=True)
class _Answer:
    value: Any = None
    error: str = ""
    fit: bool = True  # for the next run: not after a group that could not be made or ended, for torch names the next one by their count


class _Worker(Forked):
    """The parent's end of one worker process."""

    def __init__(self, folder: Path) -> None:
        self._log = tempfile.NamedTemporaryFile(dir=folder, suffix=".log", delete=False)  # noqa: SIM115 (closed in stop)
        super().__init__(["tests.multiproc.preload"], serve, self._log.name)

    def send(self, task: _Task) -> None:
        with contextlib.suppress(BrokenPipeError):  # dead already: _collect says so, with its last output
            self.pipe.send_bytes(pickle.dumps(task))

    def receive(self) -> _Answer | str:
        """Returns the answer, or a message about a worker that died."""
        try:
            answer: _Answer = pickle.loads(self.pipe.recv_bytes())
            return answer
        except (EOFError, ConnectionResetError):
            self.process.join()
            return f"died (exit code {self.process.exitcode}); {self.last_output()}"

    def last_output(self) -> str:
        return f"its last output:\n{Path(self._log.name).read_text(errors='replace')[-_SHOWN:]}"

    def abort(self) -> None:
        """Ends the worker, which writes the stacks of its threads."""
        with contextlib.suppress(ProcessLookupError):  # dead already
            os.kill(self.process.pid, signal.SIGABRT)
        self.process.join(_GRACE_S)

    def stop(self) -> None:
        self.kill()
        self._log.close()


def _collect(workers: list[_Worker], timeout_s: float) -> list[_Answer | str]:
    """One answer per worker; a str for those that died or did not come back. A failure shortens the others' time."""
    answers: dict[int, _Answer | str] = {}
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout_s
    while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = waiting.pop(connection)
            answers[rank] = workers[rank].receive()
            if _problem(answers[rank]):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    for rank in waiting.values():
        workers[rank].abort()
        answers[rank] = f"still running when the time was over; killed; {workers[rank].last_output()}"
    return [answers[rank] for rank in range(len(workers))]


def _problem(answer: _Answer | str) -> str:
    return answer if isinstance(answer, str) else answer.error


# The worker's side.


def serve(log: str, connection: Connection) -> None:
    """Runs tasks until the parent closes the pipe."""
    die_with(os.getppid())  # a worker that waits in a collective must not outlive a killed pytest
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch

    torch._C._set_print_stack_traces_on_fatal_signal(True)  # in C++; after those of faulthandler
    faulthandler.enable(2)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(variable, None)
    from tests.multiproc import preload  # noqa: F401  # also where another user has started the server

    while True:
        try:
            task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        connection.send_bytes(_run(task))


def _run(task: _Task) -> bytes:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore  # dist.FileStore, which mypy does not take for exported

    fit = False
    try:
        # The group's own timeout is the shorter: a rank left alone in a collective then says which one.
        timeout = timedelta(seconds=task.timeout_s * 0.8)
        store = FileStore(task.store, task.world_size)
        dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.world_size, timeout=timeout)
        try:
            dist.barrier()  # a rank that is through, and ends its group, breaks the connections of one that still makes its own
            return pickle.dumps(_Answer(_function(task.file, task.name)(*task.args)))
        finally:
            dist.destroy_process_group()
            fit = True
            _forget_meshes()
    except BaseException:  # noqa: BLE001 (whatever it is, it is the test's to see; the worker goes on)
        return pickle.dumps(_Answer(error=traceback.format_exc(), fit=fit))


def _forget_meshes() -> None:
    """DTensor keeps what it knows of operations by mesh: an equal mesh of the next run would be given groups of this one, and as long as
    a mesh is known its groups live, with three threads and four descriptors each."""
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    from tests.multiproc import preload

    _clear_sharding_prop_cache()
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()  # torch 2.13
    for cache in (*preload.FROZEN_CACHES, *preload.caches()):
        cache.cache_clear()
    gc.collect()


def _function(file: str, name: str) -> Callable[..., Any]:
    """The function, from its file: under the file's own name if that is in the repository, so that what it returns can be pickled."""
    path = Path(file)
    if path.is_relative_to(_ROOT):
        module = importlib.import_module(".".join(path.relative_to(_ROOT).with_suffix("").parts))
    else:
        module = _load(path, "pool_" + str(path).replace(os.sep, "_").removesuffix(".py"))
    function: Callable[..., Any] = getattr(module, name)
    return function


def _load(path: Path, module_name: str) -> ModuleType:
    if module_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[module_name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    return sys.modules[module_name]
