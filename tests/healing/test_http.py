"""Healing over HTTP between threads of one process: whole, from two sources, and with everything going wrong that may.

In every case a heal either gives the source's state bit for bit, or raises and says so: never half a state.
"""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, nullcontext
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from ft.healing.capture import StateRegistry
from ft.healing.format import CHUNK_BYTES
from ft.healing.http_server import MAX_CONNECTIONS, HealServer
from ft.healing.http_transport import MAX_DAMAGED, HttpTransport
from ft.healing.transport import MAX_JOINERS, Fenced, HealConfig, HealEndpoint, HealFailed, StateOffer, TooManyJoiners
from ft.rpc.access import Access
from tests.healing.http_world import MIB, QUICK, TOKEN, World, commit, heal
from tests.healing.proxy import as_it_is, cut, flip, hold
from tests.healing.states import Group, equal, large


@pytest.mark.parametrize("streams", [1, 2, 3])
def test_a_whole_state(world: World, streams: int):
    group, joiner = large(1), large(2)
    source = world.source(group)
    seen: list[tuple[int, int]] = []
    transport = world.transport("j", config=HealConfig(heal_streams=streams))
    assert not transport.is_fully_sent and not source.is_fully_sent
    heal(transport, joiner, source, progress=lambda done, total: seen.append((done, total)))
    assert equal(joiner.loaded, group.values)
    assert joiner.loaded["model"]["weights"] is joiner.values["model"]["weights"]
    total = group.view().manifest.total_bytes
    assert seen[-1] == (total, total) and seen == sorted(seen) and len(seen) > 2
    assert source.fence() is Fenced.FREE and source.is_fully_sent
    source.withdraw("the test says so")
    assert not source.is_fully_sent


def test_a_state_without_tensors(world: World):
    group, joiner = Group({"ledger": {"step": 5}}), Group({"ledger": {"step": 0}})
    heal(world.transport("j"), joiner, world.source(group))
    assert equal(joiner.loaded, group.values)


def test_a_fence_does_not_outlast_its_quorum(world: World):
    """Its joiner holds a chunk, or has not come at all: the end of the quorum, told by another thread, releases the commit."""
    config = HealConfig(heal_copy_bytes=0, heal_grace_s=600.0)
    for comes in (False, True):
        source = world.transport("a", config=config)
        offer = source.offer(large(1).view(), quorum_id=3, step=7, joiners=["j"])
        with ExitStack() as held:
            if comes:
                offer.add_joiner("j")
                offer.set_wanted("j", ())
                held.enter_context(offer.reading())
            fence = world.start(source.fence)
            while not offer.fencing:
                assert not fence.done()
            source.end_offer(2, "the quorum before has failed")
            assert not offer.withdrawn_reason
            source.end_offer(3, "j is lost")
            assert fence.result(60) is Fenced.WITHDRAWN and offer.withdrawn_reason == "j is lost"


def test_an_offer_that_is_over_keeps_no_copies(world: World):
    source = world.transport("a", config=HealConfig(heal_grace_s=600.0))
    group = large(1)
    offer = source.offer(group.view(), quorum_id=3, step=7, joiners=["j"])
    assert not offer.aside
    assert source.fence() is Fenced.COPIED and offer.aside
    assert sum(map(len, offer.aside.values())) == group.view().manifest.total_bytes
    source.end_offer(3, "j is lost")
    assert not offer.aside


def test_an_offer_that_is_over_keeps_no_tensors(world: World):
    """A state_dict may return copies. They are freed once no joiner's thread reads them."""
    memory = list[weakref.ref[np.ndarray]]()

    def copy() -> torch.Tensor:
        array = np.zeros(MIB)
        memory.append(weakref.ref(array))
        return torch.from_numpy(array)

    state, source = StateRegistry(), world.transport("a")
    state.register_state("copy", copy, print)
    for reads in (False, True):
        offer = source.offer(state.view(), quorum_id=3, step=7, joiners=["j"])
        with offer.reading() if reads else nullcontext():
            source.end_offer(3, "j is lost")
            assert (memory[-1]() is not None) == reads
        assert memory[-1]() is None


def test_nobody_there(world: World):
    gone = world.transport("a")
    gone.close()
    with pytest.raises(HealFailed, match="refused") as failed:
        heal(world.transport("j"), large(2), gone)
    assert not failed.value.touched


@pytest.mark.parametrize("truncated_by", [1, 16, 17, 40, 2 * MIB])
def test_a_truncated_stream_is_noticed(world: World, truncated_by: int):
    """The last bytes are the validity token; before it comes the last digest. In the middle of it its only source dies."""
    group, joiner = large(1, chunks=3), large(2, chunks=3)
    source = world.source(group)
    whole = world.proxy(source, as_it_is)
    heal(world.transport("j"), large(3, chunks=3), whole)
    source.offer(group.view(), quorum_id=3, step=7, joiners=["j"])
    with pytest.raises(HealFailed, match=r"^source-0: it closed the connection before the end$") as failed:
        heal(world.transport("j"), joiner, world.proxy(source, cut(whole.passed - len(DONE) - truncated_by)))
    assert failed.value.touched and not joiner.loaded


DONE = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"  # the answer to the joiner's last word


def test_a_flipped_byte_is_fetched_again(world: World):
    group, joiner = large(1), large(2)
    proxy = world.proxy(world.source(group), flip(5 * MIB, 12 * MIB, 30 * MIB))
    heal(world.transport("j"), joiner, proxy)
    assert equal(joiner.loaded, group.values)
    total = group.view().manifest.total_bytes
    assert total + 3 * CHUNK_BYTES <= proxy.passed < total + 3 * CHUNK_BYTES + MIB


@pytest.mark.parametrize(
    ("flips", "words"), [(range(2 * MIB, 200 * MIB, MIB // 2), "chunks were damaged"), ([200], "header was damaged")]
)
def test_a_wire_that_always_flips_is_given_up(world: World, flips: Sequence[int], words: str):
    group, joiner = large(1), large(2)
    proxy = world.proxy(world.source(group), flip(*flips))
    with pytest.raises(HealFailed, match=words) as failed:
        heal(world.transport("j"), joiner, proxy)
    assert proxy.passed < 3 * group.view().manifest.total_bytes and not joiner.loaded
    assert failed.value.touched is ("header" not in words)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((3, 6), "410 on offer is step 7 of quorum 3"),
        ((2, 7), "410 on offer"),
        ((3, 8), "404 not offered yet"),
        ((4, 7), "404"),
    ],
)
def test_another_step_or_quorum_is_refused(world: World, asked: tuple[int, int], words: str):
    joiner = large(2, chunks=2)
    source = world.source(large(1, chunks=2))
    with pytest.raises(HealFailed, match=words) as failed:
        heal(world.transport("j", config=QUICK), joiner, source, quorum_id=asked[0], step=asked[1])
    assert not failed.value.touched


@pytest.mark.parametrize("comes", [True, False])
def test_an_offer_that_comes_later_is_waited_for_until_a_stop(world: World, comes: bool):
    group, joiner = large(1, chunks=2), large(2, chunks=2)
    source, transport, asked = world.transport("a"), world.transport("j"), world.event()
    proxy = world.proxy(source, lambda _, data: asked.set() or data)
    healing = world.start(heal, transport, joiner, proxy)
    assert asked.wait(30)
    if comes:
        source.offer(group.view(), quorum_id=3, step=7, joiners=["j"])
        healing.result(30)
        assert equal(joiner.loaded, group.values)
    else:
        transport.stop("enough")
        with pytest.raises(HealFailed, match="enough"):
            healing.result(10)


@pytest.mark.parametrize("token", ["", "another token of the test", TOKEN.token + "x", TOKEN.token[:-1]])
def test_a_wrong_token_is_refused(world: World, token: str):
    joiner = large(2, chunks=2)
    with pytest.raises(HealFailed, match="401 missing or wrong token") as failed:
        heal(world.transport("j", Access(token=token)), joiner, world.source(large(1, chunks=2)))
    assert not failed.value.touched and not joiner.loaded


def test_no_wide_address_without_a_token():
    with pytest.raises(ValueError, match="no token"):
        HttpTransport("0.0.0.0", "a", Access())


def test_another_shape_is_refused_before_a_byte_is_written(world: World):
    joiner = large(2, chunks=3)
    before = joiner.values["model"]["weights"].clone()
    with pytest.raises(HealFailed, match="model/weights: the source has float32") as failed:
        heal(world.transport("j"), joiner, world.source(large(1, chunks=4)))
    assert not failed.value.touched and equal(before, joiner.values["model"]["weights"])


@pytest.mark.parametrize("sources", [1, 2])
def test_who_will_never_read_keeps_no_commit_waiting(world: World, sources: int):
    """A joiner of another layout reads nothing, and no retry would help: after its notice commits continue."""
    config = HealConfig(heal_copy_bytes=0, heal_grace_s=600.0)
    offered = [world.source(large(1, chunks=4), name=f"s{i}", config=config) for i in range(sources)]
    transport, joiner = world.transport("j"), large(2, chunks=3)
    named = [HealEndpoint(f"s{i}", one.address) for i, one in enumerate(offered)]
    with pytest.raises(HealFailed) as failed:
        transport.fetch(named, joiner.view(), quorum_id=3, step=7)
    assert failed.value.layout_mismatch
    fences = [world.start(one.fence) for one in offered]
    transport.notify_done(named, quorum_id=3, step=7)
    assert [fence.result(60) for fence in fences] == [Fenced.FREE] * sources


def test_one_source_of_another_layout_is_not_all_of_them(world: World):
    gone = world.transport("b")
    gone.close()
    with pytest.raises(HealFailed) as failed:
        heal(world.transport("j"), large(2, chunks=3), world.source(large(1, chunks=4)), gone)
    assert not failed.value.layout_mismatch


# ------------------------------------------------------------------------------------------------ the source goes on


def half_way(
    world: World, config: HealConfig, chunks: int = 40, send_buffer: int = 0
) -> tuple[Group, Group, HttpTransport, threading.Event, Future[Any]]:
    """A joiner that has got 10 MiB and waits for the gate. `send_buffer`: bytes that the kernel takes at once; 0: as it likes."""
    group, joiner = large(1, chunks=chunks), large(2, chunks=chunks)
    source = world.source(group, config=config)
    if send_buffer:  # connections inherit it
        source._server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    gate, reached = world.event(), world.event()
    proxy = world.proxy(source, hold(10 * MIB, gate, reached))
    healing = world.start(heal, world.transport("j"), joiner, proxy)
    assert reached.wait(30)
    return group, joiner, source, gate, healing


@pytest.mark.parametrize("send_buffer", [0, 100_000])
def test_a_commit_copies_aside_what_is_unsent(world: World, caplog: pytest.LogCaptureFixture, send_buffer: int):
    """The rest of a chunk that the kernel has taken in part is copied, too: no chunk arrives damaged."""
    config = HealConfig(heal_streams=1, heal_copy_bytes=40 * MIB)
    group, joiner, source, gate, healing = half_way(world, config, send_buffer=send_buffer)
    before = {name: tensor.clone() for name, tensor in group.values["model"].items()}
    assert source.fence() is Fenced.COPIED
    commit(group)
    assert source.fence() is Fenced.COPIED  # the next step's: nothing more to do
    assert not source.is_fully_sent
    gate.set()
    healing.result(30)
    assert equal(joiner.loaded["model"], before) and "damaged" not in caplog.text


@pytest.mark.parametrize(("chunks", "failures"), [(1, 0), (MAX_DAMAGED + 2, 1)])
def test_buffers_that_a_forward_changes_between_two_joiners(
    world: World, caplog: pytest.LogCaptureFixture, chunks: int, failures: int
):
    """The second joiner gets the digests that were made for the first one, with newer bytes, and requests these chunks again."""
    config, group = HealConfig(heal_streams=1), large(1)
    source = world.source(group, joiners=["i", "j", "k"])
    heal(world.transport("i", config=config), large(2), source)
    group.values["model"]["weights"][: chunks * CHUNK_BYTES // 4 - 100].add_(1)  # as a forward does
    transport, joiner = world.transport("j", config=config), large(3)
    for _ in range(failures):
        with pytest.raises(HealFailed, match="chunks were damaged"):
            heal(transport, joiner, source)
    heal(transport, joiner, source)
    assert equal(joiner.loaded, group.values) and "damaged" in caplog.text
    caplog.clear()
    heal(world.transport("k", config=config), joiner := large(4), source)
    assert equal(joiner.loaded, group.values) and "damaged" not in caplog.text


def test_a_commit_copies_aside_what_a_forward_has_changed(world: World, caplog: pytest.LogCaptureFixture):
    """A repeated fetch would find most chunks gone, so none of the copies may have an older digest."""
    group, joiner = large(1), large(3)
    source = world.source(group, joiners=["i", "j"])
    heal(world.transport("i"), large(2), source)
    group.values["model"]["weights"].add_(1)
    before = {name: tensor.clone() for name, tensor in group.values["model"].items()}
    assert source.fence() is Fenced.COPIED
    commit(group)
    heal(world.transport("j"), joiner, source)
    assert equal(joiner.loaded["model"], before) and "damaged" not in caplog.text


def test_what_a_commit_has_not_copied_is_gone_for_good(world: World):
    """A joiner that begins anew is refused at once, and no later commit waits for what it still lacks."""
    config = HealConfig(heal_streams=1, heal_copy_bytes=35 * MIB, heal_grace_s=600.0)
    _, _, source, gate, healing = half_way(world, config)
    assert source.fence() is Fenced.COPIED
    with pytest.raises(
        HealFailed, match="410 the source has committed after step 7, and chunk 0 was not wanted"
    ) as failed:
        heal(world.transport("j"), large(2, chunks=40), source)
    assert failed.value.gone_sources == {"source-0"}
    assert source.fence() is Fenced.COPIED
    gate.set()
    healing.result(60)


def test_a_commit_while_several_streams_are_served(world: World):
    """Each connection has a lock of its own; the fence holds them all while it copies."""
    group, joiner = large(1), large(2)
    source = world.source(group)
    before = {name: tensor.clone() for name, tensor in group.values["model"].items()}
    fenced: list[Fenced] = []

    def progress(done: int, total: int) -> None:
        if not fenced:  # called by one stream, while others go on
            fenced.append(source.fence())
            commit(group)

    heal(world.transport("j", config=HealConfig(heal_streams=3)), joiner, source, progress=progress)
    assert equal(joiner.loaded["model"], before) and fenced[0] in (Fenced.COPIED, Fenced.FREE)


def test_a_commit_waits_until_the_rest_is_small(world: World):
    group, joiner, source, gate, healing = half_way(world, HealConfig(heal_streams=1, heal_copy_bytes=5 * MIB))
    before = {name: tensor.clone() for name, tensor in group.values["model"].items()}
    fencing = world.start(lambda: (source.fence(), commit(group))[0])
    gate.set()
    assert fencing.result(30) in (Fenced.COPIED, Fenced.FREE)
    healing.result(30)
    assert equal(joiner.loaded["model"], before)


def test_a_reader_slower_than_the_grace_is_left_behind(world: World):
    """The source commits; what comes after has no validity token, and the joiner's state stays void."""
    group, joiner, source, gate, healing = half_way(world, QUICK)
    assert source.fence() is Fenced.WITHDRAWN
    commit(group)
    gate.set()
    with pytest.raises(HealFailed) as failed:
        healing.result(30)
    assert failed.value.touched and not joiner.loaded
    assert source.fence() is Fenced.FREE


def test_a_withdrawn_source_is_replaced_by_the_other(world: World):
    group, _, source, gate, healing = half_way(world, QUICK)
    other = world.transport("b")
    other.offer(large(1).view(), quorum_id=3, step=7, joiners=["j"])
    expected = {name: tensor.clone() for name, tensor in group.values["model"].items()}
    source.withdraw("the test says so")
    commit(group)
    gate.set()
    with pytest.raises(HealFailed):
        healing.result(30)
    again = large(2)
    heal(world.transport("k"), again, source, other)
    assert equal(again.loaded["model"], expected)


def test_a_joiner_that_never_comes(world: World):
    group = large(1, chunks=2)
    assert world.source(group, joiners=[]).fence() is Fenced.FREE and world.transport("b").fence() is Fenced.FREE
    assert world.source(group, config=QUICK).fence() is Fenced.WITHDRAWN
    roomy = world.source(group, name="b")
    assert roomy.fence() is Fenced.COPIED
    before = group.values["model"]["weights"].clone()
    commit(group)
    joiner = large(2, chunks=2)
    heal(world.transport("j"), joiner, roomy)  # and later comes all the same
    assert equal(joiner.loaded["model"]["weights"], before)


def test_a_newer_offer_ends_the_older(world: World):
    group, joiner = large(1, chunks=2), large(2, chunks=2)
    source = world.source(group)
    source.offer(group.view(), quorum_id=3, step=8, joiners=["j"])
    with pytest.raises(HealFailed, match="410 on offer is step 8"):
        heal(world.transport("j"), joiner, source)
    heal(world.transport("j"), joiner, source, step=8)
    assert equal(joiner.loaded, group.values)


def test_a_source_that_offers_anew_under_the_same_number(world: World):
    """Every stripe is whole and every digest right, but they are of two states: the seals differ."""
    group, joiner = large(1), large(2)
    source = world.source(group)

    def progress(done: int, total: int) -> None:
        commit(group)
        source.offer(group.view(), quorum_id=3, step=7, joiners=["j"])

    with pytest.raises(HealFailed, match="the source changed its offer during the transfer"):
        heal(world.transport("j"), joiner, source, progress=progress)
    assert not joiner.loaded


# ------------------------------------------------------------------------------------------------ ends


def test_a_fetch_can_be_stopped(world: World):
    transport, reached = world.transport("j"), world.event()
    proxy = world.proxy(world.source(large(1)), hold(10 * MIB, world.event(), reached))
    healing = world.start(heal, transport, large(2), proxy)
    assert reached.wait(30)
    transport.stop("the quorum has failed")
    with pytest.raises(HealFailed, match=r"^the quorum has failed$") as failed:
        healing.result(10)
    assert failed.value.touched


def test_a_silent_source_is_given_up(world: World):
    group, joiner = large(1), large(2)
    proxy = world.proxy(world.source(group), hold(10 * MIB, world.event()))
    with pytest.raises(HealFailed, match=r"silent for 0\.5 s"):
        heal(world.transport("j", config=QUICK), joiner, proxy)


def test_close_leaves_no_thread(world: World):
    _, _, source, gate, healing = half_way(world, HealConfig())
    ours = [thread for thread in threading.enumerate() if thread.name in ("heal-fetch", "heal-joiner")]
    assert {thread.name for thread in ours} == {"heal-fetch", "heal-joiner"}
    source.close()
    source.close()
    gate.set()
    with pytest.raises(HealFailed):
        healing.result(30)
    for thread in ours:
        thread.join(30)
        assert not thread.is_alive(), thread.name


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_source_without_memory_for_copies_goes_on(world: World, error: Exception):
    """Its joiners heal again; they must not end the rank that has the state."""
    group = large(1)
    source = world.transport("a")
    offer = source.offer(group.view(), quorum_id=3, step=7, joiners=["j"])

    class NoMemory:
        def __getattr__(self, name: str) -> Any:
            return getattr(body, name)

        def read(self, *what: Any) -> memoryview:
            raise error

    body, offer.body = offer.body, NoMemory()  # type: ignore[assignment]
    assert source.fence() is Fenced.WITHDRAWN and "no memory for a copy" in offer.withdrawn_reason


def test_strangers_keep_nobody_out(world: World):
    """Connections without a token, even if they fill all places, make room for those with one."""
    group, joiner = large(1, chunks=2), large(2, chunks=2)
    offer = StateOffer(group.view(), quorum_id=3, step=7, joiners=1)
    with ExitStack() as held:
        server = held.enter_context(closing(HealServer("127.0.0.1", TOKEN, lambda: offer, silence_s=30.0)))
        at = ("127.0.0.1", int(server.address.rpartition(":")[2]))
        for _ in range(MAX_CONNECTIONS + 5):
            held.enter_context(socket.create_connection(at))
        heal(world.transport("j"), joiner, server)
        assert equal(joiner.loaded, group.values) and len(server.connections) <= 2 * MAX_CONNECTIONS


def test_a_few_strangers_take_no_place_of_a_joiner_while_others_heal():
    """One place is left for joiners. Each stranger that takes it would keep a joiner out for stranger_s."""
    offer = StateOffer(large(1, chunks=2).view(), quorum_id=3, step=7, joiners=1)
    head = f"GET /heal/3/7/header HTTP/1.1\r\nReader: j\r\nAuthorization: Bearer {TOKEN.token}\r\n\r\n".encode()
    with ExitStack() as held:
        server = held.enter_context(closing(HealServer("127.0.0.1", TOKEN, lambda: offer, silence_s=30.0)))
        server.head_s = server.stranger_s = 1000.0
        at = ("127.0.0.1", int(server.address.rpartition(":")[2]))
        for number in range(MAX_CONNECTIONS):
            if number == MAX_CONNECTIONS - 1:
                for _ in range(MAX_CONNECTIONS - 1):
                    held.enter_context(socket.create_connection(at))
            sock = held.enter_context(socket.create_connection(at, timeout=30))
            sock.sendall(head)
            assert sock.recv(12) == b"HTTP/1.1 200"


def test_joiners_beyond_the_places_wait_for_one(world: World):
    """After a loss of all groups but one, or at step 0, hundreds heal from it: they are not sent away, to come again."""
    source, head = (
        world.source(large(1, chunks=2)),
        b"GET /heal/3/7/header HTTP/1.1\r\nReader: j\r\nAuthorization: Bearer %s\r\n\r\n",
    )
    at = ("127.0.0.1", int(source.address.rpartition(":")[2]))
    with ExitStack() as held:

        def ask() -> socket.socket:
            sock = held.enter_context(socket.create_connection(at, timeout=30))
            sock.sendall(head % TOKEN.token.encode())
            return sock

        first = [ask() for _ in range(MAX_CONNECTIONS)]
        assert [sock.recv(12) for sock in first] == [b"HTTP/1.1 200"] * MAX_CONNECTIONS
        for gone, waiting in zip(first, [ask() for _ in range(2 * MAX_CONNECTIONS)], strict=False):
            gone.close()
            assert waiting.recv(12) == b"HTTP/1.1 200"


def test_a_connection_that_still_waits_for_a_place_ends_with_the_heal(world: World, caplog: pytest.LogCaptureFixture):
    """It said 30 s after a heal that the source was silent, and was in the way of other joiners until then."""
    group, joiner, made, asked = large(1, chunks=2), large(2, chunks=2), list[threading.Thread](), count()
    transport, place = world.transport("j", config=HealConfig(heal_streams=2)), world.event()

    def thread(**more: Any) -> threading.Thread:
        made.append(threading.Thread(**more))
        return made[-1]

    transport.make_thread = thread
    waits = lambda data: b"/header" in data and next(asked) == 1 and place.wait(60)  # noqa: E731
    heal(transport, joiner, world.proxy(world.source(group), as_it_is, waits))
    assert equal(joiner.loaded, group.values)
    for one in made:
        one.join(20)
        assert not one.is_alive()
    assert "healing from" not in caplog.text


def test_a_reader_that_is_done_makes_room_for_another():
    """All groups but one heal from that one at step 0: hundreds, one after the other."""
    offer = StateOffer(large(1, chunks=2).view(), quorum_id=1, step=0, joiners=200)
    for number in range(3 * MAX_JOINERS):
        offer.add_joiner(f"done-{number}")
        offer.set_wanted(f"done-{number}", ())
    for number in range(MAX_JOINERS):
        offer.add_joiner(f"reads-{number}")
    with pytest.raises(TooManyJoiners, match="64 joiners already"):
        offer.add_joiner("one-too-many")
    offer.set_wanted("reads-0", ())
    offer.add_joiner("one-too-many")


def test_a_connection_without_a_thread_is_turned_away_and_the_next_one_served(world: World):
    group, joiner, refused = large(1, chunks=2), large(2, chunks=2), list[str]()

    def thread(*, name: str, **more: Any) -> threading.Thread:
        if len(refused) < 2:
            refused.append(name)
            raise RuntimeError("can't start new thread")
        return threading.Thread(name=name, **more)

    offer = StateOffer(group.view(), quorum_id=3, step=7, joiners=1)
    with closing(HealServer("127.0.0.1", TOKEN, lambda: offer, silence_s=30.0)) as server:
        server.make_thread = thread
        for _ in range(2):
            with pytest.raises(HealFailed):
                heal(world.transport("j"), joiner, server)
        heal(world.transport("j"), joiner, server)
        assert equal(joiner.loaded, group.values) and len(server.connections) <= 2


def test_a_state_that_has_arrived_counts_though_no_thread_is_left_to_tell_its_source(world: World):
    group, joiner = large(1, chunks=2), large(2, chunks=2)
    transport, source = world.transport("j"), world.source(group)

    def thread(*, name: str, **more: Any) -> threading.Thread:
        made = threading.Thread(name=name, **more)
        if name == "heal-done":
            made.start()  # so that a second start raises RuntimeError, as without memory for a thread
        return made

    transport.make_thread = thread
    heal(transport, joiner, source)
    assert equal(joiner.loaded, group.values)


@pytest.mark.parametrize("begun", [0, 1])
def test_a_fetch_without_a_thread_ends_the_others_before_it_fails(world: World, begun: int):
    """The next try writes to the same tensors."""
    group, joiner, made, reached = large(1), large(2), list[threading.Thread](), world.event()

    def thread(**more: Any) -> threading.Thread:
        if len(made) == begun:
            assert not begun or reached.wait(30)
            raise RuntimeError("can't start new thread")
        made.append(threading.Thread(**more))
        return made[-1]

    transport, source = world.transport("j", config=HealConfig(heal_streams=3)), world.source(group)
    transport.make_thread = thread
    with pytest.raises(HealFailed, match=r"^can't start new thread$") as failed:
        heal(transport, joiner, world.proxy(source, hold(10 * MIB, world.event(), reached)))
    transport.make_thread = threading.Thread
    assert failed.value.touched == bool(begun)
    before = joiner.values["model"]["weights"].clone()
    for one in made:
        one.join(30)
    assert not any(one.is_alive() for one in made)
    assert torch.equal(joiner.values["model"]["weights"], before), "nothing was written after the failure"
    heal(transport, joiner, source)
    assert equal(joiner.loaded, group.values)


def test_a_silent_connection_is_closed():
    server = HealServer("127.0.0.1", TOKEN, lambda: None, silence_s=30.0)
    server.head_s = 0.05
    at = ("127.0.0.1", int(server.address.rpartition(":")[2]))
    with closing(server), socket.create_connection(at) as silent:
        silent.settimeout(30)
        silent.sendall(b"GET /heal")
        assert silent.recv(1) == b""
