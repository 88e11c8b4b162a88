"""The part of each rank of our own groups in a quorum."""

from __future__ import annotations

from typing import Any

from ft.protocol.group import plan
from ft.protocol.messages import VOID, Member, Quorum
from ft.protocol.rules import reference_state


def quorum(*steps: int, quorum_id: int = 1, **fields: Any) -> Quorum:
    """Members a, b, c ... at `steps`; commit ids follow from the step."""
    members = tuple(
        Member(f"{name}:1", f"http://{name}", f"store-{name}", step, commit_id=f"c{step}", **fields)
        for name, step in zip("abcdefghij", steps, strict=False)
    )
    return Quorum(quorum_id, members, reference_state(members) or (0, 0, ""), "job")


def test_healing_is_a_role_of_a_group_and_the_store_is_spread():
    three = quorum(5, 5, 4, quorum_id=2)
    parts = [plan(three, "c:1", rank) for rank in range(4)]
    assert all(part.heal for part in parts)
    assert {part.sources for part in parts} == {parts[0].sources}
    assert [part.store_address for part in parts] == ["store-a", "store-b"] * 2
    assert [plan(three, f"{name}:1", 0).recover_dst_replica_ranks for name in "abc"] == [(2,), (2,), ()]
    assert parts[0].participants == ("a:1", "b:1")


def test_another_commit_id_heals_at_an_equal_step():
    """b committed step 5 in quorum 3, a and c in quorum 4: the later quorum is what the job went on with."""
    members = tuple(
        Member(f"{name}:1", store_address="s", step=5, commit_id=f"c{made}", commit_quorum_id=made)
        for name, made in (("a", 4), ("b", 3), ("c", 4))
    )
    five = Quorum(5, members, reference_state(members) or (0, 0, ""))
    assert five.reference == (5, 4, "c4")
    assert [plan(five, f"{name}:1", 0).heal for name in "abc"] == [False, True, False]


def test_the_quorum_says_what_the_reference_is():
    """A further state that the lighthouse did not choose heals too."""
    members = (Member("a:1", store_address="s", step=3, commit_id="c3"), Member("z:1", step=9, commit_id="c9"))
    chosen = Quorum(2, members, (3, 0, "c3"))
    assert [plan(chosen, i, 0).heal for i in chosen.ids] == [False, True]


def test_a_void_group_is_never_a_source():
    part = plan(quorum(4, VOID, 4), "b:1", 0)
    assert part.heal and [source.replica_rank for source in part.sources] == [0, 2]


def test_two_sources_at_most_and_not_the_writer_if_there_is_another():
    members = (
        *(Member(f"{n}:1", store_address="s", step=1, commit_id="c", writes_checkpoint=n == "a") for n in "abcd"),
        *(Member(f"{n}:1") for n in "xy"),
    )
    six = Quorum(1, members, (1, 0, "c"))
    assert [[s.replica_rank for s in plan(six, f"{n}:1", 0).sources] for n in "xy"] == [[1, 2], [2, 3]]
    alone = Quorum(1, (members[0], members[4]), (1, 0, "c"))
    assert [s.replica_rank for s in plan(alone, "x:1", 0).sources] == [0]


def test_at_step_0_with_init_sync_the_first_reference_member_is_the_source_for_every_rank():
    first = quorum(0, 0, 0, init_sync=True)
    assert [[plan(first, f"{name}:1", rank).heal for name in "abc"] for rank in (0, 1)] == [[False, True, True]] * 2
    for other in (quorum(0, 0), quorum(3, 3, init_sync=True)):
        assert [plan(other, f"{name}:1", 0).heal for name in "ab"] == [False, False]


def test_spares_are_dealt_nothing():
    """The peer's FIXED_WITH_SPARES."""
    part = plan(quorum(1, 1, 1), "c:1", 0, max_active_groups=2)
    assert part.participants == ("a:1", "b:1") and not part.heal


def test_holders_of_different_deals_make_a_new_one():
    same = quorum(1, 1, assigned=3, assignment_id="x")
    assert plan(same, "a:1", 0).assigned == 3
    mixed = Quorum(1, (same.members[0], Member("b:1", step=1, commit_id="c1")), same.reference)
    assert plan(mixed, "a:1", 0).assigned == 0
