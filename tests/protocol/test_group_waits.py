"""Transcripts of a group server whose group waits: what it says to its ranks, and how they are let go; and of one vote for all of them."""

from __future__ import annotations

import sys

import pytest

from ft.protocol import messages as m
from ft.protocol.group import GO_BEATS, Group
from tests.protocol.test_group import ask, group, joined, quorum, said, vote


def words(machine: Group, now_s: float) -> list[tuple[str, float]]:
    return [(e.reason, e.waited_s) for e in said(machine, m.Tick(), now_s) if isinstance(e, m.TellWaits)]


def let_go(effects: list[m.Effect]) -> list[int]:
    return [e.group_rank for e in effects if isinstance(e, m.LetRankGo)]


def test_a_group_that_waits_for_a_quorum_says_why_and_since_when():
    machine = group()
    ask(machine, 0)
    assert words(machine, 50) == [], "one of its own ranks is late"
    ask(machine, 1)
    said(machine, m.BeatAnswered(51.0), 51)
    said(machine, m.LighthouseSays("1 would take part, min_replicas is 2"), 51)
    assert words(machine, 52) == [("no quorum: 1 would take part, min_replicas is 2", 52.0)]
    assert words(machine, 52.5) == [] and len(words(machine, 53)) == 1, "once a beat"
    [(away, _)] = words(machine, 60)
    words_before = "before that: 1 would take part, min_replicas is 2"
    assert away == f"no quorum: the lighthouse last answered 9 s ago; {words_before}"
    said(machine, m.LighthouseAnswered(quorum()), 61)
    assert words(machine, 70) == []


def test_a_rank_that_asks_again_changes_nothing_about_since_when():
    machine = group(size=1)
    ask(machine, 0, number=1)
    said(machine, m.RankCancelled(0), 30)
    assert words(machine, 30) == []
    ask(machine, 0, number=2)
    assert [since for _, since in words(machine, 31)] == [31.0]


def test_a_group_whose_commit_is_held_says_so():
    machine = joined()
    said(machine, m.BeatAnswered(1.0), 1)
    assert said(machine, vote(0), 20) == said(machine, vote(1), 20) == []
    assert words(machine, 21) == [("the commit waits: the lighthouse last answered 20 s ago", 1.0)]
    assert [e.outcome.verdict for e in said(machine, m.BeatAnswered(22.0), 22) if isinstance(e, m.AnswerVote)] == [
        "yes",
        "yes",
    ]
    assert words(machine, 23) == []


def test_a_group_in_the_sums_of_a_step_says_so_until_a_reduction_must_have_failed():
    machine = joined()
    said(machine, m.SumsAwaited(True), 10)
    assert words(machine, 12) == [("other groups, in the sums of a step", 2.0)]
    assert words(machine, 10 + machine.config.times.collective_s + 1) == []
    said(machine, m.SumsAwaited(False), 700)
    assert words(machine, 701) == []


@pytest.mark.parametrize("when", ["before", "while"])
def test_sigterm_while_a_quorum_is_waited_for_lets_all_ranks_go(when: str):
    machine = group()
    if when == "before":
        said(machine, m.WantsToLeave(), 0)
    ask(machine, 0, number=1)
    ask(machine, 1, number=1)
    if when == "while":
        said(machine, m.WantsToLeave(), 1)
    assert let_go(said(machine, m.Tick(), GO_BEATS - 0.5)) == []
    assert let_go(said(machine, m.Tick(), GO_BEATS)) == [0, 1]
    assert said(machine, m.LighthouseAnswered(quorum()), GO_BEATS) == [], "one verdict for all"
    assert let_go(ask(machine, 1, number=1)) == [1], "who was between two tries hears the same"


def test_sigterm_while_a_commit_is_held_gives_it_up_and_lets_the_ranks_go_with_their_next_question():
    machine = joined()
    said(machine, vote(0), 20), said(machine, vote(1), 20)
    said(machine, m.WantsToLeave(), 21)
    given_up = said(machine, m.Tick(), 23.5)
    assert [(e.group_rank, e.outcome.verdict) for e in given_up if isinstance(e, m.AnswerVote)] == [
        (0, "failed"),
        (1, "failed"),
    ]
    assert ask(machine, 0, known=1, failed=True) == [], "all ranks are to hold one state"
    assert let_go(ask(machine, 1, known=1, failed=True)) == [0, 1]


def test_sigterm_while_sums_are_waited_for_ends_the_generation_and_lets_the_ranks_go():
    machine = joined()
    said(machine, m.SumsAwaited(True), 10)
    said(machine, m.WantsToLeave(), 11)
    told = [e for e in said(machine, m.Tick(), 13) if isinstance(e, m.NotifyRank)]
    assert [(e.group_rank, type(e.notice)) for e in told] == [(0, m.GenerationAborted), (1, m.GenerationAborted)]
    assert [e for e in said(machine, m.Tick(), 14) if isinstance(e, m.NotifyRank)] == [], "once"
    said(machine, vote(0, "failed"), 14)
    ask(machine, 0, known=1, failed=True)
    assert let_go(ask(machine, 1, known=1, failed=True)) == [0, 1]


def test_sigterm_of_a_group_that_waits_for_nobody_is_its_trainers_affair():
    machine = joined()
    said(machine, m.WantsToLeave(), 1)
    assert said(machine, m.Tick(), 30) == []
    said(machine, m.BeatAnswered(30.0), 30)
    said(machine, vote(0), 31)
    assert [e.outcome.verdict for e in said(machine, vote(1), 31) if isinstance(e, m.AnswerVote)] == ["yes", "yes"]


def test_one_vote_for_all_ranks_is_answered_and_others_may_still_ask():
    machine = joined(size=3)
    [answer] = said(machine, vote(0, change=True, whole=True))
    assert isinstance(answer, m.AnswerVote) and (answer.group_rank, answer.outcome.verdict) == (0, "yes")
    assert answer.outcome.change and answer.outcome.reason == "all ranks said yes"
    assert said(machine, vote(2)) == [m.AnswerVote(2, answer.outcome)]


def test_one_vote_for_all_ranks_is_held_as_theirs_would_be():
    """The one who spoke for all has given up by then, and each has asked by itself."""
    machine = joined(size=3)
    assert said(machine, vote(0, whole=True), 20) == []
    assert said(machine, vote(0), 22) == said(machine, vote(1), 22) == said(machine, vote(2), 22) == []
    answers = said(machine, m.BeatAnswered(23.0), 23)
    assert [(e.group_rank, e.outcome.verdict) for e in answers if isinstance(e, m.AnswerVote)] == [
        (0, "yes"),
        (1, "yes"),
        (2, "yes"),
    ]


def test_one_vote_for_all_ranks_costs_the_same_however_many_they_are():
    """Counted: the calls that are made inside the machine."""

    def calls_of_a_step(size: int) -> int:

        machine, count = joined(size=size), 0

        def count_calls(frame: object, event: str, _: object) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        event = vote(0, whole=True)
        sys.setprofile(count_calls)
        machine.handle(event, 0.0)
        sys.setprofile(None)
        return count

    assert calls_of_a_step(2) == calls_of_a_step(64)
