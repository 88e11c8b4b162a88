"""Trains a model: reads the configuration, builds the run from the top down, then steps until it is done or told to stop.

    ./scripts/run_train.sh CONFIG [--section.key value ...]      installs what is missing, checks, launches, explains failures
    python train.py CONFIG [--section.key value ...]             one rank
    torchrun --nproc-per-node N train.py CONFIG ...              N ranks
    python train.py --help [section]                             every key

Exit code: 0 finished, or saved after SIGTERM or SIGINT; 2 bad input; 1 the rest.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from math import isfinite

import torch
from torch import Tensor, nn

from configs.check import check
from configs.help import help_text
from configs.load import load
from configs.saved import check_saved, save
from configs.schema import Config
from ft import Commit, SoloManager
from parallelisms.clip import gradient_norm, local_gradients, scale_gradients
from parallelisms.distributed import World, gather_texts, launched_rank, launched_world_size, process_group
from parallelisms.means import sum_over_ranks
from parallelisms.mesh import build_mesh, data_parallel_degree
from parallelisms.parallelize import parallelize
from parallelisms.precision import choose_precision
from parallelisms.seeds import make_deterministic, seed_slot
from training import nonfinite
from training.checkpoint import Checkpointer, CheckpointFailed, ModelState, OptimizerState
from training.data.dataset import DataState, open_data
from training.data.loader import Batch, BatchSource
from training.garbage import GarbageCollection
from training.log import Log
from training.loss import IGNORED, cross_entropy_sum
from training.metrics import Meter
from training.optimizer import build_optimizer, set_learning_rate
from training.profiling import Profiler
from training.progress import Progress, summary
from training.sampling import generate
from training.schedule import learning_rate_factor
from training.signals import SAVE, STOP, Signals
from training.sinks import open_sinks
from training.tokenizer import build_tokenizer
from training.validation import ValidationLoss, validate
from training.watchdog import Watchdog


def main(argv: Sequence[str]) -> int:
    """One rank of one start of a run; returns the exit code."""
    if "--help" in argv or "-h" in argv:
        print(help_text(next((word for word in argv if not word.startswith("-")), None)))
        return 0
    try:
        config = load(argv)
        check(config, world_size=launched_world_size())
        check_saved(config, config.run_folder)
    except ValueError as error:
        print(f"pharos: {error}", file=sys.stderr)
        return 2
    log = Log(global_rank=launched_rank(), colour=not config.metrics.disable_color_printing)
    with closing(Signals(log=log)) as signals, process_group(config.comm) as world, ExitStack() as cleanup:
        try:
            run = Run(config, world, signals, log, cleanup)
        except ValueError as error:  # input that only the work itself could find wrong, such as a byte deep inside a file
            print(f"pharos: {error}", file=sys.stderr)
            return 2
        except (CheckpointFailed, OSError) as error:
            log.error("%s", error)
            return 1
        try:
            run.train()
        except (CheckpointFailed, NonFinite) as failure:
            log.error("%s", failure)
            return 1
    return 0


class NonFinite(RuntimeError):
    """A loss or a gradient is not a number. Nothing was applied."""


@dataclass(frozen=True)
class Step:
    """A step that holds."""

    commit: Commit
    grad_norm: float
    lr: float
    wishes: int  # STOP | SAVE, of any rank


class Run:
    """One start of a run on one rank: what it is made of, from the top down, then the loop over it."""

    def __init__(self, config: Config, world: World, signals: Signals, log: Log, cleanup: ExitStack) -> None:
        """`cleanup` closes what is opened here, last first."""
        self.config, self.world, self.signals, self.log, self.cleanup = config, world, signals, log, cleanup
        self.device = world.device.torch_device
        self.progress = Progress()
        with self.progress.phase("start"):
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
        dp_size = data_parallel_degree(config.parallelism, self.world.world_size)
        self.slot_size = training.global_batch_size if training.global_batch_size > 0 else training.local_batch_size * dp_size
        cache = config.run_folder.parent / "data_cache"
        self.data = open_data(training, self.tokenizer, cache, log=self.log, vocab_size=self.vocab_size)
        self.log.info("data      %s", self.data.summary())
        self.loader = self.open_loader("train", dp_size)
        self.held_out = self.open_loader("validation", dp_size) if config.validation.enable else None

    def open_loader(self, split: str, dp_size: int) -> BatchSource:
        pin_memory = self.device.type == "cuda"
        loader = self.data.loader(split, slot_size=self.slot_size, dp_rank=self.world.global_rank, dp_size=dp_size, pin_memory=pin_memory)
        return self.cleanup.enter_context(closing(loader))

    def build(self) -> None:
        """What is trained, and who decides whether a step holds."""
        config, training = self.config, self.config.training
        architecture = importlib.import_module(f"models.{config.model.name}")
        with torch.device("meta"):
            model = architecture.build(config.model, vocab_size=self.vocab_size, max_seq_len=training.seq_len)
        self.flops_per_token = model.flops_per_token(training.seq_len)
        precision = choose_precision(training.dtype, training.mixed_precision_param, training.mixed_precision_reduce, self.world.device)
        self.model = parallelize(
            model,
            build_mesh(config.parallelism, self.device.type, self.world.world_size),
            cross_entropy_sum,
            precision=precision,
            reshard_after_forward=config.parallelism.fsdp_reshard_after_forward,
            compile=config.compile,
            device=self.device,
            seed=training.seed,
        )
        self.optimizer = build_optimizer(config.optimizer, self.model.parts)
        self.manager = self.cleanup.enter_context(closing(SoloManager(self.slot_size)))
        self.manager.attach(self.model.parts)
        ranks, weights = self.world.world_size, sum(p.numel() for p in model.parameters())
        self.log.info("model     %s, %s parameters, %d tokens a step", config.model.name, f"{weights:,}", self.slot_size * training.seq_len)
        self.log.info("devices   %d rank%s, %s", ranks, "s" * (ranks > 1), self.world.device.name)
        self.log.info("numbers   %s", precision)

    def resume(self) -> None:
        """What is kept, and where it left off."""
        config, folder = self.config, self.config.run_folder
        self.meter = Meter(
            config.metrics,
            log=self.log,
            progress=self.progress,
            steps=config.training.steps,
            device=self.world.device,
            world_size=self.world.world_size,
            flops_per_token=self.flops_per_token,
        )
        states = {
            "model": ModelState(self.model.parts),
            "optimizer": OptimizerState(self.model.parts, self.optimizer),
            "ledger": self.manager,
            "meter": self.meter,
            "data": DataState(self.data),
            "loader": self.loader,
        }
        self.checkpointer = self.cleanup.enter_context(closing(Checkpointer(config.checkpoint, folder, states, log=self.log)))
        resumed = self.checkpointer.load()
        self.first_step, self.first_tokens = self.manager.step, self.meter.tokens
        self.validation: ValidationLoss | None = None
        if self.world.global_rank == 0:
            save(config, folder)
            self.meter.open(
                open_sinks(
                    folder,
                    tensorboard_folder=config.metrics.save_tb_folder if config.metrics.enable_tensorboard else "",
                    wandb=config.metrics.enable_wandb,
                    resumed_step=resumed,
                    settings=asdict(config),
                )
            )
        self.cleanup.enter_context(closing(self.meter))

    def train(self) -> None:
        """Steps until training.steps are committed, or a signal asks to stop. Raises NonFinite, CheckpointFailed."""
        config, steps = self.config, self.config.training.steps
        if config.checkpoint.create_seed_checkpoint:
            return self.checkpointer.save_seed()
        if self.manager.step >= steps:
            return self.log.info("finished already: %d of %d steps; a larger training.steps goes on", self.manager.step, steps)
        watchdog = self.cleanup.enter_context(closing(self.watch()))
        garbage = self.cleanup.enter_context(closing(GarbageCollection(config.training.gc_freq)))
        profiler = self.cleanup.enter_context(
            Profiler(config.profiling, config.run_folder, global_rank=self.world.global_rank, log=self.log, cuda=self.device.type == "cuda")
        )
        while self.manager.step < steps:
            done = self.train_step()
            if done is None:
                continue  # it did not hold: the same step again
            step = self.log.step = self.manager.step
            tokens = round(done.commit.divisor)
            self.meter.step(step, loss=done.commit.mean_loss, grad_norm=done.grad_norm, lr=done.lr, tokens=tokens)
            if config.validation.enable and (step % config.validation.freq == 0 or step == steps):
                self.validate()
            if self.checkpointer.due(step) or done.wishes:
                self.save()
            watchdog.step_done()
            profiler.step(step)
            garbage.step(step)
            if done.wishes & STOP:
                self.manager.leave()
                return self.log.info("stopped at step %d of %d, saved; the same command goes on", step, steps)
        self.finish(done.commit.mean_loss)

    def train_step(self) -> Step | None:
        """One step over the slots that this group was dealt. None: it does not hold, and nothing became visible."""
        deal = self.manager.begin_step()
        batches, losses = self.loader.load(deal.slots), list[tuple[Batch, Tensor]]()
        while (batch := self.next_batch(batches)) is not None:
            with self.progress.phase("compute"):
                if not losses or losses[-1][0].slot != batch.slot:
                    seed_slot(self.config.training.seed, deal.step, batch.slot, self.world.global_rank)
                inputs, labels = batch.inputs.to(self.device, non_blocking=True), batch.labels.to(self.device, non_blocking=True)
                losses.append((batch, self.model.forward_backward(inputs, labels)))
        with self.progress.phase("reduce"):
            tokens_per_slot, loss_sum, finite, wishes = self.sum_over_group(deal.slots, losses)
            commit = self.manager.commit(self.manager.reduce(tokens_per_slot, loss_sum, finite))
            parameters = self.parameters()
            norm = gradient_norm(parameters) / commit.divisor if commit else torch.tensor(torch.nan)
            grad_norm = norm.item()  # a sync: nobody may step on a gradient that is not finite
        if not (finite and isfinite(grad_norm)):
            raise NonFinite(self.explain(deal.step, losses))
        if commit is None:
            self.optimizer.zero_grad()
            return None
        with self.progress.phase("optimizer"):
            lr = self.config.optimizer.lr * learning_rate_factor(
                self.config.lr_scheduler, step=deal.step, training_steps=self.config.training.steps
            )
            set_learning_rate(self.optimizer, lr)
            max_norm = self.config.training.max_norm
            clipped = min(1.0, max_norm / (grad_norm + 1e-6)) if max_norm > 0 else 1.0
            scale_gradients(parameters, clipped / commit.divisor)  # the one division
            self.optimizer.step()
            self.optimizer.zero_grad()
        return Step(commit, grad_norm, lr, wishes)

    def next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        with self.progress.phase("data"):
            return next(batches, None)

    def sum_over_group(self, slots: Sequence[int], losses: Sequence[tuple[Batch, Tensor]]) -> tuple[list[float], float, bool, int]:
        """Valid tokens per slot, loss sum, whether every loss is finite, and any rank's wishes: one small all-reduce, one sync."""
        wishes = self.signals.take()
        loss_sum = torch.stack([loss for _, loss in losses]).double().sum()
        tokens = [sum((batch.labels != IGNORED).sum().item() for batch, _ in losses if batch.slot == slot) for slot in slots]
        known = torch.tensor([bool(wishes & STOP), bool(wishes & SAVE), *tokens], dtype=torch.float64).to(self.device, non_blocking=True)
        tail = torch.cat((loss_sum[None], (~loss_sum.isfinite())[None].double(), known))
        total, broken, stop, save_now, *tokens_per_slot = sum_over_ranks(tail).tolist()
        return tokens_per_slot, total, broken == 0, STOP * (stop > 0) | SAVE * (save_now > 0)

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for part in self.model.parts for parameter in part.parameters()]

    def explain(self, step: int, losses: Sequence[tuple[Batch, Tensor]]) -> str:
        """Which rank, which parameter, which positions: every rank looks at its own and all hear it."""
        named = [(name, parameter) for part in self.model.parts for name, parameter in part.named_parameters()]
        gradients = dict(zip((name for name, p in named if p.grad is not None), local_gradients(p for _, p in named), strict=True))
        ran = [(batch.slot, batch.positions, loss.item()) for batch, loss in losses]
        texts = gather_texts(self.world, "not finite", nonfinite.describe(self.world.global_rank, step + 1, ran, gradients))
        return "; ".join(filter(None, texts)) or f"step {step + 1} not taken: the gradient's norm is not finite"

    def validate(self) -> None:
        with self.progress.phase("validation"):
            began = self.progress.total()
            slots = [look * self.slot_size for look in range(self.config.validation.steps)]
            token_bytes = torch.from_numpy(self.tokenizer.token_bytes()).to(self.device)
            self.validation = validate(self.held_out.load(slots), self.model.evaluate, token_bytes, self.device)
            seconds = self.progress.total() - began
        look = self.validation
        self.meter.validation(
            self.manager.step, loss=look.nats_per_token, bits_per_byte=look.bits_per_byte, tokens=look.tokens, seconds=seconds
        )

    def save(self, *, last: bool = False) -> None:
        with self.progress.phase("checkpoint"):
            self.checkpointer.save(self.manager.step, last=last)

    def finish(self, loss: float) -> None:
        """The last checkpoint, a sample of text, and what the run came to."""
        self.save(last=True)
        with self.progress.phase("sample"):
            self.print_sample()
        folder, look = self.config.run_folder, self.validation
        self.log.info(
            "%s",
            summary(
                self.progress,
                steps=self.manager.step,
                first_step=self.first_step,
                tokens=self.meter.tokens - self.first_tokens,
                loss=loss,
                validation_loss=look and look.nats_per_token,
                saved=str(self.checkpointer.folder),
                next_command=f"python scripts/generate.py {folder}; tensorboard --logdir {folder.parent}",
            ),
        )

    def print_sample(self) -> None:
        """Every rank draws the same text, since a sharded model needs all of them; global rank 0 shows it."""
        sample = self.config.sample
        prompt = torch.from_numpy(self.tokenizer.encode(sample.prompt, bos=True)).long().to(self.device)
        length = min(sample.tokens, self.config.training.seq_len - prompt.numel())
        if length > 0 and len(self.model.parts) == 1:
            drawn = list(generate(self.model.parts[0], prompt, sample, length=length))
            self.log.info("a sample of %d tokens:\n%s", length, sample.prompt + self.tokenizer.decode(drawn))

    def watch(self) -> Watchdog:
        comm = self.config.comm
        watchdog = Watchdog(
            self.progress,
            self.world.store.clone(),
            global_rank=self.world.global_rank,
            world_size=self.world.world_size,
            timeout_s=comm.train_timeout_seconds,
            long_timeout_s=comm.init_timeout_seconds,
            log=self.log,
        )
        watchdog.start()
        return watchdog


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
