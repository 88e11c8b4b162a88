"""The roster of live ids: the facts about each, and the sets of ids that the rules count. Written by lighthouse.py.

Every change of an id ends in `update_sets`, which puts that one id into its sets: an event costs the same with 2 groups and with 1,000, and
a quorum O(N).

Where the rules leave a choice:
- A name's successor ends the claim of a member whose process is gone, but is not one of `previous_holders`, from
  whose state the job continues; the same process under a new id ("a:1.1") is. A process is known to be gone if its kernel closed its
  connection, or if it or an operator announced it: silence proves nothing.
- A process whose heals fail repeatedly sits out for longer each time, so that its cost to the others shrinks, whatever the cause. A restart
  clears its count, since that may be the cure.
- The join time runs from the call of the first *previous* member, as a newcomer may have waited for a whole step, and members that have
  just committed it call within milliseconds of each other; from the first call only where no member has called.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from ft.protocol import messages as m
from ft.protocol.messages import Call, Kind, Member, Quorum

LOST_KEPT = 4096  # lost ids that are kept; an older one that comes back is treated as a newcomer
TAKEOVER_ORDER_S = 60.0  # validity of an operator's order where takeover_s is "never"
HEALS_FREE = 2  # that may fail in a row
REST_S, MAX_REST_S = 30.0, 600.0  # that a process sits out after further failures: doubled each time, up to
SIT_OUT_S, MAX_SIT_OUT_S = 10.0, 30.0  # the same after a cut link

Pairs = frozenset[frozenset[str]]  # of replica_ids


@dataclass
class Claim:
    """A last-quorum member's claim to its state: while one may come back, no others continue without all those members."""

    replica_id: str
    seen_s: float  # last, for one that is no longer alive
    ended: bool = False  # its process is known to be gone: the next id of its name is its successor


@dataclass
class HealState:
    """State of a group that fetches a state, or could not."""

    process: str
    quorum_id: int  # in which it fetches; 0: in none
    since_s: float  # that is
    failed: int = 0  # in a row
    until_s: float = 0.0  # it sits out


@dataclass
class Peer:
    """Facts about one live id."""

    kind: Kind
    seen_s: float
    stream: bool = False
    call: Call | None = None  # waiting for a quorum
    cancelled: bool = False  # that call has ended: its answer goes over the stream
    called_s: float = 0.0
    called: bool = False  # at least once
    number: int = 0  # of its newest call
    answered: int = 0  # of the newest that a quorum was issued for


class Roster:
    """State of all ids that the lighthouse knows. Bounded: it keeps the last LOST_KEPT lost ids, and the members of the last quorum."""

    def __init__(self) -> None:
        self.kind: Kind = "pharos"  # of the groups that may be members
        self.peers: dict[str, Peer] = {}
        self.live: dict[str, str] = {}  # name -> its one live id
        self.lost: OrderedDict[str, str] = OrderedDict()  # id -> why
        self.notified: set[str] = set()  # of those, the ones that have been notified
        self.previous: frozenset[str] = frozenset()  # ids of the last quorum
        self._processes: frozenset[str] = frozenset()  # of those: one that was lost comes back under another id
        self.left_cleanly: set[str] = set()  # of the previous, those that left on purpose
        self.left_out: dict[str, float] = {}  # live ids that were in a quorum -> since when the others go on without
        self.returning: dict[str, float] = {}  # name of a group that was just told that it is lost -> awaited until
        # callers of another fingerprint than members that may yet come back -> the difference
        self.mismatched: dict[str, str] = {}
        self.sitting: dict[str, tuple[float, frozenset[str]]] = {}  # id that sits out -> until, at least; parted from
        self._sat: dict[str, int] = {}  # name -> times that it sat out
        self.blames: dict[str, frozenset[str]] = {}  # id -> the processes that it cannot work with, as it says
        self._pairs: tuple[tuple[str, ...], Pairs] | None = None  # the ids that were asked about last, and the answer
        self.heals: OrderedDict[str, HealState] = OrderedDict()  # by name
        self.claims: dict[str, Claim] = {}  # by name
        self.claims_expired = False
        self.takeover_until_s = -math.inf  # others may take over, by an operator's order
        self.order: OrderedDict[str, None] = OrderedDict()  # healthy ids, longest silent first
        self._healthy: dict[str, None] = {}  # could be candidates, or are
        self.reachable: dict[str, None] = {}  # healthy members of the previous quorum, whether they have called or not
        # Healthy callers, without those that sit out. This and the next two: in the order of their calls.
        self.candidates: OrderedDict[str, Member] = OrderedDict()
        self.present: dict[str, None] = {}  # of those, members of the previous quorum
        # with a state, and in the previous quorum, under this id or a former one
        self.previous_holders: dict[str, None] = {}
        self.missing: dict[str, None] = {}  # previous members that are neither candidates nor left nor sitting out
        self.shrinkers: dict[str, None] = {}  # candidates that ask for shrink_only; of ours, previous members

    # ---- input of the rules

    def healthy(self) -> int:
        """Number of groups that could be candidates, with those that are just returning: each counts under its new id."""
        if not self.returning:
            return len(self._healthy)
        return len(self._healthy) + sum(self.live.get(name) not in self._healthy for name in self.returning)

    def waited(self, now_s: float) -> float:
        """Seconds since the first call; 0 where there is none."""
        members = (self.present or self.previous_holders) if self.kind == "pharos" else {}
        first = next(iter(members or self.candidates), None)
        return now_s - self.peers[first].called_s if first else 0.0

    def update_sets(self, replica_id: str) -> None:
        """Puts one id into the sets that the rules count. Called after every change of it."""
        peer, was_in, sits = self.peers.get(replica_id), replica_id in self.previous, replica_id in self.sitting
        alive = peer is not None and replica_id in self.order and not sits and replica_id not in self.mismatched
        theirs = peer is not None and peer.kind == "torchft"
        counts = alive and peer is not None and peer.kind == self.kind and (peer.called or was_in or theirs)
        call = peer.call if peer and alive else None
        if call:
            self.candidates[replica_id] = call.member
        else:
            self.candidates.pop(replica_id, None)
        away = call is not None or sits or replica_id in self.left_cleanly
        may_shrink = was_in or theirs  # a newcomer would bar itself
        for ids, inside in (
            (self._healthy, counts),
            (self.reachable, alive and was_in),
            (self.missing, was_in and not away),
            (self.present, call is not None and was_in),
            (self.shrinkers, call is not None and call.member.shrink_only and may_shrink),
            (self.previous_holders, call is not None and self.was_in(replica_id) and not call.member.void),
        ):
            if inside and replica_id not in ids:
                ids[replica_id] = None  # at the end; one that is in keeps its place
            elif not inside and replica_id in ids:
                del ids[replica_id]

    # ---- one id

    def heard_from(self, replica_id: str, kind: Kind, now_s: float) -> Peer:
        """Notes a sign of life."""
        back = replica_id not in self.order
        peer = self.peers.get(replica_id)
        if peer is None:
            peer = self.peers[replica_id] = Peer(kind, now_s)
        peer.seen_s = now_s
        self.order[replica_id] = None
        self.order.move_to_end(replica_id)
        if back:
            self.update_sets(replica_id)
        return peer

    def drop_call(self, replica_id: str) -> None:
        peer = self.peers.get(replica_id)
        self.mismatched.pop(replica_id, None)
        if peer:
            peer.call = None
            if replica_id not in self.order:
                del self.peers[replica_id]
            self.update_sets(replica_id)

    def forget(self, replica_id: str, why: str) -> None:
        """Removes the id for good."""
        peer, name = self.peers.pop(replica_id, None), m.name_of(replica_id)
        claim = self.claims.get(name)
        if peer and claim and claim.replica_id == replica_id:
            claim.seen_s = peer.seen_s
        for kept in (self.order, self.sitting, self.mismatched):
            kept.pop(replica_id, None)
        self._pardon(replica_id)
        if self.live.get(name) == replica_id:
            del self.live[name]
        self.lost[replica_id] = why
        while len(self.lost) > LOST_KEPT + len(self.previous):
            self.notified.discard(self.lost.popitem(last=False)[0])
        self.update_sets(replica_id)

    def mark_unhealthy(self, replica_id: str) -> None:
        """Removes the id from the healthy ones until it beats again."""
        if peer := self.peers.get(replica_id):
            del self.order[replica_id]
            self._pardon(replica_id)
            if peer.call is None:
                del self.peers[replica_id]
            self.update_sets(replica_id)

    @property
    def has_members(self) -> bool:
        """True when a member of the previous quorum has been heard of since this lighthouse was started."""
        return any(self.peers[i].stream or self.peers[i].called for i in self.previous if i in self.peers)

    def was_in(self, replica_id: str) -> bool:
        """True for a member of the previous quorum, under this id or a former one."""
        return replica_id in self.previous or m.process_of(replica_id) in self._processes

    # ---- claims to the state

    def claims_bind(self, now_s: float) -> bool:
        """True while members of the previous quorum that may hold its state keep others from going on without it."""
        return bool(self.claims) and not (self.claims_expired or now_s < self.takeover_until_s)

    def is_free(self, now_s: float, takeover_s: float | None) -> bool:
        """True when no claim to the state exists, or all claimants were silent for takeover_s."""
        return not self.claims_bind(now_s) or self._all_silent(now_s, takeover_s)

    def _all_silent(self, now_s: float, takeover_s: float | None) -> bool:
        return takeover_s is not None and now_s - max(map(self._seen_s, self.claims.values())) >= takeover_s

    def _seen_s(self, claim: Claim) -> float:
        return self.peers[claim.replica_id].seen_s if claim.replica_id in self.peers else claim.seen_s

    def update_claim(self, member: Member) -> None:
        """Ends a previous member's claim when it reports that it has no state, or when its name has a successor and its process is gone:
        one that is only silent may train on, cut off from this lighthouse."""
        if claim := self.claims.get(member.name):
            same = m.process_of(claim.replica_id) == m.process_of(member.replica_id)
            if member.void if same else claim.ended:
                del self.claims[member.name]
            elif same:
                self.claims[member.name] = Claim(member.replica_id, claim.seen_s)

    def end_claim(self, replica_id: str, heard_since_s: float) -> None:
        """Marks the process of that member as gone, if it was heard of until then; with a successor that has called, its claim ends."""
        name = m.name_of(replica_id)
        claim, successor = self.claims.get(name), self.peers.get(self.live.get(name, ""))
        if claim and claim.replica_id == replica_id and self._seen_s(claim) >= heard_since_s:
            claim.ended = True
            if successor and successor.call and self.live[name] != replica_id:
                self.update_claim(successor.call.member)

    def drop_claim(self, replica_id: str) -> None:
        """Ends the claim of a member that leaves."""
        claim = self.claims.get(m.name_of(replica_id))
        if claim and m.process_of(claim.replica_id) == m.process_of(replica_id):
            del self.claims[m.name_of(replica_id)]

    def expire_claims(self, now_s: float, takeover_s: float | None) -> None:
        """Expires claims after takeover_s of silence, and an operator's order takeover_s after the last wait."""
        if self.claims and self.candidates and not self.previous_holders:
            self.claims_expired = self.claims_expired or self._all_silent(now_s, takeover_s)
        if self.candidates and now_s < self.takeover_until_s:
            self.takeover_until_s = now_s + takeover_order_s(takeover_s)

    # ---- those that cannot work together

    def on_blame(self, replica_id: str, others: Collection[str]) -> None:
        """Replaces the members that the group cannot work with."""
        if not others:
            self._pardon(replica_id)
        elif self.blames.get(replica_id) != (named := frozenset(map(m.process_of, others))):
            self.blames[replica_id], self._pairs = named, None

    def _pardon(self, replica_id: str) -> None:
        if self.blames.pop(replica_id, None):
            self._pairs = None

    def pairs(self, ids: Collection[str]) -> Pairs:
        """Returns the pairs among these that cannot work together; counted once, not at each event."""
        asked = tuple(ids)
        if self._pairs is None or self._pairs[0] != asked:
            self._pairs = asked, pairs_among(asked, self.blames)
        return self._pairs[1]

    def sit_out(self, ids: Collection[str], cut: Pairs, now_s: float) -> None:
        """Excludes candidates for SIT_OUT_S, doubled each time that the name sits out, and while they cannot work with a present member."""
        parted: dict[str, set[str]] = {replica_id: set() for replica_id in ids}
        for pair in cut:
            for replica_id in pair & parted.keys():
                parted[replica_id] |= pair - {replica_id}
        for replica_id in sorted(ids):
            name = m.name_of(replica_id)
            times = self._sat.pop(name, 0)
            self._sat[name] = times + 1
            until_s = now_s + min(MAX_SIT_OUT_S, SIT_OUT_S * 2 ** min(times, 16))
            self.sitting[replica_id] = until_s, frozenset(map(m.process_of, parted[replica_id]))
            self.update_sets(replica_id)
        while len(self._sat) > LOST_KEPT:
            self._sat.pop(next(iter(self._sat)))

    def on_heal(self, member: Member, now_s: float) -> None:
        """Counts a heal of the last quorum as failed if its member calls again without a state."""
        heal = self.heals.get(member.name)
        if heal is None:
            return
        if heal.process != m.process_of(member.replica_id) or not member.void:
            del self.heals[member.name]
            return
        if heal.quorum_id:
            heal.quorum_id, heal.failed = 0, heal.failed + 1
            if (times := heal.failed - HEALS_FREE) > 0:
                heal.until_s = now_s + rest_s(times)
        if heal.until_s > now_s:
            until_s, parted = self.sitting.get(member.replica_id, (0.0, frozenset()))
            self.sitting[member.replica_id] = max(heal.until_s, until_s), parted

    def why_it_sits_out(self, replica_id: str) -> str:
        """The reason for which an id sits out; empty: it does not."""
        if replica_id not in self.sitting:
            return ""
        if self.sitting[replica_id][1]:
            return "links between it and others failed"
        failed = self.heals[m.name_of(replica_id)].failed
        return f"its last {failed} heals failed, so the others go on without it for {rest_s(failed - HEALS_FREE):g} s"

    def let_in(self, now_s: float, *, early: bool = False, unhealed: bool = False) -> bool:
        """Lets in members that sit out and can work with all that are present, when their time is over. Before that: those whose links
        failed, if `early`, or if the members that they could not reach are gone; those whose heals failed, if `unhealed`, or if no other
        member is present. True: there is one."""
        here = {m.process_of(i) for i in self.order}
        there = [i for i in self.order if i not in self.sitting]
        found = False
        for replica_id, (until_s, parted) in list(self.sitting.items()):
            wanted = early or parted.isdisjoint(here) if parted else unhealed or not there
            if (wanted or until_s <= now_s) and not pairs_with(replica_id, there, self.blames):
                found = True
                del self.sitting[replica_id]
                self.update_sets(replica_id)
        return found

    # ---- several of them

    def set_quorum(self, quorum: Quorum, now_s: float) -> None:
        """Makes its members the previous ones, with the claims to the state."""
        before, self.previous = self.previous, frozenset(quorum.ids)
        if self.previous != before:
            self._processes = frozenset(map(m.process_of, quorum.ids))
        self.left_out = {
            i: self.left_out.get(i, now_s)
            for i in sorted({*self.left_out, *before} - self.previous)
            if i in self.peers and self.peers[i].kind == "pharos" and not self.peers[i].call
        }
        self.left_cleanly, self.claims_expired, self.takeover_until_s = set(), False, -math.inf
        for member in quorum.members:
            heal = self.heals.pop(member.name, None)
            if member.state != quorum.reference:
                self.heals[member.name] = heal = heal or HealState(m.process_of(member.replica_id), 0, now_s)
                heal.quorum_id, heal.since_s = quorum.quorum_id, now_s
        while len(self.heals) > LOST_KEPT + len(quorum.members):
            self.heals.popitem(last=False)
        self.claims = {member.name: Claim(member.replica_id, now_s) for member in quorum.members}
        touched = before | self.previous  # and a caller under a new id may have been in it under the old one
        for replica_id in [*sorted(touched), *(i for i in self.candidates if i not in touched)]:
            self.update_sets(replica_id)

    def mark_healthy(self, quorum: Quorum, now_s: float) -> None:
        """Counts the members of a quorum from the state file or a report as alive, for a heartbeat timeout from now."""
        for member in quorum.members:
            self.lost.pop(member.replica_id, None)
            self.notified.discard(member.replica_id)
            self.live.setdefault(member.name, member.replica_id)
            if member.replica_id not in self.peers:
                self.heard_from(member.replica_id, self.kind, now_s)

    # ---- time

    def silent(self, now_s: float, timeout_s: float) -> list[str]:
        """Healthy ids that were silent for timeout_s."""
        return list(takewhile(lambda replica_id: now_s - self.peers[replica_id].seen_s >= timeout_s, self.order))

    def stalled(self, now_s: float, limit_s: float) -> list[str]:
        """Ids whose server beats, and that have not called in the limit_s since the others went on without them."""
        peers = self.peers
        self.left_out = {i: since_s for i, since_s in self.left_out.items() if i in peers and not peers[i].call}
        return [i for i, since_s in self.left_out.items() if now_s - since_s >= limit_s]

    def end_waits(self, now_s: float) -> None:
        """Ends waits for returning groups, and times of sitting out, that are over."""
        self.returning = {name: until_s for name, until_s in self.returning.items() if until_s > now_s}
        if self.sitting:
            self.let_in(now_s)

    def extend_deadlines(self, gap_s: float, now_s: float) -> None:
        """Shifts all silences by `gap_s`, in which this lighthouse was stopped."""
        for peer in self.peers.values():
            peer.seen_s, peer.called_s = min(peer.seen_s + gap_s, now_s), min(peer.called_s + gap_s, now_s)
        for claim in self.claims.values():
            claim.seen_s = min(claim.seen_s + gap_s, now_s)


def pairs_among(ids: Collection[str], blames: Mapping[str, Collection[str]]) -> Pairs:
    """Returns the pairs among `ids` of which one says that it cannot work with the other. `blames`: by id, the processes it named."""
    processes = {m.process_of(replica_id): replica_id for replica_id in ids} if blames else {}
    there = frozenset(ids)
    named = ((i, processes[other]) for i in blames if i in there for other in blames[i] if other in processes)
    return frozenset(frozenset(pair) for pair in named if pair[0] != pair[1])


def pairs_with(replica_id: str, ids: Iterable[str], blames: Mapping[str, Collection[str]]) -> Pairs:
    """Pairs that `replica_id` is in: of one alone that costs far less than of all."""
    me, named = m.process_of(replica_id), blames.get(replica_id, ())
    cut = (i for i in ids if i != replica_id and (m.process_of(i) in named or me in blames.get(i, ())))
    return frozenset(frozenset((replica_id, i)) for i in cut)


def takeover_order_s(takeover_s: float | None) -> float:
    """Validity of an operator's order, in seconds, where no group waits for it."""
    return takeover_s or TAKEOVER_ORDER_S


def rest_s(times: int) -> float:
    return min(MAX_REST_S, REST_S * 2 ** min(times - 1, 16))
