"""Simulates inter-group process groups: a rendezvous of all members, and all-reduces that complete, fail or hang per rank.

Models the observed behaviour of gloo (torch 2.13): the peers of a dead member get an error, or hang, or, near the end, complete; a stopped
or unreachable member makes them hang; closing the sockets of a generation ends its pending work here and at the peers.

A rendezvous has two parts. Each member registers in a store at one member's site; a member that cannot reach the store waits. When all have
registered, each connects to all others, and is done when its own connections exist: both ends of a cut link wait, and the others continue
to an all-reduce that hangs. No member learns which one does not answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.simulator.network import Network
from tests.simulator.world import Process, World

Key = tuple[Any, ...]
AGAIN_S = 0.2  # between two tries of a connection


@dataclass(slots=True, eq=False)
class Member:
    """A rank in a collective or rendezvous."""

    process: Process
    given: Any
    done: Callable[[Any], None]  # called with the result, or with None: the work failed
    over: bool = False


@dataclass(slots=True, eq=False)
class Work:
    """A collective of a generation, named by `key`; it runs when `size` members have joined."""

    key: Key
    size: int
    combine: Callable[[list[Any]], Any]
    store: str = ""  # of a rendezvous: the site of its store
    members: dict[int, Member] = field(default_factory=dict)  # by replica rank
    outside: dict[int, Member] = field(default_factory=dict)  # those that cannot reach the store
    processes: frozenset[Process] = frozenset()  # once all are there
    sites: frozenset[str] = frozenset()
    combined: Any = None
    running: bool = False
    broken: bool = False

    @property
    def result(self) -> Any:
        """Returns the combination of all contributions, by replica rank: the same object for each member, made once."""
        if self.combined is None:
            self.combined = self.combine([self.members[rank].given for rank in range(self.size)])
        return self.combined


class Collectives:
    """All inter-group collectives. A rank joins one with `join`, and leaves a generation with `abandon`."""

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
        store: str = "",
    ) -> None:
        """Joins a collective; calls `done` with `combine` of all contributions, or None for a failure; or never. store: the site where
        the members meet, if it is a rendezvous."""
        key = (*generation, *key)
        work = self._work.get(key)
        if work is None:
            work = self._work[key] = Work(key, size, combine, store)
        assert work.size == size and rank not in work.members, f"{process.name} enters {work.key} as {rank} of {size}"
        member = Member(process, given, done)
        self._of.setdefault(process, {})[work] = rank
        if store:
            work.outside[rank] = member
            self._reach(work, rank, member)
        else:
            self._enter(work, rank, member)

    def _reach(self, work: Work, rank: int, member: Member) -> None:
        """Tries to reach the store until no cut is in between."""
        if member.over:
            return
        if self.network.is_parted(member.process.site, work.store):
            self.world.after(AGAIN_S, member.process, self._reach, work, rank, member)
        else:
            del work.outside[rank]
            self._enter(work, rank, member)

    def _enter(self, work: Work, rank: int, member: Member) -> None:
        work.members[rank] = member
        if work.broken:
            self._spoil(work, member)
        elif len(work.members) == work.size:
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
            self._leave(work, mine.pop(work))

    def dies(self, process: Process) -> None:
        for work, rank in self._of.pop(process, {}).items():
            self._leave(work, rank)

    def _leave(self, work: Work, rank: int) -> None:
        member = work.members.get(rank) or work.outside.pop(rank)
        member.over = True
        if rank in work.members:
            self._break(work)

    def _complete(self, work: Work, member: Member) -> None:
        if member.over or work.broken:
            return
        # TCP goes on where it was, some time after the hindrance is gone.
        if not self.world.stopped.isdisjoint(work.processes) or self._is_hindered(work, member.process.site):
            self.world.after(AGAIN_S, member.process, self._complete, work, member)
            return
        self._end(work, member, work.result)

    def _is_hindered(self, work: Work, site: str) -> bool:
        """Returns whether a cut stops it: a sum passes by all members; a rendezvous is each one's own."""
        if not self.network.cuts:
            return False
        if not work.store:
            return self.network.parts(work.sites)
        return any(self.network.is_parted(site, other) for other in (work.store, *work.sites))

    def _break(self, work: Work) -> None:
        if work.broken:
            return
        work.broken = True
        for member in work.members.values():
            if not member.over:
                self._spoil(work, member)

    def _spoil(self, work: Work, member: Member) -> None:
        """Ends a collective after a member has gone: nearly complete sums arrive, or an error does, or nothing."""
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
