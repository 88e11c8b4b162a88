"""Our Manager under torchft's lighthouse: its wire carries neither streams nor states, so a quorum is asked for before each step."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from typing import Any

import pytest

from ft.compat.group import QuorumIds, decode_quorum, encode_member
from ft.manager import GroupEnded, Manager
from ft.protocol import messages as m
from ft.rpc.access import Access
from ft.rpc.clients import is_torchft_lighthouse
from tests.ft.groups import Job, Rank
from tests.rpc.peer import Peer


def test_two_groups_train_one_dies_and_comes_again(peer: Peer):
    def dies(rank: Rank, step: int) -> None:
        if len(rank.together_commits) == 3:
            rank.kill()

    # as train.py: no group has a state before it has looked for a checkpoint
    make = partial(Manager, restore=lambda: None)
    same: dict[str, Any] = {"together": 2, "every_step": True, "options": {"init_sync": True}, "make": make}
    lighthouse = peer.lighthouse(1, join_timeout_ms=100, heartbeat_timeout_ms=2000)
    with lighthouse as address, closing(Job(address)) as job:
        a = job.group("a", steps=12, **same)[0]
        b = job.group("b", steps=12, at=dies, **same)[0]
        assert isinstance(b.join().error, GroupEnded)
        assert a.join().error is None
        assert a.commits[-1][1] == 1
        a, b = (job.group(name, steps=4, **same)[0] for name in "ab")
        assert a.join().error is None and b.join().error is None
        assert a.seen_of(m.LoadState) or b.seen_of(m.LoadState)


def test_a_lighthouse_is_known_by_what_it_answers(peer: Peer):
    with peer.lighthouse(1) as address:
        assert is_torchft_lighthouse(address, Access())
        rank = Job(address).group("a", steps=1)[0].join()
        assert isinstance(rank.error, ValueError) and 'fault_tolerance.quorum = "on_change"' in str(rank.error)


def test_what_torchft_has_no_field_for_travels_as_data():
    far = m.Member(
        "b:1", "http://b", "b:1", 7, commit_id="x", commit_quorum_id=3, assigned=2, assignment_id="d", init_sync=True
    )
    near = m.Member("a:1", "http://a", "a:1", 6)
    quorum, _ = decode_quorum(m.Quorum(4, (encode_member(far), encode_member(near))))
    assert quorum == m.Quorum(4, (near, far), (7, 3, "x"), "torchft")


def test_ids_of_quorums_grow_while_a_lighthouse_is_restarted_and_counts_from_one():
    """Ids are the same in all members, also in one that knew no quorum, as a smaller or equal id would count as over, or as this one."""
    ids: dict[str, QuorumIds] = {}

    def answered(lighthouse_id: int, members: str, failures: int = 0) -> int:
        sent = [encode_member(m.Member(f"{x}:1", commit_failures=failures), ids.get(x, QuorumIds())) for x in members]
        quorum, found = decode_quorum(m.Quorum(lighthouse_id, tuple(sent)))
        ids.update(dict.fromkeys(members, found))
        return quorum.quorum_id

    assert [answered(6, "ab"), answered(7, "abc"), answered(7, "abc"), answered(8, "abc", failures=1)] == [6, 7, 7, 8]
    assert [answered(1, "ab"), answered(2, "abc"), answered(2, "abc")] == [9, 10, 10], "a restart; c knows only 8"
    assert [answered(2, "bcd"), answered(3, "bcd")] == [12, 13], "the same id by chance, of other members"
    assert [answered(3, "bcd", failures=1), answered(4, "abcd")] == [16, 17], "the same id, after a failure"


@pytest.mark.parametrize("data", ["", "{}", '{"pharos": 3}', '{"pharos": {"commit_id": 1}}', "[1]", "[" * 50_000])
def test_a_quorum_with_torchfts_groups_is_refused(data: str):
    with pytest.raises(ValueError, match="b:1 is not a group of Pharos"):
        decode_quorum(m.Quorum(4, (m.Member("b:1", data=data),)))


@pytest.mark.parametrize(
    "said",
    [
        {"ids": (0, -1, "")},
        {"ids": (0, float("inf"), "")},
        {"ids": (0, 1)},
        {"assigned": 10**30},
        {"commit_quorum_id": -5},
        {"assignment_id": "x" * 600},
        {"commit_id": "\n"},
    ],
)
def test_what_no_honest_group_says_of_itself_is_refused(said: dict[str, Any]):
    """A rank could not read the part that is made of it, and would end."""
    ours = json.loads(encode_member(m.Member("b:1")).data)
    ours["pharos"].update(said)
    with pytest.raises(ValueError, match=r".") as caught:
        decode_quorum(m.Quorum(4, (m.Member("b:1", data=json.dumps(ours)),)))
    assert "is not a group of Pharos" not in str(caught.value)
