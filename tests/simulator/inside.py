"""Simulates the collectives among the ranks of one group, and detects deadlocks.

A collective blocks a trainer's thread until all ranks are in it. The n-th collective of a rank matches the n-th of the others; a mismatch
is a violation at once.

A wait that nothing can end is a violation, too, reported with the waits of all ranks. The condition that ends a rank's wait, by its kind:
- a collective inside the group:  all its ranks have joined it;
- a quorum request:               all ranks have sent it; the rest is up to the lighthouse;
- the group's result of a vote:   all ranks have voted, or one that has not votes no (the first no decides);
- the state machine:              a pending vote is decided, the state arrives, or the grace time of the heal is over;
- anything else:                  the network or other groups end it.
A set of ranks that wait only for each other is deadlocked; the check finds the largest such set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ft.protocol import messages as m
from ft.protocol.step import Phase
from tests.simulator.invariants import Violation

if TYPE_CHECKING:
    from tests.simulator.ranks import RankNode
    from tests.simulator.servers import GroupNode
    from tests.simulator.world import World

Key = tuple[Any, ...]


class Inside:
    def __init__(self, world: World, size: int) -> None:
        self.world, self.size = world, size
        self.key: Key = ()  # of the newest that somebody entered
        # the ranks that wait in it, and what they do then
        self.here: dict[int, tuple[RankNode, Callable[[], None]]] = {}

    def enter(self, rank: RankNode, key: Key, took_s: Callable[[], float], done: Callable[[], None]) -> None:
        """Enters a collective; `done` is called in the rank's process, `took_s` after the last rank has come."""
        if not self.here:
            self.key = key
        rank.truth.enters(rank, key, self.key)
        self.here[rank.group_rank] = rank, done
        if len(self.here) == self.size:
            here, self.here = self.here, {}
            self.world.seen[f"inside: {key[0]}"] += 1
            after_s = took_s()
            for one, go_on in here.values():
                self.world.after(after_s, one.process, go_on)

    @property
    def absent(self) -> list[int]:
        """Returns the ranks that have yet to come to the collective that others wait in."""
        return [rank for rank in range(self.size) if rank not in self.here] if self.here else []


def check(group: GroupNode) -> None:
    """Raises Violation for ranks that wait without end. Ignores a group with a rank that is stopped, dead or hangs."""
    ranks = group.ranks
    processes = [group.process, *(rank.process for rank in ranks)]
    if any(process.stopped or not process.alive for process in processes) or any(r.trainer.hangs for r in ranks):
        return
    stuck = {rank.group_rank: rank for rank in ranks}
    while ends := [place for place, rank in stuck.items() if _ends(rank, stuck)]:
        for place in ends:
            del stuck[place]
    if stuck:
        raise Violation(f"{group.process.name}: nothing ends these waits: " + "; ".join(map(_tell, ranks)))


def _ends(rank: RankNode, stuck: dict[int, RankNode]) -> bool:
    """Returns whether this rank's wait ends while the ranks in `stuck` stay where they are."""
    trainer, group = rank.trainer, rank.group
    if trainer.waits is None:
        return _machine_goes_on(rank, stuck)
    kind, what = trainer.waits
    if kind == "inside":
        return not any(place in stuck for place in group.inside.absent)
    if kind == "quorum":
        return rank.group_rank not in group.machine.waiting or not any(place in stuck for place in group.machine.absent)
    return kind != "vote" or _is_decided(rank, what, stuck)


def _machine_goes_on(rank: RankNode, stuck: dict[int, RankNode]) -> bool:
    if rank.trainer.queue or rank.fetches or rank.machine.phase is Phase.AWAITING_STATE:
        return True
    return any(_is_decided(rank, vote_key, stuck) for vote_key in rank.trainer.aside)


def _is_decided(rank: RankNode, vote_key: m.VoteKey, stuck: dict[int, RankNode]) -> bool:
    said = rank.truth.said(rank.group, vote_key)
    silent = [other.group_rank for other in rank.group.ranks if other.group_rank not in said]
    return not silent or "failed" in said.values() or any(place not in stuck for place in silent)


def _tell(rank: RankNode) -> str:
    trainer, machine = rank.trainer, rank.machine
    kind, what = trainer.waits or ("the machine", f"which {machine.phase.value}")
    what = rank.group.inside.key if kind == "inside" else what
    aside = f", and aside for the word on {sorted(trainer.aside)}" if trainer.aside else ""
    queue = f", before {', '.join(type(effect).__name__ for effect in trainer.queue)}" if trainer.queue else ""
    return f"rank {rank.group_rank} waits for {kind} {what}{aside}{queue}"
