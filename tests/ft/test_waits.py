"""Limits on a newcomer's delay of the others; and a group that waits for others or for its server's answer."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from ft import buckets
from ft.protocol import messages as m
from ft.rpc.clients import VOTE_TRIES, GroupClient
from ft.rpc.driver import now_s
from ft.seam import GroupEnded, GroupReleased
from tests.ft.groups import Rank, job


def test_memory_is_touched_before_a_quorum_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    """All buffers are touched before the quorum call: after it, the first work of a group delays everybody's next step."""
    made_s: list[float] = []
    make = buckets.GradBuffers.__init__

    def timed(self: buckets.GradBuffers, *what: object, **more: object) -> None:
        make(self, *what, **more)  # type: ignore[arg-type]
        made_s.append(now_s())

    monkeypatch.setattr(buckets.GradBuffers, "__init__", timed)
    with job(min_replicas=1) as made:
        rank = made.group("a", steps=5)[0].join()
        assert rank.error is None
    parts_s = [at_s for at_s, event, _ in rank.seen if isinstance(event, m.QuorumResult)]
    assert len(made_s) == buckets.KEPT_SETS and max(made_s) < parts_s[0]


def test_sigterm_while_others_are_waited_for_ends_all_ranks_with_what_they_hold():
    """One of two groups dies, both are needed: one rank of the other is asked to leave."""

    def dies(rank: Rank, step: int) -> None:
        if (rank.name, rank.group_rank) == ("b", 0) and len(rank.together_commits) == 3:
            rank.kill()

    with job(min_replicas=2) as made:
        more: dict[str, Any] = {"size": 2, "steps": 99, "together": 2, "agrees": True, "times": m.Timeouts(beat_s=0.2)}
        a, _ = (made.group(name, at=dies, **more) for name in "ab")
        while not any(isinstance(event, m.MemberLost) for _, event, _ in a[0].seen):
            a[0].thread.join(0.05)
        a[1].manager.want_to_leave()
        for rank in a:
            error = rank.join().error
            assert isinstance(error, GroupReleased) and error.has_state
        assert a[0].commits == a[1].commits and a[0].manager.step == a[0].commits[-1][0]
        for rank in a:
            rank.error = None  # what it holds is what its ledger says


class Silent(GroupClient):
    """A server that answers no vote in time: `tries` of them."""

    def __init__(self, answers_at: int, group_rank: int = 0) -> None:
        super().__init__("http://127.0.0.1:1", group_rank)
        self.answers_at, self.tries = answers_at, 0

    def vote(self, vote: m.Vote, timeout_s: float) -> m.Outcome:
        self.tries += 1
        if self.tries < self.answers_at:
            raise TimeoutError("deadline")
        return m.Outcome("commit", 1, 0, 0, "yes")


VOTE = m.Vote(0, "commit", 1, 0, 0, "yes")


def test_a_vote_that_the_server_holds_is_no_try():
    with closing(Silent(answers_at=10 * VOTE_TRIES)) as client:
        client.on_waits(m.Waits("the commit waits", 5.0))
        assert client.outcome(VOTE).verdict == "yes"


def test_a_vote_that_nobody_says_anything_about_is_given_up():
    with closing(Silent(answers_at=10 * VOTE_TRIES)) as client:
        with pytest.raises(GroupEnded, match="no outcome"):
            client.outcome(VOTE)
        assert client.tries == VOTE_TRIES


@pytest.mark.parametrize("group_rank", [0, 1])
def test_what_is_waited_for_is_said_once_a_minute_by_one_rank(group_rank: int, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", "pharos"), closing(Silent(0, group_rank)) as client:
        for second in (*range(200), *range(30)):
            client.on_waits(m.Waits("no quorum: min_replicas is 2", float(second)))
    said = [line.partition(":")[0] for line in caplog.messages]
    seconds = [10, 60, 120, 180, 10] if group_rank == 0 else []
    assert said == [f"has waited {second} s" for second in seconds]
