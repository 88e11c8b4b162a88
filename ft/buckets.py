"""Layout of gradients while they are reduced over replica groups: buckets, the order in which they are sent, and their memory.

The order is that in which a backward completes gradients: the parameter that was registered last comes first. A bucket holds gradients of
one dtype on one device. The last one is fp32 and ends in the tail (gradients.py), whose values are known only after all other buckets are
sent; before the tail it has small gradients, whose delay costs nothing. `fingerprint`: digests of the layout, which groups compare.

Buffer sets are filled with zeros when they are made, so that no step waits for page faults, and used in turn: while a step's sums are in
`.grad`, the next step's are written into the other set. The thread that ends an abandoned process group returns its attempt's buffers, so
the pool is thread-safe.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ft.device import streams_of
from ft.process_groups import shared as shared_memory

ALIGN_BYTES = 64  # alignment of a gradient in its bucket: a cache line, and enough for vector instructions and NCCL
# most elements of the tail, which has one per slot, two per group (config.MAX_SLOTS), and a few more
TAIL_ELEMENTS = 1 << 15
BUCKET_BYTES = 25 << 20  # most bytes of a bucket of several gradients
LAST_BUCKET_GRADIENT_BYTES = 64 << 10  # most bytes of a gradient in the tail's bucket
LAST_BUCKET_BYTES = 1 << 20  # most bytes of all gradients in it
QUANTIZED_GRADIENT_BYTES = 4 << 10  # in place of LAST_BUCKET_GRADIENT_BYTES where all other buckets are quantized
IN_PLACE_BYTES = 1 << 20  # fewest bytes of a gradient reduced in place: a smaller one's message costs more than a copy
KEPT_SETS = 2  # buffer sets that are kept; more exist while an abandoned process group or held sums use one

BufferKind = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class Bucket:
    """Elements `start` to `stop` of the buffer of its kind. `members`: indices of gradients. `in_place`: one gradient, reduced in place."""

    kind: BufferKind
    members: tuple[int, ...]
    start: int
    stop: int
    in_place: bool = False


class BucketLayout:
    """The split of gradients into buckets. `tensors`: this rank's shard of each parameter, in the order of registration. `in_place`: reduce
    large gradients in place. `device`: that of the tail if there are no parameters. `quantized`: quantize all buckets except for the last.

    `buckets`: in the order of sending; the last ends in the tail. `starts`: each gradient's offset in its kind's buffer (`sizes`)."""

    def __init__(
        self, tensors: Sequence[Tensor], *, bucket_bytes: int, in_place: bool, device: torch.device, quantized: bool
    ) -> None:
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.sizes: dict[BufferKind, int] = {}
        device = tensors[0].device if tensors else device
        last_bucket_params: list[int] = []  # small parameters, preferably those whose gradients are complete last
        most_bytes = QUANTIZED_GRADIENT_BYTES if quantized else LAST_BUCKET_GRADIENT_BYTES
        left_bytes = LAST_BUCKET_BYTES
        for index, tensor in enumerate(tensors):
            small = tensor.nbytes <= min(most_bytes, left_bytes)
            if small and tensor.dtype == torch.float32 and tensor.device == device:
                last_bucket_params.insert(0, index)
                left_bytes -= tensor.nbytes
        filling: dict[BufferKind, list[int]] = {}
        for index in reversed(range(len(tensors))):
            tensor = tensors[index]
            kind = (tensor.dtype, tensor.device)
            if index in last_bucket_params:
                continue
            if in_place and tensor.nbytes >= IN_PLACE_BYTES:
                self._add_bucket([index], tensors, kind, in_place=True)
                continue
            members = filling.setdefault(kind, [])
            if members and sum(tensors[i].nbytes for i in members) + tensor.nbytes > bucket_bytes:
                self._add_bucket(members, tensors, kind)
                members.clear()
            members.append(index)
        for kind, members in filling.items():
            self._add_bucket(members, tensors, kind)
        tail: BufferKind = (torch.float32, device)
        self._add_bucket(last_bucket_params, tensors, tail)
        self.sizes[tail] += TAIL_ELEMENTS
        kinds = list(self.sizes)
        plan = [(bucket.members, kinds.index(bucket.kind), bucket.start, bucket.in_place) for bucket in self.buckets]
        self.fingerprint = (
            ("gradient shapes", short_digest([tuple(tensor.shape) for tensor in tensors])),
            ("gradient dtypes", short_digest([str(tensor.dtype) for tensor in tensors])),
            ("gradient buckets", short_digest((plan, "8 bits") if quantized else plan)),
        )

    def _add_bucket(
        self, members: Sequence[int], tensors: Sequence[Tensor], kind: BufferKind, *, in_place: bool = False
    ) -> None:
        align = ALIGN_BYTES // kind[0].itemsize
        start = place = self.sizes.setdefault(kind, 0)
        for index in members:
            self.bucket_of[index] = len(self.buckets)
            if not in_place:
                self.starts[index] = place
                place += -(-tensors[index].numel() // align) * align
        self.sizes[kind] = place
        self.buckets.append(Bucket(kind, tuple(members), start, place, in_place))


def short_digest(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


class GradBuffers:
    """One buffer set. `buckets`: the memory of each bucket, that of the last one with the whole tail. `shards`: by a gradient's index, its
    place in a bucket: this group's gradient until the all-reduce, then the sum; `gradients`: the same memory in the form of `.grad` (a
    DTensor if the parameter is one). Neither has gradients reduced in place."""

    def __init__(self, layout: BucketLayout, parameters: Sequence[nn.Parameter], *, shared: bool) -> None:
        flat = {kind: zeros(size, *kind, shared=shared) for kind, size in layout.sizes.items()}
        *most, last = layout.buckets
        self.buckets = [flat[bucket.kind][bucket.start : bucket.stop] for bucket in most]
        self.buckets.append(flat[last.kind][last.start :])
        self.addresses = {memory.untyped_storage().data_ptr() for memory in flat.values()} - {0}
        self.shards: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        for index, start in layout.starts.items():
            local = to_local(parameters[index].detach())
            self.shards[index] = flat[local.dtype, local.device][start : start + local.numel()].view(local.shape)
            self.gradients[index] = dtensor_like(parameters[index], self.shards[index])


class BufferPool:
    """A pool of single buffers by size. A buffer that stays unused for a whole step is freed. Thread-safe."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._lock = threading.Lock()
        # by size, dtype and device; each with the event of its last use
        self._returned_this_step: dict[tuple[Any, ...], list[tuple[Tensor, Any]]] = {}
        self._returned_last_step: dict[tuple[Any, ...], list[tuple[Tensor, Any]]] = {}

    def take(self, like: Tensor) -> Tensor:
        """Returns a contiguous, uninitialised tensor of the shape, dtype and device of `like`, for the current stream."""
        key = (like.numel(), like.dtype, like.device)
        with self._lock:
            for free in (self._returned_last_step, self._returned_this_step):
                if buffers := free.get(key):
                    buffer, used = buffers.pop()
                    if used is not None:
                        streams_of(like.device).current_stream(like.device).wait_event(used)
                    return buffer.view(like.shape)
        return zeros(like.numel(), like.dtype, like.device, shared=self._shared).view(like.shape)

    def give(self, buffer: Tensor, used: Any = None) -> None:
        """Returns a buffer. `used`: event after its last use, which may still be queued on a stream; None: nothing is queued."""
        with self._lock:
            key = (buffer.numel(), buffer.dtype, buffer.device)
            self._returned_this_step.setdefault(key, []).append((buffer, used))

    def step_done(self) -> None:
        with self._lock:
            self._returned_last_step, self._returned_this_step = self._returned_this_step, {}


def zeros(count: int, dtype: torch.dtype, device: torch.device, *, shared: bool) -> Tensor:
    """Returns a tensor of `count` zeros. `shared`: in memory that a child process can map."""
    if shared:
        return shared_memory.empty(count, dtype, device).zero_()
    return torch.zeros(count, dtype=dtype, device=device)


def to_local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, any other tensor itself."""
    if hasattr(tensor, "to_local"):  # a DTensor, whose module takes a second to import
        with torch.no_grad():
            return tensor.to_local()
    return tensor


def dtensor_like(parameter: Any, local: Tensor) -> Tensor:
    """Returns `local`, as a DTensor over the same memory if the parameter is one."""
    if not hasattr(parameter, "placements"):
        return local
    from torch.distributed.tensor import DTensor

    with torch.no_grad():
        if local.device.type != parameter.device_mesh.device_type:
            # of parameters that are offloaded to host memory: from_local would return a copy on the mesh's device
            return DTensor(local, parameter._spec, requires_grad=False)
        shape, stride = parameter.shape, torch.empty(parameter.shape, device="meta").stride()
        return DTensor.from_local(
            local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
        )
