"""Processes that benchmarks start and harm: lighthouses, replica groups, forks of a process that has imported torch; and the event logs of
replica groups (`EventLog`), which ft/recording.py and replica.py write. Everything listens on free ports of the loopback interface.
Benchmarks import it; it is no command.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any, TypeVar

from bench.pairs import Failed, Worker

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
REPLICA = Path(__file__).with_name("replica.py")
# as keep_freed_memory of parallelisms/device.py
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
POLL_S, FORKED_S = 0.01, 180.0
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0", "OMP_NUM_THREADS": "1"}
TORCHFT = """
import sys, time
import importlib.machinery, importlib.util
from pathlib import Path
folder = Path(importlib.util.find_spec("torchft").origin).parent
path = str(next(folder.glob("_torchft*.so")))  # only the server: the package imports torch
loader = importlib.machinery.ExtensionFileLoader("_torchft", path)
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("_torchft", loader))
loader.exec_module(module)
defaults = {"join_timeout_ms": 60000, "quorum_tick_ms": 100, "heartbeat_timeout_ms": 5000}  # of its command line
server = module.LighthouseServer(bind=sys.argv[1], min_replicas=int(sys.argv[2]), **defaults)
print("http://127.0.0.1:" + server.address().rpartition(":")[2], flush=True)
while True: time.sleep(1)
"""


def until(
    what: str, holds: Callable[[], T], limit_s: float, *, look: Callable[[], object] = int,
    failure: Callable[[str], Exception] = Failed, poll_s: float = POLL_S,
) -> T:  # fmt: skip
    """Polls until `holds` returns a true value, and returns it; calls `look` before each poll. Raises `failure(what)` after `limit_s`."""
    end_s = time.monotonic() + limit_s
    while True:
        look()
        if found := holds():
            return found
        if time.monotonic() > end_s:
            raise failure(f"not in {limit_s:g} s: {what}")
        time.sleep(poll_s)


def descendants(pid: int) -> list[int]:
    """Returns the pids of all descendants of a process (Linux)."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            for child in task.read_text(encoding="ascii").split():
                found += [int(child), *descendants(int(child))]
    return found


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of all threads of a process since its start (Linux: clock_getcpuclockid)."""
    return time.clock_gettime((~pid << 3) | 2)


def memory_bytes(field: str, pid: int | str = "self") -> int:
    """Returns memory of a process (Linux). `field`: VmRSS, resident now; RssAnon, of that not of a file; VmHWM, the peak."""
    return 1024 * int(re.findall(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))[0])


def reset_peak() -> int:
    """Returns the resident memory of this process, and resets its peak to that (Linux; proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return memory_bytes("VmRSS")


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def our_lighthouse(min_replicas: int, **flags: object) -> list[str]:
    """Returns the command of ft's lighthouse: on a free port, without dashboard and state file, unless `flags` set them."""
    given = {"min_replicas": min_replicas, "bind": "127.0.0.1:0", "http": "none", "state_file": "none"} | flags
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [sys.executable, str(ROOT / "ft" / "rpc" / "lighthouse_main.py"), *words]


def their_lighthouse(min_replicas: int, python: str, bind: str = "127.0.0.1:0") -> list[str]:
    """Returns the command of torchft's lighthouse, with the defaults of its command line."""
    return [python, "-c", TORCHFT, bind, str(min_replicas)]


class LighthouseProcess(Worker):
    """A lighthouse process, at `address` "host:port"; its next line is its dashboard's. Raises Failed if it does not start."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__("lighthouse", command, {}, cwd=ROOT)
        self.address = self.line().strip().removeprefix("http://")
        if not self.address:
            output = self.end_of_stderr(lines=5)
            self.close()
            raise Failed(f"the lighthouse did not start: {output}")


class Forked:
    """Runs `target(*arguments, pipe)` in a fork of a server that has imported `preload`. Methods raise Failed if it is gone or silent."""

    def __init__(self, preload: Sequence[str], target: Callable[..., object], *arguments: object) -> None:
        from ft.children import unsignalled

        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        with unsignalled():
            resource_tracker.ensure_running()  # separately: its start unblocks SIGTERM and SIGINT in the calling thread
        with unsignalled():
            forkserver.ensure_running()  # the first user's signal mask is inherited by all forks
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, *order: object) -> Any:
        self.tell(*order)
        return self.hear()

    def tell(self, *order: object) -> None:
        try:
            self.pipe.send(order)
        except OSError as error:
            raise Failed(f"process {self.process.pid} is gone ({error})") from None

    def hear(self) -> Any:
        try:
            if self.pipe.poll(FORKED_S):
                return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise Failed(f"process {self.process.pid} is gone ({error})") from None
        raise Failed(f"process {self.process.pid} does not answer for {FORKED_S:g} s")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def obey(pipe: Any, orders: Mapping[str, Callable[..., Any]]) -> None:
    """Executes orders in a forked process until the process at the other end of the pipe is gone."""
    with suppress(EOFError, OSError):
        while True:
            order, *about = pipe.recv()
            pipe.send(orders[order](*about))
    os._exit(0)


def rows(run: Path) -> list[dict[str, Any]]:
    """Returns the rows of metrics.jsonl, without an incomplete last line."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True) if metrics.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


@dataclass(frozen=True)
class EventLine:
    """A line of an event log (ft/recording.py; from `digest` on also replica.py). `weight`: value of all weights, nan if they differ."""

    event: str
    at_s: float
    pid: int = 0
    step: int = 0
    commit_id: str = ""
    quorum_id: int = 0
    participants: Sequence[str] = ()  # names of replica groups
    heals: bool = False
    digest: str = ""
    contributors: int = 0
    weight: float = math.nan
    sum_s: float = 0.0
    free: int = 0  # free bytes of the device

    @property
    def state(self) -> tuple[int, float, str]:
        return self.step, self.weight, self.digest


class EventLog:
    """The event log of one replica group over all its incarnations: the lines of each rank, oldest first."""

    def __init__(self, name: str, folder: Path, ranks: int = 1) -> None:
        self.name, self.folder = name, folder
        self.ranks: list[list[EventLine]] = [[] for _ in range(ranks)]
        self._read_to = [0] * ranks

    def read(self) -> None:
        """Reads new lines; an incomplete last line is left to the next call."""
        for rank, lines in enumerate(self.ranks):
            path = self.folder / f"event_log.{rank}.jsonl"
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(self._read_to[rank])
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read_to[rank] += len(whole)
            lines += [EventLine(**json.loads(line)) for line in whole.splitlines()]

    def since(self, at_s: float, *events: str, rank: int = 0, to_s: float = math.inf) -> list[EventLine]:
        return [line for line in self.ranks[rank] if at_s <= line.at_s <= to_s and line.event in events]

    @property
    def step(self) -> int:
        """The step of the last commit, or that of the last start if there was no commit since."""
        return next((line.step for line in reversed(self.ranks[0]) if line.event in ("commit", "start")), 0)


def gaps(commits: Sequence[EventLine], from_s: float = 0.0, to_s: float = math.inf) -> list[float]:
    """Returns the seconds between consecutive commits, for gaps that end between `from_s` and `to_s`."""
    return [b.at_s - a.at_s for a, b in pairwise(commits) if from_s <= b.at_s <= to_s]


def longest_gap(event_logs: Iterable[EventLog], from_s: float, to_s: float = math.inf) -> float:
    """Returns the longest gap between commits of any group, in seconds; nan without a gap."""
    found = [gap for event_log in event_logs for gap in gaps(event_log.since(0.0, "commit"), from_s, to_s)]
    return max(found, default=math.nan)


def failure(what: str, groups: Mapping[str, Path]) -> Failed:
    """Returns an error with the last output of each group, from its output file."""
    words = [what]
    for name, out in groups.items():
        said = out.read_text(errors="replace").strip().splitlines() if out.exists() else []
        words.append(f"group {name}: {' | '.join(said[-4:])}")
    return Failed("\n  ".join(words))


@dataclass(frozen=True)
class JobSide:
    """The implementation under test: "ours" (ft), "torchft" run by `python`, or "restart": of all, from a checkpoint per checkpoint_s."""

    name: str
    python: str = sys.executable
    checkpoint_s: float = 0.0
    program: Path = REPLICA

    def lighthouse(self, folder: Path, bind: str) -> list[str]:
        """Returns the command of its lighthouse; empty: none. min_replicas is 1, so that a killed group does not block the others."""
        if self.name == "torchft":
            return their_lighthouse(1, self.python, bind)
        return our_lighthouse(1, bind=bind, state_file=folder / "lighthouse.json") if self.name == "ours" else []


class ReplicaGroup(EventLog):
    """A replica group that runs replica.py, over all its incarnations. `command`: the group's name and folder are appended to it."""

    def __init__(self, name: str, folder: Path, command: Sequence[str], env: Mapping[str, str]) -> None:
        super().__init__(name, folder / name)
        self.folder.mkdir()
        self.out, self._command = folder / f"{name}.out", [*command, name, str(self.folder)]
        self._env = {**env, "REPLICA_GROUP_ID": name}
        self.process: subprocess.Popen[str] | None = None
        self.started_s = 0.0

    def start(self, **env: str) -> None:
        self.started_s = time.monotonic()
        with self.out.open("a") as out:
            self.process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=out, stderr=out, text=True, env={**self._env, **env},
                start_new_session=True,
            )  # fmt: skip

    @property
    def runs(self) -> bool:
        """True when the process runs and has committed since its start."""
        return bool(self.process and self.process.poll() is None and self.since(self.started_s, "commit"))

    @property
    def ended(self) -> bool:
        if not self.process or self.process.poll() is None:
            return False
        self.read()
        return True

    def kill(self) -> float:
        """Kills the trainer's process group; other children have to notice. Returns the time (time.monotonic())."""
        assert self.process
        at_s = time.monotonic()
        with suppress(ProcessLookupError):  # it has exited already
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.read()
        return at_s

    def signal(self, number: signal.Signals, whole: bool) -> float:
        """Sends a signal to the trainer, with `whole` also to its descendants. Returns the time (time.monotonic())."""
        assert self.process
        at_s = time.monotonic()
        signal_all([self.process.pid, *(descendants(self.process.pid) if whole else ())], number)
        return at_s

    def tell(self, **order: object) -> None:
        """Sends an order. end=STEP: exit after that step. kill="child" or "group": die in the next all-reduce."""
        assert self.process and self.process.stdin
        print(json.dumps(order), file=self.process.stdin, flush=True)


class RecoveryJob(AbstractContextManager["RecoveryJob"]):
    """A lighthouse, and replica groups, which are not started yet. Leaving the context ends all processes."""

    def __init__(
        self, side: JobSide, groups: int, *, megabytes: float = 4, step_ms: float = 50, kind: str = "gloo", device: str = "cpu"
    ) -> None:  # fmt: skip
        self._folder = tempfile.TemporaryDirectory(prefix="recovery-")
        self.folder, self._side = Path(self._folder.name), side
        env = {**os.environ, **LOOPBACK, **KEEP_MEMORY, "NUM_REPLICA_GROUPS": str(groups)}
        env |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._lighthouse: LighthouseProcess | None = None
        self._bind = "127.0.0.1:0"
        self.start_lighthouse()
        env["TORCHFT_LIGHTHOUSE"] = f"http://{self._bind}"
        command = [side.python, str(side.program), side.name, str(megabytes), str(step_ms), kind, device]
        self.groups = [ReplicaGroup(str(number), self.folder, command, env) for number in range(groups)]

    def start_lighthouse(self) -> None:
        """Starts the lighthouse, or restarts it at the same address with its state file."""
        if command := self._side.lighthouse(self.folder, self._bind):
            self._lighthouse = LighthouseProcess(command)
            self._bind = self._lighthouse.address

    def kill_lighthouse(self) -> None:
        if self._lighthouse:
            self._lighthouse.close()

    def start(self) -> None:
        for group in self.groups:
            group.start()

    def until(
        self, what: str, holds: Callable[[], T], limit_s: float = 120.0, lives: Iterable[ReplicaGroup] | None = None
    ) -> T:
        """Waits, reading the event logs. Raises Failed after `limit_s`, or if one of `lives` (default: all groups) ends."""
        watched = list(self.groups if lives is None else lives)

        def look() -> None:
            for group in self.groups:
                group.read()
            if any(group.ended for group in watched) and not holds():
                raise self.failure(f"a group ended before {what}")

        return until(what, holds, limit_s, look=look, failure=self.failure)

    def wait(self, seconds: float) -> None:
        """Waits, reading the event logs."""
        end_s = time.monotonic() + seconds
        self.until("", lambda: time.monotonic() >= end_s, seconds + 1, lives=())

    def failure(self, what: str) -> Failed:
        outs = {}
        for group in self.groups:
            code = group.process.poll() if group.process else None
            state = "runs" if code is None else f"ended with code {code}"
            outs[f"{group.name} {state} at step {group.step}"] = group.out
        return failure(what, outs)

    def steps(
        self, count: int, contributors: int, groups: Sequence[ReplicaGroup] | None = None, limit_s: float = 120.0
    ) -> None:
        """Waits until each of `groups` (default: all) has committed `count` more steps with `contributors` groups each."""
        since_s, watched = time.monotonic(), self.groups if groups is None else groups

        def done() -> bool:
            seen = ([line.contributors for line in group.since(since_s, "commit")] for group in watched)
            return all(of.count(contributors) >= count for of in seen)

        self.until(f"{count} steps of {contributors} groups", done, limit_s, lives=watched)

    def finish(self, groups: Sequence[ReplicaGroup] | None = None) -> list[EventLine]:
        """Lets `groups` (default: all) train to the same step and exit. Returns the last line of each."""
        finishing = self.groups if groups is None else groups
        last = max(group.step for group in finishing) + 20
        for group in finishing:
            group.tell(end=last)
        self.until(f"the end at step {last}", lambda: all(group.ended for group in finishing), lives=())
        lines = [group.ranks[0][-1] for group in finishing]
        if any(line.event != "end" for line in lines):
            raise self.failure("a group ended without its last line")
        return lines

    def __exit__(self, *_: object) -> None:
        for process in [group.process for group in self.groups if group.process]:
            children = descendants(process.pid) if process.poll() is None else []
            process.kill()
            process.communicate()
            signal_all(children, signal.SIGKILL)  # children that are stopped, or outlive their trainer
        self.kill_lighthouse()
        self._folder.cleanup()
