"""Memory and messages of each rank of a job, without the job: some of its ranks are acted out, the rest follows.

train.py CONFIG --explain -> report.py, which writes it down -> here -> memory.py, where a rank is acted out.

Ranks that differ in data-, context- or tensor-parallel place alone have equal shapes, so the first of each stage stands for all.
Without a pipeline it is acted out as it is. With one, a stage is acted out alone for two microbatches, and its schedule's table
(parallelisms/pipeline_schedule.py) says how often and in which order what was seen there follows on itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
from parallelisms.mesh import AXES, CP, DP_SHARD, SHARDS, Degrees, build_mesh, data_parallel_mesh
from parallelisms.parallelize import parallelize
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
    layers: int = 1  # so many of them


@dataclass(frozen=True)
class Stage:
    """A part of the model on one rank."""

    modules: tuple[str, ...]
    kinds: tuple[ParameterKind, ...]
    groups: tuple[
        tuple[str, int], ...
    ]  # that FSDP gathers and reduces together: names, and elements of all shards with padding
    held: Held


@dataclass(frozen=True)
class RankProfile:
    """The first rank of a stage of the pipeline, or of all: what it holds and what a step takes."""

    pp_rank: int
    stages: tuple[Stage, ...]
    activations: int
    peak: int
    collectives: Counter[Collective]  # of a step; `group` is the axis
    labels: tuple[str, ...]

    @property
    def held(self) -> Held:
        return sum((stage.held for stage in self.stages), Held())


def ranks(job: ExplainedJob) -> list[RankProfile]:
    """One for each place in the pipeline."""
    if job.degrees.pp > 1:
        return _pipeline_ranks(job)
    stage, step = _act(job)
    return [_rank(job, 0, {0: (stage, step)}, join(step.stretches))]


def _rank(
    job: ExplainedJob, pp_rank: int, stages: dict[int, tuple[Stage, MeasuredStep]], whole: Stretch
) -> RankProfile:
    """`whole`: all of one pass, and the optimizer."""
    held = sum((stage.held for stage, _ in stages.values()), Held())
    activations, with_gradients = whole.most
    if job.passes > 1:  # the later ones find all gradients there
        with_gradients = max(with_gradients, activations + held.gradients)
    return RankProfile(
        pp_rank,
        tuple(stage for stage, _ in stages.values()),
        activations=activations,
        peak=held.parameters + held.optimizer + with_gradients,
        collectives=Counter({c: n * job.passes for c, n in whole.collectives.items()}),
        labels=next(iter(stages.values()))[1].labels,
    )


def _act(job: ExplainedJob, *, pp_rank: int = 0) -> tuple[Stage, MeasuredStep]:
    """A step of one pass on the first rank with this place in the pipeline, which has one stage there."""
    sizes = job.degrees
    with stand_in(
        global_rank=pp_rank * prod(sizes[1:]), world_size=job.degrees.world_size, device_type=job.device_type
    ):
        mesh, model = build_mesh(job.degrees, "cpu"), job.model()
        fake = without_memory(model)
        parallel = parallelize(
            model,
            mesh,
            cross_entropy_sum,
            _eager(job.layout),
            local_batch_size=job.local_batch_size,
            seq_len=job.seq_len,
            device=torch.device("cpu"),
            seed=0,
        )
        with fake, Others():
            tokens = torch.zeros(job.local_batch_size, job.seq_len, dtype=torch.int64)
            step = measure(parallel, job.optimizer, [(tokens, tokens)])
        [part], [held] = parallel.parts, step.held
        modules = ["tok_embeddings"] if part.tok_embeddings is not None else []
        modules += [f"layers.{name}" for name in part.layers]
        modules += [name for name in ("norm", "output") if getattr(part, name) is not None]
        stage = Stage(tuple(modules), tuple(_kinds(part)), tuple(_groups(part, job, mesh)), held)
        return stage, by_axis(step, axes_of(mesh))


def _eager(layout: Layout) -> Layout:
    """Without what cannot be acted out; explain.py says so."""
    parallelism = replace(
        layout.parallelism, context_parallel_rotate_method="allgather", enable_async_tensor_parallel=False
    )
    return replace(layout, parallelism=parallelism, compile=CompileConfig(), float8=Float8Config(), cpu_offload=False)


def axes_of(mesh: DeviceMesh) -> dict[str, str]:
    """The name of a process group with several ranks: its axis."""
    axes: dict[str, str] = {mesh[axis].get_group().group_name: axis for axis in AXES if mesh[axis].size() > 1}
    sharding = data_parallel_mesh(mesh)
    for axis in sharding.mesh_dim_names or ():
        group = sharding.get_group(axis)
        if group.size() > 1:
            axes[group.group_name] = plain(axis, dp_shard=mesh[DP_SHARD].size(), cp=mesh[CP].size())
    return axes


def plain(axis: str, *, dp_shard: int, cp: int) -> str:
    """The axis of dp_shard and cp that has several ranks, if the other has one."""
    if axis != SHARDS or (dp_shard > 1 and cp > 1):
        return axis
    return DP_SHARD if cp == 1 else CP


def by_axis(step: MeasuredStep, axes: Mapping[str, str]) -> MeasuredStep:
    """Its messages with the axis for the group; without those of a rank with itself."""
    stretches = []
    for stretch in step.stretches:
        named = ((replace(c, group=axes[c.group]), n) for c, n in stretch.collectives.items() if c.group in axes)
        stretches.append(replace(stretch, collectives=sum((Counter({c: n}) for c, n in named), Counter())))
    return replace(step, stretches=tuple(stretches))


def _kinds(part: Model) -> Iterable[ParameterKind]:
    counts = Counter(re.sub(r"\.\d+\.", ".*.", name) for name, _ in part.named_parameters())
    left = dict(counts)
    for name, parameter in part.named_parameters():
        kind = re.sub(r"\.\d+\.", ".*.", name)
        if layers := left.pop(kind, 0):
            assert isinstance(parameter, DTensor), "parallelize() makes every parameter a DTensor"
            mesh = parameter.device_mesh
            cuts = tuple(
                (axis, placement.dim)
                for axis, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True)
                if isinstance(placement, Shard | _StridedShard) and mesh[axis].size() > 1
            )
            yield ParameterKind(kind, tuple(parameter.shape), cuts, tuple(local(parameter).shape), layers)


def _groups(part: Model, job: ExplainedJob, mesh: DeviceMesh) -> Iterable[tuple[str, int]]:
    shards = mesh[DP_SHARD].size() * mesh[CP].size()
    names = {module: name for name, module in part.named_modules()}
    for modules in communication_groups(part, job.layout.parallelism.fsdp_blocks_per_group):
        parameters = [p for module in modules for p in module.parameters()]
        elements = sum(local(p).untyped_storage().nbytes() // p.itemsize for p in parameters)
        yield ", ".join(names[module] for module in modules), elements * shards


# Pipelines


def _pipeline_ranks(job: ExplainedJob) -> list[RankProfile]:
    """From stages acted out one by one, on a pipeline with one rank for each."""
    config = job.layout.parallelism
    modules = stage_modules(config, list(job.model().layers))
    rows = table(schedule_of(config), job.degrees.pp, len(modules), job.microbatches)
    seen: dict[Any, tuple[Stage, MeasuredStep]] = {}
    acted = []
    option = job.layout.activation_checkpoint.selective_ac_option
    every = int(option) if option.isdigit() else 1
    for index, names in enumerate(modules):
        # Stages with equal shapes, whose blocks compute again at the same places
        kind = tuple(re.sub(r"\d+", lambda number: str((int(number[0]) + 1) % every), name) for name in names)
        if kind not in seen:
            seen[kind] = _act(_alone(job, modules), pp_rank=index)
        stage, step = seen[kind]
        acted.append((replace(stage, modules=tuple(names)), step))
    profiles = []
    for pp_rank, mine in enumerate(placement(config, len(modules))):
        stages = {index: acted[index] for index in mine}
        # Messages between two stages of one rank are assignments
        unsent = {index: {"SEND_F", "RECV_B"} if index + 1 in stages else set[str]() for index in stages}
        for index in stages:
            unsent[index] |= {"RECV_F", "SEND_B"} if index - 1 in stages else set()
        scenes = {index: _Scene(step, job.microbatches, unsent[index]) for index, (_, step) in stages.items()}
        parts = [scene.buffers() for scene in scenes.values()]
        for action in (action for cell in rows[pp_rank] for action in cell):
            parts += scenes[action.stage].play(action)
        parts += [stretch for scene in scenes.values() for stretch in scene.end()]
        profiles.append(_rank(job, pp_rank, stages, join(parts)))
    return profiles


def _alone(job: ExplainedJob, modules: list[list[str]]) -> ExplainedJob:
    """Two microbatches, each stage on a rank of its own."""
    config = replace(
        job.layout.parallelism,
        pipeline_parallel_degree=len(modules),
        pipeline_parallel_schedule="GPipe",
        pipeline_parallel_schedule_csv="",
        module_fqns_per_model_part=tuple(" ".join(names) for names in modules),
    )
    return replace(
        job,
        layout=replace(job.layout, parallelism=config),
        degrees=job.degrees._replace(pp=len(modules)),
        local_batch_size=2 * config.pipeline_parallel_microbatch_size,
    )


class _Scene:
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
        if action.kind == "F":
            names = [*(["UNSHARD"] if self._forwards == 0 else []), *_around("F", self._forwards)]
            self._forwards += 1
        elif action.kind == "I":  # what it frees, W frees at the latest
            backward = self._seen[f"B{min(self._backwards, 1)}"]
            return [Stretch("", (0, 0), backward.most)]
        else:
            self._backwards += 1
            last = self._backwards == self._microbatches
            names = [*_around("B", self._backwards - 1), *(["REDUCE_GRAD"] if last else [])]
        return [self._seen[name] for name in names if name in self._seen]

    def end(self) -> Iterable[Stretch]:
        """The optimizer."""
        return [stretch for label, stretch in self._seen.items() if label.startswith(("RESHARD", "Optimizer"))]


def _around(kind: str, number: int) -> list[str]:
    """A forward or backward with its messages."""
    which = min(number, 1)
    return [f"RECV_{kind}{which}", f"{kind}{which}", f"SEND_{kind}{which}"]
