"""The layout of gradients: buckets, values that are sent with the tail, and the description of a difference between two layouts."""

from __future__ import annotations

from typing import cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ft.buckets import IN_PLACE_BYTES, LAST_BUCKET_GRADIENT_BYTES, BucketLayout, dtensor_like

CPU = torch.device("cpu")


def layout_of(tensors: list[Tensor], bucket_bytes: int = 1 << 20, in_place: bool = False):
    return BucketLayout(tensors, bucket_bytes=bucket_bytes, in_place=in_place, device=CPU, quantized=False)


@given(
    sizes=st.lists(
        st.tuples(st.integers(0, 400_000), st.sampled_from([torch.float32, torch.bfloat16, torch.float64])), max_size=30
    ),
    bucket_bytes=st.integers(1, 4 << 20),
    in_place=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_gradient_has_a_place_of_its_own(sizes: list[tuple[int, torch.dtype]], bucket_bytes: int, in_place: bool):
    tensors = [torch.empty(size, dtype=dtype, device="meta") for size, dtype in sizes]
    layout = layout_of(tensors, bucket_bytes, in_place)
    members = [index for bucket in layout.buckets for index in bucket.members]
    assert sorted(members) == list(range(len(tensors)))
    ends = dict.fromkeys(layout.sizes, 0)
    for number, bucket in enumerate(layout.buckets):
        assert bucket.start >= ends[bucket.kind]
        place = bucket.start
        for index in bucket.members:
            assert layout.bucket_of[index] == number and tensors[index].dtype == bucket.kind[0]
            if bucket.in_place:
                assert in_place and len(bucket.members) == 1 and tensors[index].nbytes >= IN_PLACE_BYTES
                continue
            assert layout.starts[index] >= place and layout.starts[index] * bucket.kind[0].itemsize % 64 == 0
            place = layout.starts[index] + tensors[index].numel()
        assert place <= bucket.stop <= layout.sizes[bucket.kind]
        ends[bucket.kind] = bucket.stop
        assert list(bucket.members) == sorted(bucket.members, reverse=True)
        held = sum(tensors[index].nbytes for index in bucket.members)
        assert bucket is layout.buckets[-1] or len(bucket.members) == 1 or held <= bucket_bytes
    assert layout.buckets[-1].kind[0] == torch.float32
    assert all(tensors[index].nbytes <= LAST_BUCKET_GRADIENT_BYTES for index in layout.buckets[-1].members)
    assert sum(tensors[index].nbytes for index in layout.buckets[-1].members) <= 1 << 20


def test_a_difference_has_a_name():
    def differs(tensors: list[Tensor], **options: object) -> list[str]:
        ours = layout_of([torch.zeros(300, 300), torch.zeros(400_000)])
        theirs = layout_of(tensors, **options)  # type: ignore[arg-type]
        return [name for (name, a), (_, b) in zip(ours.fingerprint, theirs.fingerprint, strict=True) if a != b]

    same = [torch.zeros(300, 300), torch.zeros(400_000)]
    assert differs(same) == []
    assert differs([torch.zeros(600, 150), torch.zeros(400_000)]) == ["gradient shapes"]
    assert differs([same[0], same[1].double()]) == ["gradient dtypes", "gradient buckets"]
    assert differs(same, bucket_bytes=8 << 20) == ["gradient buckets"]
    assert differs(same, in_place=True) == ["gradient buckets"]


def test_gradients_of_offloaded_parameters_are_the_memory_that_is_reduced():
    """The mesh is of another device than the shards, as with training.enable_cpu_offload."""
    mesh, shard = DeviceMesh("meta", [0], _init_backend=False, _rank=0), torch.ones(4, 3)
    parameter = nn.Parameter(DTensor.from_local(shard.to("meta"), mesh, [Shard(0)], run_check=False))
    gradient = cast(DTensor, dtensor_like(parameter, shard))
    assert gradient.placements == parameter.placements
    shard.fill_(2.0)  # the sum arrives
    assert torch.equal(gradient.to_local(), torch.full((4, 3), 2.0))
