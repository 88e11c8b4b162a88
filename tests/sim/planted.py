"""Bugs that are injected into the real state machines: the simulator must detect each of them.

Docstrings name bugs of torchft ("torchft's") or of an earlier version. Bugs with a class of faults existed until the simulator had that
class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from ft.protocol import messages as m
from ft.protocol.group import GroupMachine
from ft.protocol.lighthouse import LighthouseMachine
from ft.protocol.messages import Member
from ft.protocol.roster import Roster
from ft.protocol.step import Ledger, Phase, StepMachine
from tests.simulator.cluster import Machines
from tests.simulator.faults import REWINDS


class IdsRestart(LighthouseMachine):
    """torchft's fault: after a restart quorum ids begin at 1, whatever ids the state file and the members hold."""

    _newest = 0

    @property
    def _last_id(self) -> int:
        return self._newest

    @_last_id.setter
    def _last_id(self, value: int) -> None:
        if value <= self._newest + 1:
            self._newest = value


class EmptyShrink(LighthouseMachine):
    """torchft's: any group may request a shrink, and requests are counted before it, so that it may leave no group."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        out, roster = super().handle(event, now_s), self.roster
        asked = any(member.shrink_only for member in roster.candidates.values())
        enough = len(roster.candidates) >= max(self.config.min_replicas, roster.healthy_count() // 2 + 1)
        if asked and enough and roster.previous and not roster.present:
            empty = m.Answer((), m.Quorum(self._last_id + 1, (), epoch=self._epoch))
            return replace(out, effects=(*out.effects, empty))
        return out


class GhostCaller(LighthouseMachine):
    """torchft's fault: a group whose request was dropped stays a candidate until the next quorum."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        if isinstance(event, m.StreamClosed | m.CallCancelled):
            peer = self.roster.peers.get(event.replica_id)
            if peer is not None and peer.call is not None:
                return m.Out()
        return super().handle(event, now_s)


class Forgetful(LighthouseMachine):
    """The lighthouse knows the last quorum id after a restart, but not its members: a single new group takes the job over."""

    def __init__(self, *args: Any, saved: m.PersistentState | None = None, recover: bool = False, **more: Any) -> None:
        super().__init__(*args, saved=replace(saved, quorum=None, settled=0) if saved else None, **more)

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        if isinstance(event, m.StreamOpened):
            event = replace(event, quorum=None, settled=0)
        return super().handle(event, now_s)


class StaleVote(GroupMachine):
    """A vote of an earlier attempt, from a duplicated or late call, counts for the current one."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        if isinstance(event, m.Vote) and (self._stale(event) or event.key in self._outcomes):
            open_keys = [key for key in self._votes if key[3] == event.kind]
            if open_keys:
                quorum_id, attempt, step, _ = open_keys[-1]
                event = replace(event, quorum_id=quorum_id, step=step, attempt=attempt)
        return super().handle(event, now_s)


class NoCommitIds(GroupMachine):
    """Groups at the same step are considered equal, whichever commit of that step they have."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        out = super().handle(event, now_s)
        return replace(out, effects=tuple(map(self._spoil, out.effects)))

    def _spoil(self, effect: m.Effect) -> m.Effect:
        part = effect.answer if isinstance(effect, m.AnswerRank) else None
        if not isinstance(part, m.QuorumResult) or not part.heal or self.quorum is None:
            return effect
        is_current = self.quorum.members[part.replica_rank].step == part.reference[0]
        return replace(effect, answer=replace(part, heal=False, sources=())) if is_current else effect


class JoinerContributes(StepMachine):
    """A joiner contributes at once, before it has the state."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        asks = self.phase is Phase.ASKING
        out = super().handle(event, now_s)
        if isinstance(event, m.QuorumResult) and event.heal and asks:
            self.void = False
            self.ledger.assign(event.members)
        return out


class DividesByMembers(StepMachine):
    """torchft's: the sum is divided by the number of groups, although some of them contributed zeros."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        out = super().handle(event, now_s)
        return replace(out, effects=tuple(map(self._spoil, out.effects)))

    def _spoil(self, effect: m.Effect) -> m.Effect:
        if isinstance(effect, m.CommitStep):
            return replace(effect, divisor=effect.divisor / len(effect.contributors) * effect.quorum_size)
        return effect


class ChangeIsPrivate(StepMachine):
    """Each rank acts on the membership change that it has seen itself, not on the decision of its group."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        if isinstance(event, m.Outcome) and event.kind == "commit":
            event = replace(event, change=bool(self._wants_change))
        return super().handle(event, now_s)


class DeadSlotsAreHoles(Ledger):
    """A dead group's slots are left to a later step even with slots_per_step: the data of a step depends on the live groups."""

    def reassign(self, participants: Sequence[str]) -> None:
        pass


class TakesStateWhenTold(StepMachine):
    """An earlier version's: a rank applies the state when it hears that all ranks have it, and waits for each commit in its trainer's
    thread; so one rank may apply kept steps while a second one waits for its vote, or is in the next all-reduce."""

    def votes_in_background(self, vote: m.Vote) -> bool:
        return vote.kind == "healed"

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        out = super().handle(event, now_s)
        if isinstance(event, m.Outcome) and event.kind == "healed" and self.heal and self.heal.agreed:
            self._out = []
            self._take_state()
            return replace(out, effects=(*out.effects, *self._out))
        return out


class NobodyStalls(LighthouseMachine):
    """The others wait for a group that hangs while its server sends heartbeats."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        if self._record is not None:
            self._record.find_stalled = lambda now_s: ([], "")  # type: ignore[method-assign]
        return super().handle(event, now_s)


class ForgetsTheLayout(LighthouseMachine):
    """The settings that all groups must share are those of the first request after each start."""

    def _choose_fingerprint(self, event: m.Call, now_s: float) -> None:
        self._fingerprint = event.fingerprint


class RefusalsEndMembers(GroupMachine):
    """Every refused group ends, also a member that a restarted lighthouse does not know."""

    def _refused(self, code: Literal["ALREADY_EXISTS", "INVALID_ARGUMENT"], reason: str) -> None:
        self._fail_waiting(code, reason)


class CommitsWithoutALease(GroupMachine):
    """A group commits although the lighthouse has not answered for long, and others may have taken over."""

    def _lighthouse_is_silent(self, now_s: float) -> bool:
        return False


def with_roster(**rules: Callable[..., Any]) -> Machines:
    """Returns machines with a lighthouse whose roster has different rules: functions of the roster and of the arguments of its own rule."""

    class Changed(LighthouseMachine):
        def __init__(self, *args: Any, **more: Any) -> None:
            super().__init__(*args, **more)
            for name, rule in rules.items():
                assert hasattr(self.roster, name), name
                setattr(self.roster, name, partial(rule, self.roster))

    return Machines(lighthouse=Changed)


def healthy_without_a_majority(roster: Roster) -> int:
    """Returns a healthy_count without rule 5: less than half of the healthy groups may continue."""
    return min(Roster.healthy_count(roster), max(1, 2 * len(roster.candidates) - 1))


def end_claim_of_namesake(roster: Roster, member: Member) -> None:
    """A name's successor ends the claim of the previous member, although that one may only be unreachable for the lighthouse."""
    claim = roster.claims.get(member.name)
    if claim and (claim.replica_id != member.replica_id or member.void):
        del roster.claims[member.name]


class NoBranch(StepMachine):
    """A group that has gone back to a checkpoint has a lower step, as if it were behind the others."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        out = super().handle(event, now_s)
        if isinstance(event, m.Restored):
            self.step %= m.STEPS_PER_BRANCH
        return out


class DataOnceMore(Ledger):
    """The data after a checkpoint to which the job has gone back is trained on again."""

    def rewind(self, spiked: dict[str, Any], step: int, spiked_step: int, reason: str) -> None:
        position = self.position
        super().rewind(spiked, step, spiked_step, reason)
        self.position = position


class SpikesAreForgotten(Ledger):
    """A healing group loads the ledger without the slots of steps that no group has applied."""

    def load_state_dict(self, state: dict[str, Any], *, keep_assignment: bool = True) -> None:
        super().load_state_dict(state | {"skipped": []}, keep_assignment=keep_assignment)


@dataclass(frozen=True)
class Bug:
    machines: Machines
    seed: int  # one that finds it
    found: str  # what the simulator says then
    fault_class: str = ""  # of tests.simulator.faults.CLASSES
    groups: int | None = None  # None: as the seed has it
    steps: int = 200


BUGS = {
    "no majority rule": Bug(with_roster(healthy_count=healthy_without_a_majority), 0, "less than half"),
    "ids that restart": Bug(Machines(lighthouse=IdsRestart), 19, "has two member sets"),
    "ghost caller": Bug(Machines(lighthouse=GhostCaller), 31, "who do not listen"),
    "joiner contributes before healing": Bug(Machines(step=JoinerContributes), 0, "is void and adds"),
    "divide by N": Bug(Machines(step=DividesByMembers), 0, "is divided by"),
    "change flag not OR-ed": Bug(Machines(step=ChangeIsPrivate), 46, "nothing ends these waits", groups=4, steps=30),
    "lone newcomer after a lighthouse restart": Bug(Machines(lighthouse=Forgetful), 19, "settled step"),
    # ranks of which some heal vote one by one
    "stale vote accepted": Bug(
        Machines(group=StaleVote), 1469, "decides yes on", "half of them gone, every minute", 3, 100
    ),
    "empty shrink quorum": Bug(Machines(lighthouse=EmptyShrink), 82, "of (): below min_replicas"),
    "a dead group's slots are holes": Bug(Machines(ledger=DeadSlotsAreHoles), 4, "has slots ["),
    "state taken when the word on it comes": Bug(Machines(step=TakesStateWhenTold), 21, "nothing ends these waits"),
    "equal-step fork without commit ids": Bug(Machines(group=NoCommitIds), 39, "without healing; it goes on from"),
    "nobody rests": Bug(with_roster(on_heal=lambda *_: None), 8, "5 in a row have failed", "a heal fails each time", 2),
    "nobody stalls": Bug(Machines(lighthouse=NobodyStalls), 3, "no commit for", "a trainer hangs", 3),
    "names stay taken": Bug(
        with_roster(find_absent=lambda *_: []), 0, "refused its name", "a trainer cannot be killed", 6
    ),
    "successors end claims": Bug(
        with_roster(update_claim=end_claim_of_namesake), 1, "is committed again", "members cut off, and replaced", 2
    ),
    "a layout that is forgotten": Bug(
        Machines(lighthouse=ForgetsTheLayout), 1, "is of another layout", "another layout after a restart", 2
    ),
    "nobody sits out": Bug(
        with_roster(pairs=lambda *_: frozenset()), 15, "no commit for", "a pair is parted in a sum", 5
    ),
    "nobody probes": Bug(Machines(probes=False), 11, "no commit for", "a pair is parted in a sum", 3),
    "refusals end members": Bug(
        Machines(group=RefusalsEndMembers), 5, "nothing was done to its group", "lighthouse with another token", 2
    ),
    "commits without a lease": Bug(
        Machines(group=CommitsWithoutALease), 1, "is committed again", "members cut off, and replaced", 2
    ),
    "a watchdog that hears nothing": Bug(
        Machines(watchdog_stands=False), 5, "no step in 100 s", "fewer than min_replicas", 2
    ),
    "skipped slots that a heal forgets": Bug(
        Machines(ledger=SpikesAreForgotten), 2, "count as trained on", groups=3, steps=40
    ),
    "a way back without a branch": Bug(Machines(step=NoBranch), 3, "goes back from", REWINDS, 3, 40),
    "data after a way back": Bug(Machines(ledger=DataOnceMore), 3, "is trained on in step", REWINDS, 3, 40),
    "a vote that is held is a try": Bug(
        Machines(held_is_no_try=False), 7, "no outcome of the vote", "lighthouse away", 2
    ),
}
