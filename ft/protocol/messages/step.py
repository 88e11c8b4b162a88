"""Events and effects of a rank's step (step.Step)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ft.protocol.messages.group import Part, RankCall, Vote
from ft.protocol.messages.quorum import Effect, Event

# ------------------------------------------------------------------------------------------------ events


class Begin(Event):
    """The trainer begins a step. Answered by Compute, or by commits of a healing group's held sums before it."""


@dataclass(frozen=True)
class Configured(Event):
    """Answers Configure, for the same quorum_id: the process group is formed (and a heal, if asked for, has begun), or not."""

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
    """All sums of the attempt have arrived; `tail` is the summed vector of the last bucket."""

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
    """Answers AskQuorum without a quorum. The rank exits."""

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
    """The trainer leaves: as soon as the others know (SIGTERM), or with the commit of step `after`. Fed at the same step boundary by all
    ranks of the group: its tail tells the others, and CommitStep.leave is True for its last step."""

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
    digest_at: int = 0  # from there on the driver fills in the digest of this rank's weights; 0: the tail has none
    copied: bool = False  # the digest is to say that it is no witness (compare.in_tail)


@dataclass(frozen=True)
class WeightsDiffer(Effect):
    """Report that this rank's weights after `step` are not those of the same rank of other groups."""

    step: int
    replica_ids: tuple[str, ...]  # the odd ones; empty where no majority has the same


@dataclass(frozen=True)
class InterruptCollectives(Effect):
    """End every wait on this generation (rendezvous, collective) now, by Configured(ok=False) or ReduceFailed; computation goes on."""

    quorum_id: int
    reason: str


@dataclass(frozen=True)
class CastVote(Effect):
    """Send to the group server, feed back the Outcome. Without an answer ask again, in the end exit: never infer a no."""

    vote: Vote


@dataclass(frozen=True)
class AbandonGeneration(Effect):
    """Hand the process group to the reaper, without a wait."""

    quorum_id: int


class DropGradients(Effect):
    """Drop the kept gradients: their state is gone."""


@dataclass(frozen=True)
class Fence(Effect):
    """The state is about to change while others may read it: copy the unsent rest, wait, or withdraw the offer."""

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
    slots: tuple[tuple[int, str], ...] = ()  # that contributed: slot and replica_id
    holes: tuple[int, ...] = ()  # all slots that were dealt and have yet to be trained on
    held: bool = False
    leave: bool = False  # the others know that this group leaves now


@dataclass(frozen=True)
class HoldSums(Effect):
    """Keep these sums, of step `step` of a state that is still arriving."""

    step: int


class DropHeld(Effect):
    """Drop the held sums, and the part of the state that has arrived: their heal is over."""


@dataclass(frozen=True)
class LoadState(Effect):
    """Load the fetched state, which all ranks have, before the commits that follow."""

    step: int


@dataclass(frozen=True)
class LoadCheckpoint(Effect):
    """Load the newest valid checkpoint, drop held sums, feed back Restored."""

    settled: int


@dataclass(frozen=True)
class Settled(Effect):
    """Step `step` is final: no restart yields another version of it."""

    step: int


@dataclass(frozen=True)
class GiveUp(Effect):
    """This group keeps the others waiting: send Leave(clean=False), and feed the group machine LighthouseRefused(id, "LOST", reason), so
    that it returns under a new id. Every rank emits it; the first counts."""

    reason: str


@dataclass(frozen=True)
class Stop(Effect):
    """The job cannot go on. `slots`: those that are to blame, of which the driver names the documents."""

    reason: str
    slots: tuple[int, ...] = ()
