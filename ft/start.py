"""Makes the Seam (seam.py) of a run from its settings and environment: a SoloManager, or the Manager of one of several replica groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ft.config import Environment, FaultTolerance
from ft.protocol.messages import STEPS_PER_BRANCH, Rewound
from ft.protocol.step import Ledger
from ft.seam import Commit, DataAssignment, Seam, StepTotals, Stopped, from_checkpoint, to_checkpoint
from ft.telemetry import PhaseTimer, RecordEvent, ignore_event

if TYPE_CHECKING:
    from ft.agreement import Agreement
    from ft.process_groups.base import ProcessGroup


ALONE = "solo"  # replica ID of a job without replica groups


class SoloManager:
    """The Seam of a job without replica groups: a quorum of one, without network, thread or gRPC.

    It assigns positions of the data in order, one slot of `slot_size` sequences per step, and commits each step that is able and has a
    valid token; any other raises Stopped. Its ledger is that of replica groups: a run may resume with or without them; batch and ranks may
    differ."""

    def __init__(self, slot_size: int, skip_ranges: Sequence[tuple[int, int]] = ()) -> None:
        self.step = 0
        self._ledger, self._skip_ranges = Ledger(slot_size, skip_ranges=skip_ranges), skip_ranges
        self._registered: set[str] = set()
        self.may_exit, self.writer_quorum, self.last_waiting_for_others_at_s = False, ("", 0), -inf
        self._until: int | None = None
        self._leaves = False
        # nothing is all-reduced in a backward; `reduce` returns StepTotals of its arguments, as no other group adds to them
        self.last_backward: Callable[[int], AbstractContextManager[Any]] = nullcontext
        self.reduce: Callable[[Sequence[float], float, bool], StepTotals] = StepTotals

    def register_state(self, name: str, state_dict: Callable[[], Any], load_state_dict: Callable[[Any], None]) -> None:
        if name in self._registered:
            raise ValueError(f"state {name} is registered already")
        self._registered.add(name)

    def begin_step(self, *, until: int | None = None) -> DataAssignment:
        self._until = until
        return DataAssignment(self.step, tuple(self._ledger.assign([ALONE])))

    def commit(self, totals: StepTotals) -> Commit | None:
        divisor, assignment = sum(totals.tokens_per_slot), self._ledger.assignment
        slots = tuple(assignment)
        if not totals.ok:
            raise Stopped(f"step {self.step + 1}: the loss is NaN or infinite", slots)
        if divisor == 0:
            named = ", ".join(map(str, slots))
            raise Stopped(f"step {self.step + 1}: none of the sequences from {named} on has a target to learn", slots)
        self.step += 1
        self.may_exit = self._leaves or self.step == self._until
        contributed, _ = self._ledger.commit(totals.tokens_per_slot)
        trained, holes = tuple((slot, assignment[slot]) for slot in contributed), tuple(self._ledger.holes)
        mean_loss, skipped = totals.loss_sum / divisor, self._ledger.newly_skipped
        rewound = self._ledger.rewind_before(self.step) if self._ledger.rewinds else None
        return Commit(divisor, (0,), mean_loss, 1, slots=trained, holes=holes, skipped=skipped, rewound=rewound)

    def skip(self, slots: Sequence[int]) -> None:
        self._ledger.skipped_slots += slots

    def rewind(self, reason: str, load: Callable[[], object]) -> None:
        spiked, step = self._ledger.state_dict(), self.step
        # the initial state, unless `load` loads one
        self.step, self._ledger = 0, Ledger(self._ledger.slot_size, skip_ranges=self._skip_ranges)
        load()
        self._ledger.rewind(spiked, self.step, step, reason)
        self.may_exit = self._leaves

    @property
    def rewinds(self) -> list[Rewound]:
        return self._ledger.rewinds

    def state_dict(self) -> dict[str, Any]:
        state = {"step": self.step, "commit_id": "", "commit_quorum_id": 0}
        return to_checkpoint({**state, "ledger": self._ledger.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = from_checkpoint(state)
        self.step = state["step"] % STEPS_PER_BRANCH
        self._ledger.load_state_dict(state["ledger"], keep_assignment=False)

    @property
    def loaded_ledger(self) -> dict[str, Any]:
        return self._ledger.state_dict()

    def leave(self) -> None:
        self.may_exit = self._leaves = True

    needs_new_quorum = finished = False

    def _nothing(self, *given: Any, **named: Any) -> None:
        """Does nothing: there are no other groups, no dashboard, and no resources to release."""

    attach = want_to_leave = regroup = finish = show_event = close = _nothing


def open_manager(
    settings: FaultTolerance,
    environment: Environment,
    *,
    slot_size: int,
    skip_ranges: Sequence[tuple[int, int]] = (),
    folder: Path,
    device_type: str = "cpu",
    store: Any = None,
    agreement: Agreement | None = None,
    long_phase_s: float = 0.0,
    fingerprint: Sequence[tuple[str, str]] = (),
    restore: Callable[[], object] | None = None,
    phase_timer: PhaseTimer | None = None,
    record_event: RecordEvent = ignore_event,
) -> Seam:
    """Makes the Seam of a run. `slot_size`: sequences of a group's batch. `skip_ranges`: see Ledger. `folder`: for a drill's event log.
    `store`: the replica group's own, new in each launch. `device_type`: that of the gradients. `fingerprint`: digests by name, equal in all
    groups. `agreement`: of this group's ranks, if there are several. `long_phase_s`: see ManagerTelemetry. `restore`: loads the newest
    valid checkpoint, and the manager's state. `phase_timer`, `record_event`: see telemetry.py. Raises ValueError (settings, token),
    OSError (no lighthouse, no group server)."""
    if not settings.enable:
        return SoloManager(slot_size, skip_ranges)
    # imported here, because training without groups needs neither grpc nor threads
    from torch.optim import SGD

    from ft.addresses import advertised
    from ft.manager import Manager, ManagerOptions
    from ft.membership import ReplicaGroupConfig
    from ft.recording import RecordingManager
    from ft.rpc.access import Access
    from ft.semi_sync_manager import FragmentGradients, OuterOptimizer, SemiSyncManager

    slots_per_step, inner_steps = environment.slots_per_step(settings), settings.inner_steps
    contact_s = float(environment.connect_timeout_s or ReplicaGroupConfig.contact_s)
    config = ReplicaGroupConfig(
        name=environment.name,
        group_rank=environment.group_rank,
        world_size=environment.world_size,
        lighthouse=environment.lighthouse,
        host=advertised(settings.interface, environment.lighthouse, patience_s=contact_s),
        access=Access(environment.token, tls=environment.tls),
        times=settings.times,
        every_step=settings.quorum == "every_step",
        contact_s=contact_s,
    )
    options = ManagerOptions(
        slot_size=slot_size * inner_steps,
        inner_steps=inner_steps,
        keep_gradients=settings.keep_gradients,
        slots_per_step=slots_per_step,
        skip_ranges=tuple(skip_ranges),
        deterministic_reduce=settings.deterministic_reduce,
        heal_backlog=settings.heal_backlog,
        heal_transport=settings.heal_transport,
        heal_copy_bytes=settings.heal_copy_bytes,
        digest_interval=-(-settings.digest_interval // inner_steps),
        leave_if_divergent=settings.on_corruption == "leave",
        max_retries=None if settings.max_retries < 0 else settings.max_retries,
        long_phase_s=long_phase_s,
        init_sync=False,  # all groups initialise from the same seed, or load the same checkpoint
    )
    fingerprint = (*fingerprint, ("fault_tolerance.slots_per_step", str(slots_per_step)))
    make: Callable[..., Manager] = partial(RecordingManager, folder) if environment.injects_faults else Manager
    process_group, semi_sync = make_process_group(settings, device_type), settings.semi_sync_method != "none"
    gradients = (
        FragmentGradients(shared=process_group.IN_CHILD, quantized=settings.should_quantize) if semi_sync else None
    )
    given = dict(store=store, agreement=agreement, restore=restore, phase_timer=phase_timer, record_event=record_event)
    manager = make(process_group, config, options, fingerprint=fingerprint, gradients=gradients, **given)
    outer: OuterOptimizer = (
        partial(SGD, lr=settings.outer_lr, momentum=settings.outer_momentum, nesterov=settings.outer_nesterov)
        if settings.semi_sync_method == "diloco"
        else lambda weights: None  # Local SGD has no outer optimizer
    )
    return SemiSyncManager(manager, settings.schedule, outer) if semi_sync else manager


def process_group_env(settings: FaultTolerance, device_type: str) -> dict[str, str]:
    """Environment variables for collectives between replica groups, to be set before the first process group is made."""
    from ft.process_groups.nccl import process_settings

    return process_settings(settings.process_group_kind(device_type), settings.rendezvous_s)


def make_process_group(settings: FaultTolerance, device_type: str) -> ProcessGroup:
    """Makes the process group with the other replica groups, for gradients on a device of that type. Raises ValueError."""
    kind = settings.process_group_kind(device_type)
    from ft.process_groups.baby import ProcessGroupBabyGloo, ProcessGroupBabyNCCL
    from ft.process_groups.gloo import ProcessGroupGloo
    from ft.process_groups.nccl import ProcessGroupNCCL

    kinds: dict[str, type[ProcessGroup]] = {
        "gloo": ProcessGroupGloo,
        "nccl": ProcessGroupNCCL,
        "baby_gloo": ProcessGroupBabyGloo,
        "baby_nccl": ProcessGroupBabyNCCL,
    }
    return kinds[kind](settings.collective_s, rendezvous_s=settings.rendezvous_s)
