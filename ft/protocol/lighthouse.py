"""Who is in: the quorum rules, and what the lighthouse tells whom. Driven by rpc/lighthouse_server.py and sim/.

The rules are in rules.py: `decide`, a pure function of a View. `Lighthouse` keeps the View up to date, one group at a time: an event
costs the same with 2 groups and with 1,000, until it completes a quorum; a round of N calls costs O(N).

Where the rules leave a choice:
- A name's successor ends the claim of the member before it, but it is no heir: only the same process under a new id ("a:1.1") is.
- Only the first loss of a generation is told; after it the generation is over anyhow. So 500 losses at once are not 250,000 notices.
- The join time runs from the call of the first *previous* member: a newcomer may have waited for longer than that while a step went
  on, and those who have just committed it call within milliseconds of each other. From the first call only where no member has called.
- A quorum of another epoch is not adopted once this lighthouse has issued its own: its members were away when the job began anew
  without a state file. They are told that theirs is over, and heal.
- A clean Leave announces a change; it does not stop a collective that the leaver has already fed.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ft.protocol import messages as m
from ft.protocol.messages import Call, Effect, Event, Kind, Member, Out, Quorum, Saved, Times
from ft.protocol.rules import Decision, Problem, View, absurd, decide, smallest_cover

LOST_KEPT = 4096  # ids that are remembered as lost; an older one that comes back is a stranger, and heals like one
FAILURES_BEFORE_SIT_OUT = 3
PERSIST_EVERY_S = 10.0  # the settled step, when nothing else is to be written


@dataclass(frozen=True)
class LighthouseConfig:
    min_replicas: int = 1  # members, healing ones included
    join_timeout_s: float = 60.0
    tick_s: float = 0.1
    times: Times = field(default_factory=Times)
    sit_out_s: float = 10.0  # doubles each time

    @property
    def supersede_s(self) -> float:
        """A name's live id may be replaced when it was silent for so long: two beats and some time on the way, for who beats is there."""
        return min(2.5 * self.times.beat_s, self.times.heartbeat_timeout_s)


@dataclass
class _Peer:
    """What is known of one live id."""

    kind: Kind
    seen_s: float
    stream: bool = False
    call: Call | None = None  # waiting for a quorum
    called_s: float = 0.0
    called: bool = False  # at least once
    number: int = 0  # of its newest call


@dataclass
class _Generation:
    """What has happened to the current quorum since it was issued."""

    failed: bool = False  # a member said so
    lost: list[str] = field(default_factory=list)
    lost_why: str = ""
    change: str = ""  # announced, and why
    announced_s: float = 0.0  # the last time
    waiting: set[str] = field(default_factory=set)  # members whose ranks are all in the collective
    alone_since_s: float | None = None  # all but one of them wait
    crossed_since_s: float | None = None  # some ask for a quorum, and all others wait in the collective
    median_step_s: float = 0.0


class Lighthouse:
    """In: Call CallCancelled Beat StreamOpened StreamClosed Report Leave TakeOver Evict Tick.
    Out: Persist Answer Refuse MustRestore Notify. The reason is why there is no quorum yet, or why the last one was issued.

    Bounded: of ids that are gone it keeps the last 4,096 names, and the members of the current quorum.
    """

    def __init__(
        self, config: LighthouseConfig, now_s: float, *, epoch: str, saved: Saved | None = None, fresh: bool = False
    ) -> None:
        """`epoch`: unique to this start, used unless `saved` or a report names the job's. saved: the state file. fresh: a state file is
        kept, but there was none yet. Neither (it is lost): members' reports are awaited for takeover_s, lest a newcomer take over while
        they go on; with takeover_s None until there is one, or an operator's word."""
        self.config = config
        self.quorum: Quorum | None = None
        self.reason = "nobody has called"
        self._epoch, self._last_id, self._settled = epoch, 0, 0
        self._kind: Kind = "pharos"
        self._peers: dict[str, _Peer] = {}
        self._order: OrderedDict[str, None] = OrderedDict()  # healthy ids, longest silent first
        self._live: dict[str, str] = {}  # name -> its one live id
        self._lost: OrderedDict[str, str] = OrderedDict()  # id -> why
        self._candidates: OrderedDict[str, Member] = OrderedDict()  # in the order of their calls
        self._healthy: set[str] = set()
        self._previous: frozenset[str] = frozenset()
        self._processes: frozenset[str] = (
            frozenset()
        )  # of the previous members: one that was lost comes back under another id
        self._members: dict[str, Member] = {}  # of the quorum, as they called
        self._again = False  # it was issued again under its id
        self._gone: set[str] = set()  # previous members that left on purpose
        self._present: dict[str, None] = {}  # in the order of their calls
        self._missing: set[str] = set()
        self._heirs: dict[str, None] = {}  # in the order of their calls
        self._shrinkers: set[str] = set()
        self._reachable: set[str] = set()
        self._shown = View(
            candidates=self._candidates,
            present=self._present,
            missing=self._missing,
            heirs=self._heirs,
            shrinkers=self._shrinkers,
        )
        self._claims: dict[str, tuple[str, float]] = {}  # name -> (id, last seen, for those no longer alive)
        self._claims_expired = False
        self._restored_in = 0  # the last quorum that went back to a checkpoint
        self._returning: dict[
            str, float
        ] = {}  # name of a group that was just told that it is lost -> until when it is awaited
        self._generation = _Generation()
        self._shape: tuple[tuple[str, str], ...] = ()
        self._failures = 0  # failed generations of the same members from the same state, in a row
        self._pairs: set[frozenset[str]] = set()
        self._sitting: dict[str, float] = {}  # id -> until
        self._sat: dict[str, int] = {}  # name -> times
        self._last_tick_s = now_s
        self._persisted = (0, now_s)  # settled, when
        takeover_s = math.inf if config.times.takeover_s is None else config.times.takeover_s
        self._silent_until_s = now_s if saved or fresh else now_s + takeover_s
        self._out: list[Effect] = []
        if saved:
            self._epoch, self._last_id, self._settled, self._kind = (
                saved.epoch,
                saved.last_id,
                saved.settled,
                saved.kind,
            )
            if saved.quorum:
                self._adopt(saved.quorum, now_s)

    @property
    def saved(self) -> Saved:
        """What a restart must know."""
        return Saved(self._epoch, self._last_id, self._settled, self._kind, self.quorum)

    def __contains__(self, replica_id: str) -> bool:
        """Whether it is one of the live ids."""
        return replica_id in self._peers

    def handle(self, event: Event, now_s: float) -> Out:
        self._out = []
        _HANDLERS[type(event)](self, event, now_s)
        self._evaluate(now_s)
        return Out(tuple(self._out), self.reason)

    # ---- events

    def _on_call(self, event: Call, now_s: float) -> None:
        member = event.member
        if self._refused(event, now_s):
            return
        peer = self._see(member.replica_id, event.kind, now_s)
        if event.kind == "pharos":
            self._live[member.name] = member.replica_id
            if event.number < peer.number:
                return  # a late copy of an older question
            retried, peer.number = 0 < event.number == peer.number, event.number
            self._last_id = max(self._last_id, event.known, member.commit_quorum_id)
            if self._repeats(event, retried=retried):
                if member.state == self._members[member.replica_id].state:
                    self._emit(m.Answer((member.replica_id,), self._current))
                    return
                self._fail_generation(f"{member.replica_id} has gone on since it was put in", member.replica_id)
            self._note_failure(event)
            self._settle_claim(member)
        if event.kind == "torchft" and peer.call:
            self._drop_call(member.replica_id)  # its join time is that of its newest call
        peer.called_s = peer.called_s if peer.call else now_s
        peer.call, peer.called = event, True
        self._place(member.replica_id)
        if self.quorum and event.kind == "pharos" and member.replica_id not in self._previous:
            self._announce(f"{member.replica_id} waits to come in", now_s)

    def _on_cancelled(self, event: m.CallCancelled, now_s: float) -> None:
        peer = self._peers.get(event.replica_id)
        if peer and not peer.stream:
            self._drop_call(event.replica_id)

    def _on_beat(self, event: m.Beat, now_s: float) -> None:
        if not self._is_foreign(event.replica_id, event.kind) and not self._is_lost(event.replica_id, now_s):
            self._see(event.replica_id, event.kind, now_s)

    def _on_stream_opened(self, event: m.StreamOpened, now_s: float) -> None:
        replica_id, known = event.replica_id, event.quorum
        if self._is_foreign(replica_id, "pharos") or self._is_lost(replica_id, now_s):
            return
        if known:
            self._settle_kind("pharos")
            self._last_id = max(self._last_id, known.quorum_id)
        if known and (self.quorum is None or known.epoch == self.quorum.epoch):
            newest = self.quorum.quorum_id if self.quorum else 0
            if known.quorum_id > newest:
                self._epoch, self._settled = known.epoch, 0  # another history's, if the job has gone back since
                old = self.quorum
                self._adopt(known, now_s)
                self._leave_behind(old)
            if known.quorum_id >= newest:
                self._settled = max(self._settled, event.settled)
        self._see(replica_id, "pharos", now_s).stream = True
        self._live.setdefault(m.name_of(replica_id), replica_id)
        self._bring_up_to_date(replica_id, known.quorum_id if known else 0)

    def _on_stream_closed(self, event: m.StreamClosed, now_s: float) -> None:
        self._lose([event.replica_id], "its connection broke")

    def _on_report(self, event: m.Report, now_s: float) -> None:
        if self._is_foreign(event.replica_id, "pharos") or self._is_lost(event.replica_id, now_s):
            return
        self._see(event.replica_id, "pharos", now_s)
        generation = self._generation
        if self.quorum and event.replica_id in self._previous:
            in_it = event.commit_quorum_id == self.quorum.quorum_id
            told = event.settled if event.commit_quorum_id >= self._restored_in else 0
            self._settled = max(self._settled, told, event.step - 1 if in_it else 0)
            generation.median_step_s = event.median_step_s or generation.median_step_s
            (generation.waiting.add if event.waiting else generation.waiting.discard)(event.replica_id)
            alone = len(generation.waiting) == len(self._previous) - 1 > 0
            generation.alone_since_s = (generation.alone_since_s or now_s) if alone else None

    def _on_leave(self, event: m.Leave, now_s: float) -> None:
        replica_id = event.replica_id
        if replica_id not in self._peers or self._peers[replica_id].kind != "pharos":
            return
        if replica_id in self._previous:
            self._claims.pop(m.name_of(replica_id), None)
        if event.clean:
            if replica_id in self._previous:
                self._gone.add(replica_id)
            self._forget(replica_id, event.reason)
            if replica_id in self._previous:
                self._announce(f"{replica_id} {event.reason}", now_s)
        else:
            self._lose([replica_id], event.reason)

    def _on_take_over(self, event: m.TakeOver, now_s: float) -> None:
        self._claims_expired, self._silent_until_s = True, now_s

    def _on_evict(self, event: m.Evict, now_s: float) -> None:
        self._lose([event.replica_id], "an operator evicted it")

    def _on_tick(self, event: m.Tick, now_s: float) -> None:
        self._forgive_own_pause(now_s)
        self._expire(now_s)
        self._expire_claims(now_s)
        self._lose_who_holds_up(now_s)
        self._end_crossed_waits(now_s)
        self._returning = {name: until_s for name, until_s in self._returning.items() if until_s > now_s}
        for replica_id in [i for i, until_s in self._sitting.items() if until_s <= now_s]:
            del self._sitting[replica_id]
            self._place(replica_id)
        if self.quorum and self._candidates and self._waited(now_s) >= self.config.times.beat_s:
            self._announce(f"{next(iter(self._candidates))} waits", now_s)
        if self._settled > self._persisted[0] and now_s - self._persisted[1] >= PERSIST_EVERY_S:
            self._persist(now_s)

    # ---- a quorum

    def _evaluate(self, now_s: float) -> None:
        if not self._candidates:
            return
        if self._silent_until_s > now_s and self._kind == "pharos" and self.quorum is None:
            self.reason = "just started without a state file: members of a running job are given time to report"
            return
        decision = decide(self._view(now_s))
        self.reason = decision.reason
        if decision.must_restore:
            self._emit(m.MustRestore(decision.must_restore, self._settled))
            for replica_id in decision.must_restore:
                self._drop_call(replica_id)
        if decision.members and not self._made_some_sit_out(decision, now_s):
            self._issue(decision, now_s)

    def _view(self, now_s: float) -> View:
        """Always the same one: its collections are the sets that _place keeps, and the rest is put in here."""
        view = self._shown
        view.kind = self._kind
        view.healthy = len(self._healthy) + self._awaited()
        view.previous = self._previous
        view.reachable = len(self._reachable)
        view.claims = len(self._claims)
        view.claims_expired = self._claims_expired
        view.waited_s = self._waited(now_s)
        view.settled = self._settled
        view.min_replicas = self.config.min_replicas
        view.join_timeout_s = self.config.join_timeout_s
        return view

    def _issue(self, decision: Decision, now_s: float) -> None:
        ids = tuple(member.replica_id for member in decision.members)
        old = self.quorum
        if not self._same_members(ids):
            self._failures = 0
            self._pairs.clear()
        self._last_id += self._starts_a_generation(decision, ids)
        quorum = Quorum(self._last_id, decision.members, decision.reference, self._epoch)
        if decision.reference[0] < self._settled:  # restored on purpose
            self._restored_in = quorum.quorum_id
        self._settled = decision.reference[0]
        fresh = old is None or old.quorum_id != quorum.quorum_id
        for replica_id in ids:
            self._peers[replica_id].call = None
        self._take(quorum, _Generation() if fresh else self._generation, now_s)
        self._generation.change = ""
        self._persist(now_s)
        self._emit(m.Answer(ids, quorum))
        if fresh:
            self._leave_behind(old)

    def _leave_behind(self, old: Quorum | None) -> None:
        """Who was in the old quorum and is not in this one may be waiting on it, and nobody else would tell."""
        if old and self.quorum:
            out = tuple(i for i in old.ids if i not in self._previous and i in self._peers)
            why = f"quorum {self.quorum.quorum_id} was formed without this group"
            self._notify(out, m.Abandoned(old.quorum_id, why))

    def _starts_a_generation(self, decision: Decision, ids: tuple[str, ...]) -> bool:
        """The id grows if the members changed or one of them reports a failed generation; else they keep what they have. It also grows
        when they go back to a checkpoint: what they decided about the steps after it is not to be found under the same names."""
        failed = self._generation.failed or any(member.commit_failures > 0 for member in decision.members)
        restored = any(member.restored is not None for member in decision.members)
        return failed or restored or not self._same_members(ids)

    def _same_members(self, ids: tuple[str, ...]) -> bool:
        return self.quorum is not None and self.quorum.ids == ids

    def _take(self, quorum: Quorum, generation: _Generation, now_s: float) -> None:
        before = self._previous
        touched = {*before, *quorum.ids}
        self._again = bool(self.quorum and self.quorum.quorum_id == quorum.quorum_id)
        self._members = {member.replica_id: member for member in quorum.members}
        self.quorum, self._previous, self._generation = quorum, frozenset(quorum.ids), generation
        if self._previous != before:
            self._processes = frozenset(map(m.process_of, quorum.ids))
        generation.waiting.clear()
        generation.alone_since_s = None
        self._gone, self._claims_expired = set(), False
        self._claims = {member.name: (member.replica_id, now_s) for member in quorum.members}
        for replica_id in sorted(touched):
            self._place(replica_id)
        for replica_id in [i for i in self._candidates if i not in touched]:
            self._place(replica_id)  # who waits on under a new id may have been in it under the old one

    def _adopt(self, quorum: Quorum, now_s: float) -> None:
        """From the state file or a report: its members are alive until they were silent for a whole heartbeat timeout from now."""
        self._last_id = max(self._last_id, quorum.quorum_id)
        self._settled = max(self._settled, quorum.reference[0])
        for member in quorum.members:
            self._lost.pop(member.replica_id, None)
            self._live.setdefault(member.name, member.replica_id)
            if member.replica_id not in self._peers:
                self._see(member.replica_id, self._kind, now_s)
        self._take(quorum, _Generation(), now_s)

    def _repeats(self, event: Call, *, retried: bool) -> bool:
        """A member asks that has not heard of the quorum it is in, and nothing has happened to it since: the answer got lost. Where the
        quorum was issued again under its id, it is the same question that shows it."""
        if self.quorum is None or event.member.replica_id not in self._previous:
            return False
        here = event.known >= self.quorum.quorum_id  # else what it says has failed was an older one
        if here and (event.failed or not (retried and self._again)):
            return False
        return not self._generation.failed and not self._generation.lost and not self._gone

    # ---- failures that repeat

    def _note_failure(self, event: Call) -> None:
        quorum, replica_id = self.quorum, event.member.replica_id
        if not (quorum and event.failed and event.known == quorum.quorum_id and replica_id in self._previous):
            return
        self._pairs |= {
            frozenset((replica_id, other)) for other in event.blame if other != replica_id and other in self._previous
        }
        if not self._generation.failed:
            progress = event.member.state > quorum.reference
            self._failures = 1 if progress else self._failures + 1
            self._fail_generation(f"{replica_id}: the generation failed", replica_id)

    def _fail_generation(self, why: str, *except_ids: str) -> None:
        self._generation.failed = True
        others = tuple(i for i in self._current.ids if i not in except_ids and i in self._peers)
        self._notify(others, m.Abandoned(self._current.quorum_id, why))

    def _made_some_sit_out(self, decision: Decision, now_s: float) -> bool:
        """After three failures in a row those who cannot work together are parted, if enough remain without them."""
        if self._failures < FAILURES_BEFORE_SIT_OUT or not self._pairs or self._kind != "pharos":
            return False
        holders = {member.replica_id for member in decision.members if member.state == decision.reference}
        out = smallest_cover(self._pairs, holders) & self._candidates.keys()
        self._failures, pairs = 0, len(self._pairs)
        self._pairs.clear()
        if len(decision.members) - len(out) < self.config.min_replicas or not holders - out or not out:
            return False
        for replica_id in out:
            name = m.name_of(replica_id)
            times = self._sat.pop(name, 0)
            self._sat[name] = times + 1
            self._sitting[replica_id] = now_s + self.config.sit_out_s * 2 ** min(times, 16)
            self._place(replica_id)
        while len(self._sat) > LOST_KEPT:
            self._sat.pop(next(iter(self._sat)))
        self._evaluate(now_s)
        self.reason += (
            f"; {', '.join(sorted(out))} sit out: they explain all {pairs} pairs that could not work together"
        )
        return True

    # ---- who is there

    def _see(self, replica_id: str, kind: Kind, now_s: float) -> _Peer:
        peer = self._peers.get(replica_id)
        back = peer is None or replica_id not in self._order
        if peer is None:
            peer = self._peers[replica_id] = _Peer(kind, now_s)
        peer.seen_s = now_s
        self._order[replica_id] = None
        self._order.move_to_end(replica_id)
        if back:
            self._place(replica_id)
        return peer

    def _place(self, replica_id: str) -> None:
        """Puts one id into the sets that the rules count. Everything that changes its standing ends here."""
        peer = self._peers.get(replica_id)
        alive = peer is not None and replica_id in self._order and replica_id not in self._sitting
        was_in = replica_id in self._previous
        of_them = was_in or m.process_of(replica_id) in self._processes  # under this id or a former one
        theirs = peer is not None and peer.kind == "torchft"
        counts = alive and peer is not None and peer.kind == self._kind and (peer.called or of_them or theirs)
        _put(self._healthy, replica_id, counts)
        _put(self._reachable, replica_id, alive and was_in)
        if peer and peer.call and alive:
            member = self._candidates[replica_id] = peer.call.member
            self._missing.discard(replica_id)
            _keep(self._present, replica_id, was_in)
            _put(self._shrinkers, replica_id, member.shrink_only and (was_in or theirs))  # a newcomer would bar itself
            _keep(self._heirs, replica_id, of_them and not member.void)
        else:
            for callers in (self._candidates, self._present, self._heirs):
                callers.pop(replica_id, None)
            self._shrinkers.discard(replica_id)
            away = replica_id in self._gone or replica_id in self._sitting
            _put(self._missing, replica_id, was_in and not away)

    def _waited(self, now_s: float) -> float:
        members = (self._present or self._heirs) if self._kind == "pharos" else {}
        first = next(iter(members or self._candidates), None)
        return now_s - self._peers[first].called_s if first else 0.0

    def _drop_call(self, replica_id: str) -> None:
        peer = self._peers.get(replica_id)
        if peer:
            peer.call = None
            if replica_id not in self._order:
                del self._peers[replica_id]
            self._place(replica_id)

    def _forget(self, replica_id: str, why: str) -> None:
        """Final: the id does not come back."""
        peer = self._peers.pop(replica_id, None)
        name = m.name_of(replica_id)
        if peer and name in self._claims and self._claims[name][0] == replica_id:
            self._claims[name] = (replica_id, peer.seen_s)
        self._order.pop(replica_id, None)
        self._sitting.pop(replica_id, None)
        if self._live.get(name) == replica_id:
            del self._live[name]
        self._lost[replica_id] = why
        while len(self._lost) > LOST_KEPT + len(self._previous):
            self._lost.popitem(last=False)
        self._place(replica_id)

    def _lose(self, ids: list[str], why: str) -> None:
        gone = [i for i in ids if i in self._peers and self._peers[i].kind == "pharos"]
        for replica_id in gone:
            if self._peers[replica_id].call:
                self._emit(m.Refuse(replica_id, "LOST", why))
            self._forget(replica_id, why)
        members = [i for i in gone if i in self._previous]
        first = bool(members) and not self._generation.lost
        self._generation.lost += members
        if first and self.quorum:
            self._generation.lost_why = why
            alive = tuple(i for i in self.quorum.ids if i in self._peers)
            self._notify(alive, m.MemberLost(self.quorum.quorum_id, tuple(members), why))

    def _is_lost(self, replica_id: str, now_s: float) -> bool:
        """Tells it so. It will return under another id, and is awaited for a moment: those whom a cut had kept away come back within
        milliseconds of each other, and the first few must not form a quorum without the rest."""
        if replica_id in self._lost:
            self._emit(m.Refuse(replica_id, "LOST", self._lost[replica_id]))
            self._returning[m.name_of(replica_id)] = now_s + 2 * self.config.times.beat_s
        return replica_id in self._lost

    def _awaited(self) -> int:
        """Those that return, until they can be counted under their new id."""
        return sum([self._live.get(name) not in self._healthy for name in self._returning]) if self._returning else 0

    def _settle_claim(self, member: Member) -> None:
        """A previous member's claim to the state ends when its name has a new id, or when it says itself that it has none."""
        claim = self._claims.get(member.name)
        if claim and (claim[0] != member.replica_id or member.void):
            del self._claims[member.name]

    # ---- time

    def _forgive_own_pause(self, now_s: float) -> None:
        """A lighthouse that was itself stopped has missed beats that were sent: silence is counted without the gap."""
        timeout_s, gap_s = self.config.times.heartbeat_timeout_s, now_s - self._last_tick_s - self.config.tick_s
        self._last_tick_s = now_s
        if gap_s > timeout_s / 2:
            for peer in self._peers.values():
                peer.seen_s = min(peer.seen_s + gap_s, now_s)
                peer.called_s = min(peer.called_s + gap_s, now_s)
            self._claims = {name: (i, min(seen_s + gap_s, now_s)) for name, (i, seen_s) in self._claims.items()}
            if self._generation.alone_since_s is not None:
                self._generation.alone_since_s = min(self._generation.alone_since_s + gap_s, now_s)

    def _expire(self, now_s: float) -> None:
        silent = []
        for replica_id in self._order:
            if now_s - self._peers[replica_id].seen_s < self.config.times.heartbeat_timeout_s:
                break
            silent.append(replica_id)
        self._lose(silent, f"silent for {self.config.times.heartbeat_timeout_s:g} s")
        for replica_id in silent:
            peer = self._peers.get(replica_id)
            if peer:  # torchft's: unhealthy until it beats again
                del self._order[replica_id]
                if peer.call is None:
                    del self._peers[replica_id]
                self._place(replica_id)

    def _expire_claims(self, now_s: float) -> None:
        takeover_s = self.config.times.takeover_s
        if takeover_s is None or not self._claims or not self._candidates or self._heirs:
            return
        seen = (self._peers[i].seen_s if i in self._peers else seen_s for i, seen_s in self._claims.values())
        self._claims_expired = self._claims_expired or now_s - max(seen) >= takeover_s

    def _lose_who_holds_up(self, now_s: float) -> None:
        """A group that alone keeps all others waiting in the collective is as good as dead, though its server beats."""
        generation, times = self._generation, self.config.times
        if generation.alone_since_s is None or self.quorum is None:
            return
        [last] = self._previous - generation.waiting or {""}
        healing = any(x.replica_id == last and x.state != self.quorum.reference for x in self.quorum.members)
        limit_s = times.heal_grace_s if healing else max(times.stall_s, 5 * generation.median_step_s)
        if now_s - generation.alone_since_s >= limit_s and last not in self._candidates:
            generation.alone_since_s = None
            self._lose([last], f"all others waited {limit_s:g} s for it")

    def _end_crossed_waits(self, now_s: float) -> None:
        """Members that ask for a quorum, or have left, and members that wait for them in the collective: no wait would end by itself."""
        generation, asking = self._generation, self._present.keys()
        away = asking | self._gone
        if not away or generation.failed or len(away) == len(self._previous):
            generation.crossed_since_s = None
        elif self._previous - away <= generation.waiting:
            since_s = generation.crossed_since_s = generation.crossed_since_s or now_s
            if now_s - since_s >= 2 * self.config.times.beat_s:
                verb = "asks for a quorum" if asking else "has left"
                self._fail_generation(f"{min(asking or away)} {verb}, and all others wait for it", *asking)
        else:
            generation.crossed_since_s = None

    # ---- what to refuse, what to tell

    def _refused(self, event: Call, now_s: float) -> bool:
        """Whether the call was refused. A lost id, a wrong kind, a second group under one name, another shape, absurd claims."""
        member = event.member
        if event.kind == "pharos" and self._is_lost(member.replica_id, now_s):
            return True
        self._settle_kind(event.kind)
        if not self._candidates and not self._claims:
            self._shape = event.shape
        problem = (
            absurd(event) or self.refuses(event.kind) or self._name_taken(event, now_s) or self._shape_differs(event)
        )
        if problem:
            self._emit(m.Refuse(member.replica_id, *problem))
        return problem is not None

    def refuses(self, kind: Kind) -> Problem:
        """Why members of this kind cannot join. Until one has called, either may."""
        if kind == self._kind or (self.quorum is None and not self._candidates):
            return None
        return ("FAILED_PRECONDITION", f"this job's quorums hold members of {self._kind}; {kind} cannot join them")

    def _is_foreign(self, replica_id: str, kind: Kind) -> bool:
        """Tells it so, and nothing of it is remembered."""
        problem = self.refuses(kind)
        if problem:
            self._emit(m.Refuse(replica_id, *problem))
        return problem is not None

    def _settle_kind(self, kind: Kind) -> None:
        if kind != self._kind and not self.refuses(kind):
            self._kind = kind
            for replica_id in list(self._peers):  # those of the other kind were waited for until now
                self._place(replica_id)

    def _name_taken(self, event: Call, now_s: float) -> Problem:
        """A newcomer replaces the live id of its name if that is silent; else there are two groups with one id."""
        if event.kind == "torchft":
            return None
        name, new = event.member.name, event.member.replica_id
        old = self._live.get(name)
        if old is None or old == new:
            return None
        silent_s = now_s - self._peers[old].seen_s
        if silent_s < self.config.supersede_s and m.process_of(new) != m.process_of(old):
            return ("ALREADY_EXISTS", f'two groups with one id: "{name}" is {old}, seen {silent_s:.1f} s ago')
        self._lose([old], f"{new} took its name")
        return None

    def _shape_differs(self, event: Call) -> Problem:
        if not event.shape:
            return None
        ours = dict(self._shape)
        differ = [what for what, digest in event.shape if what in ours and ours[what] != digest]
        if not differ:
            return None
        return ("FAILED_PRECONDITION", f"{event.member.replica_id} has another {' and '.join(differ)} than the job")

    def _announce(self, why: str, now_s: float) -> None:
        """Those who have called know already. Said again as long as somebody waits, for whoever was asking just then took no notice."""
        generation = self._generation
        if self.quorum and (not generation.change or now_s - generation.announced_s >= 2 * self.config.times.beat_s):
            why, generation.announced_s = generation.change or why, now_s
            generation.change = why
            there = tuple(i for i in self.quorum.ids if i in self._peers and i not in self._candidates)
            self._notify(there, m.ChangeAnnounced(self.quorum.quorum_id, why))

    def _bring_up_to_date(self, replica_id: str, known: int) -> None:
        """A stream starts with all that its group may have missed."""
        quorum, generation, me = self.quorum, self._generation, (replica_id,)
        if quorum is None:
            return
        if replica_id not in self._previous:
            if known:
                self._notify(me, m.Abandoned(known, f"quorum {quorum.quorum_id} goes on without this group"))
            return
        if 0 < known < quorum.quorum_id:
            self._emit(m.Answer(me, quorum))
        if generation.lost:
            self._notify(me, m.MemberLost(quorum.quorum_id, tuple(generation.lost), generation.lost_why))
        if generation.failed:
            self._notify(me, m.Abandoned(quorum.quorum_id, "the generation failed"))
        if generation.change:
            self._notify(me, m.ChangeAnnounced(quorum.quorum_id, generation.change))

    def _persist(self, now_s: float) -> None:
        self._persisted = (self._settled, now_s)
        self._emit(m.Persist(self.saved))

    def _notify(self, ids: tuple[str, ...], notice: m.Notice) -> None:
        if ids and self._kind == "pharos":
            self._emit(m.Notify(ids, notice))

    def _emit(self, effect: Effect) -> None:
        self._out.append(effect)

    @property
    def _current(self) -> Quorum:
        assert self.quorum is not None
        return self.quorum


_HANDLERS: dict[type[Event], Callable[[Lighthouse, Any, float], None]] = {
    Call: Lighthouse._on_call,
    m.CallCancelled: Lighthouse._on_cancelled,
    m.Beat: Lighthouse._on_beat,
    m.StreamOpened: Lighthouse._on_stream_opened,
    m.StreamClosed: Lighthouse._on_stream_closed,
    m.Report: Lighthouse._on_report,
    m.Leave: Lighthouse._on_leave,
    m.TakeOver: Lighthouse._on_take_over,
    m.Evict: Lighthouse._on_evict,
    m.Tick: Lighthouse._on_tick,
}


def _put(ids: set[str], replica_id: str, inside: bool) -> None:
    (ids.add if inside else ids.discard)(replica_id)


def _keep(ids: dict[str, None], replica_id: str, inside: bool) -> None:
    """As _put, where the order counts: a place once taken is kept."""
    if inside:
        ids.setdefault(replica_id)
    else:
        ids.pop(replica_id, None)
