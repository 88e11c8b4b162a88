"""Transcripts of one rank's step. Read top to bottom: what happens to a rank, and what it does.

Its twins in the peer are manager_test.py's: quorum happy / fixed size / skip_init / configure_errors / checkpoint_errors, healing with
zeros, allreduce_error, report_error, max_retries.
"""

from __future__ import annotations

from typing import Any

import pytest

from ft.protocol import messages as m
from ft.protocol.ledger import Ledger
from ft.protocol.messages import UNABLE, Computed, Outcome, Part, Reduced, ReduceFailed
from ft.protocol.step import Phase, Step, StepConfig


def part(
    quorum_id: int = 1, *, heal: bool = False, step: int = 0, commit: tuple[int, str] = (0, ""), **more: Any
) -> Part:
    """The place of group a in a quorum of a and b."""
    fields: dict[str, Any] = {
        "replica_rank": 0,
        "members": ("a:1", "b:1"),
        "store_address": "s",
        "sources": (m.Source(1, "http://b"),) if heal else (),
        "heals": (),
        "participants": ("b:1",) if heal else ("a:1", "b:1"),
        "dealt": 0,
    }
    return Part(quorum_id, "job", "a:1", reference=(step, *commit), heal=heal, **{**fields, **more})


class Rank:
    """A rank, and short words for what happens to it. Each returns the effects."""

    def __init__(self, *, slots_per_step: int = 0, **config: Any) -> None:
        self.machine = Step(StepConfig(**config), Ledger(8, slots_per_step))
        self.now_s = 0.0

    def see(self, event: m.Event) -> list[m.Effect]:
        return list(self.machine.handle(event, self.now_s).effects)

    @property
    def at(self) -> tuple[int, int, int]:
        assert self.machine.part
        return self.machine.part.quorum_id, self.machine._attempt, self.machine._place

    def outcome(self, kind: Any, verdict: Any = "yes", **more: Any) -> list[m.Effect]:
        return self.see(Outcome(kind, *self.at, verdict, **more))

    def reduced(self, *tail: float) -> list[m.Effect]:
        return self.see(Reduced(*self.at, tail))

    def enter(self, event: Part | None = None) -> list[m.Effect]:
        """Through a quorum to the forward."""
        self.see(m.Begin())
        self.see(event or part())
        self.see(m.Configured((event or part()).quorum_id, True))
        return self.outcome("configured")

    def finish(self, *tail: float, change: bool = False) -> list[m.Effect]:
        self.see(Computed((10.0,), 25.0))
        self.reduced(*(tail or (10, 10, 50, 2, 0)))
        return self.outcome("commit", change=change)


def names(effects: list[m.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def only(kind: type[Any], effects: list[m.Effect]) -> Any:
    [effect] = [effect for effect in effects if isinstance(effect, kind)]
    return effect


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
    assert only(m.StopWaiting, rank.see(part(7))).quorum_id == 7
    rank = Rank()
    rank.see(m.Begin())
    rank.see(m.MemberLost(1, ("b:1",), "its connection broke"))
    assert "StopWaiting" not in names(rank.see(part(2)))


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
    assert names(rank.see(m.MemberLost(1, ("b:1",), "its connection broke"))) == ["StopWaiting"]
    assert rank.see(ReduceFailed(1, 0, 0, "socket closed", ("b:1",))) == []  # the backward still runs
    vote = only(m.CastVote, rank.see(Computed((10.0,), 25.0))).vote
    assert (vote.verdict, vote.reason, vote.blame) == ("failed", "socket closed", ("b:1",))
    effects = rank.outcome("commit", "failed")
    assert names(effects) == ["AbandonGeneration", "AskQuorum"]
    ask = only(m.AskQuorum, effects)
    assert (ask.call.failed, ask.call.blame, ask.call.member.dealt) == (True, ("b:1",), 2)
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
    assert rank.see(m.Abandoned(1)) == []
    assert names(rank.outcome("commit")) == ["CommitStep"]


def test_a_notice_between_two_steps_does_not_part_the_ranks_of_a_group():
    """Another rank may be in the forward already; so this one goes there, too, and votes no."""
    rank = Rank()
    rank.enter()
    rank.finish()
    assert rank.see(m.Abandoned(1, "b asked")) == []
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
    vote = only(m.CastVote, rank.see(m.Configured(1, False, "no route to b", ("b:1",)))).vote
    assert (vote.kind, vote.verdict, vote.blame) == ("configured", "failed", ("b:1",))
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
    rank.see(ReduceFailed(1, 0, 0, "socket closed", ("b:1",)))
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
    rank.see(ReduceFailed(1, 0, 0, "socket closed", ("B:1",)))
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


# ------------------------------------------------------------------------------------------------ healing


def source_state(step: int = 5, *, pending: int = 1) -> dict[str, Any]:
    source = Step(StepConfig(), Ledger(8))
    source.step, source.commit_id, source.commit_quorum_id = step, f"c{step}", 1
    source.ledger.position = 80
    source.ledger.deal(("b:1",) * pending)
    return source.state_dict()


def healing(**config: Any) -> Rank:
    """A fresh group in a quorum whose reference is step 5; it launches zeros."""
    rank = Rank(**config)
    [zeros] = rank.enter(part(2, heal=True, step=5, commit=(1, "c5")))
    assert zeros == m.LaunchTail(2, 0, 5, (0.0, 0.0, 1.0, 0.0), True, False)
    return rank


def test_a_healing_group_gives_zeros_and_holds_what_commits_meanwhile():
    rank = healing()
    assert rank.machine.void
    rank.reduced(10, 25, 2, 0)
    assert names(rank.outcome("commit")) == ["HoldSums", "LaunchTail"]  # and goes on with zeros
    assert only(m.CastVote, rank.see(m.HealEnded(2, True, source_state()))).vote.kind == "healed"
    effects = rank.see(Outcome("healed", 2, 0, 5, "yes"))
    assert names(effects) == ["LoadState", "Settled", "CommitStep"]
    assert only(m.CommitStep, effects).held and (rank.machine.step, rank.machine.void) == (6, False)
    rank.reduced(10, 25, 2, 0)
    assert only(m.CommitStep, rank.outcome("commit")).step == 7
    assert only(m.LaunchTail, rank.see(m.Begin())).tail[-1] == 1  # whole again: it wants to be dealt slots


def test_a_group_that_healed_takes_no_slot_of_a_deal_that_was_open():
    """Found by simulation: the deal had a slot for it, so that the sums of its zeros were ignored, and it waited for ever."""
    rank = healing()
    state = source_state()
    state["ledger"]["pending"] = [[80, "a:1"]]
    rank.see(m.HealEnded(2, True, state))
    assert names(rank.see(Outcome("healed", 2, 0, 5, "yes"))) == ["LoadState"]
    assert only(m.CastVote, rank.reduced(10, 25, 2, 0)).vote.verdict == "yes"


def test_past_the_backlog_it_waits_and_gives_up_in_time():
    rank = healing()
    for _ in range(2):
        rank.reduced(10, 25, 2, 0)
        rank.outcome("commit")
    assert rank.machine.phase is Phase.AWAITING
    rank.now_s = 29.9
    assert rank.see(m.Tick()) == []
    rank.now_s = 30.0
    effects = rank.see(m.Tick())
    assert names(effects) == ["GiveUp", "AbandonGeneration", "CastVote"]
    assert names(rank.see(Outcome("healed", 2, 0, 5, "failed"))) == ["DropHeld", "AskQuorum"]


def test_a_heal_that_is_complete_while_it_waits_is_in_time():
    rank = healing()
    for _ in range(2):
        rank.reduced(10, 25, 2, 0)
        rank.outcome("commit")
    rank.see(m.HealEnded(2, True, source_state()))
    effects = rank.see(Outcome("healed", 2, 0, 5, "yes"))
    assert names(effects) == ["LoadState", "Settled", "CommitStep", "Settled", "CommitStep", "LaunchTail"]


def test_peer_checkpoint_errors():
    """A heal that failed leaves a void group, which asks again; it never trains on half a state."""
    rank = healing()
    vote = only(m.CastVote, rank.see(m.HealEnded(2, False, reason="digest of chunk 7"))).vote
    assert (vote.kind, vote.verdict, vote.reason) == ("healed", "failed", "digest of chunk 7")
    rank.see(Outcome("healed", 2, 0, 5, "failed", reason="rank 0: digest of chunk 7"))
    rank.reduced(10, 25, 2, 1)
    effects = rank.outcome("commit", change=True)
    assert only(m.AskQuorum, effects).call.member.step == m.VOID


def test_a_heal_that_failed_is_forgotten_with_the_checkpoint_that_takes_its_place():
    """Found by simulation: a rank with sums still held from that heal asked for a quorum, the others of its group began their step."""
    rank = healing()
    for _ in range(2):
        rank.reduced(10, 25, 2, 1)
        rank.outcome("commit", change=True)
    rank.see(m.HealEnded(2, False, reason="no source"))
    rank.see(Outcome("healed", 2, 0, 5, "failed"))
    assert names(rank.see(m.WantsRestore(5))) == ["LoadCheckpoint"]
    assert names(rank.see(m.Restored(source_state(4)))) == ["DropHeld", "AskQuorum"]
    rank.see(part(3, step=4, commit=(1, "c4")))
    rank.see(m.Configured(3, True))
    rank.outcome("configured")
    rank.finish()
    assert names(rank.see(m.Begin())) == ["Compute"]


def test_another_state_than_the_quorums_is_not_taken():
    rank = healing()
    assert only(m.CastVote, rank.see(m.HealEnded(2, True, source_state(4)))).vote.verdict == "failed"


def test_when_the_generation_fails_the_groups_word_on_the_heal_comes_first():
    rank = healing()
    rank.see(ReduceFailed(2, 0, 5, "socket closed"))
    effects = rank.outcome("commit", "failed")
    assert names(effects) == ["AbandonGeneration", "CastVote"]  # healed: no
    effects = rank.see(Outcome("healed", 2, 0, 5, "failed"))
    assert only(m.AskQuorum, effects).call.member.step == m.VOID


def test_who_heals_drops_its_own_gradients():
    rank = Rank()
    rank.enter()
    rank.see(Computed((10.0,), 25.0))
    rank.see(ReduceFailed(1, 0, 0, "socket closed"))
    rank.outcome("commit", "failed")
    assert "DropGradients" in names(rank.see(part(2, heal=True, step=1, commit=(1, "c1"))))


def test_a_checkpoint_on_demand():
    rank = Rank()
    rank.see(m.Begin())
    assert names(rank.see(m.WantsRestore(9))) == ["LoadCheckpoint"]
    ask = only(m.AskQuorum, rank.see(m.Restored(source_state(8))))
    assert (ask.call.member.step, ask.call.member.restored, ask.call.member.commit_id) == (8, 8, "c8")
    assert ask.call.member.dealt == 0


def test_a_cold_start_holds_nothing_until_it_is_told_that_nobody_does():
    rank = Rank(restores=True)
    assert only(m.AskQuorum, rank.see(m.Begin())).call.member.void
    assert rank.see(m.WantsRestore(0)) == [m.LoadCheckpoint(0)]
    ask = only(m.AskQuorum, rank.see(m.Restored(None)))  # there is none: a new job
    assert (ask.call.member.step, ask.call.member.restored, ask.call.member.void) == (0, 0, False)
    assert rank.enter() == [m.Compute(0, (0,), 0)]


def test_a_start_among_others_loads_no_checkpoint():
    rank = Rank(restores=True)
    rank.see(m.Begin())
    assert names(rank.see(part(2, heal=True, step=5, commit=(1, "c5")))) == ["DropHeld", "Configure"]
    rank.see(m.Configured(2, True))
    assert names(rank.outcome("configured")) == ["LaunchTail"]  # zeros, while the state arrives
    rank.see(m.HealEnded(2, True, source_state(5)))
    assert names(rank.see(Outcome("healed", 2, 0, 5, "yes"))) == ["LoadState"]


@pytest.mark.parametrize("restores", [True, False])
def test_a_checkpoint_before_the_first_step(restores: bool):
    rank = Rank(restores=restores)
    assert rank.see(m.Restored(source_state(8))) == []
    assert only(m.AskQuorum, rank.see(m.Begin())).call.member.restored == 8


def test_a_deal_that_not_all_hold_is_made_anew():
    rank = Rank()
    rank.enter()
    rank.see(Computed((10.0,), 25.0))
    rank.see(ReduceFailed(1, 0, 0, "socket closed"))
    rank.outcome("commit", "failed")
    effects = rank.see(part(2, members=("b:1", "a:1"), participants=("b:1", "a:1"), replica_rank=1, dealt=0))
    assert "DropGradients" in names(effects)  # they were of slot 0, which is b's now
    assert rank.machine.ledger.pending == {0: "b:1", 8: "a:1"}


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


# ------------------------------------------------------------------------------------------------ weights are compared

OWN, OTHER, NOTHING = (7.0, 8.0), (7.0, 9.0), (0.0, 0.0)
TRIO = {"members": ("a:1", "b:1", "c:1"), "participants": ("a:1", "b:1", "c:1")}


def compared(*digests: tuple[float, float], rank: Rank, blame: tuple[str, ...] | None = None) -> list[m.Effect]:
    """A step of three groups in which each says what its weights are, and this one's group decides. blame: what another rank of it saw."""
    rank.see(Computed((10.0,), 25.0))
    vote = only(m.CastVote, rank.reduced(10, 10, 10, 75, 3, 0, *(figure for digest in digests for figure in digest)))
    return rank.outcome(
        "commit", change=vote.vote.change or bool(blame), blame=vote.vote.blame if blame is None else blame
    )


def trio(**config: Any) -> Rank:
    rank = Rank(**{"digest_interval": 2, **config})
    rank.enter(part(**TRIO, replica_rank=0))
    rank.finish(10, 10, 10, 75, 3, 0)
    rank.see(m.Begin())
    return rank


def test_digests_ride_in_the_tail_of_the_step_before_a_multiple():
    rank = Rank(digest_interval=2)
    rank.enter(part(**TRIO, replica_rank=1))
    first = only(m.LaunchTail, rank.see(Computed((10.0,), 25.0)))
    assert (len(first.tail), first.digest_at) == (6, 0)
    rank.reduced(10, 10, 10, 75, 3, 0)
    rank.outcome("commit")
    rank.see(m.Begin())
    second = only(m.LaunchTail, rank.see(Computed((10.0,), 25.0)))
    assert (len(second.tail), second.digest_at) == (6 + 3 * 2, 8)
    vote = only(m.CastVote, rank.reduced(10, 10, 10, 75, 3, 0, *OWN, *OWN, *OWN)).vote
    assert (vote.verdict, vote.change, vote.blame) == ("yes", False, ())
    assert only(m.CommitStep, rank.outcome("commit")).divisor == 30
    assert names(rank.see(m.Begin())) == ["Compute"], "nothing differs, and nobody asks for anything"


def test_the_odd_one_commits_and_then_heals():
    rank = trio()
    rank.see(Computed((10.0,), 25.0))
    told, cast = rank.reduced(10, 10, 10, 75, 3, 0, *OTHER, *OWN, *OWN)
    assert told == m.WeightsDiffer(1, ("a:1",))
    assert isinstance(cast, m.CastVote)
    assert (cast.vote.verdict, cast.vote.change, cast.vote.blame) == ("yes", True, ("a:1",))
    assert names(rank.outcome("commit", change=True, blame=("a:1",))) == ["Settled", "CommitStep"]
    assert rank.machine.void
    ask = only(m.AskQuorum, rank.see(m.Begin())).call
    assert (ask.member.step, ask.member.dealt, ask.failed) == (m.VOID, 0, False)
    assert names(rank.see(part(2, heal=True, step=2, commit=(1, "x"))))[-1] == "Configure"


def test_the_others_go_on_from_what_they_hold():
    rank = trio()
    assert names(compared(OWN, OTHER, OWN, rank=rank)) == ["Settled", "CommitStep"]
    ask = only(m.AskQuorum, rank.see(m.Begin())).call
    assert (ask.member.step, ask.failed) == (2, False) and not rank.machine.void


def test_a_rank_whose_own_shard_is_right_heals_with_its_group():
    rank = trio()
    compared(OWN, OWN, OWN, rank=rank, blame=("a:1",))
    assert rank.machine.void


def test_the_odd_one_may_be_told_to_leave():
    rank = trio(leave_if_odd=True)
    assert names(compared(OTHER, OWN, OWN, rank=rank)) == ["Settled", "CommitStep", "Stop"]


@pytest.mark.parametrize("digests", [(OWN, OTHER, (1.0, 1.0)), (OWN, OTHER, NOTHING)])
def test_where_nobody_can_tell_all_stop_before_the_commit(digests: tuple[tuple[float, float], ...]):
    rank = trio()
    rank.see(Computed((10.0,), 25.0))
    told, cast = rank.reduced(10, 10, 10, 75, 3, 0, *(figure for digest in digests for figure in digest))
    assert told == m.WeightsDiffer(1, ()) and isinstance(cast, m.CastVote)
    stop = only(m.Stop, rank.outcome("commit", change=True, blame=cast.vote.blame))
    assert "nobody can tell" in stop.reason and rank.machine.step == 1


def test_who_is_healing_says_nothing_of_its_weights():
    rank = Rank(digest_interval=2)
    zeros = only(m.LaunchTail, rank.enter(part(2, heal=True, step=5, commit=(1, "x"), **TRIO)))
    assert zeros.zeros and zeros.digest_at == 0 and len(zeros.tail) == 3 + 3 + 3 * 2
