"""The seam between the training loop and fault tolerance: one interface, with replica groups and without.

The loop asks for its data (`begin_step`), hands over the results (`reduce`), and changes nothing until the step is committed (`commit`). A
step that is not committed is run again.

A *slot* is the batch of one replica group in one step, named by the position of its first sequence in the data order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class DataAssignment:
    """This group's slots of the coming step's assignment (protocol/step.py)."""

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
    """A committed step: the gradients are to be divided by `divisor` and applied."""

    divisor: float  # valid tokens over all contributors
    contributors: tuple[int, ...]  # replica ranks
    mean_loss: float  # nats per token, the same in every group
    quorum_size: int
    slots: tuple[tuple[int, str], ...]  # that contributed: slot and replica id, "solo" where there are no groups
    holes: tuple[int, ...]  # all slots that were assigned and have yet to be trained on


class Stopped(RuntimeError):
    """The job cannot go on. `slots`: the batches that are to blame, if any are."""

    def __init__(self, reason: str, slots: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.slots = tuple(slots)


class BadInput(ValueError):
    """An error in the input that shows only at run time: reported in one line, without a retry."""


class GroupEnded(RuntimeError):
    """This group's server has ended, or has ended the group. The rank exits, and its launcher starts the group again."""


class GroupReleased(RuntimeError):
    """This group was asked to leave while it waited for others: all its ranks end now. `has_state`: it has committed a state that no other
    group may have; else it was about to receive one."""

    def __init__(self, *, has_state: bool) -> None:
        super().__init__("asked to leave while it waited for other groups")
        self.has_state = has_state


def to_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """The state with its ledger, whose form varies, as one JSON text: the keys of a checkpoint are always the same."""
    return {**state, "ledger": json.dumps(state["ledger"])}


def from_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """step, commit_id, commit_quorum_id and ledger, as StepMachine.state_dict returns them."""
    return {**state, "ledger": json.loads(state["ledger"])}


class Seam(Protocol):
    """Interface of all managers; each passes tests/unit/test_seam.py."""

    @property
    def step(self) -> int:
        """Committed optimizer steps. Moved by commit, load_state_dict, and a heal, which begin_step, reduce or commit may complete."""

    def register_state(self, name: str, state_dict: Callable[[], Any], load_state_dict: Callable[[Any], None]) -> None:
        """Registers state that a group must receive to equal the others: read and written at step boundaries. A name is used once."""

    @property
    def writer_quorum(self) -> tuple[str, int] | None:
        """Epoch and id of the quorum in which this group is the one that writes checkpoints and shared metrics; None: another group is. A
        stopped group keeps the value until it hears of a newer quorum."""

    @property
    def may_exit(self) -> bool:
        """True when the loop may end: after `leave`, once the others know, or where nothing is left to train."""

    def attach(self, model_parts: Sequence[Any]) -> None:
        """Registers modules whose gradients are summed with other groups'. Called once, before the first step."""

    def last_backward(self, slot: int) -> AbstractContextManager[None]:
        """Wraps the last backward of each slot, in the assignment's order: complete gradients are reduced while it runs. Until `commit`
        .grad is the manager's; backwards of the next slot may add to it, or start from None."""

    def begin_step(self, *, until: int | None = None) -> DataAssignment:
        """Joins the quorum if one is due, and returns this group's slots; the same ones until `commit`. No slots: nothing is computed, and
        the sums of the others are applied. After a failed attempt: the slots that are still to be computed, as the gradients of the others
        are kept. `until`: this group leaves with the commit of that step."""

    def reduce(self, tokens_per_slot: Sequence[float], loss_sum: float, finite: bool) -> StepTotals:
        """Sums this group's figures (already summed over its ranks) and its gradients with the other groups'."""

    def commit(self, totals: StepTotals) -> Commit | None:
        """Commits the step, after which gradients are the sums over all groups. None: the step failed, no state has changed, call
        begin_step again. Each group decides for itself, by votes of its ranks on the summed tail. Raises, as `reduce` and `begin_step` do,
        Stopped, GroupEnded and GroupReleased."""

    def announce(self, lane: str, text: str) -> None:
        """Shows people a message, on the live page if there is one (rpc.codec.LANES). From any thread; it may get lost."""

    def state_dict(self) -> dict[str, Any]:
        """Step and ledger, for the checkpoint; of one form for all managers. The open assignment is in it, and is not loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    @property
    def last_waiting_for_others_s(self) -> float:
        """time.monotonic() of the group server's last message saying that this group waits for other groups or the lighthouse, not for one
        of its own ranks; -inf: none yet."""

    def want_to_leave(self) -> None:
        """Notes a SIGTERM; from any thread, on one rank or several. Where the group waits for others, all its ranks get GroupReleased; else
        the loop calls `leave`."""

    def leave(self) -> None:
        """Announces that this group leaves on purpose (SIGTERM, scale-down). Called by all its ranks at the same step boundary. The loop
        goes on until `may_exit`: others may have to be told in a step."""

    @property
    def needs_new_quorum(self) -> bool:
        """True when a member of the newest quorum is lost, or the writer's weights went wrong: a new quorum decides which group writes."""

    @property
    def finished(self) -> bool:
        """True when another group has announced that the run's last step is saved."""

    def regroup(self, until: int) -> None:
        """Forms a quorum after step `until`, the last, which decides which group writes. By all ranks. Raises GroupReleased."""

    def finish(self, *, saved: bool) -> None:
        """Sets whether the run's last step is saved, as `close` tells the other groups."""

    def close(self) -> None:
        """Releases everything. May be called twice."""
