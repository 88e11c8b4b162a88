"""Comparison of weights between groups, by digests in a step's tail.

Each member puts its digest into its own place, zeros elsewhere. A digest is FIGURES integers below 2**24, which a sum in fp32 with nothing
but zeros leaves as they are: after the reduction each rank knows what the same rank of every other group holds, without a message of its
own. Below zero they are a copy's: its group took its state from another one since weights were last compared. What was wrong there is wrong
here, so it is no witness: a group whose weights went wrong would else outvote the others together with those who have healed from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

FIGURES = 2  # 48 bits of a digest: shards that differ look alike once in 3e14 times

Digest = tuple[float, ...]
NONE: Digest = (0.0,) * FIGURES  # of a member that holds no state to speak of


def in_tail(digest: Digest, *, copied: bool) -> Digest:
    """Returns the digest as a member puts it into its place of the tail."""
    return tuple(-figure for figure in digest) if copied else digest


def at(digests: Sequence[float], rank: int) -> Digest:
    """Returns the digest that the member of that replica rank has put there."""
    return tuple(digests[FIGURES * rank : FIGURES * (rank + 1)]) or NONE


def find_divergent(digests: Sequence[float], members: Sequence[str]) -> tuple[str, ...]:
    """Members whose digest is not the one that most witnesses have, and, where that is a single one, most of all. All members where there
    is no such digest: they differ, and nobody can tell who is right. Empty: there is no difference."""
    return _odd_ones(tuple(digests), tuple(members)) if any(digests) else ()


@lru_cache(64)  # the same for all ranks that a process drives
def _odd_ones(digests: tuple[float, ...], members: tuple[str, ...]) -> tuple[str, ...]:
    given = {member: said for rank, member in enumerate(members) if (said := at(digests, rank)) != NONE}
    held = {member: tuple(map(abs, said)) for member, said in given.items()}
    votes, of_all = Counter(held[member] for member in given if min(given[member]) >= 0), Counter(held.values())
    if len(of_all) < 2:
        return ()
    for right, times in votes.most_common(1):
        # two that went wrong by themselves do not go wrong alike, but one alone may have done so after the others had its state
        if 2 * times > votes.total() and (times > 1 or 2 * of_all[right] > len(given)):
            return tuple(member for member, digest in held.items() if digest != right)
    return members
