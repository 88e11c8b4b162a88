"""The record of a quorum since it was issued, and the notices that its members get. lighthouse.py has the record of the newest quorum.

Design choices:
- Only the first loss of a generation is announced, since it ends the generation: 500 losses at once are not 250,000 notices.
- A stalled member is found by the waits of the others, not by its own reports: the server of a trainer that hangs still sends heartbeats.
  Where most members wait, the limit is a few step times; where few do, it is longer, as the others may all wait for the same slow storage.
- A clean Leave announces a change, and does not stop a collective that has the leaving group's data already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from dataclasses import replace
from itertools import islice

from ft.protocol import messages as m
from ft.protocol.messages import Call, Quorum, Timeouts
from ft.protocol.roster import Roster

STALL_STEPS = 5.0  # limit of a wait for a member, in median step times
STALL_FLOOR_S = 10.0  # smallest such limit
EXCUSED_S = 10.0  # a heal that ends before this, by the loss of another member, does not count as failed


class QuorumRecord:
    """Record of one quorum, whose members are `roster.previous`. `notify` sends a notice to members."""

    def __init__(
        self, quorum: Quorum, roster: Roster, timeouts: Timeouts, notify: Callable[[tuple[str, ...], m.Notice], None]
    ) -> None:
        self.quorum = quorum
        self.failed = False  # True: a member has reported that the generation failed
        self.lost: list[str] = []
        self._roster, self._times, self._notify = roster, timeouts, notify
        self._renewed = False  # True: it was issued again under the same id
        self._lost_why = ""
        self._change = ""  # reason of the announced change; empty: none is announced
        self._finished = ""  # member that has left because the run is over and its last step saved
        self._change_at_s = self._announced_s = 0.0  # times of the first and the last announcement of that change
        self._reports: dict[str, m.Report] = {}  # newest report of each member
        self._waiting: dict[str, float] = {}  # member whose ranks all wait in an all-reduce -> since when; oldest first
        self._waited: dict[str, float] = {}  # incarnation that was lost while it waited -> start of its wait
        self._phase_since_s: dict[str, float] = {}  # member that has reported -> start of its current phase
        # start of a deadlock: some members request a quorum or have left, all others wait for them in the collective
        self._deadlock_since_s: float | None = None

    def renew(self, quorum: Quorum) -> None:
        """Continues under the same id with the same members, all of which have requested a quorum."""
        self.quorum, self._renewed, self._change = quorum, True, ""
        self._waiting.clear()
        self._waited.clear()

    def repeats(self, event: Call, *, retried: bool) -> bool:
        """True when a member repeats a request because the answer was lost, and no member was lost, has left, or has reported a failure."""
        if event.member.replica_id not in self._roster.previous:
            return False
        knows_this = event.known >= self.quorum.quorum_id  # else a failure that it reports is an older quorum's
        if knows_this and (event.failed or not (retried and self._renewed)):
            return False
        return not self.failed and not self.lost and not self._roster.left_cleanly

    def keep_wait(self, replica_id: str) -> None:
        """Keeps the start of the wait of a member that is about to be lost, for its return under a new id."""
        peer, incarnation = self._roster.peers[replica_id], m.incarnation_of(replica_id)
        called_at_s = peer.called_at_s if peer.call else math.inf
        since_s = min(called_at_s, self._waiting.get(replica_id, math.inf), self._waited.get(incarnation, math.inf))
        if since_s < math.inf and self._roster.was_in(replica_id):
            self._waited[incarnation] = since_s

    def lose(self, members: list[str], why: str) -> None:
        first = bool(members) and not self.lost
        self.lost += members
        if first:
            self._lost_why = why
            self._notify(self._alive(), m.MemberLost(self.quorum.quorum_id, tuple(members), why))

    def fail(self, why: str, *except_ids: str) -> None:
        self.failed = True
        self._notify(self._alive(except_ids), m.GenerationAborted(self.quorum.quorum_id, why))

    def finish(self, replica_id: str) -> None:
        """Announces that a member has left because the run is over and its last step is saved."""
        self._finished = replica_id
        self._notify(self._alive(), m.Finished(self.quorum.quorum_id, replica_id))

    def announce(self, why: str, now_s: float) -> None:
        """Announces a change to members without a waiting request; again every two heartbeats, since a member whose request is on its way
        ignores the notice."""
        if not self._change or now_s - self._announced_s >= 2 * self._times.beat_s:
            self._change_at_s = self._change_at_s if self._change else now_s
            self._change, self._announced_s = self._change or why, now_s
            self._notify(self._alive(self._roster.candidates), m.ChangeAnnounced(self.quorum.quorum_id, self._change))

    def excuse_heals(self, now_s: float) -> None:
        """Excuses heals that ended by the loss of another member in less than EXCUSED_S: they do not count as failed."""
        if self.lost:
            for name, heal in self._roster.heals.items():
                ours = heal.quorum_id == self.quorum.quorum_id and name != m.name_of(self.lost[0])
                if ours and now_s - heal.since_s < EXCUSED_S:
                    heal.quorum_id = 0

    def leave_behind(self, old: Quorum | None) -> None:
        """Notifies members of the old quorum that are not in this one, as they may be in a collective of the old one; all members, if the
        old epoch has given way to a reported one."""
        if old:
            same, quorum_id = old.epoch == self.quorum.epoch, self.quorum.quorum_id
            out = tuple(i for i in old.ids if not (same and i in self._roster.previous) and i in self._roster.peers)
            why = f"quorum {quorum_id} was formed without this group"
            if not same:
                why = f"the running job of epoch {self.quorum.epoch}, which a member has reported, continues with quorum {quorum_id}"
            self._notify(out, m.GenerationAborted(old.quorum_id, why))

    def bring_up_to_date(self, replica_id: str, known: Quorum | None) -> None:
        """Sends down a new stream all notices that its group may have missed. `known`: the newest quorum that it knows."""
        quorum, me = self.quorum, (replica_id,)
        if replica_id not in self._roster.previous:
            if known:
                why = f"quorum {quorum.quorum_id} continues without this group"
                if known.epoch not in ("", quorum.epoch):
                    why = f"this lighthouse has no state of epoch {known.epoch}: its quorum {quorum.quorum_id} is of epoch {quorum.epoch}"
                self._notify(me, m.GenerationAborted(known.quorum_id, why))
            return
        if self.lost:
            self._notify(me, m.MemberLost(quorum.quorum_id, tuple(self.lost), self._lost_why))
        if self.failed:
            self._notify(me, m.GenerationAborted(quorum.quorum_id, "the generation failed"))
        if self._finished:
            self._notify(me, m.Finished(quorum.quorum_id, self._finished))
        if self._change:
            self._notify(me, m.ChangeAnnounced(quorum.quorum_id, self._change))

    def _alive(self, except_ids: Container[str] = ()) -> tuple[str, ...]:
        return tuple(i for i in self.quorum.ids if i in self._roster.peers and i not in except_ids)

    def on_report(self, report: m.Report, now_s: float) -> None:
        if report.quorum_id not in (0, self.quorum.quorum_id):
            # it has not reported from this quorum yet, and may hang
            report = replace(report, waiting=False, launched=0)
        replica_id, before = report.replica_id, self._reports.get(report.replica_id)
        self._reports[replica_id] = report
        advanced = before is None or (before.launched, before.step) != (report.launched, report.step)
        if not report.waiting or advanced:
            self._waiting.pop(replica_id, None)
        if report.waiting:
            self._waiting.setdefault(replica_id, now_s)
        if advanced or before is None or before.phase_limit_s != report.phase_limit_s:
            self._phase_since_s[replica_id] = now_s

    def find_stalled(self, now_s: float) -> tuple[list[str], str]:
        """Returns members that keep others waiting for too long, and the reason: they count as lost in spite of their heartbeats."""
        present, peers, previous = self._roster.present, self._roster.peers, self._roster.previous
        # once the generation is over, its members request a quorum: one that still waits in its all-reduce hangs
        waiting = {} if self.failed or self.lost else self._waiting
        # the first of each collection is its oldest, which is enough for the early return: islice(..., 1)
        asking_since_s = [peers[i].called_at_s for i in islice(present, 1)]
        if self._change:  # a newcomer's wait counts from the announcement: members then request a quorum within a step
            asking_since_s += [max(peers[i].called_at_s, self._change_at_s) for i in islice(self._roster.candidates, 1)]
        returned_since_s = {
            i: self._waited[incarnation]
            for i in self._roster.candidates
            if (incarnation := m.incarnation_of(i)) in self._waited
        }
        since_s = [*asking_since_s, *(waiting[i] for i in islice(waiting, 1)), *returned_since_s.values()]
        if not since_s or now_s - min(since_s) < min(STALL_FLOOR_S, self._times.stall_s, self._times.heal_grace_s):
            return [], ""
        # a member that waits in an older attempt is itself late: members in the newest attempt wait for it
        newest_attempt = max((report.launched for report in self._reports.values()), default=0)
        waits = {i: at_s for i, at_s in waiting.items() if i in peers and self._reports[i].launched == newest_attempt}
        waits |= {i: peers[i].called_at_s for i in present} | returned_since_s
        members_here = [i for i in sorted({*previous, *returned_since_s} - self._roster.left_cleanly) if i in peers]
        waits_too = waits.keys() | self._roster.sitting.keys()  # a group that sits out has requested a quorum
        # a long phase excuses a member, but only up to its limit: if the trainer hangs, its server repeats the last report
        takes_long = {i for i, x in self._reports.items() if now_s - self._phase_since_s[i] < x.phase_limit_s}
        late = [i for i in members_here if i not in waits_too and i not in takes_long]
        wait_starts_s = sorted(waits.values()) or [math.inf]
        majority_start_s = wait_starts_s[len(members_here) // 2] if 2 * len(waits) > len(members_here) else math.inf
        first_start_s, found = min([*asking_since_s, wait_starts_s[0]]), dict[str, float]()
        for i in late:
            # if a waiting member was lost and has returned, only the time since member i last advanced counts
            advanced_s = self._phase_since_s.get(i, -math.inf) if returned_since_s else -math.inf
            waited_s = [now_s - max(at_s, advanced_s) for at_s in (first_start_s, wait_starts_s[0], majority_start_s)]
            if limit_s := self._limit_s(i, *waited_s):
                found.setdefault(i, limit_s)
        if not found:
            return [], ""
        replica_id, limit_s = next(iter(found.items()))
        heals = ", and its state has not arrived (heal_grace_s)" if self._heals(replica_id) else ""
        return list(found), f"others waited {limit_s:g} s for it{heals}"

    def _heals(self, replica_id: str) -> bool:
        """True for a member that is healing, also at step 0 with init_sync, where it has requested the quorum with the reference state."""
        report = self._reports.get(replica_id)
        is_behind = any(x.replica_id == replica_id and x.state != self.quorum.reference for x in self.quorum.members)
        return is_behind or (report is not None and report.step == m.VOID)

    def _limit_s(
        self, replica_id: str, longest_s: float, longest_of_members_s: float, majority_s: float
    ) -> float | None:
        """Returns the limit that a wait for this member has reached, if any. Arguments: for how long any group, any member, and more than
        half of the members have waited."""
        if self._heals(replica_id):
            return self._times.heal_grace_s if longest_of_members_s >= self._times.heal_grace_s else None
        steps_s = STALL_STEPS * max((report.median_step_s for report in self._reports.values()), default=0.0)
        floor_s, stall_s = max(STALL_FLOOR_S, steps_s), max(self._times.stall_s, steps_s)
        report = self._reports.get(replica_id)
        # the short limit requires that it has made a step: how long its first one takes is not known
        if report and report.median_step_s > 0 and majority_s >= floor_s:
            return floor_s
        return stall_s if longest_s >= stall_s else None

    def end_deadlock(self, now_s: float) -> None:
        """Fails the generation if some members request a quorum or have left while all others wait for them in the collective."""
        previous = self._roster.previous
        asking = self._roster.present.keys() | (previous & self._roster.sitting.keys())
        away = asking | self._roster.left_cleanly
        if self.failed or len(away) in (0, len(previous)) or not previous - away <= self._waiting.keys():
            self._deadlock_since_s = None
            return
        self._deadlock_since_s = self._deadlock_since_s or now_s
        if now_s - self._deadlock_since_s >= 2 * self._times.beat_s:
            verb = "requests a quorum" if asking else "has left"
            self.fail(f"{min(asking or away)} {verb}, and all others wait for it", *asking)

    def extend_deadlines(self, gap_s: float, now_s: float) -> None:
        """Moves the start of all waits by `gap_s`, for which this lighthouse was stopped."""
        self._change_at_s = min(self._change_at_s + gap_s, now_s)
        if self._deadlock_since_s is not None:
            self._deadlock_since_s = min(self._deadlock_since_s + gap_s, now_s)
        for since in (self._waiting, self._waited, self._phase_since_s):
            since.update({i: min(since_s + gap_s, now_s) for i, since_s in since.items()})
