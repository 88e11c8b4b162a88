"""The quorum rules: the members that continue together, their reference state, and the claims that are refused. `decide` reads the roster
and changes nothing; the others are pure functions. Members that cannot work together report it, and lighthouse.py keeps one of each pair
out of the quorum; one report is enough.

Where the rules leave a choice:
- The reference state is the furthest that a member of the *previous* quorum holds. A group from elsewhere with a further one (of a job that
  was taken over) heals. So the line of quorums is the history, and a quorum has the state that it chose.
- "Highest committed step" is the highest *settled* one: a group may have committed a step alone, and then die; the others go on from the
  step before, which all of them hold.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nsmallest

from ft.protocol import messages as m
from ft.protocol.messages import Call, Fingerprint, Member, Refusal, State
from ft.protocol.roster import Pairs, Roster

MAX_STEP, MAX_WORLD_SIZE, MAX_TEXT = 1 << 40, 1 << 20, 512
Problem = tuple[Refusal, str] | None  # why a call is refused


@dataclass(slots=True)  # not frozen: there is one for every event, and that would be a fifth of its cost
class Decision:
    members: tuple[Member, ...] = ()  # empty: wait
    reference: State = (0, 0, "")
    reason: str = ""
    must_restore: tuple[str, ...] = ()  # these have to load a checkpoint before there can be a quorum


def reference_state(members: Sequence[Member]) -> State | None:
    """The most up-to-date state among `members`: the highest (step, commit_quorum_id), then commit_id. None: all are void."""
    return max((m.state for m in members if not m.void), default=None)


def decide(roster: Roster, now_s: float, *, settled: int, min_replicas: int, join_timeout_s: float) -> Decision:
    """The members of the next quorum, or the reason for which there is none yet. For torchft's members only the first rules apply, and
    min_replicas counts before a shrink; for Pharos members after it, so a shrink that leaves too few is ignored. `settled`: no
    state below it goes on, unless restored on purpose."""
    ours, candidates, present, healthy = roster.kind == "pharos", roster.candidates, roster.present, roster.healthy()
    shrink = bool(roster.shrinkers and roster.previous) and not (ours and len(roster.reachable) < min_replicas)
    count = len(present) if shrink and (ours or not present) else len(candidates)
    fast = bool(present) and not roster.missing
    here = f"{len(candidates)} of {healthy} healthy groups have called"
    if count == 0:
        alone = shrink and bool(candidates)
        return Decision(reason=here + "; a shrink is asked for, and none of the previous members has called" * alone)
    if count < min_replicas:
        return Decision(reason=f"{here}; {count} would take part, min_replicas is {min_replicas}")
    if not fast and 2 * len(candidates) <= healthy:
        return Decision(reason=f"{here}; more than half is needed, lest there be two quorums")
    if not fast and len(candidates) < healthy and (waited_s := roster.waited(now_s)) < join_timeout_s:
        waited = f"{waited_s:.1f} of {join_timeout_s:g} s"
        return Decision(reason=f"{here}; the first has waited {waited} for the others")
    if ours and not roster.previous_holders and roster.claims_bind(now_s):
        may_come = f"of which {len(roster.claims)} may come back"
        return Decision(reason=f"{here}; none was in the previous quorum with a state, {may_come}")
    members = tuple(candidates[replica_id] for replica_id in sorted(present if shrink else candidates))
    why = "all previous members have called" if fast else f"{here}, which is enough"
    if not ours:
        return Decision(members, (max(member.step for member in members), 0, ""), why)
    reference = reference_state([x for x in members if x.replica_id in roster.previous_holders] or members)
    if reference and reference[0] >= settled:
        return Decision(members, reference, why)
    if reference and any(member.restored is not None for member in members if member.state == reference):
        return Decision(members, reference, f"{why}, restored from checkpoint {reference[0]}")
    newest = f"the most up-to-date state here is of step {reference[0]}" if reference else "nobody holds a whole state"
    unrestored = tuple(member.replica_id for member in members if member.restored is None or member.void)
    reason = f"{newest}, step {settled} was settled: load a checkpoint"
    return Decision(reason=reason, must_restore=unrestored)


def validate_request(event: Call) -> Problem:
    """Refuses impossible claims. torchft's members may leave world size and addresses out."""
    member = event.member
    texts = (member.replica_id, member.address, member.store_address, member.commit_id)
    all_texts = "".join(texts)  # as a rule shorter in all than one may be
    too_long = len(all_texts) > MAX_TEXT and max(map(len, texts)) > MAX_TEXT
    if too_long or not all_texts.isprintable() or not member.replica_id:
        return ("INVALID_ARGUMENT", f"an id or address is empty, not printable or longer than {MAX_TEXT}")
    if not m.VOID <= member.step <= MAX_STEP or not 0 <= member.commit_quorum_id <= MAX_STEP or event.known > MAX_STEP:
        return ("INVALID_ARGUMENT", f"step {member.step} of quorum {member.commit_quorum_id}: legal is 0 to {MAX_STEP}")
    if not (event.kind == "torchft" or member.world_size >= 1) or member.world_size > MAX_WORLD_SIZE:
        return ("INVALID_ARGUMENT", f"world size {member.world_size}: legal is 1 to {MAX_WORLD_SIZE}")
    return None


def fingerprint_mismatches(fingerprints: Sequence[Fingerprint], holders: Sequence[int] = ()) -> dict[int, list[str]]:
    """Returns members, by rank, whose fingerprint is not the job's, with the differing keys. The job's is that of most `holders` of its
    state (of all members, where there are none); of equally many, that of the lowest rank."""
    votes = Counter(fingerprints[rank] for rank in sorted(holders) or range(len(fingerprints)))
    job = dict(votes.most_common(1)[0][0])
    differ = {rank: _differ(fingerprint, job) for rank, fingerprint in enumerate(fingerprints)}
    return {rank: what for rank, what in differ.items() if what}


def _differ(fingerprint: Fingerprint, job: Mapping[str, str]) -> list[str]:
    return [what for what, digest in fingerprint if what in job and job[what] != digest]


def fingerprint_problem(event: Call, ours: Fingerprint) -> Problem:
    """Refuses a caller whose job differs from ours (its layout, dtypes, buckets ...)."""
    differ = _differ(event.fingerprint, dict(ours)) if event.fingerprint else []
    if not differ:
        return None
    return ("FAILED_PRECONDITION", f"{event.member.replica_id} has another {' and '.join(differ)} than the job")


def choose_sitting_out(decision: Decision, pairs: Pairs, least: int) -> frozenset[str]:
    """The fewest members that are to sit out, so that the others can work together. Empty: fewer than `least`, or no state, would stay."""
    holders = frozenset(member.replica_id for member in decision.members if member.state == decision.reference)
    out = smallest_cover(pairs, holders)
    if holders <= out:  # more may have to sit out that one of them stays
        out = frozenset().union(*pairs) - holders
        if any(pair.isdisjoint(out) for pair in pairs):
            return frozenset()
    return out if len(decision.members) - len(out) >= least and holders - out else frozenset()


@lru_cache(4)  # asked for at each event while members wait for their links
def describe_pairs(pairs: Pairs) -> str:
    """Names the first few of the cut links."""
    named = nsmallest(3, (" and ".join(sorted(pair)) for pair in pairs))
    more = f", and {len(pairs) - 3} more pairs" if len(pairs) > 3 else ""
    return f"{'; '.join(named)}{more} cannot work together: no connection comes about, or they are unlike each other"


@lru_cache(4)
def smallest_cover(pairs: Pairs, keep: frozenset[str] = frozenset()) -> frozenset[str]:
    """The fewest ids such that each pair has one of them: exact up to three, then the most blamed first. Of equal ones it takes those
    outside `keep`, then those blamed more often, then the last by name."""
    others: dict[str, set[str]] = defaultdict(set)
    for one, other in pairs:
        others[one].add(other)
        others[other].add(one)
    names = sorted(others)
    last_first = sorted(others, reverse=True)
    place = {i: k for k, i in enumerate(sorted(last_first, key=lambda i: (i in keep, -len(others[i]))))}
    for size in (1, 2, 3):
        if covers := set(_covers(pairs, frozenset(), size)):
            return min(covers, key=lambda cover: sorted(map(place.__getitem__, cover)))
    left = {i: len(others[i]) for i in names}  # pairs that are not covered yet
    cover: set[str] = set()
    while left[worst := max(names, key=left.__getitem__)]:
        cover.add(worst)
        left[worst] = 0
        for other in others[worst] - cover:
            left[other] -= 1
    return frozenset(cover)


def _covers(pairs: Pairs, chosen: frozenset[str], most: int) -> Iterator[frozenset[str]]:
    """With `chosen`, and at most so many ids in all: the smallest are all among them, for each has an id of the first pair that is left."""
    left = next((pair for pair in pairs if pair.isdisjoint(chosen)), None)
    if left is None:
        yield chosen
    elif len(chosen) < most:
        for replica_id in left:
            yield from _covers(pairs, chosen | {replica_id}, most)
