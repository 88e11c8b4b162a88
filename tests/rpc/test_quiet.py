"""A normal end leaves no stack on stderr: it is where people look for faults."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ft import LighthouseServer
from ft.protocol import messages as m
from tests.rpc.test_abuse import Running
from tests.rpc.wire import ROOT, WAIT_S, Stream, Wire, torchft_call

LINE = re.compile(r"([\d\- :,]{23} )?(lighthouse|group server): .+")  # of ours; a stack has others


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_lighthouse_that_is_stopped_amid_calls(tmp_path: Path, number: signal.Signals):
    one = Running(tmp_path, "--min_replicas", "9", "--state_file", "state.json")
    wires = [Wire(one.address) for _ in range(8)]
    streams = [Stream(wire, f"{i}:1") for i, wire in enumerate(wires)]
    for stream in streams:
        stream.beat()
    calls = [wire.pharos(m.Call(m.Member(f"{i}:1"))) for i, wire in enumerate(wires)]
    strange = wires[0].begin("/torchft.LighthouseService/Quorum", torchft_call("z"))
    idle = [socket.create_connection(("127.0.0.1", int(x.rpartition(":")[2]))) for x in (one.address, one.page)]
    while len(json.loads(one.get()[1])["waiting"]) < len(calls):
        pass
    assert "FAILED_PRECONDITION" in str(strange.exception(WAIT_S))
    late = [wire.pharos(m.Call(m.Member(f"{i}:1"))) for i, wire in enumerate(wires)]
    one.process.send_signal(number)
    assert one.process.wait(WAIT_S) == 0
    said = {(call.exception(WAIT_S).code().name, call.exception().details()) for call in calls}  # type: ignore[union-attr]
    assert said == {("UNAVAILABLE", "this server stops")}, "they ask again; nobody is lost by a restart"
    assert all(call.exception(WAIT_S) for call in late), "they may not even have come in"
    for line in one.errors.read_text().splitlines():
        assert LINE.fullmatch(line), line
    for thing in (*idle, *wires):
        thing.close()


RANKS = f"""
import os, queue, sys, threading
sys.path.insert(0, {str(ROOT)!r})
from ft.protocol import messages as m
from ft.rpc.access import Access
from ft.rpc.clients import GroupClient
from ft.rpc.clients import GroupServerProcess
from ft.rpc.generated import torchft_pb2
from ft.rpc.group_server import Settings
from ft.rpc.lighthouse_link import channel
how, lighthouse = sys.argv[1:]
group = GroupServerProcess(Settings("g:1", 2, lighthouse))
ranks = [GroupClient(group.address, rank) for rank in range(2)]
ended = queue.Queue()
for rank in ranks:
    rank.watch(lambda notice: None, ended.put, pid=0)
asks = [lambda rank=rank: rank.quorum(m.RankCall(rank.group_rank, m.Member("")), 20) for rank in ranks]
threads = [threading.Thread(target=ask) for ask in asks]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("in", flush=True)
sys.stdin.readline()
if how == "leave":
    ranks[0].leave(clean=True, reason="done")
if how == "kill":
    kill = channel(group.address, Access(), aio=False).unary_unary("/torchft.ManagerService/Kill")
    kill(torchft_pb2.KillRequest(msg="drill").SerializeToString(), timeout=20)
    assert ended.get(timeout=20) == "killed by request: drill"
if how == "exit":
    os._exit(0)
for rank in ranks: rank.close()
group.close()
print("out", flush=True)
"""


@pytest.mark.parametrize("how", ["leave", "kill", "close", "exit", "lighthouse"])
def test_a_group_that_ends(tmp_path: Path, how: str):
    """A group ends by leaving, by request, by the end of its ranks one by one or all at once, or after the end of the lighthouse."""
    lighthouse = LighthouseServer("127.0.0.1:0", 1, quorum_tick_ms=10)
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        trainer = subprocess.Popen(
            [sys.executable, "-c", RANKS, how, lighthouse.address()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "GRPC_VERBOSITY": "ERROR"},
        )
    assert trainer.stdout and trainer.stdout.readline() == "in\n"
    if how == "lighthouse":
        lighthouse.shutdown()
    out, _ = trainer.communicate("\n", timeout=WAIT_S * 2)  # and until its server, which has the same pipes, is gone
    assert trainer.returncode == 0 and out == ("" if how == "exit" else "out\n")
    for line in errors.read_text().splitlines():
        assert LINE.fullmatch(line), errors.read_text()
    lighthouse.shutdown()
