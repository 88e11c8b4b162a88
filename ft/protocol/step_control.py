"""A few figures summed with the gradients, from which all groups draw the same conclusions; and the name of the state that comes of it."""

from __future__ import annotations

import hashlib
import math
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

    @property
    def values(self) -> tuple[float, ...]:
        return (*self.tokens, self.loss_sum, self.ok, self.change, *self.digests)

    @cached_property
    def divisor(self) -> float:
        return sum(count for count in self.tokens if count > 0)

    @property
    def is_sound(self) -> bool:
        """True where all that groups decide by are numbers. A loss need not be one."""
        return math.isfinite(sum(self.tokens) + self.ok + self.change)

    @property
    def is_empty(self) -> bool:
        """Nobody is left who was dealt a slot, and nobody was unable: there is no step here, only a deal to be made anew."""
        return not any(self.tokens)


@lru_cache(64)  # the same for all ranks that a process drives
def next_commit_id(previous: str, step: int, quorum_id: int, tokens: Sequence[float]) -> str:
    """Names the state after `step`: the same previous state and the same contributions, hence the same weights."""
    text = f"{previous}/{step}/{quorum_id}/{','.join(str(round(count)) for count in tokens)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
