"""Healing over a process group: with gloo between processes, and with a group made of queues where something is to go wrong."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from ft.healing.format import CHUNK_BYTES
from ft.healing.pg_transport import PgTransport
from ft.healing.transport import Fenced, HealConfig, HealEndpoint, HealFailed
from tests.healing.states import Group, equal, large
from tests.multiproc.pool import Pool

QUICK = HealConfig(heal_copy_bytes=0, heal_grace_s=0.3)
PATIENT = HealConfig(heal_copy_bytes=0, heal_grace_s=600.0)


class Wire:
    """The shared state of a group's two members: a queue per direction, and an event for the departure of one."""

    def __init__(self) -> None:
        self.queues: list[queue.Queue[tuple[int, torch.Tensor, threading.Event]]] = [queue.Queue(), queue.Queue()]
        self.left = threading.Event()
        self.here = threading.Barrier(2)


class Work:
    def __init__(self, ends: Callable[[], bool], left: threading.Event) -> None:
        self._ends, self._left = ends, left

    def wait(self) -> bool:
        while True:
            if self._left.is_set():
                raise RuntimeError("a member has left")
            if self._ends():
                return True


class QueueGroup:
    """The face of a process group, in one process. spoil(tag, data): may change a message from the source, or wait."""

    def __init__(
        self, wires: dict[str, Wire], spoil: Callable[[int, torch.Tensor], None] | None = None, patience_s: float = 60.0
    ) -> None:
        self._wires, self._spoil, self._patience_s = wires, spoil or (lambda tag, data: None), patience_s
        self._wire: Wire | None = None
        self._left = threading.Event()

    def configure(self, store: str, rank: int, size: int) -> None:
        assert size == 2
        self._wire, self._rank = self._wires.setdefault(store, Wire()), rank
        try:
            self._wire.here.wait(self._patience_s)
        except threading.BrokenBarrierError:
            raise RuntimeError("nobody came") from None

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        assert self._wire and dst == 1 - self._rank
        arrived = threading.Event()
        self._wire.queues[dst].put((tag, tensors[0], arrived))
        return Work(lambda: arrived.wait(0.01), self._wire.left)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        wire, rank = self._wire, self._rank
        assert wire and src == 1 - rank
        arrived = False

        def ends() -> bool:
            nonlocal arrived
            if arrived:
                return True
            try:
                sent_tag, data, told = wire.queues[rank].get(timeout=0.01)
            except queue.Empty:
                return False
            assert sent_tag == tag and data.nbytes == tensors[0].nbytes
            tensors[0].copy_(data)
            if rank == 1:
                self._spoil(tag, tensors[0])
            told.set()
            arrived = True
            return True

        return Work(ends, wire.left)

    def interrupt(self, reason: str) -> None:
        if self._wire:
            self._wire.left.set()
            self._wire.here.abort()

    def abandon(self, reason: str, then: Callable[[], None] | None = None) -> None:
        self.interrupt(reason)
        if then:
            then()


def pair(
    group: Group, config: HealConfig | None = None, spoil: Any = None, patience_s: float = 60.0
) -> tuple[PgTransport, PgTransport]:
    """A source with its offer, and a joiner."""
    wires: dict[str, Wire] = {}
    source = PgTransport(lambda: QueueGroup(wires), "127.0.0.1", "a", config)
    joiner = PgTransport(lambda: QueueGroup(wires, spoil, patience_s), "127.0.0.1", "j", config)
    source.offer(group.view(), quorum_id=3, step=7, joiners=["j"])
    return source, joiner


def heal(source: PgTransport, transport: PgTransport, joiner: Group, **asked: int) -> None:
    given = {"quorum_id": 3, "step": 7} | asked
    joiner.state.load(transport.fetch([HealEndpoint("a", source.address)], joiner.view(), **given))


def flip(*tags: int, always: bool = False) -> Callable[[int, torch.Tensor], None]:
    seen: set[int] = set()

    def spoil(tag: int, data: torch.Tensor) -> None:
        if data.numel() > CHUNK_BYTES // 2 and (always or tag in tags) and tag not in seen:
            seen.add(tag)
            data[100] ^= 1

    return spoil


@pytest.mark.parametrize("damaged", [(), (2, 4)])
def test_a_whole_state_with_damaged_chunks_asked_for_again(damaged: tuple[int, ...]):
    group, joiner = large(1), large(2)
    source, transport = pair(group, spoil=flip(*damaged))
    assert not source.is_fully_sent
    heal(source, transport, joiner)
    assert equal(joiner.loaded, group.values)
    assert source.fence() is Fenced.FREE and source.is_fully_sent and not transport.is_fully_sent


def test_a_chunk_that_a_forward_changes_while_it_is_sent_is_copied_when_it_is_asked_for_again():
    group, joiner, wires = large(1, chunks=6), large(2, chunks=6), dict[str, Wire]()
    weights, sent = group.values["model"]["weights"], list[torch.Tensor]()

    class Written(QueueGroup):
        """That of a source whose forward writes between a message and its digests."""

        def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
            work = super().send(tensors, dst, tag)
            if dst == 1 and tensors[0].numel() > CHUNK_BYTES // 2:
                work.wait()
                sent.append(weights.clone())
                weights[2 * CHUNK_BYTES // 4] += 1
            return work

    source = PgTransport(lambda: Written(wires), "127.0.0.1", "a")
    transport = PgTransport(lambda: QueueGroup(wires), "127.0.0.1", "j")
    source.offer(group.view(), quorum_id=3, step=7, joiners=["j"])
    heal(source, transport, joiner)
    assert equal(joiner.loaded["model"]["weights"], sent[-1])


def test_a_wire_that_always_flips_is_given_up():
    group, joiner = large(1), large(2)
    source, transport = pair(group, spoil=flip(always=True))
    with pytest.raises(HealFailed, match=r"^a: .*damaged on the way, 3 times$") as failed:
        heal(source, transport, joiner)
    assert failed.value.touched and not joiner.loaded
    heal(source, transport, joiner)  # the request is repeated, and now nothing flips
    assert equal(joiner.loaded, group.values) and source.fence() is Fenced.FREE


@pytest.mark.parametrize("tag", [0, 1])  # the header's digest; the header
def test_a_damaged_header_is_refused(tag: int):
    step = b'["step",'

    def spoil(arrived: int, data: torch.Tensor) -> None:
        if arrived == tag:  # another digit of the ledger's step is as good a header
            data[bytes(data.tolist()).index(step) + len(step) if tag else 7] ^= 1

    group, joiner = large(1), large(2)
    source, transport = pair(group, spoil=spoil)
    with pytest.raises(HealFailed, match=r"^a: the header was damaged on the way") as failed:
        heal(source, transport, joiner)
    assert not failed.value.touched and not failed.value.layout_mismatch and not joiner.loaded


@pytest.mark.parametrize("gone", [False, True])
def test_two_sources_and_one_is_enough(gone: bool):
    """The second source gets the word that it is not needed, or takes the place of the first."""
    group, joiner, wires = large(1), large(2), dict[str, Wire]()
    sources = [PgTransport(lambda: QueueGroup(wires), "127.0.0.1", name, PATIENT) for name in "ab"]
    transport = PgTransport(lambda: QueueGroup(wires, patience_s=0.5), "127.0.0.1", "j")
    for source in sources:
        source.offer(group.view(), quorum_id=3, step=7, joiners=["j"])
    if gone:
        sources[0].close()
    named = [HealEndpoint(name, source.address) for name, source in zip("ab", sources, strict=True)]
    joiner.state.load(transport.fetch(named, joiner.view(), quorum_id=3, step=7))
    assert equal(joiner.loaded, group.values)
    assert [source.fence() for source in sources] == [Fenced.FREE] * 2
    assert len(wires) == 1 + gone


def test_both_sides_were_lost_and_returned():
    """A quorum names them with rejoin counts, which they had not when their transports were made."""
    group, joiner, wires = large(1, chunks=2), large(2, chunks=2), dict[str, Wire]()
    source, transport = (
        PgTransport(lambda: QueueGroup(wires, patience_s=0.5), "127.0.0.1", name) for name in ("a:4f", "j:7c")
    )
    source.offer(group.view(), quorum_id=3, step=7, joiners=["j:7c.1"])
    named = [HealEndpoint("a:4f.2", source.address)]
    joiner.state.load(transport.fetch(named, joiner.view(), quorum_id=3, step=7))
    assert equal(joiner.loaded, group.values) and source.fence() is Fenced.FREE


def test_requests_of_an_older_quorum_are_swept():
    group, joiner = large(1, chunks=2), large(2, chunks=2)
    source, transport = pair(group)
    heal(source, transport, joiner)
    host, _, port = source.address.partition(":")
    store = TCPStore(host, int(port), is_master=False)
    quorums = lambda: {key.split("/")[1] for key in store.list_keys() if "heal/" in key}  # noqa: E731
    assert quorums() == {"3"}
    source.offer(group.view(), quorum_id=4, step=7, joiners=["j"])
    heal(source, transport, joiner, quorum_id=4)
    assert quorums() == {"4"}


def test_a_source_of_another_transport():
    _, transport = pair(large(1, chunks=2))
    named = [HealEndpoint("a", "http://127.0.0.1:1/")]
    with pytest.raises(HealFailed, match="must be host:port/prefix") as failed:
        transport.fetch(named, large(2, chunks=2).view(), quorum_id=3, step=7)
    assert not failed.value.touched and not failed.value.layout_mismatch


def test_another_step_finds_nobody():
    source, transport = pair(large(1, chunks=2), patience_s=0.5)
    with pytest.raises(HealFailed, match="nobody came") as failed:
        heal(source, transport, large(2, chunks=2), step=8)
    assert not failed.value.touched
    source.close()


def test_another_shape_is_refused():
    """A joiner of another shape is refused, and after its notice no commit waits for it."""
    source, transport = pair(large(1, chunks=2), PATIENT)
    with pytest.raises(HealFailed, match="model/weights: the source has") as failed:
        heal(source, transport, large(2, chunks=3))
    assert not failed.value.touched and failed.value.layout_mismatch
    transport.notify_done([HealEndpoint("a", source.address)], quorum_id=3, step=7)
    assert source.fence() is Fenced.FREE


def half_way(config: HealConfig) -> tuple[Group, Group, PgTransport, PgTransport, threading.Event, Future[None]]:
    """A joiner that waits for the gate with 16 chunks in hand."""
    group, joiner = large(1, chunks=100), large(2, chunks=100)
    gate, reached = threading.Event(), threading.Event()

    def spoil(tag: int, data: torch.Tensor) -> None:
        if data.numel() == 16 * CHUNK_BYTES:
            reached.set()
            assert gate.wait(30)

    source, transport = pair(group, config, spoil)
    threads = ThreadPoolExecutor(1)
    healing = threads.submit(heal, source, transport, joiner)
    threads.shutdown(wait=False)
    assert reached.wait(30)
    return group, joiner, source, transport, gate, healing


def test_a_commit_copies_aside_what_is_unsent():
    group, joiner, source, _, gate, healing = half_way(HealConfig(heal_copy_bytes=200 << 20))
    before = group.values["model"]["weights"].clone()
    with ThreadPoolExecutor(1) as threads:
        fencing = threads.submit(lambda: (source.fence(), group.values["model"]["weights"].add_(1))[0])
        gate.set()
        assert fencing.result(30) in (Fenced.COPIED, Fenced.FREE)
    healing.result(30)
    assert equal(joiner.loaded["model"]["weights"], before)


def test_a_reader_slower_than_the_grace_is_left_behind():
    group, joiner, source, _, gate, healing = half_way(QUICK)
    assert source.fence() is Fenced.WITHDRAWN
    group.values["model"]["weights"].add_(1)
    gate.set()
    with pytest.raises(HealFailed, match="a member has left"):
        healing.result(30)
    assert not joiner.loaded


def test_a_fetch_can_be_stopped():
    _, joiner, source, transport, gate, healing = half_way(HealConfig())
    transport.stop("the quorum has failed")
    gate.set()
    with pytest.raises(HealFailed, match=r"^the quorum has failed$") as failed:
        healing.result(30)
    assert failed.value.touched and not joiner.loaded
    source.close()


# ------------------------------------------------------------------------------------------------ gloo


def over_gloo(leaves: bool) -> Any:
    """Rank 0 has the state, rank 1 heals. leaves: the source closes while the joiner has a part."""
    import torch.distributed as dist

    from ft.process_groups.gloo import ProcessGroupGloo

    def states() -> tuple[Group, Group]:
        both = large(1, chunks=100), large(2, chunks=100)
        for fill, group in enumerate(both):
            group.values["model"]["crossed"] = torch.full((300, 400), float(fill)).t()
        return both

    def meet(done: int, total: int) -> None:
        if leaves and not met:
            met.append(done)
            dist.barrier()  # it has a part
            dist.barrier()  # its source is gone

    source, joiner = states()
    met: list[int] = []
    transport = PgTransport(lambda: ProcessGroupGloo(30.0), "127.0.0.1", "aj"[dist.get_rank()])
    address = [transport.address]
    dist.broadcast_object_list(address)
    try:
        if dist.get_rank() == 0:
            transport.offer(source.view(), quorum_id=3, step=7, joiners=["j"])
            if leaves:
                dist.barrier()
                transport.close()
                dist.barrier()
            dist.barrier()
            return transport.fence().name
        try:
            values = transport.fetch([HealEndpoint("a", *address)], joiner.view(), quorum_id=3, step=7, progress=meet)
            return equal(values, source.values)
        except HealFailed as failed:
            return failed.touched, str(failed)[:3]
        finally:
            dist.barrier()
    finally:
        transport.close()


def test_gloo(pool: Pool):
    assert pool.run(2, over_gloo, False) == ["FREE", True]


def test_gloo_whose_source_leaves(pool: Pool):
    _, joiner = pool.run(2, over_gloo, True)
    assert joiner == (True, "a: ")
