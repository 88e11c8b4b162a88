"""The words of the protocol: what machines are told (events), what they want done (effects), and what travels between them.

Each machine has one door, `handle(event, now_s) -> Out`. It never waits, and never asks for the time: `now_s` is the driver's
monotonic clock and never runs backwards. The driver carries out `Out.effects` in order, and may log `Out.reason` when it changes. What
each effect asks of the driver is said at its class.

    Trainer's rank:  step.Step   <- begin, sums, plans, outcomes, notices        -> configure, reduce, vote, commit
    Group's server:  group.Group <- its ranks' calls and votes, the lighthouse   -> the lighthouse, answers to ranks
    Lighthouse:      lighthouse.Lighthouse <- calls, streams, beats, ticks       -> answers, refusals, notices
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal

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
    reconfigure_handles: tuple[str, ...] = ()
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


State = tuple[int, int, str]  # (step, commit_quorum_id, commit_id): of two, the greater is the further


@dataclass(frozen=True)
class Quorum:
    """One generation: who takes part, and the state that all of them go on from."""

    quorum_id: int
    members: tuple[Member, ...]  # sorted by replica_id; the place is the replica_rank
    reference: State = (0, 0, "")
    epoch: str = ""  # of the job; keeps the store keys of two jobs apart

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(m.replica_id for m in self.members)


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

    def misfits(self, theirs: Times) -> list[str]:
        """Why a group with these times may not join a lighthouse with `theirs`. Empty: it may."""
        rungs = [(n, getattr(self, n)) for n in _RUNGS if getattr(self, n) is not None]
        bad = [
            f"{a} = {x:g} must be below {b} = {y:g}"
            for (a, x), (b, y) in zip(rungs, rungs[1:], strict=False)
            if not _fits(b, x, y)
        ]
        return bad + [
            f"{n} = {getattr(self, n)}: the lighthouse has {getattr(theirs, n)}"
            for n in ("heartbeat_timeout_s", "takeover_s", "heal_grace_s")
            if getattr(self, n) != getattr(theirs, n)
        ]


_RUNGS = ("beat_s", "heartbeat_timeout_s", "rendezvous_s", "heal_grace_s", "takeover_s", "stall_s", "collective_s")


def _fits(rung: str, below: float, length: float) -> bool:
    return below <= length if rung in ("takeover_s", "collective_s") else below < length


@lru_cache(4096)  # asked for each member of each deal, by each rank
def process_of(replica_id: str) -> str:
    """The id without the count of its returns: "left:4f2a.2" was "left:4f2a" before it was lost, and is the same process."""
    name, colon, unique = replica_id.partition(":")
    return name + colon + unique.partition(".")[0]


def name_of(replica_id: str) -> str:
    """One name has one live id: "left:4f2a" is of "left"."""
    return replica_id.partition(":")[0]


# ------------------------------------------------------------------------------------------------ what comes out


@dataclass(frozen=True)
class Out:
    """What a machine wants done, in this order, and why it does so or waits."""

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
class Abandoned(Notice):
    """A member asks for a quorum because this generation failed, or it has been replaced: stop waiting on it now."""

    reason: str = ""


@dataclass(frozen=True)
class ChangeAnnounced(Notice):
    """Somebody waits to come in, or has left: finish the step, then ask for a quorum."""

    reason: str = ""


# ------------------------------------------------------------------------------------------------ lighthouse: events


@dataclass(frozen=True)
class Call(Event):
    """A group asks for a quorum. It counts as a beat. `known`: the newest quorum whose answer has arrived (0: none)."""

    member: Member
    kind: Kind = "pharos"
    known: int = 0
    failed: bool = False  # generation `known` failed; else a change is due, or it is the first call
    blame: tuple[str, ...] = ()  # replica_ids with which the attempt failed
    shape: tuple[
        tuple[str, str], ...
    ] = ()  # (what, digest): layout, dtypes, buckets, config; must be the same everywhere
    number: int = (
        0  # of this process's questions, growing; a retry repeats its own, so that a late copy is known for one
    )


@dataclass(frozen=True)
class CallCancelled(Event):
    """The RPC of a waiting call ended. A caller with a stream is still wanted."""

    replica_id: str


@dataclass(frozen=True)
class Beat(Event):
    replica_id: str
    kind: Kind = "pharos"


@dataclass(frozen=True)
class StreamOpened(Event):
    """A group server's Watch stream begins with what it knows. `settled`: the newest step that it knows to be settled."""

    replica_id: str
    quorum: Quorum | None = None
    settled: int = 0


@dataclass(frozen=True)
class StreamClosed(Event):
    """The connection broke. A stream that was replaced by a newer one of the same id is not reported."""

    replica_id: str


@dataclass(frozen=True)
class Report(Event):
    """On the stream, at most once a second and at each change of `waiting`; counts as a beat."""

    replica_id: str
    step: int  # VOID while healing
    commit_quorum_id: int = 0
    waiting: bool = False  # all its ranks are in the collective (or past it)
    median_step_s: float = 0.0
    settled: int = 0


@dataclass(frozen=True)
class Leave(Event):
    """The group goes on purpose. clean: it owes the running step nothing, so the others finish it; else the generation fails."""

    replica_id: str
    clean: bool = True
    reason: str = "left"


@dataclass(frozen=True)
class TakeOver(Event):
    """An operator's word: whoever calls may go on without the previous members."""


@dataclass(frozen=True)
class Evict(Event):
    """An operator's word (dashboard: kill or drain)."""

    replica_id: str


# ------------------------------------------------------------------------------------------------ lighthouse: effects


@dataclass(frozen=True)
class Persist(Effect):
    """Write `saved` to the state file (temporary file, fsync, rename) before any later effect: an id once seen must not come again."""

    saved: Saved


@dataclass(frozen=True)
class Answer(Effect):
    """Give `quorum` to every waiting call of these ids, or, where none waits, send it down the id's stream. Times go along."""

    replica_ids: tuple[str, ...]
    quorum: Quorum


@dataclass(frozen=True)
class Refuse(Effect):
    """Fail the waiting calls of the id. LOST: it may return under a new id, with its state."""

    replica_id: str
    code: Refusal
    reason: str


@dataclass(frozen=True)
class MustRestore(Effect):
    """Answer the waiting calls of these ids: load the newest valid checkpoint, call again with `restored`."""

    replica_ids: tuple[str, ...]
    settled: int  # the newest step known to be settled; a checkpoint of it is what one hopes to find


@dataclass(frozen=True)
class Notify(Effect):
    """Send the notice down the streams of these ids; one without a stream gets nothing (torchft's)."""

    replica_ids: tuple[str, ...]
    notice: Notice


@dataclass(frozen=True)
class Saved:
    """What a lighthouse must remember over its own death."""

    epoch: str
    last_id: int = 0
    settled: int = 0
    kind: Kind = "pharos"
    quorum: Quorum | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Saved:
        """Of what to_dict gave, after JSON. Raises TypeError or KeyError for anything else."""
        return Saved(**{**data, "quorum": quorum_from_dict(data["quorum"]) if data["quorum"] else None})


def quorum_from_dict(data: dict[str, Any]) -> Quorum:
    step, commit_quorum_id, commit_id = data["reference"]
    members = tuple(Member(**{**m, "reconfigure_handles": tuple(m["reconfigure_handles"])}) for m in data["members"])
    return Quorum(data["quorum_id"], members, (step, commit_quorum_id, commit_id), data["epoch"])


# ------------------------------------------------------------------------------------------------ group: events


@dataclass(frozen=True)
class RankCall(Event):
    """A rank asks for a quorum, for its group: the call to the lighthouse goes out when all ranks have asked."""

    group_rank: int
    member: Member  # as this rank sees the group: step, commit ids, restored, dealt; addresses and id are filled in by the group
    checkpoint_metadata: str = ""  # where this rank's state is served
    known: int = 0
    failed: bool = False
    blame: tuple[str, ...] = ()
    shape: tuple[tuple[str, str], ...] = ()
    number: int = 0  # as Call.number, of this rank's questions


@dataclass(frozen=True)
class RankCancelled(Event):
    """A rank's waiting call or vote ended. It may ask again."""

    group_rank: int


@dataclass(frozen=True)
class RankStream(Event):
    """A rank's Watch stream to its group server opened or broke. Broken: the process is gone, and the group with it."""

    group_rank: int
    open: bool


@dataclass(frozen=True)
class Vote(Event):
    """One rank's word on what decides which collective comes next. Keyed by (kind, quorum_id, attempt, step)."""

    group_rank: int
    kind: Literal["configured", "commit", "healed"]
    quorum_id: int
    attempt: int
    step: int  # that the attempt starts from
    verdict: Literal["yes", "again", "failed"]  # again: all sums are there, but some group was unable
    change: bool = False
    reason: str = ""  # of a verdict that is not yes
    blame: tuple[str, ...] = ()

    @property
    def key(self) -> Ballot:
        return (self.quorum_id, self.step, self.attempt, self.kind)


Ballot = tuple[int, int, int, str]  # (quorum_id, step, attempt, kind)


@dataclass(frozen=True)
class LighthouseAnswered(Event):
    """The Quorum RPC was answered, or a quorum came down the stream."""

    quorum: Quorum
    times: Times | None = None


@dataclass(frozen=True)
class LighthouseFailed(Event):
    """The Quorum RPC failed (connection, deadline)."""

    reason: str


@dataclass(frozen=True)
class LighthouseRefused(Event):
    """The lighthouse said no to this id, on a call or on the stream."""

    replica_id: str
    code: Refusal
    reason: str


@dataclass(frozen=True)
class LighthouseWantsRestore(Event):
    settled: int


@dataclass(frozen=True)
class BeatAnswered(Event):
    """An answered beat. `sent_s`: when it was sent, on the clock of now_s, which must run while the machine sleeps (CLOCK_BOOTTIME)."""

    sent_s: float


@dataclass(frozen=True)
class AskMetadata(Event):
    """Another group's rank asks where `group_rank`'s state is served."""

    group_rank: int


# ------------------------------------------------------------------------------------------------ group: effects


@dataclass(frozen=True)
class CallLighthouse(Effect):
    """Send this after `delay_s`, unless a newer CallLighthouse or EndGroup comes first. Feed back what comes of it:
    LighthouseAnswered, LighthouseFailed, LighthouseRefused or LighthouseWantsRestore."""

    call: Call
    delay_s: float = 0.0


@dataclass(frozen=True)
class OpenStream(Effect):
    """Close the stream to the lighthouse, if any, and open one under this id. Reopen it by yourself when it breaks."""

    replica_id: str


@dataclass(frozen=True)
class AnswerRank(Effect):
    """Answer the waiting call of one rank."""

    group_rank: int
    part: Part


@dataclass(frozen=True)
class FailRank(Effect):
    """Fail the waiting call (or vote, or metadata question) of one rank."""

    group_rank: int
    code: Literal["INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE", "FAILED_PRECONDITION", "STALE"]
    reason: str


@dataclass(frozen=True)
class RestoreRank(Effect):
    """Answer the waiting call of one rank: load the newest valid checkpoint, ask again."""

    group_rank: int
    settled: int


@dataclass(frozen=True)
class AnswerVote(Effect):
    """Answer the vote of one rank with the group's outcome."""

    group_rank: int
    outcome: Outcome


@dataclass(frozen=True)
class NotifyRank(Effect):
    """Send the notice down one rank's stream."""

    group_rank: int
    notice: Notice


@dataclass(frozen=True)
class Metadata(Effect):
    """Answer an AskMetadata."""

    group_rank: int
    checkpoint_metadata: str


@dataclass(frozen=True)
class EndGroup(Effect):
    """Send Leave(clean=False), close, SIGKILL the trainer processes: torchelastic starts the group again."""

    reason: str


# ------------------------------------------------------------------------------------------------ from group to ranks


@dataclass(frozen=True)
class Source:
    """A group to heal from: its rank of the same group_rank holds the shards."""

    replica_rank: int
    address: str


@dataclass(frozen=True)
class Part(Event):
    """What one rank does in a quorum (plan.py). An event for step.Step: the answer to AskQuorum."""

    quorum_id: int
    epoch: str
    replica_id: str
    replica_rank: int
    members: tuple[str, ...]  # replica_ids by replica_rank
    store_address: str
    reference: State
    heal: bool  # the whole group, or none of its ranks
    sources: tuple[Source, ...]  # at most two; empty unless heal
    heals: tuple[int, ...]  # replica_ranks that heal from this group
    participants: tuple[str, ...]  # who is dealt slots, by replica_rank
    dealt: int  # slots of the open deal that the reference members hold; 0: they hold none, or not the same, and make a new one
    known: bool = False  # the rank has this very generation already: keep the process group


@dataclass(frozen=True)
class Outcome(Event):
    """What a group has decided; the same for all its ranks, and for ever."""

    kind: Literal["configured", "commit", "healed"]
    quorum_id: int
    attempt: int
    step: int
    verdict: Literal["yes", "again", "failed"]
    change: bool = False
    reason: str = ""
    blame: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------ step: events


@dataclass(frozen=True)
class Begin(Event):
    """The trainer asks what to do next. Answered by Compute, or by commits of a healing group's held sums on the way there."""


@dataclass(frozen=True)
class Configured(Event):
    """Answers Configure, for the same quorum_id: the process group stands (and a heal, if asked for, has begun), or not."""

    quorum_id: int
    ok: bool
    reason: str = ""
    blame: tuple[str, ...] = ()


@dataclass(frozen=True)
class Computed(Event):
    """Forward and backward are done, the local gradients are complete. Figures are summed over the group's ranks."""

    tokens: tuple[float, ...] = ()  # valid tokens per slot of Compute.slots
    loss_sum: float = 0.0
    able: bool = True  # False: not a number, out of memory; zeros go out in place of the gradients


@dataclass(frozen=True)
class Reduced(Event):
    """All sums of the attempt are there; `tail` is the summed vector of the last bucket."""

    quorum_id: int
    attempt: int
    step: int
    tail: tuple[float, ...]


@dataclass(frozen=True)
class ReduceFailed(Event):
    """A collective of the attempt failed, or was given up after StopWaiting. May come while the backward still runs."""

    quorum_id: int
    attempt: int
    step: int
    reason: str
    blame: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuorumFailed(Event):
    """Answers AskQuorum: there is no answer. The rank exits."""

    reason: str


@dataclass(frozen=True)
class WantsRestore(Event):
    """Answers AskQuorum: load the newest valid checkpoint first."""

    settled: int


@dataclass(frozen=True)
class Restored(Event):
    """Answers LoadCheckpoint. `state`: Step.state_dict() of the checkpoint; None: there is none, go on from the initial state."""

    state: dict[str, Any] | None


@dataclass(frozen=True)
class HealEnded(Event):
    """The fetch that Configure began is complete and verified, with `state` = Step.state_dict() of the source; or it failed."""

    quorum_id: int
    ok: bool
    state: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    blame: tuple[str, ...] = ()


@dataclass(frozen=True)
class Leaving(Event):
    """The trainer means to go (SIGTERM, the last step). To be said at a step's boundary, by all ranks of the group at the same one: its
    tail tells the others, and CommitStep.leave says when to go."""


# ------------------------------------------------------------------------------------------------ step: effects


@dataclass(frozen=True)
class AskQuorum(Effect):
    """Send to the group server. Feed back the Part, QuorumFailed or WantsRestore."""

    call: RankCall


@dataclass(frozen=True)
class Configure(Effect):
    """Build the inter-group process group of part.quorum_id (part.known: keep it), offer the state if part.heals, start to fetch it if
    part.heal; then feed back Configured. Store keys carry job, epoch, quorum_id, group_rank.
    The state may not change while it is captured."""

    part: Part
    attempt: int


@dataclass(frozen=True)
class Compute(Effect):
    """Forward and backward on these slots; then feed back Computed. Gradient buckets may be launched as they get ready; the last one waits
    for LaunchTail."""

    step: int
    slots: tuple[int, ...]
    attempt: int


@dataclass(frozen=True)
class LaunchTail(Effect):
    """Append `tail` to the last bucket and launch what is not launched yet; then feed back Reduced or ReduceFailed.
    zeros: all buckets as zeros; again: the kept gradients, on this attempt's generation (nothing was launched before)."""

    quorum_id: int
    attempt: int
    step: int
    tail: tuple[float, ...]
    zeros: bool = False
    again: bool = False


@dataclass(frozen=True)
class StopWaiting(Effect):
    """Whatever waits on this generation (rendezvous, collective) is to end now, with Configured(ok=False) or ReduceFailed, unless it has
    completed. The forward and backward go on."""

    quorum_id: int
    reason: str


@dataclass(frozen=True)
class CastVote(Effect):
    """Send to the group server, feed back the Outcome. Without an answer ask again; if none comes at all, exit: never infer a no."""

    vote: Vote


@dataclass(frozen=True)
class AbandonGeneration(Effect):
    """Hand the process group to the reaper and do not wait for anything of it."""

    quorum_id: int


@dataclass(frozen=True)
class DropGradients(Effect):
    """The kept gradients belong to a state that is no more."""


@dataclass(frozen=True)
class Fence(Effect):
    """The state is about to change while others may be reading it: copy aside what is unsent, wait, or withdraw the offer."""

    step: int


@dataclass(frozen=True)
class CommitStep(Effect):
    """Divide, step the optimizer. held: the sums that HoldSums set aside for this step, not the ones just reduced."""

    step: int  # after the commit
    commit_id: str
    divisor: float
    contributors: tuple[int, ...]  # replica ranks
    mean_loss: float
    quorum_size: int
    held: bool = False
    leave: bool = False  # the others know that this group goes now


@dataclass(frozen=True)
class HoldSums(Effect):
    """Keep these sums: they make step `step` of a state that is still arriving."""

    step: int


@dataclass(frozen=True)
class DropHeld(Effect):
    """The held sums, and whatever has arrived of the state, belong to a heal that is over."""


@dataclass(frozen=True)
class LoadState(Effect):
    """All ranks have all of it: take the fetched state into use, before the commits that follow. Checkpoints of this group that were
    not yet published are not of this state, and never will be."""

    step: int


@dataclass(frozen=True)
class LoadCheckpoint(Effect):
    """Load the newest valid checkpoint, feed back Restored. Nothing held is worth keeping."""

    settled: int


@dataclass(frozen=True)
class Settled(Effect):
    """Checkpoints and ledger exports of this step and below may be published."""

    step: int


@dataclass(frozen=True)
class GiveUp(Effect):
    """This group holds the others up: send Leave(clean=False), and tell the group machine LighthouseRefused(id, "LOST", reason), so that
    it returns under a new id. Each rank asks for it; once is enough."""

    reason: str


@dataclass(frozen=True)
class Stop(Effect):
    """The job cannot go on. The reason names slots; the driver names the documents."""

    reason: str
    slots: tuple[int, ...] = ()
