"""The lighthouse over the wire, on loopback: what it answers whom, and that nothing it receives stops it."""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ft import LighthouseClient, LighthouseServer
from ft.protocol import messages as m
from ft.rpc import codec, state_file
from ft.rpc.generated import pharos_pb2, torchft_pb2
from tests.rpc.wire import (
    HEARTBEAT,
    OURS,
    QUORUM,
    WAIT_S,
    Stream,
    Wire,
    pharos_call,
    quorum_of,
    refused,
    torchft_call,
)

LEAVE = "/pharos.Lighthouse/Leave"
SOON = timedelta(seconds=WAIT_S)


class House:
    """A lighthouse and connections to it, closed together."""

    def __init__(self, **options: Any) -> None:
        self.server = LighthouseServer("127.0.0.1:0", **{"min_replicas": 1, "quorum_tick_ms": 10, **options})
        self._wires: list[Wire] = []

    def wire(self) -> Wire:
        self._wires.append(Wire(self.server.address()))
        return self._wires[-1]

    def close(self) -> None:
        for wire in self._wires:
            wire.close()
        self.server.shutdown()


@pytest.fixture
def house() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(closing(House(**options)))


# ------------------------------------------------------------------------------------------------ torchft's wire


def test_a_client_of_torchft_gets_a_quorum_with_its_data(house: Any):
    client = LighthouseClient(house().server.address(), SOON)
    quorum = client.quorum("a", SOON, address="localhost", store_address="localhost:1", step=1, data={"my": 1234})
    [member] = quorum.participants
    assert (member.replica_id, member.step, member.data, member.world_size) == ("a", 1, {"my": 1234}, 1)
    assert quorum.created.seconds > 1_700_000_000
    assert client.quorum("a", SOON).quorum_id == quorum.quorum_id, "the same members keep their generation"
    client.heartbeat("a")
    client.close()


def test_a_deadline_is_told_in_the_words_that_torchft_looks_for(house: Any):
    wire = house(min_replicas=2).wire()
    assert wire.code(QUORUM, torchft_call("a"), 2.0) == ("CANCELLED", "Timeout expired")
    # who stopped waiting is no ghost: the next two are a quorum without it
    calls = [wire.begin(QUORUM, torchft_call(name)) for name in ("b", "c")]
    quorum = torchft_pb2.LighthouseQuorumResponse.FromString(calls[0].result(WAIT_S)).quorum
    assert [x.replica_id for x in quorum.participants] == ["b", "c"]


# ------------------------------------------------------------------------------------------------ ours


def test_a_call_that_its_caller_waits_for_no_more_is_forgotten(house: Any):
    wire = house(min_replicas=2).wire()
    assert wire.code(OURS, pharos_call(m.Call(m.Member("a:1"))), 0.3)[0] == "DEADLINE_EXCEEDED"
    calls = [wire.pharos(m.Call(m.Member(f"{name}:1"))) for name in "bc"]
    assert quorum_of(calls[0]).ids == ("b:1", "c:1")


def _member(replica_id: str, **fields: Any) -> m.Member:
    return replace(m.Member(replica_id, f"http://{replica_id.partition(':')[0]}:1", "h:1"), **fields)


@pytest.mark.parametrize(("timeout_ms", "answered"), [(5000, [100.0, 103.0, 7.0]), (3000, [100.0, 102.0, 104.0, 7.0])])
def test_of_beats_a_second_apart_some_are_answered(house: Any, timeout_ms: int, answered: list[float]):
    """A group goes by how old its newest answer is, against half of takeover_s and the heartbeat timeout; its clock may have begun anew."""
    stream = Stream(house(heartbeat_timeout_ms=timeout_ms).wire(), "a:1")
    for sent_s in (100.0, 101.0, 102.0, 103.0, 104.0, 7.0):
        stream.send(report=pharos_pb2.Report(sent_s=sent_s))
    assert [stream.next("beat_answered") for _ in answered] == answered
    stream.close()


def test_a_newer_stream_takes_the_place_of_the_older(house: Any):
    one = house()
    old = Stream(one.wire(), "a:1")
    old.beat()
    new = Stream(one.wire(), "a:1")
    assert list(old.call) == [], "the old one ends"
    new.beat()
    assert quorum_of(one.wire().pharos(m.Call(m.Member("a:1")))).ids == ("a:1",), "and nobody was lost"


FINGERPRINT, OTHER_FINGERPRINT = (("layout", "1"),), (("layout", "2"),)
ODD = ("FAILED_PRECONDITION", "b:1 differs from the job in layout")


def test_ids_and_the_layout_go_on_after_a_restart(house: Any, tmp_path: Path):
    state = tmp_path / "state.json"
    one = house(state=state)
    first = quorum_of(one.wire().pharos(m.Call(m.Member("a:1"), fingerprint=FINGERPRINT)))
    one.close()
    two = house(state=state)
    stream = Stream(two.wire(), "a:1", first)
    stream.beat()
    assert two.wire().code(OURS, pharos_call(m.Call(m.Member("b:1"), fingerprint=OTHER_FINGERPRINT))) == ODD
    call = m.Call(m.Member("a:1", step=0), known=first.quorum_id, failed=True)
    second = quorum_of(two.wire().pharos(call))
    assert second.quorum_id > first.quorum_id and second.epoch == first.epoch


def test_what_was_written_until_the_state_is_taken_over_counts(tmp_path: Path):
    """The one before is at work while this one starts."""
    path = tmp_path / "state.json"

    class Late(state_file.StateFileWriter):
        @staticmethod
        def acquire_file(path: Path, owner: str = "") -> str:
            state_file.write(path, m.PersistentState("the epoch", last_id=7))
            return state_file.acquire(path, owner)

    state_writer, saved = Late.begin(path, recover=False)
    assert saved and (saved.last_id, saved.epoch) == (7, "the epoch")
    asyncio.run(state_writer.close())


def test_without_a_state_file_the_groups_tell_what_they_know(house: Any):
    known = m.Quorum(
        41, (_member("a:1", step=7, commit_quorum_id=40, commit_id="c"),), (7, 40, "c"), "the epoch", FINGERPRINT
    )
    one = house()
    stream = Stream(one.wire(), "a:1", known, settled=7)
    assert stream.next("send_quorum")
    stream.send(quorum=codec.to_message(known))
    stream.beat(step=7)
    assert one.wire().code(OURS, pharos_call(m.Call(m.Member("b:1"), fingerprint=OTHER_FINGERPRINT))) == ODD
    call = m.Call(_member("a:1", step=7, commit_quorum_id=40, commit_id="c"), known=41, failed=True)
    quorum = quorum_of(one.wire().pharos(call))
    assert (quorum.quorum_id, quorum.epoch) == (1_000_042, "the epoch")  # newer ones may have been issued


def test_a_running_job_goes_on_though_a_newcomer_was_faster(house: Any, caplog: pytest.LogCaptureFixture):
    """The ids say nothing of it: both jobs are in their first quorum."""
    known = m.Quorum(1, (_member("a:1"),), (0, 0, ""), "the epoch", FINGERPRINT)
    one = house()
    assert quorum_of(one.wire().pharos(m.Call(m.Member("c:1"), fingerprint=FINGERPRINT))).quorum_id == 1
    call = m.Call(_member("a:1", step=7, commit_quorum_id=1, commit_id="c"), known=1, epoch="the epoch")
    assert one.wire().code(OURS, pharos_call(call))[0] == "FAILED_PRECONDITION"
    stream = Stream(one.wire(), "a:1", known, settled=6)
    assert stream.next("send_quorum")
    stream.send(quorum=codec.to_message(known))
    stream.beat(step=7, commit_quorum_id=1)
    assert "without the state file of a running job, which continues; quorum 1, formed since then" in caplog.text
    quorum = quorum_of(one.wire().pharos(call))
    assert (quorum.epoch, quorum.reference, quorum.ids) == ("the epoch", (7, 1, "c"), ("a:1",))
    other = Stream(one.wire(), "b:1", replace(known, epoch="third"), settled=9)
    other.send(quorum=codec.to_message(replace(known, epoch="third")))
    assert "has no state of epoch third" in getattr(other.notice(), "reason", "")
    assert "Members whose state is further wait, and log the remedy" in caplog.text


def test_a_lost_group_hears_it_on_its_stream_and_its_call(house: Any):
    one = house()
    quorum_of(one.wire().pharos(m.Call(m.Member("a:1"))))
    one.wire().send("/pharos.Lighthouse/Evict", pharos_pb2.Evict(replica_id="a:1").SerializeToString())
    assert one.wire().code(OURS, pharos_call(m.Call(m.Member("a:1")))) == ("ABORTED", "an operator evicted it")
    refused = Stream(one.wire(), "a:1").next("refused")
    assert (refused.replica_id, refused.code) == ("a:1", "LOST")


def test_refusals_have_a_status_and_a_reason(house: Any):
    wire = house().wire()
    stream = Stream(wire, "a:1")
    stream.beat()
    quorum_of(wire.pharos(m.Call(m.Member("a:1"))))
    code, reason = wire.code(OURS, pharos_call(m.Call(m.Member("a:2"))))
    assert code == "ALREADY_EXISTS" and reason.startswith('two groups with the name "a": a:1')


def test_a_reason_is_cut_where_it_would_not_fit_into_a_status(house: Any):
    """gRPC gives headers and trailers 16 KiB; beyond it the client would see another status than the one that was meant."""
    wire = house().wire()
    fingerprints = [tuple((f"{i} {'x' * 500}", digest) for i in range(64)) for digest in "12"]
    quorum_of(wire.pharos(m.Call(m.Member("a:1"), fingerprint=fingerprints[0])))
    code, reason = wire.code(OURS, pharos_call(m.Call(m.Member("b:1"), fingerprint=fingerprints[1])))
    assert (code, len(reason)) == ("FAILED_PRECONDITION", 1000) and reason.startswith(
        "b:1 differs from the job in 0 xxx"
    )


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("path", "data", "said"),
    [
        (QUORUM, b"", "missing requester"),
        (QUORUM, torchft_call(""), "empty"),
        (QUORUM, torchft_call("a", step=1 << 50), "step 1125899906842624"),
        (QUORUM, torchft_call("a", step=-2), "step -2"),
        (QUORUM, torchft_call("a", world_size=1 << 30), "world size 1073741824"),
        (QUORUM, torchft_call("a", address="x" * 600), "longer than 512"),
        (QUORUM, torchft_call("a\n"), "not printable"),
        (QUORUM, torchft_call("a", data="x" * 100_000), "data of more than"),
        (HEARTBEAT, b"", "empty"),
        (OURS, pharos_call(m.Call(m.Member("a:1", world_size=0))), "world size 0"),
        (OURS, pharos_call(m.Call(m.Member("a:1", commit_quorum_id=-1))), "quorum -1"),
        (OURS, pharos_call(m.Call(m.Member("a:1"), known=1 << 50)), "step 0"),
        (OURS, pharos_call(m.Call(m.Member("a:1"), known=1 << 40)), "a lighthouse accepts ids up to"),
        (OURS, pharos_call(m.Call(m.Member("a:1", commit_quorum_id=1 << 40))), "a lighthouse accepts ids up to"),
        (OURS, pharos_call(m.Call(m.Member("a:1", assigned=1 << 50))), "step or count"),
        (OURS, pharos_call(m.Call(m.Member("a:1"), fingerprint=(("x", "y"),) * 257)), "digests"),
        (OURS, pharos_call(m.Call(m.Member("a:1"), fingerprint=(("x", "y" * 600),))), "fingerprint: 600 characters"),
        (
            OURS,
            pharos_call(m.Call(m.Member("a:1", assignment_id="x" * 600))),
            "assignment_id: 600 characters, legal is up to 512",
        ),
        (OURS, pharos_call(m.Call(m.Member("a:1"), blame=("x" * 600,))), "blame: 600 characters"),
        (LEAVE, pharos_pb2.Leave(replica_id="a:1", reason="x" * 5000).SerializeToString(), "reason: 5000 characters"),
    ],
)
def test_an_absurd_claim_is_refused_with_its_reason(shared: House, path: str, data: bytes, said: str):
    code, reason = shared.wire().code(path, data)
    assert code == "INVALID_ARGUMENT" and said in reason


@pytest.fixture(scope="module")
def shared() -> Iterator[House]:
    with closing(House()) as one:
        yield one


UP = pharos_pb2.Up


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ([b"\xff"], "not a pharos.Up"),
        ([UP(report=pharos_pb2.Report(step=1))], "an id is empty, or an id or address"),
        ([UP(hello=pharos_pb2.Hello(replica_id="z:1", settled=1 << 60))], "a step or count"),
        ([UP(hello=pharos_pb2.Hello(replica_id="z:1", quorum_id=1 << 40))], "a lighthouse accepts ids up to"),
        ([UP(hello=pharos_pb2.Hello(replica_id="z:1", quorum_id=9)), b"\x12\x02\x08\x09"], "quorum 9: its 0 members"),
        ([UP(hello=pharos_pb2.Hello(replica_id="z:1")), UP(report=pharos_pb2.Report(phase="x" * 600))], "phase: 600"),
        ([UP(hello=pharos_pb2.Hello(replica_id="z:1")), UP(report=pharos_pb2.Report(wall_s=math.nan))], "wall_s = nan"),
        (
            [UP(hello=pharos_pb2.Hello(replica_id="z:1")), UP(report=pharos_pb2.Report(settled=1 << 50))],
            "settled = 1125",
        ),
        ([UP(hello=pharos_pb2.Hello(replica_id="z:1")), UP()], "a message after the hello must be a report"),
    ],
)
def test_a_stream_of_nonsense_ends_with_the_reason(shared: House, sent: list[Any], said: str):
    data = [one if isinstance(one, bytes) else one.SerializeToString() for one in sent]
    call = shared.wire().channel.stream_stream("/pharos.Lighthouse/Watch")(iter(data), timeout=WAIT_S)
    code, reason = refused(lambda: list(call))
    assert code == "INVALID_ARGUMENT" and said in reason


# ------------------------------------------------------------------------------------------------ who may speak


def test_without_a_token_only_this_machine_reaches_it():
    server = LighthouseServer("0.0.0.0:0", 1)
    port = int(server.address().rpartition(":")[2])
    with socket.socket() as probe:  # free on every other address
        probe.bind(("127.0.0.2", port))
    server.shutdown()


def test_who_waits_for_the_disk_is_told_so(house: Any, tmp_path: Path):
    """The caller is told of the disk; otherwise it would read that all had called, for as long as the disk is full."""
    folder = tmp_path / "state"
    folder.mkdir()
    wire = house(state=folder / "state.json").wire()
    shutil.rmtree(folder)
    stream = Stream(wire, "a:1")
    answer = wire.pharos(m.Call(m.Member("a:1"), number=1))
    told = [""]
    while "No such file" not in told[-1]:
        stream.send(report=pharos_pb2.Report(sent_s=60.0 * len(told)))
        told.append(told[-1])
        for data in stream.call:
            down = pharos_pb2.Down.FromString(data)
            told[-1] = down.waits or told[-1]
            if down.WhichOneof("down") == "beat_answered":
                break
    assert told[-1].startswith("the quorum has formed; its answer waits until the lighthouse's state file is written: ")
    folder.mkdir()
    assert pharos_pb2.QuorumReply.FromString(answer.result(WAIT_S)).quorum.quorum_id == 1
    stream.close()
