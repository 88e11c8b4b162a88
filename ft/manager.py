"""The Manager of a rank: carries out the effects of its step machine (protocol/step.py), which has all rules but three, the Manager's own:
a source announces a change as soon as its state is sent (`reduce`), the trainer may compute while the process group forms
(`_effect_ahead`), and members that cannot be reached or have a different fingerprint are blamed (`_blame`). `ft.Manager` is torchft's
interface over this class (compat/manager.py).

    trainer ---begin_step, reduce, commit---> Manager ---events---> StepMachine ---effects---> Manager ---> Gradients     kept and reduced
                                                 ^                                               ---> ProcessGroup  other groups' ranks
    group server ---notices, in a thread---------+                                               ---> Healer        offers, fetches state
                                                                                                 ---> GroupClient   quorum requests, votes

Any thread may feed the machine: the threads of notices, of a fetch, of background votes, and that of the step (the trainer's; in a
backward of ft.Manager autograd's), which carries out all effects but InterruptCollectives, in order, inside begin_step, reduce, commit and
rewind. A notice, in its own thread, ends the offer of its generation and interrupts the trainer's wait for peers. Configure may overlap
with the trainer's forward and backward (`_effect_ahead`): the process group forms meanwhile, and nothing is launched before `reduce`.

    timeout of                                       what the trainer gets
    a collective or a rendezvous with other groups   no exception: the step is repeated, in begin_step or after `commit` returned None
    a heal (heal_grace_s)                            no exception: this group heals again, under a new id if the others wait for it
    a quorum request (quorum_s)                      Stopped; also after more than max_retries failed attempts in a row
    a vote, the ranks' agreement                     GroupEnded; of a vote after VOTE_TRIES times VOTE_S (rpc/clients.py) in which no
                                                     message says that the group waits for others
    start-up                                         TimeoutError, ConnectionError or ChildProcessError, which are OSErrors

A program that uses a process group itself gets a ProcessGroupError, from `configure` and from a work's `wait`."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch._C._distributed_c10d import Store

from ft.agreement import Agreement
from ft.digest import compared, digest
from ft.gradients import Gradients
from ft.healer import MACHINE_STATE, Healer
from ft.healing.capture import StateRegistry
from ft.healing.http_transport import HttpTransport
from ft.healing.pg_transport import PgTransport
from ft.healing.transport import HealConfig, Transport
from ft.membership import ReplicaGroupConfig, join
from ft.process_groups.base import ProcessGroup
from ft.process_groups.errors import MustExit, ProcessGroupError, RendezvousFailed
from ft.process_groups.gloo import ProcessGroupGloo
from ft.process_groups.probe import Prober
from ft.protocol import messages as m
from ft.protocol.compare import as_sent
from ft.protocol.messages import STEPS_PER_BRANCH, VOID
from ft.protocol.step import Ledger, Phase, StepConfig, StepMachine
from ft.rpc.access import Access
from ft.rpc.clients import GroupClient, SettingsRefused
from ft.rpc.codec import HAS_LEFT
from ft.rpc.driver import Observer
from ft.seam import (
    BadInput,
    Commit,
    DataAssignment,
    GroupEnded,
    GroupReleased,
    StepTotals,
    Stopped,
    from_checkpoint,
    to_checkpoint,
)
from ft.telemetry import ManagerTelemetry, NoPhaseTimer, PhaseTimer, RecordEvent, Status, ignore_event

HEAL_PHASES = (Phase.AWAITING_STATE, Phase.CLOSING_HEAL)  # phases whose only wait is for a heal
PHASE_OF: dict[type[m.Effect], str] = {  # effects whose time counts as a phase of telemetry.PhaseTimer
    m.AskQuorum: "quorum",
    m.Configure: "rebuild",
    m.AbandonGeneration: "rebuild",
    m.Fence: "heal",
    m.LoadState: "heal",
    m.DropHeld: "heal",
}
TICK_S = 0.5  # between two Ticks of a wait
MISMATCHED_KEPT = 64  # most members with a different fingerprint that are remembered
# share of heartbeat_timeout_s after which a peer that answers no probe is unreachable; the other 0.4 are for the wait before the first
# probe (Prober.wait_s) and the pause between two checks, 1.5 s: a timeout below 3.75 s may pass before a probe has ended
PROBE_FRACTION = 0.6
CLOSE_S = 1.0  # longest wait of `close` for process groups to end, which takes milliseconds if no thread of gloo is stuck (gloo.form_gloo)
log = logging.getLogger("pharos.manager")

AttemptId = tuple[int, int, int]  # quorum_id, attempt, step
TrainerEffect = m.Compute | m.LaunchRemaining | m.CommitStep  # the trainer computes, has zeros reduced, or commits


@dataclass(frozen=True)
class ManagerOptions(StepConfig):
    """Settings of a Manager and its machine; `group_rank`, `every_step` and `heal_grace_s` come from ReplicaGroupConfig, `restores`
    from the Manager's argument `restore`."""

    init_sync: bool = True  # unlike in StepConfig, as a program may initialise its groups differently
    slot_size: int = 1  # sequences of a slot, the batch of one group
    inner_steps: int = 1  # optimizer steps from one commit to the next (semi_sync_manager.py)
    slots_per_step: int = 0  # slots of each step; 0: one for each participant
    skip_ranges: tuple[tuple[int, int], ...] = ()  # positions that are not trained on (Ledger)
    deterministic_reduce: bool = False  # bits do not depend on the group that computes a slot; needs slots_per_step
    heal_transport: Literal["http", "pg"] = "http"  # unless the Manager is given a transport
    heal_copy_bytes: int = 256 << 20
    long_phase_s: float = 0.0  # limit of a first step, checkpoint, validation or trace; 0: not reported
    quorum_s: float | None = None  # timeout of a quorum request; None: no limit
    dies_with_group: bool = True  # the group server may kill this process; False: ranks of other groups run in it, too


class Manager:
    """The Seam (seam.py) of one rank of a job with several replica groups. A program written for torchft imports ft.Manager instead.

    `process_group`: that of this rank and the same rank of the other replica groups; configured and closed here. `config`, `options`: of
    the group and its Managers; equal in all ranks but for group_rank. `store`: the store of this replica group, if it has several ranks.
    `transport`: of the state, by default that of options.heal_transport. `gradients`: by default made of `options`. `fingerprint`:
    (name, digest) of what must be equal in all groups, such as settings; those of the gradients' layout are added. `restore`: loads the
    newest valid checkpoint, if any, and with it this Manager's state (load_state_dict). `agreement`: decides on commits among the ranks of
    this group, if there are several; without it each rank votes on each step at the group server. `phase_timer`, `record_event`: receive
    durations and events (telemetry.py). `observer`: receives every event of the machine with its effects. `connect`: connects to the group
    server. `machine`, `client` and `closed` may be read from any thread.

    Raises OSError (the group server does not start), ValueError (the access token, or a lighthouse of torchft without every_step),
    RuntimeError (several ranks without `store`)."""

    def __init__(
        self,
        process_group: ProcessGroup,
        config: ReplicaGroupConfig,
        options: ManagerOptions,
        *,
        store: Store | None = None,
        agreement: Agreement | None = None,
        transport: Transport | None = None,
        gradients: Gradients | None = None,
        fingerprint: Sequence[tuple[str, str]] = (),
        restore: Callable[[], object] | None = None,
        phase_timer: PhaseTimer | None = None,
        record_event: RecordEvent = ignore_event,
        observer: Observer | None = None,
        connect: Callable[[str, int, Access], GroupClient] = GroupClient,
    ) -> None:
        self.process_group, self._config, self._options = process_group, config, options
        self._fingerprint, self._restore, self._agreement, self._observer = fingerprint, restore, agreement, observer
        self._telemetry = ManagerTelemetry(
            config.group_rank,
            lambda: self.step * options.inner_steps,
            phase_timer or NoPhaseTimer(),
            record_event,
            lambda *what: self.client.show_event(*what),
            options.inner_steps,
            options.long_phase_s,
            # a torchft program may wait for its reductions by itself, in its body
            pending_since_s=(lambda: process_group.waits_since_s) if options.zeros_wait else (lambda: None),
            quorum_id=lambda: self.quorum.quorum_id if self.quorum else 0,
        )
        self.gradients = gradients or Gradients(
            keep=options.keep_gradients,
            shared=process_group.IN_CHILD,
            slots=options.slots_per_step if options.deterministic_reduce else 0,
        )
        self.slot_size = options.slot_size
        self.state = StateRegistry()
        self.register_state = self.state.register_state
        self.closed = threading.Event()
        # commits in the trainer's state (rounds with inner_steps > 1); the machine may be ahead by held steps
        self.step = 0
        self.commit_id = ""  # commit ID of that state: equal IDs, the same history
        self.quorum: m.QuorumResult | None = None  # the newest quorum, as this rank has it
        self._launched = 0  # attempts that were launched in the newest quorum
        self._has_formed = False  # True once a generation was formed
        self._has_committed = False  # True once a step was committed
        self._has_checked_state = False  # True once the state was checked for values that cannot be sent
        self._mismatched: dict[str, None] = {}  # members whose fingerprint differs from this group's
        self._interrupted_quorum = 0  # newest quorum_id whose collectives were interrupted
        self._attempt_id: AttemptId | None = None  # attempt that gradients.begin_attempt was called for
        self._parts: list[Any] = []  # of the model
        self._trainer_effect: TrainerEffect | None = None  # effect that the trainer has to carry out
        self._is_forming = False  # True: the process group forms while the trainer computes, and `reduce` awaits it
        # Compute that the trainer carried out while the process group formed; the machine has yet to emit it
        self._ahead: m.Compute | None = None
        self._zeros_sent = (0, 0)  # quorum ID and step of the newest zeros that `reduce` has launched
        self.quorum_s = options.quorum_s  # may be changed between two steps, as may shrink_only
        self.shrink_only = False  # True: no further group may join in the next quorum
        self._until: int | None = None  # number of the last step, as the machine was last told
        self._assignment: DataAssignment | None = None
        self._restored: dict[str, Any] | None = None
        self._stopped: tuple[bool, str] | None = None  # `clean`, `reason` of client.leave, after effect Stop
        self._saved: bool | None = None  # argument of `finish`; None: not called
        self.may_exit = self._leaves = False  # _leaves: `leave` was called
        step_config = replace(
            options,
            group_rank=config.group_rank,
            every_step=config.every_step,
            heal_grace_s=config.times.heal_grace_s,
            restores=restore is not None,
        )
        self.machine = StepMachine(step_config, Ledger(options.slot_size, options.slots_per_step, options.skip_ranges))
        self._news = threading.Condition()  # its lock also guards the machine
        self._effects: deque[m.Effect] = deque()  # for the trainer's thread
        self._error: BaseException | None = None  # error of another thread, to be raised in the trainer's
        # the machine takes its state from HealEnded
        self.state.register_state(MACHINE_STATE, self.machine.state_dict, lambda state: None)
        self.membership = join(config, store)
        self.replica_id = self.membership.replica_id
        with ExitStack() as undo:  # if the rest fails, no server of this group may live on, which would keep its name
            if self.membership.server:
                undo.callback(self.membership.server.close)
            self._start(undo, transport, connect)
            undo.pop_all()

    def _start(
        self, undo: ExitStack, transport: Transport | None, connect: Callable[[str, int, Access], GroupClient]
    ) -> None:
        """Opens the prober, the transport and the connection to the server, and starts the threads. `undo`: receives what closes them."""
        config, process_group = self._config, self.process_group
        self._prober = Prober(config.host, PROBE_FRACTION * config.times.heartbeat_timeout_s)
        undo.callback(self._prober.close)
        self.healer = Healer(
            self.state,
            transport or self._make_transport(),
            group_rank=config.group_rank,
            access=config.access,
            grace_s=config.times.heal_grace_s,
            on_event=self._feed_from_thread,
            on_cannot_heal=self._on_cannot_heal,
        )
        undo.callback(self.healer.close)
        self.client = connect(self.membership.address, config.group_rank, config.access)
        undo.callback(self.client.close)
        self.want_to_leave = self.client.want_to_leave
        self._prober.start(lambda: process_group.waits_since_s, self._on_unreachable)
        self.client.watch(self._on_notice, self._ended, pid=None if self._options.dies_with_group else 0)

        # reported at once when they change: heal progress, the attempt that is waited for, unreachable members
        def reported(status: Status) -> object:
            launched = self._launched if status.waiting else 0
            return self.healer.progress, launched, self._prober.unreachable

        given = (config.times.beat_s, self.closed, self._report, reported)
        threading.Thread(target=self._telemetry.report_forever, args=given, name="ft-report", daemon=True).start()

    # ------------------------------------------------------------------------------------------------ the Seam interface

    @property
    def writer_quorum(self) -> tuple[str, int] | None:
        """Epoch and quorum ID if this group is the writer: the first of the quorum's participants, while its state is not void."""
        quorum = self.quorum
        if quorum is None or quorum.participants[:1] != (quorum.replica_id,) or self.machine.void:
            return None
        return quorum.epoch, quorum.quorum_id

    def attach(self, model_parts: Sequence[Any]) -> None:
        for part in model_parts:
            self.gradients.attach(part.parameters())
            self._parts.append(part)

    def last_backward(self, slot: int | None = None) -> AbstractContextManager[None]:
        """Wraps the last backward of a slot (None: the only one): in it gradients are sent once complete, without it in `reduce`."""
        if slot is None or self._assignment is None:
            return self.gradients.last_backward()
        if self._options.deterministic_reduce:
            return self.gradients.last_backward([*self.machine.ledger.assignment].index(slot))
        return self.gradients.last_backward() if slot == self._assignment.slots[-1] else nullcontext()

    def begin_step(self, *, until: int | None = None) -> DataAssignment:
        """Returns an assignment without slots if this group has nothing to compute; it still applies the sums of the others."""
        if self._assignment is None:
            if self._has_committed and not self._has_checked_state:
                self._has_checked_state = True  # now, as the first optimizer step may have added values
                self.healer.check_state()
            if until is not None and until != self._until:
                self._feed(m.Leaving(until))
                self._until = until
            if self.machine.phase is Phase.BOUNDARY and not self._effects:
                self._feed(m.Begin())
            effect = self._carry_out_effects()
            assert effect is not None
            if isinstance(effect, m.Compute):
                if self._options.deterministic_reduce:
                    assigned = [*self.machine.ledger.assignment]
                    self.gradients.begin_backward([assigned.index(slot) for slot in effect.slots])
                else:
                    self.gradients.begin_backward()
                self._assignment = DataAssignment(effect.step % STEPS_PER_BRANCH, effect.slots)
            else:
                committed = isinstance(effect, m.CommitStep)  # whose step already counts the committed one
                self._assignment = DataAssignment(effect.step % STEPS_PER_BRANCH - committed, ())
            if until is not None and self._assignment.steps_before >= until:
                self.may_exit = True  # no group has a step left to train
        return self._assignment

    def reduce(
        self, tokens_per_slot: Sequence[float], loss_sum: float, able: bool, *, kept: bool = True, failure: str = ""
    ) -> StepTotals:
        """Returns when all reductions are complete, or when the attempt has failed and slots must be computed anew. If a group fails
        meanwhile, reductions are repeated in a new generation, and no step is lost. `kept`: a further attempt would send the same
        gradients. `failure`: the reason, if this attempt has to fail."""
        effect, is_computed = self._trainer_effect, True
        if self._is_forming:
            assert isinstance(effect, m.Compute) and self.quorum is not None
            self._is_forming, self._ahead, self._trainer_effect = False, effect, None
            with self._telemetry.phase_timer.phase("rebuild"):
                self._feed(self._wait_formed(self.quorum))
            effect = self._carry_out_effects()
            # _drop_gradients, an effect, drops what was computed ahead
            is_computed, self._ahead = self._ahead is not None, None
        if isinstance(effect, m.Compute | m.LaunchRemaining) and is_computed:
            assert self.quorum is not None
            self._trainer_effect = None
            if failure:
                self._feed(m.ReduceFailed(self.quorum.quorum_id, effect.attempt, effect.step, failure))
            if isinstance(effect, m.Compute):
                if self.quorum.recover_dst_replica_ranks and self.healer.transport.is_fully_sent:
                    # With this change the healed groups get slots in the next step. They themselves can announce it only in that step's
                    # tail, as they launched this step's zeros when they had no state.
                    why = "the groups that heal from this one have received the state"
                    self._feed(m.ChangeAnnounced(self.quorum.quorum_id, why))
                self._feed(m.Computed(tuple(tokens_per_slot), loss_sum, able, kept))
            elif not failure:
                self._zeros_sent = (effect.quorum_id, effect.step)
                self._feed(self._launch(effect))
            effect = self._carry_out_effects(before_vote=True)
        if effect is None:  # the next effect is the vote "yes"
            tail = self.machine.tail
            assert tail is not None, "all reductions are complete"
            return StepTotals(tuple(max(0.0, count) for count in tail.tokens), tail.loss_sum, True)
        if isinstance(effect, m.CommitStep):
            return StepTotals((effect.divisor,), effect.mean_loss * effect.divisor, True)
        slots = effect.slots if isinstance(effect, m.Compute) else ()  # a new assignment: the attempt has failed
        return StepTotals((0.0,) * len(slots), 0.0, False)

    def commit(self, totals: StepTotals) -> Commit | None:
        effect, assignment, self._assignment = self._carry_out_effects(), self._assignment, None
        if not isinstance(effect, m.CommitStep):
            return None
        if assignment and assignment.slots and not {slot for slot, _ in effect.slots}.intersection(assignment.slots):
            self._telemetry.lost()
        self._trainer_effect, self.step, self.commit_id = None, effect.step % STEPS_PER_BRANCH, effect.commit_id
        self._has_committed = True
        telemetry, now_s = self._telemetry, time.monotonic()
        telemetry.step_seconds.append(now_s - telemetry.committed_at_s)
        telemetry.committed_at_s, telemetry.first_began_s, telemetry.mean_loss = now_s, math.inf, effect.mean_loss
        self.may_exit = self.may_exit or effect.leave
        return effect

    def skip(self, slots: Sequence[int]) -> None:
        self._feed(m.Skipped(tuple(slots)))

    def rewind(self, reason: str, load: Callable[[], object]) -> None:
        self._feed(m.Rewind(reason))
        with self._news:  # the effects before this event are those of the state that is given up
            later = [*self._effects][::-1]
            # Stop: the machine has ended at this commit and takes no further event
            begin = next(i for i, effect in enumerate(later) if isinstance(effect, m.AbandonGeneration | m.Stop))
            self._effects = deque(later[begin::-1])
        self._carry_out_effects(until=lambda: True)
        self.may_exit = self._leaves  # not because this was the last step
        self.step, self.commit_id, self._restored = 0, "", None
        self.healer.touched = True  # what the tensors hold, unless `load` has loaded a checkpoint, is no initial state
        load()
        if self._restored is None:
            self._feed(m.Restored(None))
        self._carry_out_effects(until=lambda: True)

    @property
    def rewinds(self) -> Sequence[m.Rewound]:
        return self.machine.ledger.rewinds

    def state_dict(self) -> dict[str, Any]:
        return to_checkpoint(self.machine.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._restored = from_checkpoint(state)
        self.step, self.commit_id = self._restored["step"] % STEPS_PER_BRANCH, self._restored["commit_id"]
        if self.machine.phase is Phase.BOUNDARY:
            self._feed(m.Restored(self._restored))

    @property
    def loaded_ledger(self) -> dict[str, Any]:
        return self._restored["ledger"] if self._restored else {}

    @property
    def last_waiting_for_others_at_s(self) -> float:
        return self.client.last_waiting_for_others_at_s

    def leave(self) -> None:
        self._leaves = True
        self._feed(m.Leaving())

    @property
    def needs_new_quorum(self) -> bool:
        return bool(self.machine.abort_reason)

    @property
    def finished(self) -> bool:
        return self.machine.finished

    def regroup(self, until: int) -> None:
        """Forms a new generation after the last step. If a further step was begun, it is dropped."""
        if self._assignment is not None:
            # kept=False: its slots are assigned anew; in a further attempt with these no group could contribute
            self.commit(self.reduce([0.0] * len(self._assignment.slots), 0.0, True, kept=False))
        self.begin_step(until=until)

    def finish(self, *, saved: bool) -> None:
        self._saved = saved

    def show_event(self, lane: str, text: str) -> None:
        self.client.show_event(lane, self.step, text)

    def close(self, *, at_exit: bool = False) -> None:
        """`at_exit`: does only what the rest of the job waits for, as no thread can be started at a program's end."""
        if self.closed.is_set():
            return
        self.closed.set()
        with suppress(TimeoutError, RuntimeError):  # the server may be gone
            clean = self.may_exit and self._saved is not False
            why = "done" if clean else "closed" if self._saved is None else "ends before its last step is saved"
            clean, why = self._stopped or (clean, why)
            self.client.leave(clean=clean, reason=why, finished=self._saved is True)
        if at_exit:
            return
        self.client.close()
        self._prober.close()
        self.healer.close()
        with suppress(MustExit):
            self.process_group.shutdown(CLOSE_S)
        self.gradients.close()  # its hooks on parameters that are still in use would keep its buffers alive
        if self.membership.server:
            self.membership.server.close()

    # ------------------------------------------------------------------------------------------------ the machine

    def _feed(self, event: m.Event) -> None:
        """Feeds the machine, from any thread. Effects are queued for the trainer's thread, except for InterruptCollectives, which is
        carried out here: the trainer's thread may be in the very wait that it interrupts."""
        with self._news:
            now_s = time.monotonic()
            out = self.machine.handle(event, now_s)
            if self._observer:
                self._observer(now_s, event, out)
            self._effects += [effect for effect in out.effects if not isinstance(effect, m.InterruptCollectives)]
            self._news.notify_all()
        for effect in out.effects:
            if isinstance(effect, m.InterruptCollectives):  # it may name a generation that has not formed yet
                self._interrupted_quorum = max(self._interrupted_quorum, effect.quorum_id)
                self.process_group.interrupt(effect.reason, effect.quorum_id)

    def _feed_from_thread(self, event: m.Event) -> None:
        """Feeds the machine from a thread other than the trainer's, where errors are raised."""
        try:
            self._feed(event)
        except BaseException as error:  # noqa: BLE001 (raised by `_await_effect`)
            self._raise_in_trainer(error)

    def _raise_in_trainer(self, error: BaseException) -> None:
        """Raises the error in the trainer's thread, before its next effect."""
        with self._news:
            self._error = self._error or error
            self._news.notify_all()

    def _await_effect(self, enough: Callable[[], bool] = lambda: False) -> bool:
        """Waits for an effect, or until `enough()` is True. Returns True if there is an effect. Raises the error of `_raise_in_trainer`."""
        while True:
            with self._news:
                self._news.wait_for(lambda: bool(self._effects or self._error) or enough(), TICK_S)
                if self._error is not None:
                    raise self._error
                if self._effects or enough():
                    return bool(self._effects)
            self._feed(m.Tick())

    def _left_after_commit(self) -> bool:
        """Returns True if a different rank of this group has left after a commit that is queued here: that rank had the outcome earlier."""
        with self._news:
            commits = any(isinstance(effect, m.CommitStep) for effect in self._effects)
        return commits and isinstance(self._error, GroupEnded) and str(self._error).startswith(HAS_LEFT)

    def _carry_out_effects(
        self, *, before_vote: bool = False, until: Callable[[], bool] = lambda: False
    ) -> TrainerEffect | None:
        """Carries out effects, and feeds the machine the event that answers each; returns the first one for the trainer. None: `until()` is
        True, or, with `before_vote`, the next effect is this rank's "yes" to the commit. Raises what Seam.commit raises."""
        phase_timer, machine = self._telemetry.phase_timer, self.machine
        while self._trainer_effect is None:
            if before_vote and machine.phase is Phase.VOTING and self._effects:
                effect = self._effects[0]
                if isinstance(effect, m.CastVote) and effect.vote.kind == "commit" and effect.vote.verdict == "yes":
                    break
            if not self._effects or (self._error and not self._left_after_commit()):
                with phase_timer.phase("heal") if machine.phase in HEAL_PHASES else nullcontext():
                    if not self._await_effect(until):
                        break
            effect, event, quorum = self._effects.popleft(), None, self.quorum
            if self._ahead and isinstance(effect, m.LaunchRemaining | m.CommitStep | m.LoadState | m.LoadCheckpoint):
                self._drop_gradients()  # this group owns no slots, or its weights are replaced
            phase = PHASE_OF.get(type(effect))
            with phase_timer.phase(phase) if phase else nullcontext():
                match effect:
                    case m.Compute():
                        assert quorum is not None
                        if self._ahead and (effect.step, effect.slots) != (self._ahead.step, self._ahead.slots):
                            self._drop_gradients()  # the assignment has changed
                        self._begin_attempt((quorum.quorum_id, effect.attempt, effect.step))
                        if self._telemetry.first_began_s is None:
                            self._telemetry.first_began_s = time.monotonic()
                        self._trainer_effect = effect
                    case m.LaunchRemaining():
                        event = self._launch_when_healed(effect) if self._options.zeros_wait else self._launch(effect)
                    case m.CastVote(vote):
                        event = self._cast_vote(vote)
                    case m.CommitStep():
                        held = effect.step % STEPS_PER_BRANCH if effect.held else None
                        self.gradients.deliver(held, contributors=len(effect.contributors))
                        self._attempt_id = self._attempt_id if effect.held else None
                        self._trainer_effect = effect
                    case m.AskQuorum(call):
                        event = self._request_quorum(call)
                    case m.Configure(new_quorum):
                        event = self._configure(new_quorum)
                    case m.AbandonGeneration(quorum_id):
                        self._telemetry.failed(machine.reason)
                        free = self.gradients.abandon() if self._attempt_id else None
                        self._attempt_id = None
                        self.process_group.abandon(f"quorum {quorum_id} failed", then=free)
                    case m.DropGradients():
                        self._drop_gradients()
                    case m.ReportWeightsDiffer():
                        assert quorum is not None
                        self._telemetry.difference(effect, quorum.members)
                    case m.Fence():  # blocks for heal_grace_s and a copy at most; reported with twice that limit, so that it is no stall
                        with self._telemetry.sends(2 * self._config.times.heal_grace_s):
                            self.healer.transport.fence()
                    case m.HoldSums(step):
                        self.gradients.hold(step % STEPS_PER_BRANCH)
                        self._attempt_id = None
                    case m.DropHeld():
                        self.gradients.drop_held()
                        self.healer.drop()
                    case m.LoadState(step):
                        self._load_state(step)
                    case m.LoadCheckpoint():
                        event = self._load_checkpoint()
                    case m.RejoinUnderNewId(reason):
                        assert quorum is not None
                        self.client.rejoin_under_new_id(quorum.quorum_id, reason)
                    case m.Stop(reason, slots, clean):
                        self._stopped = (clean, f"stopped: {reason}")
                        # a later call raises it again: the machine has ended
                        self._error, self._assignment = Stopped(reason, slots), None
                        raise self._error
                    case m.ReportSettled():
                        pass  # for observers
                    case _:
                        raise NotImplementedError(f"an effect that the Manager cannot carry out: {effect}")
            if event is not None:
                self._feed(event)
        return self._trainer_effect

    def _request_quorum(self, call: m.RankCall) -> m.Event | None:
        self.gradients.prepare()
        try:
            self.process_group.prepare()
        except ProcessGroupError as error:
            raise GroupEnded(str(error)) from None
        member = replace(
            call.member,
            shrink_only=self.shrink_only,
            commit_failures=int(call.failed),
            writes_checkpoint=self.writer_quorum is not None,
            reconfigure_handles=(self._prober.handle,),
        )
        call = replace(
            call,
            member=member,
            checkpoint_metadata=self.healer.transport.address,
            fingerprint=self._job_fingerprint,
            blame=self._blame,
        )
        try:
            # twice: a killed process that cannot die keeps the name for heartbeat_timeout_s and two heartbeats (GroupService)
            event = self.client.ask_quorum(call, self.quorum_s, 2 * self._config.times.heartbeat_timeout_s)
        except SettingsRefused as error:
            raise BadInput(f"group {self._config.name} cannot take part: {error}") from None
        if isinstance(event, m.Released):
            raise GroupReleased(has_state=not self.machine.void)
        return event

    def _configure(self, quorum: m.QuorumResult) -> m.Event | None:
        """Offers the state, forms the process group, then starts a fetch, which no other group waits for. None: the group forms
        meanwhile."""
        if not quorum.same_generation:
            self._launched = 0  # before the quorum's ID, as the thread "ft-report" reads the two in the reverse order
        self.quorum = quorum
        self.replica_id = quorum.replica_id
        handles = dict(zip(quorum.members, quorum.handles, strict=False))
        self._prober.watch({member: handle for member, handle in handles.items() if member != quorum.replica_id})
        self._telemetry.quorum(quorum)
        with self._telemetry.phase_timer.phase("heal"):
            self.healer.offer(quorum)
        event: m.Event | None = m.Configured(quorum.quorum_id, ok=True)
        if not quorum.same_generation:
            try:
                self.process_group.configure(
                    f"{quorum.store_address}/{quorum.epoch}/{quorum.quorum_id}/{self._config.group_rank}",
                    quorum.replica_rank,
                    len(quorum.members),
                    quorum_id=quorum.quorum_id,
                    fingerprint=self._job_fingerprint,
                    holders=[rank for rank, member in enumerate(quorum.members) if member in quorum.participants],
                    wait=False,
                )
            except ProcessGroupError as error:  # too many old generations, or a preparation that fails
                raise GroupEnded(str(error)) from None
            self._trainer_effect = self._effect_ahead()
            self._is_forming = self._trainer_effect is not None
            event = None if self._is_forming else self._wait_formed(quorum)
        self.membership.sweep(quorum.quorum_id)
        if quorum.heal:
            with self._telemetry.phase_timer.phase("heal"):
                self.healer.fetch(quorum)
        return event

    def _effect_ahead(self) -> m.Compute | None:
        """Returns the Compute that the trainer may carry out while the process group forms, equal on all ranks of the group. None: in
        `reduce`, before the first commit, in the last step, without slots, without keep_gradients, with gradients kept from a failed
        attempt, or where the backward or a body (the program's code from start_quorum to should_commit) needs an attempt that has begun."""
        machine, options, until = self.machine, self._options, self._until
        is_first_or_last = not self._has_committed or (until is not None and self.step + 1 >= until)
        needs_attempt = options.zeros_wait or options.deterministic_reduce or not self.gradients.can_run_ahead
        needs_attempt = needs_attempt or not options.keep_gradients or bool(machine.contribution.tokens)
        if self._assignment is not None or is_first_or_last or needs_attempt or not (slots := machine.owned_slots()):
            return None
        return m.Compute(machine.attempt_id[2], slots, machine.attempt_id[1])

    def _wait_formed(self, quorum: m.QuorumResult) -> m.Configured:
        try:
            self.process_group.wait_formed()
        except RendezvousFailed as error:
            if error.mismatched:
                self._exclude_mismatched(quorum, {quorum.members[rank] for rank in error.mismatched}, str(error))
                return m.Configured(quorum.quorum_id, ok=False, reason=str(error))
            known = not set(quorum.members).isdisjoint(self._prober.unreachable)  # if so, no probe is awaited
            self._prober.probe(enough=lambda: known or self._interrupted_quorum >= quorum.quorum_id)
            return m.Configured(quorum.quorum_id, ok=False, reason=str(error))
        self._has_formed = True
        return m.Configured(quorum.quorum_id, ok=True)

    def _exclude_mismatched(self, quorum: m.QuorumResult, mismatched: set[str], why: str) -> None:
        """Blames the members with a different fingerprint from now on, so that they are in no quorum with this group again. If this
        group is the one that differs: raises BadInput in a newcomer; one that has formed a generation before waits until groups with its
        fingerprint return."""
        others = set(quorum.members) - mismatched if quorum.replica_id in mismatched else mismatched
        self._mismatched = dict.fromkeys([*self._mismatched, *sorted(others)][-MISMATCHED_KEPT:])
        if quorum.replica_id not in mismatched:
            log.warning("%s: left out of the next quorum: %s", why, ", ".join(sorted(mismatched)))
        elif self._has_formed:
            log.error("%s: this group, replica rank %d, waits until groups like it return", why, quorum.replica_rank)
        else:
            raise BadInput(
                f"group {self._config.name} cannot take part: {why}; it is replica rank {quorum.replica_rank}"
            )

    def _on_cannot_heal(self, why: str) -> None:
        """Called in the fetch thread if no source can send its state, or all sources' states have a different layout from this rank's; in
        the trainer's thread if this rank's own state cannot be sent. Raises BadInput in the trainer's thread, unless this rank has
        committed a step (to have formed a generation is not enough: a newcomer forms one before it heals)."""
        if self._has_committed:
            log.error("%s: this group waits until it can receive the state of the others", why)
        else:
            self._raise_in_trainer(
                BadInput(f"group {self._config.name} cannot take part: it cannot receive the others' state: {why}")
            )

    def _make_transport(self) -> Transport:
        config, options = self._config, self._options
        heal = HealConfig(heal_copy_bytes=options.heal_copy_bytes, heal_grace_s=config.times.heal_grace_s)
        if options.heal_transport == "http":
            return HttpTransport(config.host, self.replica_id, config.access, heal)
        # gloo, whatever reduces the gradients: the transport sends host memory; a silent peer is given up after heal_grace_s, as over HTTP
        make = partial(ProcessGroupGloo, heal.heal_grace_s, rendezvous_s=config.times.rendezvous_s)
        return PgTransport(make, config.host, self.replica_id, heal)

    @property
    def _job_fingerprint(self) -> m.Fingerprint:
        """Fingerprint that must be equal in all groups of the job."""
        return (*self._fingerprint, *self.gradients.fingerprint)

    @property
    def _blame(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([*self._prober.unreachable, *self._mismatched]))

    def _on_unreachable(self, members: tuple[str, ...]) -> None:
        """Interrupts a generation with unreachable members, as a wait for them would last until its timeout. In the prober's thread."""
        quorum = self.quorum
        if quorum is not None and set(members) <= set(quorum.members):
            why = f"{' and '.join(members)} cannot be reached"
            log.warning("%s", why)
            self.process_group.interrupt(why, quorum.quorum_id)

    def _begin_attempt(self, attempt: AttemptId, *, contributes: bool = True) -> None:
        """Begins an attempt. An earlier one on this generation, if any, is complete and not committed."""
        assert self.quorum is not None
        count, step = len(self.quorum.participants), attempt[2] % STEPS_PER_BRANCH
        self.gradients.begin_attempt(self.process_group, count, contributes=contributes, step=step)
        self._attempt_id = attempt

    def _launch_when_healed(self, effect: m.LaunchRemaining) -> m.Event | None:
        """For ft.Manager (compat/manager.py), whose step has a body. Launches at once what needs no body: gradients; zeros of an attempt
        that has begun; what this step's body has sent before, if the user has not written to a tensor since. Else waits for an open heal,
        and leaves the zeros to the body, at whose end `reduce` launches them. Without a state the attempt fails."""
        machine, attempt = self.machine, (effect.quorum_id, effect.attempt, effect.step)
        repeats = bool(machine.contribution.tokens) or (effect.quorum_id, effect.step) == self._zeros_sent
        if not effect.zeros or attempt == self._attempt_id or (repeats and self.gradients.can_repeat):
            return self._launch(effect)
        self.gradients.drop()
        self._begin_attempt(attempt, contributes=False)
        with self._telemetry.phase_timer.phase("heal"):
            self._carry_out_effects(until=lambda: machine.heal is None or self._interrupted_quorum == effect.quorum_id)
        if machine.void:
            return m.ReduceFailed(effect.quorum_id, effect.attempt, effect.step, "the state has not arrived")
        self._trainer_effect = effect
        return None

    def _launch(self, effect: m.LaunchRemaining) -> m.Event:
        attempt, telemetry = (effect.quorum_id, effect.attempt, effect.step), self._telemetry
        if self._attempt_id != attempt:
            self._begin_attempt(attempt, contributes=not effect.zeros)
        self._launched += 1
        try:
            tail = effect.tail
            # place of the digest of this rank's weights and buffers, which groups compare in this step
            if at := effect.digest_at:
                values = as_sent(digest(compared(self._parts)), copied=effect.copied)
                tail = (*tail[:at], *values, *tail[at + len(values) :])
            self.gradients.launch_remaining(tail, zeros=effect.zeros)
        except RuntimeError as error:  # the caller's error: the tail was not launched; the next attempt raises it again
            self._feed(m.ReduceFailed(*attempt, str(error)))
            self._assignment = None
            raise
        telemetry.wait_began_s = time.monotonic()
        telemetry.current_wait = "reduction"
        phase = "heal" if self.machine.void else "waiting"
        try:
            with telemetry.phase_timer.phase(phase):
                began_s = time.monotonic()  # inside the phase, so that `move` takes no more than was counted
                tail = self.gradients.wait()
                telemetry.waits.append(time.monotonic() - began_s)
        except ProcessGroupError as error:
            return m.ReduceFailed(*attempt, str(error))
        finally:
            telemetry.current_wait = ""
        # the shortest recent wait counts as the reduction itself, the excess as waiting for other groups
        telemetry.phase_timer.move(min(telemetry.waits), phase, "reduce")
        return m.Reduced(*attempt, tail)

    def _drop_gradients(self) -> None:
        self.gradients.drop()
        self._ahead = None
        self._telemetry.lost()

    def _cast_vote(self, vote: m.Vote) -> m.Outcome | None:
        """Returns a vote's outcome. None: a background thread waits for it (StepMachine.votes_in_background, or an effect is due)."""
        telemetry, busy, outcome = self._telemetry, bool(self._effects), None
        if vote.kind == "commit":
            telemetry.current_wait = "vote"
        try:
            if self._agreement and self.machine.every_rank_votes(vote):
                outcome = self._agreement.outcome(self.client, vote, free=not busy)
            if outcome is None and not busy and not self.machine.votes_in_background(vote):
                outcome = self.client.outcome(vote)
        finally:
            telemetry.current_wait = ""
        if outcome is None:
            threading.Thread(target=self._vote_in_background, args=(vote,), name="ft-vote", daemon=True).start()
        return outcome

    def _vote_in_background(self, vote: m.Vote) -> None:
        try:
            self._feed(self.client.outcome(vote))
        except BaseException as error:  # noqa: BLE001 (raised by `_await_effect`)
            self._raise_in_trainer(error)

    def _load_state(self, step: int) -> None:
        assert self.quorum is not None
        self.healer.load()
        self.step, self.commit_id = step % STEPS_PER_BRANCH, self.quorum.reference[2]
        log.info("step %d is healed", self.step * self._options.inner_steps)
        self._telemetry.event("healed", bytes=self.state.view().manifest.total_bytes)

    def _load_checkpoint(self) -> m.Event:
        self.healer.drop()
        self._restored = None
        if self._restore:
            self._restore()
        if self._restored is None and (self.step or self.healer.touched):
            raise GroupEnded(
                "there is no checkpoint to load, and this group's weights are no longer the initial ones: restart the group"
            )
        return m.Restored(self._restored)

    # ------------------------------------------------------------------------------------------------ other threads

    def _on_notice(self, event: m.Event) -> None:
        """Feeds the machine; first ends a failed generation's offer, as a commit would wait for its joiners. In the stream's thread."""
        if isinstance(event, m.MemberLost | m.GenerationAborted):
            self.healer.end_offer(event.quorum_id, event.reason)
        self._feed_from_thread(event)

    def _ended(self, why: str) -> None:
        """Interrupts every wait, as the server is gone or has ended the group. In the thread of the notice stream."""
        if not self.closed.is_set():
            (log.info if why.startswith(HAS_LEFT) else log.error)("this rank ends: %s", why)
            if self.quorum is not None:
                self.healer.end_offer(self.quorum.quorum_id, why)
            self.process_group.interrupt(why)
            self._raise_in_trainer(GroupEnded(why))

    def _report(self, metrics: dict[str, float], status: Status) -> None:
        """Sends this rank's progress to the group server; the lighthouse finds stalled groups by it."""
        machine = self.machine
        report = m.Report(
            replica_id=self.replica_id,
            step=VOID if machine.void else machine.step,
            commit_quorum_id=machine.commit_quorum_id,
            waiting=status.waiting,
            phase_limit_s=status.phase_limit_s,
            median_step_s=self._telemetry.median_step_s,
            settled=machine.settled,
            launched=self._launched,
            blame=self._blame,
            quorum_id=status.quorum_id,
        )
        done_bytes, total_bytes = self.healer.progress
        self.client.report(
            report,
            phase=status.phase or (Phase.COMPUTING if self._is_forming else machine.phase).value,
            summed=status.summed,
            healed_bytes=self.healer.received_bytes,
            heal_done_bytes=done_bytes,
            heal_total_bytes=total_bytes,
            **metrics,
        )
