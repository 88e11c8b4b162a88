"""The seam between the training loop and fault tolerance: one face, whoever stands behind it.

The loop asks what to train on (`begin_step`), hands over what came out (`reduce`), and changes nothing until it is told that the step
holds (`commit`). A manager that knows other replica groups may say that it does not: the loop then runs the same step again.

A *slot* is the batch of one replica group in one step. It is named by the position of its first sequence in the data order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class DataAssignment:
    """The data that this group trains on in the coming step."""

    step: int  # committed steps so far
    slots: tuple[int, ...]


@dataclass(frozen=True)
class StepTotals:
    """Sums of a step over all groups that contributed."""

    tokens_per_slot: Sequence[float]  # valid tokens; 0: that slot contributed nothing
    loss_sum: float  # nats over those tokens
    finite: bool  # no group saw a loss that is not a number


@dataclass(frozen=True)
class Commit:
    """The step holds: the gradients are to be divided by `divisor` and applied."""

    divisor: float  # valid tokens over all contributors
    contributors: tuple[int, ...]  # replica ranks
    mean_loss: float  # nats per token, the same in every group
    quorum_size: int
    # what went in, and whose gradients: slot and replica id, "solo" where there are no groups
    slots: tuple[tuple[int, str], ...]
    holes: tuple[int, ...]  # slots that were dealt and have yet to be trained on, all of them


class Stopped(RuntimeError):
    """The step cannot hold, and never will. `slots`: the batches that are to blame, if any are."""

    def __init__(self, reason: str, slots: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.slots = tuple(slots)


class BadInput(ValueError):
    """An error in the input that only the work itself could find: reported in one line, and nothing is tried again."""


class GroupEnded(RuntimeError):
    """This group is over: its server is gone, or it was told to go. The rank exits, and its launcher starts the group again."""


class GroupReleased(RuntimeError):
    """This group was asked to leave while it waited for others: all its ranks end now. `holds`: it holds a state that it has committed, and
    that no other group may have; else it was about to receive one."""

    def __init__(self, *, holds: bool) -> None:
        super().__init__("asked to leave while it waited for other groups")
        self.holds = holds


def to_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint has the same keys at every time; what varies in form is one value."""
    return {**state, "ledger": json.dumps(state["ledger"])}


def from_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """step, commit_id, commit_quorum_id, ledger: as the step machine has them."""
    return {**state, "ledger": json.loads(state["ledger"])}


class Seam(Protocol):
    """The face of ft.SoloManager and of every other manager; all pass one test suite (tests/unit/test_seam.py)."""

    @property
    def step(self) -> int:
        """Committed optimizer steps. It moves in `commit` and nowhere else."""

    def register(self, name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        """State that a group must receive to equal the others: read and written at step boundaries only. A name may be used once."""

    @property
    def writes(self) -> tuple[str, int] | None:
        """Epoch and id of the quorum by which this group, of all, writes the metrics that they share; None: another group does. A group
        that was stopped keeps the value until it hears of a newer quorum."""

    @property
    def left(self) -> bool:
        """After `leave`, or where nothing is left to train: the others know, and the loop may end."""

    def attach(self, model_parts: Sequence[Any]) -> None:
        """The modules whose gradients are to be summed with other groups'. Called once, before the first step."""

    def last_pass(self, slot: int) -> AbstractContextManager[None]:
        """Wraps the last backward of each slot, in the order of the deal: finished gradients are reduced while it runs. Until `commit`
        .grad is the manager's; backwards of the next slot may add to it, or start from None."""

    def begin_step(self, *, until: int | None = None) -> DataAssignment:
        """Joins the quorum if one is due, and returns this group's slots; the same ones until `commit`. No slots: nothing is to be
        computed, and the sums of others are to be applied. After an attempt that failed: the slots that are still to be computed; the
        gradients of the others are kept. until: this group leaves with the commit of that step, whenever it comes to it."""

    def reduce(self, tokens_per_slot: Sequence[float], loss_sum: float, finite: bool) -> StepTotals:
        """Sums this group's figures (already summed over its ranks) and its gradients with the other groups'."""

    def commit(self, sums: StepTotals) -> Commit | None:
        """Commits the step if it holds: then gradients are the sums over all groups. None: nothing became visible, begin again. Raises
        Stopped where it never will, as `reduce` and `begin_step` do; and GroupEnded, and GroupReleased."""

    def tell(self, lane: str, words: str) -> None:
        """Shows people a message, on the live page if there is one (rpc.codec.LANES). From any thread; it may get lost."""

    def state_dict(self) -> dict[str, Any]:
        """Step and ledger, for the checkpoint; of the same form whoever made it. The open deal is in it, and not taken over."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @property
    def confirmed_s(self) -> float:
        """time.monotonic() at which the group's server said last that all ranks of this group are there, and none keeps it waiting: others
        do, or the lighthouse. -inf: never."""

    def want_to_leave(self) -> None:
        """Notes that SIGTERM has come; from any thread, and by one rank or several. Where the group waits for others, it waits no longer,
        and all its ranks get GroupReleased. Elsewhere the loop sees to it, with `leave`."""

    def leave(self) -> None:
        """This group is to go on purpose (SIGTERM, scale-down). At a step's boundary, by all its ranks at the same one. The loop goes on
        until `left`: others may have to be told in a step."""

    @property
    def is_broken(self) -> bool:
        """True when a member of the newest quorum is gone: the role of the writer has to be settled anew."""

    @property
    def finished(self) -> bool:
        """Another group has said that the run's last step is saved."""

    def regroup(self, until: int) -> None:
        """After step `until`, the last: settles who is there, and so who writes, once more. By all ranks of the group. Raises
        GroupReleased."""

    def finish(self, *, saved: bool) -> None:
        """Sets the word on the run's last step that `close` tells the other groups."""

    def close(self) -> None:
        """Releases everything. May be called twice."""
