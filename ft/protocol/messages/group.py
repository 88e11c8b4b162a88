"""Events and effects of a group server (group.Group), and the messages that its ranks get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ft.protocol.messages.lighthouse import Call
from ft.protocol.messages.quorum import Effect, Event, Member, Notice, Quorum, Refusal, Shape, State, Terms, Times

# ------------------------------------------------------------------------------------------------ events


@dataclass(frozen=True)
class RankCall(Event):
    """A rank asks for a quorum, for its group; the lighthouse is called when all ranks have asked."""

    group_rank: int
    member: Member  # the group as this rank sees it; id and addresses are filled in by the group's server
    checkpoint_metadata: str = ""  # where this rank's state is served
    known: int = 0
    failed: bool = False
    blame: tuple[str, ...] = ()
    shape: Shape = ()
    number: int = 0  # as Call.number, of this rank's questions


@dataclass(frozen=True)
class RankCancelled(Event):
    """A rank's waiting call ended. It may ask again, and gets the answer that the others got meanwhile."""

    group_rank: int


@dataclass(frozen=True)
class RankStream(Event):
    """A rank's Watch stream to its group server opened or broke. Broken: the process is gone, and the group with it."""

    group_rank: int
    open: bool


@dataclass(frozen=True)
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
    def key(self) -> Ballot:
        return (self.quorum_id, self.attempt, self.step, self.kind)


Ballot = tuple[int, int, int, str]  # (quorum_id, attempt, step, kind)


@dataclass(frozen=True)
class LighthouseAnswered(Event):
    """The Quorum RPC was answered, or a quorum came down the stream."""

    quorum: Quorum
    times: Times | None = None
    terms: Terms | None = None


@dataclass(frozen=True)
class LighthouseFailed(Event):
    """The Quorum RPC failed (connection, deadline)."""

    reason: str


@dataclass(frozen=True)
class LighthouseRefused(Event):
    """The lighthouse refused this id, on a call or on the stream."""

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
class LighthouseSays(Event):
    """The reason for which the group's call waits."""

    reason: str


@dataclass(frozen=True)
class SumsAwaited(Event):
    """All ranks are in the collective with other groups or past it, and some in it; or this is over."""

    awaited: bool


class WantsToLeave(Event):
    """A rank was asked to leave (SIGTERM): a wait of the group ends. Else the trainers leave at the end of a step."""


# ------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True)
class CallLighthouse(Effect):
    """Send this after `delay_s`, unless a newer CallLighthouse or EndGroup comes first. Feed back the answer: Lighthouse..."""

    call: Call
    delay_s: float = 0.0


@dataclass(frozen=True)
class OpenStream(Effect):
    """Close the stream to the lighthouse, if any, and open one under this id. Reopen it by yourself when it breaks."""

    replica_id: str


class CloseStream(Effect):
    """Close the stream to the lighthouse, and open none before OpenStream: until then this group's name is free."""


@dataclass(frozen=True)
class AnswerRank(Effect):
    """Answer the waiting call of one rank."""

    group_rank: int
    answer: Part | WantsRestore | Released


@dataclass(frozen=True)
class FailRank(Effect):
    """Fail the waiting call (or vote) of one rank."""

    group_rank: int
    code: Literal["INVALID_ARGUMENT", "ALREADY_EXISTS", "NOT_FOUND", "UNAVAILABLE", "FAILED_PRECONDITION", "STALE"]
    reason: str


@dataclass(frozen=True)
class Waits(Effect):
    """Send this to all ranks: the reason of the group's wait, and its length. Once a beat, as long as no rank of the group is late."""

    reason: str
    waited_s: float


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
class EndGroup(Effect):
    """Send Leave(clean=False), close, SIGKILL the trainer processes: torchelastic starts the group again."""

    reason: str


# ------------------------------------------------------------------------------------------------ from group to ranks


@dataclass(frozen=True)
class WantsRestore(Event):
    """Answers AskQuorum in place of a Part: load the newest valid checkpoint first, and ask again."""

    settled: int


class Released(Event):
    """Answers AskQuorum in place of a Part: the group was asked to leave while it waited, and all its ranks end with the state in hand. For
    the driver."""


@dataclass(frozen=True)
class Source:
    """A group to heal from: its rank of the same group_rank holds the shards."""

    replica_rank: int
    address: str


@dataclass(frozen=True)
class Part(Event):
    """One rank's part in a quorum (plan.py). An event for step.Step: the answer to AskQuorum."""

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
    participants: tuple[str, ...]  # members that are dealt slots, by replica_rank
    dealt: int  # slots of the open deal of all reference members; 0: they make a new one, as they have none, or different ones
    same_generation: bool = False  # the rank has formed it already: keep the process group
    handles: tuple[str, ...] = ()  # addresses at which this rank's peer in each member answers the prober; "": unknown


@dataclass(frozen=True)
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
    def key(self) -> Ballot:
        return (self.quorum_id, self.attempt, self.step, self.kind)
