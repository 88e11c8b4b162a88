"""The lighthouse's state machine: forms quorums, and answers or refuses quorum requests. rpc/lighthouse_service.py and the simulator drive
it. roster.py has the live ids of replica groups; rules.py decides whether they form a quorum; quorum_record.py has the history of the
newest quorum and sends its notices.

Design choice: without its state file a lighthouse does not know a job that runs. Usually the members' streams reopen, and they report their
quorum before any group requests one: it is adopted, and the other members are awaited. A group whose request comes before any report begins
the job anew, unless --recover is given. If members then report a quorum of a different epoch, the running job continues as after --recover,
as long as no step of the new one is settled (`_gives_way_to`). Once one is, members of the running job are notified that their quorum is
over; those whose state is further are refused, so that they keep it, until the new job is as far, has ended or may be taken over
(`_refuse_epoch`); the others heal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from ft.protocol import messages as m
from ft.protocol.messages import Call, Effect, Event, Fingerprint, Kind, Out, PersistentState, Quorum, Timeouts
from ft.protocol.quorum_record import QuorumRecord
from ft.protocol.roster import Roster, pairs_with, takeover_order_s
from ft.protocol.rules import (
    Decision,
    Refusal,
    choose_excluded,
    decide,
    describe_pairs,
    fingerprint_mismatches,
    fingerprint_problem,
)

PERSIST_EVERY_S = 10.0  # interval of writes of the settled step, where nothing else has to be written
LEAP = 1_000_000  # ids skipped after the state file was lost: more than can have been issued while a group was away


@dataclass(frozen=True)
class LighthouseConfig:
    """Settings of a lighthouse, from its flags (rpc/lighthouse_flags.py)."""

    min_replicas: int = 1  # fewest members of a quorum, healing ones included
    # time for which the oldest request of a previous member (of any group, if none has requested) waits for healthy groups that have not
    # requested a quorum
    join_timeout_s: float = 60.0
    tick_s: float = 0.1
    times: Timeouts = field(default_factory=Timeouts)
    num_replica_groups: int = 0  # number of groups that the job is meant to have; 0: unknown

    @property
    def limits(self) -> m.JobLimits:
        return m.JobLimits(self.min_replicas, self.times.takeover_s, self.num_replica_groups)


class LighthouseMachine:
    """Takes the events that `handle` lists. Effects: Persist Answer Refuse MustRestore Notify. Reason: why there is (no) new quorum."""

    def __init__(
        self,
        config: LighthouseConfig,
        now_s: float,
        *,
        epoch: str,
        saved: PersistentState | None = None,
        recover: bool = False,
        lower_limits: bool = False,
    ) -> None:
        """`epoch`: unique to this process, used unless `saved` or a report has the job's. `saved`: contents of the state file. `recover`:
        matters only without `saved`. True: a job runs, and its members report its quorum; False: a job begins. `lower_limits`: the config's
        limits apply even below saved ones."""
        limits = config.limits if lower_limits else config.limits.at_least(saved.limits if saved else None)
        times, count = replace(config.times, takeover_s=limits.takeover_s), limits.num_replica_groups
        self.config = config = replace(config, min_replicas=limits.min_replicas, times=times, num_replica_groups=count)
        self.roster = Roster()
        self.reason = "no group has requested a quorum"
        self._record: QuorumRecord | None = None  # record of the newest quorum
        self._epoch, self._last_id, self._settled = epoch, 0, 0
        # settled step at which this process began this epoch, or learned it from a report; None: it is from the state file, or unused
        self._began_at_step: int | None = None
        self._fingerprint: Fingerprint = ()  # the job's
        self._last_tick_s = now_s
        self._excused_until_s = now_s  # until then a closed stream is no sign of a death; see _notice_stop
        self._persisted = (0, now_s)  # settled step of the last Persist, and its time
        self._state_file_lost, self._awaits_reports_until_s = False, now_s
        self._reported: set[str] = set()  # names of groups that have opened a stream, and so reported their quorum
        self._out: list[Effect] = []
        if recover and not saved:
            self._await_reports(now_s)
        if saved:
            self._epoch, self._last_id, self._settled = saved.epoch, saved.last_id, saved.settled
            self.roster.kind = saved.kind
            if saved.quorum:
                self._adopt(saved.quorum, now_s)

    @property
    def quorum(self) -> Quorum | None:
        return self._record.quorum if self._record else None

    @property
    def saved(self) -> PersistentState:
        over = self._record is not None and not self.roster.claims  # no group holds the job's state any more
        quorum, limits = (None, None) if over else (self.quorum, self.config.limits)
        return PersistentState(self._epoch, self._highest_id, self._settled, self.roster.kind, quorum, limits)

    @property
    def _highest_id(self) -> int:
        """Upper bound of the ids ever issued. After the state file was lost, quorums may have been issued that no live member knows."""
        return self._last_id + (LEAP if self._state_file_lost and self._last_id else 0)

    def handle(self, event: Event, now_s: float) -> Out:
        self._out = []
        if now_s - self._last_tick_s - self.config.tick_s > self.config.times.heartbeat_timeout_s / 2:
            self._notice_stop(now_s)
        match event:
            case Call():
                self._on_call(event, now_s)
            case m.Report():
                self._on_report(event, now_s)
            case m.Beat(replica_id, kind):
                if not self._turn_away(replica_id, kind, now_s):
                    self.roster.heard_from(replica_id, kind, now_s)
            case m.Tick():
                self._on_tick(now_s)
            case m.CallCancelled(replica_id) if replica_id in self.roster.peers:
                self.roster.peers[replica_id].cancelled = True
                if not self.roster.peers[replica_id].stream:
                    self.roster.drop_call(replica_id)
            case m.StreamOpened():
                self._on_stream_opened(event, now_s)
            case m.StreamClosed(replica_id):
                self._on_stream_closed(replica_id, now_s)
            case m.Leave():
                self._on_leave(event, now_s)
            case m.TakeOver():
                self.roster.takeover_until_s = now_s + takeover_order_s(self.config.times.takeover_s)
            case m.Evict(replica_id):
                self.roster.mark_gone(replica_id, -math.inf)
                self._lose([replica_id], "an operator evicted it")
        self._evaluate(now_s)
        return Out(tuple(self._out), self.reason)

    # ---- events

    def _notice_stop(self, now_s: float) -> None:
        """Moves all deadlines: this process was stopped, and the gap does not count as silence. Groups may have given up their streams
        meanwhile, since they got no answers, so for a heartbeat timeout a closed stream does not count either."""
        timeout_s = self.config.times.heartbeat_timeout_s
        gap_s, self._last_tick_s = now_s - self._last_tick_s - self.config.tick_s, now_s
        self._excused_until_s = now_s + timeout_s
        self._awaits_reports_until_s += gap_s
        self.roster.extend_deadlines(gap_s, now_s)
        if self._record:
            self._record.extend_deadlines(gap_s, now_s)

    def _await_reports(self, now_s: float) -> None:
        """Goes on without the state file of a job that runs: for takeover_s (None: until an operator's order) no quorum is formed before
        all members of the newest one report."""
        takeover_s = self.config.times.takeover_s
        self._state_file_lost = True
        self._awaits_reports_until_s = math.inf if takeover_s is None else now_s + takeover_s

    def _on_call(self, event: Call, now_s: float) -> None:
        if self._refuse_call(event, now_s):
            return
        roster, record, member = self.roster, self._record, event.member
        replica_id = member.replica_id
        peer = roster.heard_from(replica_id, event.kind, now_s)
        if event.kind == "pharos":
            roster.live[member.name] = replica_id
            if event.number < peer.number:
                return  # a late copy of an older request
            retried, peer.number = 0 < event.number == peer.answered, event.number
            self._last_id = max(self._last_id, event.known, member.commit_quorum_id)
            if record and record.repeats(event, retried=retried):
                if member.continues_as(record.quorum.members[record.quorum.ids.index(replica_id)]):
                    self._out.append(m.Answer((replica_id,), record.quorum))
                    return
                record.fail(f"{replica_id} changed its state or its slots after the quorum was issued", replica_id)
            if record and event.failed and event.known == record.quorum.quorum_id and replica_id in roster.previous:
                record.keep_wait(replica_id)
                if not record.failed:
                    record.fail(f"{replica_id}: the generation failed", replica_id)
            if record:
                record.excuse_heals(now_s)
            roster.on_heal(member, now_s)
            roster.on_blame(replica_id, event.blame)
            roster.update_claim(member)
        if event.kind == "torchft" and peer.call:
            roster.drop_call(replica_id)  # torchft counts the join timeout from a member's newest request
        peer.called_at_s = peer.called_at_s if peer.call else now_s
        peer.call, peer.called, peer.cancelled = event, True, False
        roster.update_sets(replica_id)
        newcomer = event.kind == "pharos" and replica_id not in roster.previous
        if record and newcomer and replica_id in roster.candidates:
            record.announce(f"{replica_id} waits to join", now_s)

    def _on_stream_opened(self, event: m.StreamOpened, now_s: float) -> None:
        replica_id, known_quorum, roster = event.replica_id, event.quorum, self.roster
        if self._turn_away(replica_id, "pharos", now_s):
            return
        known_id, newest_id = (x.quorum_id if x else 0 for x in (known_quorum, self.quorum))
        if known_quorum:
            self._choose_kind("pharos")
            self._last_id = max(self._last_id, known_id)
            gives_way = self._gives_way_to(event, known_quorum)
            if gives_way:
                newest_id = 0  # ids of two epochs do not compare
            if known_quorum.members and (gives_way or self.quorum is None or known_quorum.epoch == self.quorum.epoch):
                old = self.quorum
                # issued by the lighthouse process before this one, maybe after the job went back to a checkpoint: so its settled step
                # counts, even where the one known here is higher
                if known_id > newest_id:
                    if known_quorum.epoch != self._epoch and not self._state_file_lost:
                        self._await_reports(now_s)
                    self._epoch, self._settled = known_quorum.epoch, 0
                    self._adopt(known_quorum, now_s)
                if known_id >= newest_id:
                    self._settled = max(self._settled, event.settled)
                if known_id > newest_id and self._state_file_lost:
                    self._began_at_step = self._settled
                if gives_way:
                    self._persist(now_s)  # else a restart would continue from the other epoch
                if self._record and known_id > newest_id:
                    self._record.leave_behind(old)
        if self._state_file_lost:
            self._reported.add(m.name_of(replica_id))
        roster.heard_from(replica_id, "pharos", now_s).stream = True
        roster.live.setdefault(m.name_of(replica_id), replica_id)
        if self._record:
            was_member = replica_id in roster.previous
            if was_member and 0 < known_id < self._record.quorum.quorum_id:
                self._out.append(m.Answer((replica_id,), self._record.quorum))
            elif known_id and not was_member:
                # excluded by the lighthouse process before this one; the time since then is not known
                roster.no_longer_members.setdefault(replica_id, now_s)
            self._record.bring_up_to_date(replica_id, known_quorum)

    def _gives_way_to(self, event: m.StreamOpened, known: Quorum) -> bool:
        """True if a member of a different epoch, of the same fingerprint, reports a later settled step, while no step of this epoch is
        settled since this process has begun it, or has learned it from a report. False if the name of that member is taken by now."""
        began_at_step = self._began_at_step
        if began_at_step is None or self._settled > began_at_step or not known.members or known.epoch == self._epoch:
            return False
        later = max(event.settled, known.reference[0]) > self._settled
        may_return = self.roster.live.get(m.name_of(event.replica_id), event.replica_id) == event.replica_id
        return later and may_return and not fingerprint_mismatches((self._fingerprint, known.fingerprint))

    def _on_stream_closed(self, replica_id: str, now_s: float) -> None:
        """Counts the group as lost, since the kernel closes the stream of a process that died; after a stop of this lighthouse only once
        it is silent."""
        timeout_s = self.config.times.heartbeat_timeout_s
        peer = self.roster.peers.get(replica_id)
        if peer and now_s < self._excused_until_s:
            peer.stream = False
            if peer.cancelled:
                self.roster.drop_call(replica_id)
        else:
            self.roster.mark_gone(replica_id, now_s - timeout_s)
            self._lose([replica_id], "its connection broke")

    def _on_report(self, event: m.Report, now_s: float) -> None:
        if self._turn_away(event.replica_id, "pharos", now_s):
            return
        self.roster.heard_from(event.replica_id, "pharos", now_s)
        self.roster.on_blame(event.replica_id, event.blame)
        record = self._record
        if record and event.replica_id in self.roster.previous:
            in_newest = event.commit_quorum_id == record.quorum.quorum_id
            # else it may have settled steps of a history that a checkpoint has replaced
            in_history = in_newest or (event.step, event.commit_quorum_id) == record.quorum.reference[:2]
            settled = event.settled if in_history and event.step != m.VOID else 0
            # a member that has committed step s in this quorum shows that step s - 1 is settled
            self._settled = max(self._settled, settled, (event.step - 1) * in_newest)
            record.on_report(event, now_s)

    def _on_leave(self, event: m.Leave, now_s: float) -> None:
        roster, replica_id, claims = self.roster, event.replica_id, len(self.roster.claims)
        if roster.kind == "pharos":
            roster.end_claim(replica_id)
        if claims and not roster.claims:
            # The job is over: the file keeps neither its limits nor its fingerprint. In this process the next job has its own
            # fingerprint, too (`_choose_fingerprint`); limits that were higher than the flags stay so until a restart.
            self._persist(now_s)
        if replica_id not in roster.peers or roster.peers[replica_id].kind != "pharos":
            return
        if not event.clean:
            self._lose([replica_id], event.reason)
            return
        if replica_id in roster.previous:
            roster.left_cleanly.add(replica_id)
        roster.forget(replica_id, event.reason)
        if self._record and replica_id in roster.previous:
            if event.finished:
                self._record.finish(replica_id)
            self._record.announce(f"{replica_id} {event.reason}", now_s)

    def _on_tick(self, now_s: float) -> None:
        roster, record, times = self.roster, self._record, self.config.times
        self._last_tick_s = now_s
        silent = roster.silent(now_s, times.heartbeat_timeout_s)
        self._lose(silent, f"silent for {times.heartbeat_timeout_s:g} s")
        for replica_id in silent:
            roster.mark_unhealthy(replica_id)  # torchft's members, which _lose does not remove
        roster.expire_claims(now_s, times.takeover_s)
        why = f"the others continued without it, and it has requested no quorum for {times.stall_s:g} s"
        self._lose(roster.find_absent(now_s, times.stall_s), why)
        if record:
            self._lose(*record.find_stalled(now_s))
            record.end_deadlock(now_s)
        roster.end_waits(now_s)
        if record and roster.candidates and roster.waited(now_s) >= times.beat_s:
            record.announce(f"{next(iter(roster.candidates))} waits for a quorum", now_s)
        if self._settled > self._persisted[0] and now_s - self._persisted[1] >= PERSIST_EVERY_S:
            self._persist(now_s)

    # ---- a quorum

    def _evaluate(self, now_s: float) -> None:
        roster = self.roster
        if roster.mismatched:
            self._resolve_mismatched(now_s)
        if not roster.candidates:
            return
        awaits_reports = self._state_file_lost and roster.takeover_until_s <= now_s < self._awaits_reports_until_s
        if awaits_reports and roster.kind == "pharos":
            names = self._reported.union(map(m.name_of, roster.candidates))  # an absent one may know a newer quorum
            missing = sorted({*map(m.name_of, self.quorum.ids)} - names) if self.quorum else []
            if self.quorum is None or missing:
                self.reason = "started without a state file: members of a running job are given time to report"
                if missing:
                    self.reason += f" (takeover_s); missing: {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}"
                return
        least, join_s = self.config.min_replicas, self.config.join_timeout_s
        decision = decide(roster, now_s, settled=self._settled, min_replicas=least, join_timeout_s=join_s)
        self.reason = decision.reason
        if decision.must_restore:
            self._out.append(m.MustRestore(decision.must_restore, self._settled))
            for replica_id in decision.must_restore:
                roster.drop_call(replica_id)
        pairs = roster.pairs([member.replica_id for member in decision.members]) if roster.blames else frozenset()
        if pairs and (excluded := choose_excluded(decision, pairs, least)):  # these sit out; the others form a quorum
            roster.sit_out(excluded, pairs, now_s)
            self._evaluate(now_s)
            self.reason += f"; sitting out: {', '.join(sorted(excluded))} ({describe_pairs(pairs)})"
        elif pairs:  # all wait until these can work together
            too_few = f"fewer than min_replicas = {least} would be left"
            self.reason = f"{describe_pairs(pairs)}; without some of them {too_few}"
        elif decision.members:
            self._issue(decision, now_s)
        elif roster.sitting:
            # Readmits ids if there can be no quorum without them; those that sit out for failed heals only after the join timeout.
            alone = roster.healthy_count() < least and roster.waited(now_s) >= join_s
            if len(roster.candidates) < least and roster.readmit(now_s, early=True, unhealed=alone):
                self._evaluate(now_s)
            elif pairs := pairs_with(next(iter(roster.sitting)), [*roster.candidates, *roster.sitting], roster.blames):
                self.reason += f"; sitting out: {', '.join(roster.sitting)} ({describe_pairs(pairs)})"

    def _issue(self, decision: Decision, now_s: float) -> None:
        ids = tuple(member.replica_id for member in decision.members)
        old = self.quorum
        calls = [call for replica_id in ids if (call := self.roster.peers[replica_id].call)]
        # A new id if the members changed, if one of them reports a failed generation or knows a newer quorum, or if they go back to a
        # checkpoint (the steps after it are then made again, and must get different commit ids); else the same id.
        if (
            self._record is None
            or self._record.failed
            or self._record.quorum.ids != ids
            or any(member.commit_failures > 0 or member.restored is not None for member in decision.members)
            or any(call.known > self._record.quorum.quorum_id for call in calls)
        ):
            new_id = self._last_id = self._highest_id + 1
            self._state_file_lost = False
        else:
            new_id = self._record.quorum.quorum_id
        if self._record is None:
            self._began_at_step = decision.reference[0]
        quorum = Quorum(new_id, decision.members, decision.reference, self._epoch, self._fingerprint)
        self._settled = decision.reference[0]
        for peer in map(self.roster.peers.__getitem__, ids):
            peer.call, peer.answered = None, peer.number
        if self._record:
            self._record.excuse_heals(now_s)
        record = self._set_quorum(quorum, now_s)
        self._persist(now_s)
        self._out.append(m.Answer(ids, quorum))
        record.leave_behind(old)

    def _set_quorum(self, quorum: Quorum, now_s: float) -> QuorumRecord:
        record = self._record
        if record and (record.quorum.epoch, record.quorum.quorum_id) == (quorum.epoch, quorum.quorum_id):
            record.renew(quorum)
        else:
            record = self._record = QuorumRecord(quorum, self.roster, self.config.times, self._notify)
        self.roster.set_quorum(quorum, now_s)
        return record

    def _adopt(self, quorum: Quorum, now_s: float) -> None:
        """Makes a quorum from the state file or from a report the newest one."""
        self._last_id = max(self._last_id, quorum.quorum_id)
        self._settled = max(self._settled, quorum.reference[0])
        self._take_fingerprint(quorum.fingerprint)
        self.roster.mark_healthy(quorum, now_s)
        self._set_quorum(quorum, now_s)

    def _lose(self, ids: list[str], why: str) -> None:
        peers = self.roster.peers
        gone = [i for i in ids if i in peers and peers[i].kind == "pharos"]
        for replica_id in gone:
            if peers[replica_id].call:
                self._out.append(m.Refuse(replica_id, "LOST", why))
            if self._record:
                self._record.keep_wait(replica_id)
            self.roster.forget(replica_id, why)
        if self._record:
            self._record.lose([i for i in gone if i in self.roster.previous], why)

    # ---- refusals

    def _refuse_call(self, event: Call, now_s: float) -> bool:
        """Refuses a lost id, a wrong kind, a second group of one name, a different epoch or fingerprint. True: refused."""
        member = event.member
        if event.kind == "pharos" and self._refuse_lost(member.replica_id, now_s):
            return True
        self._choose_kind(event.kind)
        self._choose_fingerprint(event, now_s)
        # the epoch first: a group that is refused for it displaces no live id of its name
        problem = self.kind_problem(event.kind) or self._refuse_epoch(event, now_s) or self._take_name(event, now_s)
        mismatched = None if problem else fingerprint_problem(event, self._fingerprint)
        if mismatched and self.roster.claims and not self.roster.has_heard_a_member:  # until one returns, or takeover
            self.roster.mismatched[member.replica_id] = mismatched[1]
        elif problem := problem or mismatched:
            self._out.append(m.Refuse(member.replica_id, *problem))
        return problem is not None

    def _choose_fingerprint(self, event: Call, now_s: float) -> None:
        """Sets the job's fingerprint: its members', or, if none of them may come back, that of the first group that requests a quorum."""
        roster, record = self.roster, self._record
        if record and roster.was_in(event.member.replica_id):
            if self._fingerprint != (fingerprint := record.quorum.fingerprint or event.fingerprint):
                self._take_fingerprint(fingerprint)
        elif not roster.candidates and roster.may_be_taken_over(now_s, self.config.times.takeover_s):
            self._take_fingerprint(event.fingerprint)

    def _take_fingerprint(self, fingerprint: Fingerprint) -> None:
        """Makes this the fingerprint of the job, and refuses waiting groups that have a different one."""
        self._fingerprint, roster = fingerprint, self.roster
        for replica_id in [*roster.candidates, *roster.mismatched]:
            roster.mismatched.pop(replica_id, None)
            peer = roster.peers[replica_id]
            if peer.call and (problem := fingerprint_problem(peer.call, fingerprint)):
                self._out.append(m.Refuse(replica_id, *problem))
                peer.called = False  # no group to wait for, though it may live and ask again
                roster.drop_call(replica_id)
            roster.update_sets(replica_id)

    def _resolve_mismatched(self, now_s: float) -> None:
        """Refuses mismatched groups once a member is heard of; if the job may be taken over, adopts the first group's fingerprint."""
        roster = self.roster
        if roster.has_heard_a_member:
            self._take_fingerprint(self._fingerprint)
        elif not roster.candidates and roster.may_be_taken_over(now_s, self.config.times.takeover_s):
            call = roster.peers[next(iter(roster.mismatched))].call
            self._take_fingerprint(call.fingerprint if call else ())
        elif not roster.candidates:
            self.reason = f"{next(iter(roster.mismatched.values()))}; the job's members may come back"

    def kind_problem(self, kind: Kind) -> Refusal:
        """Returns the refusal of members of this kind, else None. Both kinds may join until the first quorum request."""
        ours = self.roster.kind
        if kind == ours or (self._record is None and not self.roster.candidates):
            return None
        return ("FAILED_PRECONDITION", f"this job's quorums hold members of {ours}; {kind} cannot join them")

    def _choose_kind(self, kind: Kind) -> None:
        if kind != self.roster.kind and not self.kind_problem(kind):
            self.roster.kind = kind  # from here on groups of the other kind do not count
            for replica_id in [*self.roster.peers]:
                self.roster.update_sets(replica_id)

    def _turn_away(self, replica_id: str, kind: Kind, now_s: float) -> bool:
        """Refuses an id of the wrong kind, about which nothing is stored, or a lost one. Returns True if it is refused."""
        if problem := self.kind_problem(kind):
            self._out.append(m.Refuse(replica_id, *problem))
        return problem is not None or self._refuse_lost(replica_id, now_s)

    def _refuse_lost(self, replica_id: str, now_s: float) -> bool:
        """Refuses a lost id, and waits two heartbeats for its return under a new one: groups that a network fault cut off return within
        milliseconds of each other, and the first few must not form a quorum without the rest. It waits once for each id."""
        roster = self.roster
        if replica_id not in roster.lost:
            return False
        self._out.append(m.Refuse(replica_id, "LOST", roster.lost[replica_id]))
        if replica_id not in roster.refused_as_lost:
            roster.refused_as_lost.add(replica_id)
            roster.returning[m.name_of(replica_id)] = now_s + 2 * self.config.times.beat_s
        return True

    def _take_name(self, event: Call, now_s: float) -> Refusal:
        """Replaces the live id of a name by a new one if the live id is silent; else returns a refusal, since two groups have one name."""
        if event.kind == "torchft":
            return None
        name, new = event.member.name, event.member.replica_id
        old = self.roster.live.get(name)
        if old is None or old == new:
            return None
        silent_s, times = now_s - self.roster.peers[old].seen_at_s, self.config.times
        # 2.5 s: a group's beat_s is at most MAX_BEAT_S, the rest is latency
        limit_s = min(2.5 * times.beat_s, times.heartbeat_timeout_s)
        if silent_s < limit_s and m.incarnation_of(new) != m.incarnation_of(old):
            return ("ALREADY_EXISTS", f'two groups with the name "{name}": {old} was seen {silent_s:.1f} s ago')
        self._lose([old], f"{new} took its name")
        return None

    def _refuse_epoch(self, event: Call, now_s: float) -> Refusal:
        """Refuses a former member of a different epoch whose state is further than all settled steps: a heal would discard it. Its group
        repeats the request until the job is as far, or until the groups of this epoch have left or may be taken over. An operator's order
        alone is not enough: while a claimant is heard, the job would continue from that one's state."""
        member, roster, takeover_s = event.member, self.roster, self.config.times.takeover_s
        if self._record is None or event.epoch in ("", self._epoch) or member.step - 1 <= self._settled:
            return None
        is_heard = any(claim.replica_id in roster.peers for claim in roster.claims.values())
        if not is_heard and roster.may_be_taken_over(now_s, takeover_s):
            return None
        self.roster.no_longer_members.pop(member.replica_id, None)
        has, here = (f"step {m.describe_step(step)}" for step in (member.step, self._settled))
        unknown = f"it has {has} of epoch {event.epoch}, of which this lighthouse has no state; epoch {self._epoch} has settled {here} here"
        stop = f"stop the groups of epoch {self._epoch} and start the lighthouse"
        start = f"with the state file of epoch {event.epoch}, or without a state file and with --recover"
        return ("FAILED_PRECONDITION", f"{unknown}. To continue from {has}, {stop} {start}")

    # ---- effects

    def _persist(self, now_s: float) -> None:
        self._persisted = (self._settled, now_s)
        self._out.append(m.Persist(self.saved))

    def _notify(self, ids: tuple[str, ...], notice: m.Notice) -> None:
        if ids and self.roster.kind == "pharos":
            self._out.append(m.Notify(ids, notice))
