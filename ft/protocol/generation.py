"""What has happened to a quorum since it was issued, and what its members are told of it. lighthouse.py holds the newest one.

Where the rules leave a choice:
- Only the first loss of a generation is told; after it the generation is over anyhow. So 500 losses at once are not 250,000 notices.
- A clean Leave announces a change; it does not stop a collective that the leaver has already fed.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from ft.protocol import messages as m
from ft.protocol.messages import Call, Member, Quorum, Times
from ft.protocol.roster import Roster


class Generation:
    """Its members are the roster's previous ones. `notify` is told who is to hear what."""

    def __init__(
        self, quorum: Quorum, roster: Roster, times: Times, notify: Callable[[tuple[str, ...], m.Notice], None]
    ) -> None:
        self.quorum = quorum
        self.failed = False  # a member said so
        self.lost: list[str] = []
        self._roster, self._times, self._notify = roster, times, notify
        self._members = {member.replica_id: member for member in quorum.members}  # as they called
        self._again = False  # it was issued again under its id
        self._lost_why = ""
        self._change = ""  # announced, and why
        self._announced_s = 0.0  # the last time
        self._waiting: set[str] = set()  # members whose ranks are all in the collective
        self._alone_since_s: float | None = None  # all but one of them wait
        self._crossed_since_s: float | None = None  # some ask for a quorum, and all others wait in the collective
        self._median_step_s = 0.0

    def renew(self, quorum: Quorum) -> None:
        """The same members have called, and go on under the same id."""
        self.quorum, self._again, self._change = quorum, True, ""
        self._members = {member.replica_id: member for member in quorum.members}
        self._waiting.clear()
        self._alone_since_s = None

    # ---- its members' calls

    def repeats(self, event: Call, *, retried: bool) -> bool:
        """A member asks that has not heard of the quorum it is in, and nothing has happened to it since: the answer got lost. Where the
        quorum was issued again under its id, it is the same question that shows it."""
        if event.member.replica_id not in self._roster.previous:
            return False
        here = event.known >= self.quorum.quorum_id  # else what it says has failed was an older one
        if here and (event.failed or not (retried and self._again)):
            return False
        return not self.failed and not self.lost and not self._roster.gone

    def holds(self, member: Member) -> bool:
        """Whether it is in it with the state that it calls with now."""
        return member.state == self._members[member.replica_id].state

    # ---- what its members are told

    def lose(self, members: list[str], why: str) -> None:
        first = bool(members) and not self.lost
        self.lost += members
        if first:
            self._lost_why = why
            self._notify(self._alive(), m.MemberLost(self.quorum.quorum_id, tuple(members), why))

    def fail(self, why: str, *except_ids: str) -> None:
        self.failed = True
        self._notify(self._alive(except_ids), m.Abandoned(self.quorum.quorum_id, why))

    def announce(self, why: str, now_s: float) -> None:
        """Those who have called know already. Said again as long as somebody waits, for whoever was asking just then took no notice."""
        if not self._change or now_s - self._announced_s >= 2 * self._times.beat_s:
            self._change, self._announced_s = self._change or why, now_s
            there = self._alive(self._roster.candidates)
            self._notify(there, m.ChangeAnnounced(self.quorum.quorum_id, self._change))

    def leave_behind(self, old: Quorum | None) -> None:
        """Who was in the old quorum and is not in this one may be waiting on it, and nobody else would tell."""
        if old:
            out = tuple(i for i in old.ids if i not in self._roster.previous and i in self._roster.peers)
            why = f"quorum {self.quorum.quorum_id} was formed without this group"
            self._notify(out, m.Abandoned(old.quorum_id, why))

    def bring_up_to_date(self, replica_id: str, known: int) -> None:
        """A stream starts with all that its group may have missed. `known`: the newest quorum that it knows of, 0: none."""
        quorum, me = self.quorum, (replica_id,)
        if replica_id not in self._roster.previous:
            if known:
                self._notify(me, m.Abandoned(known, f"quorum {quorum.quorum_id} goes on without this group"))
            return
        if self.lost:
            self._notify(me, m.MemberLost(quorum.quorum_id, tuple(self.lost), self._lost_why))
        if self.failed:
            self._notify(me, m.Abandoned(quorum.quorum_id, "the generation failed"))
        if self._change:
            self._notify(me, m.ChangeAnnounced(quorum.quorum_id, self._change))

    def _alive(self, except_ids: Container[str] = ()) -> tuple[str, ...]:
        return tuple(i for i in self.quorum.ids if i in self._roster.peers and i not in except_ids)

    # ---- waits that would not end

    def hear(self, report: m.Report, now_s: float) -> None:
        """Of a member."""
        self._median_step_s = report.median_step_s or self._median_step_s
        (self._waiting.add if report.waiting else self._waiting.discard)(report.replica_id)
        alone = len(self._waiting) == len(self._roster.previous) - 1 > 0
        self._alone_since_s = (self._alone_since_s or now_s) if alone else None

    def held_up(self, now_s: float) -> tuple[str, str] | None:
        """A group that alone keeps all others waiting in the collective, and for how long: it is as good as dead, though its server beats.
        None: there is none."""
        if self._alone_since_s is None:
            return None
        [last] = self._roster.previous - self._waiting or {""}
        healing = any(x.replica_id == last and x.state != self.quorum.reference for x in self.quorum.members)
        limit_s = self._times.heal_grace_s if healing else max(self._times.stall_s, 5 * self._median_step_s)
        if now_s - self._alone_since_s < limit_s or last in self._roster.candidates:
            return None
        self._alone_since_s = None
        return last, f"all others waited {limit_s:g} s for it"

    def end_crossed_waits(self, now_s: float) -> None:
        """Members that ask for a quorum, or have left, and members that wait for them in the collective: no wait would end by itself."""
        asking, previous = self._roster.present.keys(), self._roster.previous
        away = asking | self._roster.gone
        crossed = bool(away) and not self.failed and len(away) != len(previous) and previous - away <= self._waiting
        if not crossed:
            self._crossed_since_s = None
            return
        self._crossed_since_s = self._crossed_since_s or now_s
        if now_s - self._crossed_since_s >= 2 * self._times.beat_s:
            verb = "asks for a quorum" if asking else "has left"
            self.fail(f"{min(asking or away)} {verb}, and all others wait for it", *asking)

    def forgive(self, gap_s: float, now_s: float) -> None:
        """Waits are counted without the gap."""
        if self._alone_since_s is not None:
            self._alone_since_s = min(self._alone_since_s + gap_s, now_s)
