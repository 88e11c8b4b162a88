"""Transcripts of a group server: ranks ask and vote, one call goes out, one outcome comes back.

With the behaviours of the peer's manager server (its manager.rs tests) first.
"""

from __future__ import annotations

from typing import Any

import pytest

from ft.protocol import messages as m
from ft.protocol.group import OUTCOMES_KEPT, Group, GroupConfig
from ft.protocol.messages import Member, Quorum, RankCall, Vote


def group(size: int = 2, **config: Any) -> Group:
    made = Group(GroupConfig("a:1", size, "http://a", "store-a", **config), 0.0)
    for rank in range(size):
        made.handle(m.RankStream(rank, True), 0)
    return made


def said(machine: Group, event: m.Event, now_s: float = 0.0) -> list[m.Effect]:
    return list(machine.handle(event, now_s).effects)


def ask(
    machine: Group, rank: int, *, known: int = 0, failed: bool = False, number: int = 0, **member: Any
) -> list[m.Effect]:
    return said(machine, RankCall(rank, Member("", **member), f"http://a/{rank}", known, failed, number=number))


def quorum(quorum_id: int = 1, *ids: str) -> Quorum:
    return Quorum(quorum_id, tuple(Member(i, store_address=f"store-{i}") for i in ids or ("a:1", "b:1")))


def joined(size: int = 2, *, terms: m.Terms | None = None, **config: Any) -> Group:
    """All ranks have asked, quorum 1 was answered."""
    machine = group(size, **config)
    for rank in range(size):
        ask(machine, rank)
    said(machine, m.LighthouseAnswered(quorum(), terms=terms))
    return machine


def vote(
    rank: int,
    verdict: Any = "yes",
    kind: Any = "commit",
    *,
    quorum_id: int = 1,
    attempt: int = 0,
    step: int = 0,
    **more: Any,
):
    return Vote(rank, kind, quorum_id, attempt, step, verdict, **more)


# ------------------------------------------------------------------------------------------------ the peer's behaviours


def test_peer_get_quorum():
    """The call goes out when all ranks have asked; each gets its own part."""
    machine = group()
    assert ask(machine, 1) == [] and machine.reason == "1 of 2 ranks have asked for a quorum"
    [call] = ask(machine, 0)
    assert isinstance(call, m.CallLighthouse)
    assert call.call.member == Member("a:1", "http://a", "store-a", world_size=2)
    answers = said(machine, m.LighthouseAnswered(quorum(), m.Times()))
    assert [(e.group_rank, e.part.quorum_id, e.part.store_address) for e in answers if isinstance(e, m.AnswerRank)] == [
        (0, 1, "store-b:1"),
        (1, 1, "store-a:1"),
    ]


def test_a_late_copy_of_an_older_question_is_nobodys():
    """A rank's call from an earlier step of the same generation, and an answer that names the group as it was then."""
    machine = joined()
    ask(machine, 0, known=1, step=5, number=3)
    assert ask(machine, 0, known=1, step=3, number=2) == [] and "older question" in machine.reason
    [call] = ask(machine, 1, known=1, step=5, number=3)
    assert isinstance(call, m.CallLighthouse) and call.call.member.step == 5 and call.call.number == 2
    assert said(machine, m.LighthouseAnswered(quorum())) == [] and "older question" in machine.reason


def test_peer_should_commit():
    """AND of all ranks; the next step's vote starts anew."""
    machine = joined()
    assert said(machine, vote(0)) == []
    outcomes = [e.outcome.verdict for e in said(machine, vote(1)) if isinstance(e, m.AnswerVote)]
    assert outcomes == ["yes", "yes"]
    said(machine, vote(0, step=1))
    effects = said(machine, vote(1, "failed", step=1, reason="gloo: connection closed"))
    assert {e.outcome.verdict for e in effects if isinstance(e, m.AnswerVote)} == {"failed"}
    assert machine.reason == "commit: failed (rank 1: gloo: connection closed)"


def test_peer_checkpoint_metadata():
    machine = group()
    assert said(machine, m.AskMetadata(0)) == [m.FailRank(0, "INVALID_ARGUMENT", "rank not found")]
    ask(machine, 0)
    assert said(machine, m.AskMetadata(0)) == [m.Metadata(0, "http://a/0")]


def test_peer_lighthouse_down():
    """No retries: all waiting ranks are told at once. (The peer's never were.) They may ask again."""
    machine = group(retries=0)
    ask(machine, 0)
    ask(machine, 1)
    told = said(machine, m.LighthouseFailed("connection refused"))
    assert told == [
        m.FailRank(rank, "UNAVAILABLE", "the lighthouse did not answer in 1 tries: connection refused")
        for rank in (0, 1)
    ]
    ask(machine, 0)
    assert isinstance(ask(machine, 1)[0], m.CallLighthouse)


def test_peer_lighthouse_down_and_one_retry():
    machine = group(retries=1, retry_s=0.5)
    ask(machine, 0)
    ask(machine, 1)
    [again] = said(machine, m.LighthouseFailed("connection refused"))
    assert isinstance(again, m.CallLighthouse) and again.delay_s == 0.5
    assert [type(e) for e in said(machine, m.LighthouseFailed("connection refused"))] == [m.FailRank] * 2


def test_peer_an_unknown_rank():
    [refused] = ask(group(), 7)
    assert refused == m.FailRank(7, "INVALID_ARGUMENT", "rank 7: this group has ranks 0 to 1")


# ------------------------------------------------------------------------------------------------ ours: calls


def test_by_default_a_lighthouse_may_be_away_as_long_as_ranks_wait():
    machine = group()
    ask(machine, 0)
    ask(machine, 1)
    for _ in range(100):
        [effect] = said(machine, m.LighthouseFailed("connection refused"))
        assert isinstance(effect, m.CallLighthouse)
    said(machine, m.RankCancelled(0))
    said(machine, m.RankCancelled(1))
    assert said(machine, m.LighthouseFailed("connection refused")) == []


def test_a_rank_whose_answer_got_lost_asks_again():
    machine = joined()
    [answer] = ask(machine, 1)  # word for word what quorum 1 has answered
    assert isinstance(answer, m.AnswerRank) and answer.part.quorum_id == 1
    assert ask(machine, 1, known=1) == []  # this is a new question


def test_a_rank_that_did_not_hear_that_it_is_to_load_a_checkpoint_is_told_again():
    """Found by simulation: its question was taken for a new one, and the others waited for it where the checkpoint is loaded."""
    machine = group()
    ask(machine, 0, step=m.VOID), ask(machine, 1, step=m.VOID)
    assert said(machine, m.LighthouseWantsRestore(40)) == [m.RestoreRank(0, 40), m.RestoreRank(1, 40)]
    assert ask(machine, 1, step=m.VOID) == [m.RestoreRank(1, 40)]
    assert ask(machine, 1, step=40, number=1) == []  # this is a new question
    said(machine, m.LighthouseAnswered(quorum()))
    assert said(machine, m.LighthouseWantsRestore(40)) == [], "nobody has asked"


@pytest.mark.parametrize("answer", [m.LighthouseAnswered(quorum()), m.LighthouseWantsRestore(40)])
def test_a_rank_that_is_between_two_tries_gets_what_the_others_were_answered(answer: m.Event):
    machine = group()
    ask(machine, 0), ask(machine, 1)
    said(machine, m.RankCancelled(1))  # its call has broken
    told = [e for e in said(machine, answer) if isinstance(e, m.AnswerRank | m.RestoreRank)]
    assert [effect.group_rank for effect in told] == [0, 1]  # to rank 1 nobody listens
    assert ask(machine, 1) == told[1:]


def test_a_late_end_of_an_older_call_takes_no_rank_from_a_vote():
    machine = joined()
    said(machine, vote(0))
    said(machine, m.RankCancelled(0))
    assert [e.group_rank for e in said(machine, vote(1)) if isinstance(e, m.AnswerVote)] == [0, 1]


def test_what_is_decided_after_a_heal_says_so():
    """That is the place at which all ranks take the state; what was decided before stays as it was, whoever asks when."""
    machine = joined()
    for rank in (0, 1):
        said(machine, vote(rank))
    for rank in (0, 1):
        said(machine, vote(rank, kind="healed"))
    for rank in (0, 1):
        told = said(machine, vote(rank, step=1))
    assert [e.outcome.healed for e in told if isinstance(e, m.AnswerVote)] == [True, True]
    [again] = said(machine, vote(0))
    assert isinstance(again, m.AnswerVote) and not again.outcome.healed
    for rank in (0, 1):
        ask(machine, rank, known=1)
    said(machine, m.LighthouseAnswered(quorum()))
    assert not any(
        e.outcome.healed for rank in (0, 1) for e in said(machine, vote(rank, step=2)) if isinstance(e, m.AnswerVote)
    )


def test_a_call_that_comes_again_after_the_group_was_lost_gets_the_answer_it_had():
    """Found by simulation: the part was looked up under the new id, which is not in that quorum."""
    machine = joined()
    said(machine, m.LighthouseRefused("a:1", "LOST", "silent for 5 s"))
    [answer] = ask(machine, 1)
    assert isinstance(answer, m.AnswerRank) and answer.part.replica_id == "a:1" and machine.replica_id == "a:1.1"


def test_a_late_copy_of_an_older_question_does_not_answer_the_newer_one():
    """Found by simulation: the rank was sent back into the generation that it had just reported as failed."""
    machine = joined()
    ask(machine, 1, known=1, failed=True, number=1)
    assert ask(machine, 1) == [] and machine.reason == "rank 1: a late copy of an older question"
    [call] = ask(machine, 0, known=1, failed=True, number=1)
    assert isinstance(call, m.CallLighthouse) and call.call.known == 1


def test_a_late_copy_of_an_answer_does_not_lead_back_into_the_generation_that_has_failed():
    """Found by simulation: a stream that opened again brought the answer once more, just when the group had asked for the next."""
    machine = joined()
    ask(machine, 0, known=1, failed=True)
    ask(machine, 1, known=1, failed=True)
    assert said(machine, m.LighthouseAnswered(quorum())) == [] and machine.reason.startswith("quorum 1 has failed")
    assert [type(e) for e in said(machine, m.LighthouseAnswered(quorum(2)))] == [m.AnswerRank, m.AnswerRank]


def test_ranks_with_different_states_end_the_group():
    machine = group()
    ask(machine, 0, step=3, commit_id="x")
    effects = ask(machine, 1, step=4, commit_id="y")
    assert [type(e) for e in effects] == [m.FailRank, m.FailRank, m.EndGroup]
    assert machine.reason == "the ranks of this group hold different states (rank 0: step 3 x, rank 1: step 4 y)"


def test_times_that_do_not_fit_are_refused():
    machine = group(1)
    ask(machine, 0)
    effects = said(machine, m.LighthouseAnswered(quorum(), m.Times(heartbeat_timeout_s=8)))
    [refused] = effects
    assert isinstance(refused, m.FailRank) and refused.code == "INVALID_ARGUMENT"
    assert "heartbeat_timeout_s = 5.0: the lighthouse has 8" in refused.reason


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("ALREADY_EXISTS", "ALREADY_EXISTS"),
        ("FAILED_PRECONDITION", "INVALID_ARGUMENT"),
        ("INVALID_ARGUMENT", "INVALID_ARGUMENT"),
    ],
)
def test_what_the_user_has_to_mend_is_told_to_all_ranks(code: Any, told: str):
    machine = group(2)
    ask(machine, 0)
    ask(machine, 1)
    refusal = m.LighthouseRefused(machine.replica_id, code, "another optimizer.lr")
    assert said(machine, refusal) == [m.FailRank(rank, told, "another optimizer.lr") for rank in (0, 1)]


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ({"heartbeat_timeout_s": 0.5}, "beat_s = 1 must be below heartbeat_timeout_s = 0.5"),
        ({"rendezvous_s": 40.0}, "rendezvous_s = 40 must be below heal_grace_s = 30"),
        ({"takeover_s": 20.0}, "heal_grace_s = 30 must be below takeover_s = 20"),
        ({"takeover_s": None, "heal_grace_s": 700.0}, "heal_grace_s = 700 must be below collective_s = 600"),
    ],
)
def test_the_ladder_of_times(times: dict[str, Any], words: str):
    assert m.Times().incompatible_timeouts(m.Times()) == []
    ladder = m.Times(**times)
    assert ladder.incompatible_timeouts(ladder) == [words]


def test_a_lost_group_returns_under_another_id():
    machine = joined()
    effects = said(machine, m.LighthouseRefused("a:1", "LOST", "silent for 5 s"))
    assert effects[0] == m.CloseStream()  # the name is free, until all ranks ask
    assert {type(e.notice) for e in effects[1:] if isinstance(e, m.NotifyRank)} == {m.GenerationAborted}
    ask(machine, 0, known=1, failed=True)
    [opened, call] = ask(machine, 1, known=1, failed=True)
    assert opened == m.OpenStream("a:1.1") and isinstance(call, m.CallLighthouse)
    assert (call.call.member.replica_id, call.call.failed) == ("a:1.1", True)
    assert said(machine, m.LighthouseRefused("a:1", "LOST", "silent for 5 s")) == []  # an echo
    [opened, *_, call] = said(machine, m.LighthouseRefused("a:1.1", "LOST", "silent for 5 s"))  # all ranks wait already
    assert opened == m.OpenStream("a:1.2") and isinstance(call, m.CallLighthouse)
    assert call.call.member.replica_id == "a:1.2"


@pytest.mark.parametrize("code", ["INVALID_ARGUMENT", "FAILED_PRECONDITION", "ALREADY_EXISTS"])
def test_whoever_was_a_member_waits_where_the_lighthouse_refuses_it(code: Any):
    """A lighthouse with another token, one of another job, or one where another layout came first: a newcomer is told, and ends."""
    machine = joined()
    ask(machine, 0, known=1)
    [call] = ask(machine, 1, known=1)
    [again] = said(machine, m.LighthouseRefused("a:1", code, "this job has a token"))
    assert isinstance(again, m.CallLighthouse) and again.call == call.call and again.delay_s > 0  # type: ignore[attr-defined]
    assert (
        machine.reason == "the lighthouse refuses this group: this job has a token; it asks again, for it was a member"
    )
    newcomer = group()
    ask(newcomer, 0)
    ask(newcomer, 1)
    assert {type(effect) for effect in said(newcomer, m.LighthouseRefused("a:1", code, "no"))} == {m.FailRank}


def test_whoever_was_a_member_waits_where_the_lighthouse_has_other_times():
    machine = joined()
    ask(machine, 0, known=1)
    ask(machine, 1, known=1)
    [again] = said(machine, m.LighthouseAnswered(quorum(2), m.Times(heartbeat_timeout_s=7.0)))
    assert isinstance(again, m.CallLighthouse) and "heartbeat_timeout_s = 5.0: the lighthouse has 7.0" in machine.reason


def test_a_commit_waits_by_the_lighthouses_terms():
    for takeover_s, waits in ((None, False), (300.0, False), (30.0, True)):
        machine = joined(terms=m.Terms(takeover_s=takeover_s))
        for rank in (0, 1):
            effects = said(machine, vote(rank), 16.0)
        assert (effects == []) is waits, takeover_s


def test_who_was_lost_and_is_cut_off_gives_its_commit_up():
    """Found by simulation: no stream was open, so no beat was ever answered, and the commit waited for ever."""
    machine = joined()
    said(machine, m.LighthouseRefused("a:1", "LOST", "silent for 5 s"))
    said(machine, vote(0), 16.0)
    effects = said(machine, vote(1), 16.0)
    assert {e.outcome.verdict for e in effects if isinstance(e, m.AnswerVote)} == {"failed"}


def test_a_minute_of_sleep_ends_no_group():
    """The clock goes on while the machine sleeps; the ranks did not."""
    machine = group()
    ask(machine, 0)
    for at_s in (0.5, 1.0, 61.0, 61.5, 100.0):
        assert not [e for e in said(machine, m.Tick(), at_s) if isinstance(e, m.EndGroup)], at_s
    machine = group()
    ask(machine, 0)
    ends = [at_s for at_s in range(1, 70) if any(isinstance(e, m.EndGroup) for e in said(machine, m.Tick(), at_s))]
    assert ends == [60]


def test_a_checkpoint_is_asked_of_all_ranks():
    machine = group()
    ask(machine, 0)
    ask(machine, 1)
    assert said(machine, m.LighthouseWantsRestore(40)) == [m.RestoreRank(0, 40), m.RestoreRank(1, 40)]


# ------------------------------------------------------------------------------------------------ ours: votes


def test_the_first_failure_decides_and_the_others_are_told():
    machine = joined(3)
    effects = said(machine, vote(1, "failed", reason="b is gone", blame=("b:1",)))
    assert [(type(e), e.group_rank) for e in effects if isinstance(e, m.AnswerVote | m.NotifyRank)] == [
        (m.AnswerVote, 1),
        (m.NotifyRank, 0),
        (m.NotifyRank, 2),
    ]
    [late] = said(machine, vote(0))  # it had all sums, but the group has decided
    assert isinstance(late, m.AnswerVote) and late.outcome.verdict == "failed" and late.outcome.blame == ("b:1",)


def test_not_able_waits_for_all_ranks_for_what_comes_next_depends_on_them():
    machine = joined(2)
    assert said(machine, vote(0, "again")) == []
    outcome = said(machine, vote(1))[0]
    assert isinstance(outcome, m.AnswerVote) and outcome.outcome.verdict == "again"


def test_a_change_that_one_rank_saw_is_a_change():
    machine = joined()
    said(machine, vote(0, change=True))
    assert all(e.outcome.change for e in said(machine, vote(1)) if isinstance(e, m.AnswerVote))


def test_outcomes_may_be_asked_again_and_stale_votes_are_refused():
    machine = joined(1)
    for step in range(3):
        said(machine, vote(0, step=step))
    [told] = said(machine, vote(0, "failed", step=1))
    assert isinstance(told, m.AnswerVote) and told.outcome.verdict == "yes"
    for step in range(3, 5 + OUTCOMES_KEPT):
        said(machine, vote(0, step=step))
    [stale] = said(machine, vote(0, step=1))
    assert isinstance(stale, m.FailRank) and stale.code == "STALE" and "the group is at step 20" in stale.reason
    [other] = said(machine, vote(0, quorum_id=9))
    assert isinstance(other, m.FailRank) and other.reason == "a vote for quorum 9; this group is in 1"
    assert len(machine._outcomes) == OUTCOMES_KEPT


def test_a_vote_that_comes_twice_counts_once():
    machine = joined(2)
    assert said(machine, vote(0)) == said(machine, vote(0)) == []
    assert len(said(machine, vote(1))) == 2


def test_a_group_that_was_cut_off_waits_before_it_commits():
    """The last answered beat was sent 16 s ago; after 30 the others may take over."""
    machine = joined(1)
    assert said(machine, vote(0), 16.0) == []
    assert machine.reason == "the commit waits: no answer from the lighthouse since 0"
    assert said(machine, m.BeatAnswered(0.5), 16.5) == []  # an old one
    [answer] = said(machine, m.BeatAnswered(16.5), 16.6)
    assert isinstance(answer, m.AnswerVote) and answer.outcome.verdict == "yes"


def test_a_commit_that_waits_is_off_when_the_group_is_lost():
    machine = joined(1)
    said(machine, vote(0), 16.0)
    effects = said(machine, m.LighthouseRefused("a:1", "LOST", "silent for 5 s"), 17.0)
    assert [e.outcome.verdict for e in effects if isinstance(e, m.AnswerVote)] == ["failed"]


# ------------------------------------------------------------------------------------------------ ours: notices


def test_notices_reach_each_rank_once_and_only_in_their_generation():
    machine = joined()
    lost = m.MemberLost(1, ("b:1",))
    assert said(machine, lost) == [m.NotifyRank(0, lost), m.NotifyRank(1, lost)]
    assert said(machine, lost) == []
    assert said(machine, m.GenerationAborted(0)) == []
    assert said(machine, m.RankStream(0, True)) == [m.NotifyRank(0, lost)]  # a new stream starts with what holds


@pytest.mark.parametrize("sign", [m.GenerationAborted(2), m.ChangeAnnounced(2), m.LighthouseAnswered(quorum(2))])
def test_a_newer_quorum_that_counts_on_this_group_ends_its_generation(sign: m.Event):
    """Found by simulation: the group was put in by a late copy of its call. It waited in the old collective, the others in the new."""
    machine = joined()
    over = m.GenerationAborted(1, "quorum 2 was formed")
    assert said(machine, sign) == [m.NotifyRank(0, over), m.NotifyRank(1, over)]
    assert said(machine, sign) == []


def test_a_notice_that_overtakes_the_answer_is_told_after_it():
    """Found by simulation: the group was alone in its first quorum, and never heard of the others who waited to come in."""
    machine = group(1)
    ask(machine, 0)
    waits = m.ChangeAnnounced(1, "b:1 waits")
    assert said(machine, waits) == []
    [answer, told] = said(machine, m.LighthouseAnswered(quorum(1, "a:1")))
    assert isinstance(answer, m.AnswerRank) and told == m.NotifyRank(0, waits)


def test_a_rank_that_is_gone_ends_the_group():
    assert said(joined(), m.RankStream(1, False)) == [m.EndGroup("rank 1 is gone")]


def test_a_call_that_was_repeated_while_all_waited_says_nothing_about_the_next_one():
    """The group would be ended in the middle of its training (seeds 4459, 6070)."""
    machine = group(2)
    ask(machine, 0), ask(machine, 1)
    ask(machine, 0)  # its call timed out, and the lighthouse has not answered yet
    said(machine, m.LighthouseAnswered(quorum()), 5.0)
    assert said(machine, m.Tick(), 1000.0) == []
    ask(machine, 0, known=1)
    machine.handle(RankCall(1, Member(""), known=1), 1001.0)
    assert not any(isinstance(effect, m.EndGroup) for effect in said(machine, m.Tick(), 1002.0))


def test_a_rank_that_never_asks_ends_the_group():
    """It died before its stream was open; the others' calls end and begin again meanwhile."""
    machine = group(2)
    ask(machine, 1)
    said(machine, m.RankCancelled(1), 30)
    machine.handle(RankCall(1, Member("")), 31)
    for at_s in range(60):
        assert said(machine, m.Tick(), at_s + 0.9) == []
    effects = said(machine, m.Tick(), 60.0)
    assert effects[-1] == m.EndGroup("ranks [0] have not asked for a quorum within 60 s of the others")
    assert said(joined(2), m.Tick(), 1000.0) == []
