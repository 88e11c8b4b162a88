"""Generations that fail again and again: who could not work with whom, and the fewest who explain it. Kept by lighthouse.py."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import combinations

from ft.protocol.rules import Decision

FAILURES_BEFORE_SIT_OUT = 3


class Blame:
    """Of failures in a row: of the same members, from the same state."""

    def __init__(self) -> None:
        self._failures = 0
        self._pairs: set[frozenset[str]] = set()  # who could not work with whom

    def clear(self) -> None:
        self._failures, self._pairs = 0, set()

    def accuse(self, replica_id: str, others: Iterable[str]) -> None:
        self._pairs |= {frozenset((replica_id, other)) for other in others if other != replica_id}

    def count(self, *, progress: bool) -> None:
        """A generation has failed; if it had committed a step before, it is the first of its row."""
        self._failures = 1 if progress else self._failures + 1

    def parts(self, decision: Decision, candidates: Collection[str], least: int) -> tuple[set[str], str]:
        """Who is to sit out, and why: after three failures those who cannot work together are parted, if `least` members remain without
        them, of which one holds the state. Then the row is over, whatever came of it."""
        if self._failures < FAILURES_BEFORE_SIT_OUT or not self._pairs:
            return set(), ""
        holders = {member.replica_id for member in decision.members if member.state == decision.reference}
        out = {replica_id for replica_id in smallest_cover(self._pairs, holders) if replica_id in candidates}
        why = (
            f"{', '.join(sorted(out))} sit out: they explain all {len(self._pairs)} pairs that could not work together"
        )
        self.clear()
        enough = len(decision.members) - len(out) >= least and bool(holders - out)
        return (out, why) if enough else (set(), "")


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
