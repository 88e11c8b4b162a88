"""The book-keeping of the data: each slot is in exactly one commit, whichever groups die."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft.protocol.messages import UNABLE
from ft.protocol.step import Ledger


def test_a_retry_keeps_the_deal_and_the_dead_groups_slot_becomes_a_hole():
    ledger = Ledger(8)
    ledger.assign(("a", "b", "c"))
    assert ledger.assign(("a", "c")) == {0: "a", 8: "b", 16: "c"}
    contributed, exhausted = ledger.commit((10, 0, 10))
    assert (contributed, exhausted) == ((0, 16), ())
    assert ledger.holes == [8]
    assert ledger.assign(("a", "c")) == {8: "a", 24: "c"}  # holes first, then new positions


def test_with_a_number_of_slots_per_step_they_are_dealt_in_turns():
    ledger = Ledger(8, slots_per_step=4)
    assert ledger.assign(("a", "b", "c")) == {0: "a", 8: "b", 16: "c", 24: "a"}
    ledger.drop()
    assert ledger.assign(("a", "b", "c", "d", "e")) == {0: "a", 8: "b", 16: "c", 24: "d"}  # e stands by
    assert ledger.slot_count(5) == 4


def test_the_slots_of_who_is_gone_go_to_those_with_the_fewest_and_all_others_stay():
    ledger = Ledger(8, slots_per_step=5)
    ledger.assign(("a:1", "b:1", "c:1", "d:1"))
    ledger.reassign(("b:1.2", "c:1", "d:1"))  # b was lost and is back, the same process; a had two
    assert ledger.assignment == {0: "b:1.2", 8: "b:1", 16: "c:1", 24: "d:1", 32: "c:1"}
    before = ledger.assignment_id
    ledger.reassign(("b:1.2", "c:1", "d:1"))
    assert ledger.assignment_id == before
    ledger.reassign(("d:1", "e:1"))
    assert ledger.assignment == {0: "e:1", 8: "d:1", 16: "e:1", 24: "d:1", 32: "d:1"}


def test_without_a_number_of_slots_per_step_nothing_is_dealt_again():
    ledger = Ledger(8)
    ledger.assign(("a", "b"))
    ledger.reassign(("a",))
    assert ledger.assignment == {0: "a", 8: "b"}


def test_more_open_holes_than_a_step_has_slots_come_in_their_order():
    ledger = Ledger(8)
    ledger.assign(("a", "b", "c", "d"))
    ledger.commit((0, 0, 0, 10))
    resumed = Ledger(8, slots_per_step=2)
    resumed.load_state_dict(ledger.state_dict(), keep_assignment=False)
    assert resumed.assign(("a",)) == {0: "a", 8: "a"}
    resumed.commit((10, 10))
    assert resumed.assign(("a",)) == {16: "a", 32: "a"}


@settings(max_examples=50, derandomize=True, deadline=None)
@given(st.lists(st.lists(st.integers(1, 31), min_size=1, max_size=3), max_size=20))
def test_a_steps_slots_do_not_depend_on_who_is_there(history: list[list[int]]):
    """Each step is assigned, and assigned again, to any groups; those that are left have every slot."""
    ledger = Ledger(8, slots_per_step=3)
    for step, attempts in enumerate(history):
        for number, there in enumerate(attempts):
            groups = tuple(f"g{i}:1" for i in range(5) if there >> i & 1)
            if number:
                ledger.reassign(groups)
            else:
                ledger.assign(groups)
            assert list(ledger.assignment) == [8 * (3 * step + place) for place in range(3)]
            assert set(ledger.assignment.values()) <= set(groups)
        ledger.commit([10.0] * 3)
        assert ledger.holes == []


def test_a_deal_that_is_dropped_never_was():
    ledger = Ledger(8)
    before = ledger.state_dict()
    ledger.assign(("a", "b"))
    ledger.drop()
    assert ledger.state_dict() == before


def test_the_third_time_a_slot_is_of_no_use():
    ledger = Ledger(8)
    for time in (1, 2, 3):
        ledger.assign(("a", "b"))
        _, exhausted = ledger.commit((UNABLE, 10))
        assert exhausted == ((0,) if time == 3 else ())
    assert ledger.holes == [0]
    ledger.assign(("a", "b"))
    ledger.commit((UNABLE, 10), skip_unable=True)
    assert (ledger.holes, ledger.skipped_slots, dict(ledger.unable)) == ([], [0], {})


def test_a_checkpoint_does_not_know_how_many_groups_there_were():
    ledger = Ledger(8)
    ledger.assign(("a", "b", "c"))
    ledger.commit((10, 0, 10))
    ledger.assign(("a", "b"))
    resumed = Ledger(8)
    resumed.load_state_dict(json.loads(json.dumps(ledger.state_dict())), keep_assignment=False)
    assert resumed.assign(("x",)) == {8: "x"}
    healed = Ledger(8)
    healed.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert (
        healed.assignment == ledger.assignment and healed.assignment_id == ledger.assignment_id != resumed.assignment_id
    )


def test_another_slot_size_goes_on_at_the_same_sequence():
    ledger = Ledger(8)
    ledger.assign(("a", "b"))
    ledger.commit((0, 10))
    smaller = Ledger(4)
    smaller.load_state_dict(ledger.state_dict())
    assert smaller.assign(("a", "b", "c")) == {0: "a", 4: "b", 16: "c"}
    with pytest.raises(
        ValueError, match="a slot of 3 sequences does not divide the 1 uncommitted slots of 8; nearest: 2 sequences"
    ):
        Ledger(3).load_state_dict(ledger.state_dict())


def test_the_state_of_a_job_without_fault_tolerance_is_taken_up():
    ledger = Ledger(8)
    ledger.load_state_dict({"step": 3, "position": 24})
    assert ledger.assign(("a",)) == {24: "a"}


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 31), st.booleans()), max_size=40))
def test_every_slot_is_in_exactly_one_commit(history: list[tuple[int, int, bool]]):
    """Any numbers of groups, any subsets that contribute, assignments dropped at any time."""
    ledger, done = Ledger(8), []
    for groups, contributes, dropped in history:
        slots = ledger.assign(tuple(f"g{i}" for i in range(groups)))
        if dropped:
            ledger.drop()
            continue
        contributed, _ = ledger.commit([10.0 if contributes >> i & 1 else 0.0 for i in range(len(slots))])
        done += contributed
    assert len(done) == len(set(done))
    assert sorted([*done, *ledger.holes]) == list(range(0, ledger.position, 8))


def test_slots_with_a_position_to_skip_are_left_out():
    ledger = Ledger(8, skip_ranges=[(12, 13), (24, 41)])
    assert ledger.assign(("a", "b")) == {0: "a", 16: "b"}
    ledger.commit((10, 10))
    assert (ledger.newly_skipped, ledger.position) == (((8, 16),), 24)
    assert ledger.assign(("a",)) == {48: "a"}
    ledger.commit((10,))
    assert (ledger.newly_skipped, ledger.holes) == (((24, 48),), [])
    ledger.assign(("a",))
    ledger.commit((10,))
    assert ledger.newly_skipped == ()


def test_a_hole_to_skip_is_left_out():
    before = Ledger(8)
    before.assign(("a", "b", "c"))
    before.commit((0, 10, 0))
    ledger = Ledger(8, skip_ranges=[(3, 4), (24, 30)])
    ledger.load_state_dict(before.state_dict())
    assert ledger.assign(("a", "b")) == {16: "a", 32: "b"}
    ledger.commit((0, 10))
    assert (ledger.newly_skipped, ledger.holes) == (((0, 8), (24, 32)), [16])


@given(
    skip_ranges=st.lists(
        st.tuples(st.integers(0, 200), st.integers(1, 60)).map(lambda span: (span[0], sum(span))), max_size=4
    ),
    tokens=st.lists(st.lists(st.sampled_from([0.0, 10.0]), min_size=1, max_size=4), min_size=1, max_size=12),
)
def test_each_position_is_trained_on_or_left_out_or_open(skip_ranges: list[tuple[int, int]], tokens: list[list[float]]):
    ledger, trained, left_out = Ledger(8, skip_ranges=skip_ranges), list[int](), list[int]()
    for counts in tokens:
        ledger.assign([str(number) for number in range(len(counts))])
        committed, _ = ledger.commit(counts)
        trained += committed
        left_out += [slot for first, end in ledger.newly_skipped for slot in range(first, end, 8)]
    assert sorted([*trained, *left_out, *ledger.holes]) == list(range(0, ledger.position, 8))
    touched = {
        slot for slot in range(0, ledger.position, 8) for first, end in skip_ranges if first < slot + 8 and slot < end
    }
    assert set(left_out) == touched
