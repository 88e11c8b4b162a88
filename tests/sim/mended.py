"""Bugs that were in the rules, or around them, until the simulator knew the faults that show them: each is planted again here, and must be
found by a recorded seed of its class of faults. tests/sim/planted.py has those of before."""

from __future__ import annotations

from typing import Any, Literal

from ft.protocol import messages as m
from ft.protocol.group import Group
from ft.protocol.lighthouse import Lighthouse
from ft.protocol.messages import Member
from tests.sim.planted import Bug
from tests.simulator.cluster import Machines


class NobodyStalls(Lighthouse):
    """Whoever hangs, while its server beats, is waited for."""

    def handle(self, event: m.Event, now_s: float) -> m.Out:
        if self._record is not None:
            self._record.stalled = lambda now_s: ([], "")  # type: ignore[method-assign]
        return super().handle(event, now_s)


class NamesStayTaken(Lighthouse):
    """Whoever hangs while the others go on without it keeps its name."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.roster.stalled = lambda now_s, limit_s: []  # type: ignore[method-assign]


class SuccessorsEndClaims(Lighthouse):
    """A name's successor ends the claim of the member before it, though that one may only be out of the lighthouse's sight."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        roster = self.roster

        def settle_claim(member: Member) -> None:
            claim = roster.claims.get(member.name)
            if claim and (claim.replica_id != member.replica_id or member.void):
                del roster.claims[member.name]

        roster.settle_claim = settle_claim  # type: ignore[method-assign]


class ForgetsTheLayout(Lighthouse):
    """What all must have alike is that of the first caller after each start."""

    def _settle_shape(self, event: m.Call, now_s: float) -> None:
        self._shape = event.shape


class NobodySitsOut(Lighthouse):
    """Groups that cannot reach each other are put into the next quorum together."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.roster.pairs = lambda ids: frozenset()  # type: ignore[method-assign]


class RefusalsEndMembers(Group):
    """Whoever is refused ends, also a member that a restarted lighthouse does not know any more."""

    def _refused(self, code: Literal["ALREADY_EXISTS", "INVALID_ARGUMENT"], reason: str) -> None:
        self._fail_waiting(code, reason)


class CommitsWithoutALease(Group):
    """A group that the lighthouse has not answered for long commits all the same: others may have been allowed to take over."""

    def _cut_off(self, now_s: float) -> bool:
        return False


class NobodyRests(Lighthouse):
    """Whose heals fail comes in again at once, each time."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.roster.hear_of_heal = lambda member, now_s: None  # type: ignore[method-assign]


BUGS = {
    "nobody rests": Bug(
        Machines(lighthouse=NobodyRests), 8, "of whose heals 5 in a row have failed", 2, 200, "a heal fails each time"
    ),
    "nobody stalls": Bug(Machines(lighthouse=NobodyStalls), 3, "no commit for", 3, 200, "a trainer hangs"),
    "names stay taken": Bug(
        Machines(lighthouse=NamesStayTaken), 0, "refused its name", 6, 200, "a trainer cannot be killed"
    ),
    "successors end claims": Bug(
        Machines(lighthouse=SuccessorsEndClaims), 1, "is committed again", 2, 200, "members cut off, and replaced"
    ),
    "a layout that is forgotten": Bug(
        Machines(lighthouse=ForgetsTheLayout), 1, "is of another layout", 2, 200, "another layout after a restart"
    ),
    "nobody sits out": Bug(
        Machines(lighthouse=NobodySitsOut), 15, "no commit for", 5, 200, "a pair is parted in a sum"
    ),
    "nobody probes": Bug(Machines(probes=False), 11, "no commit for", 3, 200, "a pair is parted in a sum"),
    "refusals end members": Bug(
        Machines(group=RefusalsEndMembers), 5, "nothing was done to its group", 2, 200, "lighthouse with another token"
    ),
    "commits without a lease": Bug(
        Machines(group=CommitsWithoutALease), 1, "is committed again", 2, 200, "members cut off, and replaced"
    ),
    "a watchdog that hears nothing": Bug(
        Machines(watchdog_stands=False), 5, "no step in 100 s", 2, 200, "fewer than min_replicas"
    ),
    "a vote that is held is a try": Bug(
        Machines(held_is_no_try=False), 7, "no outcome of the vote", 2, 200, "lighthouse away"
    ),
}
