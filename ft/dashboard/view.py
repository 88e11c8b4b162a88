"""The state of the job as the dashboard shows it: a row for each replica group, the heals, and the job's headline with its reason.

Computed while a page is open: O(N), some milliseconds for 1,000 groups. static/ decides how it looks.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from ft.dashboard.history import LANES, History, clean, named
from ft.protocol import messages as m
from ft.rpc.driver import now_s
from ft.rpc.lighthouse_service import LighthouseService

# State of a group; a row has the index.
HEALTH = ("training", "waiting", "joining", "healing", "late", "silent", "sitting out", "left", "lost")
TRAINS, WAITS, JOINS, HEALS, LATE, SILENT, SITS_OUT, LEFT, LOST = range(len(HEALTH))
IN_REDUCTION, CONNECTED, DRAINED, KILLED = 1, 2, 4, 8  # flags of a row; CONNECTED: it has a stream for orders
SILENT_BEATS = 2.5  # heartbeats missed before a group is shown as silent
GONE_SHOWN_S, GONE_SHOWN = 60.0, 100  # for how long, and how many, groups are shown as left or lost
HEALS_SHOWN = 200  # most heals in an update
LATE_SHARE = 10  # groups that keep others waiting are shown as late if they are at most one in so many
NO_STEP_S, NO_STEP_STEPS = 15.0, 5  # time without a step, in seconds and in median steps, before it is shown
PHASES, PHASE_TEXT, NAME_TEXT, NOTE_TEXT = 32, 80, 512, 200  # most different phases; most characters

Row = tuple[int, int, int, int, int, int, int, str]  # see View.rows
Parts = dict[str, list[Any]]  # section of an update -> its items; static/state.js applies the sections in this order


class View:
    """The state that the pages show, up to the newest update. `ordered`: id -> flags of the orders sent to it."""

    def __init__(self, service: LighthouseService, history: History, *, takes_orders: bool = False) -> None:
        self._service, self._machine, self._history = service, service.machine, history
        self._constants = {"health": HEALTH, "lanes": LANES, "orders": takes_orders}
        self.ordered: dict[str, int] = {}
        self._members: dict[str, m.Member] = {}  # members of the newest quorum, by id
        self._phase_numbers: dict[str, int] = {"": 0}
        self._phases = ["", "other"]  # phases as the groups name them, by number
        self.sent_changes = self._sent_phases = 0  # History.changes and number of phases of the newest update
        self._names: dict[str, tuple[Any, ...]] = {}  # shown id -> its key (short, never reused), and static_info
        self._next_key = 1
        self.sent_rows: dict[str, Row] = {}  # rows of the newest update
        self._job: dict[str, Any] = {}
        self._heals: list[Any] = []

    def changes(self) -> Parts:
        """Returns the changes since the last call."""
        history, since = self._history, self.sent_changes
        rows, old = self.rows(), self.sent_rows
        gone = [self._names.pop(i)[0] for i in old if i not in rows]
        named = [i for i in rows if i not in old or self._is_news(i)]
        for i in named:
            key = self._names[i][0] if i in old else self._next_key
            self._next_key = max(self._next_key, key + 1)
            self._names[i] = (key, *self.static_info(i))
        keys, job = {i: name[0] for i, name in self._names.items()}, self.job(rows)
        heals = []
        for i, (_, sources) in list(history.healing.items())[:HEALS_SHOWN]:
            if i in keys:
                report = self._service.reports.get(i)
                progress = (report.heal_done_bytes, report.heal_total_bytes) if report else (0, 0)  # total 0: not known
                heals.append((keys[i], [keys[source] for source in sources if source in keys], *progress))
        parts: Parts = {
            "gone": gone,
            "phases": self._phases[self._sent_phases :],
            "names": [self._names[i] for i in named],
            "rows": [(keys[i], *row) for i, row in rows.items() if old.get(i) != row],
            "job": [job] if job != self._job else [],
            "heals": [heals] if heals != self._heals else [],
            "cut": [history.cut_at[1]] if history.cut_at[0] > since else [],
            **history.items_between(since, history.changes),
        }
        self.sent_rows, self._job, self._heals, self._sent_phases = rows, job, heals, len(self._phases)
        self.sent_changes = history.changes
        return parts

    def whole(self) -> Parts:
        """Returns the state up to the last call of `changes`, for a new page."""
        return {
            "begin": [self._constants],
            "phases": self._phases[: self._sent_phases],
            "names": list(self._names.values()),
            "rows": [(self._names[i][0], *row) for i, row in self.sent_rows.items()],
            "job": [self._job],
            "heals": [self._heals],
            **self._history.items_between(0, self.sent_changes),
        }

    def rows(self) -> dict[str, Row]:
        """Returns the row of each id: step (-1: no complete state), number of the phase, index of HEALTH, id of the newest quorum (0: not a
        member), seconds of silence (0: not silent), goodput in percent (-1: not known), flags, and a note on its health."""
        roster, reports, quorum = self._machine.roster, self._service.reports, self._machine.quorum
        quorum_id = quorum.quorum_id if quorum else 0
        members = self._members = {x.replica_id: x for x in quorum.members} if quorum else {}
        late, now, silent_s = self._late(), now_s(), SILENT_BEATS * self._service.config.times.beat_s
        rows: dict[str, Row] = {}
        for replica_id in (*members, *(i for i in roster.peers if i not in members)):
            member, report, peer = members.get(replica_id), reports.get(replica_id), roster.peers.get(replica_id)
            flags, goodput, phase = self.ordered.get(replica_id, 0), -1, 0
            step = m.step_of(member.step) if member and peer else m.VOID
            if report:
                step, phase = m.step_of(report.step), self._phase(report.phase)
                goodput = round(100 * min(1.0, report.goodput_s / report.wall_s)) if report.wall_s else -1
                flags |= IN_REDUCTION * report.waiting
            elif peer and peer.call:
                step = m.step_of(peer.call.member.step)
            flags |= CONNECTED * (replica_id in self._service.streams)
            silence_s = now - peer.seen_at_s if peer else 0.0
            quiet = int(silence_s) if silence_s > silent_s else 0
            health, note = self._health(replica_id, bool(member), quiet, late)
            rows[replica_id] = (step, phase, health, quorum_id * bool(member), quiet, goodput, flags, note)
        for replica_id, health, note in self._gone(rows):
            rows[replica_id] = (m.VOID, 0, health, 0, 0, -1, self.ordered.get(replica_id, 0), note)
        return rows

    def static_info(self, replica_id: str) -> tuple[str, int, int]:
        """Returns a group's id as shown, its number of ranks, and the start of its process in seconds since 1970; 0: not known."""
        report, peer = self._service.reports.get(replica_id), self._machine.roster.peers.get(replica_id)
        member = self._members.get(replica_id) or (peer.call.member if peer and peer.call else None)
        born_s = time.time() - report.wall_s if report else 0
        return clean(replica_id, NAME_TEXT), member.world_size if member else 0, int(born_s)

    def _is_news(self, replica_id: str) -> bool:
        """Returns True if static info was not known at first, as after a restart of the lighthouse, and is known now."""
        sent = self._names[replica_id][2:]
        return 0 in sent and any(
            now and not was for was, now in zip(sent, self.static_info(replica_id)[1:], strict=True)
        )

    def _health(self, replica_id: str, member: bool, quiet: int, late: frozenset[str]) -> tuple[int, str]:
        roster, healing = self._machine.roster, self._history.healing
        if replica_id not in roster.peers:
            return LEFT if replica_id in roster.left_cleanly else LOST, clean(
                roster.lost.get(replica_id, ""), NOTE_TEXT
            )
        if why := roster.why_it_sits_out(replica_id):
            return SITS_OUT, why
        if quiet:
            return SILENT, ""
        if replica_id in healing:
            return HEALS, ""
        if replica_id in late:
            return LATE, ""
        if replica_id in roster.candidates:
            return WAITS if member else JOINS, ""
        return TRAINS if member else JOINS, ""

    def _late(self) -> frozenset[str]:
        """Returns the members that the others wait for: in an all-reduce, or because they have not requested the next quorum."""
        roster, reports = self._machine.roster, self._service.reports
        members, late = roster.previous, set[str]()
        if roster.present and self._waited_s():
            late = {i for i in members if i in roster.peers and i not in roster.candidates}
        elif any(i in reports and reports[i].waiting for i in members):
            late = {i for i in members if i in reports and not reports[i].waiting and i not in self._history.healing}
        return frozenset(late if len(late) <= max(1, len(members) // LATE_SHARE) else ())

    def _waited_s(self) -> float:
        """Returns the seconds for which a quorum request has waited; 0 up to beat_s, since a short wait is normal."""
        waited_s = self._machine.roster.waited(now_s())
        return waited_s if waited_s > self._service.config.times.beat_s else 0.0

    def _gone(self, shown: dict[str, Row]) -> list[tuple[str, int, str]]:
        """Returns the latest departures of groups whose name has not come back: id, index of HEALTH, reason."""
        live, after_s = self._machine.roster.live, time.time() - GONE_SHOWN_S
        gone: list[tuple[str, int, str]] = []
        for replica_id, departure in reversed(self._history.gone.items()):
            if departure.at_s < after_s or len(gone) == GONE_SHOWN:
                break
            if replica_id not in shown and m.name_of(replica_id) not in live:
                gone.append((replica_id, LEFT if departure.clean else LOST, departure.why[:NOTE_TEXT]))
        return gone

    def _phase(self, words: str) -> int:
        if words not in self._phase_numbers:
            if len(self._phases) == PHASES:
                return 1
            self._phase_numbers[words] = len(self._phases)
            self._phases.append(clean(words, PHASE_TEXT))
        return self._phase_numbers[words]

    def job(self, rows: dict[str, Row]) -> dict[str, Any]:
        """Returns the values shown above the rows. All are sent again if one has changed."""
        service, machine, history = self._service, self._machine, self._history
        quorum, saved = machine.quorum, machine.saved
        health = Counter(row[2] for row in rows.values())
        counts = [health[kind] for kind in range(len(HEALTH))]
        wall_s = sum(report.wall_s for report in service.reports.values())
        goodput_s = sum(report.goodput_s for report in service.reports.values())
        state, headline, reason = self._words(rows, counts)
        return {
            "state": state,
            "headline": headline,
            "reason": reason,
            "quorum_id": quorum.quorum_id if quorum else 0,
            "members": len(quorum.members) if quorum else 0,
            "alive": sum(i in machine.roster.peers for i in quorum.ids) if quorum else 0,
            "since_s": int(service.issued_at),
            "step": history.step,
            "settled": m.step_of(saved.settled),
            "branch": saved.settled // m.STEPS_PER_BRANCH,
            "counts": counts,
            "asking": len(machine.roster.candidates),
            "min_replicas": service.config.min_replicas,
            "kind": saved.kind,
            "steps_per_s": float(f"{history.steps_per_s():.3g}"),
            "goodput": round(min(1.0, goodput_s / wall_s), 3) if wall_s else None,
            "trouble": clean(service.state_writer.trouble if service.state_writer else "", NOTE_TEXT),
        }

    def _words(self, rows: dict[str, Row], counts: list[int]) -> tuple[str, str, str]:
        """Returns state (good, busy or bad), headline and reason of the job: the first case below that applies."""
        machine, history = self._machine, self._history
        reason, asking = clean(machine.reason, NOTE_TEXT), len(machine.roster.candidates)
        late = [i for i, row in rows.items() if row[2] == LATE]
        if not rows:
            return "busy", "No group has connected yet", "The lighthouse waits for the first quorum request."
        if machine.quorum is None:
            return "busy", "Waiting for the first quorum", _sentence(reason)
        if all(row[2] == LEFT for row in rows.values()):
            where = "The next group begins a job, or continues this one from a checkpoint."
            return "good", "All groups have left", where
        if counts[LOST] and all(row[2] in (LOST, LEFT) for row in rows.values()):
            where = "Groups that return continue from the state of a process that is still there, or from a checkpoint."
            return "bad", "All groups are gone", where
        if waited_s := self._waited_s():
            wanted = f" Waiting for {named(late)}." if late else ""
            head = "A group waits to join" if not machine.roster.present else "Waiting for the next quorum"
            return "busy", f"{head}, {waited_s:.0f} s", f"{_sentence(reason)}{wanted} Waiting requests: {asking}."
        if late:
            verb = "keeps" if len(late) == 1 else "keep"
            return "busy", "Waiting in a step", f"{named(late)} {verb} the others waiting in the all-reduce."
        if no_step_s := self._no_step_s():
            head = f"No step for {no_step_s:.0f} s"
            reports = self._service.reports
            # of live members, if there are any: else all groups begin again. The server of a stopped trainer repeats its last report
            phases_of = {i: reports[i] for i in machine.quorum.ids if i in reports} or reports
            lasting = {i: x.phase for i, x in phases_of.items() if x.phase_limit_s > no_step_s}  # such as a validation
            if lasting:
                phases = clean(" and ".join(sorted({*lasting.values()})), NOTE_TEXT)
                return "busy", head, f"{named(lasting)}: {phases}, which may last longer than a step."
            return "bad", head, f"Reason of the newest quorum: {reason}."
        if counts[HEALS]:
            healing = f"State transfer to {named(history.healing)}; the others continue without a pause."
            return "busy", "Training, with a heal", healing
        if out := [i for i, row in rows.items() if row[2] in (LOST, SILENT, SITS_OUT)]:
            return "busy", "Training with fewer groups", f"Missing: {named(out)}. A group that returns heals and joins."
        return "good", "Training", f"No group requests a new quorum. Reason of the newest: {reason}."

    def _no_step_s(self) -> float:
        """Returns the seconds since the last step if that is too long; else, or if no group has reported a step, 0."""
        last_s, reports = self._history.last_step_s, self._service.reports
        if not last_s or not reports:
            return 0.0
        patience_s = NO_STEP_STEPS * max(report.median_step_s for report in reports.values())
        no_step_s = time.time() - last_s
        return no_step_s if no_step_s > max(NO_STEP_S, patience_s) else 0.0


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""
