"""The behaviour of torchft's servers, tested on torchft's and on ours: the peer itself proves each expectation, which ours then meet.

The lighthouse's rules first, then a group's server: statuses and their words, votes, and (against a lighthouse that answers whatever it
is told to) the part that each rank gets in any quorum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ft import LighthouseServer
from ft.rpc.clients import GroupServerProcess
from ft.rpc.generated import torchft_pb2
from ft.rpc.group_server import Settings
from tests.rpc.peer import Peer, ScriptedLighthouse
from tests.rpc.wire import HEARTBEAT, QUORUM, WAIT_S, Wire, refused, torchft_call

MANAGER = "/torchft.ManagerService/"
FOR_EVER_MS = 600_000
BOTH = pytest.mark.parametrize("whose", ["torchft", "ours"])


# ------------------------------------------------------------------------------------------------ a lighthouse


class Groups:
    """Groups as one lighthouse sees them."""

    def __init__(self, address: str) -> None:
        self.wire = Wire(address)

    def beat(self, *names: str) -> None:
        for name in names:
            self.wire.send(HEARTBEAT, torchft_pb2.LighthouseHeartbeatRequest(replica_id=name).SerializeToString())

    def call(self, name: str, **member: Any) -> Any:
        return self.wire.begin(QUORUM, torchft_call(name, **member))

    def quorum(self, *names: str, shrink_only: str = "", **member: Any) -> tuple[int, list[str]]:
        """Lets all call at once; returns the id and members, which must be the same in all answers."""
        calls = [self.call(name, shrink_only=name == shrink_only, **member) for name in names]
        return self.answer(*calls)

    def answer(self, *calls: Any) -> tuple[int, list[str]]:
        quorums = [torchft_pb2.LighthouseQuorumResponse.FromString(call.result(WAIT_S)).quorum for call in calls]
        [heard] = {(quorum.quorum_id, *(x.replica_id for x in quorum.participants)) for quorum in quorums}
        return heard[0], list(heard[1:])

    def until(self, done: Callable[[], bool], *alive: str) -> None:
        """Sends beats of `alive` until `done`; a test that waits for ever is ended from outside."""
        while not done():
            self.beat(*alive)

    def until_in(self, newcomer: str, *members: str) -> list[Any]:
        """Returns the members' calls of the round that includes the newcomer, which has called: its call may arrive later at first."""
        while True:
            calls = [self.call(name) for name in members]
            if newcomer in self.answer(*calls)[1]:
                return calls


@pytest.fixture
def lighthouse(whose: str, request: pytest.FixtureRequest, cleanup: ExitStack) -> Callable[..., Groups]:
    def build(min_replicas: int, **options: int) -> Groups:
        options = {"join_timeout_ms": FOR_EVER_MS, "quorum_tick_ms": 10, **options}
        if whose == "torchft":
            peer: Peer = request.getfixturevalue("peer")
            groups = Groups(cleanup.enter_context(peer.lighthouse(min_replicas, **options)))
        else:
            server = LighthouseServer("127.0.0.1:0", min_replicas, **options)
            cleanup.callback(server.shutdown)
            groups = Groups(server.address())
        cleanup.callback(groups.wire.close)
        return groups

    return build


@BOTH
def test_a_call_without_a_requester(lighthouse: Callable[..., Groups]):
    assert lighthouse(1).wire.code(QUORUM, b"") == ("INVALID_ARGUMENT", "missing requester")


@BOTH
def test_the_join_timeout_ends_the_wait_for_those_who_are_alive(lighthouse: Callable[..., Groups]):
    groups = lighthouse(1, join_timeout_ms=200)
    groups.beat("a", "b", "silent")
    calls = [groups.call(name) for name in ("b", "a")]
    groups.until(lambda: all(call.done() for call in calls), "silent")
    assert groups.answer(*calls)[1] == ["a", "b"]


@BOTH
def test_whoever_is_alive_is_waited_for(lighthouse: Callable[..., Groups]):
    groups = lighthouse(1)
    groups.beat("a", "b", "c")
    calls = [groups.call(name) for name in ("a", "b")]
    groups.beat("c")
    assert groups.answer(*calls, groups.call("c"))[1] == ["a", "b", "c"]


@BOTH
def test_silence_ends_the_wait_too(lighthouse: Callable[..., Groups]):
    groups = lighthouse(1, heartbeat_timeout_ms=300)
    groups.beat("a", "b", "c")
    calls = [groups.call(name) for name in ("a", "b")]
    groups.until(lambda: all(call.done() for call in calls), "a", "b")
    assert groups.answer(*calls)[1] == ["a", "b"]


@BOTH
def test_half_of_the_living_is_no_quorum(lighthouse: Callable[..., Groups]):
    """The join timeout has long passed: one of two waits until its deadline, two of three do not."""
    groups = lighthouse(1, join_timeout_ms=1)
    groups.beat("b")
    alone = groups.wire.begin(QUORUM, torchft_call("a"), 0.5)
    groups.until(alone.done, "b")
    assert refused(lambda: alone.result(WAIT_S))[0] in ("CANCELLED", "DEADLINE_EXCEEDED")
    calls = [groups.call(name) for name in ("a", "c")]
    groups.until(lambda: all(call.done() for call in calls), "b")
    assert groups.answer(*calls)[1] == ["a", "c"]


@BOTH
def test_previous_members_wait_for_nobody_and_take_newcomers_along(lighthouse: Callable[..., Groups]):
    groups = lighthouse(2)
    first, members = groups.quorum("b", "a")
    assert members == ["a", "b"], "sorted"
    groups.beat("c")
    assert groups.quorum("a", "b") == (first, ["a", "b"]), "c is alive, and has not called"
    newcomer = groups.call("c")
    assert groups.answer(newcomer, *groups.until_in("c", "a", "b")) == (first + 1, ["a", "b", "c"])


@BOTH
def test_ids_grow_with_the_members_or_a_failure_and_with_nothing_else(lighthouse: Callable[..., Groups]):
    groups = lighthouse(1)
    first, _ = groups.quorum("a")
    assert groups.quorum("a", step=9, address="elsewhere", store_address="there:1", world_size=8)[0] == first
    assert groups.quorum("a", commit_failures=1)[0] == first + 1
    assert groups.quorum("a", commit_failures=2)[0] == first + 2
    assert groups.quorum("a")[0] == first + 2


@BOTH
def test_a_shrink_leaves_newcomers_waiting(lighthouse: Callable[..., Groups]):
    groups = lighthouse(2)
    first, _ = groups.quorum("a", "b")
    newcomer = groups.call("c")
    groups.beat("c")
    assert groups.quorum("a", "b", shrink_only="b") == (first, ["a", "b"])
    assert not newcomer.done()
    assert groups.answer(newcomer, *groups.until_in("c", "a", "b")) == (first + 1, ["a", "b", "c"])


# ------------------------------------------------------------------------------------------------ a group's server


@dataclass
class Group:
    """One group's server with two ranks, `me`, and the lighthouse that it asks."""

    wire: Wire
    lighthouse: ScriptedLighthouse

    def quorum(self, init_sync: bool = True, timeout_s: float = WAIT_S) -> list[torchft_pb2.ManagerQuorumResponse]:
        """Returns the answers to the two ranks."""
        requests = [torchft_pb2.ManagerQuorumRequest(group_rank=rank, init_sync=init_sync) for rank in range(2)]
        calls = [self.wire.begin(f"{MANAGER}Quorum", request.SerializeToString(), timeout_s) for request in requests]
        return [torchft_pb2.ManagerQuorumResponse.FromString(call.result(WAIT_S)) for call in calls]

    def votes(self, *wanted: bool, step: int = 0) -> list[bool]:
        requests = [
            torchft_pb2.ShouldCommitRequest(group_rank=rank, should_commit=yes, step=step)
            for rank, yes in enumerate(wanted)
        ]
        calls = [self.wire.begin(f"{MANAGER}ShouldCommit", request.SerializeToString()) for request in requests]
        return [torchft_pb2.ShouldCommitResponse.FromString(call.result(WAIT_S)).should_commit for call in calls]

    def metadata(self, rank: int) -> tuple[str, str]:
        return self.wire.code(f"{MANAGER}CheckpointMetadata", _metadata_of(rank))


@contextmanager
def one_group(whose: str, request: pytest.FixtureRequest, retries: int = 0) -> Iterator[Group]:
    with ExitStack() as stack:
        lighthouse = ScriptedLighthouse()
        stack.callback(lighthouse.close)
        if whose == "torchft":
            peer: Peer = request.getfixturevalue("peer")
            address = stack.enter_context(peer.group("me", lighthouse.address, retries=retries))
        else:
            ours = GroupServerProcess(
                Settings("me", 2, lighthouse.address, "me:1", wire="torchft", quorum_retries=retries)
            )
            stack.callback(ours.close)
            address = ours.address
        wire = Wire(address)
        stack.callback(wire.close)
        yield Group(wire, lighthouse)


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest) -> Iterator[dict[str, Group]]:
    with one_group("torchft", request) as theirs, one_group("ours", request) as ours:
        yield {"torchft": theirs, "ours": ours}


@pytest.fixture
def group(whose: str, both: dict[str, Group]) -> Group:
    return both[whose]


@BOTH
def test_what_a_groups_server_refuses(group: Group):
    call, asked = group.wire.channel.unary_unary(f"{MANAGER}Quorum"), torchft_pb2.ManagerQuorumRequest()
    assert refused(lambda: call(asked.SerializeToString())) == ("INVALID_ARGUMENT", "missing timeout")
    assert group.metadata(7) == ("INVALID_ARGUMENT", "rank not found")
    group.lighthouse.quorum = _quorum(("another", 0))
    assert refused(group.quorum)[0] == "NOT_FOUND"


@BOTH
def test_the_state_of_a_rank_is_where_it_last_said(group: Group):
    group.lighthouse.quorum = _quorum(("me", 0))
    for where in ("here", "there"):
        requests = [torchft_pb2.ManagerQuorumRequest(group_rank=r, checkpoint_metadata=f"{where} {r}") for r in (0, 1)]
        calls = [group.wire.begin(f"{MANAGER}Quorum", request.SerializeToString()) for request in requests]
        for call in calls:
            call.result(WAIT_S)
        answers = [group.wire.send(f"{MANAGER}CheckpointMetadata", _metadata_of(rank)) for rank in (0, 1)]
        assert [torchft_pb2.CheckpointMetadataResponse.FromString(x).checkpoint_metadata for x in answers] == [
            f"{where} 0",
            f"{where} 1",
        ]


@BOTH
def test_all_ranks_hear_the_and_of_their_votes(group: Group):
    assert group.votes(True, False) == [False, False]
    assert group.votes(True, True) == [True, True]
    assert group.votes(False, False, step=1) == [False, False]
    assert group.votes(True, True, step=2) == [True, True]


@BOTH
def test_a_lighthouse_that_fails_is_asked_again_as_often_as_is_said(whose: str, request: pytest.FixtureRequest):
    with one_group(whose, request, retries=1) as group:
        group.lighthouse.quorum, group.lighthouse.failures = _quorum(("me", 3)), 1
        assert [reply.max_step for reply in group.quorum(timeout_s=2.0)] == [3, 3]


@BOTH
def test_ranks_are_told_where_no_try_is_left(whose: str, group: Group):
    """The peer lets the ranks wait for their deadline; ours answers at once."""
    group.lighthouse.failures = 1
    limit_s, codes = (WAIT_S, ("UNAVAILABLE",)) if whose == "ours" else (0.5, ("CANCELLED", "DEADLINE_EXCEEDED"))
    assert refused(lambda: group.quorum(timeout_s=limit_s))[0] in codes
    assert group.lighthouse.failures == 0


@BOTH
def test_a_groups_server_beats_by_itself(group: Group):
    assert {group.lighthouse.beats.get(timeout=WAIT_S) for _ in range(3)} == {"me"}


@st.composite
def quorums(draw: st.DrawFn) -> Any:
    """One to five members, `me` in any place, with few different steps: ties are what matters."""
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    names = [*(f"a{i}" for i in range(before)), "me", *(f"z{i}" for i in range(after))]
    return _quorum(*((name, draw(st.integers(0, 2)), draw(st.integers(0, 3))) for name in names))


def _quorum(*members: Any) -> Any:
    """(name, step, commit_failures)"""
    return torchft_pb2.Quorum(
        quorum_id=7,
        participants=[
            torchft_pb2.QuorumMember(
                replica_id=name,
                address=f"http://{name}:1",
                store_address=f"{name}:2",
                step=step,
                world_size=2,
                commit_failures=failures[0] if failures else 0,
                reconfigure_handles=[f"{name} 0", f"{name} 1"],
            )
            for name, step, *failures in members
        ],
    )


def _metadata_of(rank: int) -> bytes:
    return bytes(torchft_pb2.CheckpointMetadataRequest(rank=rank).SerializeToString())


@given(quorum=quorums(), init_sync=st.booleans())
@example(_quorum(("a0", 0), ("me", 0)), True)  # the first step
@example(_quorum(("a0", 0), ("me", 0)), False)
@example(_quorum(("a0", 0), ("a1", 1), ("me", 0), ("z0", 1), ("z1", 0)), True)  # three heal from two
@example(_quorum(("a0", 1, 2), ("me", 1, 0)), True)  # failures
@settings(max_examples=40, deadline=None, derandomize=True)
def test_each_rank_gets_the_same_part_in_any_quorum(both: dict[str, Group], quorum: Any, init_sync: bool):
    """Field by field; but for one that we do otherwise, on purpose: at the first step the peer lets the ranks of one group heal from
    different groups or not at all, where ours go together, as rank 0 does."""
    theirs, ours = both["torchft"], both["ours"]
    theirs.lighthouse.quorum = ours.lighthouse.quorum = quorum
    expected, got = theirs.quorum(init_sync), ours.quorum(init_sync)
    assert got[0] == expected[0]
    if init_sync and expected[0].max_step == 0:
        assert got[1].heal == got[0].heal
        for reply in (got[1], expected[1]):
            for name in (
                "heal",
                "recover_src_manager_address",
                "recover_src_replica_rank",
                "recover_dst_replica_ranks",
            ):
                reply.ClearField(name)
    assert got[1] == expected[1]
