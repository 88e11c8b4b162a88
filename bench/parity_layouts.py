"""Which cases bench/parity.py runs: every way to share a number of ranks among the axes, crossed sparsely with the options.

A layout of one axis is there plain and with each option of that axis (HSDP's two axes are one technique: they count as one). A
layout of several is there plain, and once more with one option of every axis, each time the next one, so that options meet. Each
layout makes two cases that differ in everything: the first has SGD, the second AdamW, and accumulation, vocabulary and chunks of
the loss that the first has, the second has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice, product
from math import prod
from typing import Any

import torch

from bench.parity_worker import STEPS, OptimizerName, ParityCase, Task, build
from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.layout import Layout
from parallelisms.mesh import AXES, Degrees, ParallelismConfig
from parallelisms.pipeline_plan import check_pipeline, splits_backward
from parallelisms.tensor import check_plan

VOCABULARIES = (259, 256)  # bytes with their special tokens: no number of ranks divides it; bytes alone
TRIES = 8  # to draw options that go together
CHUNK_TOKENS = 11  # of the loss; divides nothing
BACKWARDS_CSV = "backwards"  # stands for a file that is written when the number of microbatches is known


@dataclass(frozen=True)
class Option:
    """A deviation from the defaults, and what it is called."""

    title: str
    parallelism: dict[str, Any]
    activation_checkpoint: ActivationCheckpointConfig | None = None


PLAIN = Option("", {})
GROUPING = (
    Option("2 blocks a group", {"fsdp_blocks_per_group": 2}),
    Option("prefetch 2", {"fsdp_forward_prefetch": 2, "fsdp_backward_prefetch": 2}),
)
RESHARDING = tuple(Option(f"reshard {when}", {"fsdp_reshard_after_forward": when}) for when in ("never", "always"))
SCHEDULES = ("GPipe", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
LESS = ("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers")
OPTIONS = {  # by axis
    "pp": (
        *(Option(name, {"pipeline_parallel_schedule": name}) for name in SCHEDULES),
        Option("CSV file", {"pipeline_parallel_schedule_csv": BACKWARDS_CSV}),
        Option("ends weigh nothing", dict.fromkeys(LESS, 0)),
    ),
    "dp_replicate": GROUPING,
    "dp_shard": (*RESHARDING, *GROUPING),
    "cp": (Option("cp unbalanced", {"context_parallel_load_balancer": "none"}),),
    "tp": (Option("whole logits", {"disable_loss_parallel": True}),),
}
RECOMPUTATION = (
    Option("AC full", {}, ActivationCheckpointConfig("full")),
    Option("AC every 2nd", {}, ActivationCheckpointConfig("selective", "2")),
    Option("AC op", {}, ActivationCheckpointConfig("selective", "op")),
)


def cases(task: Task, world_size: int) -> list[ParityCase]:
    """All cases for that many ranks, in an order that never changes: SGD's first, whose bounds are the narrow ones."""
    layouts = list(_layouts(task, world_size))
    return [_case(task, *layout, optimizer, index) for optimizer in STEPS for index, layout in enumerate(layouts)]


def _layouts(task: Task, world_size: int) -> Iterator[tuple[Degrees, tuple[Option, ...]]]:
    following = {axis: cycle(options) for axis, options in OPTIONS.items()}
    recomputation = cycle((*RECOMPUTATION, PLAIN))
    divisors = [d for d in range(1, world_size + 1) if world_size % d == 0]
    for degrees in (Degrees(*sizes) for sizes in product(divisors, repeat=len(AXES)) if prod(sizes) == world_size):
        if not _legal(task, degrees, ()):
            continue
        yield degrees, ()
        axes = [axis for axis in OPTIONS if getattr(degrees, axis) > 1]
        if degrees.dp_shard > 1 and degrees.dp_replicate > 1:
            axes.remove("dp_replicate")  # one wrapper, one set of options
        alone = OPTIONS[axes[0]] if axes else RECOMPUTATION
        draws = ((*(next(following[axis]) for axis in axes), next(recomputation)) for _ in range(TRIES))
        choices = ((option,) for option in alone) if len(axes) < 2 else draws
        legal = (options for options in choices if _legal(task, degrees, options))
        yield from ((degrees, options) for options in (legal if len(axes) < 2 else islice(legal, 1)))


def _legal(task: Task, degrees: Degrees, options: tuple[Option, ...]) -> bool:
    """True when model and batch can be shared like that, by the checks of a run's settings."""
    pieces = degrees.tp * (2 * degrees.cp if degrees.cp > 1 else 1)
    if task.global_batch_size % (2 * degrees.data_parallel) or task.seq_len % pieces:
        return False
    try:
        task.model.check_tensor_parallel(degrees.tp)
        for case in (_case(task, degrees, options, optimizer, 0) for optimizer in STEPS):
            config, size = case.layout.parallelism, case.local_batch_size
            with torch.device("meta"):
                model = build(task, case.vocab_size)
            if degrees.tp > 1:
                check_plan(model, degrees)
            check_pipeline(config, layers=list(model.layers), local_batch_size=size, compiled_blocks=False)
            if degrees.pp > 1 and splits_backward(config) and case.layout.activation_checkpoint.mode != "none":
                return False
    except ValueError:
        return False
    return True


def _case(
    task: Task, degrees: Degrees, options: tuple[Option, ...], optimizer: OptimizerName, index: int
) -> ParityCase:
    """A case with the `index`th choice of everything else under SGD, and all the opposites under AdamW."""
    halves, even, chunked = (bool(index >> bit & 1) != (optimizer == "AdamW") for bit in range(3))
    microsteps = 2 if halves else 1
    local_batch_size = task.global_batch_size // (degrees.data_parallel * microsteps)
    # as many as the largest number of stages: DualPipeV asks for it
    microbatches = min(local_batch_size, 2 * degrees.pp)
    config = ParallelismConfig(
        pipeline_parallel_degree=degrees.pp,
        data_parallel_replicate_degree=degrees.dp_replicate,
        data_parallel_shard_degree=degrees.dp_shard,
        context_parallel_degree=degrees.cp,
        tensor_parallel_degree=degrees.tp,
        pipeline_parallel_microbatch_size=local_batch_size // microbatches,
    )
    recomputation = ActivationCheckpointConfig()
    for option in options:
        config = replace(config, **option.parallelism)
        recomputation = option.activation_checkpoint or recomputation
    if (
        config.pipeline_parallel_schedule_csv == BACKWARDS_CSV
    ):  # all forwards, then the backwards from the last microbatch to the first
        path = task.folder / f"backwards-{degrees.pp}-{microbatches}.csv"
        orders = ("F", range(microbatches)), ("B", range(microbatches)[::-1])
        stages = (",".join(f"{stage}{way}{m}" for way, order in orders for m in order) for stage in range(degrees.pp))
        path.write_text("\n".join(stages) + "\n")
        config = replace(config, pipeline_parallel_schedule_csv=str(path))
    return ParityCase(
        title=", ".join([_title(degrees), *(option.title for option in options if option.title)]),
        layout=Layout(config, recomputation, loss_chunk_tokens=CHUNK_TOKENS if chunked else 0),
        world_size=degrees.world_size,
        optimizer=optimizer,
        microsteps=microsteps,
        local_batch_size=local_batch_size,
        vocab_size=VOCABULARIES[even],
    )


def _title(degrees: Degrees) -> str:
    """The names of the techniques, outermost first: "pp 2 + fsdp 2"."""
    replicas, shards = degrees.dp_replicate, degrees.dp_shard
    ranks = {"pp": degrees.pp, "ddp": replicas, "fsdp": shards, "cp": degrees.cp, "tp": degrees.tp}
    text = " + ".join(f"{name} {count}" for name, count in ranks.items() if count > 1) or "one rank"
    return text.replace(f"ddp {replicas} + fsdp {shards}", f"hsdp {replicas}x{shards}")
