"""Deaths while a joiner heals: a commit waits for one that lives, and not for one that is dead, nor where its own group has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from queue import Queue
from typing import Any

import grpc
import pytest
import torch

from ft.healer import Healer
from ft.healing.capture import StateRegistry
from ft.healing.http_transport import HttpTransport
from ft.healing.transport import Fenced, HealFailed
from ft.manager import Manager
from ft.protocol import messages as m
from ft.protocol.step import Phase
from ft.rpc.access import Access
from ft.seam import BadInput, GroupEnded
from tests.ft.groups import LIMIT_S, Job, Rank, Wrapped, job, lose_the_sums

OPTIONS = {"heal_copy_bytes": 1 << 20}
MAX_S = 15.0  # of a fence; heal_grace_s is 30


class Large(Manager):
    """A manager with a state of 16 MB, of which 1 MB may be copied aside."""

    def __init__(self, *what: Any, **more: Any) -> None:
        super().__init__(*what, **more)
        self.register_state("ballast", lambda: {"values": torch.zeros(4 << 20)}, lambda state: None)


class Fences:
    """The fences of a source: each one's joiner, its outcome, and its duration in seconds."""

    def __init__(self) -> None:
        self.began, self.ended = Queue[str](), list[tuple[str, Fenced, float]]()

    def wait_for(self, joiner: str) -> None:
        while self.began.get(timeout=LIMIT_S) != joiner:
            pass

    def outcomes(self, joiner: str) -> list[Fenced]:
        return [outcome for name, outcome, _ in self.ended if name == joiner]

    @property
    def longest_s(self) -> float:
        return max(seconds for _, _, seconds in self.ended)


class Source(Large):
    """Says when its commit has come to the fence, and how that went."""

    def __init__(self, *what: Any, fences: Fences, **more: Any) -> None:
        super().__init__(*what, **more)
        self.healer.transport = Timed(self.healer.transport, self, fences)


class Timed(Wrapped):
    def __init__(self, transport: Any, manager: Manager, fences: Fences) -> None:
        super().__init__(transport)
        self.manager, self.fences = manager, fences

    def fence(self) -> Fenced:
        part = self.manager.quorum
        assert part is not None
        (joiner,) = (m.name_of(part.members[rank]) for rank in part.recover_dst_replica_ranks)
        began_s = time.monotonic()
        self.fences.began.put(joiner)
        outcome = self.inner.fence()
        self.fences.ended.append((joiner, outcome, time.monotonic() - began_s))
        return outcome


class Reader(Large):
    """Takes nothing of the state that it is offered, until it is stopped."""

    def __init__(self, *what: Any, **more: Any) -> None:
        super().__init__(*what, **more)
        self.healer.transport = Stuck(self.healer.transport)


class Stuck(Wrapped):
    def __init__(self, transport: Any) -> None:
        super().__init__(transport)
        self.stopped = threading.Event()

    def fetch(self, *what: Any, **more: Any) -> dict[str, Any]:
        self.stopped.clear()  # `stop` is said until this ends
        assert self.stopped.wait(LIMIT_S)
        raise HealFailed("it is stopped", touched=False)

    def stop(self, reason: str) -> None:
        self.stopped.set()


def source(made: Job, fences: Fences, at: Callable[[Rank, int], None]) -> Rank:
    return made.group("a", steps=1 << 30, options=OPTIONS, make=partial(Source, fences=fences), at=at)[0]


def joiner(made: Job, name: str) -> Rank:
    return made.group(name, steps=1 << 30, options=OPTIONS, make=Reader)[0]


def test_a_commit_waits_for_no_dead_reader():
    """Three of them, one after the other: each costs the time until its death is known, and not heal_grace_s, 30 s."""
    joiners: dict[str, Rank] = {}
    fences = Fences()

    def comes(rank: Rank, step: int) -> None:
        if rank.members == 1 and len(joiners) < 3 and all(one.error for one in joiners.values()):
            name = f"b{len(joiners)}"
            joiners[name] = joiner(made, name)

    with job(min_replicas=1) as made:
        a = source(made, fences, comes)
        for name in ("b0", "b1", "b2"):
            fences.wait_for(name)
            joiners[name].kill()
            joiners[name].join()
        a.manager.leave()
        assert a.join().error is None
        assert all(Fenced.WITHDRAWN in fences.outcomes(name) for name in joiners)
        assert fences.longest_s < MAX_S


def test_a_commit_waits_for_no_reader_when_its_own_group_ends():
    joiners: list[Rank] = []
    fences = Fences()

    def comes(rank: Rank, step: int) -> None:
        if rank.members == 1 and not joiners:
            joiners.append(joiner(made, "b"))

    with job(min_replicas=1) as made:
        a = source(made, fences, comes)
        fences.wait_for("b")
        a.kill()
        assert isinstance(a.join().error, GroupEnded)
        assert fences.outcomes("b") == [Fenced.WITHDRAWN] and fences.longest_s < MAX_S
        joiners[0].kill()
        joiners[0].join()


class Unlike(Manager):
    """A manager whose state has another tensor than the sources': always, or for one heal after `once` is set."""

    def __init__(self, *what: Any, always: bool = True, **more: Any) -> None:
        super().__init__(*what, **more)
        self.always, self.once, self.was = always, threading.Event(), threading.Event()
        self.register_state("ballast", self.ballast, lambda state: None)

    def ballast(self) -> dict[str, torch.Tensor]:
        if self.once.is_set():
            self.once.clear()
            self.was.set()
            return {"others": torch.zeros(4 << 20)}
        return {"others" if self.always else "values": torch.zeros(4 << 20)}


def test_a_newcomer_with_another_state_ends_and_a_member_waits(caplog: pytest.LogCaptureFixture):
    """Neither the newcomer nor the member delays a commit for a state that it will never read."""
    others: list[Rank] = []
    fences = Fences()

    def comes(rank: Rank, step: int) -> None:
        if step == 2 and not others:
            others.append(made.group("b", steps=1 << 30, options=OPTIONS, make=Unlike)[0])
        if others and others[0].error and len(others) == 1:
            make = partial(Unlike, always=False)
            others.append(made.group("c", steps=1 << 30, options=OPTIONS, make=make, at=changes)[0])
        if len(others) == 2 and not others[1].thread.is_alive():  # it has healed, and left: alone it would begin anew
            rank.manager.leave()

    def changes(rank: Rank, step: int) -> None:
        """Falls behind once it has committed three steps, and for one heal has a state of another layout."""
        manager: Any = rank.manager
        if len(rank.commits) == 3 and not manager.once.is_set() and not manager.was.is_set():
            manager.once.set()
            lose_the_sums(rank)
        elif manager.was.is_set() and rank.manager.machine.phase is Phase.BOUNDARY and not rank.manager.machine.void:
            manager.leave()

    with job(min_replicas=1) as made:
        a = source(made, fences, comes)
        a.join()
        b, c = others
        assert a.error is None and c.join().error is None
        assert isinstance(b.error, BadInput) and "only the source has such a tensor" in str(b.error)
        assert "waits until it can receive the state of the others" in caplog.text
        assert fences.longest_s < MAX_S


def test_a_value_that_cannot_be_sent_ends_the_joiner_and_not_the_source(caplog: pytest.LogCaptureFixture):
    """The value appears with the first step, and is logged once, before anybody joins."""

    class Unsendable(Manager):
        def __init__(self, *what: Any, **more: Any) -> None:
            super().__init__(*what, **more)
            self.register_state("extra", lambda: {1} if self.step else 1, lambda state: None)

    logged: list[int] = []
    others: list[Rank] = []

    def comes(rank: Rank, step: int) -> None:
        if step == 2 and not others:
            logged.append(caplog.text.count("no group can heal from this one"))
            others.append(made.group("b", steps=1 << 30, make=Unsendable)[0])
        if others and others[0].error:
            rank.manager.leave()

    with job(min_replicas=1) as made:
        a = made.group("a", steps=1 << 30, make=Unsendable, at=comes)[0]
        assert a.join().error is None
        why = "the source cannot send its state: extra: a set cannot be sent"
        assert isinstance(others[0].error, BadInput) and why in str(others[0].error)
        assert logged == [1] and caplog.text.count("no group can heal from this one") == 1


class Fetches:
    """A transport's two ends of a joiner; `fails` with this."""

    address = "http://127.0.0.1:1"

    def __init__(self, fails: Exception) -> None:
        self.fails, self.done = fails, Queue[int]()

    def fetch(self, sources: Any, into: Any, *, quorum_id: int, step: int, progress: Any = None) -> dict[str, Any]:
        raise self.fails

    def notify_done(self, sources: Any, *, quorum_id: int, step: int) -> None:
        self.done.put(quorum_id)

    def stop(self, reason: str) -> None: ...
    def close(self) -> None: ...


def part(replica_id: str, replica_rank: int, **more: Any) -> m.QuorumResult:
    """A part of quorum 3, which has the groups a and b."""
    nobody = {"heal": False, "sources": (), "recover_dst_replica_ranks": (), "participants": (), "assigned": 0}
    return m.QuorumResult(3, "", replica_id, replica_rank, ("a:1", "b:1"), "", (7, 2, ""), **{**nobody, **more})


@pytest.mark.parametrize(
    ("mismatch", "gone", "grace_s"), [(True, (), 600.0), (False, ("a:1",), 600.0), (False, (), 0.0)]
)
def test_a_heal_that_failed_for_good_is_told_to_its_sources(mismatch: bool, gone: tuple[str, ...], grace_s: float):
    """The sources are told at the end of the grace period, or at once where no retry can succeed."""
    transport = Fetches(HealFailed("another layout", touched=False, layout_mismatch=mismatch, gone_sources=gone))
    ended, said = Queue[m.Event](), list[str]()
    healer = Healer(
        StateRegistry(),
        transport,  # type: ignore[arg-type]
        group_rank=0,
        access=Access(),
        grace_s=grace_s,
        on_event=ended.put,
        on_cannot_heal=said.append,
    )
    healer.heal_address_of = lambda address: address  # type: ignore[method-assign]
    sources = (m.Source(0, "http://127.0.0.1:2"),)
    with closing(healer):
        healer.fetch(part("b:1", 1, heal=True, sources=sources))
        word = ended.get(timeout=LIMIT_S)
        assert isinstance(word, m.HealEnded) and not word.ok and word.reason == "another layout"
        assert transport.done.get(timeout=LIMIT_S) == 3
        assert said == ["another layout"] * mismatch


def test_an_error_that_no_heal_should_have_ends_the_heal_all_the_same():
    """The machine waits for HealEnded, with the ranks of all groups."""
    transport, ended = Fetches(KeyError("no such chunk")), Queue[m.Event]()
    healer = Healer(
        StateRegistry(),
        transport,  # type: ignore[arg-type]
        group_rank=0,
        access=Access(),
        grace_s=0.0,
        on_event=ended.put,
    )
    healer.heal_address_of = lambda address: address  # type: ignore[method-assign]
    with closing(healer):
        healer.fetch(part("b:1", 1, heal=True, sources=(m.Source(0, "http://127.0.0.1:2"),)))
        assert ended.get(timeout=LIMIT_S) == m.HealEnded(3, ok=False, reason="'no such chunk'")


def test_a_source_whose_server_never_answers_delays_no_drop():
    """The trainer's thread drops the heal, and all groups wait for its next quorum request."""
    asked, over, ended = threading.Event(), threading.Event(), Queue[m.Event]()

    def never_answers(data: bytes, context: Any) -> bytes:
        asked.set()
        over.wait(LIMIT_S)
        return b""

    class Routes(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(never_answers)

    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads, handlers=[Routes()])
        address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        healer = Healer(
            StateRegistry(),
            HttpTransport("127.0.0.1", "b:1", Access()),
            group_rank=0,
            access=Access(),
            grace_s=600.0,
            on_event=ended.put,
        )
        healer.address_s = 600.0
        with closing(healer):
            healer.fetch(part("b:1", 1, heal=True, sources=(m.Source(0, address),)))
            assert asked.wait(LIMIT_S)
            healer.drop()
            assert not getattr(ended.get(timeout=LIMIT_S), "ok", True)
        over.set()
        server.stop(None)


@pytest.mark.parametrize(("ended", "over"), [(2, False), (3, True)])
def test_the_end_of_a_quorum_may_be_said_before_its_offer(ended: int, over: bool):
    told = list[object]()

    class Notes(Wrapped):
        def offer(self, *what: Any, **more: Any) -> None:
            told.append("offer")

        def end_offer(self, quorum_id: int, reason: str) -> None:
            told.append(quorum_id)

    transport: Any = Notes(HttpTransport("127.0.0.1", "a:1", Access()))
    with closing(
        Healer(StateRegistry(), transport, group_rank=0, access=Access(), grace_s=1.0, on_event=lambda event: None)
    ) as one:
        one.end_offer(ended, "b is lost")
        one.offer(part("a:1", 0, recover_dst_replica_ranks=(1,)))
    assert told == [ended, "offer", *[3] * over], "the transport would not have known of it"
