"""Bugs, planted in the real machines: each must be found by the simulator, or its green seeds say little.

Where a peer or an earlier draft had the bug, it says so. `search` looks for the first seed that finds one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ft.protocol import messages as m
from ft.protocol.group import Group
from ft.protocol.lighthouse import Lighthouse
from ft.protocol.rules import QuorumView
from ft.protocol.step import Ledger, Step
from tests.simulator import runs
from tests.simulator.cluster import Machines


class NoMajority(Lighthouse):
    """Rule 5 is gone: less than half of the healthy groups may go on."""

    def view(self, now_s: float) -> QuorumView:
        view = super().view(now_s)
        return replace(view, healthy=min(view.healthy, max(1, 2 * len(view.candidates) - 1)))


class IdsRestart(Lighthouse):
    """The peer's: after a restart quorum ids begin at 1, whatever the state file and the members say."""

    _newest = 0

    @property
    def _last_id(self) -> int:
        return self._newest

    @_last_id.setter
    def _last_id(self, value: int) -> None:
        if value <= self._newest + 1:
            self._newest = value


class EmptyShrink(Lighthouse):
    """The peer's: anybody may ask for a shrink, and the callers are counted before it, so that it may leave nobody."""

    def _evaluate(self, now_s: float) -> None:
        view = self.view(now_s)
        asked = any(member.shrink_only for member in view.candidates.values())
        enough = len(view.candidates) >= max(view.min_replicas, view.healthy // 2 + 1)
        if asked and enough and view.previous and not view.present:
            self._emit(m.Answer((), m.Quorum(self._last_id + 1, (), epoch=self._epoch)))
        super()._evaluate(now_s)


class GhostCaller(Lighthouse):
    """The peer's: a caller that is gone stays a candidate until the next quorum."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        if isinstance(event, m.StreamClosed | m.CallCancelled):
            peer = self.roster.peers.get(event.replica_id)
            if peer is not None and peer.call is not None:
                return m.Out()
        return super().handle(event, now_s)


class Forgetful(Lighthouse):
    """After a restart it knows the last id, but not who was in: a lone newcomer takes the job over."""

    def __init__(self, *args: Any, saved: m.Saved | None = None, fresh: bool = False, **more: Any) -> None:
        super().__init__(*args, saved=replace(saved, quorum=None, settled=0) if saved else None, fresh=True, **more)

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        if isinstance(event, m.StreamOpened):
            event = replace(event, quorum=None, settled=0)
        return super().handle(event, now_s)


class StaleVote(Group):
    """A vote of an earlier attempt counts for the current one: what a doubled or late call says, a rank has not said."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        if isinstance(event, m.Vote) and (self._stale(event) or event.key in self._outcomes):
            open_ballots = [key for key in self._votes if key[3] == event.kind]
            if open_ballots:
                quorum_id, attempt, step, _ = open_ballots[-1]
                event = replace(event, quorum_id=quorum_id, step=step, attempt=attempt)
        return super().handle(event, now_s)


class NoCommitIds(Group):
    """Two groups at one step are taken to be equal, whichever version of that step they hold."""

    def _answer(self, rank: int) -> None:
        before = len(self._out)
        super()._answer(rank)
        for place, effect in enumerate(self._out[before:], before):
            if not isinstance(effect, m.AnswerRank) or not isinstance(effect.answer, m.Part):
                continue
            assert self.quorum is not None
            part = effect.answer
            me = self.quorum.members[part.replica_rank]
            if part.heal and me.step == part.reference[0]:
                self._out[place] = replace(effect, answer=replace(part, heal=False, sources=()))


class JoinerContributes(Step):
    """A group that is behind trains at once, and fetches the state meanwhile."""

    def _become_void(self, part: m.Part) -> None:
        super()._become_void(part)
        self.void = False
        self.ledger.deal(part.members)


class DividesByMembers(Step):
    """The peer's: the sum is divided by the number of groups, though some of them gave zeros."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        out = super().handle(event, now_s)
        return replace(out, effects=tuple(self._spoil(effect) for effect in out.effects))

    def _spoil(self, effect: m.Effect) -> m.Effect:
        if isinstance(effect, m.CommitStep):
            return replace(effect, divisor=effect.divisor / len(effect.contributors) * effect.quorum_size)
        return effect


class ChangeIsPrivate(Step):
    """Each rank goes by the change that it has seen itself, not by what its group has decided."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        if isinstance(event, m.Outcome) and event.kind == "commit":
            event = replace(event, change=bool(self._wants_change))
        return super().handle(event, now_s)


class DeadSlotsAreHoles(Ledger):
    """With slots_per_step, too, a dead group's slots wait for another step: the data of a step depends on who was alive."""

    def redeal(self, participants: Sequence[str]) -> None:
        pass


class TakesStateWhenTold(Step):
    """An earlier draft's: a rank takes the state as soon as it hears that all ranks have it, and waits for the word on each commit in its
    trainer's thread; so one may be in the step that applies what was held, while another waits for its vote, or in the next sum."""

    def votes_in_background(self, vote: m.Vote) -> bool:
        return vote.kind == "healed"

    def _on_healed(self, outcome: m.Outcome, now_s: float) -> None:
        super()._on_healed(outcome, now_s)
        if self._heal and self._heal.agreed:
            self._take_state()


@dataclass(frozen=True)
class Bug:
    machines: Machines
    seed: int  # one that finds it
    found: str  # what the simulator says then
    groups: int | None = None  # None: as the seed has it
    steps: int = 200
    fault_class: str = ""  # of tests.simulator.faults.CLASSES


def search(
    machines: Machines, seeds: range, fault_class: str = "", tell: Callable[[str], None] = print
) -> runs.Run | None:
    """The first of `seeds` that finds the bug."""
    for seed in seeds:
        run = runs.run(seed, fault_class=fault_class, machines=machines)
        if run.failure:
            tell(f"seed {seed}: {run.failure}")
            return run
    return None


BUGS = {
    "no majority rule": Bug(Machines(lighthouse=NoMajority), 0, "less than half"),
    "ids that restart": Bug(Machines(lighthouse=IdsRestart), 19, "has two member sets"),
    "ghost caller": Bug(Machines(lighthouse=GhostCaller), 31, "who do not listen"),
    "joiner contributes before healing": Bug(Machines(step=JoinerContributes), 0, "is void and adds"),
    "divide by N": Bug(Machines(step=DividesByMembers), 0, "is divided by"),
    "change flag not OR-ed": Bug(Machines(step=ChangeIsPrivate), 46, "nothing ends these waits", groups=4, steps=30),
    "lone newcomer after a lighthouse restart": Bug(Machines(lighthouse=Forgetful), 19, "settled step"),
    "stale vote accepted": Bug(  # ranks of which some heal vote one by one
        Machines(group=StaleVote), 1469, "decides yes on", 3, 100, "half of them gone, every minute"
    ),
    "empty shrink quorum": Bug(Machines(lighthouse=EmptyShrink), 82, "of (): below min_replicas"),
    "a dead group's slots are holes": Bug(Machines(ledger=DeadSlotsAreHoles), 4, "has slots ["),
    "state taken when the word on it comes": Bug(Machines(step=TakesStateWhenTold), 21, "nothing ends these waits"),
    "equal-step fork without commit ids": Bug(Machines(group=NoCommitIds), 16, "without healing; it goes on from"),
}
