"""Memory and messages of each rank of a job, without the job: some of its ranks are simulated, operation by operation, the rest follows.

`stand_in` makes a rank without memory, devices or other ranks: tensors without memory are torch's FakeTensors, other ranks its "fake"
process group, which answers every collective at once. `measure` lets it step, or a real rank. What runs is the product's own parallelize(),
with FSDP, DTensor and autograd; so what is kept, gathered, computed again and freed is what a real rank keeps and frees.

Ranks that differ in data-, context- or tensor-parallel place alone have equal shapes, so the first of each stage stands for all. A stage of
a pipeline is simulated alone for two microbatches, and the schedule's table says how often and in which order that record is repeated.
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

from models import ops
from models.contract import Model
from parallelisms.float8 import Float8Config
from parallelisms.fsdp import fsdp_param_groups
from parallelisms.layout import CompileConfig, ExecutionConfig
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
from training.loss import cross_entropy_sum

DeviceType = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Collective:
    """One kind of message between the ranks of one group."""

    kind: str  # all-gather, reduce-scatter, all-reduce, all-to-all, broadcast, send, receive
    group: str  # the process group's name
    bytes: int  # of the whole: what an all-gather gives, what a reduce-scatter takes


@dataclass(frozen=True)
class Held:
    """Bytes that stay from step to step (gradients: from the backward to the optimizer), this rank's shards of them."""

    parameters: int = 0  # and buffers; with what FSDP pads
    gradients: int = 0
    optimizer: int = 0


@dataclass
class Stretch:
    """Changes from one mark to the next. Pairs of bytes: without gradients and what is held; the same with gradients."""

    label: str = ""
    change: tuple[int, ...] = (0, 0)  # from its beginning to its end
    most: tuple[int, ...] = (0, 0)  # above its beginning, at one instant
    collectives: Counter[Collective] = field(default_factory=Counter)


@dataclass(frozen=True)
class MeasuredStep:
    held: Held
    stretches: tuple[Stretch, ...]  # in order
    labels: tuple[str, ...]  # what FSDP and the pipeline said they do, in order


def join(stretches: Iterable[Stretch]) -> Stretch:
    """One after the other as one."""
    whole = Stretch()
    for stretch in stretches:
        whole.most = tuple(map(max, whole.most, map(add, whole.change, stretch.most)))
        whole.change = tuple(map(add, whole.change, stretch.change))
        whole.collectives += stretch.collectives
    return whole


@contextmanager
def stand_in(*, global_rank: int, world_size: int, device_type: DeviceType) -> Iterator[None]:
    """Makes this process `global_rank` of `world_size` ranks that do not exist. The default process group must be free. All tensors are on
    a "cpu", whatever `device_type`: FSDP would ask a CUDA device for streams."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", rank=global_rank, world_size=world_size, store=FakeStore())
    try:
        # CUDA's norm and attention keep what their fused kernels keep; a CPU's norm would keep several fp32 copies of its input. Functions
        # and no TorchFunctionMode, which would not be there when the backward computes a block again.
        cuda = mock.patch.multiple(F, rms_norm=_FusedRMSNorm.apply, scaled_dot_product_attention=_attention)
        cpu = mock.patch.object(ops, "PLAIN", {*ops.PLAIN, FakeTensor})  # tensors without memory walk in blocks, too
        with cpu if device_type == "cpu" else cuda:
            yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # DTensor remembers groups by their place in the mesh, and these are gone


def without_memory(model: Model) -> FakeTensorMode:
    """From now on parallelize() gives `model`, built on the meta device, parameters without memory. Switch the result on for what is
    computed from them, but not for parallelize() itself: DeviceMesh computes with tensors of its own."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    kind: Any = type(model)

    class WithoutMemory(kind):  # type: ignore[misc]  # a class and not two attributes: a pipeline copies its model
        def to_empty(self, *, device: torch.device, recurse: bool = True) -> nn.Module:
            with fake:
                return cast(nn.Module, super().to_empty(device=device, recurse=recurse))

        def init_weights(self, seed: int) -> None:
            pass

    model.__class__ = WithoutMemory
    return fake


class FakeCollectives(TorchDispatchMode):
    """Stands in for the collectives of the other ranks. A value that nobody computed is one, as the gradient of the loss is; what is sent
    is kept, as a pipeline keeps it until the end of the step."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return args[0].dtype == torch.bool or 1
        if func is torch.ops.c10d.send.default:
            self._sent.append(args[0])
        return func(*args, **(kwargs or {}))


def _attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """Flash attention on a CPU keeps what it keeps on CUDA: q, k, v, the result, and one fp32 number per query."""
    return cast(Tensor, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0])


class _FusedRMSNorm(Function):
    """The shapes of aten._fused_rms_norm: it keeps x, the weight and one fp32 number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty_like(x[..., :1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, None, Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        grad_weight = torch.empty_like(weight.to_local() if isinstance(x, DTensor) else weight)
        if isinstance(x, DTensor):  # some tokens of a sequence: the gradient is a term of a sum over ranks
            grad_weight = DTensor.from_local(grad_weight, x.device_mesh, [Partial()], run_check=False)
        return torch.empty_like(x), None, grad_weight, None


def measure(
    parallel: Parallelized,
    make_optimizer: Callable[[list[Model]], torch.optim.Optimizer],
    microbatches: Sequence[tuple[Tensor, Tensor]],
) -> MeasuredStep:
    """One step over `microbatches`: forward, backward, and the optimizer's update with the making of its state."""
    gc.collect()  # it frees what lies in cycles at moments of its own: without it two equal steps count the same
    with ExitStack() as stack, MemoryTracker() as tracker:
        stack.callback(gc.enable if gc.isenabled() else gc.disable)
        gc.disable()
        optimizer = make_optimizer(parallel.parts)
        parameters = [p for part in parallel.parts for p in part.parameters()]
        for inputs, targets in microbatches:
            parallel.forward_backward(inputs, targets)
        gradients = tracker.serials(p.grad for p in parameters)
        optimizer.step()
        optimizer.zero_grad()
        # only now: the first step moves shards into padded storages
        tensors = tracker.serials([*parameters, *(buffer for part in parallel.parts for buffer in part.buffers())])
        states = tracker.serials(tree_leaves([optimizer.state[p] for p in parameters]))
        held = Held(*(sum(tracker.bytes[serial] for serial in serials) for serials in (tensors, gradients, states)))
    labels = tuple(event for event in tracker.events if isinstance(event, str))
    return MeasuredStep(held, tuple(tracker.stretches(gradients, tensors | states)), labels)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class MemoryTracker(TorchDispatchMode):
    """Notes when a storage comes, changes its size, or goes, and every collective. Memory inside of an operation is not seen."""

    def __init__(self) -> None:
        super().__init__()
        # a storage's serial and bytes from now on; or a label
        self.events: list[tuple[int, int] | Collective | str] = []
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}  # address of a live storage: its serial, a watch
        self.bytes: list[int] = []  # by serial, when it was last alive
        self._patches = ExitStack()
        self._pause = threading.Lock()

    def serials(self, tensors: Iterable[Any]) -> set[int]:
        """Serial numbers of the storages behind the tensors' local parts."""
        return {self._see(local(t).untyped_storage()) for t in tensors if isinstance(t, Tensor)}

    def stretches(self, gradients: set[int], held: set[int]) -> list[Stretch]:
        """All that was seen, cut where the pipeline began another action, and where the optimizer began."""
        result, now = [Stretch()], dict[int, int]()
        for event in self.events:
            last = result[-1]
            if isinstance(event, str):
                if event.startswith(("PP:", "Optimizer.step")):
                    result.append(Stretch(event))
            elif isinstance(event, Collective):
                last.collectives[event] += 1
            elif event[0] not in held:
                serial, size = event
                change = size - now.get(serial, 0)
                now[serial] = size
                last.change = tuple(map(add, last.change, (0 if serial in gradients else change, change)))
                last.most = tuple(map(max, last.most, last.change))
        return result

    def __enter__(self) -> MemoryTracker:
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._see(storage)
            return result

        # resize_ is no operation that a mode would see
        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", noted))
        # DTensor finds the shapes of results by FakeTensors of the whole size, which nobody holds
        find_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

        def unseen(*arguments: Any) -> Any:
            with self._pause:
                return find_shapes(*arguments)

        self._patches.enter_context(mock.patch.object(ShardingPropagator, find_shapes.__name__, unseen))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented  # a DTensor's operation comes again as those on its local part
        result = func(*args, **(kwargs or {}))
        if self._pause.locked():
            return result
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func, args)
        elif func is torch.ops.profiler._record_function_enter_new.default:
            self.events.append(str(args[0]))
        return result

    def _see(self, storage: torch.UntypedStorage) -> int:
        address, size = storage._cdata, storage.nbytes()
        if address not in self._live:
            self._live[address] = len(self.bytes), weakref.ref(storage, lambda _: self._gone(address))
            self.bytes.append(0)
        serial, _ = self._live[address]
        if self.bytes[serial] != size:
            self.bytes[serial] = size
            self.events.append((serial, size))
        return serial

    def _gone(self, address: int) -> None:
        self.events.append((self._live.pop(address)[0], 0))

    def _note(self, func: Any, args: Sequence[Any]) -> None:
        name = func._schema.name.partition("::")[2]
        kind = next((kind for key, kind in _KINDS.items() if key in name.replace("_", "")), None)
        if kind is not None:
            group = next((argument for argument in reversed(args) if isinstance(argument, str)), "")
            for argument in args:
                if isinstance(argument, torch.ScriptObject):
                    with suppress(RuntimeError):  # another of the call's objects, such as the reduce operation
                        group = group or str(dist.ProcessGroup.unbox(argument).group_name)
            size = max(leaf.numel() * leaf.itemsize for leaf in tree_leaves(args[:2]) if isinstance(leaf, Tensor))
            if name == "all_gather_into_tensor":  # the functional form is given the part alone
                size *= args[1]
            self.events.append(Collective(kind, group, size))


_PLAIN = (Tensor, nn.Parameter, FakeTensor)
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
    build: Callable[[], Model]  # the whole model, for the meta device
    optimizer: Callable[[list[Model]], torch.optim.Optimizer]
    layout: ExecutionConfig
    degrees: ParallelDims
    device_type: DeviceType
    local_batch_size: int
    passes: int  # forward and backward passes of a step
    seq_len: int

    def model(self) -> Model:
        with torch.device("meta"):
            return self.build()

    def parallelize(self, mesh: DeviceMesh, model: Model, layout: ExecutionConfig, device: str = "cpu") -> Parallelized:
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
    held = Held(*map(sum, zip(*(astuple(stage.step.held) for stage in stages), strict=True)))
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
    # Without what cannot be simulated, which the report mentions
    eager = replace(layout, parallelism=parallelism, compile=CompileConfig(), float8=Float8Config(), cpu_offload=False)
    with stand_in(global_rank=pp_rank * prod(sizes[1:]), world_size=sizes.world_size, device_type=job.device_type):
        mesh, model = build_mesh(sizes, "cpu"), job.model()
        fake = without_memory(model)
        parallel = job.parallelize(mesh, model, eager)
        with fake, FakeCollectives():
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
        for together in fsdp_param_groups(part, layout.parallelism.fsdp_blocks_per_group):
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
            if name := axes.get(collective.group):
                named[replace(collective, group=name)] += times
        stretches.append(replace(stretch, collectives=named))
    return replace(step, stretches=tuple(stretches))


def plain(axis: str, *, dp_shard: int, cp: int) -> str:
    """The axis of dp_shard and cp that has several ranks, if the other has one."""
    if axis != DP_SHARD_CP or (dp_shard > 1 and cp > 1):
        return axis
    return DP_SHARD if cp == 1 else CP


def _pipeline_ranks(job: ExplainedJob) -> list[RankProfile]:
    """From stages simulated one by one, for two microbatches, on a pipeline with one rank for each."""
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
    seen, acted = dict[Any, Stage](), list[Stage]()
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
        return [stretch for label, stretch in self._seen.items() if label.startswith(("RESHARD", "Optimizer"))]
