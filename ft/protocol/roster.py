"""The roster: the state of each live id of a replica group, and the sets of ids that rules.py counts. lighthouse.py changes it.

Every change of an id ends in `update_sets`, which puts that one id into its sets: so an event costs the same with 2 groups as with 1,000,
and a quorum O(N).

Design choices:
- When an incarnation is gone, its claim to the state ends as soon as a new id of its name requests a quorum. The new id is none of the
  `previous_holders`, from whose state the job continues, unless it is the same incarnation under a new id ("a:1.1"). An incarnation counts
  as gone if its kernel closed the connection, or if it or an operator said so; silence is no proof.
- An incarnation whose heals fail repeatedly sits out for longer each time, so that it costs the others less and less. A restart resets the
  count, since it may have removed the cause.
- The join timeout runs from the first request of a *previous* member: a newcomer may have waited for a whole step already, while members
  that have just committed that step request a quorum within milliseconds of each other. It runs from the first request if no previous
  member has made one.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile

from ft.protocol import messages as m
from ft.protocol.messages import Call, Kind, Member, Quorum

LOST_KEPT = 4096  # lost ids that are remembered; an older one that comes back is treated as a newcomer
TAKEOVER_ORDER_S = 60.0  # validity of an operator's TakeOver order if takeover_s is "never"
HEALS_FREE = 2  # heals that may fail in a row before the incarnation sits out
HEAL_SIT_OUT_S, MAX_HEAL_SIT_OUT_S = 30.0, 600.0  # first sit-out, doubled with each further failure; its maximum
SIT_OUT_S, MAX_SIT_OUT_S = 10.0, 30.0  # the same after a failed connection between two groups

Pairs = frozenset[frozenset[str]]  # unordered pairs of replica_ids


@dataclass
class Claim:
    """Claim of a member of the previous quorum to the job's state. While claims bind, groups without that state do not continue the job."""

    replica_id: str
    seen_at_s: float  # time of the last message, once the id is no longer live
    ended: bool = False  # True: the incarnation is gone; the claim ends when a new id of its name requests a quorum


@dataclass
class HealState:
    """Heals of one group: the current one, and the count of failures."""

    incarnation: str
    quorum_id: int  # quorum in which it heals; 0: it does not
    since_s: float  # start of that heal
    failed: int = 0  # heals that failed in a row
    until_s: float = 0.0  # time until which it sits out


@dataclass
class Peer:
    """State of one live id."""

    kind: Kind
    seen_at_s: float  # time of its last message
    stream: bool = False  # True: its Watch stream is open
    call: Call | None = None  # quorum request that waits for its answer
    cancelled: bool = False  # True: the RPC of that request has ended; the answer goes down the stream
    called_at_s: float = 0.0  # time of that request
    called: bool = False  # True: it has requested a quorum at least once
    number: int = 0  # number of its newest request
    answered: int = 0  # number of the newest request that a quorum has answered


class Roster:
    """All ids that the lighthouse knows. Bounded: it keeps the last LOST_KEPT lost ids, and the members of the previous quorum, the
    newest one issued."""

    def __init__(self) -> None:
        self.kind: Kind = "pharos"  # kind of the groups that may be members
        self.peers: dict[str, Peer] = {}  # by id
        self.live: dict[str, str] = {}  # name -> its one live id
        self.lost: OrderedDict[str, str] = OrderedDict()  # id -> reason of the loss
        self.refused_as_lost: set[str] = set()  # lost ids that have been refused as LOST
        self.previous = frozenset[str]()  # ids of the newest quorum issued, which precedes the one that is formed next
        self._incarnations: frozenset[str] = frozenset()  # of these ids: a lost member comes back under a new id
        self.left_cleanly: set[str] = set()  # previous members that left on purpose
        self.no_longer_members: dict[str, float] = {}  # live id -> time of the quorum without it
        self.returning: dict[str, float] = {}  # name of a group just refused as LOST -> end of the wait for its return
        # id that requests a quorum with a fingerprint unlike that of members which may yet come back -> the refusal
        self.mismatched: dict[str, str] = {}
        # id that sits out -> end of that time, and the incarnations that it cannot work with
        self.sitting: dict[str, tuple[float, frozenset[str]]] = {}
        self._times_sat_out: dict[str, int] = {}  # name -> number of times that it sat out
        self.blames: dict[str, frozenset[str]] = {}  # id -> incarnations that it reports it cannot work with
        self._pairs: tuple[tuple[str, ...], Pairs] | None = None  # last argument and result of pairs()
        self.heals: OrderedDict[str, HealState] = OrderedDict()  # by name
        self.claims: dict[str, Claim] = {}  # by name
        self.claims_expired = False
        self.takeover_until_s = -math.inf  # end of an operator's TakeOver order
        self.by_last_message: OrderedDict[str, None] = OrderedDict()  # healthy ids, longest silent first
        self.heard_since_s = -math.inf  # since then at least one id has been healthy
        self._healthy: dict[str, None] = {}  # candidates, and ids that become candidates when they request a quorum
        self.healthy_members: dict[str, None] = {}  # healthy members of the previous quorum, with or without a request
        # Healthy ids with a waiting request that do not sit out. This, `present` and `previous_holders`: in the order of the requests.
        self.candidates: OrderedDict[str, Member] = OrderedDict()
        self.present: dict[str, None] = {}  # candidates that are members of the previous quorum
        # candidates with a state whose incarnation was in the previous quorum
        self.previous_holders: dict[str, None] = {}
        self.missing: dict[str, None] = {}  # previous members that are no candidates, have not left, and do not sit out
        self.shrinkers: dict[str, None] = {}  # candidates with shrink_only (Pharos groups: only previous members)

    # ---- input of the rules

    def healthy_count(self) -> int:
        """Returns the number of groups that are or could be candidates, those that are just returning under a new id included."""
        if not self.returning:
            return len(self._healthy)
        return len(self._healthy) + sum(self.live.get(name) not in self._healthy for name in self.returning)

    def waited(self, now_s: float) -> float:
        """Returns the seconds for which the oldest request that counts (see the join timeout above) has waited; 0 if there is none."""
        members = (self.present or self.previous_holders) if self.kind == "pharos" else {}
        first = next(iter(members or self.candidates), None)
        return now_s - self.peers[first].called_at_s if first else 0.0

    def update_sets(self, replica_id: str) -> None:
        """Adds one id to the sets that the rules count, or removes it. Must be called after every change of that id."""
        peer, was_in, sits = self.peers.get(replica_id), replica_id in self.previous, replica_id in self.sitting
        alive = (
            peer is not None and replica_id in self.by_last_message and not sits and replica_id not in self.mismatched
        )
        is_torchft = peer is not None and peer.kind == "torchft"
        counts = alive and peer is not None and peer.kind == self.kind and (peer.called or was_in or is_torchft)
        call = peer.call if peer and alive else None
        if call:
            self.candidates[replica_id] = call.member
        else:
            self.candidates.pop(replica_id, None)
        away = call is not None or sits or replica_id in self.left_cleanly
        may_shrink = was_in or is_torchft  # a newcomer's shrink would exclude the newcomer itself
        for ids, inside in (
            (self._healthy, counts),
            (self.healthy_members, alive and was_in),
            (self.missing, was_in and not away),
            (self.present, call is not None and was_in),
            (self.shrinkers, call is not None and call.member.shrink_only and may_shrink),
            (self.previous_holders, call is not None and self.was_in(replica_id) and not call.member.void),
        ):
            if inside is not (replica_id in ids):
                if inside:
                    ids[replica_id] = None  # appended; an id that is in already keeps its place
                else:
                    del ids[replica_id]

    # ---- one id

    def heard_from(self, replica_id: str, kind: Kind, now_s: float) -> Peer:
        """Records the time of a message of this id, and counts the id as healthy."""
        back = replica_id not in self.by_last_message
        if not self.by_last_message:
            self.heard_since_s = now_s
        peer = self.peers.get(replica_id)
        # a heartbeat as torchft's may come before the stream
        if peer is None or (kind == "pharos" and peer.kind != "pharos"):
            peer, back = Peer(kind, now_s), True
            self.peers[replica_id] = peer
        peer.seen_at_s = now_s
        self.by_last_message[replica_id] = None
        self.by_last_message.move_to_end(replica_id)
        if back:
            self.update_sets(replica_id)
        return peer

    def drop_call(self, replica_id: str) -> None:
        peer = self.peers.get(replica_id)
        self.mismatched.pop(replica_id, None)
        if peer:
            peer.call = None
            if replica_id not in self.by_last_message:
                del self.peers[replica_id]
            self.update_sets(replica_id)

    def forget(self, replica_id: str, why: str) -> None:
        """Removes the id for good."""
        peer, name = self.peers.pop(replica_id, None), m.name_of(replica_id)
        claim = self.claims.get(name)
        if peer and claim and claim.replica_id == replica_id:
            claim.seen_at_s = peer.seen_at_s
        for kept in (self.by_last_message, self.sitting, self.mismatched):
            kept.pop(replica_id, None)
        self._clear_blame(replica_id)
        if self.live.get(name) == replica_id:
            del self.live[name]
        self.lost[replica_id] = why
        while len(self.lost) > LOST_KEPT + len(self.previous):
            self.refused_as_lost.discard(self.lost.popitem(last=False)[0])
        self.update_sets(replica_id)

    def mark_unhealthy(self, replica_id: str) -> None:
        """Removes the id from the healthy ones until its next heartbeat."""
        if peer := self.peers.get(replica_id):
            del self.by_last_message[replica_id]
            self._clear_blame(replica_id)
            if peer.call is None:
                del self.peers[replica_id]
            self.update_sets(replica_id)

    @property
    def has_heard_a_member(self) -> bool:
        """True when a member of the previous quorum has contacted this lighthouse process."""
        return any(self.peers[i].stream or self.peers[i].called for i in self.previous if i in self.peers)

    def was_in(self, replica_id: str) -> bool:
        """True for a member of the previous quorum, under this id or a former one."""
        return replica_id in self.previous or m.incarnation_of(replica_id) in self._incarnations

    # ---- claims to the state

    def claims_bind(self, now_s: float) -> bool:
        """True while no group may continue the job without the state that members of the previous quorum may hold."""
        return bool(self.claims) and not (self.claims_expired or now_s < self.takeover_until_s)

    def may_be_taken_over(self, now_s: float, takeover_s: float | None) -> bool:
        """True when no claim to the state exists, or all claimants were silent for takeover_s while others were heard."""
        return not self.claims_bind(now_s) or self._all_silent(now_s, takeover_s)

    def _all_silent(self, now_s: float, takeover_s: float | None) -> bool:
        """True when all claimants were silent for takeover_s while some id was heard: without any this lighthouse may have been cut off."""
        if takeover_s is None or not self.by_last_message:
            return False
        return now_s - max(self.heard_since_s, *map(self._seen_at_s, self.claims.values())) >= takeover_s

    def _seen_at_s(self, claim: Claim) -> float:
        return self.peers[claim.replica_id].seen_at_s if claim.replica_id in self.peers else claim.seen_at_s

    def update_claim(self, member: Member) -> None:
        """Ends a previous member's claim when it reports that it has no state, or when its incarnation is gone and a new id of its name has
        requested a quorum. Silence does not end a claim: the member may train on, cut off from this lighthouse."""
        if claim := self.claims.get(member.name):
            same = m.incarnation_of(claim.replica_id) == m.incarnation_of(member.replica_id)
            if member.void if same else claim.ended:
                del self.claims[member.name]
            elif same:
                self.claims[member.name] = Claim(member.replica_id, claim.seen_at_s)

    def mark_gone(self, replica_id: str, heard_since_s: float) -> None:
        """Marks an incarnation as gone if it sent something since `heard_since_s`. Its claim ends if a new id of its name waits."""
        name = m.name_of(replica_id)
        claim, successor = self.claims.get(name), self.peers.get(self.live.get(name, ""))
        if claim and claim.replica_id == replica_id and self._seen_at_s(claim) >= heard_since_s:
            claim.ended = True
            if successor and successor.call and self.live[name] != replica_id:
                self.update_claim(successor.call.member)

    def end_claim(self, replica_id: str) -> None:
        """Ends the claim of a member that leaves."""
        claim = self.claims.get(m.name_of(replica_id))
        if claim and m.incarnation_of(claim.replica_id) == m.incarnation_of(replica_id):
            del self.claims[m.name_of(replica_id)]

    def expire_claims(self, now_s: float, takeover_s: float | None) -> None:
        """Expires claims after takeover_s of silence, and prolongs an operator's order while a group waits."""
        if self.claims and self.candidates and not self.previous_holders:
            self.claims_expired = self.claims_expired or self._all_silent(now_s, takeover_s)
        if self.candidates and now_s < self.takeover_until_s:
            self.takeover_until_s = now_s + takeover_order_s(takeover_s)

    # ---- groups that cannot work together

    def on_blame(self, replica_id: str, others: Collection[str]) -> None:
        """Replaces the list of members that this group reports it cannot work with."""
        if not others:
            self._clear_blame(replica_id)
        elif self.blames.get(replica_id) != (named := frozenset(map(m.incarnation_of, others))):
            self.blames[replica_id], self._pairs = named, None

    def _clear_blame(self, replica_id: str) -> None:
        if self.blames.pop(replica_id, None):
            self._pairs = None

    def pairs(self, ids: Collection[str]) -> Pairs:
        """Returns the pairs among these ids that cannot work together. Cached, since it is needed at each event."""
        key = tuple(ids)
        if self._pairs is None or self._pairs[0] != key:
            self._pairs = key, pairs_among(key, self.blames)
        return self._pairs[1]

    def sit_out(self, ids: Collection[str], pairs: Pairs, now_s: float) -> None:
        """Excludes candidates for SIT_OUT_S, doubled each time that the name sits out, and while they cannot work with a present member."""
        unreachable: dict[str, set[str]] = {replica_id: set() for replica_id in ids}
        for pair in pairs:
            for replica_id in pair & unreachable.keys():
                unreachable[replica_id] |= pair - {replica_id}
        for replica_id in sorted(ids):
            name = m.name_of(replica_id)
            times = self._times_sat_out.pop(name, 0)
            self._times_sat_out[name] = times + 1
            until_s = now_s + min(MAX_SIT_OUT_S, SIT_OUT_S * 2 ** min(times, 16))
            self.sitting[replica_id] = until_s, frozenset(map(m.incarnation_of, unreachable[replica_id]))
            self.update_sets(replica_id)
        while len(self._times_sat_out) > LOST_KEPT:
            self._times_sat_out.pop(next(iter(self._times_sat_out)))

    def on_heal(self, member: Member, now_s: float) -> None:
        """Counts a heal of the previous quorum as failed if its member requests the next quorum without a state."""
        heal = self.heals.get(member.name)
        if heal is None:
            return
        if heal.incarnation != m.incarnation_of(member.replica_id) or not member.void:
            del self.heals[member.name]
            return
        if heal.quorum_id:
            heal.quorum_id, heal.failed = 0, heal.failed + 1
            if (count := heal.failed - HEALS_FREE) > 0:
                heal.until_s = now_s + heal_sit_out_s(count)
        if heal.until_s > now_s:
            until_s, unreachable = self.sitting.get(member.replica_id, (0.0, frozenset()))
            self.sitting[member.replica_id] = max(heal.until_s, until_s), unreachable

    def why_it_sits_out(self, replica_id: str) -> str:
        """Returns the reason why an id sits out; empty if it does not."""
        if replica_id not in self.sitting:
            return ""
        if self.sitting[replica_id][1]:
            return "links between it and others failed"
        failed = self.heals[m.name_of(replica_id)].failed
        return f"its last {failed} heals failed: the others continue without it for {heal_sit_out_s(failed - HEALS_FREE):g} s"

    def readmit(self, now_s: float, *, early: bool = False, unhealed: bool = False) -> bool:
        """Readmits ids whose time is over and that can work with all present ones. It ends that time early after failed links with `early`
        or once the unreachable ids are gone, after failed heals with `unhealed` or if no other id is present. Returns True if any was
        readmitted."""
        alive = {m.incarnation_of(i) for i in self.by_last_message}
        present_ids = [i for i in self.by_last_message if i not in self.sitting]
        found = False
        for replica_id, (until_s, unreachable) in list(self.sitting.items()):
            wanted = early or unreachable.isdisjoint(alive) if unreachable else unhealed or not present_ids
            if (wanted or until_s <= now_s) and not pairs_with(replica_id, present_ids, self.blames):
                found = True
                del self.sitting[replica_id]
                self.update_sets(replica_id)
        return found

    # ---- several ids

    def set_quorum(self, quorum: Quorum, now_s: float) -> None:
        """Makes the members of `quorum` the previous members, and gives them the claims to the state."""
        before, self.previous = self.previous, frozenset(quorum.ids)
        if self.previous != before:
            self._incarnations = frozenset(map(m.incarnation_of, quorum.ids))
        self.no_longer_members = {
            i: self.no_longer_members.get(i, now_s)
            for i in sorted({*self.no_longer_members, *before} - self.previous)
            if i in self.peers and self.peers[i].kind == "pharos" and not self.peers[i].call
        }
        self.left_cleanly, self.claims_expired, self.takeover_until_s = set(), False, -math.inf
        self.claims = {}
        for member in quorum.members:
            name = member.name
            self.claims[name] = Claim(member.replica_id, now_s)
            heal = self.heals.pop(name, None)
            if member.state != quorum.reference:
                self.heals[name] = heal = heal or HealState(m.incarnation_of(member.replica_id), 0, now_s)
                heal.quorum_id, heal.since_s = quorum.quorum_id, now_s
        while len(self.heals) > LOST_KEPT + len(quorum.members):
            self.heals.popitem(last=False)
        touched = before | self.previous  # candidates, too: an incarnation may be a previous member under its former id
        for replica_id in [*sorted(touched), *(i for i in self.candidates if i not in touched)]:
            self.update_sets(replica_id)

    def mark_healthy(self, quorum: Quorum, now_s: float) -> None:
        """Counts the members of a quorum from the state file or a report as live, for one heartbeat timeout from now."""
        for member in quorum.members:
            self.lost.pop(member.replica_id, None)
            self.refused_as_lost.discard(member.replica_id)
            self.live.setdefault(member.name, member.replica_id)
            if member.replica_id not in self.peers:
                self.heard_from(member.replica_id, self.kind, now_s)

    # ---- time

    def silent(self, now_s: float, timeout_s: float) -> list[str]:
        """Returns the healthy ids that have sent nothing for timeout_s."""
        return list(
            takewhile(lambda replica_id: now_s - self.peers[replica_id].seen_at_s >= timeout_s, self.by_last_message)
        )

    def find_absent(self, now_s: float, limit_s: float) -> list[str]:
        """Returns live ids that have requested no quorum in the `limit_s` seconds since a quorum was issued without them."""
        peers = self.peers
        self.no_longer_members = {
            i: since_s for i, since_s in self.no_longer_members.items() if i in peers and not peers[i].call
        }
        return [i for i, since_s in self.no_longer_members.items() if now_s - since_s >= limit_s]

    def end_waits(self, now_s: float) -> None:
        """Ends the waits for returning groups whose time is over, and readmits ids that have sat out."""
        self.returning = {name: until_s for name, until_s in self.returning.items() if until_s > now_s}
        if self.sitting:
            self.readmit(now_s)

    def extend_deadlines(self, gap_s: float, now_s: float) -> None:
        """Moves the start of all waits by `gap_s`, for which this lighthouse was stopped."""
        for peer in self.peers.values():
            peer.seen_at_s, peer.called_at_s = min(peer.seen_at_s + gap_s, now_s), min(peer.called_at_s + gap_s, now_s)
        for claim in self.claims.values():
            claim.seen_at_s = min(claim.seen_at_s + gap_s, now_s)
        for heal in self.heals.values():
            heal.since_s = min(heal.since_s + gap_s, now_s)
        self.heard_since_s = min(self.heard_since_s + gap_s, now_s)
        self.returning = {name: until_s + gap_s for name, until_s in self.returning.items()}
        self.no_longer_members = {i: min(since_s + gap_s, now_s) for i, since_s in self.no_longer_members.items()}


def pairs_among(ids: Collection[str], blames: Mapping[str, Collection[str]]) -> Pairs:
    """Returns the pairs among `ids` in which at least one blames the other. `blames`: id -> incarnations that it blames."""
    incarnations = {m.incarnation_of(replica_id): replica_id for replica_id in ids} if blames else {}
    there = frozenset(ids)
    named = ((i, incarnations[other]) for i in blames if i in there for other in blames[i] if other in incarnations)
    return frozenset(frozenset(pair) for pair in named if pair[0] != pair[1])


def pairs_with(replica_id: str, ids: Iterable[str], blames: Mapping[str, Collection[str]]) -> Pairs:
    """Returns only the pairs that contain `replica_id`, which costs far less than all pairs."""
    me, named = m.incarnation_of(replica_id), blames.get(replica_id, ())
    others = (i for i in ids if i != replica_id and (m.incarnation_of(i) in named or me in blames.get(i, ())))
    return frozenset(frozenset((replica_id, i)) for i in others)


def takeover_order_s(takeover_s: float | None) -> float:
    """Returns the validity of an operator's TakeOver order while no group waits, in seconds."""
    return takeover_s or TAKEOVER_ORDER_S


def heal_sit_out_s(count: int) -> float:
    return min(MAX_HEAL_SIT_OUT_S, HEAL_SIT_OUT_S * 2 ** min(count - 1, 16))
