"""Memory and messages of each rank of a job, without the job: memory.py acts some of its ranks out, the rest follows.

Ranks that differ in data-, context- or tensor-parallel place alone have equal shapes, so the first of each stage stands for all. A stage of
a pipeline is acted out alone for two microbatches, and the schedule's table says how often and in which order that record is repeated.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from models.contract import Model
from parallelisms.float8 import Float8Config
from parallelisms.fsdp import communication_groups
from parallelisms.layout import CompileConfig, Layout
from parallelisms.mesh import AXES, CP, DP_SHARD, SHARDS, Degrees, ParallelismConfig, build_mesh, data_parallel_mesh
from parallelisms.parallelize import Parallelized, parallelize
from parallelisms.pipeline_plan import placement, schedule_of, stage_modules
from parallelisms.pipeline_schedule import Action, table
from tools.explain.memory import (
    Collective,
    DeviceType,
    Held,
    MeasuredStep,
    Others,
    Stretch,
    join,
    local,
    measure,
    stand_in,
    without_memory,
)
from training.loss import cross_entropy_sum


@dataclass(frozen=True)
class ExplainedJob:
    """The job that is explained."""

    title: str
    build: Callable[[], Model]  # the whole model, for the meta device
    optimizer: Callable[[list[Model]], torch.optim.Optimizer]
    layout: Layout
    degrees: Degrees
    device_type: DeviceType
    local_batch_size: int
    passes: int  # forward and backward passes of a step
    seq_len: int

    def model(self) -> Model:
        with torch.device("meta"):
            return self.build()

    def parallelize(self, mesh: DeviceMesh, model: Model, layout: Layout, device: str = "cpu") -> Parallelized:
        return parallelize(
            model,
            mesh,
            cross_entropy_sum,
            layout,
            local_batch_size=self.local_batch_size,
            seq_len=self.seq_len,
            device=torch.device(device),
            seed=0,
        )

    @property
    def microbatches(self) -> int:
        """Figures of one pass through a pipeline."""
        return self.local_batch_size // self.layout.parallelism.pipeline_parallel_microbatch_size


@dataclass(frozen=True)
class ParameterKind:
    """Parameters that differ by the number of their layer alone, such as layers.*.attention.wq.weight."""

    name: str
    shape: tuple[int, ...]  # of the whole
    cuts: tuple[tuple[str, int], ...]  # an axis of the mesh, and the dim that it cuts
    local_shape: tuple[int, ...]
    layers: int  # so many of them


@dataclass(frozen=True)
class Stage:
    """A part of the model on one rank, and its step."""

    modules: tuple[str, ...]
    kinds: tuple[ParameterKind, ...]
    groups: tuple[tuple[str, int], ...]  # each of FSDP's messages: names, and elements of all shards with padding
    step: MeasuredStep


@dataclass(frozen=True)
class RankProfile:
    """The first rank of a stage of the pipeline, or of all: what it keeps, takes and sends in a step."""

    pp_rank: int
    stages: tuple[Stage, ...]
    held: Held
    activations: int
    peak: int
    collectives: Counter[Collective]  # of a step; `group` is the axis


def ranks(job: ExplainedJob) -> list[RankProfile]:
    """One for each place in the pipeline."""
    if job.degrees.pp > 1:
        return _pipeline_ranks(job)
    stage = _act(job)
    return [_rank(job, 0, (stage,), join(stage.step.stretches))]


def _rank(job: ExplainedJob, pp_rank: int, stages: tuple[Stage, ...], whole: Stretch) -> RankProfile:
    """`whole`: all of one pass, and the optimizer."""
    held = sum((stage.step.held for stage in stages), Held())
    activations, with_gradients = whole.most
    if job.passes > 1:  # the later ones find all gradients there
        with_gradients = max(with_gradients, activations + held.gradients)
    peak = held.parameters + held.optimizer + with_gradients
    collectives = Counter({c: n * job.passes for c, n in whole.collectives.items()})
    return RankProfile(pp_rank, stages, held, activations, peak, collectives)


def _act(job: ExplainedJob, *, pp_rank: int = 0) -> Stage:
    """A step of one pass on the first rank with this place in the pipeline, which has one stage there."""
    sizes, layout = job.degrees, job.layout
    parallelism = without_devices(layout.parallelism)
    # Without what cannot be acted out, which the report mentions
    eager = replace(layout, parallelism=parallelism, compile=CompileConfig(), float8=Float8Config(), cpu_offload=False)
    global_rank = pp_rank * prod(sizes[1:])
    with stand_in(global_rank=global_rank, world_size=sizes.world_size, device_type=job.device_type):
        mesh, model = build_mesh(sizes, "cpu"), job.model()
        fake = without_memory(model)
        parallel = job.parallelize(mesh, model, eager)
        with fake, Others():
            tokens = torch.zeros(job.local_batch_size, job.seq_len, dtype=torch.int64)
            step = measure(parallel, job.optimizer, [(tokens, tokens)])
        [part] = parallel.parts
        modules = ["tok_embeddings"] if part.tok_embeddings is not None else []
        modules += [f"layers.{name}" for name in part.layers]
        modules += [name for name in ("norm", "output") if getattr(part, name) is not None]
        kinds = dict[str, ParameterKind]()
        for name, parameter in part.named_parameters():
            assert isinstance(parameter, DTensor), "parallelize() makes every parameter a DTensor"
            axes = parameter.device_mesh
            cuts = tuple(
                (axis, placement.dim)
                for axis, placement in zip(axes.mesh_dim_names or (), parameter.placements, strict=True)
                if isinstance(placement, Shard | _StridedShard) and axes[axis].size() > 1
            )
            kind = re.sub(r"\.\d+\.", ".*.", name)
            kinds.setdefault(kind, ParameterKind(kind, tuple(parameter.shape), cuts, tuple(local(parameter).shape), 0))
            kinds[kind] = replace(kinds[kind], layers=kinds[kind].layers + 1)
        names, groups = {module: name for name, module in part.named_modules()}, []
        for together in communication_groups(part, layout.parallelism.fsdp_blocks_per_group):
            shards = [local(p) for module in together for p in module.parameters()]
            elements = sum(shard.untyped_storage().nbytes() // shard.itemsize for shard in shards)
            groups.append((", ".join(names[module] for module in together), elements * sizes.dp_shard * sizes.cp))
        return Stage(tuple(modules), tuple(kinds.values()), tuple(groups), by_axis(step, mesh))


def without_devices(config: ParallelismConfig) -> ParallelismConfig:
    """Less the options that need certain GPUs."""
    return replace(config, context_parallel_rotate_method="allgather", enable_async_tensor_parallel=False)


def by_axis(step: MeasuredStep, mesh: DeviceMesh) -> MeasuredStep:
    """Its messages with the axis for the group; without those of a rank with itself."""
    axes: dict[str, str] = {mesh[axis].get_group().group_name: axis for axis in AXES if mesh[axis].size() > 1}
    sharding = data_parallel_mesh(mesh)
    for axis in sharding.mesh_dim_names or ():
        group = sharding.get_group(axis)
        if group.size() > 1:
            axes[group.group_name] = plain(axis, dp_shard=mesh[DP_SHARD].size(), cp=mesh[CP].size())
    stretches = []
    for stretch in step.stretches:
        named: Counter[Collective] = Counter()
        for collective, times in stretch.collectives.items():
            if axis := axes.get(collective.group):
                named[replace(collective, group=axis)] += times
        stretches.append(replace(stretch, collectives=named))
    return replace(step, stretches=tuple(stretches))


def plain(axis: str, *, dp_shard: int, cp: int) -> str:
    """The axis of dp_shard and cp that has several ranks, if the other has one."""
    if axis != SHARDS or (dp_shard > 1 and cp > 1):
        return axis
    return DP_SHARD if cp == 1 else CP


# Pipelines


def _pipeline_ranks(job: ExplainedJob) -> list[RankProfile]:
    """From stages acted out one by one, for two microbatches, on a pipeline with one rank for each."""
    config = job.layout.parallelism
    modules = stage_modules(config, list(job.model().layers))
    rows = table(schedule_of(config), job.degrees.pp, len(modules), job.microbatches)
    alone = replace(
        config,
        pipeline_parallel_degree=len(modules),
        pipeline_parallel_schedule="GPipe",
        pipeline_parallel_schedule_csv="",
        module_fqns_per_model_part=tuple(" ".join(names) for names in modules),
    )
    scene = replace(
        job,
        layout=replace(job.layout, parallelism=alone),
        degrees=job.degrees._replace(pp=len(modules)),
        local_batch_size=2 * config.pipeline_parallel_microbatch_size,
    )
    seen: dict[Any, Stage] = {}
    acted = []
    option = job.layout.activation_checkpoint.selective_ac_option
    every = int(option) if option.isdigit() else 1
    for index, names in enumerate(modules):
        # Stages with equal shapes, whose blocks compute again at the same places
        kind = tuple(re.sub(r"\d+", lambda number: str((int(number[0]) + 1) % every), name) for name in names)
        if kind not in seen:
            seen[kind] = _act(scene, pp_rank=index)
        acted.append(replace(seen[kind], modules=tuple(names)))
    profiles = []
    for pp_rank, mine in enumerate(placement(config, len(modules))):
        replays = {}
        for index in mine:
            # Messages between two stages of one rank are assignments
            unsent = {"SEND_F", "RECV_B"} if index + 1 in mine else set[str]()
            unsent |= {"RECV_F", "SEND_B"} if index - 1 in mine else set()
            replays[index] = _Replay(acted[index].step, job.microbatches, unsent)
        parts = [replay.buffers() for replay in replays.values()]
        for action in (action for cell in rows[pp_rank] for action in cell):
            parts += replays[action.stage].play(action)
        parts += [stretch for replay in replays.values() for stretch in replay.end()]
        profiles.append(_rank(job, pp_rank, tuple(acted[index] for index in mine), join(parts)))
    return profiles


class _Replay:
    """Replays the record of a stage with two microbatches for more of them. The first forward gathers the weights and the first
    backward takes the memory of gradients; after the last one they are reduced."""

    def __init__(self, step: MeasuredStep, microbatches: int, unsent: set[str]) -> None:
        self._start, *others = step.stretches
        named = {re.sub(r"^PP:\d+", "", stretch.label): stretch for stretch in others}  # F0, SEND_F0, UNSHARD, ...
        self._seen = {name: stretch for name, stretch in named.items() if name.rstrip("01") not in unsent}
        self._microbatches = microbatches
        self._forwards = self._backwards = 0

    def buffers(self) -> Stretch:
        """For the hidden states and gradients that arrive: each microbatch has its own for the whole step."""
        a, b = (size * self._microbatches // 2 for size in self._start.change)
        return Stretch("", (a, b), (a, b))  # its messages are of the first step alone

    def play(self, action: Action) -> Iterable[Stretch]:
        if action.kind == "I":  # what it frees, W frees at the latest
            return [Stretch("", (0, 0), self._seen[f"B{min(self._backwards, 1)}"].most)]
        if action.kind == "F":
            which, before, after = f"F{min(self._forwards, 1)}", ["UNSHARD"] * (self._forwards == 0), list[str]()
            self._forwards += 1
        else:
            which, before = f"B{min(self._backwards, 1)}", []
            self._backwards += 1
            after = ["REDUCE_GRAD"] * (self._backwards == self._microbatches)
        names = [*before, f"RECV_{which}", which, f"SEND_{which}", *after]
        return [self._seen[name] for name in names if name in self._seen]

    def end(self) -> Iterable[Stretch]:
        """The optimizer."""
        return [stretch for label, stretch in self._seen.items() if label.startswith(("RESHARD", "Optimizer"))]
