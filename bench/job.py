"""A job of replica groups on this machine, for recovery.py: its lighthouse and groups as processes, their faults, and what their logs say.

A group is replica.py in a process of its own, with what that starts in turn. Everything listens on loopback, on ports of its own choice.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from bench.pairs import Failed

ROOT = Path(__file__).resolve().parents[1]
REPLICA = Path(__file__).with_name("replica.py")
POLL_S = 0.01
THEIRS = """
import sys, time
from torchft._torchft import LighthouseServer
defaults = {"join_timeout_ms": 60000, "quorum_tick_ms": 100, "heartbeat_timeout_ms": 5000}  # of its command line
server = LighthouseServer(bind=f"127.0.0.1:{sys.argv[1]}", min_replicas=1, **defaults)
print(f"http://127.0.0.1:{server.address().rpartition(':')[2]}", flush=True)
while True: time.sleep(1)
"""


class LogLine(NamedTuple):
    """One line of a group's log (replica.py). `words`: what follows the event."""

    at_s: float
    event: str
    words: tuple[str, ...]

    @property
    def step(self) -> int:
        return int(self.words[0])

    @property
    def participants(self) -> int:
        return int(self.words[1])


@dataclass(frozen=True)
class JobSide:
    """The implementation under test: "ours", "torchft"'s run by `python`, or "restart": all ranks start again from a checkpoint when one
    dies."""

    name: str
    python: str

    def lighthouse(self, port: int) -> list[str]:
        """Default times, one group is enough: a killed one must not hold the others. Empty: this side has none."""
        if self.name == "restart":
            return []
        if self.name == "torchft":
            return [self.python, "-c", THEIRS, str(port)]
        flags = [
            "--min_replicas",
            "1",
            "--bind",
            f"127.0.0.1:{port}",
            "--http",
            "none",
            "--state_file",
            "lighthouse.json",
        ]
        return [self.python, "-m", "ft.rpc.lighthouse_main", *flags]

    def replica(self, group: int, log: Path, megabytes: float, step_ms: float, kind: str) -> list[str]:
        words = [str(group), str(log), str(megabytes), str(step_ms)]
        return [self.python, str(REPLICA), *words, self.name, *(["baby"] if kind == "baby" else [])]


class ReplicaGroup:
    """One replica group over all its lives: the process that lives now, and the log that they share."""

    def __init__(
        self, number: int, folder: Path, command: Callable[[int, Path], list[str]], env: dict[str, str]
    ) -> None:
        self.number = number
        self.lines: list[LogLine] = []
        self._log = folder / f"{number}.log"
        self._log.touch()
        self._out = folder / f"{number}.out"
        self._read_to = 0
        self._command = command(number, self._log)
        self._env = {**env, "REPLICA_GROUP_ID": str(number)}
        self.process: subprocess.Popen[str] | None = None
        self.started_s = 0.0

    def start(self, **env: str) -> None:
        self.started_s = time.monotonic()
        with self._out.open("a") as out:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                text=True,
                env={**self._env, **env},
                start_new_session=True,
            )

    @property
    def runs(self) -> bool:
        """It lives, and has committed in its present life."""
        lives = self.process is not None and self.process.poll() is None
        return lives and bool(self.since(self.started_s, "commit"))

    def kill(self) -> float:
        """SIGKILL of the trainer: its children have to notice. Returns when, on the logs' clock."""
        assert self.process
        at_s = time.monotonic()
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.read()
        return at_s

    def signal(self, number: signal.Signals, whole: bool) -> float:
        """To the trainer alone, or to it and all that it has started."""
        assert self.process
        at_s = time.monotonic()
        for pid in [self.process.pid, *(descendants(self.process.pid) if whole else ())]:
            os.kill(pid, number)
        return at_s

    def end_after(self, step: int) -> None:
        assert self.process and self.process.stdin
        self.process.stdin.write(f"{step}\n")
        self.process.stdin.flush()

    def read(self) -> None:
        """Reads what the log has by now; a line that is not whole yet comes with the next call."""
        with self._log.open("rb") as log:
            log.seek(self._read_to)
            text = log.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read_to += len(whole)
        for line in whole.decode().splitlines():
            at_s, event, *words = line.split()
            self.lines.append(LogLine(float(at_s), event, tuple(words)))

    def since(self, at_s: float, *events: str) -> list[LogLine]:
        return [line for line in self.lines if line.at_s >= at_s and line.event in events]

    @property
    def step(self) -> int:
        """The last that it has committed in its present life, 0 before the first."""
        for line in reversed(self.lines):
            if line.event in ("commit", "start"):
                return line.step
        return 0

    def last_words(self) -> str:
        code = self.process.poll() if self.process else None
        state = "runs" if code is None else f"ended with code {code}"
        said = self._out.read_text(errors="replace").strip().splitlines()
        return f"group {self.number} {state} at step {self.step}: {' | '.join(said[-4:])}"


class RecoveryJob:
    """A lighthouse and its groups, none of them started. Leaving the context ends all processes."""

    def __init__(
        self, side: JobSide, groups: int, *, megabytes: float = 4, step_ms: float = 50, kind: str = "gloo"
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="recovery-")
        self.folder = Path(self._folder.name)
        self._side = side
        self._env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "NUM_REPLICA_GROUPS": str(groups),
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._env["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        self._env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        self._lighthouse: subprocess.Popen[str] | None = None
        if side.lighthouse(0):
            address = self._start_lighthouse(0)
            self._port = int(address.rpartition(":")[2])
            self._env["TORCHFT_LIGHTHOUSE"] = address

        def command(group: int, log: Path) -> list[str]:
            return side.replica(group, log, megabytes, step_ms, kind)

        self.groups = [ReplicaGroup(number, self.folder, command, self._env) for number in range(groups)]

    def _start_lighthouse(self, port: int) -> str:
        with (self.folder / "lighthouse.out").open("a") as out:
            self._lighthouse = subprocess.Popen(
                self._side.lighthouse(port),
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                cwd=self.folder,
                env=self._env,
            )
        assert self._lighthouse and self._lighthouse.stdout
        address = self._lighthouse.stdout.readline().strip()
        if not address:
            raise Failed(f"the lighthouse did not start: {(self.folder / 'lighthouse.out').read_text()[-500:]}")
        return address

    def kill_lighthouse(self) -> float:
        at_s = time.monotonic()
        if self._lighthouse:
            self._lighthouse.kill()
            self._lighthouse.communicate()
        return at_s

    def restart_lighthouse(self) -> None:
        """At the same address, with the state file that it left, if it leaves one."""
        self._start_lighthouse(self._port)

    def start(self) -> None:
        for group in self.groups:
            group.start()

    def until(
        self, done: Callable[[], bool], what: str, limit_s: float = 120.0, lives: Iterable[ReplicaGroup] | None = None
    ) -> None:
        """Waits, reading the logs. Raises Failed when it takes too long, or when one of `lives` (all, unless said) ends."""
        watched = list(self.groups if lives is None else lives)
        end_s = time.monotonic() + limit_s
        while True:
            for group in self.groups:
                group.read()
            if done():
                return
            if any(group.process and group.process.poll() is not None for group in watched):
                raise self.failure(f"a group ended before {what}")
            if time.monotonic() > end_s:
                raise self.failure(f"not in {limit_s:g} s: {what}")
            time.sleep(POLL_S)

    def wait(self, seconds: float) -> None:
        """Reads the logs meanwhile."""
        end_s = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end_s, "", seconds + 1, lives=())

    def failure(self, what: str) -> Failed:
        return Failed("\n  ".join([what, *(group.last_words() for group in self.groups)]))

    def steps(self, count: int, participants: int, groups: Sequence[ReplicaGroup] | None = None) -> None:
        """Until each of them (all) has committed so many more steps, of so many participants each."""
        since_s = time.monotonic()
        watched = self.groups if groups is None else groups

        def done() -> bool:
            return all(
                sum(line.participants == participants for line in group.since(since_s, "commit")) >= count
                for group in watched
            )

        self.until(done, f"{count} steps of {participants} groups", lives=watched)

    def finish(self) -> list[LogLine]:
        """All train to one and the same step and end. Their last lines: step, first weight, digest of all."""
        last = max(group.step for group in self.groups) + 20
        for group in self.groups:
            group.end_after(last)
        self.until(lambda: all(ended(group) for group in self.groups), f"the end at step {last}", lives=())
        lines = [group.lines[-1] for group in self.groups]
        if any(line.event != "end" for line in lines):
            raise self.failure("a group ended without its last line")
        return lines

    def __enter__(self) -> RecoveryJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in [group.process for group in self.groups if group.process]:
            children = descendants(process.pid) if process.poll() is None else []
            process.kill()
            process.communicate()
            for pid in children:  # that were stopped, or outlive their trainer
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.kill_lighthouse()
        self._folder.cleanup()


def ended(group: ReplicaGroup) -> bool:
    assert group.process
    if group.process.poll() is None:
        return False
    group.read()
    return True


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on (Linux)."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            for child in task.read_text(encoding="ascii").split():
                found += [int(child), *descendants(int(child))]
    return found
