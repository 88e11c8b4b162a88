"""Messages between all machines: members, quorums, times, notices; and the base of every machine's events and effects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

VOID = -1  # the step of a group whose state is incomplete, for it is healing
UNABLE = -1.0  # in a tail: the slot's group has nothing to give (no valid token, not a number, out of memory)

Kind = Literal["pharos", "torchft"]  # which rules a member plays by
Refusal = Literal["INVALID_ARGUMENT", "ALREADY_EXISTS", "FAILED_PRECONDITION", "LOST"]


# ------------------------------------------------------------------------------------------------ quorums


@dataclass(frozen=True)
class Member:
    """A group as the others see it. The first nine fields are torchft's QuorumMember; the rest is ours and empty for its members."""

    replica_id: str  # "name:unique"; the name is REPLICA_GROUP_ID, the rest is new with every start
    address: str = ""  # group server, http://host:port
    store_address: str = ""  # the group's TCPStore, host:port
    step: int = 0  # committed; VOID while healing
    world_size: int = 1  # ranks of the group
    shrink_only: bool = False
    data: str = ""  # the user's JSON
    commit_failures: int = 0
    reconfigure_handles: tuple[str, ...] = ()  # ours: by group_rank, where the rank answers connections, host:port
    commit_id: str = ""  # names the state: equal ids, equal weights
    commit_quorum_id: int = 0  # the generation that made it
    restored: int | None = None  # "restored from checkpoint s"; 0: there is none, and that is meant
    writes_checkpoint: bool = False  # a source to be spared
    dealt: int = 0  # slots of the open deal of its next step
    deal_id: str = ""  # names that deal
    init_sync: bool = False  # initial states differ: at step 0 all heal from one

    @property
    def name(self) -> str:
        return name_of(self.replica_id)

    @property
    def void(self) -> bool:
        return self.step == VOID

    @property
    def state(self) -> State:
        return (self.step, self.commit_quorum_id, self.commit_id)


Shape = tuple[tuple[str, str], ...]  # (what, digest): layout, dtypes, buckets, settings; must be the same in all groups
State = tuple[int, int, str]  # (step, commit_quorum_id, commit_id): of two, the greater is the further


@dataclass(frozen=True)
class Quorum:
    """One generation: who takes part, and the state that all of them go on from."""

    quorum_id: int
    members: tuple[Member, ...]  # sorted by replica_id; the place is the replica_rank
    reference: State = (0, 0, "")
    epoch: str = ""  # of the job; keeps the store keys of two jobs apart
    shape: Shape = ()  # of the job: what all its members have alike

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(m.replica_id for m in self.members)

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """Replica ranks of the members that hold the reference state."""
        return tuple(rank for rank, m in enumerate(self.members) if m.state == self.reference)


@dataclass(frozen=True)
class Times:
    """The lengths that all processes must agree on; the lighthouse sends its own with the first answer."""

    beat_s: float = 1.0
    heartbeat_timeout_s: float = 5.0
    rendezvous_s: float = 10.0
    heal_grace_s: float = 30.0
    takeover_s: float | None = 30.0  # None: never, an operator's word
    stall_s: float = 60.0
    collective_s: float = 600.0

    def incompatible_timeouts(self, theirs: Times) -> list[str]:
        """Why a group with these times may not join a lighthouse with `theirs`. Empty: it may."""
        bad = [f"{a} = {x:g} must be below {b} = {y:g}" for a, x, b, y in self.check_timeout_order()]
        alike = [(n, getattr(self, n), getattr(theirs, n)) for n in ("heartbeat_timeout_s", "heal_grace_s")]
        return bad + [f"{n} = {ours}: the lighthouse has {other}" for n, ours, other in alike if ours != other]

    def check_timeout_order(self) -> list[tuple[str, float, str, float]]:
        """Pairs of timeouts in the wrong order: (name, length, next name, its length)."""
        names = ("beat_s", "heartbeat_timeout_s", "rendezvous_s", "heal_grace_s", "takeover_s", "collective_s")
        rungs = [(n, getattr(self, n)) for n in names if getattr(self, n) is not None]
        pairs = [(a, x, b, y) for (a, x), (b, y) in zip(rungs, rungs[1:], strict=False)]
        may_be_equal = ("takeover_s", "collective_s")
        return [(a, x, b, y) for a, x, b, y in pairs if x > y or (x == y and b not in may_be_equal)]


@dataclass(frozen=True)
class Terms:
    """The lighthouse's promises for the job's life, whoever starts it anew. Lowering one lets others go on where members still rely on it,
    so only an operator may."""

    min_replicas: int = 1
    takeover_s: float | None = 30.0  # None: never, an operator's word
    num_replica_groups: int = 0  # that the job is meant to have; 0: not said

    def at_least(self, before: Terms | None) -> Terms:
        """These, where they are not lower than those before."""
        if before is None:
            return self
        takeovers_s = (self.takeover_s, before.takeover_s)
        return Terms(
            max(self.min_replicas, before.min_replicas),
            None if None in takeovers_s else max(filter(None, takeovers_s)),
            max(self.num_replica_groups, before.num_replica_groups),
        )


@lru_cache(4096)  # asked for each member of each deal, by each rank
def process_of(replica_id: str) -> str:
    """The id without the count of its returns: "left:4f2a.2" was "left:4f2a" before it was lost, and is the same process."""
    name, colon, unique = replica_id.partition(":")
    return name + colon + unique.partition(".")[0]


def name_of(replica_id: str) -> str:
    """One name has one live id: "left:4f2a" is of "left"."""
    return replica_id.partition(":")[0]


# ------------------------------------------------------------------------------------------------ what comes out


@dataclass(slots=True)  # not frozen, which takes three times as long: there is one for every event
class Out:
    """A machine's effects, in this order, and its reason for them or for waiting."""

    effects: tuple[Effect, ...] = ()
    reason: str = ""


class Effect:
    """Something that a driver carries out."""


class Event:
    """Something that a driver has seen."""


@dataclass(frozen=True)
class Tick(Event):
    """Time went by. For every machine, at least each tick_s; after all other events that have arrived by then."""


# ------------------------------------------------------------------------------------------------ notices


@dataclass(frozen=True)
class Notice(Event):
    """Level-triggered, and about one generation: outside of it, ignored. May come twice."""

    quorum_id: int


@dataclass(frozen=True)
class MemberLost(Notice):
    """The generation cannot complete any more. Sent for the first loss of a generation; who else is lost shows at the next quorum."""

    replica_ids: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class GenerationAborted(Notice):
    """A member asks for a quorum because this generation failed, or it has been replaced: stop waiting on it now."""

    reason: str = ""


@dataclass(frozen=True)
class Finished(Notice):
    """A member has left because the run is over and its last step is saved: the others may end."""

    replica_id: str = ""


@dataclass(frozen=True)
class ChangeAnnounced(Notice):
    """Somebody waits to come in, or has left: finish the step, then ask for a quorum."""

    reason: str = ""
