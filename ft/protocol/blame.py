"""Members that cannot work together, as they say themselves: no connection between them comes about, or their layouts differ. Pure
functions of what the roster keeps; lighthouse.py parts them before a quorum that has both would fail. Either side's word is enough.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from heapq import nsmallest

from ft.protocol import messages as m
from ft.protocol.rules import Decision

Pairs = frozenset[frozenset[str]]  # of replica_ids


def pairs_among(ids: Collection[str], blames: Mapping[str, Collection[str]]) -> Pairs:
    """Returns the pairs among `ids` of which one says that it cannot work with the other. `blames`: by id, the processes it named."""
    processes = {m.process_of(replica_id): replica_id for replica_id in ids} if blames else {}
    there = frozenset(ids)
    found = (
        frozenset((i, processes[other])) for i in blames if i in there for other in blames[i] if other in processes
    )
    return frozenset(pair for pair in found if len(pair) == 2)


def pairs_with(replica_id: str, ids: Iterable[str], blames: Mapping[str, Collection[str]]) -> Pairs:
    """Pairs that `replica_id` is in: of one alone that costs far less than of all."""
    me, named = m.process_of(replica_id), blames.get(replica_id, ())
    cut = (i for i in ids if i != replica_id and (m.process_of(i) in named or me in blames.get(i, ())))
    return frozenset(frozenset((replica_id, i)) for i in cut)


def parts(decision: Decision, pairs: Pairs, least: int) -> frozenset[str]:
    """The fewest members that are to sit out, so that the others can work together. Empty where fewer than `least` would be left, or nobody
    with the state."""
    holders = {member.replica_id for member in decision.members if member.state == decision.reference}
    out = smallest_cover(pairs, holders)
    if holders <= out:  # more may have to sit out that one of them stays
        out = frozenset().union(*pairs) - holders
        if any(pair.isdisjoint(out) for pair in pairs):
            return frozenset()
    return out if len(decision.members) - len(out) >= least and holders - out else frozenset()


@lru_cache(4)  # asked for at each event while members wait for their links
def in_words(pairs: Pairs) -> str:
    """Says which links are cut, the first few of them."""
    named = nsmallest(3, (" and ".join(sorted(pair)) for pair in pairs))
    more = f", and {len(pairs) - 3} more pairs" if len(pairs) > 3 else ""
    return f"{'; '.join(named)}{more} cannot work together: no connection comes about, or they are unlike each other"


def smallest_cover(pairs: Collection[frozenset[str]], spare: Collection[str] = ()) -> frozenset[str]:
    """The fewest ids such that each pair has one of them: exact up to three, then the most blamed first. Of equal ones it takes those
    outside `spare`, then those blamed more often, then the last by name."""
    return _cover(frozenset(pairs), frozenset(spare))


@lru_cache(4)
def _cover(pairs: Pairs, spare: frozenset[str]) -> frozenset[str]:
    others: dict[str, set[str]] = defaultdict(set)
    for one, other in pairs:
        others[one].add(other)
        others[other].add(one)
    names = sorted(others)
    place = {
        i: k for k, i in enumerate(sorted(sorted(others, reverse=True), key=lambda i: (i in spare, -len(others[i]))))
    }
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
