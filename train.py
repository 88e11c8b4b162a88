"""Trains a model: reads the configuration, builds the run from the top down, then steps until it is done or told to stop.

    ./scripts/run_train.sh CONFIG [--section.key value ...]      installs what is missing, checks, launches, explains failures
    python train.py CONFIG [--section.key value ...]             one rank
    torchrun --nproc-per-node N train.py CONFIG ...              N ranks
    python train.py --help [section]                             every key
    python train.py CONFIG --explain [--ranks N] [--device cpu|cuda]     what it would take and do; nothing is started

Exit code: 0 finished, or saved after SIGTERM or SIGINT; 2 bad input; 1 the rest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from functools import partial
from itertools import groupby
from math import isfinite
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from configs.check import check, gradients_lie_on
from configs.help import help_text
from configs.load import load
from configs.saved import check_saved
from ft.config import Environment, group_folder
from ft.device import on_host
from ft.seam import BadInput, Commit, DataAssignment, Going, GroupEnded, Stopped
from ft.start import group_env
from parallelisms.clip import gradient_norm, scale_gradients
from parallelisms.device import type_here
from parallelisms.distributed import launched_rank, launched_world_size, process_group
from parallelisms.fsdp import reshard_all
from parallelisms.means import sum_over_ranks
from parallelisms.seeds import seed_slot
from training.checkpoint import CheckpointFailed, ModelState
from training.components import TRACES, Components
from training.data.loader import Batch
from training.log import Log, end_process
from training.loss import IGNORED
from training.nonfinite import NonFinite, explain_nonfinite
from training.optimizer import set_learning_rate
from training.sampling import sample_text
from training.schedule import learning_rate_factor
from training.signals import SAVE, STOP, Signals
from training.validation import validate
from training.watchdog import flight_recorder_env

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful  # a second to import

    from ft.semi_sync_manager import SemiSyncManager


def main(argv: Sequence[str]) -> int:
    """One rank of one start of a run; returns the exit code."""
    try:
        if "--help" in argv or "-h" in argv:
            print(help_text(next((word for word in argv if not word.startswith("-")), None)))
            return 0
        if "--explain" in argv:
            from tools.explain.command import main as explain  # not on the way of those who train

            return explain(argv)
        config = load(argv)
        check(config, world_size=launched_world_size())
        check_saved(config, config.run_folder, world_size=launched_world_size())
        environment = Environment.read(os.environ)
        environment.check(config.fault_tolerance)
    except ValueError as error:
        print(f"pharos: {error}", file=sys.stderr)
        return 2
    traces = group_folder(config.run_folder, config.fault_tolerance, environment) / TRACES
    os.environ.update(flight_recorder_env(trace_buf_size=config.comm.trace_buf_size, folder=traces))
    if config.fault_tolerance.enable:
        os.environ.update(group_env(config.fault_tolerance, gradients_lie_on(config, type_here())))
    group = environment.name if config.fault_tolerance.enable else ""
    log = Log(global_rank=launched_rank(), group=group, colour=not config.metrics.disable_color_printing)
    log.attach_to("pharos")
    with closing(Signals(log=log)) as signals, process_group(config.comm) as world, ExitStack() as cleanup:
        try:
            kind = Run if config.fault_tolerance.semi_sync_method == "none" else SemiSyncRun
            run = kind(config, environment, world, signals, log, cleanup)
        except ValueError as error:  # bad input that only the work itself could find, such as a byte deep inside a file
            print(f"pharos: {config.origin.explain(str(error))}", file=sys.stderr)
            return 2
        except (CheckpointFailed, OSError) as error:
            log.error("%s", error)
            return 1
        try:
            run.train()
        except BadInput as error:
            print(f"pharos: {error}", file=sys.stderr)
            return 2
        except (CheckpointFailed, NonFinite, Stopped, GroupEnded) as failure:
            log.error("%s", failure)
            return 1
    return 0


class LocalStep(NamedTuple):
    """This group's own part of a step, summed over its ranks. `losses`: this rank's, by batch, of the newest optimizer step, which follows
    `step` others."""

    tokens_per_slot: list[float]  # valid ones
    loss_sum: float  # nats
    finite: bool
    step: int
    losses: list[tuple[Batch, Tensor]]


class Run(Components):
    """One start of a run on one rank: the loop over what Components builds from the configuration."""

    def train(self) -> None:
        """Steps until training.steps are committed, or a signal asks to stop. Raises NonFinite, CheckpointFailed."""
        config, steps = self.config, self.config.training.steps
        if config.checkpoint.create_seed_checkpoint:
            return self.checkpointer.save_seed()
        if (reached := max(self.manager.step, self.exported)) >= steps:
            return self.log.info("finished already: %d of %d steps; a larger training.steps goes on", reached, steps)
        self.watchdog, profiler, garbage, drill = self.start_monitoring()
        pending_signals = 0
        while self.manager.step < steps and not self.manager.left:
            try:
                if not self.train_step():
                    continue  # it did not hold: begin again
            except Going as going:
                return self.leave(going)
            step, pending_signals, self.pending_signals = self.manager.step, self.pending_signals, 0
            if config.validation.enable and (step % config.validation.freq == 0 or step == steps):
                self.validate()
            if pending_signals & STOP:
                self.manager.leave()
            if step < steps and (self.checkpointer.due(step) or pending_signals & SAVE or self.manager.left):
                self.saver.save()
            self.meter.print_estimate(step)
            self.watchdog.step_done()
            with self.progress.phase("trace"):
                profiler.step(step)
            garbage.step(step)
            drill.step(step)
        if self.manager.step < steps:
            return self.print_summary("stopped at", "the same command goes on")
        self.saver.save_last(lambda: pending_signals & STOP > 0 or self.signals.take() & STOP > 0)
        self.sample()
        folder = config.run_folder
        next_command = f"python scripts/generate.py {folder}; tensorboard --logdir {folder.parent}"
        return self.print_summary("finished", next_command)

    def train_step(self) -> bool:
        """One step over the slots that this group was dealt. False: it does not hold, and nothing became visible."""
        with self.progress.phase("quorum"):
            deal = self.manager.begin_step(until=self.config.training.steps)
        if deal.step >= self.config.training.steps:
            return False  # the checkpoint that was restored is of the last step
        local = self.compute_step(deal)
        with self.progress.phase("reduce"):
            try:
                commit = self.manager.commit(self.manager.reduce(local.tokens_per_slot, local.loss_sum, local.finite))
            except Stopped as stopped:
                raise self.nonfinite(local) if not local.finite else stopped from None
            if commit is None:
                self.optimizer.zero_grad()
                return False
        grad_norm, lr = self.apply(commit, local)
        self.log_step(commit, grad_norm, lr)
        return True

    def compute_step(self, deal: DataAssignment) -> LocalStep:
        """Forward and backward of each batch. Gradients go out to other groups from the last backward of a slot on."""
        batches, losses = self.loader.load(deal.slots), list[tuple[Batch, Tensor]]()
        batch = self.next_batch(batches)
        while batch is not None:
            following = self.next_batch(batches)
            goes_on = following is not None and following.slot == batch.slot
            with nullcontext() if goes_on else self.manager.last_pass(batch.slot):
                self.forward_backward(deal.step, batch, losses)
            batch = following
        with self.progress.phase("reduce"):
            return LocalStep(*self.sum_over_group(deal.slots, losses), deal.step, losses)

    def forward_backward(self, step: int, batch: Batch, losses: list[tuple[Batch, Tensor]]) -> None:
        """A batch of the optimizer step that follows `step` others; its loss goes to those of the batches before it."""
        with self.progress.phase("compute"):
            if not losses or losses[-1][0].slot != batch.slot:
                seed_slot(self.config.training.seed, step, batch.slot, self.coordinate)
            inputs = batch.inputs.to(self.device, non_blocking=True)
            labels = batch.labels.to(self.device, non_blocking=True)
            losses.append((batch, self.model.forward_backward(inputs, labels)))

    def apply(self, commit: Commit, local: LocalStep) -> tuple[float, float]:
        """The optimizer's step with the gradients that hold. Returns the norm of their mean, and the learning rate."""
        with self.progress.phase("reduce"):
            grad_norm = on_host(gradient_norm(self.parameters)).item()  # it decides what comes next
        if not isfinite(grad_norm):
            raise self.nonfinite(local)
        with self.progress.phase("optimizer"):
            grad_norm /= commit.divisor
            # Not the deal's step: a group that has healed since then commits a later one
            return grad_norm, self.update(self.manager.step - 1, commit.divisor, grad_norm)

    def update(self, step: int, divisor: float, grad_norm: float) -> float:
        """The optimizer's step that follows `step` others. `grad_norm` is that of the mean. Returns the learning rate."""
        config, training = self.config, self.config.training
        lr = config.optimizer.lr * learning_rate_factor(config.lr_scheduler, step=step, training_steps=training.steps)
        clipped = min(1.0, training.max_norm / (grad_norm + 1e-6)) if training.max_norm > 0 else 1.0
        scale_gradients(self.parameters, clipped / divisor)  # the one division
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return lr

    def next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        with self.progress.phase("data"):
            return next(batches, None)

    def sum_over_group(
        self, slots: Sequence[int], losses: Sequence[tuple[Batch, Tensor]]
    ) -> tuple[list[float], float, bool]:
        """Valid tokens per slot, loss sum, and whether every loss is finite. One small all-reduce, one sync, for all that the ranks
        must agree on; any rank's pending signals ride along."""
        pending_signals = self.signals.take() | SAVE * self.checkpointer.overdue(self.manager.step)
        loss_sum = torch.stack([torch.zeros((), device=self.device), *(loss for _, loss in losses)]).double().sum()
        counted = losses if self.coordinate.counts else ()  # of the ranks that see the same sequences one counts them
        tokens = [sum(int((b.labels != IGNORED).sum()) for b, _ in counted if b.slot == slot) for slot in slots]
        known = torch.tensor([bool(pending_signals & STOP), bool(pending_signals & SAVE), *tokens], dtype=torch.float64)
        broken = (~loss_sum.isfinite()).double()
        tail = torch.cat((torch.stack((loss_sum, broken)), known.to(self.device, non_blocking=True)))
        total, bad, stop, save_now, *tokens_per_slot = on_host(sum_over_ranks(tail)).tolist()
        self.pending_signals |= STOP * (stop > 0) | SAVE * (save_now > 0)
        return tokens_per_slot, total, bad == 0

    def nonfinite(self, local: LocalStep) -> NonFinite:
        """The error that names what this group has seen that is not a number."""
        ran = [(batch.slot, batch.positions, on_host(loss).item()) for batch, loss in local.losses]
        return NonFinite(explain_nonfinite(self.world, local.step + 1, ran, self.model.parts))

    def log_step(self, commit: Commit, grad_norm: float, lr: float) -> None:
        """A step is committed, and the optimizer has run: what is to be seen of it."""
        self.progress.settle()
        step = self.log.step = self.manager.step
        groups = {
            "quorum_size": commit.quorum_size,
            "contributors": len(commit.contributors),
            "heals": self.events.heals,
        }
        self.meter.step(
            step,
            loss=commit.mean_loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=round(commit.divisor),
            groups=groups if self.config.fault_tolerance.enable else {},
            steps=self.inner_steps,
        )
        size = self.slot_size * self.inner_steps
        self.meter.samples(step, slot_size=size, slots=commit.slots, holes=commit.holes, steps=self.inner_steps)

    def validate(self) -> None:
        with self.progress.phase("validation"):
            began = self.progress.total()
            look = validate(
                self.model,
                self.held_out,
                self.tokenizer,
                self.device,
                slots=range(0, self.config.validation.steps * self.slot_size, self.slot_size),
                counts=self.coordinate.counts,
            )
            reshard_all(self.model.parts)
            seconds = self.progress.total() - began
        loss, bits = look.nats_per_token, look.bits_per_byte
        self.meter.validation(self.manager.step, loss=loss, bits_per_byte=bits, tokens=look.tokens, seconds=seconds)

    def leave(self, going: Going) -> None:
        """SIGTERM came while this group waited for others: what it holds is saved, which may be more than any other group has."""
        if going.holds and self.manager.step:
            self.saver.save_unsettled()
        self.log.info("%s", going)
        self.print_summary("stopped at", "the same command goes on")

    def sample(self) -> None:
        if self.degrees.pp == self.degrees.cp == self.degrees.tp == 1:  # else one token at a time cannot be shared
            with self.progress.phase("sample"):
                sample, seq_len = self.config.sample, self.config.training.seq_len
                text = sample_text(self.model.parts, self.tokenizer, sample, seq_len=seq_len, device=self.device)
            if text:
                self.log.info("a sample of text:\n%s", text)


class SemiSyncRun(Run):
    """A run whose group steps by itself, and agrees with the others every inner_steps steps (ft/semi_sync_manager.py)."""

    HEALED = ()  # the rest is each group's own
    manager: SemiSyncManager
    grad_norm = lr = 0.0  # of the last step; a group that heals makes none

    def weights(self) -> dict[str, Stateful]:
        return dict(self.manager.checkpoint_state(ModelState(self.model.parts)))

    def compute_step(self, deal: DataAssignment) -> LocalStep:
        """The optimizer steps of a window of data, which this group makes by itself."""
        batches = iter(partial(self.next_batch, self.loader.load(deal.slots)), None)
        tokens_per_step, loss_sum, finite = list[float](), 0.0, True
        step, losses = deal.step, list[tuple[Batch, Tensor]]()
        for step, (slot, parts) in enumerate(groupby(batches, key=attrgetter("slot")), deal.step):
            losses = []
            for batch in parts:
                self.forward_backward(step, batch, losses)
            with self.progress.phase("compute"):
                [tokens], loss, finite = self.sum_over_group([slot], losses)
                grad_norm = on_host(gradient_norm(self.parameters)).item()  # it decides what comes next
            finite = finite and isfinite(grad_norm)
            if not finite:
                break  # in all ranks of the group; the window counts for nothing
            tokens_per_step.append(tokens)
            loss_sum += loss
            with self.progress.phase("optimizer"):
                if tokens:
                    self.grad_norm = grad_norm / tokens
                    self.lr = self.update(step, tokens, self.grad_norm)
                self.manager.on_inner_step()
            self.watchdog.step_done()
        self.optimizer.zero_grad()
        return LocalStep(tokens_per_step, loss_sum, finite, step, losses)

    def apply(self, commit: Commit, local: LocalStep) -> tuple[float, float]:
        """The outer step was the manager's."""
        return self.grad_norm, self.lr

    def leave(self, going: Going) -> None:
        self.manager.reset()
        super().leave(going)

    def validate(self) -> None:
        with self.manager.use_global_weights():
            super().validate()

    def sample(self) -> None:
        with self.manager.use_global_weights():
            super().sample()


if __name__ == "__main__":
    try:
        exit_code = main(sys.argv[1:])
    except Exception:  # noqa: BLE001 (told as Python would)
        sys.excepthook(*sys.exc_info())
        exit_code = 1
    end_process(exit_code)
