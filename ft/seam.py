"""The Seam: the interface between the trainer and its Manager, the same with replica groups and without them.

The trainer requests its data (`begin_step`), hands over the results (`reduce`), and changes no state until the step is committed
(`commit`). A step that is not committed is run again.

A *slot* is the batch of one replica group in one step, named by the position of its first sequence in the data order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from ft.protocol.messages import STEPS_PER_BRANCH, Commit, Rewound


@dataclass(frozen=True)
class DataAssignment:
    """The slots of the next step that are assigned to this replica group (protocol/step.py)."""

    steps_before: int  # committed steps before this one; held ones count
    slots: tuple[int, ...]


@dataclass(frozen=True)
class StepTotals:
    """Sums of a step over all groups that contributed. `ok`: False if the attempt is known to have failed: `commit` then gives no Commit.
    SoloManager: the `able` of `reduce`. Manager: also True if a group was not able: the sums are without it."""

    # valid tokens; 0: that slot contributed nothing; if this group was assigned no slot, one element: the sum over all slots
    tokens_per_slot: Sequence[float]
    loss_sum: float  # nats over those tokens
    ok: bool


class Stopped(RuntimeError):
    """The job cannot continue. `slots`: the batches that are the cause, if there are any."""

    def __init__(self, reason: str, slots: Sequence[int] = ()) -> None:
        super().__init__(reason)
        self.slots = tuple(slots)


class BadInput(ValueError):
    """An error in the input that is found only at run time. It is reported in one line, and a retry would not help."""


class GroupEnded(RuntimeError):
    """The server of this replica group has ended or has ended the group, its ranks disagree, or this rank cannot form a further process
    group. The rank exits, to be restarted."""


class GroupReleased(RuntimeError):
    """This replica group was asked to leave while it waited for others: all its ranks exit now. `has_state`: it has a committed state,
    which may exist nowhere else; False: it has no complete state."""

    def __init__(self, *, has_state: bool) -> None:
        super().__init__("asked to leave while it waited for other groups")
        self.has_state = has_state


def to_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the state with its ledger as one JSON string: the ledger's keys vary, and those of a checkpoint must not. `step` becomes
    the step within the branch; the branch is the number of the ledger's rewinds."""
    return {**state, "step": state["step"] % STEPS_PER_BRANCH, "ledger": json.dumps(state["ledger"])}


def from_checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    """Returns step, commit_id, commit_quorum_id and ledger, as StepMachine.state_dict does: undoes `to_checkpoint`."""
    ledger = json.loads(state["ledger"])
    return {**state, "step": len(ledger.get("rewinds", ())) * STEPS_PER_BRANCH + state["step"], "ledger": ledger}


class Seam(Protocol):
    """The trainer's interface to Manager, SemiSyncManager, or SoloManager (no replica groups). tests/unit/test_seam.py runs the first
    and the last.

    begin_step, reduce and commit raise Stopped, GroupEnded and GroupReleased; BadInput if the lighthouse or another group refuses this one;
    and what `restore` (start.open_manager) raises."""

    @property
    def step(self) -> int:
        """Committed optimizer steps of this history. Changed by commit, load_state_dict, rewind, and a heal, which may complete in
        begin_step, reduce or commit."""

    def register_state(self, name: str, state_dict: Callable[[], Any], load_state_dict: Callable[[Any], None]) -> None:
        """Registers a state that joining groups receive from the others, read and written at step boundaries. Each name only once.
        `state_dict` returns nested dicts and lists of tensors, the same tensors at each call, and of values that JSON can express."""

    @property
    def writer_quorum(self) -> tuple[str, int] | None:
        """Epoch and ID of the newest quorum if this group is its writer, which writes checkpoints and shared metrics; else None. A group
        that is suspended (SIGSTOP) keeps the value until it hears of a newer quorum."""

    @property
    def may_exit(self) -> bool:
        """True when the loop may end: after `leave`, once the other groups know of it, or when no step is left to train."""

    def attach(self, model_parts: Sequence[Any]) -> None:
        """Registers the modules whose gradients are reduced over all groups. Called once, before the first step."""

    def last_backward(self, slot: int) -> AbstractContextManager[None]:
        """Wraps the last backward of each slot, in the order of the assignment. In that of the last slot (with deterministic_reduce: of
        each) each bucket is all-reduced as soon as it and all before it are complete. Until `commit` only the manager may change .grad,
        except for backwards of the next slot, which accumulate into it or start from None."""

    def begin_step(self, *, until: int | None = None) -> DataAssignment:
        """Joins a new quorum if one is due, and returns this group's slots; the same ones until `commit`. Without slots this group computes
        nothing, and applies the sums of the others. After a failed attempt it returns only slots that are still to be computed: gradients
        that this group has computed are kept. `until`: number of the last step; this group leaves with its commit."""

    def reduce(self, tokens_per_slot: Sequence[float], loss_sum: float, able: bool) -> StepTotals:
        """Reduces this group's token counts and loss sum (already summed over its ranks) and its gradients over all groups. `able`:
        False if this group cannot contribute, such as with a loss of NaN: it reduces zeros instead of its gradients. Manager.reduce
        has two more arguments, for its own `regroup` and for compat/manager.py."""

    def commit(self, totals: StepTotals) -> Commit | None:
        """Commits the step; .grad is then the sum over all groups. None: the step is not complete; call begin_step again.
        `totals`: the result of `reduce`; only SoloManager uses it; a Manager decides by the reduced tail, on which its ranks vote."""

    def skip(self, slots: Sequence[int]) -> None:
        """Records that the newest commit was not applied, as all groups have decided alike. `slots`: all slots of that commit, of every
        group; they are skipped for good."""

    def rewind(self, reason: str, load: Callable[[], object]) -> None:
        """Goes back to a checkpoint instead of applying the newest commit, a spike, as all groups have decided alike, and begins the next
        branch. `load` loads the checkpoint with this manager's state; without that state the initial one counts. If it raises, this group
        has no state, and heals from another. What was trained on since the checkpoint is left out for good. `reason`: for the record."""

    @property
    def rewinds(self) -> Sequence[Rewound]:
        """Rewinds of this history, of which each began a branch; the first branch, 0, began at step 0."""

    def show_event(self, lane: str, text: str) -> None:
        """Shows a message on the dashboard, if there is one, in a lane of rpc.codec.CLIENT_LANES. From any thread; it may get lost."""

    def state_dict(self) -> dict[str, Any]:
        """Returns step and ledger for a checkpoint, in the same form in all managers. load_state_dict ignores the open assignment in the
        ledger."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the result of state_dict. Raises ValueError if it does not fit."""

    @property
    def loaded_ledger(self) -> Mapping[str, Any]:
        """Ledger (Ledger.state_dict) of the checkpoint that was loaded last, to be read right after the load; if none was loaded, it is
        empty or, with a SoloManager, the initial one."""

    @property
    def last_waiting_for_others_at_s(self) -> float:
        """time.monotonic() of the newest message in which the group server said that this group waits for other groups or the lighthouse,
        not for one of its own ranks, or answered a quorum request; -inf: there was none."""

    def want_to_leave(self) -> None:
        """Records a SIGTERM, from any thread. If the group waits for others, its ranks raise GroupReleased; else the trainer leaves."""

    def leave(self) -> None:
        """Announces that this group leaves on purpose (SIGTERM, scale-down). Called by all its ranks at the same step boundary. The loop
        continues until `may_exit`: the other groups may learn of it only in a step."""

    @property
    def needs_new_quorum(self) -> bool:
        """True when the newest generation has failed, or the writer's weights are corrupt: a new quorum decides which group writes."""

    @property
    def finished(self) -> bool:
        """True when a different group has announced that the run's last step is saved."""

    def regroup(self, until: int) -> None:
        """Forms a quorum after `until`, the last step, to decide which group writes. Called by all ranks. Raises what begin_step raises."""

    def finish(self, *, saved: bool) -> None:
        """Records whether the run's last step is saved. `close` then tells the other groups that the run is finished (`saved`) or that this
        group has failed; without this call it tells neither."""

    def close(self) -> None:
        """Leaves the job and releases all resources. May be called twice."""
