"""Weights are compared: digests in the tail of a step, and what becomes of a group whose weights are not the others'."""

from __future__ import annotations

from typing import Any

import pytest

from ft.protocol import messages as m
from ft.protocol.compare import find_divergent, in_tail
from ft.protocol.messages import Computed
from tests.protocol.rank import Rank, names, only, part, source_state

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
    rank = trio(leave_if_divergent=True)
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


# ------------------------------------------------------------------------------------------------ copies are no witnesses


def copy(digest: tuple[float, float]) -> tuple[float, float]:
    return (-digest[0], -digest[1])


W, C = OWN, copy(OWN)  # right, of a witness and of a copy; X, Y: wrong
X, Y = OTHER, copy(OTHER)


@pytest.mark.parametrize(
    ("digests", "odd"),
    [
        ([W, W, C], ""),
        ([C, C, C], ""),
        ([W, X, Y], "all"),  # b was wrong before c healed from it,
        ([X, W, C], "all"),  # or a went wrong, and b and c are right: who can tell
        ([W, W, Y], "c"),
        ([W, W, Y, Y, Y], "cde"),  # one that was wrong before it gave its state to three others
        ([W, W, X, Y, Y], "cde"),
        ([W, W, X, C], "c"),
        ([W, W, X, X, Y], "all"),
        ([W, C, Y], "c"),  # a alone is a witness: it gave to both, and one of them went wrong since,
        ([X, C, C], "all"),  # or it did itself
        ([W, Y], "all"),
        ([C, C, Y], "all"),
        ([W, NOTHING, Y], "all"),
        ([W, NOTHING, C], ""),
    ],
)
def test_whose_weights_are_odd(digests: list[tuple[float, float]], odd: str):
    members = "abcde"[: len(digests)]
    found = find_divergent([figure for digest in digests for figure in digest], tuple(members))
    assert "".join(found) == (members if odd == "all" else odd)


def test_a_figure_of_zero_is_a_copys_as_well():
    assert find_divergent((*in_tail((0.0, 5.0), copied=True), 0.0, 5.0, 0.0, 5.0), ("a", "b", "c")) == ()
    assert find_divergent((*in_tail((0.0, 5.0), copied=True), 0.0, 6.0, 0.0, 6.0), ("a", "b", "c")) == ("a",)


def healed(step: int, **config: Any) -> Rank:
    """This group, a, comes to two others at that step, and is whole by the next."""
    rank = Rank(digest_interval=2, **config)
    rank.enter(part(2, heal=True, step=step, commit=(1, f"c{step}"), **{**TRIO, "participants": ("b:1", "c:1")}))
    rank.see(m.HealEnded(2, True, source_state(step, pending=2)))
    rank.see(m.Outcome("healed", 2, 0, step, "yes"))
    rank.reduced(10, 10, 75, 3, 1, *([0.0] * 6 if (step + 1) % 2 == 0 else []))
    rank.outcome("commit", change=True)
    return rank


def launch(rank: Rank, quorum_id: int) -> m.LaunchTail:
    step, quorum, commit_id = rank.machine.step, rank.machine.commit_quorum_id, rank.machine.commit_id
    rank.enter(part(quorum_id, step=step, commit=(quorum, commit_id), **TRIO, replica_rank=0))
    return only(m.LaunchTail, rank.see(Computed((10.0,), 25.0)))


def test_who_has_healed_is_no_witness_until_it_was_compared():
    rank = healed(6)
    sent = launch(rank, 3)
    assert sent.digest_at > 0 and sent.copied
    rank.reduced(10, 10, 10, 75, 3, 1, *C, *W, *W)
    rank.outcome("commit", change=True)
    sent = launch(rank, 4)
    assert (sent.digest_at, sent.copied) == (0, False)
    rank.reduced(10, 10, 10, 75, 3, 1)
    rank.outcome("commit", change=True)
    sent = launch(rank, 5)
    assert sent.digest_at > 0 and not sent.copied


def test_a_comparison_that_it_had_no_part_in_makes_it_no_witness():
    """Its state came after it had given zeros, in the place of its digest, too."""
    rank = healed(5)
    launch(rank, 3)
    rank.reduced(10, 10, 10, 75, 3, 1)
    rank.outcome("commit", change=True)
    sent = launch(rank, 4)
    assert sent.digest_at > 0 and sent.copied


def test_who_went_wrong_and_has_healed_is_no_witness_either():
    rank = trio()
    compared(OTHER, OWN, OWN, rank=rank)
    assert rank.machine.void
    step, quorum, commit_id = rank.machine.step, rank.machine.commit_quorum_id, rank.machine.commit_id
    state = {**source_state(step, pending=2), "commit_id": commit_id, "commit_quorum_id": quorum}
    rank.enter(part(2, heal=True, step=step, commit=(quorum, commit_id), **{**TRIO, "participants": ("b:1", "c:1")}))
    rank.see(m.HealEnded(2, True, state))
    rank.see(m.Outcome("healed", 2, 0, step, "yes"))
    rank.reduced(10, 10, 75, 3, 1)
    rank.outcome("commit", change=True)
    assert launch(rank, 3).copied


def test_the_first_state_of_all_and_a_checkpoint_have_no_witness_to_ask():
    """Of step 0 and of a checkpoint there is but one: what all take from there is right."""
    rank = healed(0, init_sync=True)
    sent = launch(rank, 3)
    assert sent.digest_at > 0 and not sent.copied
    rank = healed(6)
    rank.see(m.Begin())
    rank.see(m.WantsRestore(6))
    rank.see(m.Restored(source_state(7)))
    sent = launch(rank, 3)
    assert sent.digest_at > 0 and not sent.copied
