"""Whose weights are not the others': a rule on digests that travel in the tail (tail.py), each in its member's place, zeros elsewhere.

A digest is FIGURES whole numbers below 2**24, which a sum in fp32 with nothing but zeros leaves as they are: after the reduction each
rank knows what the same rank of every other group holds, without a message of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

FIGURES = 2  # 48 bits of a digest: shards that differ look alike once in 3e14 times
NONE = (0.0,) * FIGURES  # of a member that holds no state to speak of


def odd_ones(digests: Sequence[float], members: Sequence[str]) -> tuple[str, ...]:
    """Members whose digest is not that of most who gave one. All members where no digest is: they differ, and nobody can tell who is
    right; two that differ are such a case. Empty: there is no difference."""
    given = {
        member: tuple(digests[FIGURES * rank : FIGURES * (rank + 1)])
        for rank, member in enumerate(members)
        if tuple(digests[FIGURES * rank : FIGURES * (rank + 1)]) != NONE
    }
    counts = Counter(given.values())
    if len(counts) < 2:
        return ()
    [(most, times)] = counts.most_common(1)
    if 2 * times <= len(given):
        return tuple(members)
    return tuple(member for member, digest in given.items() if digest != most)
