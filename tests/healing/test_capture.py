"""The capture of a state: its entries, the place of their bytes, and the same place in another group."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ft import init_optim_state
from ft.healing.capture import StagingBuffer, StateRegistry, StateView
from ft.healing.format import CHUNK_BYTES, DTYPES, FormatError, StateManifest
from tests.healing.states import WORDS, Group, equal, large


def copy_over(source: Group, joiner: Group) -> dict[str, Any]:
    """Heals without a wire: copies the source's chunks to the joiner's memory."""
    offered, into = source.view(), joiner.view()
    theirs = StateManifest.parse(offered.manifest.encode())
    give, take = offered.body(), into.body_for(theirs)
    ours, other = StagingBuffer(give), StagingBuffer(take)
    for chunk in range(theirs.chunks):
        memory = give.direct(chunk, chunk)
        data = give.read(chunk, ours) if memory is None else memory
        if (place := take.direct(chunk, chunk)) is not None:
            place[:] = data
        else:
            other.view[: len(data)] = data
            take.write(chunk, other)
    return into.values_of(theirs)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Returns a tensor of arbitrary bits, among them NaNs and their payloads."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape).numel() * dtype.itemsize
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype_bit_for_bit(dtype: str):
    def state(seed: int) -> Group:
        tensors = [random_bits(DTYPES[dtype], shape, seed + i) for i, shape in enumerate([(), (5,), (0, 3), (4, 6)])]
        tensors.append(random_bits(DTYPES[dtype], (40, 30), seed).t())  # not contiguous
        tensors.append(random_bits(DTYPES[dtype], (CHUNK_BYTES + 100,), seed)[::2])
        return Group({"x": tensors})

    source, joiner = state(1), state(100)
    values = copy_over(source, joiner)
    assert equal(values, source.values)
    assert all(ours is theirs for ours, theirs in zip(values["x"], joiner.values["x"], strict=True)), "in place"


def test_shapes_that_lie_differently_in_memory_heal_each_other():
    """Only the logical shape is part of the state; each group has strides of its own."""
    source = Group({"x": torch.randn(600, 700).t(), "y": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)})
    joiner = Group({"x": torch.zeros(700, 600), "y": torch.zeros(2, 3, 8, 8)})
    assert equal(copy_over(source, joiner), source.values)
    assert equal(
        copy_over(joiner, Group({"x": torch.zeros(600, 700).t(), "y": torch.zeros(2, 3, 8, 8)})), source.values
    )


def test_shared_storage():
    """Tied weights and views of one flat buffer are each written, the last time with the same bytes."""

    def state(fill: float) -> Group:
        flat = torch.arange(3 * WORDS) * fill
        return Group(
            {"x": {"flat": flat, "head": flat[:100], "tied": flat[WORDS : 2 * WORDS].view(1024, 256), "again": flat}}
        )

    source, joiner = state(3.0), state(0.0)
    values = copy_over(source, joiner)
    assert equal(values, source.values)
    assert values["x"]["flat"].data_ptr() == values["x"]["head"].data_ptr()


def test_large_chunks_are_the_tensors_memory():
    body = large(1, chunks=10).view().body()
    in_place = [chunk for chunk in range(body.manifest.chunks) if body.direct(chunk, chunk) is not None]
    assert in_place == list(range(1, 9))  # the first and last hold small tensors, too
    assert len(body.direct(2, 4) or b"") == 3 * CHUNK_BYTES and body.direct(0, 4) is None


def test_other_shapes_dtypes_and_names_are_refused_before_a_byte_is_written():
    source = Group({"m": {"a": torch.ones(3), "b": torch.ones(2)}})
    for other, words in (
        ({"m": {"a": torch.zeros(4), "b": torch.zeros(2)}}, r"the source has float32 \[3\], this group float32 \[4\]"),
        ({"m": {"a": torch.zeros(3).double(), "b": torch.zeros(2)}}, "m/a: the source has float32"),
        ({"m": {"a": torch.zeros(3)}}, "m/b: only the source has"),
        ({"m": {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(2)}}, "m/c: only this group has"),
        ({"m": {"a": torch.zeros(3), "b": torch.zeros(2)}, "n": 1}, "not registered by both: n"),
    ):
        with pytest.raises(FormatError, match=words):
            Group(other).view().body_for(source.view().manifest)
    with pytest.raises(FormatError, match="the source cannot send its state: m/a: a set"):
        source.view().body_for(StateManifest.parse(StateView.refusal("m/a: a set").manifest.encode()))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3).to_sparse(),
        torch.zeros(1).expand(5),
        torch.zeros(2, device="meta"),
        torch.ones(2, dtype=torch.complex64).conj(),
    ],
)
def test_tensors_without_memory_of_their_own_are_refused_by_name(tensor: torch.Tensor):
    with pytest.raises(FormatError, match=r"^x/0: "):
        Group({"x": [tensor]}).view()


def test_registration():
    state = StateRegistry()
    state.register_state("model", dict, print)
    with pytest.raises(ValueError, match="registered already"):
        state.register_state("model", dict, print)
    for name in ("", "a/b"):
        with pytest.raises(ValueError, match="must not be empty"):
            state.register_state(name, dict, print)


def test_a_model_and_its_optimizer_heal_to_the_same_steps():
    """torch's own state_dicts, with whole numbers as keys; the joiner has never stepped. The next steps are the same, bit for bit."""

    def rank(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, StateRegistry]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
        state = StateRegistry()
        state.register_state("model", model.state_dict, model.load_state_dict)
        state.register_state("optimizer", optimizer.state_dict, optimizer.load_state_dict)
        return model, optimizer, state

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()

    model, optimizer, state = rank(1)
    train(model, optimizer)
    other, its_optimizer, its_state = rank(2)
    with pytest.raises(FormatError, match=r"optimizer/state/0/step: only the source .* ft\.init_optim_state"):
        its_state.view().body_for(state.view().manifest)
    init_optim_state(its_optimizer)
    offered, into = state.view(), its_state.view()
    take, give = into.body_for(offered.manifest), offered.body()
    staging = StagingBuffer(give)
    staging.view[:] = bytes(CHUNK_BYTES)
    give.read(0, staging)
    take.write(0, staging)
    its_state.load(into.values_of(offered.manifest))
    for one, its in ((model, optimizer), (other, its_optimizer)):
        train(one, its)
    assert equal(dict(model.state_dict()), dict(other.state_dict()))
    assert equal(optimizer.state_dict()["param_groups"], its_optimizer.state_dict()["param_groups"])


MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(
    "rule", [*(getattr(torch.optim, name) for name in ["AdamW", "SGD", "Adagrad", "NAdam", "ASGD"]), MOMENTUM]
)
def test_init_optim_state_changes_nothing_that_follows(rule: Callable[..., torch.optim.Optimizer]):
    def steps(first: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(5))
        optimizer = rule([weight], lr=0.1, weight_decay=0.1)
        if first:
            init_optim_state(optimizer)
            assert weight.grad is None and weight.detach().eq(1).all() and optimizer.param_groups[0]["lr"] == 0.1
            assert optimizer.param_groups[0]["weight_decay"] == 0.1
        for _ in range(3):
            weight.grad = torch.arange(5.0)
            optimizer.step()
        return weight.detach()

    assert equal(steps(True), steps(False))


def test_only_local_shards_of_dtensors(tmp_path: Any):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        source = Group({"x": [distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])]})
        joiner = Group({"x": [distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])]})
        values = copy_over(source, joiner)
        assert isinstance(values["x"][0], DTensor) and values["x"][0] is joiner.values["x"][0]
        assert equal(joiner.values["x"][0].to_local(), torch.arange(12.0).view(4, 3))
    finally:
        dist.destroy_process_group()


def test_staging_leaves_no_old_bytes_between_tensors():
    """Bytes between tensors are zero, whatever the buffer held: equal states have equal bytes."""
    view = Group({"x": [torch.ones(3), torch.ones(5)]}).view()
    body = view.body()
    staging = StagingBuffer(body)
    staging.bytes.fill_(255)
    data = bytes(body.read(0, staging))
    assert data == torch.ones(3).numpy().tobytes().ljust(64, b"\0") + torch.ones(5).numpy().tobytes().ljust(64, b"\0")


def test_a_body_waits_for_what_was_queued_at_its_snapshot():
    """A joiner's body is made by the thread that fetches, behind the forward that has been queued since."""
    view = replace(Group({"x": [torch.ones(3)]}).view(), ready="recorded then")
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(view.body).result().ready == "recorded then"
        assert threads.submit(view.body_for, view.manifest).result().ready == "recorded then"


def test_a_thread_that_copies_is_on_the_devices_own_gpu_first():
    """CUDA begins each thread with device 0, and would pin memory in a context there."""
    done: list[object] = []

    def allocate(count: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        done.append(("pinned", pin_memory))
        return torch.empty(count, dtype=dtype)

    stream = SimpleNamespace(wait_event=done.append)
    streams = SimpleNamespace(set_device=done.append, Stream=lambda device: stream)
    body: Any = SimpleNamespace(device=torch.device("cuda", 3), ready="event")
    StagingBuffer(body, streams=streams, allocate=allocate)
    assert done == [body.device, ("pinned", True), "event"]
