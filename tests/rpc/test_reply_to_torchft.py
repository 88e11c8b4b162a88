"""The part of each rank in a quorum of torchft's: the tests of compute_quorum_results in torchft's manager.rs."""

from __future__ import annotations

from typing import Any

from ft.compat.group import torchft_reply
from ft.protocol.messages import Member, Quorum
from tests.protocol.test_plan import quorum


def optional(reply: Any, field: str) -> int | None:
    return getattr(reply, field) if reply.HasField(field) else None


def test_peer_first_step():
    """The first reference member is the source, for every rank of the others; stores are spread over the groups."""
    for group_rank, store in ((0, "store-a"), (1, "store-b")):
        a = torchft_reply(quorum(0, 0), "a:1", group_rank)
        b = torchft_reply(quorum(0, 0), "b:1", group_rank)
        assert not a.heal and list(a.recover_dst_replica_ranks) == [1]
        assert optional(a, "recover_src_replica_rank") is None
        assert (b.heal, optional(b, "recover_src_replica_rank"), b.recover_src_manager_address) == (True, 0, "http://a")
        assert a.store_address == b.store_address == store
        assert (a.replica_rank, b.replica_rank, a.replica_world_size, optional(b, "max_replica_rank")) == (0, 1, 2, 1)


def test_peer_recovery_of_five_with_an_offset_by_rank():
    """Members at steps 0 1 0 1 0: b and d are whole, a c e heal from them in turns, each rank one further."""
    five = quorum(0, 1, 0, 1, 0, quorum_id=7)
    sources = [[torchft_reply(five, f"{name}:1", rank).recover_src_replica_rank for name in "ace"] for rank in (0, 1)]
    assert sources == [[1, 3, 1], [3, 1, 3]]
    b = torchft_reply(five, "b:1", 0)
    assert not b.heal and tuple(b.recover_dst_replica_ranks) == (0, 4)
    assert (b.max_step, b.max_replica_rank, b.max_world_size) == (1, 0, 2)
    assert tuple(torchft_reply(five, "d:1", 1).recover_dst_replica_ranks) == (0, 4)
    assert optional(torchft_reply(five, "a:1", 0), "max_replica_rank") is None


def test_peer_skip_init_sync():
    assert not torchft_reply(quorum(0, 0), "b:1", 0, init_sync=False).heal
    assert torchft_reply(quorum(0, 1), "a:1", 0, init_sync=False).heal


def test_peer_commit_failures_and_handles():
    members = tuple(
        Member(f"{n}:1", commit_failures=f, reconfigure_handles=(f"{n}0", f"{n}1")) for n, f in (("a", 0), ("b", 2))
    )
    reply = torchft_reply(Quorum(1, members), "a:1", 1)
    assert reply.commit_failures == 2
    assert (list(reply.replica_ids), list(reply.reconfigure_handles)) == (["a:1", "b:1"], ["a1", "b1"])
