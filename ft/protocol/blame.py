"""Members that cannot work together, as they say themselves: no connection between them comes about, or their layouts differ. Pure
functions of what the roster keeps; lighthouse.py parts them before a quorum that has both would fail. Either side's word is enough.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import combinations

from ft.protocol import messages as m
from ft.protocol.rules import Decision

Pairs = frozenset[frozenset[str]]  # of replica_ids


def pairs_among(ids: Collection[str], blames: Mapping[str, Collection[str]]) -> Pairs:
    """Returns the pairs among `ids` of which one says that it cannot work with the other. `blames`: by id, the processes it named."""
    processes = {m.process_of(replica_id): replica_id for replica_id in ids} if blames else {}
    found = (
        frozenset((i, processes[process])) for i in blames if i in ids for process in blames[i] if process in processes
    )
    return frozenset(pair for pair in found if len(pair) == 2)


def parts(decision: Decision, pairs: Pairs, least: int) -> frozenset[str]:
    """The fewest members that are to sit out, so that the others can work together. Empty where fewer than `least` would be left, or nobody
    with the state."""
    holders = {member.replica_id for member in decision.members if member.state == decision.reference}
    out = smallest_cover(pairs, holders)
    if holders <= out:  # more may have to sit out that one of them stays
        out = frozenset().union(*pairs) - holders
    stands = len(decision.members) - len(out) >= least and bool(holders - out) and all(pair & out for pair in pairs)
    return out if stands else frozenset()


def in_words(pairs: Pairs) -> str:
    """Says which links are cut, the first few of them."""
    named = sorted(" and ".join(sorted(pair)) for pair in pairs)
    more = f", and {len(named) - 3} more pairs" if len(named) > 3 else ""
    return (
        f"{'; '.join(named[:3])}{more} cannot work together: no connection comes about, or they are unlike each other"
    )


def smallest_cover(pairs: Collection[frozenset[str]], spare: Collection[str] = ()) -> frozenset[str]:
    """The fewest ids such that each pair has one of them: exact up to three, then the most blamed first. Of equal ones it takes those
    outside `spare`, then those blamed more often, then the last by name."""
    blamed = {replica_id: sum(replica_id in pair for pair in pairs) for pair in pairs for replica_id in pair}
    order = sorted(sorted(blamed, reverse=True), key=lambda i: (i in spare, -blamed[i]))
    for size in (1, 2, 3) if len(order) <= 64 else (1,):
        for chosen in combinations(order, size):
            if all(pair & set(chosen) for pair in pairs):
                return frozenset(chosen)
    cover: set[str] = set()
    left = set(pairs)
    while left:
        worst = max(sorted(blamed), key=lambda i: sum(i in pair for pair in left))
        cover.add(worst)
        left = {pair for pair in left if worst not in pair}
    return frozenset(cover)
