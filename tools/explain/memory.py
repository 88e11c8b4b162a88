"""Memory and messages of one rank's step, counted operation by operation.

`stand_in` makes a rank without memory, devices or other ranks: tensors without memory are torch's FakeTensors, other ranks its "fake"
process group, which answers every collective at once. `measure` lets it step, or a real rank. What runs is the product's own parallelize(),
with FSDP, DTensor and autograd; so what is kept, gathered, computed again and freed is what a real rank keeps and frees.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from operator import add
from typing import Any, Literal, cast
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models import ops
from models.contract import Model
from parallelisms.parallelize import Parallelized

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

    def __add__(self, other: Held) -> Held:
        return Held(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass
class Stretch:
    """Changes from one mark to the next. Pairs of bytes: what is neither gradient nor held; the same with gradients."""

    label: str = ""
    change: tuple[int, int] = (0, 0)  # from its beginning to its end
    most: tuple[int, int] = (0, 0)  # above its beginning, at one instant
    collectives: Counter[Collective] = field(default_factory=Counter)


@dataclass(frozen=True)
class MeasuredStep:
    """A step of one rank."""

    held: Held
    stretches: tuple[Stretch, ...]  # in order
    labels: tuple[str, ...]  # what FSDP and the pipeline said they do, in order


def join(stretches: Iterable[Stretch]) -> Stretch:
    """One after the other as one."""
    whole = Stretch()
    for stretch in stretches:
        whole.most = _pairwise(max, whole.most, _pairwise(add, whole.change, stretch.most))
        whole.change = _pairwise(add, whole.change, stretch.change)
        whole.collectives += stretch.collectives
    return whole


def _pairwise(function: Callable[[int, int], int], a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return function(a[0], b[0]), function(a[1], b[1])


# Without memory, without ranks


@contextmanager
def stand_in(*, global_rank: int, world_size: int, device_type: DeviceType) -> Iterator[None]:
    """Makes this process `global_rank` of `world_size` ranks that do not exist. The default process group must be free. All tensors are on
    a "cpu", whatever `device_type`: FSDP would ask a CUDA device for streams."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    store = FakeStore()
    dist.init_process_group("fake", rank=global_rank, world_size=world_size, store=store)
    try:
        # CUDA's norm and attention keep what their fused kernels keep; a CPU's norm would keep several fp32 copies of its input. Functions
        # and no TorchFunctionMode, which would not be there when the backward computes a block again.
        cuda = mock.patch.multiple(F, rms_norm=_FusedRMSNorm.apply, scaled_dot_product_attention=_attention)
        kernels: AbstractContextManager[Any] = ops.walking(FakeTensor) if device_type == "cpu" else cuda
        with kernels:
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


class Others(TorchDispatchMode):
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


# The ruler


def measure(
    parallel: Parallelized,
    make_optimizer: Callable[[list[Model]], torch.optim.Optimizer],
    microbatches: Sequence[tuple[Tensor, Tensor]],
) -> MeasuredStep:
    """One step over `microbatches`: forward, backward, and the optimizer's update with the making of its state."""
    gc.collect()  # it frees what lies in cycles at moments of its own: without it two equal steps count the same
    with ExitStack() as stack, Ruler() as ruler:
        stack.callback(gc.enable if gc.isenabled() else gc.disable)
        gc.disable()
        optimizer = make_optimizer(parallel.parts)
        parameters = [p for part in parallel.parts for p in part.parameters()]
        for inputs, targets in microbatches:
            parallel.forward_backward(inputs, targets)
        gradients = ruler.serials(p.grad for p in parameters)
        optimizer.step()
        optimizer.zero_grad()
        # only now: the first step moves shards into padded storages
        tensors = ruler.serials([*parameters, *(buffer for part in parallel.parts for buffer in part.buffers())])
        states = ruler.serials(tree_leaves([optimizer.state[p] for p in parameters]))
        held = Held(*(sum(ruler.bytes[serial] for serial in serials) for serials in (tensors, gradients, states)))
    stretches = ruler.stretches(gradients, tensors | states)
    labels = tuple(event for event in ruler.events if isinstance(event, str))
    return MeasuredStep(held, tuple(stretches), labels)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Ruler(TorchDispatchMode):
    """Notes when a storage comes, changes its size, or goes, and every collective. Memory inside of an operation is not seen."""

    def __init__(self) -> None:
        super().__init__()
        # a storage's serial and bytes from now on; or a label
        self.events: list[tuple[int, int] | Collective | str] = []
        self._serials: dict[int, int] = {}  # address of a live storage: its serial
        self.bytes: list[int] = []  # by serial, when it was last alive
        self._watches: dict[int, weakref.ref[Any]] = {}  # by address
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
                last.change = _pairwise(add, last.change, (0 if serial in gradients else change, change))
                last.most = _pairwise(max, last.most, last.change)
        return result

    def __enter__(self) -> Ruler:
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._see(storage)
            return result

        # resize_ is no operation that a mode would see
        self._patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", noted))
        # DTensor finds the shapes of results by FakeTensors of the whole size, which nobody holds; this is what it enters then
        self._patches.enter_context(mock.patch.object(ShardingPropagator, "_fake_mode_lock", self._pause))
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
        serial = self._serials.get(address)
        if serial is None:
            serial = self._serials[address] = len(self.bytes)
            self.bytes.append(0)
            self._watches[address] = weakref.ref(storage, lambda _: self._gone(address))
        if self.bytes[serial] != size:
            self.bytes[serial] = size
            self.events.append((serial, size))
        return serial

    def _gone(self, address: int) -> None:
        self.events.append((self._serials.pop(address), 0))
        del self._watches[address]

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
