"""What a group gives to a step: it cannot use what it was dealt, is dealt more when another dies, or is dealt nothing."""

from __future__ import annotations

from ft.protocol import messages as m
from ft.protocol.messages import UNABLE, Computed, ReduceFailed
from tests.protocol.rank import Rank, names, only, part

# ------------------------------------------------------------------------------------------------ a group that cannot


def test_not_a_number_is_another_attempt_on_the_same_generation():
    rank = Rank()
    rank.enter()
    unable = only(m.LaunchTail, rank.see(Computed((10.0,), float("nan"), able=False)))
    assert (unable.tail, unable.zeros) == ((0.0, 0.0, 0.0, 0.0, 0.0), True)
    assert only(m.CastVote, rank.reduced(0, 10, 25, 1, 0)).vote.verdict == "again"
    assert rank.outcome("commit", "again") == [m.LaunchTail(1, 1, 0, (UNABLE, 0.0, 0.0, 1.0, 0.0), True, False)]
    rank.reduced(UNABLE, 10, 25, 2, 0)
    commit = only(m.CommitStep, rank.outcome("commit"))
    assert (commit.divisor, commit.contributors, commit.mean_loss) == (10, (1,), 2.5)
    assert rank.machine.ledger.pending == {0: "a:1", 16: "b:1"}  # the hole comes first


def test_the_others_reduce_their_kept_gradients_again():
    rank = Rank()
    rank.enter()
    rank.see(Computed((10.0,), 25.0))
    rank.reduced(10, 0, 25, 1, 0)
    [again] = rank.outcome("commit", "again")
    assert again == m.LaunchTail(1, 1, 0, (10.0, 0.0, 25.0, 1.0, 0.0), False, True)


def test_three_in_a_row_stop():
    rank = Rank()
    rank.enter()
    rank.see(Computed((10.0,), 25.0))
    for _ in range(3):
        rank.reduced(10, 0, 25, 1, 0)
        effects = rank.outcome("commit", "again")
    stop = only(m.Stop, effects)
    assert stop.reason == "step 0: 3 attempts in a row, and each time some group was unable" and stop.slots == (0, 8)


def test_a_slot_without_a_target_is_a_slot_of_no_use():
    rank = Rank()
    rank.enter()
    assert only(m.LaunchTail, rank.see(Computed((0.0,), 0.0))).tail[-2] == 0


def test_a_step_in_which_nobody_has_anything_to_learn_from_stops():
    rank = Rank()
    rank.enter()
    rank.see(Computed((10.0,), 25.0, able=False))
    rank.reduced(0, 0, 0, 0, 0)
    rank.outcome("commit", "again")
    rank.reduced(UNABLE, UNABLE, 0, 2, 0)
    assert only(m.Stop, rank.outcome("commit")).reason == "step 0: no slot of it has anything to learn from"


def test_when_nobody_is_left_who_was_dealt_a_slot_the_deal_is_made_anew():
    rank = Rank()
    rank.enter()
    rank.see(Computed((10.0,), 25.0))
    rank.reduced(0, 0, 0, 2, 0)
    assert names(rank.outcome("commit")) == ["DropGradients", "AskQuorum"]
    assert rank.machine.step == 0 and rank.machine.ledger.pending == {}


# ------------------------------------------------------------------------------------------------ a step is whole, whoever is there


def test_a_dead_groups_slots_are_computed_by_the_others_in_the_same_step():
    rank = Rank(slots_per_step=3)
    assert rank.enter() == [m.Compute(0, (0, 16), 0)]
    launch = only(m.LaunchTail, rank.see(Computed((10.0, 11.0), 50.0)))
    assert launch.tail == (10.0, 0.0, 11.0, 50.0, 1.0, 0.0)
    rank.see(ReduceFailed(1, 0, 0, "socket closed"))
    assert only(m.AskQuorum, rank.outcome("commit", "failed")).call.member.dealt == 3
    assert rank.see(part(2, members=("a:1",), participants=("a:1",), dealt=3)) == [
        m.Configure(rank.machine.part, 0)  # and no DropGradients
    ]
    rank.see(m.Configured(2, True))
    assert rank.outcome("configured") == [m.Compute(0, (8,), 0)]  # what was added alone
    launch = only(m.LaunchTail, rank.see(Computed((12.0,), 25.0)))
    assert (launch.tail, launch.zeros, launch.again) == ((10.0, 12.0, 11.0, 75.0, 1.0, 0.0), False, False)
    rank.reduced(*launch.tail)
    assert only(m.CommitStep, rank.outcome("commit")).divisor == 33
    assert rank.machine.ledger.holes == [] and list(rank.machine.ledger.pending) == [24, 32, 40]


def test_a_second_death_before_the_added_slot_is_summed_keeps_both():
    rank = Rank(slots_per_step=3)
    everybody = {"members": ("a:1", "b:1", "c:1"), "participants": ("a:1", "b:1", "c:1")}
    rank.enter(part(**everybody))
    rank.see(Computed((10.0,), 25.0))
    for quorum_id, left, added in ((2, ("a:1", "b:1"), 16), (3, ("a:1",), 8)):
        rank.see(ReduceFailed(*rank.at, "socket closed"))
        rank.outcome("commit", "failed")
        rank.see(part(quorum_id, members=left, participants=left, dealt=3))
        rank.see(m.Configured(quorum_id, True))
        assert rank.outcome("configured") == [m.Compute(0, (added,), 0)]
        launch = only(m.LaunchTail, rank.see(Computed((10.0,), 25.0)))
    assert launch.tail == (10.0, 10.0, 10.0, 75.0, 1.0, 0.0)


def test_a_group_for_which_there_is_no_slot_stands_by_and_is_dealt_one_when_another_dies():
    rank = Rank(slots_per_step=1)
    last = {"replica_rank": 1, "members": ("B:1", "a:1"), "participants": ("B:1", "a:1")}
    assert rank.enter(part(**last)) == [m.LaunchTail(1, 0, 0, (0.0, 0.0, 1.0, 0.0), True, False)]
    rank.see(ReduceFailed(1, 0, 0, "socket closed"))
    rank.outcome("commit", "failed")
    rank.see(part(2, members=("a:1",), participants=("a:1",), dealt=1))
    rank.see(m.Configured(2, True))
    assert rank.outcome("configured") == [m.Compute(0, (0,), 0)]


def test_a_group_that_heals_knows_how_wide_the_tail_is():
    rank = Rank(slots_per_step=3)
    rank.see(m.Begin())
    rank.see(part(heal=True, step=5, commit=(1, "c5")))
    rank.see(m.Configured(1, True))
    assert only(m.LaunchTail, rank.outcome("configured")).tail == (0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    rank.reduced(10, 10, 10, 75, 2, 0)
    assert only(m.LaunchTail, rank.outcome("commit")).tail == (0.0, 0.0, 0.0, 0.0, 1.0, 0.0)  # held, and on


def test_one_sum_for_all_slots_so_one_loss_that_is_not_a_number_marks_them_all():
    rank = Rank(slots_per_step=2)
    alone = part(members=("a:1",), participants=("a:1",))
    rank.enter(alone)
    rank.see(Computed((10.0, 10.0), float("nan"), able=False))
    rank.reduced(0, 0, 0, 0, 0)
    assert only(m.LaunchTail, rank.outcome("commit", "again")).tail[:2] == (UNABLE, UNABLE)


def test_of_several_slots_one_without_a_target_is_marked_alone():
    rank = Rank(slots_per_step=2)
    rank.enter(part(members=("a:1",), participants=("a:1",)))
    launch = only(m.LaunchTail, rank.see(Computed((10.0, 0.0), 25.0)))
    assert launch.tail == (10.0, UNABLE, 25.0, 1.0, 0.0) and not launch.zeros
    rank.reduced(*launch.tail)
    assert only(m.CommitStep, rank.outcome("commit")).divisor == 10
    assert rank.machine.ledger.holes == [8] and rank.machine.ledger.unable == {8: 1}


def test_an_added_slot_that_is_not_a_number_is_said_before_it_is_excused():
    """What others know of a group's slots, they do not know of those that were added since: its buckets may have gone out."""
    rank = Rank(slots_per_step=2)
    rank.enter()
    rank.see(Computed((10.0,), 25.0))
    rank.reduced(10, 0, 25, 1, 0)  # b was unable
    rank.outcome("commit", "again")
    rank.see(ReduceFailed(*rank.at, "socket closed"))
    rank.outcome("commit", "failed")
    rank.see(part(2, members=("a:1",), participants=("a:1",), dealt=2))
    rank.see(m.Configured(2, True))
    rank.outcome("configured")
    launch = only(m.LaunchTail, rank.see(Computed((10.0,), float("nan"), able=False)))
    assert launch.tail == (0.0, 0.0, 0.0, 0.0, 0.0) and launch.zeros
