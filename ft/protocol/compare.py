"""Comparison of weights between replica groups, by digests in the tail of a step (see step.py).

Each member writes its digest at its own index of the tail, and zeros elsewhere. A digest is DIGEST_WORDS integers below 2**24, which fp32
adds to zeros exactly: so the all-reduce gives each rank the digests of its group_rank in all groups, without a further message. A
negative digest marks a copy: its group has healed since weights were last compared. Such a group is no witness, as an error of its source
is its error too; else a faulty group could outvote the others together with groups that have healed from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

DIGEST_WORDS = 2  # 48 bits in all: shards that differ have equal digests once in 3e14 comparisons

Digest = tuple[float, ...]
NONE: Digest = (0.0,) * DIGEST_WORDS  # digest of a member without a state


def as_sent(digest: Digest, *, copied: bool) -> Digest:
    """Returns the digest as a member writes it into the tail."""
    return tuple(-word for word in digest) if copied else digest


def member_digest(digests: Sequence[float], rank: int) -> Digest:
    """Returns the digest of the member with that replica rank."""
    return tuple(digests[DIGEST_WORDS * rank : DIGEST_WORDS * (rank + 1)]) or NONE


def find_divergent(digests: tuple[float, ...], members: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the members whose digest is not the majority's; all members where digests differ without a majority; none where all are
    equal. The majority's digest is that of more than half of the witnesses; if only one is a witness, of more than half of the members."""
    given = {member: digest for rank, member in enumerate(members) if (digest := member_digest(digests, rank)) != NONE}
    held = {member: tuple(map(abs, digest)) for member, digest in given.items()}
    votes, of_all = Counter(held[member] for member in given if min(given[member]) >= 0), Counter(held.values())
    if len(of_all) < 2:
        return ()
    for right, times in votes.most_common(1):
        # two independent faults do not give equal digests, but a single witness may be at fault while the others are its copies
        if 2 * times > votes.total() and (times > 1 or 2 * of_all[right] > len(given)):
            return tuple(member for member, digest in held.items() if digest != right)
    return members
