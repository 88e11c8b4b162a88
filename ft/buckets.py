"""Layout of gradients while they are summed: bucket, piece of memory, and the order in which buckets go.

Flow: gradients.py asks for the layout once, of all parameters it was given; grad_buffers.py makes memory of it; what goes over the wire is
one Bucket after the other. Groups that differ in any of this would add apples to pears, so `shape` names it for the first quorum.

The order is that in which a backward completes gradients: the parameter that was registered last comes first. A bucket holds gradients of
one dtype on one device. The last one is fp32 and ends in the tail, which is known only when all else has gone: with the tail ride
parameters so small that their wait costs nothing, or none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

ALIGN_BYTES = 64  # where a gradient begins: a cache line, and more than any vector instruction or NCCL wants
TAIL_ELEMENTS = 1 << 14  # room for the tail: a slot per group, and then some
BUCKET_BYTES = 25 << 20  # what travels together at most, unless a gradient is larger
RIDER_BYTES = 64 << 10  # a gradient may ride with the tail up to this size
RIDERS_BYTES = 1 << 20  # and all of them up to that
FEW_BYTES = 4 << 10  # in place of RIDER_BYTES where all but riders are quantised: what costs a thin link nothing either
ALONE_BYTES = 1 << 20  # in place, from this size on: below, a message of its own costs more than the copy

Kind = tuple[torch.dtype, torch.device]


@dataclass(frozen=True)
class Bucket:
    """Elements `start` to `stop` of the memory of its kind; `members`: parameters by number. `in_place`: one gradient, reduced where
    it is."""

    kind: Kind
    members: tuple[int, ...]
    start: int
    stop: int
    in_place: bool = False


@dataclass
class BucketLayout:
    """`buckets`: the last one ends in the tail. `starts`: by parameter, where its gradient begins in the memory of its kind. `sizes`:
    elements of each kind of memory."""

    buckets: list[Bucket] = field(default_factory=list)
    bucket_of: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    sizes: dict[Kind, int] = field(default_factory=dict)
    shape: tuple[tuple[str, str], ...] = ()

    def close(self, members: Sequence[int], tensors: Sequence[Tensor], kind: Kind, *, in_place: bool = False) -> None:
        """Makes them the next bucket."""
        align = ALIGN_BYTES // kind[0].itemsize
        start = place = self.sizes.setdefault(kind, 0)
        for index in members:
            self.bucket_of[index] = len(self.buckets)
            if not in_place:
                self.starts[index] = place
                place += -(-tensors[index].numel() // align) * align
        self.sizes[kind] = place
        self.buckets.append(Bucket(kind, tuple(members), start, place, in_place))


def lay_out(
    tensors: Sequence[Tensor], *, bucket_bytes: int, in_place: bool, device: torch.device, quantized: bool = False
) -> BucketLayout:
    """`tensors`: what this rank holds of each parameter, in the order of registration. `in_place`: large gradients need no memory of
    ours. `device`: of the tail if there are no parameters. `quantized`: all buckets but the last are (quantized.py)."""
    layout = BucketLayout()
    device = tensors[0].device if tensors else device
    last_bucket_params: list[int] = []  # small ones, whose gradients are complete last
    most_bytes, left_bytes = FEW_BYTES if quantized else RIDER_BYTES, RIDERS_BYTES
    for index, tensor in enumerate(tensors):
        small = tensor.nbytes <= min(most_bytes, left_bytes)
        if small and tensor.dtype == torch.float32 and tensor.device == device:
            last_bucket_params.insert(0, index)
            left_bytes -= tensor.nbytes
    filling: dict[Kind, list[int]] = {}
    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        kind = (tensor.dtype, tensor.device)
        if index in last_bucket_params:
            continue
        if in_place and tensor.nbytes >= ALONE_BYTES:
            layout.close([index], tensors, kind, in_place=True)
            continue
        members = filling.setdefault(kind, [])
        if members and sum(tensors[i].nbytes for i in members) + tensor.nbytes > bucket_bytes:
            layout.close(members, tensors, kind)
            members.clear()
        members.append(index)
    for kind, members in filling.items():
        if members:
            layout.close(members, tensors, kind)
    tail: Kind = (torch.float32, device)
    layout.close(last_bucket_params, tensors, tail)
    layout.sizes[tail] += TAIL_ELEMENTS
    kinds = list(layout.sizes)
    plan = [(bucket.members, kinds.index(bucket.kind), bucket.start, bucket.in_place) for bucket in layout.buckets]
    layout.shape = (
        ("gradient shapes", _digest([tuple(tensor.shape) for tensor in tensors])),
        ("gradient dtypes", _digest([str(tensor.dtype) for tensor in tensors])),
        ("gradient buckets", _digest((plan, "8 bits") if quantized else plan)),
    )
    return layout


def _digest(what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]
