"""A few figures summed with the gradients, from which all groups draw the same conclusions; and the name of the state that comes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache


@dataclass(frozen=True)
class StepControl:
    """The last elements of the last bucket, summed over groups like the gradients before them."""

    tokens: tuple[float, ...]  # per slot of the deal; 0: nothing came, UNABLE: its group cannot
    loss_sum: float
    ok: float  # groups whose gradients may be used
    change: float  # groups that want a quorum before the next step
    digests: tuple[float, ...] = ()  # of weights, per member (compare.py), in the steps where they are compared

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
