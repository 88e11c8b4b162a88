"""Events and effects of a rank's step (step.Step)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ft.protocol.messages.group import Part, RankCall, Vote
from ft.protocol.messages.quorum import Effect, Event

# ------------------------------------------------------------------------------------------------ events


class Begin(Event):
    """The trainer asks what to do next. Answered by Compute, or by commits of a healing group's held sums on the way there."""


@dataclass(frozen=True)
class Configured(Event):
    """Answers Configure, for the same quorum_id: the process group stands (and a heal, if asked for, has begun), or not."""

    quorum_id: int
    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Computed(Event):
    """The local gradients are complete. Figures are summed over the group's ranks."""

    tokens: tuple[float, ...] = ()  # valid tokens per slot of Compute.slots
    loss_sum: float = 0.0
    able: bool = True  # False: not a number, out of memory; zeros go out in place of the gradients
    kept: bool = True  # False: they can be sent once; a failed attempt returns its slots, as without keep_gradients


@dataclass(frozen=True)
class Reduced(Event):
    """All sums of the attempt are there; `tail` is the summed vector of the last bucket."""

    quorum_id: int
    attempt: int
    step: int
    tail: tuple[float, ...]


@dataclass(frozen=True)
class ReduceFailed(Event):
    """A collective of the attempt failed, or was given up after InterruptCollectives. May come while the backward still runs."""

    quorum_id: int
    attempt: int
    step: int
    reason: str


@dataclass(frozen=True)
class QuorumFailed(Event):
    """Answers AskQuorum: there is no answer. The rank exits."""

    reason: str


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
    """The trainer means to go: as soon as the others know (SIGTERM), or with the commit of step `after`. To be said at a step's boundary,
    by all ranks of the group at the same one: its tail tells the others, and CommitStep.leave says when to go."""

    after: int | None = None


# ------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True)
class AskQuorum(Effect):
    """Send to the group server. Feed back the Part, QuorumFailed or WantsRestore."""

    call: RankCall


@dataclass(frozen=True)
class Configure(Effect):
    """Build the inter-group process group of part.quorum_id (part.same_generation: keep it), offer the state to
    part.recover_dst_replica_ranks, start to fetch it if part.heal; then feed back Configured. The state may not change while it is
    captured. Store keys have job, epoch, quorum_id, group_rank."""

    part: Part
    attempt: int


@dataclass(frozen=True)
class Compute(Effect):
    """Forward and backward on these slots; then feed back Computed. Buckets may be launched when ready; the last waits for LaunchTail."""

    step: int
    slots: tuple[int, ...]
    attempt: int


@dataclass(frozen=True)
class LaunchTail(Effect):
    """Append `tail` to the last bucket and launch what is not launched yet; then feed back Reduced or ReduceFailed."""

    quorum_id: int
    attempt: int
    step: int
    tail: tuple[float, ...]
    zeros: bool = False  # all buckets as zeros
    retry: bool = False  # the kept gradients, on this attempt's generation (nothing was launched before)
    digest_at: int = 0  # from there on the driver fills in the digest of this rank's weights; 0: the tail has none
    copied: bool = False  # the digest is to say that it is no witness (compare.in_tail)


@dataclass(frozen=True)
class WeightsDiffer(Effect):
    """To be told to people: this rank's weights after `step` are not those of the same rank of other groups."""

    step: int
    replica_ids: tuple[str, ...]  # the odd ones; empty where no majority has the same


@dataclass(frozen=True)
class InterruptCollectives(Effect):
    """Every wait on this generation (rendezvous, collective) is to end now, by Configured(ok=False) or ReduceFailed; compute goes on."""

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
    slots: tuple[tuple[int, str], ...] = ()  # what went in, and of whom: slot and replica_id
    holes: tuple[int, ...] = ()  # slots that have yet to be trained on, all of them
    held: bool = False
    leave: bool = False  # the others know that this group goes now


@dataclass(frozen=True)
class HoldSums(Effect):
    """Keep these sums: they make step `step` of a state that is still arriving."""

    step: int


class DropHeld(Effect):
    """The held sums, and whatever has arrived of the state, belong to a heal that is over."""


@dataclass(frozen=True)
class LoadState(Effect):
    """All ranks have all of it: take the fetched state into use, before the commits that follow."""

    step: int


@dataclass(frozen=True)
class LoadCheckpoint(Effect):
    """Load the newest valid checkpoint, feed back Restored. Nothing held is worth keeping."""

    settled: int


@dataclass(frozen=True)
class Settled(Effect):
    """Step `step` is final: no restart yields another version of it. A checkpoint that records its own history need not wait for it."""

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
