"""Detects reachability by a rank's own connection attempts: process_groups/probe.py on the simulated network."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ft.protocol import messages as m

if TYPE_CHECKING:
    from tests.simulator.ranks import RankNode

TRY_S = 1.0  # between two tries
TRIES = 3  # that fail in a row before a member counts as unreachable


class Prober:
    """The prober of one rank. It probes while its rank waits for others, and as long as a member is unreachable."""

    def __init__(self, rank: RankNode) -> None:
        self._rank = rank
        self._members: tuple[str, ...] = ()
        self._failed: dict[str, int] = {}  # member -> tries that failed in a row
        self._waits: tuple[object, ...] | None = None  # what the rank waited for at the last tick

    @property
    def unreachable(self) -> tuple[str, ...]:
        return tuple(sorted(i for i, tries in self._failed.items() if tries >= TRIES))

    def watch(self, members: tuple[str, ...]) -> None:
        """Watches the members of the newest quorum, and those that are unreachable already."""
        self._members = members
        self._failed = {i: tries for i, tries in self._failed.items() if i in members or tries >= TRIES}

    def tick(self) -> None:
        """Probes the other members, once per TRY_S."""
        rank, before = self._rank, self.unreachable
        waits = rank.trainer.waits if rank.trainer.waits and rank.trainer.waits[0] in ("rendezvous", "sums") else None
        waited, self._waits = waits is not None and waits == self._waits, waits
        self._try(self._members if waited else before)
        if waited and set(self.unreachable) - set(before):
            rank.world.seen["a link was found cut"] += 1
            rank.interrupt()

    def look(self, done: Callable[[], None]) -> None:
        """Tries all members until it is known which are unreachable; then calls `done`."""
        self._try(self._members)
        if any(0 < tries < TRIES for tries in self._failed.values()):
            self._rank.world.after(TRY_S, self._rank.process, self.look, done)
        else:
            done()

    def _try(self, members: tuple[str, ...]) -> None:
        for member in members:
            if self._answers(member):
                self._failed.pop(member, None)
            else:
                self._failed[member] = self._failed.get(member, 0) + 1

    def _answers(self, member: str) -> bool:
        """Returns whether the member's kernel answers; it does for a stopped or dead process, too, with a refusal."""
        rank = self._rank
        name, _, number = m.incarnation_of(member).partition(":")
        node = rank.cluster.nodes.get(f"http://{name}.{number}")
        if node is None or node is rank.group or not rank.cluster.machines.probes:
            return True
        there = node.ranks[rank.group_rank].process
        return not (there.dark or rank.network.is_parted(rank.process.site, there.site))
