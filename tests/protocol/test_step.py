"""Transcripts of one rank's step. Read top to bottom: what happens to a rank, and what it does.

What its group gives to it: test_share.py; a group that is behind: test_heal.py; whose weights are not the others': test_compare.py.

Its twins in the peer are manager_test.py's: quorum happy / fixed size / skip_init / configure_errors / checkpoint_errors, healing with
zeros, allreduce_error, report_error, max_retries.
"""

from __future__ import annotations

import pytest

from ft.protocol import messages as m
from ft.protocol.messages import Computed, Outcome, Reduced, ReduceFailed
from ft.protocol.step import Phase
from tests.protocol.rank import Rank, names, only, part, source_state

# ------------------------------------------------------------------------------------------------ a step that holds


def test_the_first_step():
    rank = Rank()
    [ask] = rank.see(m.Begin())
    assert isinstance(ask, m.AskQuorum) and (ask.call.known, ask.call.member.step) == (0, 0)
    assert names(rank.see(part())) == ["Configure"]
    [cast] = rank.see(m.Configured(1, True))
    assert isinstance(cast, m.CastVote) and (cast.vote.kind, cast.vote.verdict) == ("configured", "yes")
    assert rank.outcome("configured") == [m.Compute(0, (0,), 0)]
    assert rank.see(Computed((10.0,), 25.0)) == [m.LaunchTail(1, 0, 0, (10.0, 0.0, 25.0, 1.0, 0.0))]
    assert only(m.CastVote, rank.reduced(10, 12, 55, 2, 0)).vote.verdict == "yes"
    [commit] = rank.outcome("commit")
    assert commit == m.CommitStep(1, rank.machine.commit_id, 22, (0, 1), 2.5, 2, slots=((0, "a:1"), (8, "b:1")))
    assert rank.machine.state_dict()["step"] == 1


def test_a_commit_says_whose_gradients_of_which_slot_went_in():
    """b died before its sums went out; its slot is a hole, and the next deal's first."""
    rank = Rank()
    rank.enter()
    commit = only(m.CommitStep, rank.finish(10, 0, 25, 2, 1, change=True))
    assert (commit.slots, commit.holes) == (((0, "a:1"),), (8,))
    rank.see(m.Begin())
    rank.enter(part(2, step=1, commit=(1, commit.commit_id), members=("a:1", "c:1"), participants=("a:1", "c:1")))
    commit = only(m.CommitStep, rank.finish())
    assert (commit.slots, commit.holes) == (((8, "a:1"), (16, "c:1")), ())


def test_a_steady_step_asks_nobody_for_a_quorum():
    rank = Rank()
    rank.enter()
    rank.finish()
    assert rank.see(m.Begin()) == [m.Compute(1, (16,), 0)]


def test_a_change_in_the_tail_brings_a_quorum_before_the_next_step():
    rank = Rank()
    rank.enter()
    rank.finish(change=True)
    ask = only(m.AskQuorum, rank.see(m.Begin()))
    assert (ask.call.known, ask.call.failed, ask.call.member.dealt) == (1, False, 0)


def test_every_step_if_so_configured():
    rank = Rank(every_step=True)
    rank.enter()
    rank.finish()
    assert names(rank.see(m.Begin())) == ["AskQuorum"]


def test_an_announced_change_is_passed_on_in_the_tail_and_stops_nothing():
    rank = Rank()
    rank.enter()
    assert rank.see(m.ChangeAnnounced(1, "c waits")) == []
    assert only(m.LaunchTail, rank.see(Computed((10.0,), 25.0))).tail[-1] == 1
    assert rank.see(m.ChangeAnnounced(9)) == []  # of another generation


@pytest.mark.parametrize("again", [False, True])
def test_a_change_that_overtakes_the_answer_is_passed_on_all_the_same(again: bool):
    """They come on two streams. The group tells it once: without this a newcomer would wait for ever, and the others would not know."""
    rank = Rank()
    if again:  # the quorum is asked for anew, and the answer is the one that stands
        rank.enter()
        rank.finish(change=True)
    rank.see(m.Begin())
    assert rank.see(m.ChangeAnnounced(1, "b:1 waits")) == []
    answer = part(1, step=1, commit=(1, rank.machine.commit_id), known=True) if again else part()
    rank.see(answer)
    rank.see(m.Configured(1, ok=True))
    rank.outcome("configured")
    assert only(m.LaunchTail, rank.see(Computed((10.0,), 25.0))).tail[-1] == 1.0


def test_a_loss_that_overtakes_the_answer_ends_the_rendezvous():
    rank = Rank()
    rank.see(m.Begin())
    assert rank.see(m.MemberLost(1, ("b:1",), "its connection broke")) == []
    assert rank.see(m.MemberLost(7, ("b:1",), "of a quorum that is none of this group's")) == []
    assert only(m.InterruptCollectives, rank.see(part(7))).quorum_id == 7
    rank = Rank()
    rank.see(m.Begin())
    rank.see(m.MemberLost(1, ("b:1",), "its connection broke"))
    assert "InterruptCollectives" not in names(rank.see(part(2)))


def test_who_means_to_leave_says_so_in_its_last_tail():
    rank = Rank()
    rank.enter()
    rank.see(m.Leaving())
    assert only(m.LaunchTail, rank.see(Computed((10.0,), 25.0))).tail[-1] == 1


def test_who_says_too_late_that_it_leaves_stays_for_another_step():
    """Found by simulation: it went at a commit of which the others knew nothing, and they waited for it in the next step."""
    rank = Rank()
    rank.enter()
    rank.see(Computed((10.0,), 25.0))
    rank.see(m.Leaving())
    assert not only(m.CommitStep, rank.finish()).leave
    rank.see(m.Begin())
    rank.see(Computed((10.0,), 25.0))
    assert only(m.CommitStep, rank.finish(change=True)).leave


@pytest.mark.parametrize("asked", [False, True])
def test_a_job_that_begins_one_step_before_its_end_leaves_with_that_step(asked: bool):
    """Only the checkpoint, which is loaded when the first quorum asks for it, says how far the job is."""
    rank = Rank(restores=True)
    rank.see(m.Leaving(after=5 if asked else 6))
    rank.see(m.Begin())
    assert names(rank.see(m.WantsRestore(4))) == ["LoadCheckpoint"]
    rank.see(m.Restored(source_state(4)))
    rank.see(part(1, step=4, commit=(1, "c4")))
    rank.see(m.Configured(1, True))
    rank.outcome("configured")
    assert only(m.LaunchTail, rank.see(Computed((10.0,), 25.0))).tail[-1] == asked
    rank.reduced(10, 10, 50, 2, float(asked))
    commit = only(m.CommitStep, rank.outcome("commit", change=asked))
    assert (commit.step, commit.leave) == (5, asked)


def test_a_group_that_heals_leaves_with_the_last_step_too():
    """The others are gone after it, so nothing can be said later."""
    rank = Rank()
    rank.see(m.Leaving(after=6))
    [zeros] = rank.enter(part(2, heal=True, step=5, commit=(1, "c5")))
    assert isinstance(zeros, m.LaunchTail) and zeros.tail[-1] == 1
    rank.reduced(10, 25, 2, 1)
    assert names(rank.outcome("commit", change=True)) == ["HoldSums"]
    rank.see(m.HealEnded(2, True, source_state()))
    commit = only(m.CommitStep, rank.see(Outcome("healed", 2, 0, 5, "yes")))
    assert (commit.step, commit.held, commit.leave) == (6, True, True)


def test_a_step_is_settled_when_a_later_one_committed_in_the_same_generation():
    rank = Rank()
    rank.enter()
    assert "Settled" not in names(rank.finish())
    rank.see(m.Begin())
    assert m.Settled(1) in rank.finish()


def test_a_step_is_settled_when_a_quorum_that_chose_it_commits():
    """Not before: a group that was stopped may get its part long after the others went on without it (seeds 1885, 5042)."""
    rank = Rank()
    rank.enter()
    rank.finish(change=True)
    rank.see(m.Begin())
    assert "Settled" not in names(rank.see(part(2, step=1, commit=(1, rank.machine.commit_id))))
    rank.see(m.Configured(2, ok=True))
    rank.outcome("configured", "yes")
    rank.see(Computed((10.0,), 25.0))
    assert m.Settled(1) in rank.finish()


def test_a_source_fences_its_offer_before_it_changes_the_state():
    rank = Rank()
    rank.enter(part(heals=(1,), participants=("a:1",)))
    assert names(rank.finish(10, 25, 2, 0))[:2] == ["Fence", "CommitStep"]
    rank.see(m.Begin())
    assert "Fence" not in names(rank.finish(10, 25, 2, 0))  # what was unsent has been copied


def test_equal_histories_have_equal_commit_ids_whatever_the_ranks_losses_last_bits():
    ranks = [Rank(), Rank(), Rank()]
    for rank, tail in zip(ranks, [(10, 10, 50.0, 2, 0), (10, 10, 50.0001, 2, 1), (10, 0, 50, 2, 0)], strict=True):
        rank.enter()
        rank.finish(*tail)
    first, same, other = (rank.machine.commit_id for rank in ranks)
    assert first == same != other


# ------------------------------------------------------------------------------------------------ a generation that fails


def test_a_lost_member_during_the_backward_the_forward_and_backward_are_finished_and_kept():
    rank = Rank()
    rank.enter()
    assert names(rank.see(m.MemberLost(1, ("b:1",), "its connection broke"))) == ["InterruptCollectives"]
    assert rank.see(ReduceFailed(1, 0, 0, "socket closed")) == []  # the backward still runs
    vote = only(m.CastVote, rank.see(Computed((10.0,), 25.0))).vote
    assert (vote.verdict, vote.reason) == ("failed", "socket closed")
    effects = rank.outcome("commit", "failed")
    assert names(effects) == ["AbandonGeneration", "AskQuorum"]
    ask = only(m.AskQuorum, effects)
    assert (ask.call.failed, ask.call.member.dealt) == (True, 2)
    rank.see(part(2, members=("a:1",), participants=("a:1",), dealt=2))
    rank.see(m.Configured(2, True))
    assert rank.outcome("configured") == [m.LaunchTail(2, 0, 0, (10.0, 0.0, 25.0, 1.0, 0.0), False, True)]
    rank.reduced(10, 0, 25, 1, 0)
    assert only(m.CommitStep, rank.outcome("commit")).contributors == (0,)
    assert rank.machine.ledger.holes == [] or rank.machine.ledger.pending[8] == "a:1"  # b's slot is dealt again


def test_completion_beats_notices():
    rank = Rank()
    rank.enter()
    rank.see(Computed((10.0,), 25.0))
    rank.see(m.MemberLost(1, ("b:1",)))
    assert only(m.CastVote, rank.reduced(10, 10, 50, 2, 0)).vote.verdict == "yes"
    assert rank.see(m.GenerationAborted(1)) == []
    assert names(rank.outcome("commit")) == ["CommitStep"]


def test_a_notice_between_two_steps_does_not_part_the_ranks_of_a_group():
    """Another rank may be in the forward already; so this one goes there, too, and votes no."""
    rank = Rank()
    rank.enter()
    rank.finish()
    assert rank.see(m.GenerationAborted(1, "b asked")) == []
    assert names(rank.see(m.Begin())) == ["Compute"]
    assert only(m.CastVote, rank.see(Computed((10.0,), 25.0))).vote.verdict == "failed"


@pytest.mark.parametrize(("configured", "this_time"), [(False, True), (True, False)])
def test_without_kept_gradients_a_failed_attempt_returns_its_slots(configured: bool, this_time: bool):
    rank = Rank(keep_gradients=configured)
    rank.enter()
    rank.see(Computed((10.0,), 25.0, kept=this_time))
    rank.see(ReduceFailed(1, 0, 0, "socket closed"))
    effects = rank.outcome("commit", "failed")
    assert names(effects) == ["AbandonGeneration", "DropGradients", "AskQuorum"]
    assert only(m.AskQuorum, effects).call.member.dealt == 0
    rank.see(part(2, members=("a:1",), participants=("a:1",)))
    rank.see(m.Configured(2, True))
    assert rank.outcome("configured") == [m.Compute(0, (0,), 0)]


def test_peer_configure_errors():
    """A process group that could not be built is a vote, not an exception."""
    rank = Rank()
    rank.see(m.Begin())
    rank.see(part())
    vote = only(m.CastVote, rank.see(m.Configured(1, False, "no route to b"))).vote
    assert (vote.kind, vote.verdict) == ("configured", "failed")
    assert names(rank.outcome("configured", "failed")) == ["AbandonGeneration", "AskQuorum"]


def test_peer_max_retries():
    rank = Rank(max_failures=1)
    for quorum_id in (1, 2):
        rank.see(m.Begin())
        rank.see(part(quorum_id))
        rank.see(m.Configured(quorum_id, False, "no route to b"))
        effects = rank.outcome("configured", "failed")
    assert "fault_tolerance.max_failures allows 1" in only(m.Stop, effects).reason
    assert rank.machine.phase is Phase.STOPPED and rank.see(m.Begin()) == []


def test_peer_quorum_timeout():
    rank = Rank()
    rank.see(m.Begin())
    assert only(m.Stop, rank.see(m.QuorumFailed("no answer in 60 s"))).reason == "no quorum: no answer in 60 s"


# ------------------------------------------------------------------------------------------------ what does not fit


@pytest.mark.parametrize(
    "event",
    [
        m.Begin(),
        part(1),
        m.Configured(1, True),
        Computed((10.0,), 25.0),
        Reduced(1, 0, 0, (10, 10, 50, 2, 0)),
        Reduced(1, 7, 1, (10, 10, 50, 2, 0)),
        ReduceFailed(1, 0, 0, "late"),
        Outcome("commit", 1, 0, 0, "yes"),
        Outcome("configured", 1, 0, 0, "failed"),
        Outcome("healed", 1, 0, 0, "yes"),
        m.HealEnded(1, True),
        m.QuorumFailed("late"),
        m.WantsRestore(3),
        m.MemberLost(0, ("b:1",)),
        m.Tick(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_what_comes_late_or_twice_changes_nothing(event: m.Event):
    """In the second step's commit vote."""
    rank = Rank()
    rank.enter()
    rank.finish()
    rank.see(m.Begin())
    rank.see(Computed((10.0,), 25.0))
    rank.reduced(10, 10, 50, 2, 0)
    before = (rank.machine.phase, rank.machine.state_dict(), rank.at)
    assert rank.see(event) == []
    assert (rank.machine.phase, rank.machine.state_dict(), rank.at) == before
    assert names(rank.outcome("commit")) == ["Settled", "CommitStep"]


@pytest.mark.parametrize("place", [0, 1, 3, 4])  # tokens, ok, change
@pytest.mark.parametrize("figure", [float("nan"), float("inf"), -float("inf")])
def test_figures_that_are_no_numbers_are_a_failed_attempt(place: int, figure: float):
    """One damaged word of one group's bucket reaches all ranks of all groups: none may end by it."""
    rank = Rank()
    rank.enter()
    rank.see(Computed((10.0,), 25.0))
    tail = [10.0, 10.0, 50.0, 2.0, 0.0]
    tail[place] = figure
    vote = only(m.CastVote, rank.reduced(*tail)).vote
    assert (vote.kind, vote.verdict) == ("commit", "failed") and "are no numbers" in vote.reason
    assert names(rank.outcome("commit", "failed")) == ["AbandonGeneration", "AskQuorum"]
