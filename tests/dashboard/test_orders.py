"""Drain and kill: the permitted senders, the refusals with their reasons, and the reaction of a group's server."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from ft.dashboard.server import BURST, Orders
from ft.protocol import messages as m
from ft.rpc.access import Access
from ft.rpc.clients import GroupClient, GroupServerProcess
from ft.rpc.group_server import Process, Settings
from tests.dashboard.house import TOKEN, WAIT_S, House, Houses, Jobs
from tests.unit.fakes import replace_system_call
from tests.waiting import in_time

# Says each SIGTERM, and lives on: what it does with one is its own affair.
TRAINER = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
print("trains", flush=True)
while True: time.sleep(100)
"""


class Group:
    """A real group server of one rank, whose trainer is a process of its own."""

    def __init__(self, of: House, name: str) -> None:
        self._of, self._id = of, f"{name}:1"
        self.process = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True)
        assert self.line() == "trains"
        self.server = GroupServerProcess(
            Settings(self._id, 1, of.address, f"{name}:29500", access=Access(of.token), times=of.service.config.times)
        )
        self.client = GroupClient(self.server.address, 0, Access(of.token))

    def watch(self) -> None:
        """Opens the stream over which the group's server hears of the trainer."""
        self.client.watch(lambda notice: None, lambda why: None, pid=self.process.pid)

    def ask(self, known: int = 0, failed: bool = False) -> m.QuorumResult:
        """Asks for a quorum, and waits for the stream of orders, which opens after the first one."""
        part = self.client.quorum(m.RankCall(0, m.Member(""), known=known, failed=failed), WAIT_S)
        assert isinstance(part, m.QuorumResult)
        assert in_time(lambda: self._id in self._of.service.streams)
        return part

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.client.close()
        self.server.close()


@pytest.fixture
def group() -> Iterator[Callable[[House, str], Group]]:
    with ExitStack() as stack:
        yield lambda of, name: stack.enter_context(closing(Group(of, name)))


def test_a_group_that_is_killed_dies_and_stays_away(house: Houses, group: Callable[[House, str], Group]):
    one = house(heartbeat_s=9.0)
    a = group(one, "a")
    a.watch()
    assert a.ask().members == ("a:1",)
    with one.watch() as reader:
        reader.until(lambda r: r.row("a:1"))
        a.client.show_event("corruption", 3, "z" * 600)
        reader.until(lambda r: any(event[2:6] == [3, "bad", 3, "z" * 299 + "…"] for event in r.events.values()))
        assert one.order("kill", "a:1")[0] == 202
        assert a.process.wait(WAIT_S) == -signal.SIGKILL
        killed = "killed by an operator: on the lighthouse's dashboard, from 127.0.0.1"
        reader.until(lambda r: f"a:1 is lost: {killed}" in r.texts)
        assert "an operator (127.0.0.1): kill a:1, it ends now" in reader.texts
    assert in_time(lambda: not one.service.streams)
    assert one.service.machine.quorum and one.service.machine.quorum.quorum_id == 1, "it came back under another id"


@pytest.mark.parametrize("late", [False, True])
def test_a_drained_group_is_asked_once_and_a_later_kill_kills(
    house: Houses, group: Callable[[House, str], Group], late: bool
):
    """A drained group gets one order, and a later kill ends it. late: the group's server learns of its trainer only after the order."""
    one = house(heartbeat_s=9.0)
    a = group(one, "a")
    if not late:
        a.watch()
    a.ask()
    status, text = one.order("drain", "a:1")
    assert (status, json.loads(text)["done"]) == (202, "it leaves after its step")
    if late:
        a.watch()
    assert a.line() == "asked"
    assert one.order("kill", "a:1")[0] == 202
    assert a.process.wait(WAIT_S) == -signal.SIGKILL
    assert a.line() == "", "it was asked twice"


def test_an_operator_lets_a_group_continue_without_the_state(house: Houses, group: Callable[[House, str], Group]):
    one = house(heartbeat_s=9.0, takeover_s=None)
    a, b = group(one, "a"), group(one, "b")
    assert a.ask().members == ("a:1",)
    os.kill(a.server.pid, signal.SIGKILL)
    with one.watch() as reader, ThreadPoolExecutor() as threads:
        answer = threads.submit(b.ask)
        reader.until(lambda r: r.row("b:1"))
        assert not answer.done()
        assert one.order("takeover", "")[0] == 202
        assert answer.result(WAIT_S).members == ("b:1",)
        reader.until(lambda r: "an operator (127.0.0.1) allows a takeover" in r.texts)


def test_a_signal_to_a_process_that_is_gone_hits_nobody():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    held = Process(process.pid)
    process.communicate(b"\n")
    held.send(signal.SIGTERM)


def test_a_process_of_which_there_is_no_pidfd_gets_its_signal(monkeypatch: pytest.MonkeyPatch):
    """Linux before 5.3, and containers that forbid system calls that they do not know."""

    def refuse(pid: int) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    replace_system_call(monkeypatch, "pidfd_open", refuse)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    Process(process.pid).send(signal.SIGKILL)
    process.communicate(b"\n")
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("order", "replica_id", "headers", "status", "said"),
    [
        ("kill", "0:a", {"Content-Type": "application/json"}, 401, "this job has a token"),
        ("kill", "0:a", {"Authorization": "Bearer 0123456789abcdee"}, 401, "this job has a token"),
        ("kill", "9:z", None, 404, "no such group is alive: 9:z"),
        ("kill", "\u202e9", None, 404, "no such group is alive: \ufffd9"),
        ("stop", "0:a", None, 400, "order: legal is drain or kill or takeover"),
        ("kill", 7, None, 400, "replica_id: a string"),
        ("kill", ["0:a"], None, 400, "replica_id: a string"),
        ("kill", "x" * 20_000, None, 413, "an order has at most 16384 bytes"),
        ("kill", "0:a", {"Authorization": f"Bearer {TOKEN}", "Content-Type": "text/plain"}, 415, "application/json"),
    ],
)
def test_what_is_refused_changes_nothing(
    job: Jobs, order: str, replica_id: object, headers: dict[str, str] | None, status: int, said: str
):
    one, groups = job(["0:a"])
    assert in_time(lambda: "0:a" in one.service.streams)  # its stream and its call are read in any order
    found, text = one.order(order, replica_id, **(headers or {}))
    assert found == status and said in text
    groups.beat()
    assert not groups.obeyed and "0:a" in one.service.streams


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff", b'{"order": "kill"}', b"null", b"[" * 10_000])
def test_what_is_no_order_is_refused(house: Houses, body: bytes):
    one = house()
    status, text, _ = one.ask("POST", "/orders", body, **one.headers(**{"Content-Type": "application/json"}))
    assert (status, text) == (400, 'an order is {"order": ..., "replica_id": ...}\n')


def test_a_link_gives_no_order(house: Houses):
    one = house()
    assert one.ask("GET", "/orders?order=kill&replica_id=0:a", **one.headers())[0] == 405


def test_a_job_without_a_token_takes_no_orders(job: Jobs):
    one, _ = job(["0:a"], token="")
    status, text = one.order("kill", "0:a")
    assert status == 403 and "start the lighthouse with --token_file" in text
    assert in_time(lambda: "0:a" in one.service.streams)


def test_orders_are_limited(house: Houses):
    """The limit holds for orders that arrive at one instant."""
    one, found = house(), list[int]()
    orders = Orders(one.service, one.feed, has_token=True, clock=lambda: 0.0)

    async def content() -> bytes:
        return b'{"order": "kill", "replica_id": "9:z"}'

    request: Any = SimpleNamespace(content_type="application/json", read=content, remote="")
    for _ in range(BURST + 2):
        with pytest.raises(web.HTTPException) as refused:
            asyncio.run(orders.give(request))
        found.append(refused.value.status)
    assert found == [404] * BURST + [429] * 2


def test_one_without_a_stream_can_be_taken_out_but_not_drained(job: Jobs):
    one, _ = job(["0:a", "1:b"])
    one.loop.call_soon_threadsafe(one.service.streams.pop, "1:b")  # as after a restart, until it comes again
    assert in_time(lambda: "1:b" not in one.service.streams)
    said = "it has no stream for orders; kill removes it from the job\n"
    assert one.order("drain", "1:b") == (409, said)
    status, text = one.order("kill", "1:b")
    assert status == 202 and "removed from the job" in text
    with one.watch() as reader:
        reader.until(lambda r: "1:b is lost: an operator evicted it" in r.texts)


def test_torchfts_groups_take_no_orders(house: Houses):
    one = house()
    one.loop.call_soon_threadsafe(one.service.driver.feed, m.Beat("0:a", "torchft"))
    assert in_time(lambda: "0:a" in one.service.machine.roster.peers)
    assert one.order("kill", "0:a") == (409, "that is a torchft group, which cannot get orders from here\n")
