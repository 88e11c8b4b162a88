"""Ranks of one group that hear at different moments that their group is whole again take their steps together all the same."""

from __future__ import annotations

import threading
from typing import Any

from ft.healing.transport import Transport
from ft.manager import Manager
from ft.protocol import messages as m
from tests.ft.groups import LIMIT_S, Rank, job


class Slow(Manager):
    """The state that it sends takes longer than the step: it has nothing to say with the sums."""

    def __init__(self, *what: Any, **more: Any) -> None:
        super().__init__(*what, **more)
        self.healer._transport = Untaken(self.healer._transport)


class Untaken:
    is_taken = False

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Split(Manager):
    """Rank 1 says that its state is there while the first step is decided that they hold. Rank 0 votes on the second one before the group's
    word on the heal is out; rank 1 has that word before it launches its part of the second step."""

    voted, deciding, heard = threading.Event(), threading.Event(), threading.Event()  # of rank 0; of rank 1

    def __init__(self, *what: Any, **more: Any) -> None:
        super().__init__(*what, **more)
        hear = self.healer._hear

        def late(event: m.Event) -> None:
            if self._config.group_rank == 1:
                assert self.deciding.wait(LIMIT_S)
            hear(event)
            if self._config.group_rank == 1:
                self.heard.set()

        self.healer._hear = late

    def _held_step(self, step: int) -> int:
        """1: the first that they hold, 2: the second; 0: none of these."""
        part = self._part
        return {1: 1, 2: 2}.get(step - part.reference[0] + 1, 0) if part is not None and part.heal else 0

    def _launch(self, effect: m.LaunchTail) -> None:
        if self._config.group_rank == 1 and self._held_step(effect.step) == 2:
            with self._effects._news:
                heal = self._machine._healing.open
                assert heal is not None and self._effects._news.wait_for(lambda: heal.agreed, LIMIT_S)
        super()._launch(effect)

    def _cast_vote(self, effect: m.CastVote) -> None:
        kind, place = effect.vote.kind, self._held_step(effect.vote.step)
        if self._config.group_rank == 0 and (kind, place) == ("commit", 2):
            self.voted.set()
        if self._config.group_rank == 1 and (kind, place) == ("commit", 1):
            self.deciding.set()
            assert self.heard.wait(LIMIT_S)
        if self._config.group_rank == 1 and kind == "healed":
            assert self.voted.wait(LIMIT_S)
        super()._cast_vote(effect)


def test_a_commit_that_waits_for_another_rank_does_not_hold_up_what_was_held():
    """A step of a group has collectives of its own ranks in it (here a barrier): none may wait in a vote while another is in its step."""
    collective = threading.Barrier(2)

    def able(rank: Rank, slots: tuple[int, ...]) -> bool:
        collective.wait(LIMIT_S / 3)
        return True

    def joins(rank: Rank, step: int) -> None:
        if step == 3 and rank.group_rank == 0 and not newcomer:
            newcomer.extend(made.group("b", size=2, steps=5, together=2, make=Split, able=able))

    newcomer: list[Rank] = []
    with job(min_replicas=1) as made:
        old = made.group("a", size=2, steps=10, together=2, at=joins, make=Slow)
        while not newcomer:
            old[1].thread.join(0.01)
        for rank in newcomer:
            assert rank.join().error is None
            assert len(rank.seen_of(m.HoldSums)) == 1, "the second one it needed not hold"
        for rank in old:
            assert rank.join().error is None
        assert [r.commits[0] for r in newcomer] == [newcomer[0].commits[0]] * 2
