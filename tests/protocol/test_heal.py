"""A group that is behind, from the part that says so until it is as good as any; and states that come from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from ft.protocol import messages as m
from ft.protocol.messages import Computed, Outcome, ReduceFailed
from ft.protocol.step import Phase
from tests.protocol.rank import Rank, names, only, part, source_state


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
    assert rank.see(Outcome("healed", 2, 0, 5, "yes")) == []  # zeros are under way
    rank.reduced(10, 25, 2, 0)
    effects = rank.outcome("commit", healed=True)
    assert names(effects) == ["LoadState", "Settled", "CommitStep", "Settled", "CommitStep"]
    assert [(e.step, e.held) for e in effects if isinstance(e, m.CommitStep)] == [(6, True), (7, False)]
    assert (rank.machine.step, rank.machine.void) == (7, False)
    assert only(m.LaunchTail, rank.see(m.Begin())).tail[-1] == 1  # whole again: it wants to be dealt slots


def test_a_group_that_healed_takes_no_slot_of_a_deal_that_was_open():
    """Found by simulation: the deal had a slot for it, so that the sums of its zeros were ignored, and it waited for ever."""
    rank = healing()
    state = source_state()
    state["ledger"]["pending"] = [[80, "a:1"]]
    rank.see(m.HealEnded(2, True, state))
    rank.see(Outcome("healed", 2, 0, 5, "yes"))
    rank.reduced(10, 25, 2, 0)
    assert names(rank.outcome("commit", "again", healed=True)) == ["LoadState", "LaunchTail"]
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


@pytest.mark.parametrize("zeros_wait", [True, False])
def test_where_zeros_wait_for_the_state_it_is_taken_with_the_word_on_it(zeros_wait: bool):
    """Else nothing would come after which it could be taken: the next outcome is of the zeros that wait."""
    rank = healing(zeros_wait=zeros_wait)
    rank.see(m.HealEnded(2, True, source_state()))
    taken = "LoadState" in names(rank.see(Outcome("healed", 2, 0, 5, "yes")))
    assert taken == zeros_wait and rank.machine.healing != zeros_wait


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


@pytest.mark.parametrize("state", [None, [], "state", 3, {}])
def test_what_is_no_state_is_not_taken(state: Any):
    """It came over the wire, and ends nobody."""
    assert only(m.CastVote, healing().see(m.HealEnded(2, True, state))).vote.verdict == "failed"


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
    rank.reduced(10, 25, 2, 0)
    assert names(rank.outcome("commit", healed=True)) == ["LoadState", "Settled", "CommitStep"]


def test_a_state_that_is_there_before_the_first_step_is_taken_with_the_word_that_begins_it():
    rank = Rank()
    rank.see(m.Begin())
    rank.see(part(2, heal=True, step=5, commit=(1, "c5")))
    rank.see(m.HealEnded(2, True, source_state()))
    rank.see(m.Configured(2, True))
    effects = rank.outcome("configured", healed=True)
    assert names(effects) == ["LoadState", "LaunchTail"]
    assert only(m.LaunchTail, effects).tail[-1] == 1  # whole: it wants to be dealt slots


WORD = Outcome("healed", 2, 0, 5, "yes")


def apart(*, backlog: int = 2, keep_gradients: bool = True) -> tuple[Rank, Rank]:
    """Two ranks of one group, whose sums of a step are there. The group then decides that they hold, and after that on the heal."""
    ranks = (
        healing(heal_backlog=backlog, keep_gradients=keep_gradients),
        healing(heal_backlog=backlog, keep_gradients=keep_gradients),
    )
    for rank in ranks:
        rank.see(m.HealEnded(2, True, source_state()))
        rank.reduced(10, 25, 2, 0)
    return ranks


def what(effects: list[m.Effect]) -> list[str]:
    """Without what concerns nobody else."""
    return [name for name in names(effects) if name not in ("HoldSums", "CastVote", "Settled")]


@pytest.mark.parametrize("backlog", [1, 2])
def test_ranks_that_hear_at_different_moments_that_they_are_whole_take_the_state_at_one_place(backlog: int):
    """Found by simulation: one rank of a group applied what was held, in collectives that need both ranks, and the other had launched the
    next step, in which it waited for a rank of another group; there it was the other way round. All waited for ever."""
    early, late = apart(backlog=backlog)
    done = [what(early.see(WORD) + early.outcome("commit")), what(late.outcome("commit") + late.see(WORD))]
    for rank in (early, late):
        if rank.machine.void:
            rank.reduced(10, 25, 2, 0)
    done = [
        more + what(rank.outcome("commit", healed=True) if rank.machine.phase is Phase.VOTING else [])
        for more, rank in zip(done, (early, late), strict=True)
    ]
    launched_first = ["LaunchTail", "LoadState", "CommitStep", "CommitStep"]
    assert done == [launched_first if backlog == 2 else ["LoadState", "CommitStep", "LaunchTail"]] * 2


@pytest.mark.parametrize("healed", [True, False])
def test_ranks_that_hear_at_different_moments_that_they_are_whole_report_one_deal(healed: bool):
    """Found by simulation, without kept gradients: one had returned the deal before it came with the state, the other after."""
    deals = set()
    for rank, word_first in zip(apart(keep_gradients=False), (True, False), strict=True):
        said: list[m.Effect] = rank.see(WORD) if word_first else []
        said += rank.outcome("commit", "failed", healed=healed) + rank.see(WORD)
        ask = only(m.AskQuorum, said).call.member
        deals.add((ask.step, ask.dealt, ask.deal_id))
    assert deals == {(5, 0, "")}


def test_ranks_that_hear_at_different_moments_that_they_are_whole_leave_with_one_step():
    """Found by simulation: a group was drained while it healed, and a rank that had launched a step stayed for another one."""
    left = []
    for rank, word_first in zip(apart(), (True, False), strict=True):
        said = rank.see(WORD) if word_first else []
        said += rank.outcome("commit") + rank.see(WORD)
        while not any(isinstance(effect, m.CommitStep) for effect in said):
            rank.reduced(10, 25, 2, 0)
            said = rank.outcome("commit", healed=True)
        rank.see(m.Leaving())  # in the trainer's thread, at its boundary
        if rank.machine.phase is Phase.BOUNDARY:
            rank.see(m.Begin())
        commits = []
        while not commits or not commits[-1].leave:
            rank.reduced(10, 25, 2, 1)
            commits.append(only(m.CommitStep, rank.outcome("commit")))
            rank.see(m.Begin())
        left.append(commits[-1].step)
    assert left == [8, 8]


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


def test_ranks_that_heal_agree_at_their_server_until_they_have_said_yes_to_a_step():
    """Found by simulation: one had its state and was in the next step, the other had given up a moment before, and asked for a quorum. In a
    collective of their own the first would have waited for ever."""
    rank = healing()

    def is_for_all() -> bool:
        vote = only(m.CastVote, rank.reduced(10, 25, 2, 0)).vote
        return rank.machine.is_for_all(vote)

    assert not is_for_all()
    rank.outcome("commit")
    rank.see(m.HealEnded(2, True, source_state()))
    rank.see(Outcome("healed", 2, 0, 5, "yes"))
    assert not is_for_all()
    rank.outcome("commit", healed=True)
    rank.see(m.Begin())
    assert not is_for_all(), "the first of the healed state"
    rank.outcome("commit")
    rank.see(m.Begin())
    assert is_for_all()


def test_after_a_heal_that_failed_ranks_agree_at_their_server():
    """Found by simulation: who had voted no heard at once that the heal was over, and waited in a collective of the group for those who
    were still fetching."""
    rank = healing()
    rank.see(m.HealEnded(2, False, reason="what arrived is damaged"))
    rank.see(Outcome("healed", 2, 0, 5, "failed", reason="what arrived is damaged"))
    rank.reduced(10, 25, 2, 0)
    rank.outcome("commit")
    assert not rank.machine.is_for_all(only(m.CastVote, rank.reduced(10, 25, 2, 1)).vote)
