"""Semi-synchronous training as a Seam (seam.py): a step of the protocol is a *round* of optimizer steps of each replica group.

    assignment = manager.begin_step()    # a *window* of the data: slots for manager.inner_steps optimizer steps
    for slot in assignment.slots:
        ...                              # forward, backward, clipping and inner optimizer of this group only
        manager.on_inner_step()          # sends the pseudo-gradients of the round's fragment when they are due
    commit = manager.commit(manager.reduce(tokens_per_slot, loss_sum, able))  # the outer step, if the round is committed

A round has the guarantees of a step: pseudo-gradients are kept and reduced again if a group fails, ranks vote on it, and it has no effect
before its commit. The ledger assigns a window of inner_steps batches, trained on if and only if its pseudo-gradients are in the sums.

Choices that the papers leave open:
- Groups agree only on the outer weights. A group that heals receives these and the outer optimizer's state, which do not change during a
  round; its local weights start from them. Its inner optimizer is its own: new in a process that joins, else the state that it had.
- A window that does not count (its loss is NaN, or it was assigned anew) has no effect: local weights are set back to the outer ones, so
  no sample is in the weights twice. Steps of other fragments since their last reduction are lost with it.
- Means are over the groups that contributed, with equal weights, as in the papers.
- `step` counts inner optimizer steps, as in every Seam; the protocol counts rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ft.buckets import BUCKET_BYTES, dtensor_like, short_digest, to_local
from ft.config import Schedule
from ft.gradients import Gradients
from ft.manager import Manager
from ft.protocol.messages import Rewound
from ft.seam import Commit, DataAssignment, StepTotals
from ft.semi_sync import Fragment, split

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful  # takes a second to import

OuterOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer | None]


def _of_current(name: str) -> Any:
    """Returns a method that calls the method `name` of the current fragment."""
    return lambda self, *given, **more: getattr(self._current, name)(*given, **more)


def _of_all(name: str) -> Any:
    """Returns a method that calls the method `name` of all fragments."""
    return lambda self: [getattr(fragment, name)() for fragment in self._fragments]


class FragmentGradients(Gradients):
    """Gradients of fragments (semi_sync.py), one of which is reduced in each round, in turn. Each has Gradients of its own, with buckets;
    the round's number determines the current fragment, so all groups send the same one. `attach` is called once for each fragment, in their
    order. `dropped`: True after `drop`, until the manager resets it. last_backward, all_reduce and can_repeat are not supported."""

    can_run_ahead = False

    def __init__(self, *, shared: bool = False, quantized: bool = False, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(shared=shared, quantized=quantized, bucket_bytes=bucket_bytes)
        self._fragments: list[Gradients] = []
        self._current: Gradients
        self.dropped = False

    def attach(self, parameters: Iterable[nn.Parameter]) -> None:
        fragment = Gradients(shared=self._shared, quantized=self._quantized, bucket_bytes=self._bucket_bytes)
        fragment.attach(parameters)
        self._fragments.append(fragment)

    @property
    def fingerprint(self) -> tuple[tuple[str, str], ...]:
        pairs_by_name = zip(*(fragment.fingerprint for fragment in self._fragments), strict=True)
        return tuple((pairs[0][0], short_digest([digest for _, digest in pairs])) for pairs in pairs_by_name)

    def begin_attempt(
        self, process_group: dist.ProcessGroup, num_participants: int, *, contributes: bool = True, step: int = 0
    ) -> None:
        self._current = self._fragments[step % len(self._fragments)]
        self._current.begin_attempt(process_group, num_participants, contributes=contributes, step=step)

    prepare, close, drop_held, drop_feedback = map(_of_all, ("prepare", "close", "drop_held", "drop_feedback"))
    begin_backward, launch_buckets, launch_remaining, wait, abandon, hold = map(
        _of_current, ("begin_backward", "launch_buckets", "launch_remaining", "wait", "abandon", "hold")
    )

    def deliver(self, held: int | None = None, *, contributors: int | None = None) -> None:
        """Delivers the sums of the current fragment, or of `held`, the number of a committed step: one more than begin_attempt's."""
        fragment = self._current if held is None else self._fragments[(held - 1) % len(self._fragments)]
        fragment.deliver(held, contributors=contributors)

    def drop(self) -> None:
        self.dropped = True
        for fragment in self._fragments:
            fragment.drop()


class SemiSyncManager:
    """A Seam (seam.py). `manager`: its slots are windows. `outer`: makes the outer optimizer, or returns None for Local SGD."""

    writer_quorum: tuple[str, int] | None  # __getattr__ takes these seven from the Manager
    may_exit: bool
    needs_new_quorum: bool
    finished: bool
    last_waiting_for_others_at_s: float
    loaded_ledger: Mapping[str, Any]
    rewinds: Sequence[Rewound]

    def __init__(self, manager: Manager, schedule: Schedule, outer: OuterOptimizer) -> None:
        assert isinstance(manager.gradients, FragmentGradients)
        self._manager, self._gradients = manager, manager.gradients
        # register_state is only for state that is equal in all groups between two rounds, not for the model or the inner optimizer
        self.register_state, self.show_event, self.finish = manager.register_state, manager.show_event, manager.finish
        # never called: configs/check.py refuses on_spike = "skip" and "rewind" with a semi_sync_method
        self.skip, self.rewind = manager.skip, manager.rewind
        self.want_to_leave, self.leave, self.close = manager.want_to_leave, manager.leave, manager.close
        self._schedule, self._outer = schedule, outer
        self.inner_steps = schedule.inner_steps
        self.fragments: list[Fragment] = []
        self._round = 0  # number of the current round
        self._done = 0  # optimizer steps made in it
        self._window: tuple[int, ...] = ()  # the Manager's slot of it, if there is one
        self._resets = False  # True: the next round starts from the outer weights

    @property
    def step(self) -> int:
        return self._manager.step * self.inner_steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_manager"], name)

    def _round_of(self, until: int) -> int:
        """Returns the number of rounds until optimizer step `until`, which is the end of one (configs/check.py)."""
        return -(-until // self.inner_steps)

    def regroup(self, until: int) -> None:
        self._manager.regroup(self._round_of(until))

    def attach(self, model_parts: Sequence[nn.Module]) -> None:
        """Registers the model; its present weights are the first outer weights. Raises ValueError for too many fragments."""
        everything = [  # without the prefixes of torch.compile and activation checkpointing, so that any layout can load it
            (name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""), parameter)
            for part in model_parts
            for name, parameter in part.named_parameters()
        ]
        named = [(name, parameter) for name, parameter in everything if parameter.requires_grad]
        for members in split(named, self._schedule.fragments):
            optimizer = self._outer([parameter for _, parameter in members])
            self.fragments.append(Fragment(members, optimizer, alpha=self._schedule.alpha))
        self._manager.attach(self.fragments)
        self._manager.register_state("outer", self._state, self._heal)
        if frozen := {name: parameter for name, parameter in everything if not parameter.requires_grad}:
            # of a base model that a joining group has not loaded; a heal writes into the tensors
            self._manager.register_state("frozen", lambda: frozen, lambda state: None)

    def last_backward(self, slot: int) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_step(self, *, until: int | None = None) -> DataAssignment:
        """Returns slots that are batches, one for each of inner_steps optimizer steps."""
        assignment = self._manager.begin_step(until=None if until is None else self._round_of(until))
        if self._resets or self._gradients.dropped:  # the window that was computed before does not count
            self.reset()
        self._round, self._done, self._window = assignment.steps_before, 0, assignment.slots
        batch = self._manager.slot_size // self.inner_steps
        slots = tuple(slot + place * batch for slot in assignment.slots for place in range(self.inner_steps))
        return DataAssignment(assignment.steps_before * self.inner_steps, slots)

    def on_inner_step(self) -> None:
        """Counts an inner optimizer step. Sends the pseudo-gradients of the round's fragment `delay` steps before its end."""
        self._done += 1
        if self._done == self.inner_steps - self._schedule.delay:
            fragment = self.fragments[self._round % len(self.fragments)]
            for outer, gradient in zip(fragment.outer, fragment.pseudo_gradients(), strict=True):
                outer.grad = dtensor_like(outer, gradient)
            self._gradients.launch_buckets()

    def reduce(self, tokens_per_slot: Sequence[float], loss_sum: float, able: bool) -> StepTotals:
        """Reduces the round. `able`: also False if the round was ended early by a loss that is NaN or infinite."""
        assert not self._window or not able or self._done == self.inner_steps
        return self._manager.reduce((sum(tokens_per_slot),) if self._window else (), loss_sum, able)

    def commit(self, totals: StepTotals) -> Commit | None:
        commit = self._manager.commit(totals)
        if commit is None:
            return None
        fragment = self.fragments[(self._manager.step - 1) % len(self.fragments)]  # of the round that is committed
        if self._window and not {slot for slot, _ in commit.slots}.intersection(self._window):
            self.reset()
        means = [to_local(outer.grad) for outer in fragment.outer if outer.grad is not None]
        torch._foreach_div_(means, float(len(commit.slots)))  # a group contributes at most one slot to a round
        fragment.step(means)
        for outer in fragment.outer:
            outer.grad = None
        return commit

    def state_dict(self) -> dict[str, Any]:
        return {**self._manager.state_dict(), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError for a step between two rounds."""
        rounds, rest = divmod(int(state["step"]), self.inner_steps)
        if rest:
            raise ValueError(
                f"fault_tolerance.sync_steps = {self._schedule.sync_steps}: the checkpoint is of step {state['step']}, which is not "
                f"a multiple of {self.inner_steps}, the optimizer steps of a round"
            )
        self._manager.load_state_dict({**state, "step": rounds})

    @contextmanager
    def use_outer_weights(self) -> Iterator[None]:
        """Puts the outer weights into the model, between two rounds, to evaluate or export them. Waits first for joiners that still receive
        them, as after the last step, for heal_grace_s at most."""
        self._manager.healer.transport.fence()  # swap writes to the tensors that joiners receive
        for fragment in self.fragments:
            fragment.swap()
        try:
            yield
        finally:
            for fragment in self.fragments:
                fragment.swap()

    def checkpoint_state(self, model: Stateful) -> dict[str, Stateful]:
        """Returns the states of a checkpoint by name, to be loaded in this order: "model" with the outer weights, on which the groups
        agree; the outer optimizer's state; and the writer's local weights, if they may differ from the outer ones: all groups
        start from them again. `model`: gives all other state of the model, such as buffers."""
        states: dict[str, Stateful] = {
            "model": SimpleNamespace(
                state_dict=lambda: {**model.state_dict(), **_merged(x.weights() for x in self.fragments)},
                load_state_dict=partial(self._load_model, model),
            ),
            "outer_optimizer": SimpleNamespace(
                state_dict=lambda: _merged(x.optimizer_state() for x in self.fragments),
                load_state_dict=lambda state: [x.load_optimizer_state(state) for x in self.fragments],
            ),
        }
        if len(self.fragments) > 1 or self._schedule.alpha:
            states["local_model"] = SimpleNamespace(state_dict=self._local_state, load_state_dict=self._load_local)
        return states

    def _load_model(self, model: Stateful, state: dict[str, Any]) -> None:
        names = {name for fragment in self.fragments for name in fragment.names}
        model.load_state_dict({name: value for name, value in state.items() if name not in names})
        for fragment in self.fragments:
            fragment.load_weights(state)
        self._resets = True  # unless local weights are loaded next

    def _local_state(self) -> dict[str, Any]:
        named = (zip(fragment.names, fragment.local, strict=True) for fragment in self.fragments)
        return {name: local.detach() for pairs in named for name, local in pairs}

    @torch.no_grad()
    def _load_local(self, state: dict[str, Any]) -> None:
        for name, local in self._local_state().items():
            local.copy_(state[name])
        self._resets = self._gradients.dropped = False

    def _state(self) -> dict[str, Any]:
        return {str(place): fragment.state_dict() for place, fragment in enumerate(self.fragments)}

    def _heal(self, state: dict[str, Any]) -> None:
        for place, fragment in enumerate(self.fragments):
            fragment.load_state_dict(state[str(place)])
        self._gradients.drop_feedback()
        self.reset()

    def reset(self) -> None:
        """Sets the local weights back to the outer ones, which undoes the inner steps since."""
        for fragment in self.fragments:
            fragment.reset()
        self._resets = self._gradients.dropped = False


def _merged(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for state in states for name, value in state.items()}
