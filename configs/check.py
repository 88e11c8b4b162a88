"""Checks of the configuration before any process or device is used: each section, sections against each other, and the files.

Before it starts processes for ranks, scripts/launch.py calls `check` and `check_resume`, and each rank's train.py calls `check` again; a
rank in the launcher's own process calls only `check`, and Components.resume_data raises the errors of `check_resume`. Each section has its
own check(); `open_data` raises the errors that only tokenising can find."""

from __future__ import annotations

import errno
import io
import math
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from inspect import signature
from pathlib import Path

import torch
from torch.torch_version import TorchVersion

from configs.errors import explained, raise_problems
from configs.keys import to_text
from configs.load import CONFIG_FILE, HELD_OUT, exists, section_types
from configs.schema import RunConfig
from models.contract import Model, has_experts, nearest
from parallelisms.activation_checkpoint import check_blocks
from parallelisms.device import local_device_type
from parallelisms.execution import CompileConfig
from parallelisms.float8 import MULTIPLE as FLOAT8_MULTIPLE
from parallelisms.float8 import check_float8
from parallelisms.mesh import degrees
from parallelisms.pipeline_plan import check_pipeline, placement, schedule_of, splits_backward, stage_modules
from training.checkpoint_load import checkpoint_to_continue, step_and_ledger
from training.config import os_errors_of
from training.data.dataset import StreamedData, open_data
from training.data.order import Mixture, Order
from training.data.sources import check_sources, find_source
from training.log import Log
from training.object_store import ObjectStore, check_url, is_url
from training.optimizer import check_patterns
from training.signals import STEPS_TO_STOP
from training.tokenizer import build_tokenizer

SMALL_BYTES = 1 << 20
MASKED_HEAD_DIM = 16  # the least that tl.dot takes (torch/_inductor/kernel/flex/flex_attention.py)
Rule = Callable[[], Iterable[str] | None]  # a check; raises ValueError (one message) or is a generator of messages


def check(config: RunConfig, *, world_size: int, device_type: str | None = None) -> None:
    """Checks each section, then across sections, then files. The first pass with errors raises ConfigError. `device_type` None: that of
    this machine."""
    check_settings(config, world_size=world_size, device_type=device_type)
    _gather(config, [lambda: _check_writable(config)])
    _gather(config, [lambda: _check_data_and_model(config, world_size), config.checkpoint.check_files])


def check_settings(config: RunConfig, *, world_size: int, device_type: str | None = None) -> None:
    """Checks like `check`, without the files, which need not exist."""
    sections = [getattr(config, name) for name in section_types(type(config))]
    _gather(config, [section.check for section in sections if hasattr(section, "check")])
    kind = device_type or local_device_type()
    rules: list[Rule] = [
        lambda: _check_batch(config, world_size),
        lambda: _check_tensor_parallel(config),
        lambda: _check_layouts(config, kind),
        lambda: _check_pipeline(config),
        lambda: _check_schedules(config),
        lambda: _check_sets(config),
        lambda: _check_folders(config),
        lambda: _check_compile(config),
        lambda: _check_replica_groups(config, kind),
        lambda: _check_rounds(config),
        lambda: _check_rewind(config),
    ]
    _gather(config, rules)


def check_resume(config: RunConfig, changed: Collection[str], *, world_size: int) -> None:
    """Checks the data of a run that continues a checkpoint, such as the budgets of a mixture, which count from the run's last change of
    settings. `changed`: keys that differ from the saved ones. Reads two small entries of the checkpoint, unverified: what cannot be read is
    left to the ranks, as are a newer checkpoint in an object store, and text that is tokenised at the start. Raises ConfigError."""
    training, checkpoint, folder = config.training, config.checkpoint, config.run_folder
    path = checkpoint_to_continue(checkpoint, folder)
    if path is None or training.dataset != "store":
        return
    if is_url(checkpoint.folder):
        with suppress(OSError):  # a store that does not answer is reported by the ranks
            if ObjectStore(checkpoint.location(folder)).is_ahead_of(folder / checkpoint.local_folder):
                return
    from training.checkpoint_dcp import read_values  # the import takes a second

    try:
        (step, ledger), segments = step_and_ledger(path), read_values(path, "data")
    except Exception:  # noqa: BLE001 (it may be damaged in any way)
        return

    def rule() -> None:
        tokenizer = build_tokenizer(config.model.tokenizer_path)
        silent, vocab_size = Log(stream=io.StringIO()), config.model.vocab_size
        data = open_data(training, config.validation, tokenizer, "", log=silent, vocab_size=vocab_size)
        if not config.checkpoint.excludes("data") or path.is_relative_to(config.run_folder):
            data.load_state_dict(segments)
        batch = training.slot_size(degrees(config.parallelism, world_size).data_parallel)
        steps = training.steps - step
        if config.fault_tolerance.enable or ledger.get("rewinds") or training.skip:  # as Components.resume_data
            steps = min(steps, STEPS_TO_STOP * config.fault_tolerance.inner_steps)
        in_holes = len(ledger["holes"]) * ledger.get("slot_size", batch)
        data.continue_segments(ledger["position"], ledger["holes"], changed, max(0, steps * batch - in_holes))

    _gather(config, [rule])


def _gather(config: RunConfig, rules: Iterable[Rule]) -> None:
    """Runs all rules and raises their messages together, each with the file and line of its key."""

    def messages(rule: Rule) -> Iterator[str]:
        try:
            yield from rule() or ()
        except ValueError as error:
            yield explained(error)

    found = (config.origin.explain(message) for rule in rules for message in messages(rule))
    raise_problems(found, config.origin.file)


def multiples(value: int, unit: int) -> str:
    """Returns the multiples of `unit` nearest to `value`, which is not one: "8 or 16"."""
    return nearest(value, range(unit, value + unit, unit))


def _check_batch(config: RunConfig, world_size: int) -> None:
    training, ranks = config.training, degrees(config.parallelism, world_size).data_parallel
    at_once = training.local_batch_size * ranks
    if training.global_batch_size != -1 and training.global_batch_size % at_once:
        raise ValueError(
            f"training.global_batch_size = {training.global_batch_size}: must be a multiple of {at_once}: "
            f"training.local_batch_size = {training.local_batch_size} on {ranks} data-parallel rank{'s' * (ranks > 1)}; "
            f"nearest: {multiples(training.global_batch_size, at_once)}"
        )


def _check_tensor_parallel(config: RunConfig) -> None:
    """Heads and features must be divisible, and async tensor parallelism must be possible if enabled."""
    tp = config.parallelism.tensor_parallel_degree
    if tp > 1:
        config.model.check_tensor_parallel(tp)
    if config.parallelism.enable_async_tensor_parallel:
        compiled = _inductor_blocks(config)
        reasons = {
            "parallelism.tensor_parallel_degree = 1 leaves nothing to overlap": tp == 1,
            "it needs compile.enable = true, model in compile.components and compile.backend = inductor": not compiled,
            f"it needs {tp} CUDA devices that reach each other's memory (NVLink)": torch.cuda.device_count() < tp,
        }
        if reason := next((reason for reason, applies in reasons.items() if applies), ""):
            raise ValueError(f"parallelism.enable_async_tensor_parallel = true: {reason}; set it to false")


def _compiled_blocks(config: RunConfig) -> bool:
    return config.compile.enable and "model" in config.compile.components


def _inductor_blocks(config: RunConfig) -> bool:
    return _compiled_blocks(config) and config.compile.backend == "inductor"


def _check_layouts(config: RunConfig, device_type: str) -> Iterator[str]:
    """Sequence length, other techniques and the device must fit the layout."""
    parallelism, seq_len = config.parallelism, config.training.seq_len
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    # All ranks have equally many tokens: with context parallelism in one or two pieces, with tensor parallelism between blocks
    two_pieces = cp > 1 and parallelism.context_parallel_load_balancer == "headtail"
    unit = cp * tp * (2 if two_pieces else 1)
    if seq_len % unit:
        by_key = {"parallelism.context_parallel_degree": cp, "parallelism.tensor_parallel_degree": tp}
        ranks = " and ".join(f"{key} = {degree}" for key, degree in by_key.items() if degree > 1)
        how = ", in a piece from its head and one from its tail" if two_pieces else "" if cp > 1 else " between blocks"
        yield (
            f"training.seq_len = {seq_len}: the ranks of {ranks} share it{how}: must be a multiple of {unit}; "
            f"nearest: {multiples(seq_len, unit)}"
        )
    if config.activation_checkpoint.mode == "memory_budget" and not _inductor_blocks(config):
        yield (
            'activation_checkpoint.mode = "memory_budget": requires compile.enable = true, "model" in compile.components and '
            'compile.backend = "inductor"; nearest: "selective"'
        )
    if config.float8.enable and tp > 1:
        yield (
            f"float8.enable = true: parallelism.tensor_parallel_degree = {tp} shards layers, for which float8 is not implemented "
            "here; set it to false"
        )
    elif not seq_len % unit:  # else it is refused elsewhere, and seq_len / cp is no whole number
        yield from _check_float8_tokens(config)
    if config.float8.precompute_float8_dynamic_scale_for_fsdp and config.training.enable_cpu_offload:
        yield (
            "float8.precompute_float8_dynamic_scale_for_fsdp = true: training.enable_cpu_offload = true keeps the weights in host memory, "
            "and NCCL cannot all-reduce their scales there; set it to false"
        )
    ring = cp > 1 and parallelism.context_parallel_rotate_method == "ring"
    if device_type != "cuda" and ring and not config.training.document_mask:
        yield (
            'parallelism.context_parallel_rotate_method = "ring": torch supports it only with CUDA\'s attention kernels, and there is no '
            'CUDA device here; nearest: "allgather"'
        )
    width = getattr(config.model, "head_dim", MASKED_HEAD_DIM)
    if device_type == "cuda" and config.training.document_mask and width < MASKED_HEAD_DIM:
        yield (
            f"training.document_mask = true: FlexAttention needs heads of at least {MASKED_HEAD_DIM} features on CUDA, and these have "
            f"{width}; set it to false, or make them wider"
        )
    if device_type != "cuda" and config.training.enable_cpu_offload:
        yield (
            "training.enable_cpu_offload = true: there is no CUDA device here, so parameters are in host memory already; set it to false"
        )


def _check_float8_tokens(config: RunConfig) -> Iterator[str]:
    """The tokens of a pass, the inner dimension of a weight's gradient, must be a multiple of FLOAT8_MULTIPLE: torchao (0.15 to 0.19) pads
    them only with pad_inner_dim, which copies."""
    float8, parallelism, seq_len = config.float8, config.parallelism, config.training.seq_len
    if not float8.enable or float8.emulate or float8.recipe_name == "rowwise_with_gw_hp":
        return
    key, batch, cp = "training.local_batch_size", config.training.local_batch_size, parallelism.context_parallel_degree
    if parallelism.pipeline_parallel_degree > 1:
        key, batch = "parallelism.pipeline_parallel_microbatch_size", parallelism.pipeline_parallel_microbatch_size
    if batch * seq_len // cp % FLOAT8_MULTIPLE:
        shared = f" / parallelism.context_parallel_degree = {cp}" if cp > 1 else ""
        unit = cp * FLOAT8_MULTIPLE // math.gcd(batch, FLOAT8_MULTIPLE)
        yield (
            f"training.seq_len = {seq_len}: with float8.enable = true the tokens of a pass, {key} = {batch} x {seq_len}{shared}, must be a "
            f'multiple of {FLOAT8_MULTIPLE}; nearest: {multiples(seq_len, unit)}, or float8.recipe_name = "rowwise_with_gw_hp"'
        )


def _check_pipeline(config: RunConfig) -> None:
    if config.parallelism.pipeline_parallel_degree == 1:
        return
    model = config.meta_model(max(1, config.model.vocab_size))
    check_pipeline(
        config.parallelism,
        layers=list(model.layers),
        tied=model.tied,
        local_batch_size=config.training.local_batch_size,
        compiled_blocks=_compiled_blocks(config),
    )
    if config.activation_checkpoint.mode != "none" and splits_backward(config.parallelism):
        raise ValueError(
            f'activation_checkpoint.mode = "{config.activation_checkpoint.mode}": {schedule_of(config.parallelism)} computes the '
            "backward in two halves, and for the second a block would be computed again for each of its weights; "
            'nearest: "none", or parallelism.pipeline_parallel_schedule = "Interleaved1F1B"'
        )
    if (count := config.fault_tolerance.num_fragments) > 1:  # each rank splits its own stages
        from ft.semi_sync import split

        stages = stage_modules(config.parallelism, list(model.layers))
        held = [[name for stage in own for name in stages[stage]] for own in placement(config.parallelism, len(stages))]
        rank = min(range(len(held)), key=lambda rank: len(held[rank]))
        prefixes = tuple(f"{name}." for name in held[rank])
        named = [each for each in model.named_parameters() if each[0].startswith(prefixes)]
        split(named, count, of=f"rank {rank} of the pipeline")


def _check_schedules(config: RunConfig) -> Iterator[str]:
    """Warm-up and decay must fit the schedule, and the schedule must cover the run."""
    schedule, steps = config.lr_scheduler, config.training.steps
    total, decay, warmup = schedule.total_steps or steps, schedule.decay_length(steps), schedule.warmup_steps
    length = f"lr_scheduler.total_steps = {total}" if schedule.total_steps else f"training.steps = {total}"
    if warmup > total:
        yield f"lr_scheduler.warmup_steps = {warmup}: must not exceed {length}; nearest: {total}"
    elif warmup + decay > total:
        yield (
            f"lr_scheduler.decay_ratio = {schedule.decay_ratio}: {decay} steps of decay and lr_scheduler.warmup_steps = {warmup} "
            f"must not exceed {length}; nearest: {math.floor(10_000 * (total - warmup) / total) / 10_000}"
        )
    elif total < steps and decay and schedule.min_lr_factor == 0:
        yield (
            f"lr_scheduler.total_steps = {total}: training.steps = {steps} would continue with a learning rate of 0; "
            f"nearest: {steps}, or 0, or set lr_scheduler.min_lr_factor"
        )


def _check_sets(config: RunConfig) -> Iterator[str]:
    """Validation needs documents, and its sets different names."""
    if config.validation.enable and config.training.dataset_held_out == 0 and not config.validation.sources:
        if config.origin.has(HELD_OUT):
            yield f"{HELD_OUT} = 0.0: validation.enable = true needs documents that are held out; nearest: 0.03"
        else:  # 0 is the share in the run's saved settings
            others = (  # a stream cannot be changed
                f", or hold out documents of which some were trained on: --{HELD_OUT}=0.03 --resume.allow={HELD_OUT}"
                if config.training.dataset != "huggingface"
                else ""
            )
            yield f"validation.enable = true: this run has held no documents out so far; name [[validation.sources]]{others}"
    labels = {source.label for source in config.training.sources}
    for index, source in enumerate(config.validation.sources):
        if source.label == "held_out" and config.training.dataset_held_out:
            yield (
                f'validation.sources[{index}].name = "held_out": the documents that training holds out have this name; give another one'
            )
        if source.label in labels:
            yield f'validation.sources[{index}].name = "{source.label}": a source of training has this name; give another one'


def _check_folders(config: RunConfig) -> Iterator[str]:
    """Paths must be folders, and those of checkpoints folders or URLs. A URL would be taken for a folder: "bucket" in "s3:"."""
    for key, value, legal in (
        ("job.dump_folder", config.job.dump_folder, "./outputs"),
        ("checkpoint.folder", config.checkpoint.folder, "checkpoint"),
        ("checkpoint.initial_load_path", config.checkpoint.initial_load_path, ""),
        ("metrics.save_tb_folder", config.metrics.save_tb_folder, "tb"),
        ("profiling.save_traces_folder", config.profiling.save_traces_folder, "profile_traces"),
        ("profiling.save_memory_snapshot_folder", config.profiling.save_memory_snapshot_folder, "memory_snapshot"),
    ):
        url = re.match(r"\s*([A-Za-z][A-Za-z0-9+.-]*)://", value)
        if url and key.startswith("checkpoint.") and is_url(value) and url[1].lower() != "file":
            try:
                check_url(key, value)
            except ValueError as error:
                yield str(error)
        elif url:
            local = "/" + value.partition(":")[2].lstrip("/") if url[1].lower() == "file" else legal
            yield (
                f'{key} = "{value}": a URL; must be a folder of a mounted file system, local or shared: of a run, only '
                "checkpoint.folder may be an object store; "
                f'nearest: "{local}"'
            )
    # Nothing is created yet; an existing file is the user's
    for setting, there in _existing(config):
        if not there.is_dir():
            yield f"{setting}: {there} is a file, not a folder"


def _check_compile(config: RunConfig) -> None:
    if not config.compile.enable or config.compile.backend == CompileConfig.backend:  # the import takes a second
        return
    from torch._dynamo import list_backends

    if config.compile.backend not in list_backends(exclude_tags=()):  # also those for debugging
        near = get_close_matches(config.compile.backend, names := list_backends(), 1, 0)
        raise ValueError(
            f'compile.backend = "{config.compile.backend}": torch has {", ".join(names)}; nearest: "{near[0]}"'
        )


def _check_writable(config: RunConfig) -> Iterator[str]:
    for setting, there in _existing(config):
        if there.is_dir() and not os.access(there, os.W_OK | os.X_OK):
            yield f"{setting}: this user may not write {there}; nearest: a folder that it may write"


def _existing(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Yields the setting and the path of the run's folder and of its checkpoints' folder, each path once; for a folder that does not exist
    yet, the nearest ancestor that does. Raises ValueError if that cannot be found out, or a name is too long."""
    paths = {f'job.dump_folder = "{config.job.dump_folder}"': config.run_folder}
    if config.checkpoint.enable:
        folder = config.checkpoint.local_folder
        paths[f'checkpoint.folder = "{folder}"'] = config.run_folder / folder
    seen = set[Path]()
    for setting, path in paths.items():
        path = Path(os.path.normpath(path))  # ".." of a folder that is not there yet
        with os_errors_of(setting):
            there = next((each for each in (path, *path.parents) if exists(each)), None)
            if there:  # `exists` does not notice too long a name below a folder that does not exist yet
                longest = max((len(os.fsencode(part)) for part in path.relative_to(there).parts), default=0)
                if longest > os.pathconf(there, "PC_NAME_MAX"):
                    raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), str(path))
        if there and there not in seen:
            seen.add(there)
            yield setting, there


def _check_replica_groups(config: RunConfig, device_type: str) -> Iterator[str]:
    """The data, the rendezvous and the process group must be usable with several replica groups."""
    if not config.fault_tolerance.enable:
        return
    if config.training.dataset == "huggingface":
        yield (
            'training.dataset = "huggingface": a stream cannot be assigned to replica groups, each sequence once; '
            'nearest: "store", made of the same data set by scripts/prepare_data.py, or fault_tolerance.enable = false'
        )
    if config.comm.init_method != "env://":
        yield (
            f'comm.init_method = "{config.comm.init_method}": with fault_tolerance.enable = true all groups would use one rendezvous; '
            'nearest: "env://", with a rendezvous per group from its launcher'
        )
    check_offloaded_gradients(config, torch.__version__)
    config.fault_tolerance.process_group_kind(gradient_device_type(config, device_type))


def check_offloaded_gradients(config: RunConfig, version: str) -> None:
    """Raises ValueError for torch before 2.13, in which hooks on offloaded gradients run before the copy from the GPU has ended; torch 2.13
    waits if there is a hook (foreach_reduce of torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, has_post_acc_grad_hook)."""
    if config.training.enable_cpu_offload and TorchVersion(version) < "2.13":
        raise ValueError(
            f"training.enable_cpu_offload = true: with replica groups it needs torch 2.13, and this is {version}: before, their sums begin "
            "while gradients are still being copied; set it to false"
        )


def gradient_device_type(config: RunConfig, device_type: str) -> str:
    """Returns the device type of the gradients of a run whose forward pass is on `device_type`."""
    return "cpu" if config.training.enable_cpu_offload else device_type


def _check_rounds(config: RunConfig) -> Iterator[str]:
    """Checkpoints, validations and the last step of semi-synchronous training must coincide with a synchronisation."""
    tolerance, checkpoint = config.fault_tolerance, config.checkpoint
    if tolerance.num_fragments > 1 and config.parallelism.pipeline_parallel_degree == 1:
        from ft.semi_sync import split

        split(list(config.meta_model(max(1, config.model.vocab_size)).named_parameters()), tolerance.num_fragments)
    if tolerance.semi_sync_method != "none":
        for key, default in (("on_spike", "stop"), ("spike_window", 0)):
            if (value := getattr(config.training, key)) != default:
                yield (
                    f"training.{key} = {to_text(value)}: between two synchronisations each group makes other steps, so no step is a spike "
                    f'in all of them; nearest: {to_text(default)}, or fault_tolerance.semi_sync_method = "none"'
                )
        for key, rate, cause in (
            (
                "optimizer.ema_decay",
                config.optimizer.ema_decay,
                "the groups' weights differ, and so would their averages",
            ),
            (
                "model.balance_rate",
                getattr(config.model, "balance_rate", 0.0),
                "each group has only the load of its own tokens, and an outer step would move the bias further",
            ),
        ):
            if rate:
                yield (
                    f"{key} = {to_text(rate)}: between two synchronisations {cause}; nearest: 0.0, or "
                    'fault_tolerance.semi_sync_method = "none"'
                )
    if (every := tolerance.inner_steps) == 1:
        return
    if checkpoint.enable and checkpoint.enable_first_step_checkpoint:
        yield (
            f"checkpoint.enable_first_step_checkpoint = true: the first synchronisation of groups is after {every} steps "
            "(fault_tolerance.sync_steps / num_fragments); set it to false"
        )
    for key, steps, matters in (
        ("training.steps", config.training.steps, True),
        ("checkpoint.interval", checkpoint.interval, checkpoint.enable),
        ("validation.freq", config.validation.freq, config.validation.enable),
    ):
        if matters and steps % every:
            yield (
                f"{key} = {steps}: must be a multiple of {every}, the steps between two synchronisations of groups "
                f"(fault_tolerance.sync_steps / num_fragments); nearest: {multiples(steps, every)}"
            )


def _check_rewind(config: RunConfig) -> Iterator[str]:
    checkpoint = config.checkpoint
    if config.training.on_spike == "rewind" and checkpoint.nothing_saved:
        setting = "checkpoint.load_only = true" if checkpoint.enable else "checkpoint.enable = false"
        yield (
            f'training.on_spike = "rewind": {setting}, so there is no checkpoint to go back to; set it to '
            f'{to_text(not checkpoint.enable)}, or nearest: "skip"'
        )


def _check_budgets(config: RunConfig, order: Order, world_size: int) -> None:
    """The budgets of a mixture must last for the run."""
    if not isinstance(order, Mixture) or order.end is None:
        return
    training = config.training
    batch = training.slot_size(degrees(config.parallelism, world_size).data_parallel)
    if training.steps * batch > order.end:
        raise ValueError(
            f"training.steps = {training.steps}: needs {training.steps * batch} sequences, but the budgets of training.sources end after "
            f"{order.end}; nearest: {order.end // batch}, or larger budgets"
        )


def _check_data_and_model(config: RunConfig, world_size: int) -> None:
    """Tokenizer, vocabulary and corpus must fit each other, and the model all of them."""
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    vocab_size = config.model.vocab_size or tokenizer.vocab_size
    if vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size = {vocab_size}: must be at least the tokenizer's {tokenizer.vocab_size}; "
            f"nearest: {tokenizer.vocab_size}, or 0 for the tokenizer's"
        )
    check_sources(config.training, vocab_size=vocab_size)
    training, opens_fast = config.training, config.training.dataset in ("store", "huggingface")
    if not opens_fast:
        # a small corpus is tokenised here, to check that each split has a sequence; for a large one this is slow, and hardly ever fails
        opens_fast = sum(file.size for file in find_source(training).files) <= SMALL_BYTES
    if opens_fast:
        silent = Log(stream=io.StringIO())  # the run logs the same lines
        with suppress(OSError), tempfile.TemporaryDirectory() as cache:  # TMPDIR may be full: the run checks again
            data = open_data(training, config.validation, tokenizer, cache, log=silent, vocab_size=vocab_size)
            # the budgets of a run that continues a checkpoint may count from a change of settings: see check_resume
            continues = config.checkpoint.initial_load_path and not config.checkpoint.initial_load_model_only
            order_is_new = not continues and not (config.run_folder / CONFIG_FILE).exists()
            if not isinstance(data, StreamedData) and order_is_new:
                _check_budgets(config, data.order(seed=training.seed, seq_len=training.seq_len), world_size)
            if config.validation.enable:
                data.validation_orders(seq_len=training.seq_len)
    _check_contract_and_layout(config, config.meta_model(vocab_size), world_size)


def check_model(config: RunConfig, model: Model, *, world_size: int) -> None:
    """Checks the whole model, built on the meta device, with optimizer, data and layout. Raises ConfigError."""
    _gather(config, [lambda: _check_contract_and_layout(config, model, world_size)])


def _check_contract_and_layout(config: RunConfig, model: Model, world_size: int) -> None:
    """The model, of meta_model, must have the parts of the contract that the layout uses; patterns and plans must fit it."""
    check_patterns(config.optimizer, model)
    check_float8(model, config.float8)
    check_blocks(config.activation_checkpoint, len(model.layers))
    if (stages := config.parallelism.pipeline_parallel_degree) > 1:
        ends = ("layers.", "tok_embeddings.", "norm.", "output.")
        if other := next((name for name, _ in model.named_parameters() if not name.startswith(ends)), ""):
            raise ValueError(
                f"parallelism.pipeline_parallel_degree = {stages}: {other} would be in every stage, "
                "and trained in one: a pipeline divides layers, tok_embeddings, norm and output (models/contract.py); nearest: 1"
            )
    if config.parallelism.tensor_parallel_degree > 1:  # the import takes half as long as torch's
        from parallelisms.tensor import check_plan

        check_plan(model, degrees(config.parallelism, world_size))
    if config.training.document_mask and "document_starts" not in signature(model.forward).parameters:
        raise ValueError(
            f'training.document_mask = true: the forward of model.name = "{config.model.name}" takes no document_starts '
            "(models/contract.py); set it to false"
        )
    if config.parallelism.expert_parallel_degree > 1 or has_experts(model):
        from parallelisms.expert import check_experts

        check_experts(model, degrees(config.parallelism, world_size), config.parallelism)
    if config.parallelism.context_parallel_degree > 1:
        from parallelisms.context import check_attentions

        if "positions" not in signature(model.forward).parameters:
            raise ValueError(
                f"parallelism.context_parallel_degree = {config.parallelism.context_parallel_degree}: the forward of model.name = "
                f'"{config.model.name}" takes no positions (models/contract.py); nearest: 1'
            )
        check_attentions(model, config.parallelism.context_parallel_degree)
