"""Trains a model: reads the configuration, builds the run from the top down, then steps until it is done or told to stop.

    ./scripts/run_train.sh CONFIG [--section.key value ...]      installs what is missing, checks, launches, explains failures
    python train.py CONFIG [--section.key value ...]             one rank
    torchrun --nproc-per-node N train.py CONFIG ...              N ranks
    python train.py --help [section]                             every key
    python train.py CONFIG --explain [--ranks N] [--device cpu|cuda]     what it would take and do; nothing is started

Exit code: 0 finished, or saved after SIGTERM or SIGINT; 2 bad input; 1 the rest.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import asdict
from functools import partial
from itertools import groupby
from math import isfinite, nan
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from configs.check import check, gradients_lie_on
from configs.help import help_text
from configs.load import load
from configs.saved import check_saved, save, to_toml, what_groups_share
from configs.schema import Config
from ft.agreement import Agreement
from ft.config import Environment, group_folder
from ft.device import on_host
from ft.seam import BadInput, Commit, Going, GroupEnded, Stopped
from ft.start import open_manager
from parallelisms.clip import gradient_norm, scale_gradients
from parallelisms.device import type_here
from parallelisms.distributed import BACKSTOP_S, World, host_group, launched_rank, launched_world_size, process_group
from parallelisms.fsdp import reshard_all
from parallelisms.means import sum_over_ranks
from parallelisms.mesh import build_mesh, degrees
from parallelisms.parallelize import parallelize
from parallelisms.precision import choose_precision
from parallelisms.seeds import make_deterministic, seed_slot
from training.checkpoint import FIGURES, RETRY_S, Checkpointer, CheckpointFailed, ModelState, OptimizerState, Stateful
from training.data.dataset import DataState, open_data
from training.data.loader import Batch, BatchSource
from training.drill import Corruption
from training.events import Events
from training.garbage import GarbageCollection
from training.last_save import LastSave
from training.log import Log, end_process
from training.loss import IGNORED, cross_entropy_sum
from training.metrics import Meter
from training.metrics_writer import LeaderMetricsWriter
from training.nonfinite import NonFinite, explain_nonfinite
from training.optimizer import build_optimizer, set_learning_rate
from training.profiling import Profiler
from training.progress import Progress, duration, summary
from training.runlock import RunLock
from training.sampling import sample_text
from training.schedule import learning_rate_factor
from training.scribe import Scribe
from training.signals import SAVE, STOP, Signals
from training.sinks import ResumedStep, Sinks, open_sinks
from training.tokenizer import build_tokenizer
from training.validation import ValidationLoss, validate
from training.watchdog import Watchdog, dump_flight_recorder, flight_recorder_env
from training.writer_lease import WriterLease

if TYPE_CHECKING:
    from ft.semi_sync_manager import SemiSyncManager

FIRST_ESTIMATE = 3  # steps after which a start says how long it will take: on slow hardware one wants to know at once
TRACES = "comm_traces"  # what the flight recorder remembers of a hang, inside the folder of the run, or of its group


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
    os.environ.update(groups_env(config))
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


def groups_env(config: Config) -> dict[str, str]:
    """Environment for what sums between replica groups, to be set before the first process group is made."""
    settings = config.fault_tolerance
    if not settings.enable:
        return {}
    from ft.process_groups.nccl import process_settings  # not on the way of those who train alone

    kind = settings.group_kind(gradients_lie_on(config, type_here()))
    return process_settings(kind, settings.rendezvous_s)


class Run:
    """One start of a run on one rank: what it is made of, from the top down, then the loop over it."""

    HEALED: tuple[str, ...] = ("model", "optimizer")  # of the states, what a group must receive to equal the others

    def __init__(
        self, config: Config, environment: Environment, world: World, signals: Signals, log: Log, cleanup: ExitStack
    ) -> None:
        """`cleanup` closes what is opened here, last first."""
        self.config, self.environment, self.world = config, environment, world
        self.signals, self.log, self.cleanup = signals, log, cleanup
        self.device = world.device.torch_device
        self.progress = Progress()
        self.group_folder = group_folder(config.run_folder, config.fault_tolerance, environment)
        self.scribe = cleanup.enter_context(closing(Scribe(self.tell_of_storage)))
        self.events = Events(self.group_folder, self.scribe)
        with self.progress.phase("start"):
            if config.job.description:
                log.info("about     %s", config.job.description)
            if config.job.print_config:
                log.info("%s", to_toml(config))
            if config.training.deterministic:
                make_deterministic()
            self.read()
            self.build()
            self.resume()

    def read(self) -> None:
        """What is trained on: tokens of a step by position."""
        config, training = self.config, self.config.training
        self.tokenizer = build_tokenizer(config.model.tokenizer_path)
        self.vocab_size = config.model.vocab_size or self.tokenizer.vocab_size
        self.degrees = degrees(config.parallelism, self.world.world_size)
        self.seat = self.degrees.seat(self.world.global_rank)
        self.slot_size = (
            training.global_batch_size
            if training.global_batch_size > 0
            else training.local_batch_size * self.degrees.data_parallel
        )
        cache = config.run_folder.parent / "data_cache"
        self.data = open_data(training, self.tokenizer, cache, log=self.log, vocab_size=self.vocab_size)
        self.log.info("data      %s", self.data.summary())
        self.loader = self.open_loader("train")
        self.held_out = self.open_loader("validation") if config.validation.enable else None

    def open_loader(self, split: str) -> BatchSource:
        loader = self.data.loader(
            split,
            slot_size=self.slot_size,
            dp_rank=self.seat.dp_rank,
            dp_size=self.degrees.data_parallel,
            pin_memory=self.world.device.differences.pins_batches,
        )
        return self.cleanup.enter_context(closing(loader))

    def build(self) -> None:
        """What is trained, and who decides whether a step holds."""
        config, training = self.config, self.config.training
        architecture = importlib.import_module(f"models.{config.model.name}")
        with torch.device("meta"):
            model = architecture.build(config.model, vocab_size=self.vocab_size, max_seq_len=training.seq_len)
        self.flops_per_token = model.flops_per_token(training.seq_len)
        weights = sum(p.numel() for p in model.parameters())
        precision = choose_precision(
            training.dtype, training.mixed_precision_param, training.mixed_precision_reduce, self.world.device
        )
        self.model = parallelize(
            model,
            build_mesh(self.degrees, self.device.type),
            cross_entropy_sum,
            config.layout(precision, vocab_size=self.vocab_size, device_type=self.device.type),
            local_batch_size=training.local_batch_size,
            seq_len=training.seq_len,
            device=self.device,
            seed=training.seed,
        )
        self.optimizer = build_optimizer(config.optimizer, self.model.parts)
        settings, ranks = config.fault_tolerance, self.world.world_size
        longest_s = max(
            settings.collective_s, config.comm.init_timeout_seconds
        )  # of what ranks may wait for one of them in
        hosts = host_group(self.world, timeout_s=longest_s + BACKSTOP_S) if settings.enable else None
        self.manager = self.cleanup.enter_context(
            closing(
                open_manager(
                    settings,
                    self.environment,
                    slot_size=self.slot_size,
                    folder=self.group_folder,
                    device_type=gradients_lie_on(config, self.device.type),
                    store=self.world.store,
                    agreement=Agreement(hosts) if hosts else None,
                    long_phase_s=config.comm.init_timeout_seconds,
                    shape=(*what_groups_share(config), ("text or tokenizer", self.data.digest[:16])),
                    restore=self.restore,
                    phase_timer=self.progress,
                    on_event=self.events,
                )
            )
        )
        self.manager.attach(self.model.parts)
        self.signals.when_asked_to_stop(self.manager.want_to_leave)
        self.log.info(
            "model     %s, %s parameters, %d tokens a step",
            config.model.name,
            f"{weights:,}",
            self.slot_size * training.seq_len,
        )
        self.log.info("devices   %d rank%s, %s", ranks, "s" * (ranks > 1), self.world.device.name)
        if ranks > 1:
            self.log.info("layout    %s", self.degrees)
        self.log.info("numbers   %s", precision)

    def resume(self) -> None:
        """What is kept, and where it left off."""
        config, folder = self.config, self.config.run_folder
        if self.world.global_rank == 0:
            self.cleanup.enter_context(closing(RunLock(self.group_folder)))
        self.meter = Meter(
            config.metrics,
            log=self.log,
            progress=self.progress,
            steps=config.training.steps,
            device=self.world.device,
            world_size=self.world.world_size,
            flops_per_token=self.flops_per_token,
        )
        states: dict[str, Stateful] = {
            **self.weights(),
            "optimizer": OptimizerState(self.model.parts, self.optimizer),
            "ledger": self.manager,
            "meter": self.meter,
            "data": DataState(self.data),
            "loader": self.loader,
        }
        shared = config.fault_tolerance.enable
        relay = LeaderMetricsWriter(folder, lambda: self.manager.writes, self.open_sinks, self.scribe, shared=shared)
        if shared:
            states[FIGURES] = relay
        for name in (*self.HEALED, "meter", *([FIGURES] if shared else [])):  # what a group that heals receives
            self.manager.register(name, states[name].state_dict, states[name].load_state_dict)
        claim = WriterLease(folder, lambda: self.manager.writes) if shared else None
        self.checkpointer = self.cleanup.enter_context(
            closing(Checkpointer(config.checkpoint, folder, states, log=self.log, claim=claim))
        )
        self.exported = self.checkpointer.exported_step() or 0  # a finished run may hold nothing else of its end
        finished = self.exported >= config.training.steps
        seed = config.checkpoint.create_seed_checkpoint
        healed = shared and not seed and (self.checkpointer.newest_step() or 0) < config.training.steps
        if not (finished or healed):  # healed, or see `restore`
            self.checkpointer.load()
        self.first_step, self.first_tokens, self.commits = self.manager.step, self.meter.tokens, 0
        self.mean_loss, self.wishes, self.save_fails = nan, 0, False
        self.look: ValidationLoss | None = None  # the last one
        if self.world.global_rank == 0:
            save(config, folder, batch=self.slot_size)
            self.meter.open(relay.sinks())
        self.cleanup.enter_context(closing(self.meter))

    def weights(self) -> dict[str, Stateful]:
        """What a checkpoint holds of the model."""
        return {"model": ModelState(self.model.parts)}

    def restore(self) -> None:
        """From the newest checkpoint: of several groups none holds anything, so there is nothing to heal from. Raises BadInput."""
        with self.progress.phase("checkpoint"):
            try:
                self.checkpointer.load()
            except ValueError as error:
                raise BadInput(self.config.origin.explain(str(error))) from None

    def tell_of_storage(self, words: str) -> None:
        """Trouble with files, and its end. In the scribe's thread, mostly."""
        self.log.warning("storage: %s", words)
        self.events("storage", self.log.step or 0, words=words)
        if hasattr(self, "manager"):  # else it has yet to be made
            self.manager.tell("storage", words)

    def open_sinks(self, resumed_step: ResumedStep) -> Sinks:
        """Where figures go that this group is to write."""
        metrics = self.config.metrics
        return open_sinks(
            self.config.run_folder,
            tensorboard_folder=metrics.save_tb_folder if metrics.enable_tensorboard else "",
            wandb=metrics.enable_wandb,
            resumed_step=resumed_step,
            settings=asdict(self.config),
        )

    def train(self) -> None:
        """Steps until training.steps are committed, or a signal asks to stop. Raises NonFinite, CheckpointFailed."""
        config, steps = self.config, self.config.training.steps
        if config.checkpoint.create_seed_checkpoint:
            return self.checkpointer.save_seed()
        if (reached := max(self.manager.step, self.exported)) >= steps:
            return self.log.info("finished already: %d of %d steps; a larger training.steps goes on", reached, steps)
        self.watchdog, profiler, garbage = self.start_monitoring()
        corruption, wishes = self.corruption(), 0
        while self.manager.step < steps and not self.manager.left:
            try:
                if not self.train_step():
                    continue  # it did not hold: begin again
            except Going as going:
                return self.go(going)
            step, wishes, self.wishes = self.manager.step, self.wishes, 0
            if config.validation.enable and (step % config.validation.freq == 0 or step == steps):
                self.validate()
            if wishes & STOP:
                self.manager.leave()
            if step < steps and (self.checkpointer.due(step) or wishes & SAVE or self.manager.left):
                self.save()
            if self.commits == FIRST_ESTIMATE and (left_s := self.meter.eta_s(step)) is not None:
                self.log.info("the other %d steps take about %s at this pace", steps - step, duration(left_s))
            self.watchdog.step_done()
            with self.progress.phase("trace"):
                profiler.step(step)
            garbage.step(step)
            corruption.step(step)
        if self.manager.step < steps:
            return self.print_summary("stopped at", next_command="the same command goes on")
        return self.finish(asked=wishes & STOP > 0)

    def train_step(self) -> bool:
        """One step over the slots that this group was dealt. False: it does not hold, and nothing became visible."""
        with self.progress.phase("quorum"):
            deal = self.manager.begin_step(until=self.config.training.steps)
        if deal.step >= self.config.training.steps:
            return False  # so far was the checkpoint
        batches, losses = self.loader.load(deal.slots), list[tuple[Batch, Tensor]]()
        batch = self.next_batch(batches)
        while batch is not None:
            following = self.next_batch(batches)
            goes_on = following is not None and following.slot == batch.slot
            with nullcontext() if goes_on else self.manager.last_pass(batch.slot):
                self.compute(deal.step, batch, losses)
            batch = following
        with self.progress.phase("reduce"):
            tokens_per_slot, loss_sum, finite = self.sum_over_group(deal.slots, losses)
            try:
                commit = self.manager.commit(self.manager.reduce(tokens_per_slot, loss_sum, finite))
            except Stopped as stopped:
                raise self.nonfinite(deal.step, losses) if not finite else stopped from None
            if commit is None:
                self.optimizer.zero_grad()
                return False
            grad_norm = on_host(gradient_norm(self.parameters())).item()  # it decides what comes next
        if not isfinite(grad_norm):
            raise self.nonfinite(deal.step, losses)
        with self.progress.phase("optimizer"):
            # Not the deal's step: a group that has healed since then commits a later one
            grad_norm /= commit.divisor
            lr = self.update(self.manager.step - 1, commit.divisor, grad_norm)
        self.tell(commit, grad_norm, lr)
        return True

    def compute(self, step: int, batch: Batch, losses: list[tuple[Batch, Tensor]]) -> None:
        """Forward and backward of the optimizer step that follows `step` others; its loss goes to those of the batches before it."""
        with self.progress.phase("compute"):
            if not losses or losses[-1][0].slot != batch.slot:
                seed_slot(self.config.training.seed, step, batch.slot, self.seat)
            inputs = batch.inputs.to(self.device, non_blocking=True)
            labels = batch.labels.to(self.device, non_blocking=True)
            losses.append((batch, self.model.forward_backward(inputs, labels)))

    def nonfinite(self, step: int, losses: Sequence[tuple[Batch, Tensor]]) -> NonFinite:
        """What this group has seen in the step after `step` that is not a number."""
        ran = [(batch.slot, batch.positions, on_host(loss).item()) for batch, loss in losses]
        return NonFinite(explain_nonfinite(self.world, step + 1, ran, self.model.parts))

    def update(self, step: int, divisor: float, grad_norm: float) -> float:
        """The optimizer's step that follows `step` others. `grad_norm` is that of the mean. Returns the learning rate."""
        config, training = self.config, self.config.training
        lr = config.optimizer.lr * learning_rate_factor(config.lr_scheduler, step=step, training_steps=training.steps)
        clipped = min(1.0, training.max_norm / (grad_norm + 1e-6)) if training.max_norm > 0 else 1.0
        scale_gradients(self.parameters(), clipped / divisor)  # the one division
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return lr

    def tell(self, commit: Commit, grad_norm: float, lr: float) -> None:
        """A step is committed, and the optimizer has run: what is to be seen of it."""
        self.progress.settle()
        if not self.commits:
            self.first_step, self.first_tokens = self.manager.step - self.steps_told, self.meter.tokens
        self.commits += 1
        self.log.step, self.mean_loss = self.manager.step, commit.mean_loss
        tokens = round(commit.divisor)
        self.meter.step(
            self.manager.step,
            loss=commit.mean_loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=tokens,
            groups=self.groups(commit),
            steps=self.steps_told,
        )
        size, steps = self.slot_size * self.steps_told, self.steps_told
        self.meter.samples(self.manager.step, slot_size=size, slots=commit.slots, holes=commit.holes, steps=steps)

    def groups(self, commit: Commit) -> dict[str, float]:
        """Of a job of replica groups; empty for one group alone."""
        if not self.config.fault_tolerance.enable:
            return {}
        return {
            "quorum_size": commit.quorum_size,
            "contributors": len(commit.contributors),
            "heals": self.events.heals,
        }

    def next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        with self.progress.phase("data"):
            return next(batches, None)

    def sum_over_group(
        self, slots: Sequence[int], losses: Sequence[tuple[Batch, Tensor]]
    ) -> tuple[list[float], float, bool]:
        """Valid tokens per slot, loss sum, and whether every loss is finite. One small all-reduce, one sync, for all that the ranks
        must agree on; any rank's wishes ride along."""
        wishes = self.signals.take() | SAVE * self.checkpointer.overdue(self.manager.step)
        loss_sum = torch.stack([torch.zeros((), device=self.device), *(loss for _, loss in losses)]).double().sum()
        counted = losses if self.seat.counts else ()  # of the ranks that see the same sequences one counts them
        tokens = [sum(int((b.labels != IGNORED).sum()) for b, _ in counted if b.slot == slot) for slot in slots]
        known = torch.tensor([bool(wishes & STOP), bool(wishes & SAVE), *tokens], dtype=torch.float64)
        broken = (~loss_sum.isfinite()).double()
        tail = torch.cat((torch.stack((loss_sum, broken)), known.to(self.device, non_blocking=True)))
        total, bad, stop, save_now, *tokens_per_slot = on_host(sum_over_ranks(tail)).tolist()
        self.wishes |= STOP * (stop > 0) | SAVE * (save_now > 0)
        return tokens_per_slot, total, bad == 0

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.model.parts for parameter in part.parameters()]

    def validate(self) -> None:
        assert self.held_out is not None, "validation.enable opens it"
        with self.progress.phase("validation"):
            began = self.progress.total()
            slots = [look * self.slot_size for look in range(self.config.validation.steps)]
            token_bytes = torch.from_numpy(self.tokenizer.token_bytes()).to(self.device)
            self.look = look = validate(
                self.held_out.load(slots), self.model.evaluate, token_bytes, self.device, counts=self.seat.counts
            )
            reshard_all(self.model.parts)
            seconds = self.progress.total() - began
        loss, bits = look.nats_per_token, look.bits_per_byte
        self.meter.validation(self.manager.step, loss=loss, bits_per_byte=bits, tokens=look.tokens, seconds=seconds)

    def save(self) -> None:
        if not self.manager.writes:
            return
        with self.progress.phase("checkpoint"):
            try:
                self.write_checkpoint()
            except (CheckpointFailed, OSError) as failure:
                if self.manager.left:
                    raise
                self.save_fails = True
                if self.world.global_rank == 0:
                    self.tell_of_storage(f"{failure}; tried again in {RETRY_S:g} s, while training goes on")
                return
            if self.save_fails and self.world.global_rank == 0:
                self.tell_of_storage(f"checkpoint: step {self.manager.step} is saved, after others were not")
            self.save_fails = False

    def write_checkpoint(self, *, last: bool = False) -> None:
        self.meter.sync()  # a checkpoint of a step whose figures a power cut has taken would miss them for ever
        if last or self.manager.left:  # there is no next try
            self.forget_earlier_failure()
        self.checkpointer.save(self.manager.step, last=last)

    def forget_earlier_failure(self) -> None:
        """Of a save in the background: it is made up for by the one that follows."""
        with suppress(CheckpointFailed, OSError):
            self.checkpointer.wait()

    def go(self, going: Going) -> None:
        """SIGTERM came while this group waited for others: what it holds is saved, which may be more than any other group has."""
        if going.holds and self.manager.step:
            with self.progress.phase("checkpoint"):
                self.meter.sync()
                self.forget_earlier_failure()
                self.checkpointer.save(self.manager.step, settled=False)
        self.log.info("%s", going)
        self.print_summary("stopped at", next_command="the same command goes on")

    def finish(self, *, asked: bool = False) -> None:
        """The last checkpoint, a sample of text, and what the run came to. asked: to leave, with the last step."""
        last = LastSave(
            self.checkpointer,
            self.manager,
            self.progress,
            save=partial(self.write_checkpoint, last=True),
            regroup=self.regroup,
            asked=lambda: asked or self.signals.take() & STOP > 0,
            tell=self.tell_of_storage if self.world.global_rank == 0 else lambda words: None,
            say=self.log.info,
        )
        last.make(self.manager.step)
        self.sample()
        folder = self.config.run_folder
        self.print_summary(
            "finished", next_command=f"python scripts/generate.py {folder}; tensorboard --logdir {folder.parent}"
        )

    def regroup(self) -> bool:
        """After the last step. False: this group was asked to leave while it waited for others."""
        try:
            with self.progress.phase("quorum"):
                self.manager.regroup(self.config.training.steps)
        except Going:
            return False
        return True

    def sample(self) -> None:
        seq_len = self.config.training.seq_len
        if self.degrees.pp == self.degrees.cp == self.degrees.tp == 1:  # else one token at a time cannot be shared
            with self.progress.phase("sample"):
                text = sample_text(
                    self.model.parts, self.tokenizer, self.config.sample, seq_len=seq_len, device=self.device
                )
            if text:
                self.log.info("a sample of text:\n%s", text)

    def print_summary(self, verb: str, *, next_command: str) -> None:
        text = summary(
            self.progress,
            steps=self.manager.step,
            first_step=self.first_step,
            tokens=self.meter.tokens - self.first_tokens,
            loss=self.mean_loss,
            validation_loss=self.look.nats_per_token if self.look else None,
            saved=str(self.checkpointer.folder),
            next_command=next_command,
            verb=verb,
            groups=self.events.summary(),
        )
        self.log.info("%s", text)

    @property
    def steps_told(self) -> int:
        """Optimizer steps from one commit to the next."""
        return self.config.fault_tolerance.inner_steps

    def start_monitoring(self) -> tuple[Watchdog, Profiler, GarbageCollection]:
        """Those who watch the loop."""
        config, world, cleanup = self.config, self.world, self.cleanup
        watchdog = Watchdog(
            self.progress,
            world.watch_store,
            global_rank=world.global_rank,
            world_size=world.world_size,
            timeout_s=config.comm.train_timeout_seconds,
            long_timeout_s=config.comm.init_timeout_seconds,
            log=self.log,
            record=lambda: dump_flight_recorder(self.group_folder / TRACES, world.global_rank),
            confirmed_s=lambda: self.manager.confirmed_s,
        )
        cleanup.enter_context(closing(watchdog)).start()
        cuda = world.device.differences.has_allocator
        profiler = Profiler(config.profiling, self.group_folder, global_rank=world.global_rank, log=self.log, cuda=cuda)
        garbage = GarbageCollection(config.training.gc_freq)
        return watchdog, cleanup.enter_context(profiler), cleanup.enter_context(closing(garbage))

    def corruption(self) -> Corruption:
        """What a fault drill may ask for (training/drill.py); nothing without PHAROS_DRILL=1."""
        enabled = self.environment.drill
        return Corruption(self.group_folder, self.world.global_rank, self.parameters, enabled=enabled, log=self.log)


class SemiSyncRun(Run):
    """A run whose group steps by itself, and agrees with the others every steps_told steps (ft/semi_sync_manager.py)."""

    HEALED = ()  # the rest is each group's own
    manager: SemiSyncManager

    def resume(self) -> None:
        self.grad_norm = self.lr = 0.0  # of the last step; a group that heals makes none
        super().resume()

    def weights(self) -> dict[str, Stateful]:
        return dict(self.manager.checkpoint_state(ModelState(self.model.parts)))

    def train_step(self) -> bool:
        """One round: the optimizer steps of a window of data, then the outer step, with the other groups. As Run has it."""
        with self.progress.phase("quorum"):
            deal = self.manager.begin_step(until=self.config.training.steps)
        if deal.step >= self.config.training.steps:
            return False
        batches = iter(partial(self.next_batch, self.loader.load(deal.slots)), None)
        tokens_per_step, loss_sum, finite = list[float](), 0.0, True
        step, losses = deal.step, list[tuple[Batch, Tensor]]()
        for step, (slot, parts) in enumerate(groupby(batches, key=attrgetter("slot")), deal.step):
            losses = []
            for batch in parts:
                self.compute(step, batch, losses)
            with self.progress.phase("compute"):
                [tokens], loss, finite = self.sum_over_group([slot], losses)
                grad_norm = on_host(gradient_norm(self.parameters())).item()  # it decides what comes next
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
        with self.progress.phase("reduce"):
            try:
                commit = self.manager.commit(self.manager.reduce(tokens_per_step, loss_sum, finite))
            except Stopped as stopped:
                raise self.nonfinite(step, losses) if not finite else stopped from None
        if commit is None:
            return False
        self.tell(commit, self.grad_norm, self.lr)
        return True

    def go(self, going: Going) -> None:
        self.manager.reset()
        super().go(going)

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
