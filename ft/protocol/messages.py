"""Messages of the protocol: the events that the state machines take, the effects that they return, and the dataclasses in both.

Each machine is driven by one method, `handle(event, now_s) -> Out`. It never waits, and never reads a clock: `now_s` is the driver's
monotonic time. The driver carries out `Out.effects` in order, each as the docstring of its class says (the Manager carries out
InterruptCollectives at once), and may log `Out.reason` when it changes. *Group* is a replica group; only within ft/process_groups it is a
process group.

    Trainer's rank:  step.StepMachine              <- begin, reduced tail, quorum result, outcome, notice -> configure, reduce, vote, commit
    Group's server:  group.GroupMachine            <- its ranks' requests and votes, the lighthouse   -> the lighthouse, answers to ranks
    Lighthouse:      lighthouse.LighthouseMachine  <- requests, streams, heartbeats, ticks            -> answers, refusals, notices

The classes that all machines use come first, then the events and effects of each machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform  # in typing since Python 3.11
else:
    dataclass_transform = lambda **about: lambda cls: cls  # noqa: E731 (only type checkers use it)

VOID = -1  # step of a group without a complete state: it heals, or waits for an order to load a checkpoint
# In the protocol a step is one number, STEPS_PER_BRANCH * b + s for step s of branch b: the job has gone back to a checkpoint (Rewind) b
# times. So every comparison of steps compares (branch, step): a state of an older branch is older, however far it was, and its group heals.
# In branch 0 the number is the step itself. Trainers, logs and pages show s, and b where it is not 0. Legal steps (rules.MAX_STEP; int64 in
# pharos.proto) leave room for 1,024 branches.
STEPS_PER_BRANCH, MAX_BRANCH = 1 << 30, 1023
# longest beat_s of a group: a heartbeat must come before the lighthouse, whose own beat_s is 1 s, gives the group's name to another that
# requests it, which it does after 2.5 s of silence (LighthouseMachine._take_name)
MAX_BEAT_S = 2.0
UNABLE = -1.0  # tokens of a slot in the tail whose group cannot contribute (no valid token, NaN or Inf)
# reason for an order to load a checkpoint while no step is settled: at a start nothing is lost
JOB_BEGINS = "the job begins: load the newest checkpoint, if there is one"

Kind = Literal["pharos", "torchft"]  # protocol of a member, and with it the quorum rules that apply
RefusalCode = Literal["INVALID_ARGUMENT", "ALREADY_EXISTS", "FAILED_PRECONDITION", "LOST"]
Fingerprint = tuple[tuple[str, str], ...]  # (name, digest) of layout, dtypes, buckets, settings; equal in all groups
State = tuple[int, int, str]  # (step, commit_quorum_id, commit_id): the greater of two is more recent
VoteKey = tuple[int, int, int, str]  # (quorum_id, attempt, step, kind)


# ------------------------------------------------------------------------------------------------ quorums


@dataclass(frozen=True)
class Member:
    """A replica group in a quorum. The first nine fields are those of torchft's QuorumMember; torchft's members leave the rest empty."""

    replica_id: str  # "name:unique"; the name is REPLICA_GROUP_ID, the unique part differs for each incarnation
    address: str = ""  # of the group server, http://host:port
    store_address: str = ""  # of the store for rendezvous that the group serves, host:port
    step: int = 0  # newest committed step; VOID: no complete state
    world_size: int = 1  # number of ranks of the group
    shrink_only: bool = False  # True: the next quorum gets no new members
    data: str = ""  # JSON that the user passes to all members
    # torchft: failed steps since the last commit; Pharos: 1 if the generation has failed; above 0: the next quorum gets a new id
    commit_failures: int = 0
    reconfigure_handles: tuple[str, ...] = ()  # Pharos: host:port at which each rank answers probes, by group_rank
    commit_id: str = ""  # name of the state's history: equal ids, the same contributions
    commit_quorum_id: int = 0  # id of the quorum that committed the state
    restored: int | None = None  # step of the checkpoint that the state was loaded from; 0: there was no checkpoint
    writes_checkpoint: bool = False  # True: others heal from it only if there is no other source
    assigned: int = 0  # number of slots in the open assignment of its next step
    assignment_id: str = ""  # hash of that assignment
    init_sync: bool = False  # True: initial states differ between groups, so at step 0 all heal from one

    @property
    def name(self) -> str:
        return name_of(self.replica_id)

    @property
    def void(self) -> bool:
        return self.step == VOID

    @property
    def state(self) -> State:
        return (self.step, self.commit_quorum_id, self.commit_id)

    def continues_as(self, other: Member) -> bool:
        """True if a quorum that contains `other` also answers the request of this member: equal state, and equal assignment."""
        return (self.state, self.assignment_id) == (other.state, other.assignment_id)


@dataclass(frozen=True)
class Quorum:
    """The members of one generation, and the state from which all of them continue."""

    quorum_id: int
    members: tuple[Member, ...]  # sorted by replica_id; the index is the replica_rank
    reference: State = (0, 0, "")
    epoch: str = ""  # identity of the job's history; part of store keys, so that those of two jobs differ
    fingerprint: Fingerprint = ()  # the job's, equal in all members

    @cached_property
    def ids(self) -> tuple[str, ...]:
        return tuple(m.replica_id for m in self.members)

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """Returns the replica ranks of the members that have the reference state."""
        return tuple(rank for rank, m in enumerate(self.members) if m.state == self.reference)


class Rewound(NamedTuple):
    """Beginning of a branch: step `spiked` of the previous branch was a spike, and the job went back to a checkpoint of `step`."""

    step: int
    spiked: int
    reason: str
    # ranges of positions assigned between the two, which are never trained on again
    skipped: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Timeouts:
    """Timeouts in seconds, each the setting of that name in [fault_tolerance] (config.py). docs/operating.md (Timeouts) says what a shorter
    and a longer one causes. heartbeat_timeout_s and heal_grace_s are equal in a job: the lighthouse sends its own with each answer."""

    beat_s: float = 1.0  # interval of a group's heartbeats
    heartbeat_timeout_s: float = 5.0  # silence, after which the lighthouse counts the group as lost
    rendezvous_s: float = 10.0  # forming a process group between groups; then the attempt fails
    # each wait for a state that is on its way: a source's commit waits (m.Fence), then the offer is withdrawn; a joiner waits for an offer
    # or for bytes, then its heal fails; the others wait for a joiner, then it is lost or returns under a new id by itself
    heal_grace_s: float = 30.0
    # silence of all groups that have the state, after which others continue from a checkpoint; after half of it without the lighthouse a
    # group holds back its commits; None (setting: 0): no limit, only an operator may allow a takeover
    takeover_s: float | None = 30.0
    # a member waits for others, then they are lost (sooner where most members wait); ranks wait for another rank of their group, then the
    # group ends; the job waits for a group to request a quorum after the others have continued without it, then that group is lost
    stall_s: float = 60.0
    # age of the oldest operation between groups, at which its generation fails; a last resort
    collective_s: float = 600.0

    def incompatible_timeouts(self, theirs: Timeouts) -> list[str]:
        """Returns the reasons why a group with these timeouts may not join a lighthouse that has `theirs`; empty: it may."""
        bad = [f"{a} = {x:g} must {relation} {b} = {y:g}" for a, x, relation, b, y in self.timeout_order_violations()]
        bad += [f"beat_s = {self.beat_s:g} must not exceed {MAX_BEAT_S:g}"] * (self.beat_s > MAX_BEAT_S)
        alike = [(n, getattr(self, n), getattr(theirs, n)) for n in ("heartbeat_timeout_s", "heal_grace_s")]
        return bad + [f"{n} = {ours}: the lighthouse has {other}" for n, ours, other in alike if ours != other]

    def timeout_order_violations(self) -> list[tuple[str, float, str, str, float]]:
        """Returns the pairs of successive timeouts in the wrong order: (name, seconds, "be below" or "not exceed", next name, its
        seconds)."""
        names = ("beat_s", "heartbeat_timeout_s", "rendezvous_s", "heal_grace_s", "takeover_s", "collective_s")
        order = [(n, getattr(self, n)) for n in names if getattr(self, n) is not None]
        pairs = [(a, x, b, y) for (a, x), (b, y) in zip(order, order[1:], strict=False)]
        may_be_equal = ("takeover_s", "collective_s")
        wrong = [(a, x, b, y) for a, x, b, y in pairs if x > y or (x == y and b not in may_be_equal)]
        return [(a, x, "not exceed" if b in may_be_equal else "be below", b, y) for a, x, b, y in wrong]


@dataclass(frozen=True)
class JobLimits:
    """Limits that the lighthouse keeps for a job's life, through its own restarts. Members rely on them: only an operator may lower one."""

    min_replicas: int = 1
    takeover_s: float | None = 30.0  # None: only an operator may allow a takeover
    num_replica_groups: int = 0  # number of groups that the job is meant to have; 0: unknown

    def at_least(self, before: JobLimits | None) -> JobLimits:
        """Returns these limits, each raised to that of `before` where that is higher."""
        if before is None:
            return self
        takeovers_s = (self.takeover_s, before.takeover_s)
        return JobLimits(
            max(self.min_replicas, before.min_replicas),
            None if None in takeovers_s else max(filter(None, takeovers_s)),
            max(self.num_replica_groups, before.num_replica_groups),
        )


@lru_cache(4096)  # called for each member of each assignment, by each rank
def incarnation_of(replica_id: str) -> str:
    """Returns the id without its rejoin count: "left:4f2a.2" is the incarnation "left:4f2a", which was lost twice and came back."""
    name, colon, unique = replica_id.partition(":")
    return name + colon + unique.partition(".")[0]


def step_of(step: int) -> int:
    """Returns the step within its branch; VOID for VOID."""
    return step % STEPS_PER_BRANCH if step > VOID else VOID


def describe_step(step: int, inner_steps: int = 1) -> str:
    """Returns "7", or "7 of branch 2". `inner_steps`: optimizer steps in a step of the protocol."""
    at = str(step_of(step) * inner_steps)
    return f"{at} of branch {step // STEPS_PER_BRANCH}" if step >= STEPS_PER_BRANCH else at


def name_of(replica_id: str) -> str:
    """Returns the name in an id: "left" for "left:4f2a". A name has at most one live id."""
    return replica_id.partition(":")[0]


# ------------------------------------------------------------------------------------------------ output of a machine


@dataclass(slots=True)  # not frozen, which takes three times as long: one is made at each event
class Out:
    """The effects of one event, in order, and the reason for them or for the machine's wait."""

    effects: tuple[Effect, ...] = ()
    reason: str = ""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Message:
    """Base class of events and effects, which makes each of their classes a frozen dataclass."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)


class Effect(Message):
    """Something that a driver carries out; ReportSettled is for observers only. An effect is named by an order or a report, an event by
    what was observed or requested. Waits is a report, named as its message in pharos.proto."""


class Event(Message):
    """Something that a driver has observed."""


class Tick(Event):
    """Time has passed. Fed at least every tick_s to a machine that may wait, after all events that have arrived."""


# ------------------------------------------------------------------------------------------------ notices


class Notice(Event):
    """A message about one generation; a group that is in a different one ignores it. Those of the newest generation are sent again when a
    stream is reopened, by the lighthouse to a group and by the group's server to a rank."""

    quorum_id: int


class MemberLost(Notice):
    """A member is lost, so the generation cannot complete. Only the first loss of a generation is announced."""

    replica_ids: tuple[str, ...] = ()
    reason: str = ""


class GenerationAborted(Notice):
    """The generation is over, since a member reports its failure or a newer generation has replaced it: every wait on it ends."""

    reason: str = ""


class Finished(Notice):
    """A member has left because the run is over and its last step is saved: the others may end."""

    replica_id: str = ""


class ChangeAnnounced(Notice):
    """A new quorum is due: a group waits for one, or has left. The others finish the step, then request a quorum."""

    reason: str = ""


# ------------------------------------------------------------------------------------------------ lighthouse


class Call(Event):
    """A quorum request of a group; counts as a heartbeat. `known`: id of the newest quorum whose answer has arrived (0: none)."""

    member: Member
    kind: Kind = "pharos"
    known: int = 0
    failed: bool = False  # True: generation `known` failed; False: a change is due, or it is the first request
    blame: tuple[str, ...] = ()  # replica_ids that it cannot work with now: no connection, or a different fingerprint
    fingerprint: Fingerprint = ()
    number: int = 0  # grows with each request of this process; a retry repeats it, so a late copy is recognised
    epoch: str = ""  # of quorum `known`


class CallCancelled(Event):
    """The RPC of a quorum request ended without an answer. The request of a group with an open stream stays valid."""

    replica_id: str


class Beat(Event):
    """A heartbeat without a report. The service feeds one for torchft's members only, since Pharos members send Report."""

    replica_id: str
    kind: Kind = "torchft"


class StreamOpened(Event):
    """A group server has opened its Watch stream. It sends its newest quorum and settled step first."""

    replica_id: str
    quorum: Quorum | None = None
    settled: int = 0


class StreamClosed(Event):
    """A Watch stream has ended. Not fed for a stream that a newer one of the same id has replaced."""

    replica_id: str


class Report(Event):
    """A heartbeat of a Pharos member, sent up its stream every beat_s and at each change of `waiting` or `blame`."""

    replica_id: str
    step: int  # VOID while healing
    commit_quorum_id: int = 0
    # True in a group's report: all its ranks have entered the all-reduce with other groups, and some are still in it; in a rank's report to
    # its group's server: this rank has entered it (telemetry.Status)
    waiting: bool = False
    median_step_s: float = 0.0
    settled: int = 0
    launched: int = 0  # attempts launched in this quorum; a member with fewer than others is behind
    phase_limit_s: float = 0.0  # limit of the long phase that a rank is in; 0: it is in none, or the limit has passed
    blame: tuple[str, ...] = ()  # as Call.blame, at the time of the report
    quorum_id: int = 0  # the sender's, to which `waiting` and `launched` belong; 0: none, or an older version


class Leave(Event):
    """The group announces that it leaves (clean), or that it ends or returns under a new id (not clean)."""

    replica_id: str
    clean: bool = True  # True: the others can finish the current step without it; False: the generation fails
    reason: str = "left"
    finished: bool = False  # True: the run is over, and its last step is saved


class TakeOver(Event):
    """An operator's order: waiting groups may continue the job without the previous members."""


class Evict(Event):
    """An operator's order to count a group as lost (RPC Evict, or a dashboard's `kill` for a group without a stream)."""

    replica_id: str


class Persist(Effect):
    """Write `saved` to the state file (temporary file, fsync, rename): before any later effect, unless the file covers its ids already
    (rpc/state_file.py), as quorum ids must never repeat."""

    saved: PersistentState


class Answer(Effect):
    """Answer every waiting request of these ids with the quorum, Timeouts and JobLimits; an id without one gets them down its stream."""

    replica_ids: tuple[str, ...]
    quorum: Quorum


class Refuse(Effect):
    """Fail the waiting requests of the id. LOST: the group may return under a new id, with its state."""

    replica_id: str
    code: RefusalCode
    reason: str


class MustRestore(Effect):
    """Answer the waiting requests of these ids: load the newest valid checkpoint, then request a quorum with `restored`."""

    replica_ids: tuple[str, ...]
    settled: int  # the newest step known to be settled


class Notify(Effect):
    """Send the notice down the streams of these ids; an id without a stream (torchft's have none) gets nothing."""

    replica_ids: tuple[str, ...]
    notice: Notice


@dataclass(frozen=True)
class PersistentState:
    """The lighthouse's state that survives its restarts."""

    epoch: str
    last_id: int = 0
    settled: int = 0
    kind: Kind = "pharos"
    quorum: Quorum | None = None  # the newest; None: there was none, or none of its members may come back
    limits: JobLimits | None = None  # limits of that job

    @staticmethod
    def from_dict(data: dict[str, Any]) -> PersistentState:
        """Builds it from the JSON of its asdict, also an earlier version's. Raises KeyError, TypeError, ValueError or AttributeError."""
        data = {**data}  # earlier versions: `terms` for `limits`, or neither, and `shape` for `fingerprint`
        limits, quorum = data.pop("terms", None) or data.get("limits"), data["quorum"]
        if quorum:
            step, commit_quorum_id, commit_id = quorum["reference"]
            fingerprint = tuple((what, digest) for what, digest in quorum.get("fingerprint") or quorum.get("shape", ()))
            renamed = {"dealt": "assigned", "deal_id": "assignment_id"}
            renamed_members = [{renamed.get(name, name): value for name, value in x.items()} for x in quorum["members"]]
            members = tuple(
                Member(**{**x, "reconfigure_handles": tuple(x["reconfigure_handles"])}) for x in renamed_members
            )
            quorum = Quorum(
                quorum["quorum_id"], members, (step, commit_quorum_id, commit_id), quorum["epoch"], fingerprint
            )
        return PersistentState(**{**data, "quorum": quorum or None, "limits": JobLimits(**limits) if limits else None})


# ------------------------------------------------------------------------------------------------ group server


class RankCall(Event):
    """A rank's quorum request. The group requests one from the lighthouse when all its ranks have."""

    group_rank: int
    member: Member  # the group as this rank sees it; the group's server fills in id and addresses
    checkpoint_metadata: str = ""  # address at which this rank serves its state
    known: int = 0  # this field to `fingerprint`: as in Call
    failed: bool = False
    blame: tuple[str, ...] = ()
    fingerprint: Fingerprint = ()
    number: int = 0  # as Call.number, of this rank's requests


class RankCancelled(Event):
    """The RPC of a rank's waiting request ended. When the rank repeats it, it gets the answer that the others got meanwhile."""

    group_rank: int


class RankStream(Event):
    """A rank's Watch stream to its group server opened or broke. A broken stream means that the process is gone: the group ends."""

    group_rank: int
    open: bool


class Vote(Event):
    """One rank's vote on a decision that determines which collective comes next."""

    group_rank: int
    kind: Literal["configured", "commit", "healed"]
    quorum_id: int
    attempt: int
    step: int  # step of the state that the attempt starts from
    verdict: Literal["yes", "retry", "failed"]  # retry: the all-reduce completed, but a group could not contribute
    change: bool = False  # True: a quorum is due before the next step
    reason: str = ""  # of a verdict that is not yes
    divergent: tuple[str, ...] = ()  # commit: members whose weights differ
    joint: bool = False  # True: the vote of all ranks of the group, which have agreed on it in a collective

    @property
    def key(self) -> VoteKey:
        return (self.quorum_id, self.attempt, self.step, self.kind)


class LighthouseAnswered(Event):
    """The Quorum RPC was answered with a quorum, or one came down the stream."""

    quorum: Quorum
    times: Timeouts | None = None
    limits: JobLimits | None = None


class LighthouseFailed(Event):
    """The Quorum RPC failed (connection, deadline)."""

    reason: str


class LighthouseRefused(Event):
    """The lighthouse refused this id, by the answer of an RPC or down the stream."""

    replica_id: str
    code: RefusalCode
    reason: str


class LighthouseRequiresRestore(Event):
    """The lighthouse answered the request with MustRestore. `settled`: its value."""

    settled: int


class BeatAnswered(Event):
    """The lighthouse answered a heartbeat sent at `sent_s`, on now_s's clock, which must run while the host sleeps (CLOCK_BOOTTIME)."""

    sent_s: float


class LighthouseWaits(Event):
    """The lighthouse reports why the group's quorum request is not answered yet."""

    reason: str


class ReductionAwaited(Event):
    """`awaited` = True: all ranks have entered the all-reduce with other groups, and not all have completed it. False: this has ended."""

    awaited: bool


class WantsToLeave(Event):
    """A rank was asked to leave (SIGTERM): if the group waits for others, the wait ends. Trainers that do not wait leave after a step."""


class CallLighthouse(Effect):
    """Send this request after `delay_s`, unless a newer CallLighthouse or EndGroup comes first; feed back one of the Lighthouse* events."""

    call: Call
    delay_s: float = 0.0


class OpenStream(Effect):
    """Close the stream to the lighthouse, if any, and open one under this id. The driver reopens it when it breaks."""

    replica_id: str


class CloseStream(Effect):
    """Close the stream to the lighthouse, and open none before OpenStream: until then another process may take this group's name."""


class AnswerRank(Effect):
    """Answer the waiting quorum request of one rank."""

    group_rank: int
    answer: QuorumResult | RestoreRequired | Released


class FailRank(Effect):
    """Fail the waiting quorum request or vote of one rank."""

    group_rank: int
    code: Literal["INVALID_ARGUMENT", "ALREADY_EXISTS", "UNAVAILABLE", "FAILED_PRECONDITION", "STALE"]
    reason: str
    vote_key: VoteKey | None = None  # None: the quorum request


class Waits(Effect):
    """Send the reason and the seconds of the group's wait to all ranks. Sent at least each second while it waits only for others."""

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
    """Send Leave(clean=False), close the stream, and kill the trainer processes on the server's host (SIGKILL). Ranks on other
    hosts are notified, and exit; torchelastic then restarts the group."""

    reason: str


class RestoreRequired(Event):
    """Answers AskQuorum in place of a QuorumResult: the rank must load the newest valid checkpoint first, then request a quorum again."""

    settled: int


class Released(Event):
    """Answers AskQuorum, for the driver only: the group was asked to leave while it waited; all its ranks end, with their present state."""


@dataclass(frozen=True)
class Source:
    """A group to heal from: its rank with the joiner's group_rank has the same shards."""

    replica_rank: int
    address: str  # of its group server, which knows the healing addresses of its ranks (RankCall.checkpoint_metadata)


class QuorumResult(Event):
    """A quorum from the view of one rank (group.plan); for step.StepMachine the answer to AskQuorum."""

    quorum_id: int
    epoch: str
    replica_id: str
    replica_rank: int
    members: tuple[str, ...]  # replica_ids by replica_rank
    store_address: str
    reference: State
    heal: bool  # equal for all ranks of a group
    sources: tuple[Source, ...]  # at most two; empty unless heal
    recover_dst_replica_ranks: tuple[int, ...]  # replica_ranks that heal from this group
    # holders that may be assigned slots, by replica_rank; with slots_per_step some get none
    participants: tuple[str, ...]
    # number of slots in the holders' open assignment; 0: they have none, or different ones, and make a new one
    assigned: int
    same_generation: bool = False  # True: the rank has formed this generation's process group already, and keeps it
    handles: tuple[str, ...] = ()  # address at which the same rank of each member answers probes; "": unknown


class Outcome(Event):
    """A group's decision: the same for all its ranks, which never revise it. A committed step may still be lost with all groups that have
    it, until it is settled (ReportSettled)."""

    kind: Literal["configured", "commit", "healed"]
    quorum_id: int
    attempt: int
    step: int
    verdict: Literal["yes", "retry", "failed"]
    change: bool = False
    reason: str = ""
    divergent: tuple[str, ...] = ()
    healed: bool = False  # True: decided after a yes to the vote "healed"; the ranks load the state at this outcome

    @property
    def key(self) -> VoteKey:
        return (self.quorum_id, self.attempt, self.step, self.kind)


# ------------------------------------------------------------------------------------------------ step of a rank


class Begin(Event):
    """The trainer begins a step. The machine returns Compute, if need be after a quorum or after commits of held steps."""


class Configured(Event):
    """Answers Configure, for the same quorum_id. ok: the process group is formed, and the heal, if the quorum has one, has begun."""

    quorum_id: int
    ok: bool
    reason: str = ""


class Computed(Event):
    """The local gradients are complete. Tokens and loss are summed over the group's ranks."""

    tokens: tuple[float, ...] = ()  # valid tokens of each of Compute.slots
    loss_sum: float = 0.0
    able: bool = True  # False: the loss is NaN or Inf; zeros are reduced in place of the gradients
    kept: bool = True  # False: the gradients can be sent once only; a failed attempt drops its assignment, as without keep_gradients


class Reduced(Event):
    """All all-reduces of the attempt have completed; `tail` is the reduced tail of the last bucket."""

    quorum_id: int
    attempt: int
    step: int
    tail: tuple[float, ...]


class ReduceFailed(Event):
    """A collective of the attempt failed, or InterruptCollectives ended it. May come before Computed, as for an attempt that has to
    fail (`failure` of Manager.reduce)."""

    quorum_id: int
    attempt: int
    step: int
    reason: str


class QuorumFailed(Event):
    """Answers AskQuorum: no quorum was obtained, and the rank exits."""

    reason: str


class Restored(Event):
    """Answers LoadCheckpoint, and follows Rewind. `state`: StepMachine.state_dict() of the checkpoint; None: there is none, the initial
    state counts."""

    state: dict[str, Any] | None


class HealEnded(Event):
    """The fetch that Configure began has ended. ok: it is complete and verified; `state`: StepMachine.state_dict() of the source."""

    quorum_id: int
    ok: bool
    state: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


class Leaving(Event):
    """The trainer leaves with the commit of step `after`; None (SIGTERM): with the first commit whose tail announces it. All ranks of
    the group are fed this at the same step boundary. CommitStep.leave is True for the last step."""

    after: int | None = None


class Skipped(Event):
    """The trainer has not applied the newest commit, and no group has: its slots were not trained on. Fed before the next Begin."""

    slots: tuple[int, ...]


class Rewind(Event):
    """The newest commit was a spike: no group applies it, and the job goes back to a checkpoint. The state is void until Restored, which
    begins the next branch. Fed before the next Begin, in any phase; the driver then drops queued effects, which belong to held steps of
    the old state."""

    reason: str


class AskQuorum(Effect):
    """Send the request to the group server. Feed back the QuorumResult, QuorumFailed or RestoreRequired."""

    call: RankCall


class Configure(Effect):
    """Build the process group between groups for quorum.quorum_id (quorum.same_generation: keep it), offer the state to
    quorum.recover_dst_replica_ranks, begin to fetch it if quorum.heal; then feed back Configured. The state must not change while it is
    captured. Store keys contain epoch, quorum_id and group_rank."""

    quorum: QuorumResult
    attempt: int


class Compute(Effect):
    """Run forward and backward on these slots; feed back Computed. Buckets may be launched when ready, the last with LaunchRemaining."""

    step: int  # steps before this one
    slots: tuple[int, ...]
    attempt: int


class LaunchRemaining(Effect):
    """Append `tail` to the last bucket and launch all buckets that are not launched yet; then feed back Reduced or ReduceFailed."""

    quorum_id: int
    attempt: int
    step: int  # as in Compute
    tail: tuple[float, ...]
    zeros: bool = False  # True: all buckets are filled with zeros
    digest_at: int = 0  # index in the tail at which the driver inserts the digest of this rank's weights; 0: no digest
    copied: bool = False  # True: the digest is marked as a copy's, so that it is no witness (compare.as_sent)


class ReportWeightsDiffer(Effect):
    """Report that the weights of this group_rank after `step` differ between the groups."""

    step: int
    replica_ids: tuple[str, ...]  # groups whose weights are not those of the majority; empty: there is no majority


class InterruptCollectives(Effect):
    """End every wait on this generation (rendezvous, collective): feed back Configured(ok=False) or ReduceFailed. Computation continues."""

    quorum_id: int
    reason: str


class CastVote(Effect):
    """Get the group's decision on the vote, from its server or by an Agreement of its ranks; feed back the Outcome. Without an answer
    repeat it, and exit in the end: never infer a "no"."""

    vote: Vote


class AbandonGeneration(Effect):
    """Let the process group of this generation be destroyed in the background."""

    quorum_id: int


class DropGradients(Effect):
    """Drop the kept gradients: the state or the slots that they were computed for are given up."""


class Fence(Effect):
    """The state is about to change while joiners may read it: copy the part that is not sent yet, wait, or withdraw the offer."""

    step: int


@dataclass(frozen=True)
class Commit:
    """A committed step: the trainer divides the gradients by `divisor` and applies them."""

    divisor: float  # valid tokens over all contributors
    contributors: tuple[int, ...]  # replica ranks
    mean_loss: float  # nats per token, the same in every group
    quorum_size: int
    slots: tuple[tuple[int, str], ...]  # slot and replica ID of each contribution; "solo": without replica groups
    holes: tuple[int, ...]  # slots that were assigned so far and are in no commit yet
    skipped: tuple[tuple[int, int], ...] = ()  # ranges of positions that this step leaves out for good
    rewound: Rewound | None = None  # of the first step of a branch: how it began


class CommitStep(Commit, Effect):
    """Give the trainer this commit. held: the gradients are those that HoldSums kept, not those just reduced."""

    step: int = field(kw_only=True)  # number of the step that this commits
    commit_id: str = field(kw_only=True)
    held: bool = False
    leave: bool = False  # True: this is the group's last step, and the others know that it leaves


class HoldSums(Effect):
    """Keep the gradients just reduced until the state that is being fetched has arrived; they lead to step `step`."""

    step: int


class DropHeld(Effect):
    """Drop the held gradients and the part of the state that has arrived, since the heal is over."""


class LoadState(Effect):
    """Load the fetched state before the commits that follow. All ranks of the group have it."""

    step: int


class LoadCheckpoint(Effect):
    """Load the newest valid checkpoint, drop held steps, feed back Restored."""

    settled: int


class ReportSettled(Effect):
    """Report that step `step` is final: no recovery leads to a different version of it. For observers: a driver has nothing to do."""

    step: int


class RejoinUnderNewId(Effect):
    """This group keeps the others waiting: send Leave(clean=False), and feed the group's machine LighthouseRefused(id, "LOST", reason), so
    that it returns under a new id. Every rank emits this effect; the first one counts."""

    reason: str


class Stop(Effect):
    """The rank stops. `slots`: the slots that caused it; the trainer's error names them. `clean`: as in Leave."""

    reason: str
    slots: tuple[int, ...] = ()
    clean: bool = True
