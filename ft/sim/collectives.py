"""The inter-group process groups: a rendezvous that needs everybody, and all-reduces that complete, fail or hang for each rank alone.

What is modelled is what gloo was seen to do (torch 2.13): a dead member's peers get an error, or nothing at all, or, near the end, their
sums; a stopped or cut-off member leaves them hanging; closing the sockets of a generation ends its pending work here and at the peers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ft.sim.network import Network
from ft.sim.world import Process, World

Key = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class Member:
    """One rank in one piece of work."""

    process: Process
    given: Any
    done: Callable[[Any], None]  # called with the result, or with None: the work failed
    over: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """One collective of one generation: `key` names it, and it runs once all of `size` are there."""

    key: Key
    size: int
    combine: Callable[[list[Any]], Any]
    members: dict[int, Member] = field(default_factory=dict)  # by replica rank
    processes: frozenset[Process] = frozenset()  # once all are there
    sites: frozenset[str] = frozenset()
    combined: Any = None
    running: bool = False
    broken: bool = False

    @property
    def result(self) -> Any:
        """Of what all gave, by replica rank: the same object for each member, made once."""
        if self.combined is None:
            self.combined = self.combine([self.members[rank].given for rank in range(self.size)])
        return self.combined


class Collectives:
    """All inter-group work of the world. A rank enters with `join`, and leaves a whole generation with `abandon`."""

    def __init__(self, world: World, network: Network, *, seconds: tuple[float, float]) -> None:
        self.world = world
        self.network = network
        self.seconds = seconds
        self._work: dict[Key, Work] = {}
        self._of: dict[Process, dict[Work, int]] = {}
        self._dice = world.dice("collectives")

    def join(
        self,
        process: Process,
        generation: Key,
        key: Key,
        rank: int,
        size: int,
        given: Any,
        done: Callable[[Any], None],
        combine: Callable[[list[Any]], Any] = list,
    ) -> None:
        """`done` is called with what `combine` makes of the list of what all gave, or None for a failure; or never."""
        key = (*generation, *key)
        work = self._work.get(key)
        if work is None:
            work = self._work[key] = Work(key, size, combine)
        assert work.size == size and rank not in work.members, f"{process.name} enters {work.key} as {rank} of {size}"
        member = work.members[rank] = Member(process, given, done)
        self._of.setdefault(process, {})[work] = rank
        if work.broken:
            self._spoil(work, member)
        elif len(work.members) == size:
            work.running = True
            work.processes = frozenset(other.process for other in work.members.values())
            work.sites = frozenset(other.site for other in work.processes)
            took_s = self._dice.between(*self.seconds)
            for other in work.members.values():
                self.world.after(took_s * self._dice.between(0.9, 1.0), other.process, self._complete, work, other)

    def abandon(self, process: Process, generation: Key) -> None:
        """Shuts this rank's sockets of a generation: its own work there is over, and its peers' fails or hangs."""
        mine = self._of.get(process, {})
        for work in [work for work in mine if work.key[: len(generation)] == generation]:
            work.members[mine.pop(work)].over = True
            self._break(work)

    def absent(self, process: Process, generation: Key, key: Key, names: tuple[str, ...]) -> tuple[str, ...]:
        """Who has not come to a rendezvous, or cannot be reached there. Who came and has given up by now did come: its key is there."""
        work = self._work.get(generation + key)
        there = work.members if work is not None else {}
        return tuple(
            name
            for rank, name in enumerate(names)
            if rank not in there or self.network.is_cut(process, there[rank].process)
        )

    def dies(self, process: Process) -> None:
        for work, rank in self._of.pop(process, {}).items():
            work.members[rank].over = True
            self._break(work)

    def _complete(self, work: Work, member: Member) -> None:
        if member.over or work.broken:
            return
        # TCP goes on where it was, some time after the hindrance is gone.
        if not self.world.stopped.isdisjoint(work.processes) or self.network.parts(work.sites):
            self.world.after(0.2, member.process, self._complete, work, member)
            return
        self._end(work, member, work.result)

    def _break(self, work: Work) -> None:
        if work.broken:
            return
        work.broken = True
        for member in work.members.values():
            if not member.over:
                self._spoil(work, member)

    def _spoil(self, work: Work, member: Member) -> None:
        """After a member has gone: sums that were all but there arrive, or an error does, or nothing."""
        fate = self._dice.random()
        if work.running and fate < 0.3:
            self.world.after(self._dice.between(0.0, 0.05), member.process, self._end, work, member, work.result)
        elif fate < 0.8 and not any(other.process.dark for other in work.members.values()):
            self.world.after(self._dice.between(0.0, 0.05), member.process, self._end, work, member, None)
        else:
            self.world.seen["collective hung"] += 1

    def _end(self, work: Work, member: Member, result: Any) -> None:
        if not member.over:
            member.over = True
            self.world.seen["collective completed" if result is not None else "collective failed"] += 1
            self._of[member.process].pop(work)
            if all(other.over for other in work.members.values()) and len(work.members) == work.size:
                self._work.pop(work.key, None)
            member.done(result)
