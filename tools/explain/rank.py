"""Predicts memory and collectives of each rank of a job: simulates some ranks, operation by operation, and derives the others.

`fake_rank` sets up a rank without memory, devices or peers: its tensors are torch's FakeTensors, and torch's "fake" process group completes
every collective at once. `measure` runs and records one training step on such a rank, or on a real one. The code that runs is parallelize()
of a real run, with FSDP, DTensor and autograd, so tensors are kept, gathered, recomputed and freed as on a real rank.

Ranks that differ only in their data-, context- or tensor-parallel coordinate have equal shapes, so one rank per stage represents all.
Each stage of a pipeline is simulated by itself for two microbatches; the schedule's table gives the order in which its segments repeat.
"""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from math import prod
from operator import add
from typing import Any, Literal, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ft.buckets import to_local
from models import ops
from models.contract import Experts, Model, Router
from parallelisms.execution import CompileConfig, ExecutionConfig
from parallelisms.float8 import Float8Config
from parallelisms.fsdp import fsdp_param_groups
from parallelisms.mesh import (
    AXES,
    CP,
    DP_SHARD,
    DP_SHARD_CP,
    ParallelDims,
    ParallelismConfig,
    build_mesh,
    data_parallel_mesh,
)
from parallelisms.parallelize import Parallelized, parallelize
from parallelisms.pipeline_plan import placement, schedule_of, stage_modules
from parallelisms.pipeline_schedule import Action, table
from training.ema import EMA
from training.loss import cross_entropy_sum

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Collective:
    """A kind of collective (or send, receive) of one process group, and its size."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all, broadcast, send, receive
    group: str  # the process group's name
    bytes: int  # unsharded size: the output of an all-gather, the input of a reduce-scatter


@dataclass(frozen=True)
class Resident:
    """Bytes of this rank's shards that persist between steps (gradients: from the backward pass to the optimizer)."""

    parameters: int = 0  # with buffers and the padding of FSDP
    gradients: int = 0
    optimizer: int = 0


@dataclass
class Segment:
    """Part of a step between two profiler labels. `change`, `peak`: bytes, first without those of gradients, then with them."""

    label: str = ""
    change: tuple[int, ...] = (0, 0)  # from the start of the segment to its end
    peak: tuple[int, ...] = (0, 0)  # maximum above the start of the segment
    collectives: Counter[Collective] = field(default_factory=Counter)


@dataclass(frozen=True)
class MeasuredStep:
    resident: Resident
    segments: tuple[Segment, ...]  # in order
    labels: tuple[str, ...]  # profiler labels of FSDP, the pipeline and the optimizer, in order


def join(segments: Iterable[Segment]) -> Segment:
    """Concatenates consecutive segments into one."""
    whole = Segment()
    for segment in segments:
        whole.peak = tuple(map(max, whole.peak, map(add, whole.change, segment.peak)))
        whole.change = tuple(map(add, whole.change, segment.change))
        whole.collectives += segment.collectives
    return whole


@contextmanager
def fake_rank(*, global_rank: int, world_size: int, device_type: DeviceType) -> Iterator[None]:
    """Makes this process rank `global_rank` of `world_size`, without the others. No default process group may exist. All tensors are on
    "cpu", whatever `device_type` is: FSDP would create streams on a CUDA device."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=global_rank, world_size=world_size, store=FakeStore())
    try:
        # Fused CUDA kernels of norm and attention save less for backward than the CPU's norm, which saves several fp32 copies of its input.
        # Patched functions, as a TorchFunctionMode would not be active when the backward pass recomputes a block.
        if device_type == "cuda":
            patches = [
                mock.patch.multiple(F, rms_norm=_FusedRMSNorm.apply, scaled_dot_product_attention=_attention),
                mock.patch.object(ops, "document_attention", _attention),
                mock.patch.object(ops, "embedding", F.embedding),
            ]
        else:
            patches = [
                mock.patch.object(
                    ops, "BLOCKWISE_TYPES", {*ops.BLOCKWISE_TYPES, FakeTensor}
                ),  # fake tensors take the blockwise path, too
                mock.patch.object(ops.cpu_kernels, "first_keys", one_document),
            ]
        with ExitStack() as stack:
            for patch in (*patches, mock.patch.object(ops, "host_sizes", even_sizes)):
                stack.enter_context(patch)
            yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # the cache refers to process groups that no longer exist


def even_sizes(sizes: Tensor, total: int) -> list[list[int]]:
    """Divides the rows of a mixture's experts evenly, in place of ops.host_sizes: fake tensors have no values."""
    parts = sizes.shape[1]
    return [[total // parts + (part < total % parts) for part in range(parts)] for _ in sizes]


def one_document(document_starts: Tensor, size: int) -> list[list[int]]:
    """Returns the first keys of sequences of one document each, in place of ops.cpu_kernels.first_keys."""
    batch, tokens = document_starts.shape
    return [[0] * -(-tokens // size) for _ in range(batch)]


def without_memory(model: Model) -> FakeTensorMode:
    """Makes parallelize() materialize `model`, which is on the meta device, as FakeTensors. Returns the mode to enter for the computation,
    but not for parallelize() itself, as DeviceMesh needs the values of its own tensors."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    kind: Any = type(model)

    class WithoutMemory(kind):  # type: ignore[misc]  # a subclass, as attributes would be lost when a pipeline copies its model
        def to_empty(self, *, device: torch.device, recurse: bool = True) -> nn.Module:
            with fake:
                return cast(nn.Module, super().to_empty(device=device, recurse=recurse))

        def checked_init_weights(self, seed: int) -> None:
            pass

    model.__class__ = WithoutMemory
    return fake


class FakeCollectives(TorchDispatchMode):
    """Completes a fake rank's operations that need values or peers: `item()` returns 1 or True, sent tensors stay alive for the step."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return args[0].dtype == torch.bool or 1
        if func is torch.ops.c10d.send.default:
            self._sent.append(args[0])
        return func(*args, **(kwargs or {}))


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
    """Computes flash attention on the CPU, which saves the same as on CUDA: q, k, v, the result, one fp32 number per query. FlexAttention,
    for documents, also saves a mask of a few numbers for each 128 tokens, which are not counted."""
    return cast(Tensor, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0])


class _FusedRMSNorm(Function):
    """Computes only the shapes of aten._fused_rms_norm, which saves x, the weight and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty_like(x[..., :1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        grad_weight = torch.empty_like(weight.to_local() if isinstance(x, DTensor) else weight)
        if isinstance(x, DTensor):  # x has some tokens of a sequence: the weight's gradient is partial
            grad_weight = DTensor.from_local(grad_weight, x.device_mesh, [Partial()], run_check=False)
        return torch.empty_like(x), None, grad_weight, None


def measure(
    parallel: Parallelized,
    make_optimizer: Callable[[list[Model]], torch.optim.Optimizer],
    batches: Sequence[tuple[Tensor, ...]],
    *,
    ema_decay: float = 0.0,
) -> MeasuredStep:
    """Runs and records one step over `batches`, the arguments of forward_backward: forward, backward, and the first optimizer step,
    which creates its state."""
    gc.collect()  # and disabled below: collection of reference cycles at arbitrary times would change the record
    with ExitStack() as stack, MemoryTracker() as tracker:
        stack.callback(gc.enable if gc.isenabled() else gc.disable)
        gc.disable()
        optimizer = make_optimizer(parallel.parts)
        parameters = [p for part in parallel.parts for p in part.parameters()]
        for batch in batches:
            parallel.forward_backward(*batch)
        gradients = tracker.serials(p.grad for p in parameters)
        optimizer.step()
        optimizer.zero_grad()
        # after the step: the first one moves shards into padded storages
        tensors = tracker.serials([*parameters, *(buffer for part in parallel.parts for buffer in part.buffers())])
        averages = list(EMA(parallel.parts, ema_decay).parameters()) if ema_decay else []
        states = tracker.serials([*tree_leaves([optimizer.state[p] for p in parameters]), *averages])
        resident = Resident(*(sum(map(tracker.bytes.__getitem__, group)) for group in (tensors, gradients, states)))
    labels = tuple(event for event in tracker.events if isinstance(event, str))
    return MeasuredStep(resident, tuple(tracker.segments(gradients, tensors | states)), labels)


class MemoryTracker(TorchDispatchMode):
    """Records each allocation, resize and free of a storage, and each collective. Temporary memory inside an operation is not seen."""

    def __init__(self) -> None:
        super().__init__()
        # (serial of a storage, its new size in bytes), a collective, or a profiler label
        self.events: list[tuple[int, int] | Collective | str] = []
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}  # by address: serial, weak reference
        self.bytes: list[int] = []  # by serial: the last known size of the storage
        self._patches = ExitStack()
        self._pause = threading.Lock()

    def serials(self, tensors: Iterable[Any]) -> set[int]:
        """Serial numbers of the storages behind the tensors' local parts."""
        return {self._record_storage(to_local(t).untyped_storage()) for t in tensors if isinstance(t, Tensor)}

    def segments(self, gradients: set[int], resident: set[int]) -> list[Segment]:
        """Splits the record where the pipeline begins an action and where the optimizer step begins. `resident`: serials to ignore."""
        result, now = [Segment()], dict[int, int]()
        for event in self.events:
            last = result[-1]
            if isinstance(event, str):
                if event.startswith(("PP:", "Optimizer.step")):
                    result.append(Segment(event))
            elif isinstance(event, Collective):
                last.collectives[event] += 1
            elif event[0] not in resident:
                serial, size = event
                change = size - now.get(serial, 0)
                now[serial] = size
                last.change = tuple(map(add, last.change, (0 if serial in gradients else change, change)))
                last.peak = tuple(map(max, last.peak, last.change))
        return result

    def __enter__(self) -> MemoryTracker:
        resize = torch.UntypedStorage.resize_

        def recorded_resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._record_storage(storage)
            return result

        # a dispatch mode does not see resize_
        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", recorded_resize))
        # DTensor infers shapes by unsharded FakeTensors, which take no memory in a real step
        find_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

        def find_shapes_unrecorded(*arguments: Any) -> Any:
            with self._pause:
                return find_shapes(*arguments)

        self._patches.enter_context(mock.patch.object(ShardingPropagator, find_shapes.__name__, find_shapes_unrecorded))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _TENSOR_TYPES for kind in types):
            return NotImplemented  # the operation of a DTensor is dispatched again for its local tensor
        result = func(*args, **(kwargs or {}))
        if self._pause.locked():
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._record_storage(leaf.untyped_storage())
        if func.namespace in ("c10d", "_c10d_functional"):
            self._record_collective(func, args)
        elif func is torch.ops.profiler._record_function_enter_new.default:
            self.events.append(str(args[0]))
        return result

    def _record_storage(self, storage: torch.UntypedStorage) -> int:
        address, size = storage._cdata, storage.nbytes()
        if address not in self._live:
            self._live[address] = len(self.bytes), weakref.ref(storage, lambda _: self._record_free(address))
            self.bytes.append(0)
        serial, _ = self._live[address]
        if self.bytes[serial] != size:
            self.bytes[serial] = size
            self.events.append((serial, size))
        return serial

    def _record_free(self, address: int) -> None:
        self.events.append((self._live.pop(address)[0], 0))

    def _record_collective(self, func: Any, args: Sequence[Any]) -> None:
        name = func._schema.name.partition("::")[2]
        kind = next((kind for key, kind in _KINDS.items() if key in name.replace("_", "")), None)
        if kind is not None:
            group = next((argument for argument in reversed(args) if isinstance(argument, str)), "")
            for argument in args:
                if isinstance(argument, torch.ScriptObject):
                    with suppress(RuntimeError):  # not a process group, such as the reduce operation
                        group = group or str(dist.ProcessGroup.unbox(argument).group_name)
            size = max(leaf.numel() * leaf.itemsize for leaf in tree_leaves(args[:2]) if isinstance(leaf, Tensor))
            if name == "all_gather_into_tensor":  # the functional form has only the shard as its argument
                size *= args[1]
            self.events.append(Collective(kind, group, size))


_TENSOR_TYPES = (Tensor, nn.Parameter, FakeTensor)
_KINDS = {
    "gather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}


@dataclass(frozen=True)
class ExplainedJob:
    title: str
    build: Callable[[], Model]  # unsharded model; called under the meta device
    optimizer: Callable[[list[Model]], torch.optim.Optimizer]
    execution: ExecutionConfig
    degrees: ParallelDims
    device_type: DeviceType
    local_batch_size: int
    passes: int  # forward and backward passes of a step
    seq_len: int
    ema_decay: float = 0.0  # of the weights' average; 0: there is none
    document_mask: bool = False

    def model(self) -> Model:
        with torch.device("meta"):
            return self.build()

    def parallelize(
        self, mesh: DeviceMesh, model: Model, execution: ExecutionConfig, device: str = "cpu"
    ) -> Parallelized:
        batch = {"local_batch_size": self.local_batch_size, "seq_len": self.seq_len}
        return parallelize(model, mesh, cross_entropy_sum, execution, **batch, device=torch.device(device), seed=0)

    @property
    def microbatches(self) -> int:
        """Microbatches of one pass through the pipeline."""
        return self.local_batch_size // self.execution.parallelism.pipeline_parallel_microbatch_size


@dataclass(frozen=True)
class ParameterKind:
    """Parameters that differ only in their layer index, such as layers.*.attention.wq.weight."""

    name: str
    shape: tuple[int, ...]  # unsharded
    shardings: tuple[tuple[str, int], ...]  # (mesh axis, tensor dim that it shards)
    local_shape: tuple[int, ...]
    layers: int  # number of such parameters on this rank
    trained: int  # of these, number that are not frozen


@dataclass(frozen=True)
class FSDPGroup:
    """Modules whose parameters are gathered together."""

    names: str  # of the modules
    shards: int
    gathers: int  # bytes of all shards, with padding
    reduces: int


@dataclass(frozen=True)
class Stage:
    """A model part on one rank, and its measured step."""

    modules: tuple[str, ...]
    kinds: tuple[ParameterKind, ...]
    groups: tuple[FSDPGroup, ...]  # those of dense modules, then routers, then experts
    step: MeasuredStep


@dataclass(frozen=True)
class RankProfile:
    """Memory and collectives in one step of the first rank at a pipeline coordinate, which represents the others there."""

    pp_rank: int
    stages: tuple[Stage, ...]
    resident: Resident
    activations: int  # peak, bytes
    peak: int  # of all memory, bytes
    collectives: Counter[Collective]  # of a step; `group` is the mesh axis


def ranks(job: ExplainedJob) -> list[RankProfile]:
    """Returns one profile per pipeline coordinate."""
    if job.degrees.pp > 1:
        return _pipeline_ranks(job)
    stage = _simulate_stage(job)
    return [_rank(job, 0, (stage,), join(stage.step.segments))]


def _rank(job: ExplainedJob, pp_rank: int, stages: tuple[Stage, ...], whole: Segment) -> RankProfile:
    """Builds a profile. `whole`: the segments of one pass and of the optimizer step, joined."""
    resident = Resident(*map(sum, zip(*(astuple(stage.step.resident) for stage in stages), strict=True)))
    activations, with_gradients = whole.peak
    if job.passes > 1:  # later passes begin with all gradients allocated
        with_gradients = max(with_gradients, activations + resident.gradients)
    peak = resident.parameters + resident.optimizer + with_gradients
    collectives = Counter({c: n * job.passes for c, n in whole.collectives.items()})
    return RankProfile(pp_rank, stages, resident, activations, peak, collectives)


def _simulate_stage(job: ExplainedJob, *, pp_rank: int = 0) -> Stage:
    """Simulates a step of one pass on the first rank at `pp_rank`, which has one stage."""
    sizes, execution = job.degrees, job.execution
    parallelism = without_devices(execution.parallelism)
    # Without the options that are not simulated; the report's warnings name them
    eager = replace(
        execution, parallelism=parallelism, compile=CompileConfig(), float8=Float8Config(), cpu_offload=False
    )
    with fake_rank(global_rank=pp_rank * prod(sizes[1:]), world_size=sizes.world_size, device_type=job.device_type):
        mesh, model = build_mesh(sizes, "cpu"), job.model()
        fake = without_memory(model)
        parallel = job.parallelize(mesh, model, eager)
        with fake, FakeCollectives():
            tokens = torch.zeros(job.local_batch_size, job.seq_len, dtype=torch.int64)
            batch = (tokens, tokens, *([tokens] if job.document_mask else []))
            step = measure(parallel, job.optimizer, [batch], ema_decay=job.ema_decay)
        [part] = parallel.parts
        modules = ["tok_embeddings"] if part.tok_embeddings is not None else []
        modules += [f"layers.{name}" for name in part.layers]
        modules += [name for name in ("norm", "output") if getattr(part, name) is not None]
        kinds = dict[str, ParameterKind]()
        for name, parameter in part.named_parameters():
            assert isinstance(parameter, DTensor), "parallelize() makes every parameter a DTensor"
            axes = parameter.device_mesh
            dims = tuple(
                (axis, placement.dim)
                for axis, placement in zip(axes.mesh_dim_names or (), parameter.placements, strict=True)
                if isinstance(placement, Shard | _StridedShard) and axes[axis].size() > 1
            )
            kind, own_shape = re.sub(r"\.\d+\.", ".*.", name), tuple(to_local(parameter).shape)
            kinds.setdefault(kind, ParameterKind(kind, tuple(parameter.shape), dims, own_shape, 0, 0))
            layers, trained = kinds[kind].layers + 1, kinds[kind].trained + parameter.requires_grad
            kinds[kind] = replace(kinds[kind], layers=layers, trained=trained)
        names = {module: name for name, module in part.named_modules()}
        groups, precision = list[FSDPGroup](), execution.precision
        dense = sizes.dp_shard * sizes.cp

        def add(modules: Sequence[nn.Module], owners: Iterable[nn.Module], shards: int, *dtypes: torch.dtype) -> None:
            own = dict.fromkeys(p for owner in owners for p in owner.parameters(recurse=False))  # a tied one once
            reduced = [p for p in own if p.requires_grad]
            elements = (
                shards * sum(to_local(p).untyped_storage().nbytes() // p.itemsize for p in each)
                for each in (own, reduced)
            )
            sizes_of = (count * dtype.itemsize for count, dtype in zip(elements, dtypes, strict=True))
            groups.append(FSDPGroup(", ".join(names[module] for module in modules), shards, *sizes_of))

        for modules_of_group in fsdp_param_groups(part, execution.parallelism.fsdp_blocks_per_group):
            owners = (inner for module in modules_of_group for inner in module.modules())
            kept = (inner for inner in owners if not isinstance(inner, Experts | Router))  # gathered by themselves
            add(modules_of_group, kept, dense, precision.compute, precision.reduce)
        for router in (module for module in part.modules() if isinstance(module, Router)):
            add([router], router.modules(), dense, torch.float32, torch.float32)
        efsdp = dense * sizes.tp // execution.parallelism.expert_parallel_degree
        for experts in (module for module in part.modules() if isinstance(module, Experts)):
            add([experts], experts.modules(), efsdp, precision.compute, precision.reduce)
        return Stage(tuple(modules), tuple(kinds.values()), tuple(groups), by_axis(step, mesh, [part]))


def without_devices(config: ParallelismConfig) -> ParallelismConfig:
    """Returns the config without the options that need certain GPUs."""
    return replace(config, context_parallel_rotate_method="allgather", enable_async_tensor_parallel=False)


def by_axis(step: MeasuredStep, mesh: DeviceMesh, parts: Iterable[Model]) -> MeasuredStep:
    """Replaces the group of each collective by its mesh axis, and drops collectives of groups of one rank."""
    axes: dict[str, str] = {mesh[axis].get_group().group_name: axis for axis in AXES if mesh[axis].size() > 1}
    sharding = data_parallel_mesh(mesh)
    for axis in sharding.mesh_dim_names or ():
        group = sharding.get_group(axis)
        if group.size() > 1:
            axes[group.group_name] = effective_axis(axis, dp_shard=mesh[DP_SHARD].size(), cp=mesh[CP].size())
    for experts in (module for part in parts for module in part.modules() if isinstance(module, Experts)):
        own = cast(DTensor, next(experts.parameters())).device_mesh  # a mesh of their own
        for axis in own.mesh_dim_names or ():
            if own[axis].size() > 1:
                axes.setdefault(own.get_group(axis).group_name, axis)
    segments = []
    for segment in step.segments:
        named: Counter[Collective] = Counter()
        for collective, times in segment.collectives.items():
            if name := axes.get(collective.group):
                named[replace(collective, group=name)] += times
        segments.append(replace(segment, collectives=named))
    return replace(step, segments=tuple(segments))


def effective_axis(axis: str, *, dp_shard: int, cp: int) -> str:
    """Returns, for the axis of dp_shard and cp together, the one of them that has several ranks if the other has one."""
    if axis != DP_SHARD_CP or (dp_shard > 1 and cp > 1):
        return axis
    return DP_SHARD if cp == 1 else CP


def _pipeline_ranks(job: ExplainedJob) -> list[RankProfile]:
    """Simulates each stage for two microbatches on a pipeline with one stage per rank, and replays it by the schedule."""
    config = job.execution.parallelism
    whole = job.model()
    modules = stage_modules(config, list(whole.layers))
    rows = table(schedule_of(config), job.degrees.pp, len(modules), job.microbatches)
    one_stage_per_rank = replace(
        config,
        pipeline_parallel_degree=len(modules),
        pipeline_parallel_schedule="GPipe",
        pipeline_parallel_schedule_csv="",
        module_fqns_per_model_part=tuple(" ".join(names) for names in modules),
    )
    stage_job = replace(
        job,
        execution=replace(job.execution, parallelism=one_stage_per_rank),
        degrees=job.degrees._replace(pp=len(modules)),
        local_batch_size=2 * config.pipeline_parallel_microbatch_size,
    )
    seen, stages = dict[Any, Stage](), list[Stage]()
    option = job.execution.activation_checkpoint.selective_ac_option
    every = int(option) if option.isdigit() else 1
    for index, names in enumerate(modules):
        # Equal for stages of equal shapes with checkpointing on the same blocks
        kind = tuple(
            (
                re.sub(r"\d+", lambda number: str((int(number[0]) + 1) % every), name),
                *((each.shape, each.requires_grad) for each in whole.get_submodule(name).parameters()),
            )
            for name in names
        )
        if kind not in seen:
            seen[kind] = _simulate_stage(stage_job, pp_rank=index)
        stages.append(replace(seen[kind], modules=tuple(names)))
    profiles = []
    for pp_rank, indices in enumerate(placement(config, len(modules))):
        replays = {}
        for index in indices:
            # Adjacent stages on one rank pass tensors without send and receive
            unsent = {"SEND_F", "RECV_B"} if index + 1 in indices else set[str]()
            unsent |= {"RECV_F", "SEND_B"} if index - 1 in indices else set()
            replays[index] = _Replay(stages[index].step, job.microbatches, unsent)
        segments = [replay.buffers() for replay in replays.values()]
        for action in (action for cell in rows[pp_rank] for action in cell):
            segments += replays[action.stage].play(action)
        segments += [segment for replay in replays.values() for segment in replay.end()]
        profiles.append(_rank(job, pp_rank, tuple(stages[index] for index in indices), join(segments)))
    return profiles


class _Replay:
    """Replays a stage's record of two microbatches for any number; the first gathers the weights, the last reduces the gradients."""

    def __init__(self, step: MeasuredStep, microbatches: int, unsent: set[str]) -> None:
        self._start, *others = step.segments
        named = {re.sub(r"^PP:\d+", "", segment.label): segment for segment in others}  # F0, SEND_F0, UNSHARD, ...
        self._seen = {name: segment for name, segment in named.items() if name.rstrip("01") not in unsent}
        self._microbatches = microbatches
        self._forwards = self._backwards = 0

    def buffers(self) -> Segment:
        """Returns the receive buffers of hidden states and gradients: one of each per microbatch, for the whole step."""
        a, b = (size * self._microbatches // 2 for size in self._start.change)
        return Segment("", (a, b), (a, b))  # without collectives: those here occur only in a run's first step

    def play(self, action: Action) -> Iterable[Segment]:
        if action.kind == "I":  # memory that I frees is counted as freed by W
            return [Segment("", (0, 0), self._seen[f"B{min(self._backwards, 1)}"].peak)]
        if action.kind == "F":
            which, before, after = f"F{min(self._forwards, 1)}", ["UNSHARD"] * (self._forwards == 0), list[str]()
            self._forwards += 1
        else:
            which, before = f"B{min(self._backwards, 1)}", []
            self._backwards += 1
            after = ["REDUCE_GRAD"] * (self._backwards == self._microbatches)
        names = [*before, f"RECV_{which}", which, f"SEND_{which}", *after]
        return [self._seen[name] for name in names if name in self._seen]

    def end(self) -> Iterable[Segment]:
        return [segment for label, segment in self._seen.items() if label.startswith(("RESHARD", "Optimizer"))]
