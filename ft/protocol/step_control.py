"""A step's control figures: what this group adds to the sums beside its gradients, what comes back, and what all groups conclude from it.

Where the rules leave a choice:
- A group marks a slot that it cannot use by UNABLE, so all ledgers count alike, also those that were not there before. It has one sum for
  all its slots, so if one of several is not a number, it marks them all; one without a token to learn, alone.
- With slots_per_step the slots of a group that died are dealt to the others in the same step. They compute what was added, and no more.
- Weights are compared by digests, each in its member's place, zeros elsewhere. A digest is FIGURES integers below 2**24, which a sum in
  fp32 with nothing but zeros leaves as they are: after the reduction each rank knows what the same rank of every other group holds, without
  a message of its own. Below zero they are a copy's: its group took its state from another one since weights were last compared. What was
  wrong there is wrong here, so it is no witness: a group whose weights went wrong would else outvote the others together with those who
  have healed from it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ft.protocol.messages import UNABLE, Computed

FIGURES = 2  # 48 bits of a digest: shards that differ look alike once in 3e14 times

Digest = tuple[float, ...]
NONE: Digest = (0.0,) * FIGURES  # of a member that holds no state to speak of


@dataclass(frozen=True)
class StepControl:
    """The last elements of the last bucket, summed over groups like the gradients before them."""

    tokens: tuple[float, ...]  # per slot of the deal; 0: nothing came, UNABLE: its group cannot
    loss_sum: float
    ok: float  # groups whose gradients may be used
    change: float  # groups that want a quorum before the next step
    digests: tuple[float, ...] = ()  # of weights, per member (find_divergent), in the steps where they are compared

    @staticmethod
    @lru_cache(64)  # the same for all ranks that a process drives
    def of(values: tuple[float, ...], digests: int = 0) -> StepControl:
        """`digests`: how many of the values they are."""
        end = len(values) - digests
        loss_sum, ok, change = values[end - 3 : end]
        return StepControl(values[: end - 3], loss_sum, ok, change, values[end:])

    @cached_property
    def divisor(self) -> float:
        return sum(count for count in self.tokens if count > 0)


@lru_cache(64)  # the same for all ranks that a process drives
def next_commit_id(previous: str, step: int, quorum_id: int, tokens: Sequence[float]) -> str:
    """Names the state after `step`: the same previous state and the same contributions, hence the same weights."""
    text = f"{previous}/{step}/{quorum_id}/{','.join(str(round(count)) for count in tokens)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class LocalContribution:
    """This group's contribution to one step; kept until that step holds, or its gradients are dropped."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Another step, or the same with other slots: nothing is computed."""
        self.computed: Computed | None = None  # this group's figures; its gradients are kept
        self.tokens: dict[int, float] = {}  # by slot, of those that went into them
        self.excused = False  # the others know that this group's slots are of no use

    def add(self, slots: Sequence[int], event: Computed) -> None:
        """These were computed, besides those that were before. Of a slot of which nothing is said there were no tokens."""
        self.tokens |= {**dict.fromkeys(slots, 0.0), **dict(zip(slots, event.tokens, strict=False))}
        before = self.computed
        if before is not None:
            able, kept = before.able and event.able, before.kept and event.kept
            event = Computed(before.tokens + event.tokens, before.loss_sum + event.loss_sum, able, kept)
        self.computed = event

    def tail(
        self, slots: Sequence[int], dealt: Iterable[int], *, change: bool, digests: int
    ) -> tuple[tuple[float, ...], bool]:
        """Returns the values of the StepControl that this group adds to the sums beside its gradients, and whether these are of use: there
        is something in `slots`, all of which are computed, to learn from. `dealt`: all slots of the step; `digests`: numbers to leave
        room for."""
        able = self.computed is None or self.computed.able
        usable = able and any(self.tokens[slot] > 0 for slot in slots)
        if usable:
            figures = {slot: self.tokens[slot] if self.tokens[slot] > 0 else UNABLE for slot in slots}
        else:
            figures = dict.fromkeys(slots, UNABLE if self.excused else 0.0)
        tokens = map(float, {**dict.fromkeys(dealt, 0.0), **figures}.values())
        loss_sum = self.computed.loss_sum if usable and self.computed else 0.0
        ok = 1.0 if usable or self.excused or not slots else 0.0
        return (*tokens, loss_sum, ok, 1.0 if change else 0.0, *(0.0,) * digests), usable


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
