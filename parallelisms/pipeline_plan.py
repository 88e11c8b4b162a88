"""Assignment of modules to pipeline stages and of stages to ranks, with checks before any process is started.

configs/check.py calls `check_pipeline`; parallelisms/pipeline.py builds the stages. A model is given by the names of its layers, since its
other modules have the same names in every model (models/contract.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import accumulate
from math import ceil

from models.contract import nearest
from parallelisms.mesh import ParallelismConfig
from parallelisms.pipeline_schedule import (
    ONE_STAGE,
    SPLIT_BACKWARD,
    V_SHAPED,
    check_complete,
    read_csv,
    stages_by_rank,
    timeline,
)

_BY_NAMES = "parallelism.module_fqns_per_model_part"
_OTHER = 'parallelism.pipeline_parallel_schedule = "Interleaved1F1B"'


def schedule_of(config: ParallelismConfig) -> str:
    """Returns the name of the schedule, or the path of its CSV file."""
    return config.pipeline_parallel_schedule_csv or config.pipeline_parallel_schedule


def splits_backward(config: ParallelismConfig) -> bool:
    """Returns True if the schedule computes the gradients of inputs and of weights separately."""
    schedule = schedule_of(config)
    if config.pipeline_parallel_schedule_csv:
        return any(action.kind in "IW" for row in read_csv(schedule) for cell in row for action in cell)
    return schedule in SPLIT_BACKWARD


def stage_modules(config: ParallelismConfig, layers: Sequence[str]) -> list[list[str]]:
    """Returns the module names of each stage, in the order of the model. In a split by layer count all stages have equally many blocks,
    or the first ones one more; embedding and head count as pipeline_parallel_..._less_layers blocks."""
    if config.module_fqns_per_model_part:
        return [names.split() for names in config.module_fqns_per_model_part]
    blocks = [f"layers.{name}" for name in layers]
    sizes = _shares(config, len(layers))
    sizes[0] -= config.pipeline_parallel_first_stage_less_layers
    sizes[-1] -= config.pipeline_parallel_last_stage_less_layers
    assert min(sizes) >= 0 and sum(sizes) == len(blocks), "check_pipeline() rejects other splits"
    stages = [blocks[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    stages[0] = ["tok_embeddings", *stages[0]]
    stages[-1] = [*stages[-1], "norm", "output"]
    return stages


def stage_count(config: ParallelismConfig, n_layers: int) -> int:
    """Returns the number of stages by the settings, legal or not."""
    if config.module_fqns_per_model_part:
        return len(config.module_fqns_per_model_part)
    if config.pipeline_parallel_layers_per_stage:
        return ceil(_num_effective_layers(config, n_layers) / config.pipeline_parallel_layers_per_stage)
    if config.pipeline_parallel_schedule_csv:
        return sum(map(len, placement(config, 0)))
    return config.pipeline_parallel_degree * (1 if config.pipeline_parallel_schedule in ONE_STAGE else 2)


def placement(config: ParallelismConfig, n_stages: int) -> list[list[int]]:
    """Returns each rank's stages, in the order of the layers: round-robin; or back and forth for a V; or by the CSV file."""
    pp, schedule = config.pipeline_parallel_degree, schedule_of(config)
    if config.pipeline_parallel_schedule_csv:
        return stages_by_rank(read_csv(schedule))
    if schedule in V_SHAPED:
        return [[rank, n_stages - 1 - rank] for rank in range(pp)]
    return [list(range(rank, n_stages, pp)) for rank in range(pp)]


def _num_effective_layers(config: ParallelismConfig, n_layers: int) -> int:
    """Returns the number of blocks of the model, plus the blocks that embedding and head count as."""
    return n_layers + config.pipeline_parallel_first_stage_less_layers + config.pipeline_parallel_last_stage_less_layers


def _shares(config: ParallelismConfig, n_layers: int) -> list[int]:
    """Returns the effective layers of each stage."""
    n_stages = stage_count(config, n_layers)
    share, rest = divmod(_num_effective_layers(config, n_layers), n_stages)
    return [share + (stage < rest) for stage in range(n_stages)]


def check_pipeline(
    config: ParallelismConfig,
    *,
    layers: Sequence[str],
    local_batch_size: int,
    compiled_blocks: bool,
    tied: bool = False,
) -> None:
    """Raises ValueError ("section.key = value: ...") for a pipeline that cannot run. `layers`: names, in order; `tied`: see Model."""
    if tied and config.pipeline_parallel_degree > 1:
        # Gradients would have to be summed over both stages, and norm, checkpoint and groups would have to count only one of the copies;
        # models with tied weights are small enough for other layouts.
        raise ValueError(
            f"parallelism.pipeline_parallel_degree = {config.pipeline_parallel_degree}: the embedding, in the first stage, and the output, "
            "in the last, share one matrix by model.enable_weight_tying = true; nearest: 1, or model.enable_weight_tying = false"
        )
    _check_microbatches(config, local_batch_size)
    if path := config.pipeline_parallel_schedule_csv:  # must be readable, complete, free of deadlocks
        n_microbatches = local_batch_size // config.pipeline_parallel_microbatch_size
        try:
            rows = read_csv(path)
            check_complete(rows, pp=config.pipeline_parallel_degree, n_microbatches=n_microbatches)
            timeline(rows)
        except ValueError as error:
            raise ValueError(f'parallelism.pipeline_parallel_schedule_csv = "{path}": {error}') from error
    _check_stage_count(config, len(layers))
    if config.module_fqns_per_model_part:
        _check_names(config, ["tok_embeddings", *(f"layers.{name}" for name in layers), "norm", "output"])
    else:
        _check_less_layers(config, len(layers))
    if splits_backward(config):
        # Both halves need the gathered parameters, and an autograd graph that can be split: a compiled block is one node
        why = f"{schedule_of(config)} computes the backward in two halves"
        if compiled_blocks:
            raise ValueError(
                f"compile.enable = true: {why}, and a compiled block would compute the whole backward twice; set it to false, or {_OTHER}"
            )
        if config.fsdp_reshard_after_forward == "always":
            raise ValueError(
                f'parallelism.fsdp_reshard_after_forward = "always": {why} and needs the parameters gathered in between; '
                f'nearest: "default" or "never", or {_OTHER}'
            )


def _check_microbatches(config: ParallelismConfig, local_batch_size: int) -> None:
    """Checks that the batch is divisible into a number of microbatches that the schedule supports."""
    size, pp, schedule = config.pipeline_parallel_microbatch_size, config.pipeline_parallel_degree, schedule_of(config)
    legal: Callable[[int], bool]
    if schedule in ("1F1B", "DualPipeV"):
        least = pp if schedule == "1F1B" else 2 * pp
        legal, rule = (lambda n: n >= least), f"{least} or more"
    elif schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):  # in n // pp equal rounds
        legal = lambda n: n % max(1, n // pp) == 0  # noqa: E731
        rule = f"rounds of one length, {pp} or more, such as {2 * pp} or {3 * pp} in all"
    else:
        legal, rule = (lambda n: True), "any number"
    key = f"parallelism.pipeline_parallel_microbatch_size = {size}"
    divisors = [divisor for divisor in range(1, local_batch_size + 1) if local_batch_size % divisor == 0]
    sizes = [divisor for divisor in divisors if legal(local_batch_size // divisor)]
    if size not in divisors:
        raise ValueError(
            f"{key}: must divide training.local_batch_size = {local_batch_size}; nearest: {nearest(size, sizes or divisors)}"
        )
    if size not in sizes:
        n_microbatches = local_batch_size // size
        more = next(n for n in range(n_microbatches, n_microbatches + 2 * pp + 1) if legal(n))
        raise ValueError(
            f"{key}: makes {n_microbatches} microbatches of training.local_batch_size = {local_batch_size}, but {schedule} on {pp} ranks "
            f"takes {rule}; nearest: {nearest(size, sizes) + ', or ' if sizes else ''}training.local_batch_size = {more * size}"
        )


def _check_stage_count(config: ParallelismConfig, n_layers: int) -> None:
    """Checks that the schedule supports the number of stages, and that the model has as many blocks."""
    pp, schedule, n_stages = config.pipeline_parallel_degree, schedule_of(config), stage_count(config, n_layers)
    named = sum(map(len, placement(config, 0))) if config.pipeline_parallel_schedule_csv else 0
    if named:
        legal, rule = {named}, f"the {named} that it names"
    elif schedule in ONE_STAGE:
        legal, rule = {pp}, f"one on each of the {pp} ranks"
    elif schedule in V_SHAPED:
        legal, rule = {2 * pp}, f"two on each of the {pp} ranks"
    else:
        most = n_stages + 2 * pp + _num_effective_layers(config, n_layers)
        legal, rule = set(range(pp, most, pp)), f"equally many on each of the {pp} ranks"
    if by_names := config.module_fqns_per_model_part:
        if n_stages not in legal:
            raise ValueError(
                f"{_BY_NAMES} = {list(by_names)}: these are {n_stages} stages, but {schedule} takes {rule}; "
                f"nearest: {nearest(n_stages, sorted(legal))} strings"
            )
    elif n_stages > n_layers or n_stages not in legal:
        per_stage, weight = config.pipeline_parallel_layers_per_stage, _num_effective_layers(config, n_layers)
        why = f"{schedule} takes {rule}" if n_stages not in legal else f"there are {n_layers} blocks"
        if not per_stage:
            raise ValueError(
                f"parallelism.pipeline_parallel_degree = {pp}: {schedule} makes {n_stages} stages of the model, but {why}; "
                f"nearest: {max(1, n_layers // ceil(n_stages / pp))}"
            )
        sizes = [size for size in range(1, weight + 1) if (n := ceil(weight / size)) in legal and n <= n_layers]
        raise ValueError(
            f"parallelism.pipeline_parallel_layers_per_stage = {per_stage}: makes {n_stages} stages of {weight} blocks (with "
            f"parallelism.pipeline_parallel_first_stage_less_layers and ..._last_stage_less_layers), but "
            f"{why}; nearest: {nearest(per_stage, sizes) + ', or ' if sizes else ''}0"
        )


def _check_names(config: ParallelismConfig, modules: Sequence[str]) -> None:
    """Checks that every module is named once, in the order of the model."""
    key = f"{_BY_NAMES} = {list(config.module_fqns_per_model_part)}"
    parts = [part.split() for part in config.module_fqns_per_model_part]
    names = [name for part in parts for name in part]
    for name in names:
        if name not in modules:
            close = get_close_matches(name, modules, n=1, cutoff=0) or [modules[0]]
            raise ValueError(f'{key}: the model has no "{name}"; legal: {_listed(modules)}; nearest: {close[0]}')
        if names.count(name) > 1:
            raise ValueError(f'{key}: "{name}" is named {names.count(name)} times; legal: once')
    if missing := [module for module in modules if module not in names]:
        raise ValueError(f"{key}: {_listed(missing)} in no stage; legal: every module of the model in one stage")
    if not all(parts):
        raise ValueError(f"{key}: stage {parts.index([])} has no module; legal: at least one in each stage")
    for name, module in zip(names, modules, strict=True):
        if name != module:
            raise ValueError(f'{key}: "{name}" is in the place of "{module}"; legal: the order of the model')


def _check_less_layers(config: ParallelismConfig, n_layers: int) -> None:
    """Checks that the blocks that embedding and head count as do not exceed the first and the last stage."""
    for end, index in (("first", 0), ("last", -1)):
        name = f"pipeline_parallel_{end}_stage_less_layers"
        weight, room = getattr(config, name), _shares(config, n_layers)[index]
        if weight > room:
            fits = [n for n in range(weight) if n <= _shares(replace(config, **{name: n}), n_layers)[index]]  # type: ignore[arg-type]
            raise ValueError(
                f"parallelism.{name} = {weight}: the {end} stage has room for {room} blocks in all; nearest: {fits[-1]}"
            )


def _listed(names: Sequence[str]) -> str:
    """Joins the names; of more than six, the first and last three."""
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])} ... {', '.join(names[-3:])}"
