"""Entry point of training: reads the configuration, builds the run, trains to its end or a stop request. Map: training/__init__.py.

    ./scripts/run_train.sh CONFIG [--section.key value ...]      installs what is missing, checks, launches, explains failures
    python train.py CONFIG [--section.key value ...]             one rank
    torchrun --nproc-per-node N train.py CONFIG ...              N ranks
    python train.py [CONFIG ...] --help [section]                every key; of [model]: those of the model that CONFIG names
    python train.py CONFIG --explain [--ranks N] [--device cpu|cuda]     prints memory, communication and schedule; starts nothing

Exit code: 0 finished, or saved after SIGTERM or SIGINT; 2 bad input; 128 + n second stop signal n; 1 any other failure."""

from __future__ import annotations

import gc
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from hashlib import sha256
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, cast

if __name__ == "__main__":
    gc.disable()  # until GarbageCollection: imports create no garbage, but automatic collections take a tenth of the import time

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from configs.check import check, gradient_device_type
from configs.errors import explained
from configs.help import print_help
from configs.load import load
from configs.saved import check_saved, fetch_saved
from ft.config import Environment, group_folder
from ft.protocol.messages import MAX_BRANCH
from ft.seam import BadInput, Commit, DataAssignment, GroupEnded, GroupReleased, Stopped
from ft.start import process_group_env
from models.contract import ModelFault
from parallelisms.device import local_device_type
from parallelisms.distributed import gather_texts, launched_rank, launched_world_size, process_group
from parallelisms.fsdp import reshard_all
from training.checkpoint import CheckpointFailed
from training.components import TRACES, Components
from training.data.loader import Batch, DataFailed
from training.log import Log, end_process
from training.loss import IGNORED, NonFinite, describe_nonfinite
from training.optimizer import Update
from training.sampling import sample_text
from training.signals import SAVE, STEPS_TO_STOP, STOP, Signals
from training.spikes import not_applied
from training.states import ModelState
from training.watchdog import flight_recorder_env

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful  # its import takes a second
    from torch.distributed.tensor import DTensor

    from ft.semi_sync_manager import SemiSyncManager


def main(argv: Sequence[str]) -> int:
    """Runs one rank from its launch to its end; returns the exit code."""
    try:
        if "--help" in argv or "-h" in argv:
            print_help(*argv)
            return 0
        if "--explain" in argv:
            from tools.explain.command import main as explain  # training does not need it

            return explain(argv)
        config = fetch_saved(load(argv), newer=launched_rank() == 0)
        check(config, world_size=launched_world_size())
        changes = check_saved(config, config.run_folder, world_size=launched_world_size())
        environment = Environment.read(os.environ)
        environment.check(config.fault_tolerance)
    except ValueError as error:
        print(f"pharos: {explained(error)}", file=sys.stderr)
        return 2
    traces = group_folder(config.run_folder, config.fault_tolerance, environment) / TRACES
    os.environ.update(flight_recorder_env(trace_buf_size=config.comm.trace_buf_size, folder=traces))
    if config.fault_tolerance.enable:
        os.environ.update(process_group_env(config.fault_tolerance, gradient_device_type(config, local_device_type())))
    group = environment.name if config.fault_tolerance.enable else ""
    log = Log(global_rank=launched_rank(), group=group, colour=not config.metrics.disable_color_printing)
    log.attach_to("pharos")
    with closing(Signals(log=log.info)) as signals, ExitStack() as cleanup:
        try:
            world = cleanup.enter_context(process_group(config.comm))
            run_class = Run if config.fault_tolerance.semi_sync_method == "none" else SemiSyncRun
            run = run_class(config, environment, world, signals, log, cleanup, changes)
        except ValueError as error:  # bad input that no earlier check reads, such as a byte deep inside a file
            print(f"pharos: {config.origin.explain(explained(error))}", file=sys.stderr)
            return 2
        except (CheckpointFailed, OSError) as error:
            log.error("%s", error)
            return 1
        try:
            run.train()
        except (BadInput, ModelFault) as error:
            print(f"pharos: {error}", file=sys.stderr)
            return 2
        except (CheckpointFailed, DataFailed, NonFinite, Stopped, GroupEnded) as failure:
            log.error("%s", failure)
            return 1
    return 0


class LocalStep(NamedTuple):
    """Results of a step within this replica group: sums over all its ranks. `losses`: this rank's batches and their losses.
    `inner_update`: with a semi_sync_method, the Update of the group's last inner step."""

    tokens_per_slot: list[float]  # valid tokens
    loss_sum: float  # nats
    finite: bool
    steps_before: int
    losses: list[tuple[Batch, Tensor]]
    inner_update: Update | None = None


class Run(Components):
    """The training loop of one rank, over the parts that Components builds from the configuration."""

    def train(self) -> None:
        """Trains to the end, or to a stop. Raises BadInput, CheckpointFailed, DataFailed, GroupEnded, ModelFault, NonFinite, Stopped."""
        config, steps = self.config, self.config.training.steps
        if config.checkpoint.create_seed_checkpoint:
            return self.checkpointer.save_seed()
        if (reached := max(self.manager.step, self.exported_step)) >= steps:
            self.saver.wait_uploaded()  # an earlier launch may have ended before the upload was complete
            return self.log.info("finished already: %d of %d steps; raise training.steps to continue", reached, steps)
        self.watchdog, profiler, garbage_collection, fault_injector = self.start_monitoring()
        requests = 0  # bits STOP and SAVE that the ranks agreed on in the newest step
        while self.manager.step < steps and not self.manager.may_exit:
            try:
                if not self.train_step():
                    continue  # at manager.step
            except GroupReleased as released:
                return self.leave(released)
            step, requests, self.pending_requests = self.manager.step, self.pending_requests, 0
            # after a stop request only the last step is validated; otherwise the group saves and leaves without it
            validation = config.validation
            if validation.enable and (step == steps or (step % validation.freq == 0 and not requests & STOP)):
                self.validate()
            if requests & STOP:
                self.manager.leave()
            if step < steps and (self.checkpointer.due(step) or requests & SAVE or self.manager.may_exit):
                self.saver.save_due()
                if self.manager.writer_quorum:
                    self.signals.take(SAVE)  # drops a request that came after the all-reduce: this save fulfils it
                elif requests & SAVE:
                    self.log.info("not saved: another group writes the checkpoints")
            self.save_overdue = self.checkpointer.overdue(step)
            self.metrics_processor.print_estimate(step)
            self.watchdog.step_done()
            with self.progress.phase("trace"):
                profiler.step(step)
            garbage_collection.step(step)
            fault_injector.step(step)
        if self.manager.step < steps:
            larger = "set larger budgets in training.sources, or remove them, to continue the run"
            return self.print_summary("stopped at", larger if self.budgets_end else "")
        self.saver.save_last(lambda: requests & STOP > 0 or self.signals.take() & STOP > 0)
        self.sample()
        self.print_summary("finished")

    def train_step(self) -> bool:
        """Runs a step. False: it is not committed, the run went back, or this group has reached the last step by a heal or a checkpoint."""
        with self.progress.phase("quorum"):
            assignment = self.manager.begin_step(until=self.config.training.steps)
        if assignment.steps_before >= self.config.training.steps:
            return False  # healed or restored at the last step
        local, on_spike = self.compute_step(assignment), self.config.training.on_spike
        with self.progress.phase("reduce"):
            try:
                # False: this group contributes zeros. With "skip" and "rewind" its NaN is summed, so that all groups decide alike
                contributes = local.finite or on_spike != "stop"
                commit = self.manager.commit(self.manager.reduce(local.tokens_per_slot, local.loss_sum, contributes))
            except Stopped as stopped:
                raise self.nonfinite(local) if not local.finite else stopped from None
        if commit is None:  # ft/gradients.py keeps this group's own gradients for the retry
            self.optimizer.zero_grad()
            return False
        error = None if contributes else self.nonfinite(local, "is committed without this group")
        if error and not self.world.global_rank:
            self.log.warning("%s", error)  # its slots are assigned again, until UNABLE in MAX_UNABLE steps
        step = self.manager.step  # exceeds assignment.steps_before + 1 if this group has healed meanwhile
        # with an inner_update (never falsy) the group has made its inner steps already, and `commit` the outer step
        update = local.inner_update or self.optimizer_step.step(step - 1, commit.divisor, commit.mean_loss)
        spike = update.spike
        if spike and on_spike == "rewind":
            self.rewind(step, commit, spike)
            return False
        if spike and on_spike == "skip":
            self.skip_step(step, commit, spike)
        elif not math.isfinite(update.grad_norm):
            raise self.nonfinite(local)
        elif spike:
            raise Stopped(not_applied(step, commit, spike, self.slot_size))
        if self.data.end is not None:
            self.check_budgets(step, commit, self.data.end)
        self.progress.commit()
        self.log.step = step
        heals = self.events.heals if self.config.fault_tolerance.enable else None
        size = self.slot_size * self.inner_steps
        self.metrics_processor.step(step, commit, update, slot_size=size, inner_steps=self.inner_steps, heals=heals)
        return True

    def check_budgets(self, step: int, commit: Commit, end: int) -> None:
        """Requests a stop, as SIGTERM does, STEPS_TO_STOP steps before the budgets of training.sources are used up, at position `end`. All
        ranks of all groups compute it from the same commit, so they stop at the same step."""
        size = self.slot_size * self.inner_steps
        assigned_until = max([slot for slot, _ in commit.slots] + list(commit.holes), default=-size) + size
        training, left = self.config.training, (self.config.training.steps - step) // self.inner_steps
        slots = max(commit.quorum_size, len(commit.slots)) * min(STEPS_TO_STOP, left)
        if slots * size > training.sequences_left(assigned_until, end, size) and not self.budgets_end:
            self.budgets_end = True
            if self.world.global_rank == 0:
                self.log.warning("data: the budgets of training.sources end at sequence %d: the run stops", end)

    def skip_step(self, step: int, commit: Commit, spike: str) -> None:
        """Skips the data of a step that no group has applied. Raises Stopped if there were too many such steps in a row."""
        assert self.spikes is not None
        self.optimizer.zero_grad()
        text = not_applied(step, commit, spike, self.slot_size)
        if self.spikes.in_a_row > (allowed := self.config.training.spike_max_skips):
            raise Stopped(f"{text}; training.spike_max_skips allows {allowed} such steps in a row")
        self.manager.skip([slot for slot, _ in commit.slots])
        self.announce("spike", step, f"{text} are left out")

    def rewind(self, step: int, commit: Commit, spike: str) -> None:
        """Goes back to the newest checkpoint before a step that no group has applied, and skips the data since. Raises BadInput,
        CheckpointFailed, and Stopped if the run went back there too often without reaching a newer checkpoint."""
        self.optimizer.zero_grad()
        text = not_applied(step, commit, spike, self.slot_size)
        self.announce("spike", step, text)
        if len(self.manager.rewinds) >= (allowed := MAX_BRANCH):
            raise Stopped(f"{text}; a run goes back to a checkpoint at most {allowed} times")
        rewind_steps = [rewound.step for rewound in self.manager.rewinds]
        position = max(slot + self.slot_size for slot, _ in commit.slots)
        with self.progress.phase("checkpoint"):
            try:
                self.manager.rewind(spike, partial(self.load_earlier, step, rewind_steps, position))
            except CheckpointFailed as failure:
                if not self.config.fault_tolerance.enable:
                    raise
                return self.log.warning("%s: this group gets its state from another", failure)
            except ValueError as error:
                raise BadInput(self.config.origin.explain(explained(error))) from None
        rewinds, self.log.step = self.manager.rewinds, self.manager.step
        back_to, skipped = rewinds[-1].step, rewinds[-1].skipped
        in_a_row = len([*takewhile(lambda each: each.step == back_to, reversed(rewinds))])
        if in_a_row > (allowed := self.config.training.spike_max_skips):
            raise Stopped(f"{text}; training.spike_max_skips allows {allowed} returns to step {back_to} in a row")
        named = ", ".join(f"{first} to {end - 1}" for first, end in skipped)
        why = f"step {step} was a spike; positions {named} are left out"
        self.announce("rewind", back_to, f"back to step {back_to} as branch {len(rewinds)}: {why}")

    def announce(self, event: str, step: int, text: str) -> None:
        """Reports a spike or a return to a checkpoint: in the log, in this group's events and, once for all groups, on the dashboard."""
        if self.world.global_rank == 0:
            self.log.warning("%s: %s", event, text)
            self.events(event, step, words=text)
            if self.manager.writer_quorum:
                self.manager.show_event("commit", text)

    def compute_step(self, assignment: DataAssignment, batches: Iterator[Batch] | None = None) -> LocalStep:
        """Runs forward and backward of each batch; the reduction of gradients over groups begins in the last backward of the last slot.
        Then one all-reduce gives all ranks loss, token counts and requests to stop or save. `batches`: of a window; None: loads them."""
        losses, at, slots = list[tuple[Batch, Tensor]](), self.coordinate, assignment.slots
        training = self.config.training
        # gradient accumulation: the local batches of all slots
        for batch in batches or self.progress.timed("data", self.loader.load(slots)):
            if not losses or losses[-1][0].slot != batch.slot:
                # A resumed or repeated step draws the same random numbers, and each rank different ones; tensor-parallel ranks draw the
                # same, since replicated tensors must stay equal (for sharded ones DTensor has its own generator).
                key = f"{training.seed}/{assignment.steps_before}/{batch.slot}/{at.dp_rank}/{at.pp_rank}/{at.cp_rank}"
                torch.manual_seed(int.from_bytes(sha256(key.encode()).digest()[:8], "big") >> 1)
            last_backward = self.manager.last_backward(batch.slot) if batch.ends_slot else nullcontext()
            with last_backward, self.progress.phase("compute"):
                losses.append((batch, self.model.forward_backward(*batch.to(self.device))))
            if batch.ends_slot and batch.slot == slots[-1]:
                break  # `batches` may have more: a round of semi-synchronous training has several steps
        with self.progress.phase("reduce"):
            signals = self.signals.take() if self.signals.pending else 0
            pending = self.save_overdue * SAVE | self.budgets_end * STOP | signals
            loss_sum = torch.stack([torch.zeros((), device=self.device), *(loss for _, loss in losses)]).double().sum()
            # pp, cp and tp ranks have the same sequences, and the divisor counts each token once
            counted = losses if at.counts_tokens else ()
            tokens = [sum(int((b.labels != IGNORED).sum()) for b, _ in counted if b.slot == slot) for slot in slots]
            counts = torch.tensor([bool(pending & STOP), bool(pending & SAVE), *tokens], dtype=torch.float64)
            is_nonfinite = (~loss_sum.isfinite()).double()
            sums = torch.cat((torch.stack((loss_sum, is_nonfinite)), counts.to(self.device, non_blocking=True)))
            if self.world.world_size > 1:
                dist.all_reduce(sums)
            total, nonfinite_ranks, stop, save_now, *tokens_per_slot = sums.cpu().tolist()
        self.pending_requests |= STOP * (stop > 0) | SAVE * (save_now > 0)
        return LocalStep(tokens_per_slot, total, nonfinite_ranks == 0, assignment.steps_before, losses)

    def nonfinite(self, local: LocalStep, outcome: str = "not applied") -> NonFinite:
        """Returns an error such as "step 80 not applied: rank 1: loss nan at slot 40, positions 40-47"; on all ranks alike. Collective."""
        step = f"step {local.steps_before + 1} {outcome}"
        ran = [(batch.slot, batch.sequence_positions, loss.item()) for batch, loss in local.losses]
        named = [named for part in self.model.parts for named in part.named_parameters()]
        gradients = {name: cast("DTensor", p.grad).to_local() for name, p in named if p.grad is not None}
        texts = gather_texts(self.world, step, describe_nonfinite(self.world.global_rank, ran, gradients))
        return NonFinite(f"{step}: {'; '.join(filter(None, texts)) or 'the gradient norm is not finite'}")

    def validate(self) -> None:
        """Measures the loss on the first validation.steps slots of each set of held-out documents, over all ranks."""
        with self.progress.phase("validation"):
            began = self.progress.total()
            token_bytes = torch.from_numpy(self.tokenizer.token_bytes()).double()  # 0 for BOS, EOS, PAD
            unknown = self.vocab_size - len(token_bytes)  # ids of token files may be of another tokenizer
            token_bytes = pad(token_bytes, (0, unknown), value=math.nan).to(self.device)  # [V]
            # [sets, 3]: nats, valid tokens, bytes
            sums = torch.zeros(len(self.held_out), 3, dtype=torch.float64, device=self.device)
            for set_sums, loader in zip(sums, self.held_out.values(), strict=True):
                for batch in loader.load(range(0, self.config.validation.steps * self.slot_size, self.slot_size)):
                    inputs, labels, starts = batch.to(self.device)
                    valid = labels[labels != IGNORED] if self.coordinate.counts_tokens else labels.new_empty(0)
                    count, size = torch.tensor(valid.numel(), device=self.device), token_bytes[valid].sum()
                    set_sums += torch.stack((self.model.evaluate(inputs, labels, starts).double(), count, size))
            if self.world.world_size > 1:
                dist.all_reduce(sums)
            sets = dict(zip(self.held_out, sums.cpu().tolist(), strict=True))  # syncs the device
            reshard_all(self.model.parts)
            seconds = self.progress.total() - began
        self.metrics_processor.validation(self.manager.step, sets, seconds=seconds)

    def leave(self, released: GroupReleased) -> None:
        """Saves and stops after a SIGTERM while this group waited for others: its state may be newer than that of any other group."""
        if released.has_state and self.manager.step:
            with self.progress.phase("checkpoint"):
                self.saver.save_now(outside_quorum=True)
            self.saver.wait_uploaded()
        self.log.info("%s", released)
        self.print_summary("stopped at")

    def sample(self) -> None:
        if self.degrees.pp == self.degrees.cp == self.degrees.tp == 1:  # other layouts cannot decode token by token
            with self.progress.phase("sample"):
                [model], seq_len = self.model.parts, self.config.training.seq_len
                if text := sample_text(model, self.tokenizer, self.config.sample, seq_len, self.device):
                    self.log.info("%s", text)


class SemiSyncRun(Run):
    """A run whose group makes optimizer steps by itself and synchronises with the others every inner_steps (ft/semi_sync_manager.py)."""

    UNHEALED_STATES = ("ledger", "loader", "model", "optimizer", "outer_optimizer", "local_model")  # SemiSyncManager's
    manager: SemiSyncManager
    inner_update = Update(0.0, 0.0)  # of the last inner step; a healing group makes none

    def model_states(self) -> dict[str, Stateful]:
        return dict(self.manager.checkpoint_state(ModelState(self.model.parts)))

    def compute_step(self, assignment: DataAssignment, batches: Iterator[Batch] | None = None) -> LocalStep:
        """Makes this group's own optimizer steps on a window of data."""
        batches = self.progress.timed("data", self.loader.load(assignment.slots))
        self.optimizer.zero_grad()  # gradients of a window that was not used, which `nonfinite` has read by now
        window = LocalStep([], 0.0, True, assignment.steps_before, [], self.inner_update)
        for steps_before, slot in enumerate(assignment.slots, assignment.steps_before):
            local = super().compute_step(DataAssignment(steps_before, (slot,)), batches)
            [tokens] = local.tokens_per_slot
            update = self.optimizer_step.step(steps_before, tokens) if local.finite else Update(math.nan, 0.0)
            window = window._replace(steps_before=steps_before, losses=local.losses)
            if not math.isfinite(update.grad_norm):
                window = window._replace(finite=False)
                break  # on all ranks of the group: the window is not used
            self.inner_update = update if tokens else self.inner_update
            tokens_per_slot, loss_sum = [*window.tokens_per_slot, tokens], window.loss_sum + local.loss_sum
            window = window._replace(tokens_per_slot=tokens_per_slot, loss_sum=loss_sum, inner_update=self.inner_update)
            with self.progress.phase("optimizer"):
                self.manager.on_inner_step()
            self.watchdog.step_done()
        return window

    def leave(self, released: GroupReleased) -> None:
        self.manager.reset()
        super().leave(released)

    def validate(self) -> None:
        with self.manager.use_outer_weights():
            super().validate()

    def sample(self) -> None:
        with self.manager.use_outer_weights():
            super().sample()


if __name__ == "__main__":
    try:
        exit_code = main(sys.argv[1:])
    except Exception:  # noqa: BLE001 (reported as Python would)
        sys.excepthook(*sys.exc_info())
        exit_code = 1
    end_process(exit_code)
