"""Real processes die, stop or restart, by real signals: the others get notices, and nobody else is hurt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench import notice
from ft import LighthouseServer
from ft.protocol import messages as m
from ft.rpc.clients import GroupClient, GroupServerProcess
from ft.rpc.group_server import Process, Settings
from tests.rpc.test_abuse import Running
from tests.rpc.test_group_server import together
from tests.rpc.wire import ROOT, WAIT_S

TRAINER = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from ft.rpc.clients import GroupClient
rank = GroupClient(sys.argv[1], 0)
rank.watch(lambda notice: print("heard", flush=True), lambda why: print("ended", flush=True))
sys.stdin.readline()
rank.leave(clean=True, reason="done")
rank.close()
"""


def _quorum(*ranks: GroupClient, known: int, failed: bool) -> list[Any]:
    call = m.RankCall(0, m.Member(""), known=known, failed=failed)
    return together(*(partial(rank.quorum, call, WAIT_S * 2) for rank in ranks))


@pytest.mark.timeout(240)  # each side is a process of its own, which takes its time on a busy machine
def test_a_killed_server_is_told_to_a_rank_of_another_group():
    """bench/notice.py says how soon; this that it comes, and before any beat is missed."""
    server = LighthouseServer("127.0.0.1:0", 1, quorum_tick_ms=10)
    assert len(notice.measure(server.address(), 2)) == 2
    server.shutdown()


def test_a_trainer_that_is_stopped_counts_as_silent():
    """The group's server lives and would beat, but its trainer does not run. After SIGCONT its group is under another id."""
    times = m.Timeouts(beat_s=0.1, heartbeat_timeout_s=4)
    server = LighthouseServer("127.0.0.1:0", 2, quorum_tick_ms=10, heartbeat_timeout_ms=4000)
    groups = [GroupServerProcess(Settings(f"{name}:1", 1, server.address(), times=times)) for name in "ab"]
    ranks = [GroupClient(group.address, 0) for group in groups]
    told: list[m.Notice] = []
    heard = threading.Event()

    def hear(word: m.Notice) -> None:
        told.append(word)
        heard.set()

    ranks[0].watch(hear, print, pid=0)
    first = _quorum(*ranks, known=0, failed=False)[0].quorum_id
    ranks[1].vote(m.Vote(0, "commit", first, 0, 0, "failed"), WAIT_S)  # a stream that is opened later begins with it
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, groups[1].address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert trainer.stdout and trainer.stdout.readline() == "heard\n", "so its server knows the process"
        assert not Process(trainer.pid).is_stopped()
        os.kill(trainer.pid, signal.SIGSTOP)
        assert heard.wait(WAIT_S) and told == [m.MemberLost(first, ("b:1",), "silent for 4 s")]
        assert Process(trainer.pid).is_stopped()
        os.kill(trainer.pid, signal.SIGCONT)
        assert trainer.stdout.readline() == "heard\n", "that its generation is over"
        parts = _quorum(*ranks, known=first, failed=True)
        assert parts[0].members == ("a:1", "b:1.1") and parts[0].quorum_id > first
        trainer.communicate("\n", timeout=WAIT_S)
    finally:
        trainer.kill()
        trainer.communicate()
    for rank, group in zip(ranks, groups, strict=True):
        rank.close()
        group.close()
    server.shutdown()


def test_a_lighthouse_that_is_killed_and_comes_back_stops_nobody(tmp_path: Path):
    """Three groups ask round after round; it is killed, and later stopped. No call fails, ids only grow, nobody is lost by it."""
    flags = ["--min_replicas", "3", "--quorum_tick_ms", "10", "--state_file", "state.json"]
    one = Running(tmp_path, *flags)
    port = one.address.rpartition(":")[2]
    groups = [GroupServerProcess(Settings(f"{name}:1", 1, one.address)) for name in "abc"]
    ranks = [GroupClient(group.address, 0) for group in groups]
    for rank in ranks:
        rank.watch(print, print, pid=0)
    ids, known = [], 0
    for round_ in range(6):
        if round_ in (2, 4):
            one.process.send_signal(signal.SIGKILL if round_ == 2 else signal.SIGTERM)
            one.process.wait()
            asked: list[list[Any]] = []
            waiting = threading.Thread(target=lambda: asked.append(_quorum(*ranks, known=known, failed=True)))  # noqa: B023
            waiting.start()
            one = Running(tmp_path, *flags, "--bind", f"127.0.0.1:{port}")
            waiting.join()
            parts = asked[0]
        else:
            parts = _quorum(*ranks, known=known, failed=known > 0)
        assert {part.members for part in parts} == {("a:1", "b:1", "c:1")}, "an id of the first start was lost"
        [known] = {part.quorum_id for part in parts}
        ids.append(known)
    assert ids == sorted(set(ids))
    for rank, group in zip(ranks, groups, strict=True):
        rank.leave(clean=True, reason="done")
        rank.close()
        group.close()
    one.close()
