"""Messages of the protocol: what machines observe (events), what they want done (effects), and what travels between them.

Each machine has one entry, `handle(event, now_s) -> Out`. It never waits, and never asks for the time: `now_s` is the driver's monotonic
clock. The driver carries out `Out.effects` in order, as the class of each effect says, and may log `Out.reason` when it changes.

    Trainer's rank:  step.StepMachine              <- begin, sums, quorum results, outcomes, notices -> configure, reduce, vote, commit
    Group's server:  group.GroupMachine            <- its ranks' calls and votes, the lighthouse     -> the lighthouse, answers to ranks
    Lighthouse:      lighthouse.LighthouseMachine  <- calls, streams, beats, ticks                   -> answers, refusals, notices

Below are, after what all machines use, the events and then the effects of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform  # of typing since Python 3.11
else:
    dataclass_transform = lambda **about: lambda cls: cls  # noqa: E731 (it tells type checkers alone)

VOID = -1  # the step of a group whose state is incomplete, for it is healing
UNABLE = -1.0  # in a tail: the slot's group cannot contribute (no valid token, not a number, out of memory)

Kind = Literal["pharos", "torchft"]  # the rules of a member
Refusal = Literal["INVALID_ARGUMENT", "ALREADY_EXISTS", "FAILED_PRECONDITION", "LOST"]
Fingerprint = tuple[tuple[str, str], ...]  # (what, digest) of layout, dtypes, buckets, settings; equal in all groups
State = tuple[int, int, str]  # (step, commit_quorum_id, commit_id): of two, the greater is more up to date
VoteKey = tuple[int, int, int, str]  # (quorum_id, attempt, step, kind)


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
    writes_checkpoint: bool = False  # not a source if another is
    assigned: int = 0  # slots of the open assignment of its next step
    assignment_id: str = ""  # names that assignment
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


@dataclass(frozen=True)
class Quorum:
    """The members of one generation, and the state from which all continue."""

    quorum_id: int
    members: tuple[Member, ...]  # sorted by replica_id; the place is the replica_rank
    reference: State = (0, 0, "")
    epoch: str = ""  # of the job; keeps the store keys of two jobs apart
    fingerprint: Fingerprint = ()  # of the job, the same in all members

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(m.replica_id for m in self.members)

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """Replica ranks of the members that hold the reference state."""
        return tuple(rank for rank, m in enumerate(self.members) if m.state == self.reference)


@dataclass(frozen=True)
class Times:
    """Timeouts; two must be equal in all processes; the lighthouse sends its own with the first answer."""

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


@lru_cache(4096)  # asked for each member of each assignment, by each rank
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


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message:
    """Base of events and effects: each class of them is a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Effect(Message):
    """Something that a driver carries out."""


class Event(Message):
    """Something that a driver has seen."""


class Tick(Event):
    """Time has passed. For every machine, at least each tick_s, after all events that have arrived."""


# ------------------------------------------------------------------------------------------------ notices


class Notice(Event):
    """News of one generation, ignored in others; a new stream gets it again."""

    quorum_id: int


class MemberLost(Notice):
    """The generation cannot complete. Sent for its first loss; further ones show in the next quorum."""

    replica_ids: tuple[str, ...] = ()
    reason: str = ""


class GenerationAborted(Notice):
    """A member asks for a quorum because this generation failed, or a newer one has replaced it: every wait on it ends."""

    reason: str = ""


class Finished(Notice):
    """A member has left because the run is over and its last step is saved: the others may end."""

    replica_id: str = ""


class ChangeAnnounced(Notice):
    """A group waits to join, or has left: finish the step, then ask for a quorum."""

    reason: str = ""


# ------------------------------------------------------------------------------------------------ of the lighthouse


class Call(Event):
    """A group asks for a quorum. It counts as a beat. `known`: the newest quorum whose answer has arrived (0: none)."""

    member: Member
    kind: Kind = "pharos"
    known: int = 0
    failed: bool = False  # generation `known` failed; else a change is due, or it is the first call
    blame: tuple[str, ...] = ()  # replica_ids that it cannot work with now: no connection, or another fingerprint
    fingerprint: Fingerprint = ()
    number: int = 0  # of this process's calls, growing; a retry repeats it, so that a late copy is recognised


class CallCancelled(Event):
    """The RPC of a waiting call ended. A caller with a stream still takes part."""

    replica_id: str


class Beat(Event):
    """A heartbeat of torchft's members; ours send Report."""

    replica_id: str
    kind: Kind = "pharos"


class StreamOpened(Event):
    """A group server's Watch stream begins, with its newest quorum and settled step."""

    replica_id: str
    quorum: Quorum | None = None
    settled: int = 0


class StreamClosed(Event):
    """The connection broke. A stream that was replaced by a newer one of the same id is not reported."""

    replica_id: str


class Report(Event):
    """On the stream, once a beat and at each change of `waiting` or `blame`; counts as a beat."""

    replica_id: str
    step: int  # VOID while healing
    commit_quorum_id: int = 0
    waiting: bool = False  # all its ranks are in the collective (or past it)
    median_step_s: float = 0.0
    settled: int = 0
    launched: int = 0  # reductions in this generation, the newest included: a member with fewer than others is behind
    phase_limit_s: float = 0.0  # limit of the long phase that a rank is in; 0: none, or it is over its limit
    blame: tuple[str, ...] = ()  # as Call.blame, at this moment


class Leave(Event):
    """The group leaves on purpose."""

    replica_id: str
    clean: bool = True  # the others can finish the running step without it; else the generation fails
    reason: str = "left"
    finished: bool = False  # the run is over, and its last step is saved


class TakeOver(Event):
    """An operator's order: callers may go on without the previous members."""


class Evict(Event):
    """An operator's order (dashboard: kill or drain)."""

    replica_id: str


class Persist(Effect):
    """Write `saved` to the state file (temporary file, fsync, rename) before any later effect: an id once seen must not come again."""

    saved: PersistentState


class Answer(Effect):
    """Answer every waiting call of these ids with `quorum` and Times, or, where none waits, send it down the id's stream."""

    replica_ids: tuple[str, ...]
    quorum: Quorum


class Refuse(Effect):
    """Fail the waiting calls of the id. LOST: it may return under a new id, with its state."""

    replica_id: str
    code: Refusal
    reason: str


class MustRestore(Effect):
    """Answer the waiting calls of these ids: load the newest valid checkpoint, call again with `restored`."""

    replica_ids: tuple[str, ...]
    settled: int  # the newest step known to be settled


class Notify(Effect):
    """Send the notice down the streams of these ids; one without a stream gets nothing (torchft's)."""

    replica_ids: tuple[str, ...]
    notice: Notice


@dataclass(frozen=True)
class PersistentState:
    """The lighthouse's persistent state, read again after a restart."""

    epoch: str
    last_id: int = 0
    settled: int = 0
    kind: Kind = "pharos"
    quorum: Quorum | None = None  # the newest; None: there was none, or none of its members may come back
    terms: Terms | None = None  # of the job that it is of

    @staticmethod
    def from_dict(data: dict[str, Any]) -> PersistentState:
        """Reads its asdict, after JSON. Raises TypeError or KeyError for anything else."""
        terms, quorum = data.get("terms"), data["quorum"]  # earlier versions: no terms; `shape`, or none
        if quorum:
            step, commit_quorum_id, commit_id = quorum["reference"]
            fingerprint = tuple((what, digest) for what, digest in quorum.get("fingerprint") or quorum.get("shape", ()))
            renamed = {"dealt": "assigned", "deal_id": "assignment_id"}
            told = [{renamed.get(name, name): value for name, value in x.items()} for x in quorum["members"]]
            members = tuple(Member(**{**x, "reconfigure_handles": tuple(x["reconfigure_handles"])}) for x in told)
            quorum = Quorum(
                quorum["quorum_id"], members, (step, commit_quorum_id, commit_id), quorum["epoch"], fingerprint
            )
        return PersistentState(**{**data, "quorum": quorum or None, "terms": Terms(**terms) if terms else None})


# ------------------------------------------------------------------------------------------------ of a group's server


class RankCall(Event):
    """A rank asks for a quorum, for its group; the lighthouse is called when all ranks have asked."""

    group_rank: int
    member: Member  # the group as this rank sees it; id and addresses are filled in by the group's server
    checkpoint_metadata: str = ""  # where this rank's state is served
    known: int = 0
    failed: bool = False
    blame: tuple[str, ...] = ()
    fingerprint: Fingerprint = ()
    number: int = 0  # as Call.number, of this rank's questions


class RankCancelled(Event):
    """A rank's waiting call ended. It may ask again, and gets the answer that the others got meanwhile."""

    group_rank: int


class RankStream(Event):
    """A rank's Watch stream to its group server opened or broke. Broken: the process is gone, and the group with it."""

    group_rank: int
    open: bool


class Vote(Event):
    """One rank's vote on a decision that determines which collective comes next."""

    group_rank: int
    kind: Literal["configured", "commit", "healed"]
    quorum_id: int
    attempt: int
    step: int  # that the attempt starts from
    verdict: Literal["yes", "retry", "failed"]  # retry: all sums are there, but a group was unable
    change: bool = False
    reason: str = ""  # of a verdict that is not yes
    blame: tuple[str, ...] = ()
    whole: bool = False  # the vote of all ranks of the group, which have agreed on it

    @property
    def key(self) -> VoteKey:
        return (self.quorum_id, self.attempt, self.step, self.kind)


class LighthouseAnswered(Event):
    """The Quorum RPC was answered, or a quorum came down the stream."""

    quorum: Quorum
    times: Times | None = None
    terms: Terms | None = None


class LighthouseFailed(Event):
    """The Quorum RPC failed (connection, deadline)."""

    reason: str


class LighthouseRefused(Event):
    """The lighthouse refused this id, on a call or on the stream."""

    replica_id: str
    code: Refusal
    reason: str


class LighthouseRequiresRestore(Event):
    settled: int


class BeatAnswered(Event):
    """An answered beat. `sent_s`: when it was sent, on the clock of now_s, which must run while the host sleeps (CLOCK_BOOTTIME)."""

    sent_s: float


class LighthouseWaits(Event):
    """The reason for which the group's call waits."""

    reason: str


class SumsAwaited(Event):
    """All ranks are in the collective with other groups or past it, and some in it; or this is over."""

    awaited: bool


class WantsToLeave(Event):
    """A rank was asked to leave (SIGTERM): a wait of the group ends. Else the trainers leave at the end of a step."""


class CallLighthouse(Effect):
    """Send this after `delay_s`, unless a newer CallLighthouse or EndGroup comes first. Feed back the answer: Lighthouse..."""

    call: Call
    delay_s: float = 0.0


class OpenStream(Effect):
    """Close the stream to the lighthouse, if any, and open one under this id. Reopen it by yourself when it breaks."""

    replica_id: str


class CloseStream(Effect):
    """Close the stream to the lighthouse, and open none before OpenStream: until then this group's name is free."""


class AnswerRank(Effect):
    """Answer the waiting call of one rank."""

    group_rank: int
    answer: QuorumResult | RestoreRequired | Released


class FailRank(Effect):
    """Fail the waiting call (or vote) of one rank."""

    group_rank: int
    code: Literal["INVALID_ARGUMENT", "ALREADY_EXISTS", "NOT_FOUND", "UNAVAILABLE", "FAILED_PRECONDITION", "STALE"]
    reason: str


class Waits(Effect):
    """Send this to all ranks: the reason of the group's wait, and its length. Once a beat, as long as no rank of the group is late."""

    reason: str
    waited_s: float


class AnswerVote(Effect):
    """Answer the vote of one rank with the group's outcome."""

    group_rank: int
    outcome: Outcome


class NotifyRank(Effect):
    """Send the notice down one rank's stream."""

    group_rank: int
    notice: Notice


class EndGroup(Effect):
    """Send Leave(clean=False), close, SIGKILL the trainer processes: torchelastic starts the group again."""

    reason: str


class RestoreRequired(Event):
    """Answers AskQuorum in place of a QuorumResult: load the newest valid checkpoint first, and ask again."""

    settled: int


class Released(Event):
    """Answers AskQuorum, for the driver: the group was asked to leave while it waited, and all its ranks end with the state in hand."""


@dataclass(frozen=True)
class Source:
    """A group to heal from: its rank of the same group_rank holds the shards."""

    replica_rank: int
    address: str


class QuorumResult(Event):
    """A quorum as one rank has it: its instructions (group.plan). An event for step.StepMachine: the answer to AskQuorum."""

    quorum_id: int
    epoch: str
    replica_id: str
    replica_rank: int
    members: tuple[str, ...]  # replica_ids by replica_rank
    store_address: str
    reference: State
    heal: bool  # the whole group, or none of its ranks
    sources: tuple[Source, ...]  # at most two; empty unless heal
    recover_dst_replica_ranks: tuple[int, ...]  # replica_ranks that heal from this group
    participants: tuple[str, ...]  # members that are assigned slots, by replica_rank
    assigned: int  # slots of the open assignment of all reference members; 0: they make a new one, as they have none, or different ones
    same_generation: bool = False  # the rank has formed it already: keep the process group
    handles: tuple[str, ...] = ()  # addresses at which this rank's peer in each member answers the prober; "": unknown


class Outcome(Event):
    """A group's decision: the same for all its ranks, and final."""

    kind: Literal["configured", "commit", "healed"]
    quorum_id: int
    attempt: int
    step: int
    verdict: Literal["yes", "retry", "failed"]
    change: bool = False
    reason: str = ""
    blame: tuple[str, ...] = ()
    healed: bool = False  # decided after the group's yes to the open heal: its ranks load the state with this outcome

    @property
    def key(self) -> VoteKey:
        return (self.quorum_id, self.attempt, self.step, self.kind)


# ------------------------------------------------------------------------------------------------ of a rank's step


class Begin(Event):
    """The trainer begins a step. Answered by Compute, or by commits of a healing group's held sums before it."""


class Configured(Event):
    """Answers Configure, for the same quorum_id: the process group is formed (and a heal, if asked for, has begun), or not."""

    quorum_id: int
    ok: bool
    reason: str = ""


class Computed(Event):
    """The local gradients are complete. Figures are summed over the group's ranks."""

    tokens: tuple[float, ...] = ()  # valid tokens per slot of Compute.slots
    loss_sum: float = 0.0
    able: bool = True  # False: not a number, out of memory; zeros go out in place of the gradients
    kept: bool = True  # False: they can be sent once; a failed attempt returns its slots, as without keep_gradients


class Reduced(Event):
    """All sums of the attempt have arrived; `tail` is the summed vector of the last bucket."""

    quorum_id: int
    attempt: int
    step: int
    tail: tuple[float, ...]


class ReduceFailed(Event):
    """A collective of the attempt failed, or was ended by InterruptCollectives. May come while the backward still runs."""

    quorum_id: int
    attempt: int
    step: int
    reason: str


class QuorumFailed(Event):
    """Answers AskQuorum without a quorum. The rank exits."""

    reason: str


class Restored(Event):
    """Answers LoadCheckpoint. `state`: StepMachine.state_dict() of the checkpoint; None: there is none, go on from the initial state."""

    state: dict[str, Any] | None


class HealEnded(Event):
    """The fetch that Configure began is complete and verified, with `state` = StepMachine.state_dict() of the source; or it failed."""

    quorum_id: int
    ok: bool
    state: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    blame: tuple[str, ...] = ()


class Leaving(Event):
    """The trainer leaves: as soon as the others know (SIGTERM), or with the commit of step `after`. Fed at the same step boundary by all
    ranks of the group: its tail tells the others, and CommitStep.leave is True for its last step."""

    after: int | None = None


class AskQuorum(Effect):
    """Send to the group server. Feed back the QuorumResult, QuorumFailed or RestoreRequired."""

    call: RankCall


class Configure(Effect):
    """Build the inter-group process group of quorum.quorum_id (quorum.same_generation: keep it), offer the state to
    quorum.recover_dst_replica_ranks, start to fetch it if quorum.heal; then feed back Configured. The state may not change while it is
    captured. Store keys have job, epoch, quorum_id, group_rank."""

    quorum: QuorumResult
    attempt: int


class Compute(Effect):
    """Forward and backward on these slots; then feed back Computed. Buckets may be launched when ready; the last waits for LaunchTail."""

    step: int
    slots: tuple[int, ...]
    attempt: int


class LaunchTail(Effect):
    """Append `tail` to the last bucket and launch what is not launched yet; then feed back Reduced or ReduceFailed."""

    quorum_id: int
    attempt: int
    step: int
    tail: tuple[float, ...]
    zeros: bool = False  # all buckets as zeros
    digest_at: int = 0  # from there on the driver fills in the digest of this rank's weights; 0: the tail has none
    copied: bool = False  # the digest is to say that it is no witness (compare.in_tail)


class WeightsDiffer(Effect):
    """Report that this rank's weights after `step` are not those of the same rank of other groups."""

    step: int
    replica_ids: tuple[str, ...]  # the odd ones; empty where no majority has the same


class InterruptCollectives(Effect):
    """End every wait on this generation (rendezvous, collective) now, by Configured(ok=False) or ReduceFailed; computation goes on."""

    quorum_id: int
    reason: str


class CastVote(Effect):
    """Send to the group server, feed back the Outcome. Without an answer ask again, in the end exit: never infer a no."""

    vote: Vote


class AbandonGeneration(Effect):
    """Hand the process group to the reaper, without a wait."""

    quorum_id: int


class DropGradients(Effect):
    """Drop the kept gradients: their state is gone."""


class Fence(Effect):
    """The state is about to change while others may read it: copy the unsent rest, wait, or withdraw the offer."""

    step: int


class CommitStep(Effect):
    """Divide, step the optimizer. held: the sums that HoldSums set aside for this step, not the ones just reduced."""

    step: int  # after the commit
    commit_id: str
    divisor: float
    contributors: tuple[int, ...]  # replica ranks
    mean_loss: float
    quorum_size: int
    slots: tuple[tuple[int, str], ...] = ()  # that contributed: slot and replica_id
    holes: tuple[int, ...] = ()  # all slots that were assigned and have yet to be trained on
    held: bool = False
    leave: bool = False  # the others know that this group leaves now


class HoldSums(Effect):
    """Keep these sums, of step `step` of a state that is still arriving."""

    step: int


class DropHeld(Effect):
    """Drop the held sums, and the part of the state that has arrived: their heal is over."""


class LoadState(Effect):
    """Load the fetched state, which all ranks have, before the commits that follow."""

    step: int


class LoadCheckpoint(Effect):
    """Load the newest valid checkpoint, drop held sums, feed back Restored."""

    settled: int


class Settled(Effect):
    """Step `step` is final: no restart yields another version of it."""

    step: int


class RejoinUnderNewId(Effect):
    """This group keeps the others waiting: send Leave(clean=False), and feed the group machine LighthouseRefused(id, "LOST", reason), so
    that it returns under a new id. Every rank emits it; the first counts."""

    reason: str


class Stop(Effect):
    """The job cannot go on. `slots`: those that are to blame, of which the driver names the documents. `clean`: as in Leave."""

    reason: str
    slots: tuple[int, ...] = ()
    clean: bool = True
