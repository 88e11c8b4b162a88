"""The seam between the training loop and fault tolerance: one face, whoever stands behind it.

The loop asks what to train on (`begin_step`), hands over what came out (`reduce`), and changes nothing until it is told that the step
holds (`commit`). A manager that knows other replica groups may say that it does not: the loop then runs the same step again.

A *slot* is the batch of one replica group in one step. It is named by the position of its first sequence in the data order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Deal:
    """What this group trains on in the coming step."""

    step: int  # committed steps so far
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Sums:
    """What the step's data adds up to, over all groups that contributed."""

    tokens_per_slot: tuple[float, ...]  # valid tokens; 0: that slot contributed nothing
    loss_sum: float  # nats over those tokens
    finite: bool  # no group saw a loss that is not a number


@dataclass(frozen=True)
class Commit:
    """The step holds: the gradients are to be divided by `divisor` and applied."""

    divisor: float  # valid tokens over all contributors
    contributors: tuple[int, ...]  # replica ranks
    mean_loss: float  # nats per token, the same in every group
    quorum_size: int


class Seam(Protocol):
    """The face of ft.SoloManager and of every other manager; all pass one test suite (tests/unit/test_seam.py)."""

    @property
    def step(self) -> int:
        """Committed optimizer steps. It moves in `commit` and nowhere else."""
        ...

    def register(self, name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        """State that a group must receive to equal the others: read and written at step boundaries only. A name may be used once."""
        ...

    def attach(self, model_parts: Sequence[Any]) -> None:
        """The modules whose gradients are to be summed with other groups'. Called once, before the first step."""
        ...

    def begin_step(self) -> Deal:
        """Settles who takes part, then what this group trains on. The same answer until a commit."""
        ...

    def reduce(self, tokens_per_slot: Sequence[float], loss_sum: float, finite: bool) -> Sums:
        """Sums this group's figures (already summed over its ranks) and its gradients with the other groups'."""
        ...

    def commit(self, sums: Sums) -> Commit | None:
        """Whether the step holds. None: nothing became visible, begin the same step again."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Step and data cursor, for the checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def leave(self) -> None:
        """Tells the others that this group goes on purpose (SIGTERM, scale-down)."""
        ...

    def close(self) -> None:
        """Releases everything. May be called twice."""
        ...
