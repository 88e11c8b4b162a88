"""Healing between tensors on a device: bit for bit, and on a stream of its own, so that what computes meanwhile holds nothing up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from ft.healing.format import CHUNK_BYTES
from ft.healing.pg_transport import PgTransport
from ft.healing.transport import Fenced, HealEndpoint
from tests.gpu.devices import one_device, spin
from tests.healing.http_world import World, heal
from tests.healing.states import Group, equal
from tests.healing.test_pg import QueueGroup, Wire
from tests.healing.test_pg import heal as heal_over_group

pytestmark = [one_device, pytest.mark.timeout(300)]

WORDS = 8 * CHUNK_BYTES // 4 + 1001  # fp32 numbers: eight chunks and a part of one
Heal = Callable[[Group, Group], Any]


@pytest.fixture
def over_http() -> Iterator[Heal]:
    with ExitStack() as stack:
        world = World(stack)
        yield lambda group, joiner: heal(world.transport("j"), joiner, world.source(group))
        world.open_gates()


@pytest.fixture
def over_group() -> Iterator[Heal]:
    with ExitStack() as stack:

        def over(group: Group, joiner: Group) -> None:
            wires: dict[str, Wire] = {}
            source = PgTransport(lambda: QueueGroup(wires), "127.0.0.1", "a")
            transport = PgTransport(lambda: QueueGroup(wires), "127.0.0.1", "j")
            for end in (source, transport):
                stack.callback(end.close)
            source.offer(group.view(), quorum_id=3, step=7, joiners=["j"])
            heal_over_group(source, transport, joiner)

        yield over


def state(fill: float) -> Group:
    """A state on the device: contiguous and non-contiguous tensors, small ones that share a chunk, and a number on the host."""
    draws = torch.Generator("cuda").manual_seed(int(fill))
    model = {
        "weights": torch.full((WORDS,), fill, device="cuda"),
        "crossed": torch.randn(300, 200, device="cuda", generator=draws).t(),
        "half": torch.randn(1000, device="cuda", generator=draws).to(torch.bfloat16),
        "step": torch.tensor(fill),
    }
    return Group({"model": model, "lr": 0.1 * fill})


@pytest.mark.parametrize("way", ["over_http", "over_group"])
def test_a_state_on_the_device_arrives_bit_for_bit(way: str, request: pytest.FixtureRequest) -> None:
    group, joiner = state(1), state(2)
    request.getfixturevalue(way)(group, joiner)
    assert equal(joiner.loaded, group.values)
    assert joiner.loaded["model"]["weights"] is joiner.values["model"]["weights"]


def test_what_was_queued_before_the_offer_is_in_it_and_what_computes_after_it_holds_nothing_up(over_http: Heal) -> None:
    over_http(state(1), state(2))  # pinned buffers are made: that waits for the device
    group, joiner = state(3), state(4)
    torch.cuda.synchronize()
    spin(1.0)
    group.values["model"]["weights"].fill_(5.0)  # queued, not done, when the offer is made
    with ExitStack() as stack:
        world = World(stack)
        source = world.source(group)
        view = joiner.view()
        spun = spin(30.0)  # the forward of the step that the source goes on with
        received = world.transport("j").fetch([HealEndpoint("a", source.address)], view, quorum_id=3, step=7)
        assert not spun.query(), "healing waited for the stream that computes"
        joiner.state.load(received)
        with torch.cuda.stream(torch.cuda.Stream()):
            arrived = joiner.loaded["model"]["weights"].eq(5.0).all().item()
        assert arrived, "the commit would not have waited for the last bytes"
        assert source.fence() is Fenced.FREE
        world.open_gates()
    torch.cuda.synchronize()
