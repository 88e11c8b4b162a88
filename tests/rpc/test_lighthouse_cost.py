"""The lighthouse's work and memory per caller: counted, not timed. bench/quorum.py measures time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sized
from typing import Any

import pytest

from ft.protocol import messages as m
from ft.protocol.lighthouse import LighthouseConfig
from ft.rpc import codec
from ft.rpc.generated import pharos_pb2
from ft.rpc.lighthouse_service import LighthouseService
from ft.rpc.serving import Pending
from tests.counting import counting


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def service(min_replicas: int) -> LighthouseService:
    return LighthouseService(LighthouseConfig(min_replicas=min_replicas))


async def ask(one: LighthouseService, calls: list[m.Call], static_quorum_id: str = "") -> list[bytes]:
    return await asyncio.gather(*(one.ask(call, Pending(9, static_quorum_id)) for call in calls))


def members(count: int) -> list[m.Member]:
    return [m.Member(f"g{i:04d}:1", f"http://h{i}:1", f"h{i}:2") for i in range(count)]


def the_one(answers: list[bytes]) -> bytes:
    assert len(set(map(id, answers))) == 1, "made more than once"
    return answers[0]


# ------------------------------------------------------------------------------------------------ answers


def test_torchfts_callers_get_one_answer_made_once():
    async def test() -> None:
        one = service(20)
        for step in range(3):
            calls = [m.Call(m.Member(f"g{i}", step=step), "torchft") for i in range(20)]
            the_one(await asyncio.gather(*(one.ask(call, Pending(9, None)) for call in calls)))

    in_a_loop(test)


def test_our_callers_get_one_answer_made_once_long_and_short():
    async def test() -> None:
        one = service(20)
        answer = the_one(await ask(one, [m.Call(member) for member in members(20)]))
        quorum = codec.quorum_from(pharos_pb2.QuorumReply.FromString(answer).quorum)
        again = [m.Call(member, known=quorum.quorum_id, number=1) for member in members(20)]
        short = the_one(await ask(one, again, codec.StaticQuorum.of(quorum).id))
        reply = pharos_pb2.QuorumReply.FromString(short)
        assert reply.WhichOneof("answer") == "dynamic" and reply.times.takeover_s == 30.0
        assert len(short) < 150 < len(answer)
        lost = the_one(await ask(one, again[:5], codec.StaticQuorum.of(quorum).id))
        assert lost is short, "an answer that got lost is given again, not made again"

    in_a_loop(test)


# ------------------------------------------------------------------------------------------------ work


@pytest.mark.parametrize("kind", ["torchft", "pharos"])
def test_an_event_costs_the_same_whether_there_are_ten_groups_or_a_thousand(kind: m.Kind):
    async def test() -> None:
        costs = []
        for count in (10, 1000):
            one = service(count)
            for member in members(count):
                one.driver.feed(m.Call(member, kind))
            quorum = one.machine.quorum
            assert quorum and len(quorum.members) == count
            a, b, *_ = (m.Call(member, kind, known=quorum.quorum_id, number=1) for member in members(count))
            events = [m.Beat(a.member.replica_id, kind), a, b, m.Beat(b.member.replica_id, kind)]
            if kind == "pharos":
                events.append(m.Report(b.member.replica_id, 0, quorum.quorum_id))
            costs.append([])
            for event in events:
                with counting() as calls:
                    one.driver.feed(event)
                costs[-1].append(calls[""])
        assert costs[0] == costs[1] and min(costs[0]) > 8

    in_a_loop(test)


# ------------------------------------------------------------------------------------------------ memory


def entries(*owners: object) -> dict[str, int]:
    """Returns the length of each non-empty collection among the attributes of `owners`."""
    return {
        name: len(value)
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, Sized) and value
    }


def test_what_it_keeps_is_bounded_however_many_come_and_go():
    """One group stays; another dies and one of a name never heard before comes, 10,000 times."""

    async def test() -> None:
        one = service(2)
        kept = {}
        stays, known = m.Member("stays:1"), 0
        for change in range(1, 10_001):
            comes = m.Member(f"peer{change}:1")
            one.driver.feed(m.StreamOpened(comes.replica_id, None))
            calls = [m.Call(stays, known=known, failed=known > 0, number=change), m.Call(comes)]
            asked = [asyncio.ensure_future(one.ask(call, Pending(9))) for call in calls]
            the_one(list(await asyncio.gather(*asked)))
            known = one.machine.quorum.quorum_id if one.machine.quorum else 0
            one.driver.feed(m.StreamClosed(comes.replica_id))
            one.driver.feed(m.Tick())
            if change in (5_000, 10_000):
                kept[change] = entries(one, one.machine, one.driver)
        assert known == 10_000 and kept[5_000] == kept[10_000]
        assert sum(kept[10_000].values()) < 5_000

    in_a_loop(test)
