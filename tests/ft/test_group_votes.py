"""Ranks of a group that agree on a step among themselves (ft/agreement.py): what they ask their server, and what they do without it."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

from ft.agreement import Agreement
from ft.manager import Manager
from ft.protocol import messages as m
from ft.rpc.clients import GroupClient
from ft.seam import GroupEnded
from tests.ft.groups import LIMIT_S, Rank, finish, job


class Cast:
    """Votes on commits that reach the server, with the rank that cast each. `before`: called before each, in its thread."""

    def __init__(self, before: Any = lambda vote, timeout_s: None) -> None:
        self.votes, self.before = list[tuple[int, m.Vote]](), before

    @property
    def make(self) -> partial[Manager]:
        """Returns a maker of managers whose votes are recorded here."""
        return partial(Manager, connect=partial(Noted, self))


class Impatient(Agreement):
    joint_vote_s = 0.3


class Noted(GroupClient):
    def __init__(self, cast: Cast, *what: Any) -> None:
        super().__init__(*what)
        self.cast = cast

    def vote(self, vote: m.Vote, timeout_s: float) -> m.Outcome:
        if vote.kind == "commit":
            self.cast.before(vote, timeout_s)
            self.cast.votes.append((self.group_rank, vote))
        return super().vote(vote, timeout_s)


class LateToLearn(GroupClient):
    """Rank 1 has the outcome of the vote on step 3 only when the group has left."""

    def outcome(self, vote: m.Vote) -> m.Outcome:
        outcome = super().outcome(vote)
        if (self.group_rank, vote.kind, vote.step) == (1, "commit", 2):
            assert self.gone.wait(LIMIT_S)
        return outcome


def test_a_commit_is_applied_by_a_rank_that_learns_of_it_after_the_group_has_left():
    with job(min_replicas=1) as made:
        ranks = made.group("a", size=2, steps=3, make=partial(Manager, connect=LateToLearn))
        finish(*ranks)
        assert ranks[0].commits == ranks[1].commits and len(ranks[0].commits) == 3


def test_one_rank_asks_for_all():
    cast = Cast()
    with job(min_replicas=2) as made:
        ranks = [
            rank for name in "ab" for rank in made.group(name, size=3, steps=6, together=2, agrees=True, make=cast.make)
        ]
        finish(*ranks)
        commits = ranks[0].commits
        assert len(commits) >= 6 and all(rank.commits == commits for rank in ranks)
    assert cast.votes and {(rank, word.joint) for rank, word in cast.votes} == {(0, True)}


def test_a_rank_whose_sums_failed_asks_by_itself_and_all_make_the_step_again():
    """Group b dies in the middle of a step: some of a's ranks may have its sums, some have not."""
    dead, last = threading.Event(), dict[str, int]()

    def dies(rank: Rank, step: int) -> None:
        if rank.group_rank == 0 and len(rank.together_commits) == 2:
            rank.kill()
            dead.set()

    def ends(rank: Rank, step: int) -> None:
        """Ends all ranks at one step, for nobody is further than the next one; b may start late."""
        if dead.is_set():
            rank.steps = last.setdefault("step", step + 3) - rank.together_commits[0] + 1

    with job(min_replicas=1) as made:
        ranks = made.group("a", size=2, steps=1 << 30, agrees=True, at=ends)
        other = made.group("b", size=2, steps=1 << 30, together=2, agrees=True, at=dies)[0]
        finish(*ranks)
        assert ranks[0].commits == ranks[1].commits and ranks[0].computed == ranks[1].computed
        assert isinstance(other.join().error, GroupEnded)
        assert max(size for _, size, _ in ranks[0].commits) == 2


def test_a_commit_that_is_held_is_asked_for_by_each_rank():
    """The lighthouse is silent for longer than half of takeover_s, then answers again: nobody stands in a collective meanwhile."""
    held, goes_on = threading.Event(), threading.Event()

    def holds(vote: m.Vote, timeout_s: float) -> None:
        if vote.step == 2 and not goes_on.is_set():
            held.set()
            if not goes_on.wait(timeout_s):
                raise TimeoutError("held")

    cast = Cast(holds)
    with job(min_replicas=1) as made:
        ranks = made.group("a", size=2, steps=4, agrees=True, agree=Impatient, make=cast.make)
        assert held.wait(LIMIT_S)
        ranks[1].thread.join(2 * 0.3)
        goes_on.set()
        for rank in ranks:
            assert rank.join().error is None and [step for step, _, _ in rank.commits] == [1, 2, 3, 4]
    of_step = [(rank, word.joint) for rank, word in cast.votes if word.step == 2]
    assert sorted(of_step) == [(0, False), (1, False)], "the one for all was given up"


def test_ranks_that_vote_on_different_things_end():
    class Another(Agreement):
        """The second rank's votes are named after another quorum from step 2 on."""

        def outcome(self, client: Any, vote: m.Vote, *, free: bool) -> m.Outcome | None:
            another = replace(vote, quorum_id=9) if (vote.group_rank, vote.step) == (1, 2) else vote
            return super().outcome(client, another, free=free)

    with job(min_replicas=1) as made:
        for rank in made.group("a", size=2, steps=4, agrees=True, agree=Another):
            error = rank.join().error
            assert isinstance(error, GroupEnded) and "vote on different attempts" in str(error)
