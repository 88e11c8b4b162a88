"""The quorum rules: which members continue together, from which reference state, and which quorum requests are refused. `decide` reads the
roster and changes nothing; the other functions are pure. Replica groups that cannot work together report each other (one report is enough),
and lighthouse.py excludes one of each such pair from the quorum.

Design choices:
- The reference state is the most recent one that a member of the *previous* quorum holds, which is the newest that was issued. A group
  that was not in it heals, even if its step is higher (its job was taken over). So the sequence of quorums alone defines the history of
  the job.
- The quorum must not go back below the highest *settled* step, which may be lower than the highest committed one: a group may have
  committed a step alone and then died; the others continue from the step before, which all of them hold.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import nsmallest

from ft.protocol import messages as m
from ft.protocol.messages import Call, Fingerprint, Member, RefusalCode, State
from ft.protocol.roster import Pairs, Roster

MAX_STEP, MAX_WORLD_SIZE, MAX_TEXT = 1 << 40, 1 << 20, 512  # MAX_TEXT: characters of an id or address
Refusal = tuple[RefusalCode, str] | None  # code and reason of a refusal; None: the request is accepted


@dataclass(slots=True)  # not frozen: one is made at each event, and frozen=True would take a fifth of the event's time
class Decision:
    """The result of `decide`: the members of the next quorum, or why there is none yet."""

    members: tuple[Member, ...] = ()  # of the next quorum; empty: no quorum yet
    reference: State = (0, 0, "")
    reason: str = ""
    must_restore: tuple[str, ...] = ()  # replica_ids that must load a checkpoint before a quorum can be formed


def reference_state(members: Sequence[Member]) -> State | None:
    """Returns the most recent state among `members`: the highest (step, commit_quorum_id), then commit_id; None when all are void."""
    return max((member.state for member in members if not member.void), default=None)


def decide(roster: Roster, now_s: float, *, settled: int, min_replicas: int, join_timeout_s: float) -> Decision:
    """Returns the members of the next quorum, or the reason why there is none yet. `settled`: the job continues from no state below this
    step, unless it was restored on purpose. A shrink (shrink_only) limits the quorum to previous members. With torchft's members,
    min_replicas counts all candidates, also those that the shrink excludes; with Pharos members, a shrink that leaves fewer is ignored."""
    is_pharos, candidates, present = roster.kind == "pharos", roster.candidates, roster.present
    healthy = roster.healthy_count()
    shrink = bool(roster.shrinkers and roster.previous)
    # a shrink must neither leave too few groups nor exclude all holders, which may have returned under new ids
    if shrink and is_pharos:
        holders = roster.previous_holders.keys()
        shrink = len(roster.healthy_members) >= min_replicas and not (holders and holders.isdisjoint(present))
    count = len(present) if shrink and (is_pharos or not present) else len(candidates)
    all_previous_requested = bool(present) and not roster.missing
    requests = f"{len(candidates)} of {healthy} healthy groups have requested a quorum"
    if count == 0:
        shrink_reason = "; they request a shrink, but no previous member has requested a quorum"
        return Decision(reason=requests + shrink_reason if shrink and candidates else requests)
    if count < min_replicas:
        return Decision(reason=f"{requests}; {count} would take part, min_replicas is {min_replicas}")
    if not all_previous_requested and 2 * len(candidates) <= healthy:
        return Decision(reason=f"{requests}; more than half is needed, so that no second quorum can form")
    if not all_previous_requested and len(candidates) < healthy and (waited_s := roster.waited(now_s)) < join_timeout_s:
        waited = f"{waited_s:.1f} of {join_timeout_s:g} s"
        return Decision(reason=f"{requests}; the first request has waited {waited} for the others")
    if is_pharos and not roster.previous_holders and roster.claims_bind(now_s):
        may_come = f"but {len(roster.claims)} of its members may come back"
        return Decision(reason=f"{requests}; none of them has a state of the previous quorum, {may_come}")
    members = tuple(candidates[replica_id] for replica_id in sorted(present if shrink else candidates))
    why = "all previous members have requested a quorum" if all_previous_requested else f"{requests}, which is enough"
    if not is_pharos:
        return Decision(members, (max(member.step for member in members), 0, ""), why)
    reference = reference_state([x for x in members if x.replica_id in roster.previous_holders] or members)
    if reference and reference[0] >= settled:
        return Decision(members, reference, why)
    if reference and any(member.restored is not None for member in members if member.state == reference):
        return Decision(members, reference, f"{why}, restored from checkpoint {m.describe_step(reference[0])}")
    newest = "no group holds a complete state,"
    if reference:
        newest = f"the most recent state here is of step {m.describe_step(reference[0])},"
    unrestored = tuple(member.replica_id for member in members if member.restored is None or member.void)
    reason = f"{newest} but step {m.describe_step(settled)} was settled: load a checkpoint" if settled else m.JOB_BEGINS
    return Decision(reason=reason, must_restore=unrestored)


def request_problem(event: Call) -> str:
    """Returns the reason why a quorum request has impossible values; "": it has none. Servers check it before a machine is fed. torchft's
    members may omit world size and addresses."""
    member = event.member
    texts = (member.replica_id, member.address, member.store_address, member.commit_id, event.epoch)
    all_texts = "".join(texts)  # one comparison of lengths: together they are usually shorter than MAX_TEXT
    too_long = len(all_texts) > MAX_TEXT and max(map(len, texts)) > MAX_TEXT
    if too_long or not all_texts.isprintable() or not member.replica_id:
        return f"an id is empty, or an id or address is not printable or longer than {MAX_TEXT} characters"
    if not m.VOID <= member.step <= MAX_STEP or not 0 <= member.commit_quorum_id <= MAX_STEP or event.known > MAX_STEP:
        named = f"step {member.step} of quorum {member.commit_quorum_id}, after quorum {event.known}"
        return f"{named}: must be 0 to {MAX_STEP}"
    if not (event.kind == "torchft" or member.world_size >= 1) or member.world_size > MAX_WORLD_SIZE:
        return f"world size {member.world_size}: must be 1 to {MAX_WORLD_SIZE}"
    return ""


def fingerprint_mismatches(fingerprints: Sequence[Fingerprint], holders: Sequence[int] = ()) -> dict[int, list[str]]:
    """Returns the replica ranks whose fingerprint is not the job's, each with the keys that differ. The job's fingerprint is the one that
    most `holders` of its state have (most members, where there are no holders); in a tie, that of the lowest rank."""
    votes = Counter(fingerprints[rank] for rank in sorted(holders) or range(len(fingerprints)))
    job = dict(votes.most_common(1)[0][0])
    differ = {rank: _differ(fingerprint, job) for rank, fingerprint in enumerate(fingerprints)}
    return {rank: what for rank, what in differ.items() if what}


def _differ(fingerprint: Fingerprint, job: Mapping[str, str]) -> list[str]:
    """Returns the keys whose digests differ. A key that only one has is not compared: another release may lack it."""
    return [what for what, digest in fingerprint if what in job and job[what] != digest]


def fingerprint_problem(event: Call, job: Fingerprint) -> Refusal:
    """Returns the refusal of a group whose fingerprint (layout, dtypes, buckets, settings) is not `job`, the job's; else None."""
    differ = _differ(event.fingerprint, dict(job)) if event.fingerprint else []
    if not differ:
        return None
    return ("FAILED_PRECONDITION", f"{event.member.replica_id} differs from the job in {' and '.join(differ)}")


def choose_excluded(decision: Decision, pairs: Pairs, least: int) -> frozenset[str]:
    """Returns the members to exclude so that the rest can work together: the fewest, or, if these contain every holder of the state, those
    that the holder with the fewest pairs cannot work with, and the fewest of the rest. Empty if fewer than `least` would remain."""
    holders = frozenset(member.replica_id for member in decision.members if member.state == decision.reference)
    out = minimum_vertex_cover(pairs, holders)
    if holders <= out:  # one holder must remain, even if more members are excluded for it
        degree = Counter(replica_id for pair in pairs for replica_id in pair)
        kept = min(sorted(holders), key=degree.__getitem__)
        out = frozenset().union(*(pair for pair in pairs if kept in pair)) - {kept}
        out |= minimum_vertex_cover(frozenset(pair for pair in pairs if pair.isdisjoint(out)), holders)
    return out if len(decision.members) - len(out) >= least else frozenset()


@lru_cache(4)  # needed at each event while members wait for their connections
def describe_pairs(pairs: Pairs) -> str:
    """Names up to three of the pairs that cannot work together, and the cause."""
    named = nsmallest(3, (" and ".join(sorted(pair)) for pair in pairs))
    more = f", and {len(pairs) - 3} more pairs" if len(pairs) > 3 else ""
    return f"{'; '.join(named)}{more} cannot work together: they cannot connect, or their fingerprints differ"


@lru_cache(4)
def minimum_vertex_cover(pairs: Pairs, keep: frozenset[str] = frozenset()) -> frozenset[str]:
    """Returns a minimum vertex cover of the graph whose edges are `pairs`: exact up to three ids, greedy by degree above. Of several exact
    ones it takes the one with ids outside `keep`, then of higher degree, then last by name."""
    neighbours: dict[str, set[str]] = defaultdict(set)
    for one, other in pairs:
        neighbours[one].add(other)
        neighbours[other].add(one)
    names = sorted(neighbours)
    last_first = sorted(neighbours, reverse=True)
    priority = {i: k for k, i in enumerate(sorted(last_first, key=lambda i: (i in keep, -len(neighbours[i]))))}
    for size in (1, 2, 3):
        if covers := set(_covers(pairs, frozenset(), size)):
            return min(covers, key=lambda cover: sorted(map(priority.__getitem__, cover)))
    left = {i: len(neighbours[i]) for i in names}  # pairs that are not covered yet
    cover: set[str] = set()
    while left[worst := max(names, key=left.__getitem__)]:
        cover.add(worst)
        left[worst] = 0
        for other in neighbours[worst] - cover:
            left[other] -= 1
    return frozenset(cover)


def _covers(pairs: Pairs, chosen: frozenset[str], most: int) -> Iterator[frozenset[str]]:
    """Yields covers of at most `most` ids that contain `chosen`, all minimum ones included: each has an id of the first uncovered pair."""
    left = next((pair for pair in pairs if pair.isdisjoint(chosen)), None)
    if left is None:
        yield chosen
    elif len(chosen) < most:
        for replica_id in left:
            yield from _covers(pairs, chosen | {replica_id}, most)
