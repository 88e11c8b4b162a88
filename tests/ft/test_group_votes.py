"""Ranks of a group that agree on a step among themselves (ft/agreement.py): what they ask their server, and what they do without it."""

from __future__ import annotations

import threading

import pytest

from ft.protocol import messages as m
from ft.rpc.clients import GroupClient
from ft.seam import GroupEnded
from tests.ft.groups import LIMIT_S, Rank, job

Said = list[tuple[int, m.Vote]]


@pytest.fixture
def cast(monkeypatch: pytest.MonkeyPatch) -> Said:
    """Votes on commits that reach the server, with the rank that cast each."""
    votes, vote = list[tuple[int, m.Vote]](), GroupClient.vote

    def noted(client: GroupClient, word: m.Vote, timeout_s: float) -> m.Outcome:
        if word.kind == "commit":
            votes.append((client.group_rank, word))
        return vote(client, word, timeout_s)

    monkeypatch.setattr(GroupClient, "vote", noted)
    return votes


def test_one_rank_asks_for_all(cast: Said):
    with job(min_replicas=2) as made:
        ranks = [rank for name in "ab" for rank in made.group(name, size=3, steps=6, together=2, agrees=True)]
        for rank in ranks:
            assert rank.join().error is None
        commits = ranks[0].commits
        assert len(commits) >= 6 and all(rank.commits == commits for rank in ranks)
    assert cast and {(rank, word.whole) for rank, word in cast} == {(0, True)}


def test_a_rank_whose_sums_failed_asks_by_itself_and_all_make_the_step_again(cast: Said):
    """Group b dies in the middle of a step: some of a's ranks may have its sums, some have not."""
    dead, last = threading.Event(), dict[str, int]()

    def dies(rank: Rank, step: int) -> None:
        if rank.group_rank == 0 and len(rank.together_commits) == 2:
            rank.kill()
            dead.set()

    def ends(rank: Rank, step: int) -> None:
        """All at one step, for nobody is further than the next one; b may start late."""
        if dead.is_set():
            rank.steps = last.setdefault("step", step + 3) - rank.together_commits[0] + 1

    with job(min_replicas=1) as made:
        ranks = made.group("a", size=2, steps=1 << 30, agrees=True, at=ends)
        other = made.group("b", size=2, steps=1 << 30, together=2, agrees=True, at=dies)[0]
        for rank in ranks:
            assert rank.join().error is None
        assert ranks[0].commits == ranks[1].commits and ranks[0].computed == ranks[1].computed
        assert isinstance(other.join().error, GroupEnded)
        assert max(size for _, size, _ in ranks[0].commits) == 2


def test_a_commit_that_is_held_is_asked_for_by_each_rank(cast: Said, monkeypatch: pytest.MonkeyPatch):
    """The lighthouse is silent for longer than half of takeover_s, then answers again: nobody stands in a collective meanwhile."""
    monkeypatch.setattr("ft.group_calls.WHOLE_VOTE_S", 0.3)
    held, goes_on = threading.Event(), threading.Event()
    vote = GroupClient.vote

    def holds(client: GroupClient, word: m.Vote, timeout_s: float) -> m.Outcome:
        if word.kind == "commit" and word.step == 2 and not goes_on.is_set():
            held.set()
            if not goes_on.wait(timeout_s):
                raise TimeoutError("held")
        return vote(client, word, timeout_s)

    monkeypatch.setattr(GroupClient, "vote", holds)
    with job(min_replicas=1) as made:
        ranks = made.group("a", size=2, steps=4, agrees=True)
        assert held.wait(LIMIT_S)
        ranks[1].thread.join(2 * 0.3)
        goes_on.set()
        for rank in ranks:
            assert rank.join().error is None and [step for step, _, _ in rank.commits] == [1, 2, 3, 4]
    of_step = [(rank, word.whole) for rank, word in cast if word.step == 2]
    assert sorted(of_step) == [(0, False), (1, False)], "the one for all was given up"


def test_ranks_that_vote_on_different_things_end():
    def at(rank: Rank, step: int) -> None:
        if step == 2 and rank.group_rank == 1:
            say = rank.manager._calls._agreement.all_say_yes
            rank.manager._calls._agreement.all_say_yes = lambda ballot, **more: say((9, *ballot[1:]), **more)

    with job(min_replicas=1) as made:
        ranks = made.group("a", size=2, steps=4, agrees=True, at=at)
        for rank in ranks:
            error = rank.join().error
            assert isinstance(error, GroupEnded) and "vote on different things" in str(error)
