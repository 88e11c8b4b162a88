"""Healing over HTTP from two sources: they share the work once they are known to hold the same bits, and one of them may go."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from ft.healing.format import CHUNK_BYTES
from ft.healing.http_transport import is_too_slow
from ft.healing.transport import Fenced, HealConfig
from tests.healing.http_world import MIB, World, commit, heal
from tests.healing.proxy import Spoil, as_it_is, cut, hold
from tests.healing.states import equal, large
from tests.waiting import in_time


def bodies(number: int, wait: Callable[[], Any]) -> Callable[[bytes], None]:
    """Orders of a proxy: before the source hears of its stripe of that number, `wait`."""
    asked: list[bytes] = []

    def hears(data: bytes) -> None:
        asked.extend([data] * (b"/body" in data))
        if b"/body" in data and len(asked) == number:
            wait()

    return hears


def test_two_sources_share_the_work(world: World):
    group, joiner = large(1, chunks=40), large(2, chunks=40)
    both = threading.Barrier(2)  # the first to give chunks, whichever it is, waits after some for the other
    sources = [world.proxy(world.source(group, name), as_it_is, bodies(2, lambda: both.wait(30))) for name in "ab"]
    heal(world.transport("j"), joiner, *sources)
    assert equal(joiner.loaded, group.values)
    total = group.view().manifest.total_bytes
    assert all(MIB <= proxy.passed < total for proxy in sources), [proxy.passed for proxy in sources]


@pytest.mark.parametrize("dies_after", [0, 300, 5 * MIB, 8 * MIB + 2000, 13 * MIB])
def test_one_of_two_sources_dies(world: World, dies_after: int):
    group, joiner = large(1, chunks=32), large(2, chunks=32)
    dies = world.proxy(world.source(group, "a"), cut(dies_after))
    heal(world.transport("j"), joiner, dies, world.source(group, "b"))
    assert equal(joiner.loaded, group.values)


def test_a_source_that_is_far_too_slow_is_not_waited_for(world: World, caplog: pytest.LogCaptureFixture):
    """The slow source stays within its limit of silence; but the other one finishes its own part, and sends the rest."""
    group, joiner, config = large(1, chunks=32), large(2, chunks=32), HealConfig(heal_grace_s=3600.0)
    gate, first = world.event(), threading.Lock()

    def stalls() -> None:
        """Blocks the first call, of either source."""
        if first.acquire(blocking=False):
            gate.wait(60)

    proxies = [world.proxy(world.source(group, name), as_it_is, bodies(1, stalls)) for name in "ab"]
    heal(world.transport("j", config=config), joiner, *proxies)
    assert equal(joiner.loaded, group.values)
    # Its own thread says so, which the heal does not wait for.
    assert in_time(lambda: "it sends far more slowly than the other" in caplog.text, 30)


@pytest.mark.parametrize(
    ("waited_s", "chunks", "chunk_s", "too_slow"),
    [(100, 0, 0.0, False), (11, 64, 0.0, True), (5, 64, 0.0, False), (28, 64, 0.1, True), (24, 64, 0.1, False)],
)
def test_who_is_too_slow(waited_s: float, chunks: int, chunk_s: float, too_slow: bool):
    """Against what the waiting one took for a chunk (64 take 6.4 s); where that one was not let yet, against silence."""
    assert is_too_slow(waited_s, chunks, chunk_s, grace_s=30.0) is too_slow


def test_a_source_that_does_not_hear_the_thanks_keeps_nobody(world: World):
    group, joiner, gate = large(1, chunks=16), large(2, chunks=16), world.event()
    sources = [
        world.proxy(world.source(group, name), as_it_is, lambda data: b"/done" in data and gate.wait(30))
        for name in "ab"
    ]
    transport = world.transport("j")
    transport.done_s = 0.01
    heal(transport, joiner, *sources)
    assert equal(joiner.loaded, group.values) and not gate.is_set()


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
    """Holds back the bytes of every connection until the gate is open."""

    def spoil(before: int, data: bytes) -> bytes:
        assert gate.wait(30)
        return data

    return spoil


@pytest.mark.parametrize("flipped", ["first", "weights", "last"])
def test_sources_of_which_one_has_a_flipped_bit(world: World, flipped: str, caplog: pytest.LogCaptureFixture):
    """Their headers are equal, and every chunk is what its source holds: the joiner takes nothing from the second one."""
    one, other, joiner = (large(seed, chunks=24) for seed in (1, 1, 2))
    other.values["model"][flipped].view(-1).view(torch.uint8)[-2] ^= 16
    gate, errors = world.event(), lambda: [it.getMessage() for it in caplog.records if it.levelno == logging.ERROR]
    first = world.proxy(world.source(one, "a"), as_it_is, bodies(2, lambda: in_time(errors, 30)))
    late = world.proxy(world.source(other, "b"), after(gate))
    heal(world.transport("j"), joiner, first, late, progress=lambda done, total: gate.set())
    assert equal(joiner.loaded, one.values) and late.passed < MIB
    [said] = errors()
    assert said.startswith("source-0 and source-1 hold different states, first in model/") and flipped in said


def test_sources_that_differ_are_reported_once_for_an_offer(world: World, caplog: pytest.LogCaptureFixture):
    """A repeated fetch reports nothing again."""
    one, other, joiner = (large(seed, chunks=24) for seed in (1, 1, 2))
    other.values["model"]["last"].view(-1).view(torch.uint8)[-2] ^= 16
    errors = lambda: [it for it in caplog.records if it.levelno == logging.ERROR]  # noqa: E731
    transport, sources = world.transport("j"), [world.source(one, "a"), world.source(other, "b")]
    for quorum_id, told in ((3, 1), (3, 1), (4, 2)):
        for source, group in zip(sources, (one, other), strict=True):
            source.offer(group.view(), quorum_id=quorum_id, step=7, joiners=["j"])
        late = world.proxy(sources[1], as_it_is)
        compared = lambda late=late, told=told: late.passed and len(errors()) >= told  # noqa: E731
        first = world.proxy(sources[0], as_it_is, bodies(2, partial(in_time, compared, 30)))
        heal(transport, joiner, first, late, quorum_id=quorum_id)
    assert len(errors()) == 2


def test_sources_that_are_compared_after_their_fence(world: World):
    """Sent chunks are gone, but their digests are known; unsent chunks were copied aside."""
    group, joiner = large(1, chunks=24), large(2, chunks=24)
    sources = [world.source(group, name) for name in "ab"]
    before = {name: tensor.clone() for name, tensor in group.values["model"].items()}
    fenced: list[Fenced] = []
    gate, compared = world.event(), world.event()

    def asked(data: bytes) -> None:
        """Holds back the first source's digests until after the fence, and the late one's stripes until the digests have been compared."""
        assert b"/digests" not in data or gate.wait(30)
        waits(data)

    waits = bodies(2, lambda: compared.wait(30))

    def progress(done: int, total: int) -> None:
        if not fenced:
            fenced.extend(source.fence() for source in sources)
            commit(group)
            gate.set()

    first = world.proxy(sources[0], as_it_is, asked)
    late = world.proxy(sources[1], after(gate), bodies(1, compared.set))
    heal(world.transport("j"), joiner, first, late, progress=progress)
    assert equal(joiner.loaded["model"], before) and fenced == [Fenced.COPIED] * 2 and late.passed > MIB


@pytest.mark.parametrize("flipped", [False, True])
def test_a_source_whose_memory_changes_after_they_were_compared(
    world: World, caplog: pytest.LogCaptureFixture, flipped: bool
):
    """Chunks copied aside at a commit have the compared bytes. After a flipped bit in between, the other source sends them."""
    groups, joiner = [large(1, chunks=24) for _ in "ab"], large(2, chunks=24)
    sources = [world.source(group, name) for group, name in zip(groups, "ab", strict=True)]
    before = {name: tensor.clone() for name, tensor in groups[0].values["model"].items()}
    gate, compared = world.event(), world.event()
    fenced: list[Fenced] = []

    def commits() -> None:
        assert compared.wait(30)
        if flipped:
            groups[0].values["model"]["weights"].view(torch.uint8)[9 * CHUNK_BYTES] ^= 16
        for source, group in zip(sources, groups, strict=True):
            fenced.append(source.fence())
            commit(group)

    first = world.proxy(sources[0], as_it_is, bodies(2, commits))
    late = world.proxy(sources[1], after(gate), bodies(1, compared.set))
    heal(world.transport("j"), joiner, first, late, progress=lambda done, total: gate.set())
    assert equal(joiner.loaded["model"], before) and fenced == [Fenced.COPIED] * 2
    assert ("damaged" in caplog.text) == flipped


def test_the_one_that_was_chosen_dies_before_they_are_compared(world: World):
    """The other may hold something else: all comes from it, also what the first has given."""
    one, other, joiner = (large(seed, chunks=24) for seed in (1, 1, 2))
    other.values["model"]["weights"][5] += 1
    gate = world.event()
    dies = world.proxy(world.source(one, "a"), cut(12 * MIB))
    late = world.proxy(world.source(other, "b"), after(gate))
    heal(world.transport("j"), joiner, dies, late, progress=lambda done, total: gate.set())
    assert equal(joiner.loaded, other.values)


def test_nothing_is_compared_that_has_but_one_source(world: World):
    asked: list[bytes] = []
    group, joiner = large(1), large(2)
    proxy = world.proxy(world.source(group), as_it_is, asked.append)
    heal(world.transport("j", config=HealConfig(heal_streams=2)), joiner, proxy)
    assert equal(joiner.loaded, group.values) and asked and not any(b"/digests" in data for data in asked)
