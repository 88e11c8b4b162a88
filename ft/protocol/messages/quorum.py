"""Members, quorums, times and notices, which all machines use; and the base of every machine's events and effects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

VOID = -1  # the step of a group whose state is incomplete, for it is healing
UNABLE = -1.0  # in a tail: the slot's group cannot contribute (no valid token, not a number, out of memory)

Kind = Literal["pharos", "torchft"]  # the rules of a member
Refusal = Literal["INVALID_ARGUMENT", "ALREADY_EXISTS", "FAILED_PRECONDITION", "LOST"]


# ------------------------------------------------------------------------------------------------ quorums


@dataclass(frozen=True)
class Member:
    """A group in a quorum. The first nine fields are those of torchft's QuorumMember; its members leave the rest empty."""

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
    restored: int | None = None  # step of the checkpoint that it was restored from; 0: there was none
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
    """The members of one generation, and the state from which all continue."""

    quorum_id: int
    members: tuple[Member, ...]  # sorted by replica_id; the place is the replica_rank
    reference: State = (0, 0, "")
    epoch: str = ""  # of the job; keeps the store keys of two jobs apart
    shape: Shape = ()  # of the job, the same in all members

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(m.replica_id for m in self.members)

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """Replica ranks of the members that hold the reference state."""
        return tuple(rank for rank, m in enumerate(self.members) if m.state == self.reference)


@dataclass(frozen=True)
class Times:
    """Timeouts that must be equal in all processes; the lighthouse sends its own with the first answer."""

    beat_s: float = 1.0
    heartbeat_timeout_s: float = 5.0
    rendezvous_s: float = 10.0
    heal_grace_s: float = 30.0
    takeover_s: float | None = 30.0  # None: never, unless an operator orders it
    stall_s: float = 60.0
    collective_s: float = 600.0

    def incompatible_timeouts(self, theirs: Times) -> list[str]:
        """Reasons for which a group with these times may not join a lighthouse with `theirs`."""
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
    """The lighthouse's promises for the job's life, over restarts. Members rely on them: only an operator may lower one."""

    min_replicas: int = 1
    takeover_s: float | None = 30.0  # None: never, unless an operator orders it
    num_replica_groups: int = 0  # that the job is meant to have; 0: unknown

    def at_least(self, before: Terms | None) -> Terms:
        """These, raised to those before."""
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
    """A machine's effects, in order, and the reason for them or for its wait."""

    effects: tuple[Effect, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Effect:
    """Something that a driver carries out."""


@dataclass(frozen=True)
class Event:
    """Something that a driver has seen."""


class Tick(Event):
    """Time has passed. For every machine, at least each tick_s, after all events that have arrived."""


# ------------------------------------------------------------------------------------------------ notices


@dataclass(frozen=True)
class Notice(Event):
    """Level-triggered news of one generation, ignored in others. May come twice."""

    quorum_id: int


@dataclass(frozen=True)
class MemberLost(Notice):
    """The generation cannot complete. Sent for its first loss; further ones show in the next quorum."""

    replica_ids: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class GenerationAborted(Notice):
    """A member asks for a quorum because this generation failed, or a newer one has replaced it: every wait on it ends."""

    reason: str = ""


@dataclass(frozen=True)
class Finished(Notice):
    """A member has left because the run is over and its last step is saved: the others may end."""

    replica_id: str = ""


@dataclass(frozen=True)
class ChangeAnnounced(Notice):
    """A group waits to join, or has left: finish the step, then ask for a quorum."""

    reason: str = ""
