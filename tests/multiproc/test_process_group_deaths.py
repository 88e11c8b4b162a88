"""Members that are killed or stopped in the middle of a collective: the rest continues, and nothing outlives its parent."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from ft.children import LAUNCHER_SIGNALS
from ft.process_groups.errors import ProcessGroupError
from ft.process_groups.fork_server import Child, ForkServer
from ft.process_groups.store import serve

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="in-process gloo needs /proc"),
    pytest.mark.timeout(600),  # a busy machine takes its time to import torch
]

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["gloo", "baby_gloo"]
LIMIT_S = 300.0  # for an answer: who is slow because the machine is busy does not fail


class Member:
    """The parent's end of one member's process."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[dict[str, Any]]] = {}
        self.first = threading.Event()  # its first sum is there
        self.killed = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.multiproc.group_member", str(os.getpid())],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, do: str, **arguments: Any) -> Future[dict[str, Any]]:
        number = next(self._numbers)
        self._answers[number] = answer = Future()
        assert self.process.stdin is not None
        print(json.dumps({"id": number, "do": do, **arguments}), file=self.process.stdin, flush=True)
        return answer

    def kill(self) -> None:
        """Sends SIGKILL. On a busy machine the process takes a while to exit."""
        self.killed = True
        self.process.kill()

    def close(self) -> None:
        self.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            if answer["id"] == 0:
                self.first.set()
            else:
                self._answers.pop(answer.pop("id")).set_result(answer)


class Crew:
    """Members that are shared by the tests of this file; killed ones are replaced."""

    def __init__(self) -> None:
        self._members: list[Member] = []
        self._store = serve()
        self._generations = itertools.count()

    def three(self) -> list[Member]:
        alive = [member for member in self._members if not member.killed]
        for member in self._members:
            if member not in alive:
                member.close()
        self._members = alive + [Member() for _ in range(3 - len(alive))]
        for member in self._members:
            member.first.clear()
        told(self._members, "prepare")  # no import of torch in what follows
        return self._members

    def form(self, kind: str, members: list[Member]) -> list[dict[str, Any]]:
        store = f"127.0.0.1:{self._store.port}/{next(self._generations)}"
        return told(members, "form", kind=kind, store=store, size=len(members), ranked=True)

    def close(self) -> None:
        for member in self._members:
            member.close()


def told(members: list[Member], do: str, ranked: bool = False, **arguments: Any) -> list[dict[str, Any]]:
    """Returns the answers of all members, none of which raised."""
    answers = [
        member.tell(do, **arguments, **({"rank": rank} if ranked else {})) for rank, member in enumerate(members)
    ]
    results = [answer.result(LIMIT_S) for answer in answers]
    assert not [result for result in results if "raised" in result], results
    return results


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.close()


def survive(crew: Crew, kind: str, survivors: list[Member], sums: list[Future[dict[str, Any]]], reason: str) -> None:
    """Checks that, after a notice of `reason`, the sums end and the survivors form anew and continue."""
    for member in survivors:
        member.tell("abandon", reason=reason)
    for answer in sums:
        result = answer.result(LIMIT_S)
        assert result.get("done", 0) > 0 and "raised" not in result, result
        # the closed connection of the dead, or of a survivor that was told first, or the notice
        assert reason in result["error"] or "Connection" in result["error"] or "connection" in result["error"], result
        assert result["errored"] != "None"
    crew.form(kind, survivors)
    assert told(survivors, "sums", count=3, elements=1000) == [{"done": 3}] * len(survivors)
    assert all(answer["ended"] for answer in told(survivors, "reaped"))


def start_sums(members: list[Member]) -> list[Future[dict[str, Any]]]:
    """Starts endless sums of 8 MB; returns when all members have had one."""
    sums = [member.tell("sums", count=10**9, elements=2 << 20) for member in members]
    assert all(member.first.wait(LIMIT_S) for member in members)
    return sums


@pytest.mark.parametrize(("kind", "hangs"), [("gloo", False), ("baby_gloo", False), ("baby_gloo", True)])
def test_a_member_is_killed_inside_a_collective(crew: Crew, kind: str, hangs: bool):
    """No child outlives its trainer, not even one that hangs."""
    members = crew.three()
    processes = crew.form(kind, members)[1]
    handles = [os.pidfd_open(pid) for pid in processes.values() if pid]
    sums = start_sums(members)
    if hangs:
        os.kill(processes["child"], signal.SIGSTOP)
    members[1].kill()
    survive(crew, kind, [members[0], members[2]], [sums[0], sums[2]], "member b is lost")
    for handle in handles:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        assert poll.poll(LIMIT_S * 1000), "it lives"
        os.close(handle)


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_is_stopped_inside_a_collective(crew: Crew, kind: str):
    members = crew.three()
    crew.form(kind, members)
    sums = start_sums(members)
    members[0].process.send_signal(signal.SIGSTOP)
    try:
        survive(crew, kind, members[1:], sums[1:], "member a is silent")
    finally:
        members[0].process.send_signal(signal.SIGCONT)
    result = sums[0].result(LIMIT_S)  # it wakes up among closed connections
    assert "onnection" in result["error"], result
    crew.form(kind, members)
    assert told(members, "sums", count=2, elements=1000) == [{"done": 2}] * 3


def test_a_child_is_killed_and_its_trainer_goes_on(crew: Crew):
    members = crew.three()
    child = crew.form("baby_gloo", members)[0]["child"]
    sums = start_sums(members)
    os.kill(child, signal.SIGKILL)
    result = sums[0].result(LIMIT_S)
    assert "the child process is gone" in result["error"], result
    survive(crew, "baby_gloo", members, sums[1:], "member a failed")


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    made = ForkServer(answer_s=5.0)
    yield made
    made.close()


def is_forked(child: Child) -> bool:
    return "ft.process_groups.fork_server_main" in Path(f"/proc/{child.pid}/cmdline").read_text()


def test_what_a_scheduler_sends_to_every_process_ends_no_child(fork_server: ForkServer):
    """The signals are harmless from the first moment: the fork server still imports torch when they come."""
    fork_server.warm()
    for number in LAUNCHER_SIGNALS:
        os.kill(fork_server.pid, number)
    child, at = fork_server.child(), fork_server.pid
    handle = os.pidfd_open(child.pid)
    for number in LAUNCHER_SIGNALS:
        for pid in (at, child.pid):
            os.kill(pid, number)
    other = fork_server.child()
    assert fork_server.pid == at and not select.select([handle], [], [], 0)[0], "one of them has ended"
    os.close(handle)
    for each in (child, other):
        each.kill()
        each.end()


def test_a_child_that_fails_shows_why_and_what_a_fork_server_lacks_is_said(
    fork_server: ForkServer, capfd: pytest.CaptureFixture[str]
):
    child = fork_server.child()
    child.channel.send(pickle.dumps(("no_such_command", ())))
    assert child.channel.receive() is None
    child.kill()
    child.end()
    assert "has no attribute 'no_such_command'" in capfd.readouterr().err
    used = {int(path.name) for path in Path(f"/proc/{fork_server.pid}/fd").iterdir()}
    free = next(number for number in itertools.count() if number not in used)
    resource.prlimit(fork_server.pid, resource.RLIMIT_NOFILE, (free, free))
    with pytest.raises(ProcessGroupError, match="no child process: the fork server has no process or descriptor left"):
        fork_server.child()


def test_a_fork_server_that_is_stopped_is_ended_and_another_started(fork_server: ForkServer):
    """A debugger, or a machine that freezes idle processes, stops it: it does not answer, and its caller waits within a step."""
    fork_server.prepare()
    at = fork_server.pid
    os.kill(at, signal.SIGSTOP)
    child = fork_server.child()
    assert fork_server.pid != at and not Path(f"/proc/{at}").exists() and is_forked(child)
    child.kill()
    child.end()
