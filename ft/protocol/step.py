"""The state machine of a rank's step, from begin to commit.

    BOUNDARY --Begin--> (quorum due?) ASKING --QuorumResult--> CONFIGURING --Configured--> CONFIRMING --yes--> COMPUTING
        ^   +---------- not due: nothing has changed, no message is sent ---------------------------->   |
        |                                                                                  Reduced, or ReduceFailed
        +-- commit: yes -- VOTING <---------------------------------------------------------------------+
                           VOTING: retry -> COMPUTING, next attempt, same generation, gradients kept or computed again
                           VOTING: failed -> ASKING; after the new generation is formed: kept gradients again
                           (with an open heal first CLOSING_HEAL, for the vote on it); any phase -> STOPPED

The *tail* is the end of the last gradient bucket: token counts, loss and flags, all-reduced with the gradients. A healing replica group
passes through the same phases and contributes zeros. It holds the reduced gradients of each step until its state has arrived; with
heal_backlog steps held it waits (AWAITING_STATE). All ranks of a group make the same transitions, since each depends on an answer of the
group (a QuorumResult, an Outcome) or on the tail. A notice of a loss or an abort ends a wait and decides nothing (except in AWAITING_STATE,
where the generation fails): forward and backward are completed, and if the all-reduces have completed too, the vote is as usual; else it is
"failed".

A commit vote that is not yes: `retry` means that all groups saw in the tail that one of them could not contribute, and they repeat the
attempt on the same generation. With `failed` this group ends its generation and requests a quorum, the lighthouse notifies the others
(GenerationAborted), and all continue in the next quorum; a group that had committed alone is the reference there, and the others heal.

Design choices:
- A group that cannot use its gradients asks for a retry in the tail of the first attempt, and in that of the retry writes UNABLE for each
  of its slots, so every ledger, a newly healed group's, too, counts the failure. It has one gradient sum for all its slots: if one
  slot gives NaN or Inf, all are marked. A slot without a valid token beside usable ones is UNABLE at once, and alone.
- The next step's slots are assigned at a commit; if its tail announced a change, when the quorum that follows is answered. So the holders
  of a state have the same assignment; if not (one has loaded that state from a checkpoint), all drop theirs and make a new one.
- Of the tail only the token counts enter commit_id: they are integers, exact in fp32 up to 2**24 per slot, and beyond that rounded
  equally in all groups. The last bits of the loss depend on its place in the bucket, which differs between the ranks of a group.
- A step whose number is a multiple of digest_interval compares the weights before its update. So the weights of a checkpoint of that step
  were compared one update earlier. One rank of each group sees the difference and reports it as `divergent` in a commit vote that is yes;
  the group's outcome has it for all ranks. The step is committed all the same: the steps before it were reduced with the same wrong
  weights. A group that has healed is no witness before it has been compared, unless it healed at step 0: all groups begin with that state.
- Once all ranks of a group have the healed state, each of them learns of it at a different point of its step. So they load it at the first
  outcome that the group decides afterwards (Outcome.healed), or at once where they wait only for it, as then all do. While a heal is open,
  a rank requests no quorum before that: else one rank might request it as void, another with the state.
- A group that wants to leave while all others heal from it stays until one of them has been assigned slots, or they are gone.
- A group that has no slots because it has just healed contributes zeros and announces a change, to be assigned slots in the next step. A
  spare contributes zeros and announces nothing: it is assigned slots when there are too few other groups in a quorum.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import cycle
from typing import Any, Literal

from ft.protocol import messages as m
from ft.protocol.compare import DIGEST_WORDS, NONE, find_divergent, member_digest
from ft.protocol.messages import (
    STEPS_PER_BRANCH,
    UNABLE,
    VOID,
    Effect,
    Event,
    Member,
    Outcome,
    QuorumResult,
    Rewound,
    State,
    Vote,
    describe_step,
    incarnation_of,
)

MAX_UNABLE = 3  # steps in which a slot may be UNABLE before the job stops or, with skip_unable, skips it for good
MAX_UNABLE_ATTEMPTS = 3  # attempts of a step in which a group could not contribute, before the job stops


@dataclass(frozen=True)
class StepConfig:
    """Settings of a StepMachine, equal in all ranks of a group except for group_rank."""

    group_rank: int = 0
    keep_gradients: bool = True  # True: a failed attempt is repeated with the gradients that were computed for it
    every_step: bool = False  # True: a quorum before each step, as in torchft
    heal_backlog: int = 2  # most steps held while the state arrives
    heal_grace_s: float = 30.0  # longest AWAITING_STATE
    # True: a healing group launches its zeros only once the state has arrived (ft/compat/manager.py)
    zeros_wait: bool = False
    max_retries: int | None = None  # most failed attempts in a row; None: no limit
    skip_unable: bool = False  # True: a slot that was UNABLE too often is skipped; False: the job stops
    init_sync: bool = False  # True: initial states differ between groups, so at step 0 all heal from one
    digest_interval: int = 0  # steps from one comparison of weights to the next; 0: no comparison
    leave_if_divergent: bool = False  # True: a group whose weights are not the majority's leaves; False: it heals
    restores: bool = False  # True: it has no state at first: it heals, or all groups are told to load a checkpoint


class Ledger:
    """Record of the samples that were trained on, each exactly once. Identical in every group, since it changes only at commits, by tails
    that are identical.

    A slot is the batch of one group in one step, named by the position of its first sequence. The slots of a step are assigned once, at the
    commit before it or at a quorum after that commit, to the participants by replica_rank: first the holes (slots that were assigned before
    but are in no commit), then new positions. Only a commit takes slots out of the ledger. So an assignment may be dropped at any time, and
    a saved ledger does not depend on groups and ranks.

    With slots_per_step each step has this many slots, so its data does not depend on the groups that are present. A group may own several
    slots or none, and those of a group that is gone are computed by the others in the same step (`reassign`), so only UNABLE slots become
    holes. Without it a step has one slot for each group that was present at the assignment.

    `skip_ranges`: ranges of positions, first to end, that are never trained on: a slot that contains such a position is never assigned.

    `rewinds`: one for each branch after the first; it has the positions that were trained on between a checkpoint and a spike."""

    def __init__(self, slot_size: int, slots_per_step: int = 0, skip_ranges: Sequence[tuple[int, int]] = ()) -> None:
        self.slot_size, self._skip_ranges = slot_size, skip_ranges  # slot_size: in sequences
        self.slots_per_step = slots_per_step  # 0: one slot for each participant
        self.position = 0  # all sequences before this one are committed or left out for good, except those in holes
        self.holes: list[int] = []  # sorted
        self.unable = Counter[int]()  # hole -> number of steps in which it was UNABLE
        # slots that are never trained on: UNABLE too often, or of a step that no group has applied
        self.skipped_slots: list[int] = []
        self.rewinds: list[Rewound] = []  # as many as the number of the branch
        # ranges of positions that the newest commit left out for good, by skip_ranges
        self.newly_skipped: tuple[tuple[int, int], ...] = ()
        # the open assignment: slot -> replica_id, by replica_rank; the dict is replaced, never changed
        self.assignment: dict[int, str] = {}

    def rewind_before(self, step: int) -> Rewound | None:
        """Returns the newest rewind if `step` is the first one after it."""
        return self.rewinds[-1] if self.rewinds and self.rewinds[-1].step + 1 == step else None

    def slot_count(self, participants: int) -> int:
        return self.slots_per_step or participants

    def assign(self, participants: Sequence[str]) -> dict[int, str]:
        """Returns the assignment of the next step, made round-robin if none is open. An open one is kept; `reassign` adapts it."""
        if not self.assignment:
            count, slots, slot = self.slots_per_step or len(participants), self.holes, self.position
            if self._skip_ranges:
                slots = [hole for hole in slots if not self._skipped_until(hole)]
            slots = slots[:count]
            while len(slots) < count:
                if self._skip_ranges and (end := self._skipped_until(slot)):
                    slot += -((slot - end) // self.slot_size) * self.slot_size
                else:
                    slots.append(slot)
                    slot += self.slot_size
            self.assignment = dict(zip(slots, cycle(participants), strict=False))
        return dict(self.assignment)

    def reassign(self, participants: Sequence[str]) -> None:
        """Assigns the slots of groups that are gone to others, each to the first group with the fewest slots; without slots_per_step they
        become holes at the commit instead. Slots of present groups stay, since they may be computed already."""
        if not self.slots_per_step:
            return
        present = {incarnation_of(replica_id) for replica_id in participants}
        owned = Counter(map(incarnation_of, self.assignment.values()))
        reassigned = dict(self.assignment)
        for slot, owner in self.assignment.items():
            if incarnation_of(owner) not in present:
                reassigned[slot] = new_owner = min(participants, key=lambda i: owned[incarnation_of(i)])
                owned[incarnation_of(new_owner)] += 1
        self.assignment = reassigned

    @property
    def assignment_id(self) -> str:
        """Hash of the open assignment; empty if there is none. With equal ledgers, equal ids mean equal assignments."""
        text = "/".join(f"{slot} {replica_id}" for slot, replica_id in self.assignment.items())
        return hashlib.sha256(text.encode()).hexdigest()[:16] if self.assignment else ""

    def drop(self) -> None:
        """Drops the open assignment: its slots count as never assigned."""
        self.assignment = {}

    def commit(self, tokens: Sequence[float], *, skip_unable: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Commits the open assignment. Returns the slots that contributed, and those that were UNABLE in MAX_UNABLE steps: given up for
        good if `skip_unable`, else a reason to stop. `tokens`: for each assigned slot, in order, its valid tokens; 0: none; or UNABLE."""
        assert len(tokens) == len(self.assignment), f"{len(tokens)} token counts for {len(self.assignment)} slots"
        slots = list(self.assignment)
        committed = tuple([slot for slot, count in zip(slots, tokens, strict=True) if count > 0])
        contributed = set(committed)
        if UNABLE in tokens:
            self.unable.update(slot for slot, count in zip(slots, tokens, strict=True) if count == UNABLE)
        exhausted = {slot for slot, times in self.unable.items() if times >= MAX_UNABLE} - contributed
        exhausted_slots = tuple(slot for slot in slots if slot in exhausted) if exhausted else ()
        gone = contributed | (set(exhausted_slots) if skip_unable else set())
        self.skipped_slots += exhausted_slots if skip_unable else ()
        before, self.position = self.position, max([self.position, *(slot + self.slot_size for slot in slots)])
        holes = sorted({*self.holes, *slots} - gone)
        self.holes = [hole for hole in holes if not self._skipped_until(hole)] if self._skip_ranges else holes
        self.newly_skipped = self._ranges_skipped(before, slots, holes) if self._skip_ranges else ()
        self.unable = Counter({slot: count for slot, count in self.unable.items() if slot not in gone})
        self.assignment = {}
        return committed, exhausted_slots

    def _skipped_until(self, slot: int) -> int:
        """Returns the end of a range of skip_ranges that has a position of the slot; 0: there is none."""
        return next((end for first, end in self._skip_ranges if first < slot + self.slot_size and slot < end), 0)

    def _ranges_skipped(self, first: int, slots: Sequence[int], holes: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Returns the ranges from `first` on that lie between the assigned slots, and the holes that contain a position of skip_ranges."""
        ranges = [(hole, hole + self.slot_size) for hole in holes if self._skipped_until(hole)]
        for slot in sorted(slot for slot in slots if slot >= first):
            if slot > first:
                ranges.append((first, slot))
            first = slot + self.slot_size
        return tuple(ranges)

    def rewind(self, spiked: dict[str, Any], step: int, spiked_step: int, reason: str) -> None:
        """Turns this ledger, which was loaded from the checkpoint of `step`, into that of the next branch. `spiked`: the state_dict of the
        ledger at `spiked_step`, where the job goes back. The position and the holes of `spiked` become those of the new branch; all other
        positions that were assigned between the two steps are never trained on again (`rewinds`)."""
        taken = [(hole, hole + self.slot_size) for hole in self.holes] + [(self.position, int(spiked["position"]))]
        self.position, self.holes = int(spiked["position"]), [int(hole) for hole in spiked["holes"]]
        self.unable = Counter({int(slot): int(count) for slot, count in spiked["unable"]})
        skipped = list[tuple[int, int]]()
        for first, end in taken:  # ascending, as the holes are
            for hole in self.holes:
                if first <= hole < end:
                    skipped.append((first, hole))
                    first = hole + self.slot_size
            skipped.append((first, end))
        ranges = tuple((first, end) for first, end in skipped if first < end)
        self.rewinds = [*_rewinds_in(spiked), Rewound(step, spiked_step, reason, ranges)]
        self.assignment = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns JSON values, the open assignment included, since a group that heals from this state must continue with it."""
        return {
            **({"rewinds": [[*it[:3], [*map(list, it.skipped)]] for it in self.rewinds]} if self.rewinds else {}),
            "slot_size": self.slot_size,
            "position": self.position,
            "holes": list(self.holes),
            "unable": [[slot, count] for slot, count in sorted(self.unable.items())],
            "skipped": list(self.skipped_slots),
            "pending": [[slot, replica_id] for slot, replica_id in self.assignment.items()],
        }

    def load_state_dict(self, state: dict[str, Any], *, keep_assignment: bool = True) -> None:
        """Loads `state`. keep_assignment=False: for a checkpoint. Raises ValueError if slots of the new size do not divide the holes."""
        old, holes = int(state.get("slot_size", self.slot_size)), [int(slot) for slot in state.get("holes", ())]
        if holes and old % self.slot_size:
            divisors = [number for number in range(1, old + 1) if old % number == 0]
            nearest = min(divisors, key=lambda number: (abs(number - self.slot_size), number))
            raise ValueError(
                f"training.global_batch_size: a slot of {self.slot_size} sequences does not divide the {len(holes)} uncommitted slots of "
                f"{old}; nearest: {nearest} sequences per slot (if it is -1: training.local_batch_size times the data-parallel ranks; "
                "with a semi_sync_method times the steps of a round)"
            )
        self.position = int(state["position"])
        self.holes = sorted(slot + part for slot in holes for part in range(0, old, self.slot_size))
        same = old == self.slot_size
        self.unable = Counter({int(slot): int(count) for slot, count in state.get("unable", ())} if same else {})
        self.skipped_slots = [int(slot) for slot in state.get("skipped", ())]
        self.rewinds = _rewinds_in(state)
        open_assignment = state.get("pending", ()) if keep_assignment and same else ()
        self.assignment = {int(slot): str(replica_id) for slot, replica_id in open_assignment}


def _rewinds_in(state: dict[str, Any]) -> list[Rewound]:
    """Returns the rewinds in a Ledger.state_dict."""
    return [
        Rewound(int(step), int(spiked), str(reason), tuple((int(first), int(end)) for first, end in skipped))
        for step, spiked, reason, skipped in state.get("rewinds", ())
    ]


class Phase(Enum):
    """Phases of a rank's step; the values are shown in logs and on the dashboard."""

    BOUNDARY = "between two steps"
    ASKING = "waits for a quorum"
    CONFIGURING = "builds the process group"
    CONFIRMING = "waits for all ranks to build the process group"  # for the outcome of the vote "configured"
    COMPUTING = "computes and reduces gradients"
    VOTING = "waits for the outcome of the commit vote"
    AWAITING_STATE = "waits for the state that it heals with"
    CLOSING_HEAL = "waits for the vote on the heal, after the generation failed"
    STOPPED = "has stopped"


@dataclass(frozen=True)
class Tail:
    """The last elements of the last bucket, all-reduced (summed) over the groups like the gradients before them."""

    tokens: tuple[float, ...]  # valid tokens of each assigned slot; 0: it did not contribute, UNABLE: its group cannot
    loss_sum: float  # nats
    ok: float  # number of groups that need no retry: usable gradients, no slots, or slots already reported UNABLE
    change: float  # number of groups that want a quorum before the next step
    digests: tuple[float, ...] = ()  # digest of each member's weights (compare.py), in the steps that compare them

    @staticmethod
    def of(values: tuple[float, ...], digests: int = 0) -> Tail:
        """Splits the values of a tail, the last `digests` of which are digests."""
        end = len(values) - digests
        loss_sum, ok, change = values[end - 3 : end]
        return Tail(values[: end - 3], loss_sum, ok, change, values[end:])


@dataclass
class LocalContribution:
    """This group's contribution to one step, kept until the step is committed or the gradients are dropped."""

    # slot in the gradients -> its valid tokens; empty until forward and backward have run
    tokens: dict[int, float] = field(default_factory=dict)
    loss_sum: float = 0.0
    able: bool = True  # as Computed.able
    kept: bool = True  # as Computed.kept
    # True: the last attempt was retried. If these gradients are not usable, mark their slots UNABLE
    reported_unable: bool = False

    @property
    def usable(self) -> bool:
        return self.able and any(count > 0 for count in self.tokens.values())


@dataclass
class OpenHeal:
    """A rank's heal, from the quorum that orders it until the state is loaded or the group's outcome is "failed"."""

    attempt_id: tuple[int, int, int]  # as StepMachine.attempt_id, for votes and outcomes on this heal
    reference: State  # state to be fetched
    voted: bool = False
    agreed: bool = False  # True: all ranks of the group have fetched it
    state: dict[str, Any] = field(default_factory=dict)  # the source's StepMachine.state_dict(), once fetched


class StepMachine:
    """Takes the events that `handle` lists. Late or repeated events, of a phase or generation that is over, change nothing."""

    def __init__(self, config: StepConfig, ledger: Ledger) -> None:
        self.config, self.ledger = config, ledger
        self.phase, self.reason = Phase.BOUNDARY, "nothing has happened"
        # of the state that this rank has; step: see messages.STEPS_PER_BRANCH
        self.step, self.commit_id, self.commit_quorum_id = 0, "", 0
        self.settled = 0  # newest step that is final (ReportSettled)
        self.void = config.restores  # True: it has no complete state, and is neither source nor contributor
        self.quorum: QuorumResult | None = None
        self._quorum_due = True  # True: the next step begins with a quorum
        self._generation_failed = False  # False again once a quorum is answered
        self.finished = False  # True: a group has left after the last step was saved
        # why no further attempt is launched on the current generation, so that Seam.needs_new_quorum is True; empty: one may be
        self.abort_reason = ""
        self._wants_change = ""  # reason of a change that the next tail announces; empty: none
        # notices received in ASKING: the quorum that they belong to may come later, since the answer has a stream of its own
        self._early_notices: list[m.Notice] = []
        self._leaving = self._leave_announced = False
        self._leave_at_step: int | None = None  # step at whose commit this group leaves
        self._restored: int | None = None  # step of the checkpoint that was loaded, until the first commit
        # state_dict when the trainer began to go back to a checkpoint, and why, until a state is loaded
        self._pending_rewind: tuple[dict[str, Any], str] | None = None
        self._call_number = 0
        self._collective_step = 0  # step of the group's collectives: `step`, or a later one while steps are held
        self._attempt = 0
        self._unable_attempts = 0  # attempts in a row in which a group could not contribute
        self._failures_in_a_row = 0  # of attempts
        self._tail_slots = 0  # number of slots in the tail of this step
        self._slots: tuple[int, ...] = ()  # this group's slots in this attempt
        self._missing: tuple[int, ...] = ()  # those of them that are not computed yet
        self._digest_count = 0  # number of values in the tail of this step that are digests
        self.contribution = LocalContribution()
        self.heal: OpenHeal | None = None  # not None: the state is being fetched, or is not loaded yet
        self._heal_failed = False  # True: the last heal ended without a state, and the group is still void
        self._held: list[tuple[Tail, bool]] = []  # held steps: the tail, and whether a quorum was due after the step
        self._attempt_failure: str | None = None  # reason why this attempt fails
        self.tail: Tail | None = None  # reduced tail of this attempt
        self._offering = False  # True: other groups heal from this one
        # True: the last step of the generation had no contribution, and its assignment was dropped
        self._assignment_dropped = False
        self._heal_uncommitted = False  # True: this group has begun a heal, and its ranks have committed no step since
        self._copied = False  # True: the state came from another group and has not been compared since
        # True: it has healed in this generation, and does not compute its slots of the open assignment before the next quorum
        self._healed_in_generation = False
        self._awaits_since_s = 0.0
        self._out: list[Effect] = []

    def handle(self, event: Event, now_s: float) -> m.Out:
        self._out, phase = [], self.phase
        match event:
            case _ if phase is Phase.STOPPED:
                return m.Out((), f"{type(event).__name__} is ignored: this rank {phase.value}")
            case Outcome():  # CONFIRMING takes kind "configured", VOTING takes "commit", every phase takes "healed"
                self._on_outcome(event, now_s)
            case m.Begin() if phase is Phase.BOUNDARY:
                self._on_begin(now_s)
            case m.Computed() if phase is Phase.COMPUTING:
                self._on_computed(event)
            case m.Reduced() if phase is Phase.COMPUTING:
                self._on_reduced(event)
            case m.Tick() if phase is Phase.AWAITING_STATE and now_s - self._awaits_since_s >= self.config.heal_grace_s:
                why = f"the state did not arrive within {self.config.heal_grace_s:g} s, and the others wait"
                self._out.append(m.RejoinUnderNewId(why))
                self._fail(why, now_s)
            case m.Tick():
                pass
            case m.Notice():
                self._on_notice(event, now_s)
            case m.HealEnded():
                self._on_heal_ended(event)
            case m.Skipped(slots):
                self.ledger.skipped_slots += slots
                self.reason = "the step is not applied: its slots are skipped"
            case m.Leaving(None):
                self._leaving, self.reason = True, "leaves after the next commit"
            case m.Leaving(step):
                self._leave_at_step = step
            case m.ReduceFailed() if phase is Phase.COMPUTING:
                if self.attempt_id == (event.quorum_id, event.attempt, event.step):
                    self._attempt_failure, self.reason = self._attempt_failure or event.reason, event.reason
                    if not self._missing:
                        self._vote_on_commit()
            case QuorumResult() if phase is Phase.ASKING:
                self._on_quorum(event, now_s)
            case m.Configured() if phase is Phase.CONFIGURING:
                self._on_configured(event)
            case m.QuorumFailed(why) if phase is Phase.ASKING:
                self._stop(f"no quorum: {why}")
            case m.RestoreRequired(settled) if phase is Phase.ASKING:
                self._drop_gradients()
                self._out.append(m.LoadCheckpoint(settled))
                self.reason = m.JOB_BEGINS
                if settled:
                    self.reason = f"step {describe_step(settled)} was settled, and no group has its state any more"
            case m.Restored() if phase in (Phase.BOUNDARY, Phase.ASKING):
                self._on_restored(event)
            case m.Rewind(why):
                self._on_rewind(why)
            case _:
                return m.Out((), f"{type(event).__name__} is ignored: this rank {phase.value}")
        return m.Out(tuple(self._out), self.reason)

    def state_dict(self) -> dict[str, Any]:
        """Returns step, commit_id, commit_quorum_id and ledger as JSON values, for heals and checkpoints. Valid between two steps only."""
        state = {"step": self.step, "commit_id": self.commit_id, "commit_quorum_id": self.commit_quorum_id}
        return {**state, "ledger": self.ledger.state_dict()}

    @property
    def attempt_id(self) -> tuple[int, int, int]:
        """(quorum_id, attempt, step) of the current votes, outcomes and collectives. The step is above `self.step` while steps are held."""
        return self.quorum.quorum_id if self.quorum else VOID, self._attempt, self._collective_step

    def votes_in_background(self, vote: Vote) -> bool:
        """True when the trainer must not wait for the outcome of this vote: while a heal is open it may have to vote on the heal, too."""
        return vote.kind == "healed" or self.heal is not None

    def every_rank_votes(self, vote: Vote) -> bool:
        """True when every rank of the group is certain to cast this vote, so that they may agree in a collective inside the group. It is
        False during a heal: one rank may give up and request a quorum while another has the state and is in the next step."""
        return vote.kind == "commit" and self.heal is None and not self._heal_uncommitted

    # ---- a step begins

    def _on_begin(self, now_s: float) -> None:
        """Enters the next step, or first requests a quorum or waits for a state."""
        is_full = len(self._held) >= self.config.heal_backlog
        if self.heal and self.heal.agreed and (self._quorum_due or is_full):
            self._take_state()
            self._on_begin(now_s)
        elif self.heal and (self._quorum_due or is_full) and self.abort_reason:  # no further notice would end the wait
            self._fail(self.abort_reason, now_s)
        elif self.heal and (self._quorum_due or is_full):
            self.phase, self._awaits_since_s = Phase.AWAITING_STATE, now_s
            self.reason = f"{len(self._held)} steps are held, the state has not arrived"
        elif self._quorum_due:
            self._ask("a quorum is due")
        elif self._heal_failed and is_full:
            self._fail("the heal failed, and no more steps can be held", now_s)
        else:
            self._attempt = 0
            self._start()

    def _ask(self, why: str) -> None:
        self.phase, self.reason = Phase.ASKING, why
        known = self.quorum.quorum_id if self.quorum else 0
        member = Member(
            replica_id="",
            step=VOID if self.void else self.step,
            commit_id=self.commit_id,
            commit_quorum_id=self.commit_quorum_id,
            restored=self._restored,
            assigned=0 if self.void else len(self.ledger.assignment),
            assignment_id="" if self.void else self.ledger.assignment_id,
            init_sync=self.config.init_sync,
        )
        self._call_number += 1
        # The Manager sets checkpoint_metadata, fingerprint and blame, and of the member shrink_only, commit_failures, writes_checkpoint and
        # reconfigure_handles.
        failed, number = self._generation_failed, self._call_number
        call = m.RankCall(self.config.group_rank, member, known=known, failed=failed, number=number)
        self._out.append(m.AskQuorum(call))

    def _on_quorum(self, quorum: QuorumResult, now_s: float) -> None:
        same = quorum.same_generation and self.quorum is not None and quorum.reference[0] == self._collective_step
        self._attempt = self._attempt + 1 if same else 0
        self.quorum, self._collective_step = quorum, quorum.reference[0]
        self._tail_slots = quorum.assigned or self.ledger.slot_count(len(quorum.participants))
        self._quorum_due = self._generation_failed = False
        self.abort_reason, self._wants_change, self._attempt_failure = "", "", None
        self._unable_attempts, self._assignment_dropped, self._healed_in_generation = 0, False, False
        self._heal_uncommitted, self._offering = quorum.heal, bool(quorum.recover_dst_replica_ranks)
        if quorum.heal:  # the others continue from a different state
            self.void = True
            self.heal, self._heal_failed = OpenHeal(self.attempt_id, quorum.reference), False
            self._drop_gradients()
            self._drop_held()
        else:
            # If all holders have the same open assignment, they keep it and reassign only slots of groups that are gone.
            if quorum.assigned:
                self.ledger.reassign(quorum.participants)
            else:
                self.ledger.drop()
                self.ledger.assign(quorum.participants)
            if not self.contribution.tokens.keys() <= set(self.owned_slots()):
                self._drop_gradients()
        self.phase = Phase.CONFIGURING
        self.reason = f"quorum {quorum.quorum_id}, step {describe_step(quorum.reference[0])}"
        self._out.append(m.Configure(quorum, self._attempt))
        early, self._early_notices = self._early_notices, []
        for notice in early:
            self._on_notice(notice, now_s)

    def _on_configured(self, event: m.Configured) -> None:
        if self.quorum is None or event.quorum_id != self.quorum.quorum_id:
            return
        ok = event.ok and not self.abort_reason
        why = "" if ok else event.reason or self.abort_reason
        vote = Vote(self.config.group_rank, "configured", *self.attempt_id, "yes" if ok else "failed", False, why)
        self._out.append(m.CastVote(vote))
        self.phase, self.reason = Phase.CONFIRMING, "the process group is formed" if ok else why

    # ---- forward, backward, reduction

    def _start(self) -> None:
        """Begins an attempt: computes missing slots, or at once launches kept gradients or zeros."""
        assert self.quorum is not None
        self.tail = self._attempt_failure = None
        self.phase = Phase.COMPUTING
        interval = self.config.digest_interval
        compares = interval > 0 and (self._collective_step % STEPS_PER_BRANCH + 1) % interval == 0
        self._digest_count = DIGEST_WORDS * len(self.quorum.members) if compares else 0
        self._slots = slots = self.owned_slots()
        self._missing = tuple([slot for slot in slots if slot not in self.contribution.tokens])
        if self._missing:
            self.contribution.reported_unable = False  # the new slots have not been reported
            self.reason = f"step {self._collective_step % STEPS_PER_BRANCH + 1}: slots {self._missing}"
            if self.abort_reason:  # of a loss between two steps: nobody answers what the trainer launches
                self._out.append(m.InterruptCollectives(self.quorum.quorum_id, self.abort_reason))
            self._out.append(m.Compute(self._collective_step, self._missing, self._attempt))
            return
        sends = "the kept gradients again" if slots else "zeros, since this group is assigned no slot"
        self.reason = f"step {self._collective_step % STEPS_PER_BRANCH + 1}: {sends}"
        if not slots and not self.void and self.quorum.heal:  # not a spare, which announces no change
            self._wants_change = "healed, and has no slots yet"
        self._launch()

    def owned_slots(self) -> tuple[int, ...]:
        """Returns this group's slots, also those assigned to a former id of its process. Constant during an attempt."""
        if self.void or self._healed_in_generation or self.quorum is None:
            return ()
        me = incarnation_of(self.quorum.replica_id)
        return tuple([slot for slot, owner in self.ledger.assignment.items() if incarnation_of(owner) == me])

    def _launch(self) -> None:
        """Launches the all-reduce: of the gradients of `_slots`, if they are usable (finite, with valid tokens); else of zeros."""
        quorum, own, slots = self.quorum, self.contribution, self._slots
        assert quorum is not None
        if self.abort_reason:
            self._attempt_failure = self._attempt_failure or self.abort_reason
            self._vote_on_commit()
            return
        # All others of the quorum heal from this group: its state would be lost with it.
        healing, is_alone = len(quorum.recover_dst_replica_ranks), len(quorum.members) == 1
        is_only_holder = healing == len(quorum.members) - 1 and not is_alone
        is_last = self._collective_step % STEPS_PER_BRANCH + 1 == self._leave_at_step
        self._leave_announced = is_last or (self._leaving and not is_only_holder)
        if usable := own.usable:
            counts = {slot: own.tokens[slot] if own.tokens[slot] > 0 else UNABLE for slot in slots}
        else:
            counts = dict.fromkeys(slots, UNABLE if own.reported_unable else 0.0)
        tokens = {**dict.fromkeys(range(self._tail_slots) if self.void else self.ledger.assignment, 0.0), **counts}
        loss_sum = own.loss_sum if usable else 0.0
        ok = 1.0 if usable or own.reported_unable or not slots else 0.0
        # A group that is alone has no other to tell that it leaves: so `change` of its outcome means that others want to join.
        change = 1.0 if self._wants_change or is_last or (self._leave_announced and not is_alone) else 0.0
        sends_digest = self._digest_count > 0 and not self.void and self.step == self._collective_step
        self._out.append(
            m.LaunchRemaining(
                quorum.quorum_id,
                self._attempt,
                self._collective_step,
                (*map(float, tokens.values()), loss_sum, ok, change, *(0.0,) * self._digest_count),
                not usable,
                digest_at=len(tokens) + 3 + DIGEST_WORDS * quorum.replica_rank if sends_digest else 0,
                copied=self._copied and sends_digest,
            )
        )

    def _on_computed(self, event: m.Computed) -> None:
        if not self._missing:
            return
        own = self.contribution
        # event.tokens may be shorter than Compute.slots: the remaining slots have no valid token
        own.tokens |= {**dict.fromkeys(self._missing, 0.0), **dict(zip(self._missing, event.tokens, strict=False))}
        own.loss_sum += event.loss_sum
        own.able, own.kept = own.able and event.able, own.kept and event.kept
        self._missing = ()
        self.reason = "the gradients are complete"
        if self._attempt_failure is not None:
            self._vote_on_commit()
        else:
            self._launch()

    def _on_reduced(self, event: m.Reduced) -> None:
        if self.attempt_id != (event.quorum_id, event.attempt, event.step) or self._missing:
            return
        tail = Tail.of(event.tail, self._digest_count)
        if math.isfinite(sum(tail.tokens) + tail.ok + tail.change):  # the loss may be NaN or Inf
            self.tail, self._attempt_failure = tail, None
        else:
            self._attempt_failure = "the reduced tail is not finite"
        self._vote_on_commit()

    def _vote_on_commit(self) -> None:
        quorum, tail = self.quorum, self.tail
        assert quorum is not None
        self.phase = Phase.VOTING
        verdict: Literal["yes", "retry", "failed"] = "failed"
        change, divergent = False, tuple[str, ...]()
        if tail is None:
            assert self._attempt_failure is not None
            self.reason = self._attempt_failure
        elif round(tail.ok) < len(quorum.members):
            verdict, change = "retry", tail.change > 0
            self.reason = f"{len(quorum.members) - round(tail.ok)} of {len(quorum.members)} groups cannot contribute: another attempt"
        else:
            self.reason = "all all-reduces have completed"
            divergent = find_divergent(tail.digests, quorum.members) if tail.digests else ()
            verdict, change = "yes", tail.change > 0 or bool(divergent)
            if divergent:
                self._out.append(
                    m.ReportWeightsDiffer(self._collective_step, () if divergent == quorum.members else divergent)
                )
        why = "" if verdict == "yes" else self.reason
        rank = self.config.group_rank
        self._out.append(m.CastVote(Vote(rank, "commit", *self.attempt_id, verdict, change, why, divergent)))

    # ---- the outcome

    def _on_outcome(self, outcome: Outcome, now_s: float) -> None:
        """Handles the group's outcome: on a heal in any phase, on the process group in CONFIRMING, on a commit in VOTING."""
        if outcome.kind == "healed":
            return self._on_healed(outcome, now_s)
        expected = {Phase.CONFIRMING: "configured", Phase.VOTING: "commit"}.get(self.phase)
        if outcome.kind != expected or self.attempt_id != (outcome.quorum_id, outcome.attempt, outcome.step):
            return None
        if outcome.kind == "commit" and outcome.verdict == "yes" and not self.void:
            self._heal_uncommitted = False  # stays True while void: other ranks may not know yet that the heal failed
        if outcome.healed and self.heal:
            self._take_state()
        if outcome.kind == "configured":
            if outcome.verdict == "yes":
                return self._start()
            return self._fail(f"the process group was not formed: {outcome.reason}", now_s)
        quorum, tail = self.quorum, self.tail
        assert quorum is not None
        if outcome.verdict == "failed" or tail is None:
            return self._fail(outcome.reason, now_s)
        if outcome.verdict == "retry":
            return self._try_again()
        if self.config.skip_unable and any(tail.tokens) and max(tail.tokens) <= 0:
            self.contribution.kept = False  # nothing of it is sent again
            return self._fail("no group could contribute", now_s)
        if set(outcome.divergent) == set(quorum.members):
            return self._stop(
                f"after step {describe_step(self._collective_step)} the groups hold different weights, and no majority has the same"
            )
        if self._copied:  # until the tail has a digest of it: then the others have compared the copy
            self._copied = member_digest(tail.digests, quorum.replica_rank) == NONE
        self.phase, self._quorum_due, self._failures_in_a_row = (
            Phase.BOUNDARY,
            outcome.change or self.config.every_step,
            0,
        )
        if outcome.change and len(quorum.members) == 1:
            # Others want to join, and the state would be lost with this group. Decided by the outcome, as some ranks may not know it yet.
            self._leave_announced = False
        if not any(tail.tokens):  # no group that was assigned a slot is left (else there would be counts, or UNABLE)
            self.ledger.drop()
            self._drop_gradients()
            self._assignment_dropped = self._quorum_due = True
            self.reason = f"step {describe_step(self._collective_step + 1)}: no group with an assigned slot is left; a new assignment"
            self._on_begin(now_s)
        elif max(tail.tokens) <= 0:
            self._stop_for_slots("none of its slots could contribute")
        elif self.void:
            self._held.append((tail, self._quorum_due))
            self._collective_step += 1
            self._tail_slots = self.ledger.slot_count(len(quorum.participants))
            self._out.append(m.HoldSums(self._collective_step))
            self._on_begin(now_s)
        else:
            self._commit(tail)
        if quorum.participants and quorum.participants[0] in outcome.divergent:
            # participants[0] writes checkpoints: without a new quorum, which names a different one, the last step might not be saved.
            self.abort_reason = self.abort_reason or "the weights of the group that writes are not those of the others"
        if quorum.replica_id in outcome.divergent and self.phase is Phase.BOUNDARY:  # no group may heal from this state
            self.reason = (
                f"after step {describe_step(self.step - 1)} the weights of this group are not those of the others"
            )
            if self.config.leave_if_divergent:
                self._stop(f"{self.reason}, and fault_tolerance.on_corruption is leave")
            self.void = True

    def _try_again(self) -> None:
        """Repeats the attempt on the same generation; recomputes gradients that cannot be sent twice. An unable group marks its slots."""
        self._attempt, self._unable_attempts, self.tail = self._attempt + 1, self._unable_attempts + 1, None
        if self._unable_attempts >= MAX_UNABLE_ATTEMPTS:
            self._stop_for_slots(f"a group could not contribute, in {self._unable_attempts} attempts in a row")
            return
        self.phase, self.contribution.reported_unable = Phase.COMPUTING, True
        self.reason = f"attempt {self._attempt} on the same generation"
        own = self.contribution
        if own.usable and not (own.kept and self.config.keep_gradients):  # these gradients cannot be sent again
            self._drop_gradients()
            self._start()
        else:
            self._launch()

    def _commit(self, tail: Tail, *, held: bool = False) -> None:
        """Commits the step. Only here does a step enter the state and the ledger."""
        quorum = self.quorum
        assert quorum is not None
        if self._offering and not held:
            self._out.append(m.Fence(self.step))
            self._offering = False
        owners = self.ledger.assignment
        contributed, exhausted_slots = self.ledger.commit(tail.tokens, skip_unable=self.config.skip_unable)
        if self.step > self.settled:  # final: this generation made that state or chose it, and commits the next step
            self.settled = self.step
            self._out.append(m.ReportSettled(self.step))
        self.step += 1
        contributions = ",".join([str(round(count)) for count in tail.tokens])  # equal ids: the same history
        text = f"{self.commit_id}/{self.step}/{quorum.quorum_id}/{contributions}"
        self.commit_id = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.commit_quorum_id, self._restored = quorum.quorum_id, None
        self._collective_step = max(self._collective_step, self.step)
        contributors = tuple([owners[slot] for slot in contributed])
        divisor = sum(count for count in tail.tokens if count > 0)
        self._out.append(
            m.CommitStep(
                step=self.step,
                commit_id=self.commit_id,
                divisor=divisor,
                contributors=_ranks_of(contributors, quorum.members),
                mean_loss=tail.loss_sum / divisor,
                quorum_size=len(quorum.members),
                slots=tuple(zip(contributed, contributors, strict=True)),
                holes=tuple(self.ledger.holes),
                skipped=self.ledger.newly_skipped,
                rewound=self.ledger.rewind_before(self.step % STEPS_PER_BRANCH) if self.ledger.rewinds else None,
                held=held,
                leave=self.step % STEPS_PER_BRANCH == self._leave_at_step or (self._leave_announced and not held),
            )
        )
        self.contribution = LocalContribution()
        self._unable_attempts = 0
        self.reason = f"step {self.step % STEPS_PER_BRANCH} is committed"
        if not self._quorum_due:
            self._tail_slots = len(self.ledger.assign(quorum.participants))
        if exhausted_slots and not self.config.skip_unable:
            self._stop(f"slots {exhausted_slots} could not be trained on in {MAX_UNABLE} steps", exhausted_slots)

    def _fail(self, why: str, now_s: float) -> None:
        """Ends the generation as failed. Computed gradients are kept for the next one if they can be reduced again."""
        self._generation_failed, self._quorum_due = True, True
        self._failures_in_a_row += 1
        if self.quorum:
            self._out.append(m.AbandonGeneration(self.quorum.quorum_id))
        self._drop_slots_unless_kept()
        allowed = self.config.max_retries
        if allowed is not None and self._failures_in_a_row > allowed:
            failed = f"{self._failures_in_a_row} attempts in a row failed"
            self._stop(f"{failed}, fault_tolerance.max_retries allows {allowed}: {why}")
        elif self.heal and not self.heal.agreed:
            self._vote_on_heal("failed", why)
            self.phase, self.reason = Phase.CLOSING_HEAL, why
        else:
            if self.heal:
                self._take_state()
            self._ask_after_failure(why)

    def _drop_slots_unless_kept(self) -> None:
        """Drops the assignment of a failed attempt, with its gradients, if these cannot be reduced again."""
        if not (self.config.keep_gradients and self.contribution.kept):
            self.ledger.drop()
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        if self.contribution.tokens:
            self._out.append(m.DropGradients())
        self.contribution = LocalContribution()

    # ---- healing

    def _on_heal_ended(self, event: m.HealEnded) -> None:
        heal = self.heal
        if heal is None or event.quorum_id != heal.attempt_id[0] or heal.voted:
            return
        heal.state = event.state if isinstance(event.state, dict) else {}  # checked: another process sent it
        found = (heal.state.get("step"), heal.state.get("commit_quorum_id"), heal.state.get("commit_id"))
        if event.ok and found == heal.reference:
            self._vote_on_heal("yes", "")
        else:
            self._vote_on_heal("failed", event.reason or f"the state is {found}")

    def _vote_on_heal(self, verdict: Literal["yes", "failed"], reason: str) -> None:
        if (heal := self.heal) and not heal.voted:
            heal.voted = True
            rank = self.config.group_rank
            self._out.append(m.CastVote(Vote(rank, "healed", *heal.attempt_id, verdict, False, reason)))

    def _on_healed(self, outcome: Outcome, now_s: float) -> None:
        """Takes the outcome of a heal. The state is loaded where all ranks of the group are at the same point: now if they wait only for
        it, else at the first outcome that the group decides after this one. If each rank loaded it at this event, one might launch a step
        while another applies held steps, in collectives that need both."""
        heal = self.heal
        if heal is None or heal.attempt_id != (outcome.quorum_id, outcome.attempt, outcome.step):
            return
        heal.agreed = outcome.verdict == "yes"
        if not heal.agreed:
            self.heal, self._heal_failed = None, True
            self._wants_change, self.reason = "the heal failed", outcome.reason
        elif self.config.zeros_wait or self.phase in (Phase.AWAITING_STATE, Phase.CLOSING_HEAL):
            self._take_state()
        if self.phase is Phase.AWAITING_STATE:
            self.phase = Phase.BOUNDARY
            self._on_begin(now_s)
        elif self.phase is Phase.CLOSING_HEAL:
            self._ask_after_failure(self.reason)

    def _ask_after_failure(self, why: str) -> None:
        """Requests a quorum after the generation has failed and the heal is over."""
        self._drop_held()
        self._drop_slots_unless_kept()  # a loaded state may have brought an assignment
        self._ask(why)

    def _take_state(self) -> None:
        """Loads the quorum's state, then commits the held steps in order. From here on this group is a holder."""
        assert self.quorum is not None
        assert self.heal is not None
        heal, self.heal = self.heal, None
        self._load(heal.state, keep_assignment=True)
        self._pending_rewind = None
        self._copied = self.step > 0
        self.settled = min(self.settled, self.step)  # later steps that this group had settled are of another history
        self.void, self._healed_in_generation, self._wants_change = False, True, "healed, and has no slots yet"
        self._out.append(m.LoadState(self.step))
        held, self._held, due = self._held, [], self._quorum_due
        for tail, self._quorum_due in held:
            self._commit(tail, held=True)
        self._quorum_due = due
        if self._assignment_dropped:
            self.ledger.drop()
        self.reason = f"healed, {len(held)} held steps applied: step {describe_step(self.step)}"

    def _load(self, state: dict[str, Any], *, keep_assignment: bool) -> None:
        self.step, self.commit_id = int(state["step"]), str(state["commit_id"])
        self.commit_quorum_id = int(state["commit_quorum_id"])
        self.ledger.load_state_dict(state["ledger"], keep_assignment=keep_assignment)

    def _drop_held(self) -> None:
        if self._held or (self.void and self.quorum is not None):
            self._out.append(m.DropHeld())
        self._held = []

    # ---- checkpoints

    def _on_restored(self, event: m.Restored) -> None:
        self._drop_held()
        self.heal, self._heal_failed = None, False
        initial = {"step": 0, "commit_id": "", "commit_quorum_id": 0, "ledger": {"position": 0}}
        self._load(event.state or initial, keep_assignment=False)
        self.void, self._restored, self._copied = False, self.step, False
        self.reason = f"restored from checkpoint {describe_step(self.step)}"
        if self._pending_rewind:
            self._begin_branch(*self._pending_rewind)
        else:
            self.settled = self.step
        if self.phase is Phase.ASKING:
            self._ask(self.reason)

    # ---- back to a checkpoint

    def _on_rewind(self, why: str) -> None:
        """Gives up the state and the generation. The other groups do so at the same commit; one that holds the step and waits for the
        next one's reduction is interrupted, as the request of the next quorum reports that the generation has failed."""
        self._pending_rewind = self.state_dict(), why
        if self.quorum:
            self._out.append(m.AbandonGeneration(self.quorum.quorum_id))
        self._drop_gradients()
        self._drop_held()
        self.heal, self._heal_failed = None, False
        self.phase, self.void, self._generation_failed, self._quorum_due = Phase.BOUNDARY, True, True, True
        self.reason = f"goes back to a checkpoint: {why}"

    def _begin_branch(self, spiked: dict[str, Any], why: str) -> None:
        """Makes the restored state the first one of the next branch. Groups that have loaded the same checkpoint get the same commit id;
        of different ones the furthest is the reference, and the others heal. The state is settled by the quorum that continues from it:
        until then the group that has made the last step alone may be lost, and the others repeat that step."""
        self._pending_rewind, branch, step = None, spiked["step"] // STEPS_PER_BRANCH + 1, self.step % STEPS_PER_BRANCH
        self.ledger.rewind(spiked["ledger"], step, spiked["step"] % STEPS_PER_BRANCH, why)
        self.step = branch * STEPS_PER_BRANCH + step
        text = f"{spiked['commit_id']}/{self.step}/{self.commit_id}"
        self.commit_id = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.commit_quorum_id, self._restored = 0, None
        self.reason = f"back at step {describe_step(self.step)}: {why}"

    # ---- notices, and the end

    def _on_notice(self, notice: m.Notice, now_s: float) -> None:
        """Handles a notice. MemberLost and GenerationAborted interrupt the current generation; if its all-reduces complete all the same,
        the vote is as usual. In ASKING notices are kept, since each is sent once and may belong to the quorum that is about to come."""
        if isinstance(notice, m.Finished):
            self.finished, self.reason = True, f"{notice.replica_id} has saved the last step"
        elif self.phase is Phase.ASKING:
            self._early_notices = [*(n for n in self._early_notices if n.quorum_id == notice.quorum_id), notice]
        elif self.quorum is None or notice.quorum_id != self.quorum.quorum_id:
            return
        elif isinstance(notice, m.ChangeAnnounced):
            self._wants_change = self.reason = notice.reason or "announced"
        elif self._generation_failed or self.abort_reason:
            return  # its waits have ended, or are interrupted
        elif isinstance(notice, m.MemberLost | m.GenerationAborted):
            self.abort_reason = self.reason = f"{type(notice).__name__}: {notice.reason}"
            if self.phase in (Phase.CONFIGURING, Phase.COMPUTING):
                self._out.append(m.InterruptCollectives(notice.quorum_id, self.abort_reason))
            elif self.phase is Phase.AWAITING_STATE:
                self._fail(self.abort_reason, now_s)

    def _stop_for_slots(self, why: str) -> None:
        self._stop(f"step {describe_step(self._collective_step + 1)}: {why}", tuple(self.ledger.assignment))

    def _stop(self, why: str, slots: tuple[int, ...] = ()) -> None:
        self.phase, self.reason = Phase.STOPPED, why
        clean = not self._generation_failed  # then no other group waits for this one
        self._out.append(m.Stop(why, slots, clean=clean))


@lru_cache(64)  # called at each commit, mostly with the same arguments
def _ranks_of(owners: tuple[str, ...], members: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the replica ranks of the members of these incarnations."""
    incarnations = set(map(incarnation_of, owners))
    return tuple(rank for rank, replica_id in enumerate(members) if incarnation_of(replica_id) in incarnations)
