"""Ranks of one group that hear at different moments that their group is whole again take their steps together all the same."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

from ft.gradients import Gradients
from ft.manager import Manager
from ft.protocol import messages as m
from ft.rpc.clients import GroupClient
from tests.ft.groups import LIMIT_S, Rank, Wrapped, finish, job


class Slow(Manager):
    """A source whose state takes longer to send than a step takes: it has no word on the heal to send with the sums."""

    def __init__(self, *what: Any, **more: Any) -> None:
        super().__init__(*what, **more)
        self.healer.transport = Untaken(self.healer.transport)  # type: ignore[assignment]


class Untaken(Wrapped):
    is_fully_sent = False


class Split:
    """Rank 1 says that its state is there while the first step is decided that they hold. Rank 0 votes on the second one before the group's
    word on the heal is out; rank 1 has that word before it launches its part of the second step."""

    def __init__(self) -> None:
        self.voted = threading.Event()  # rank 0, on the second step
        self.deciding, self.heard, self.agreed = threading.Event(), threading.Event(), threading.Event()  # of rank 1
        self.first_held: int | None = None

    def make(self, group: Any, config: Any, options: Any, *, observer: Any, **more: Any) -> Manager:
        rank = config.group_rank

        def looks(now_s: float, event: m.Event, out: m.Out) -> None:
            observer(now_s, event, out)
            if isinstance(event, m.QuorumResult) and event.heal and self.first_held is None:
                self.first_held = event.reference[0]
            if rank == 1 and isinstance(event, m.HealEnded):
                self.heard.set()
            if rank == 1 and isinstance(event, m.Outcome) and event.kind == "healed":
                self.agreed.set()

        manager = Manager(
            group, config, options, observer=looks, gradients=Launches(self, rank), connect=partial(Votes, self), **more
        )
        if rank == 1:
            manager.healer.transport = Late(self, manager.healer.transport)  # type: ignore[assignment]
        return manager

    def held(self, step: int) -> int:
        """Returns 1 for the first step that they hold, 2 for the second."""
        return 0 if self.first_held is None else step - self.first_held + 1


class Launches(Gradients):
    can_run_ahead = False  # begin_attempt is where rank 1 waits, before the trainer computes

    def __init__(self, split: Split, group_rank: int) -> None:
        super().__init__()
        self.split, self.group_rank = split, group_rank

    def begin_attempt(self, *what: Any, step: int, **more: Any) -> None:
        if self.group_rank == 1 and self.split.held(step) == 2:
            assert self.split.agreed.wait(LIMIT_S)
        super().begin_attempt(*what, step=step, **more)


class Late(Wrapped):
    def __init__(self, split: Split, transport: Any) -> None:
        super().__init__(transport)
        self.split = split

    def fetch(self, *what: Any, **more: Any) -> dict[str, Any]:
        values = self.inner.fetch(*what, **more)
        assert self.split.deciding.wait(LIMIT_S)
        return dict(values)


class Votes(GroupClient):
    def __init__(self, split: Split, *what: Any) -> None:
        super().__init__(*what)
        self.split = split

    def vote(self, vote: m.Vote, timeout_s: float) -> m.Outcome:
        split, place = self.split, self.split.held(vote.step)
        if self.group_rank == 0 and (vote.kind, place) == ("commit", 2):
            split.voted.set()
        if self.group_rank == 1 and (vote.kind, place) == ("commit", 1):
            split.deciding.set()
            assert split.heard.wait(LIMIT_S)
        if self.group_rank == 1 and vote.kind == "healed":
            assert split.voted.wait(LIMIT_S)
        return super().vote(vote, timeout_s)


def test_a_commit_that_waits_for_another_rank_does_not_hold_up_what_was_held():
    """A step of a group has collectives of its own ranks in it (here a barrier): none may wait in a vote while another is in its step."""
    collective = threading.Barrier(2)

    def able(rank: Rank, slots: tuple[int, ...]) -> bool:
        collective.wait(LIMIT_S / 3)
        return True

    def joins(rank: Rank, step: int) -> None:
        if step == 3 and rank.group_rank == 0 and not newcomer:
            newcomer.extend(made.group("b", size=2, steps=5, together=2, make=Split().make, able=able))

    newcomer: list[Rank] = []
    with job(min_replicas=1) as made:
        old = made.group("a", size=2, steps=10, together=2, at=joins, make=Slow)
        while not newcomer:
            old[1].thread.join(0.01)
        for rank in finish(*newcomer):
            assert len(rank.seen_of(m.HoldSums)) == 1, "the second one it needed not hold"
        finish(*old)
        assert [r.commits[0] for r in newcomer] == [newcomer[0].commits[0]] * 2
