"""Components of a run: data, model, manager, metrics, checkpoints, and the watchdog, profiler and fault injection of the training loop."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from configs.check import gradient_device_type
from configs.errors import explained
from configs.load import CONFIG_FILE
from configs.saved import as_tables, save, shared_setting_digests, to_toml
from configs.schema import RunConfig
from ft.agreement import Agreement
from ft.config import Environment, group_folder
from ft.seam import BadInput
from ft.start import open_manager
from parallelisms.distributed import FALLBACK_MARGIN_S, World
from parallelisms.execution import choose_precision
from parallelisms.mesh import build_mesh, degrees
from parallelisms.parallelize import parallelize
from training.background_writer import BackgroundWriter, Events
from training.checkpoint import Checkpointer
from training.checkpoint_files import EMA_STATE, ROWS_STATE, SPIKES_STATE, TOKENS_STATE, CheckpointFailed
from training.checkpoint_load import step_and_ledger
from training.data.dataset import open_data
from training.data.loader import SlotPartition
from training.durable_files import RunLock
from training.ema import EMA
from training.fault_injection import FaultInjector
from training.log import Log
from training.loss import cross_entropy_sum
from training.metrics import MetricsProcessor
from training.metrics_writer import SYNC_S, MetricsWriter
from training.object_store import is_url
from training.optimizer import OptimizerStep, build_optimizer
from training.profiling import GarbageCollection, Profiler
from training.progress import Progress
from training.saver import Saver
from training.signals import STEPS_TO_STOP, Signals
from training.sinks import METRICS, SAMPLES, LastKeptStep, Sinks, last_rows
from training.spikes import SpikeRule
from training.states import ModelState, OptimizerState, plain_name
from training.tokenizer import build_tokenizer
from training.watchdog import Watchdog, dump_flight_recorder
from training.writer_lease import WriterLease

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful  # its import takes a second

FORMER_CHANGED = "branch"  # key of "changed" in samples.jsonl of earlier versions; not the branch of a rewind
TRACES = "comm_traces"  # the flight recorder's files, in the folder of the run or of its replica group


class Components:
    """Builds the components of one rank, in the order in which they depend on each other; train.Run is the loop over them."""

    # entries of `checkpoint_states` that a joining group does not receive; it gets the ledger with the manager's own state
    UNHEALED_STATES: tuple[str, ...] = ("ledger", "loader")

    def __init__(
        self,
        config: RunConfig,
        environment: Environment,
        world: World,
        signals: Signals,
        log: Log,
        cleanup: ExitStack,
        changes: Mapping[str, str],
    ) -> None:
        """`signals`: the requests to stop and to save, which the loop takes. `cleanup` closes what is opened here, in reverse order.
        `changes`: see configs.saved.check_saved."""
        self.config = config
        self.environment = environment
        self.world = world
        self.changes = changes
        self.signals = signals
        self.log = log
        self.cleanup = cleanup
        signals.nothing_saved = config.checkpoint.nothing_saved
        self.device = world.device.torch_device
        self.progress = Progress()
        self.pending_requests = 0
        self.save_overdue = False
        self.budgets_end = False
        self.inner_steps = config.fault_tolerance.inner_steps  # optimizer steps from one commit to the next
        self.group_folder = group_folder(config.run_folder, config.fault_tolerance, environment)
        self.background_writer = cleanup.enter_context(closing(BackgroundWriter(self.report_storage)))
        self.events = Events(self.group_folder, self.background_writer)
        self.config_is_due = False
        self.background_writer.register(CONFIG_FILE, self.write_config)
        with self.progress.phase("start"):
            check_same_settings(config, changes, world)
            if config.job.description:
                log.info("about     %s", config.job.description)
            if config.job.print_config:
                log.info("%s", to_toml(config))
            if config.training.deterministic:  # an operation without a deterministic kernel raises
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS makes its first handle
                torch.use_deterministic_algorithms(True)
                torch.backends.cudnn.benchmark = False
            self.build_data()
            lines = self.build_model()
            self.build_manager()
            for line in lines:
                log.info("%s", line)
            writer = self.build_metrics()
            self.build_checkpointer(writer)
            self.resume()
            if self.writes_rows:
                self.metrics_processor.writer = cleanup.enter_context(closing(writer))

    def build_data(self) -> None:
        """Opens tokenizer and data, and builds the loaders of this rank's part of each slot."""
        config, training, world = self.config, self.config.training, self.world
        self.tokenizer = build_tokenizer(config.model.tokenizer_path)
        self.vocab_size = config.model.vocab_size or self.tokenizer.vocab_size
        self.degrees = degrees(config.parallelism, world.world_size)
        self.coordinate, dp_size = self.degrees.coordinate(world.global_rank), self.degrees.data_parallel
        self.slot_size = training.slot_size(dp_size)
        cache = config.run_folder.parent / "data_cache"
        self.data = open_data(
            training, config.validation, self.tokenizer, cache, log=self.log, vocab_size=self.vocab_size
        )
        self.log.info("data      %s", self.data.summary())
        partition = SlotPartition(self.slot_size, training.local_batch_size, self.coordinate.dp_rank, dp_size)
        pin_memory = world.device.traits.pins_batches
        self.loader = self.cleanup.enter_context(closing(self.data.loader(partition, pin_memory=pin_memory)))
        if config.validation.enable:
            orders = self.data.validation_orders(seq_len=training.seq_len)
            self.held_out = self.data.validation_loaders(orders, partition, pin_memory=pin_memory)
            reads = config.validation.steps * self.slot_size
            for name, order in orders.items():
                if reads > (count := order.sequences_per_epoch) and not world.global_rank:
                    self.log.warning(
                        "validation: %d sequences are read, and %s has %d: the first ones count several times; "
                        "nearest: validation.steps = %d",
                        reads,
                        name or "the held-out text",
                        count,
                        max(1, count // self.slot_size),
                    )
            for loader in self.held_out.values():
                self.cleanup.enter_context(closing(loader))

    def build_model(self) -> list[str]:
        """Builds this rank's shards of the model, and the optimizer. Returns lines for the log."""
        config, training, world, device_type = self.config, self.config.training, self.world, self.device.type
        model = config.meta_model(self.vocab_size)
        self.flops_per_token = model.flops_per_token(training.seq_len)
        precision = choose_precision(
            training.dtype, training.mixed_precision_param, training.mixed_precision_reduce, world.device
        )
        weights, tokens = sum(p.numel() for p in model.parameters()), self.slot_size * training.seq_len
        self.model = parallelize(
            model,
            build_mesh(self.degrees, device_type),
            cross_entropy_sum,
            config.execution_config(precision, vocab_size=self.vocab_size, device_type=device_type),
            local_batch_size=training.local_batch_size,
            seq_len=training.seq_len,
            device=self.device,
            seed=training.seed,
        )
        self.parameters = [parameter for part in self.model.parts for parameter in part.parameters()]
        self.optimizer = build_optimizer(config.optimizer, self.model.parts, compute=precision.compute)
        self.spikes = SpikeRule(training) if training.on_spike != "stop" or training.spike_window else None
        decay = config.optimizer.ema_decay
        self.ema = EMA(self.model.parts, decay) if decay else None
        self.optimizer_step = OptimizerStep(
            self.optimizer,
            self.parameters,
            config.optimizer,
            config.lr_scheduler,
            training,
            self.progress,
            self.spikes,
            self.ema,
        )
        return [
            f"model     {config.model.name}, {weights:,} parameters, {tokens} tokens a step",
            f"devices   {world.world_size} rank{'s' * (world.world_size > 1)}, {world.device.name}",
            *([f"layout    {self.degrees}"] if world.world_size > 1 else []),
            f"precision {precision}",
        ]

    def build_manager(self) -> None:
        """Opens the manager, which reduces gradients over replica groups and commits a step if all ranks of this group vote for it."""
        config, settings, world = self.config, self.config.fault_tolerance, self.world
        agreement = None
        if settings.enable and world.world_size > 1:
            # Longer than a reduction between groups and than a rendezvous: a peer rank may be in either.
            timeout_s = max(settings.collective_s, config.comm.init_timeout_seconds) + FALLBACK_MARGIN_S
            agreement = Agreement(dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
        manager = open_manager(
            settings,
            self.environment,
            slot_size=self.slot_size,
            skip_ranges=[(span.first, span.end) for span in config.training.skip if not span.source],
            folder=self.group_folder,
            device_type=gradient_device_type(config, self.device.type),
            store=world.store,
            agreement=agreement,
            long_phase_s=config.comm.init_timeout_seconds,
            fingerprint=(
                *shared_setting_digests(config),
                ("text or tokenizer", self.data.digest[:16]),
                # each group orthogonalises for itself, and "auto" depends on its devices
                ("training.mixed_precision_param, in Muon", str(getattr(self.optimizer, "orthogonal_dtype", None))),
            ),
            restore=self.restore,
            phase_timer=self.progress,
            record_event=self.events,
        )
        self.manager = self.cleanup.enter_context(closing(manager))
        self.manager.attach([*self.model.parts, *([self.ema] if self.ema is not None else [])])
        self.signals.on_stop_request(self.manager.want_to_leave)

    def checkpoint_states(self, rows: MetricsWriter) -> dict[str, Stateful]:
        """Returns the states that a checkpoint contains, by their names in it, which are part of its format. A joining group receives all
        but UNHEALED_STATES; a state that is added needs a line in `reset`, too:

        model, optimizer   weights and buffers; the optimizer's state and parameter groups
        outer_optimizer    with a semi_sync_method: state of its outer optimizer, and
        local_model        the writer's local weights, if they may differ: see SemiSyncManager.checkpoint_state
        ledger             step, commit ids, and the positions of the data that are trained on
        meter              number of tokens
        data, loader       digests of the data, by segments of positions; the cursors of a stream, of each rank
        ema, spikes        averaged weights; window of losses and norms: if they are configured
        figures            newest rows of metrics and samples, of rank 0: with replica groups"""
        states: dict[str, Stateful] = {
            **self.model_states(),
            "optimizer": OptimizerState(self.model.parts, self.optimizer),
            "ledger": self.manager,
            TOKENS_STATE: self.metrics_processor,
            "data": self.data,
            "loader": self.loader,
        }
        if self.ema is not None:
            states[EMA_STATE] = self.ema
        if self.spikes is not None:
            states[SPIKES_STATE] = self.spikes
        if self.config.fault_tolerance.enable:
            states[ROWS_STATE] = rows
        return states

    def build_metrics(self) -> MetricsWriter:
        """Locks the run's folder and builds the metrics processor. Returns its writer, which is attached after `resume`."""
        config, folder, metrics = self.config, self.config.run_folder, self.config.metrics
        shared = config.fault_tolerance.enable
        if self.world.global_rank == 0:
            self.cleanup.enter_context(closing(RunLock(folder, shared=shared, log=self.log.warning)))
            if shared:
                self.cleanup.enter_context(closing(RunLock(self.group_folder, log=self.log.warning)))
        self.metrics_processor = MetricsProcessor(
            metrics,
            log=self.log,
            progress=self.progress,
            last_step=config.training.steps,
            device=self.world.device,
            world_size=self.world.world_size,
            flops_per_token=self.flops_per_token,
        )

        def open_sinks(kept_step: LastKeptStep) -> Sinks:
            # before rows are removed: no later launch may resume from a checkpoint whose rows are removed
            self.checkpointer.set_abandoned_aside()
            return Sinks(
                folder,
                kept_step,
                tensorboard_folder=metrics.save_tb_folder if metrics.enable_tensorboard else "",
                wandb=metrics.enable_wandb,
                settings=as_tables(config),
                report=self.report_storage,
            )

        # rows of a launch that saves no checkpoint would take the place of those that belong to the run's checkpoints
        self.writes_rows = self.world.global_rank == 0 and not config.checkpoint.load_only
        return MetricsWriter(
            folder, lambda: self.manager.writer_quorum, open_sinks, self.background_writer, shared=shared
        )

    def build_checkpointer(self, writer: MetricsWriter) -> None:
        """Builds checkpointer and saver, and registers the states that joining groups receive."""
        config, folder, shared = self.config, self.config.run_folder, self.config.fault_tolerance.enable
        is_rank0 = self.world.global_rank == 0
        states = self.checkpoint_states(writer)
        for name in [name for name in states if name not in self.UNHEALED_STATES]:
            self.manager.register_state(name, states[name].state_dict, states[name].load_state_dict)
        # only rank 0 has rows; DCP saves one of several entries with the same name, which could be an empty one
        checkpointed = {name: state for name, state in states.items() if is_rank0 or name != ROWS_STATE}
        lease = WriterLease(folder, lambda: self.manager.writer_quorum) if shared else None
        rows = [METRICS, SAMPLES, f"{Path(config.metrics.save_tb_folder)}/*"]
        self.checkpointer = self.cleanup.enter_context(
            closing(
                Checkpointer(
                    config.checkpoint,
                    folder,
                    checkpointed,
                    computed=self.computed_buffers(),
                    log=self.log,
                    lease=lease,
                    report=self.report_storage,
                    # groups with separate disks each have only some of the rows
                    extra_files=[CONFIG_FILE] if shared else [CONFIG_FILE, *rows],
                    fetcher=self.group_folder.name if shared else "",
                    on_bytes=self.progress.renew,
                )
            )
        )
        self.saver = Saver(
            self.checkpointer,
            self.manager,
            self.progress,
            sync=writer.sync if self.writes_rows else lambda: None,
            report=self.report_storage if is_rank0 else lambda message: None,
            info=self.log.info,
        )

    def resume(self) -> None:
        """Loads the state from which this launch continues, unless the manager or another group brings it, and prepares the first row of
        samples.jsonl and the changed settings."""
        config, seed = self.config, self.config.checkpoint.create_seed_checkpoint
        loads_newest = config.checkpoint.enable and config.checkpoint.load_step < 0 and not seed
        # a finished run may have saved only its weights
        self.exported_step = self.checkpointer.newest_step("model") if loads_newest else 0
        finished = self.exported_step >= config.training.steps
        newest, load_step = self.checkpointer.newest_step(), config.checkpoint.load_step
        # the first step made with this launch's settings; smaller after a rewind
        self.first_step_of_launch = (newest if load_step < 0 else load_step) + self.inner_steps
        self.metrics_processor.resume_step = self.first_step_of_launch
        manager_restores = config.fault_tolerance.enable and not seed and newest < config.training.steps
        if not (finished or manager_restores):  # else another group sends the state, or the manager calls `restore`
            self.load()
        if not newest and load_step < 0:  # after `load`, which copies and verifies the checkpoint
            self.note_inherited_position()
        if finished:
            self.checkpointer.upload(self.exported_step)
            if newest:
                text = "the last save has only the weights: with more training.steps the run continues from step %d"
                self.log.info(text, newest)
        if self.world.global_rank == 0:
            self.announce_changes()

    def note_inherited_position(self) -> None:
        """Notes on rank 0, for the first row of samples.jsonl, the position of another run's checkpoint from which this run continues its
        data, if there is one. Collective, as it may copy the checkpoint."""
        is_rank0, name = self.world.global_rank == 0, self.config.checkpoint.initial_load_path
        try:
            path = self.checkpointer.checkpoint_to_continue()
            if path is None or not is_rank0:
                return
            step, ledger = step_and_ledger(path)
        except Exception as error:  # noqa: BLE001 (unverified, so it can raise anything; `load` reports damage)
            if is_rank0:
                self.log.warning("%s: its position cannot be read: %s", name, error)
            return
        holes = [[hole, hole + ledger["slot_size"]] for hole in ledger["holes"]]
        self.metrics_processor.inherited_position = {"position": ledger["position"], "holes": holes}
        self.metrics_processor.resume_step = step + self.inner_steps

    def removed_changes(self) -> dict[str, str]:
        """Returns the changes of settings recorded in rows that are removed, because their steps run again."""
        changes, path = dict[str, str](), self.config.run_folder / SAMPLES
        for row in reversed(last_rows(path, since=self.metrics_processor.resume_step, until=sys.maxsize)):
            changes = merge_changes(changes, row.get("changed", row.get(FORMER_CHANGED, {})))
        return changes

    def request_config(self) -> None:
        """Has config.toml written by the background writer's thread, which calls `write_config` and retries it."""
        self.config_is_due = True
        self.background_writer.wake()

    def write_config(self) -> None:
        """Writes config.toml if that is due, and the run saves. Raises OSError."""
        if self.config_is_due and not self.config.checkpoint.load_only:
            save(self.config, self.config.run_folder, batch=self.slot_size)
            self.config_is_due = False

    def announce_changes(self) -> None:
        """Announces settings that differ from those of the earlier launches, in the log, on the live page and in the next step's rows."""
        changes = self.removed_changes()
        if self.changes:  # config.toml has the new settings once a step was made with them
            text = "; ".join(f"{key} {change}" for key, change in self.changes.items())
            self.log.warning("settings changed from the next step on: %s", text)
            self.events("settings", self.log.step or 0, words=text)
            self.manager.show_event("settings", text)
        else:
            self.config_is_due = True
            self.write_config()
        self.metrics_processor.record_changes(merge_changes(changes, self.changes), self.request_config)

    def model_states(self) -> dict[str, Stateful]:
        """Returns the model's states in a checkpoint; with a semi_sync_method also those of outer optimizer and local weights."""
        return {"model": ModelState(self.model.parts)}

    def computed_buffers(self) -> set[str]:
        """Returns the names, in a checkpoint, of the buffers that follow from the configuration, such as the table of rotary positions."""
        buffers = ((name, part) for part in self.model.parts for name, _ in part.named_buffers())
        return {f"model.{plain_name(name)}" for name, part in buffers if name in getattr(part, "COMPUTED_BUFFERS", ())}

    def load(self) -> None:
        """Loads the newest checkpoint, if there is one, and continues its data. Raises CheckpointFailed, ValueError."""
        self.checkpointer.load()
        self.resume_data()

    def resume_data(self, position: int = 0) -> None:
        """Continues the data of the loaded checkpoint, from `position` on if that is later. Raises ValueError."""
        # set again, since the newest checkpoint, which `resume` has expected, may be damaged, and an older one loaded
        self.metrics_processor.resume_step = self.first_step_of_launch = self.manager.step + self.inner_steps
        ledger, left = self.manager.loaded_ledger, self.config.training.steps - self.manager.step
        # with several groups, or skipped data, the step at which the budgets end is not known yet: Run.check_budgets stops the run
        early = self.config.fault_tolerance.enable or position or self.manager.rewinds or self.config.training.skip
        steps = min(left, STEPS_TO_STOP * self.inner_steps) if early else left
        begin, holes = ledger.get("position", 0), ledger.get("holes", ())
        # holes are trained on before the data from `begin` on; a rewind, which gives `position`, skips them (Ledger.rewind)
        in_holes = 0 if position else len(holes) * ledger.get("slot_size", 0)
        needed = max(0, steps * self.slot_size - in_holes) + max(0, position - begin)
        text = self.data.continue_segments(begin, holes, self.changes, needed)
        if text and self.world.global_rank == 0:
            self.log.warning("%s", text)

    def load_earlier(self, step: int, rewind_steps: Sequence[int], position: int) -> None:
        """Loads the newest checkpoint before `step`, a spike. Without one, resets to step 0. Rows of the undone steps are deleted when the
        next row is written; the changes of settings that they record move to that row. `rewind_steps`: see CheckpointLoader.rewind.
        `position`: that of the data at `step`."""
        metrics, first = self.metrics_processor, self.first_step_of_launch
        self.checkpointer.rewind(step, rewind_steps, self.reset)
        self.resume_data(position)
        is_before = self.first_step_of_launch <= first  # the first step with this launch's settings is made again
        self.first_step_of_launch = min(self.first_step_of_launch, first)
        if not is_before:
            metrics.inherited_position = {}
        if self.world.global_rank == 0:
            self.background_writer.flush(SYNC_S)  # the rows of the steps before `step` may be on their way
            changes = self.removed_changes()
            metrics.record_changes(merge_changes(changes, self.changes) if is_before else changes, self.request_config)

    def reset(self) -> None:
        """Makes the state of a run at step 0."""
        with torch.no_grad():
            for part in self.model.parts:
                part.init_weights(self.config.training.seed)
            for values in self.optimizer.state.values():
                for value in values.values():
                    value.zero_()  # as Adam and Muon begin
        if self.ema is not None:
            self.ema.reset()
        self.metrics_processor.load_state_dict({"tokens": 0})
        if self.spikes is not None:
            self.spikes.reset()

    def restore(self) -> None:
        """Loads the newest checkpoint; the manager calls it when no group has a state to heal from. Raises BadInput, CheckpointFailed."""
        with self.progress.phase("checkpoint"):
            try:
                self.load()
            except ValueError as error:
                raise BadInput(self.config.origin.explain(explained(error))) from None

    def report_storage(self, message: str) -> None:
        """Reports a storage failure, or its end: log, events, dashboard. Called mostly in the background writer's thread."""
        self.log.warning("storage: %s", message)
        self.events("storage", self.log.step or 0, words=message)
        if hasattr(self, "manager"):  # storage may fail before the manager is built
            self.manager.show_event("storage", message)

    def start_monitoring(self) -> tuple[Watchdog, Profiler, GarbageCollection, FaultInjector]:
        """Starts the watchdog, and builds what train.py calls after each step."""
        config, world, cleanup, folder = self.config, self.world, self.cleanup, self.group_folder
        rank = world.global_rank
        watchdog = Watchdog(
            self.progress,
            world.watch_store,
            global_rank=rank,
            world_size=world.world_size,
            timeout_s=config.comm.train_timeout_seconds,
            long_timeout_s=config.comm.init_timeout_seconds,
            log=self.log,
            record=lambda: dump_flight_recorder(folder / TRACES, rank),
            last_waiting_for_others_at_s=lambda: self.manager.last_waiting_for_others_at_s,
        )
        cleanup.enter_context(closing(watchdog)).start()
        allocator = torch.cuda.memory if world.device.traits.has_allocator else None
        profiler = Profiler(config.profiling, folder, global_rank=rank, log=self.log, allocator=allocator)
        cleanup.enter_context(profiler)
        garbage = cleanup.enter_context(closing(GarbageCollection(config.training.gc_freq)))
        injects = self.environment.injects_faults
        return watchdog, profiler, garbage, FaultInjector(folder, rank, self.parameters, enabled=injects, log=self.log)

    def print_summary(self, verb: str, next_command: str = "") -> None:
        """Logs the closing summary. `next_command`: what to run next; "": the same again, or what shows a finished run."""
        saved, groups, settings = self.checkpointer.location, self.events.summary(), self.config.checkpoint
        if verb == "finished":
            next_command = next_command or f"tensorboard --logdir {quote(str(self.config.run_folder.parent))}"
        if settings.nothing_saved:
            saved = settings.nothing_saved
            next_command = next_command or "the same command begins where this launch did"
        elif verb == "finished":
            next_command = f"python scripts/generate.py {quote(str(self.config.run_folder))}; {next_command}"
        elif not next_command and settings.load_step < 0:
            next_command = "the same command resumes the run"
        elif not next_command:
            again = f"begins again at step {settings.load_step}"
            next_command = f"the same command {again}; without checkpoint.load_step it resumes the run"
        self.metrics_processor.print_summary(
            self.manager.step, verb=verb, saved=saved, next_command=next_command, groups=groups
        )


def check_same_settings(config: RunConfig, changes: Mapping[str, str], world: World) -> None:
    """Raises CheckpointFailed if this rank has read an older config.toml of the run than rank 0, which fetches it from an object store.
    scripts/launch.py fetches the file before it starts ranks; torchrun alone does not."""
    if not is_url(config.checkpoint.folder):
        return
    read = repr((dict(changes), config.training.dataset_held_out))  # what follows from that file
    if world.global_rank == 0:
        world.store.set("settings", read)
    elif world.store.get("settings").decode() != read:
        path, location = config.run_folder / CONFIG_FILE, config.checkpoint.location(config.run_folder)
        raise CheckpointFailed(f"{path} was fetched from {location} after this rank had read an older one: start again")


def merge_changes(earlier: Mapping[str, str], later: Mapping[str, str]) -> dict[str, str]:
    """Merges two records of changed settings, key -> "old -> new"."""
    old = {key: earlier.get(key, change).partition(" -> ")[0] for key, change in later.items()}
    return {**earlier, **{key: f"{old[key]} -> {change.rpartition(' -> ')[2]}" for key, change in later.items()}}
