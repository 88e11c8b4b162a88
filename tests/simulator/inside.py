"""Collectives among the ranks of one group: each blocks a trainer's thread until all ranks are in it.

The n-th of one rank meets the n-th of the others. Whoever comes to another one than the group's first did would hang there, or sum what
does not belong together: that is a fault at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulator.ranks import RankNode
    from tests.simulator.world import World

Key = tuple[Any, ...]


class Inside:
    def __init__(self, world: World, size: int) -> None:
        self.world, self.size = world, size
        self.key: Key = ()  # of the newest that somebody entered
        self.here: dict[
            int, tuple[RankNode, Callable[[], None]]
        ] = {}  # the ranks that wait in it, and what they do then

    def enter(self, rank: RankNode, key: Key, took_s: Callable[[], float], done: Callable[[], None]) -> None:
        """`done` is called in the rank's process, so long after the last has come."""
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
        """Ranks that have yet to come to the one that others wait in."""
        return [rank for rank in range(self.size) if rank not in self.here] if self.here else []
