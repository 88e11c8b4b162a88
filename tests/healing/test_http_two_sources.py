"""Healing over HTTP from two sources: they share the work once they are known to hold the same bits, and one of them may go."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ft.healing import http_server, http_transport
from ft.healing.transport import Fenced, HealConfig, StateSource
from tests.healing.http_world import MIB, World, commit, heal
from tests.healing.proxy import Spoil, cut, hold
from tests.healing.states import equal, large


def test_two_sources_share_the_work(world: World, monkeypatch: pytest.MonkeyPatch):
    group, joiner = large(1, chunks=40), large(2, chunks=40)
    shared, send, sent = world.event(), http_server._Connection._send_chunk, Counter[int]()

    def sends(self: Any, offer: Any, chunk: int, bounce: Any) -> Any:
        """The first to begin, whichever it is, waits at its tenth chunk for one of the other's."""
        sent[id(offer)] += 1
        if len(sent) == 2:
            shared.set()
        assert sent[id(offer)] < 10 or shared.wait(30)
        return send(self, offer, chunk, bounce)

    monkeypatch.setattr(http_server._Connection, "_send_chunk", sends)
    proxies = [world.proxy(world.source(group, name), lambda _, data: data) for name in ("a", "b")]
    heal(world.transport("j"), joiner, *proxies)
    assert equal(joiner.loaded, group.values)
    total = group.snapshot().manifest.total_bytes
    assert all(MIB <= proxy.passed < total for proxy in proxies), [proxy.passed for proxy in proxies]


@pytest.mark.parametrize("dies_after", [0, 300, 5 * MIB, 8 * MIB + 2000, 13 * MIB])
def test_one_of_two_sources_dies(world: World, dies_after: int):
    group, joiner = large(1, chunks=32), large(2, chunks=32)
    dies = world.proxy(world.source(group, "a"), cut(dies_after))
    heal(world.transport("j"), joiner, dies, world.source(group, "b"))
    assert equal(joiner.loaded, group.values)


def test_a_source_that_is_far_too_slow_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """It is not silent for longer than it may be; but the other one has long done its own part, and does the rest."""
    group, joiner, config = large(1, chunks=32), large(2, chunks=32), HealConfig(heal_grace_s=3600.0)
    gate, send, sent = world.event(), http_server._Connection._send_chunk, Counter[int]()

    def sends(self: Any, offer: Any, chunk: int, bounce: Any) -> Any:
        """The first to begin, whichever it is, stalls at its fifth chunk."""
        sent[id(offer)] += 1
        assert next(iter(sent)) != id(offer) or sent[id(offer)] < 5 or gate.wait(60)
        return send(self, offer, chunk, bounce)

    monkeypatch.setattr(http_server._Connection, "_send_chunk", sends)
    heal(world.transport("j", config=config), joiner, world.source(group, "a"), world.source(group, "b"))
    assert equal(joiner.loaded, group.values)
    until_s = time.monotonic() + 30
    while not caplog.text and time.monotonic() < until_s:
        time.sleep(0.01)  # its own thread says so, which the heal does not wait for
    assert "it sends far more slowly than the other" in caplog.text


def test_who_is_too_slow():
    """Against what the waiting one took for a chunk; where that one was not let yet, against silence."""
    config = HealConfig(heal_grace_s=30.0)
    fetch: Any = SimpleNamespace(config=config)
    one, other = (http_transport._FromSource(fetch, StateSource(name, "")) for name in "ab")
    now_s = time.monotonic()
    assert not other.is_too_slow_for(one, now_s - 100), "it receives nothing"
    other._stripe, other._moved_s = range(64), now_s
    assert not other.is_too_slow_for(one, now_s - 100), "a chunk has just come"
    other._moved_s = now_s - 11
    assert other.is_too_slow_for(one, now_s - 11) and not other.is_too_slow_for(one, now_s - 5)
    one._chunk_s = 0.1  # so 64 take 6.4 s
    assert other.is_too_slow_for(one, now_s - 28) and not other.is_too_slow_for(one, now_s - 24)


def test_a_source_that_does_not_hear_the_thanks_keeps_nobody(world: World, monkeypatch: pytest.MonkeyPatch):
    group, joiner, gate, heard = large(1, chunks=16), large(2, chunks=16), world.event(), list[bool]()
    monkeypatch.setattr(http_transport, "TELL_S", 0.01)
    monkeypatch.setattr(http_transport._FromSource, "tell_done", lambda self: heard.append(gate.wait(30)))
    heal(world.transport("j"), joiner, world.source(group, "a"), world.source(group, "b"))
    assert equal(joiner.loaded, group.values) and not heard


def test_sources_with_different_states(world: World):
    """The one that answers first is believed, and it alone."""
    one, other, joiner = large(1, chunks=24), large(5, chunks=24), large(2, chunks=24)
    gate = world.event()
    late = world.proxy(world.source(other, "b"), hold(0, gate))

    def progress(done: int, total: int) -> None:
        gate.set()

    heal(world.transport("j"), joiner, world.source(one, "a"), late, progress=progress)
    assert equal(joiner.loaded, one.values)


def after(gate: threading.Event) -> Spoil:
    """On no connection comes anything before the gate is open."""

    def spoil(before: int, data: bytes) -> bytes:
        assert gate.wait(30)
        return data

    return spoil


@pytest.fixture
def gate(world: World, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Sources say what they hold when it is open, and the first to give chunks stops at its tenth until that is compared."""
    gate, compared = world.event(), world.event()
    send, tell, compare = (
        http_server._Connection._send_chunk,
        http_server._Connection._send_digests,
        http_transport.Fetch.compare,
    )

    def sends(self: Any, offer: Any, chunk: int, bounce: Any) -> Any:
        assert chunk < 10 or compared.wait(30)
        return send(self, offer, chunk, bounce)

    def tells(self: Any, *asked: Any) -> None:
        assert gate.wait(30)
        tell(self, *asked)

    def compares(self: Any, source: StateSource, digests: bytes) -> None:
        compare(self, source, digests)
        if len(self._digests) == 2:
            compared.set()

    monkeypatch.setattr(http_server._Connection, "_send_chunk", sends)
    monkeypatch.setattr(http_server._Connection, "_send_digests", tells)
    monkeypatch.setattr(http_transport.Fetch, "compare", compares)
    return gate


@pytest.mark.parametrize("flipped", ["first", "weights", "last"])
def test_sources_of_which_one_has_a_flipped_bit(
    world: World, gate: threading.Event, flipped: str, caplog: pytest.LogCaptureFixture
):
    """Their headers are equal, and every chunk is what its source holds: the joiner takes nothing from the second one."""
    one, other, joiner = (large(seed, chunks=24) for seed in (1, 1, 2))
    other.values["model"][flipped].view(-1).view(torch.uint8)[-2] ^= 16
    late = world.proxy(world.source(other, "b"), after(gate))
    heal(world.transport("j"), joiner, world.source(one, "a"), late, progress=lambda done, total: gate.set())
    assert equal(joiner.loaded, one.values) and late.passed < MIB
    [said] = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert said.startswith("source-0 and source-1 hold different states, first in model/") and flipped in said


def test_sources_that_are_compared_after_their_fence(world: World, gate: threading.Event):
    """What was sent is gone, but its digest is known; what is not, was copied aside."""
    group, joiner = large(1, chunks=24), large(2, chunks=24)
    sources = [world.source(group, name) for name in "ab"]
    before = {name: tensor.clone() for name, tensor in group.values["model"].items()}
    fenced: list[Fenced] = []

    def progress(done: int, total: int) -> None:
        if not fenced:
            fenced.extend(source.fence() for source in sources)
            commit(group)
            gate.set()

    heal(world.transport("j"), joiner, sources[0], world.proxy(sources[1], after(gate)), progress=progress)
    assert equal(joiner.loaded["model"], before) and fenced == [Fenced.COPIED] * 2


def test_the_one_that_was_chosen_dies_before_they_are_compared(world: World):
    """The other may hold something else: all comes from it, also what the first has given."""
    one, other, joiner = (large(seed, chunks=24) for seed in (1, 1, 2))
    other.values["model"]["weights"][5] += 1
    gate = world.event()
    dies = world.proxy(world.source(one, "a"), cut(12 * MIB))
    late = world.proxy(world.source(other, "b"), after(gate))
    heal(world.transport("j"), joiner, dies, late, progress=lambda done, total: gate.set())
    assert equal(joiner.loaded, other.values)


def test_nothing_is_compared_that_has_but_one_source(world: World, monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    monkeypatch.setattr(
        http_server._Connection, "_send_digests", lambda self, offer, reader, what: asked.append(what.reader)
    )
    group, joiner = large(1), large(2)
    heal(world.transport("j", config=HealConfig(heal_streams=2)), joiner, world.source(group))
    assert equal(joiner.loaded, group.values) and not asked
