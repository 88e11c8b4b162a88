"""The interaction of the ranks of one group: their collectives, and the search for ranks that wait for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ft.protocol.step import Phase
from tests.simulator.inside import Inside, check
from tests.simulator.invariants import Truth, Violation
from tests.simulator.world import Process, World

VOTE_KEY = (1, 0, 0, "commit")


class Ranks:
    """The ranks of one group, as tests.simulator.inside sees them. `at(rank, wait)` puts a trainer into a wait."""

    def __init__(self, size: int) -> None:
        self.world = World(1)
        self.votes: dict[tuple[str, Any], dict[int, str]] = {}
        self.truth: Any = SimpleNamespace(
            enters=lambda *what: Truth.enters(self.truth, *what),
            said=lambda group, vote_key: self.votes.get(vote_key, {}),
        )
        self.asked: dict[int, None] = {}
        self.group: Any = SimpleNamespace(process=Process("g", "g", "g"), inside=Inside(self.world, size))
        self.group.machine = SimpleNamespace(waiting=self.asked, absent=[])
        self.group.ranks = [self._rank(place) for place in range(size)]

    def _rank(self, place: int) -> Any:
        trainer = SimpleNamespace(waits=None, queue=[], aside=set(), hangs=False)
        machine = SimpleNamespace(phase=Phase.VOTING)
        process = Process(f"g/{place}", "g", "g")
        return SimpleNamespace(
            group_rank=place,
            process=process,
            trainer=trainer,
            machine=machine,
            group=self.group,
            truth=self.truth,
            fetches=False,
        )

    def at(self, place: int, *wait: Any) -> None:
        self.group.ranks[place].trainer.waits = wait

    def enters(self, place: int, *key: Any) -> list[int]:
        """Lets a rank enter a collective; returns a list that gets its place when the collective is over."""
        done: list[int] = []
        self.at(place, "inside", None)
        self.group.inside.enter(self.group.ranks[place], key, lambda: 1.0, lambda: done.append(place))
        return done

    def asks(self, place: int) -> None:
        self.at(place, "quorum", 1)
        self.asked[place] = None
        self.group.machine.absent = [rank for rank in range(len(self.group.ranks)) if rank not in self.asked]

    def votes_on(self, place: int, verdict: str, *, aside: bool = False) -> None:
        self.votes.setdefault(VOTE_KEY, {})[place] = verdict  # type: ignore[arg-type]
        if aside:
            self.group.ranks[place].trainer.aside.add(VOTE_KEY)
        else:
            self.at(place, "vote", VOTE_KEY)

    def check(self) -> None:
        check(self.group)


def test_a_collective_inside_a_group_needs_all_its_ranks():
    ranks = Ranks(2)
    first = ranks.enters(0, "forward", 0)
    ranks.world.run(lambda: False)
    assert first == [] and ranks.group.inside.absent == [1]
    second = ranks.enters(1, "forward", 0)
    assert ranks.group.inside.absent == []
    ranks.world.run(lambda: False)
    assert (first, second, ranks.world.now_s) == ([0], [1], 1.0)


def test_ranks_of_a_group_enter_the_same_collectives_in_the_same_order():
    ranks = Ranks(2)
    ranks.enters(0, "forward", 0)
    with pytest.raises(Violation, match=r"enters \('update', 1\), its group \('forward', 0\)"):
        ranks.enters(1, "update", 1)


def test_a_rank_in_a_collective_and_one_that_waits_for_its_vote_wait_for_ever():
    ranks = Ranks(2)
    ranks.enters(0, "update", 1)
    ranks.votes_on(1, "yes")
    with pytest.raises(
        Violation, match=r"rank 0 waits for inside \('update', 1\); rank 1 waits for vote \(1, 0, 0, 'commit'\)"
    ):
        ranks.check()
    ranks.votes[VOTE_KEY][1] = "failed"  # type: ignore[index]  # the first no decides
    ranks.check()


def test_a_rank_that_asks_for_a_quorum_and_one_in_a_collective_wait_for_ever():
    ranks = Ranks(3)
    ranks.enters(0, "checkpoint", 0)
    ranks.enters(1, "checkpoint", 0)
    ranks.asks(2)
    with pytest.raises(Violation, match="rank 2 waits for quorum 1"):
        ranks.check()
    ranks.asked.clear()  # its call is on its way, or broke: the next one may be answered
    ranks.check()


def test_a_vote_aside_leaves_the_trainer_to_the_others():
    ranks = Ranks(2)
    ranks.votes_on(0, "yes", aside=True)
    ranks.at(1, "sums", (1, 0, 0))
    ranks.check()
    ranks.enters(1, "update", 1)
    with pytest.raises(Violation, match="and aside for the word on"):
        ranks.check()


def test_a_rank_that_waits_for_nothing_is_a_fault_of_its_machine():
    ranks = Ranks(1)
    with pytest.raises(Violation, match="rank 0 waits for the machine which waits for the outcome of the commit vote"):
        ranks.check()
    ranks.group.ranks[0].machine.phase = Phase.AWAITING_STATE  # the heal's time ends that
    ranks.check()
