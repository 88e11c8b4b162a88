"""Comparison of weights between groups, by digests in a step's tail.

Each member puts its digest into its own place, zeros elsewhere. A digest is DIGEST_WORDS integers below 2**24, which a sum in fp32 with
zeros leaves as they are: the reduction gives each rank the digests of the same rank of all groups, without a further message. Negative ones
are a copy's: its group has healed since weights were last compared. An error of its source is its error, too, so it is no witness: else a
faulty group would outvote the others together with those that have healed from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

DIGEST_WORDS = 2  # 48 bits of a digest: shards that differ have the same one once in 3e14 times

Digest = tuple[float, ...]
NONE: Digest = (0.0,) * DIGEST_WORDS  # of a member without a state


def in_tail(digest: Digest, *, copied: bool) -> Digest:
    """Returns the digest as a member puts it into its place of the tail."""
    return tuple(-word for word in digest) if copied else digest


def member_digest(digests: Sequence[float], rank: int) -> Digest:
    """Returns the digest of that replica rank's member."""
    return tuple(digests[DIGEST_WORDS * rank : DIGEST_WORDS * (rank + 1)]) or NONE


@lru_cache(64)  # the same for all ranks that a process drives
def find_divergent(digests: tuple[float, ...], members: tuple[str, ...]) -> tuple[str, ...]:
    """Members whose digest is not the one that most witnesses have, and, where that is a single witness, most members. All members where
    they differ and no digest has that majority. Empty: there is no difference."""
    given = {member: digest for rank, member in enumerate(members) if (digest := member_digest(digests, rank)) != NONE}
    held = {member: tuple(map(abs, digest)) for member, digest in given.items()}
    votes, of_all = Counter(held[member] for member in given if min(given[member]) >= 0), Counter(held.values())
    if len(of_all) < 2:
        return ()
    for right, times in votes.most_common(1):
        # two that went wrong by themselves do not go wrong alike, but one alone may have done so after the others had its state
        if 2 * times > votes.total() and (times > 1 or 2 * of_all[right] > len(given)):
            return tuple(member for member, digest in held.items() if digest != right)
    return members
