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
