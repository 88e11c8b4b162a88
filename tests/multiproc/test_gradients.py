"""Gradients over real groups: a step has the same bits whether or not its first attempt dies; FSDP's shards, hooks and DTensors."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ft.compat.process_groups import ProcessGroupDummy
from ft.gradients import Gradients
from ft.process_groups.base import ProcessGroup
from ft.process_groups.errors import ProcessGroupError
from tests.multiproc.pool import Pool
from tests.multiproc.test_process_groups import make, server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="in-process gloo needs /proc")


def digest(tensors: list[Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


# ---------------------------------------------------------------------------------------------- a retry


def steps_of(kind: str, keep: bool, dtype: torch.dtype, *, dies: bool, quantized: bool = False) -> list[str]:
    """Digests of three steps' sums. `dies`: in each step the group is lost after the backward, before the last member's gradients are all
    there, and formed anew."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 2048), nn.Linear(2048, 256)).to(dtype)
    gradients = Gradients(keep=keep, shared=kind == "baby_gloo", quantized=quantized, bucket_bytes=300_000)
    gradients.attach(model.parameters())
    group, store, rank, sums = make(kind, 30.0, 60.0), server(), dist.get_rank(), []
    for step in range(3):
        for attempt in range(1 + dies):
            group.configure(f"{store}{step}/{attempt}", rank, dist.get_world_size())
            gradients.begin_attempt(group, dist.get_world_size())
            if attempt == 0:
                model.zero_grad(set_to_none=step != 1)
                backward(model, gradients, seed=10 * step + rank, dtype=dtype)
            dist.barrier()  # who gives up at once would fail the others while they still connect
            if dies and attempt == 0:
                lose(group, gradients, launches=rank != 2)
        gradients.launch_remaining([1.0, float(rank)])
        assert gradients.wait() == (3.0, 3.0)
        gradients.deliver()
        sums.append(digest([parameter.grad for parameter in model.parameters() if parameter.grad is not None]))
        dist.barrier()
    group.abandon("the test is over")  # not waited for: now and then a thread of gloo's ends with its timeout only
    gradients.close()
    return sums


def backward(model: nn.Module, gradients: Gradients, *, seed: int, dtype: torch.dtype) -> None:
    """Runs the backward of two microbatches."""
    torch.manual_seed(seed)
    first, second = torch.randn(2, 16, 256).to(dtype)
    model(first).float().square().sum().backward()
    with gradients.last_backward():
        model(second).float().square().sum().backward()


def lose(group: ProcessGroup, gradients: Gradients, *, launches: bool) -> None:
    """Runs an attempt in which one member never launches the remaining buckets, so that no sum of the last bucket arrives."""
    if not launches:
        group.interrupt("this member is lost")
    gradients.launch_remaining([1.0, 0.0])
    dist.barrier()
    group.interrupt("a member is lost")  # as the notice does: a reset connection alone does not wake everybody
    try:
        gradients.wait()
        raise AssertionError("the sums of a lost member came")
    except ProcessGroupError:
        group.abandon("a member is lost", then=gradients.abandon())


def retried(kind: str) -> tuple[list[str], list[str], list[str]]:
    reference = steps_of(kind, False, torch.bfloat16, dies=False)
    return reference, steps_of(kind, True, torch.bfloat16, dies=False), steps_of(kind, True, torch.bfloat16, dies=True)


@pytest.mark.parametrize("kind", ["gloo", "baby_gloo"])
def test_a_step_whose_first_attempt_dies_has_the_same_bits(pool: Pool, kind: str):
    """bf16, accumulated over two microbatches, zeroed in place once; the same as reduced in place, and on every member."""
    answers = pool.run(3, retried, kind)
    assert all(answer == answers[0] for answer in answers)
    in_place, kept, died = answers[0]
    assert died == kept and len(set(kept)) == 3
    if kind == "baby_gloo":  # in this process a matrix is summed where it is, biases in other buckets: another order
        assert in_place == kept


def quantized(kind: str) -> list[list[str]]:
    return [steps_of(kind, True, torch.float32, dies=dies, quantized=True) for dies in (False, True)]


def test_sums_in_eight_bits_have_the_same_bits_after_a_death(pool: Pool):
    """The bits are the same on every member, in this process and in a child, whose memory holds the exchanged values."""
    answers = [answer for kind in ("gloo", "baby_gloo") for answer in pool.run(3, quantized, kind)]
    assert all(answer == answers[0] for answer in answers)
    unharmed, died = answers[0]
    assert died == unharmed and len(set(died)) == 3


# ---------------------------------------------------------------------------------------------- FSDP


class Counting:
    """A group that counts."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.count = group, 0

    def allreduce(self, tensors: list[Tensor]) -> Any:
        self.count += 1
        return self.group.allreduce(tensors)


def sharded() -> list[tuple[int, bool]]:
    """Two groups of two shards. Per step: buckets that went during the backward, and whether all gradients are right."""
    from torch.distributed.device_mesh import DeviceMesh  # with these a worker takes seconds to start
    from torch.distributed.fsdp import fully_shard

    rank, store = dist.get_rank(), server()
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    mine, shard = divmod(rank, 2)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(33, 47), nn.Linear(47, 33), nn.Linear(33, 5))
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(33, 47), nn.Linear(47, 33), nn.Linear(33, 5))
    mesh = DeviceMesh.from_group(groups[mine], "cpu", mesh=[2 * mine, 2 * mine + 1], mesh_dim_names=("shard",))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    gradients = Gradients(bucket_bytes=1)
    gradients.attach(model.parameters())
    between = make("gloo", 30.0, 60.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = []
    for step in range(3):
        between.configure(f"{store}{shard}/{step}", mine, 2)
        counting = Counting(between)
        gradients.begin_attempt(counting, 2)  # type: ignore[arg-type]
        optimizer.zero_grad(set_to_none=step != 1)
        whole.zero_grad()
        torch.manual_seed(step)
        inputs = torch.randn(4, 2, 6, 33)  # rank, microbatch, batch
        model(inputs[rank, 0]).square().sum().backward()
        with gradients.last_backward():
            model(inputs[rank, 1]).square().sum().backward()
        overlapped = counting.count
        if step == 2:
            dist.barrier()
            between.abandon("lost", then=gradients.abandon())
            between.configure(f"{store}{shard}/again", mine, 2)
            gradients.begin_attempt(between, 2)
        gradients.launch_remaining([1.0])
        assert gradients.wait() == (2.0,)
        gradients.deliver()
        whole(inputs.flatten(0, 2)).square().sum().backward()
        seen.append((overlapped, all(map(is_right, model.parameters(), whole.parameters()))))
        optimizer.step()
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter -= 0.01 * parameter.grad  # type: ignore[operator]
        dist.barrier()
    between.shutdown(60)
    return seen


def is_right(parameter: nn.Parameter, expected: nn.Parameter) -> bool:
    from torch.distributed.tensor import DTensor

    gradient = parameter.grad
    assert isinstance(parameter, DTensor) and isinstance(gradient, DTensor)
    assert gradient.placements == parameter.placements and gradient.device_mesh == parameter.device_mesh
    assert expected.grad is not None
    torch.testing.assert_close(gradient.full_tensor(), expected.grad, rtol=1e-4, atol=1e-4)
    return True


def test_shards_of_fsdp(pool: Pool):
    """FSDP2 calls the hooks; sums become DTensors again, and the optimizer takes them. The bound on what rides with the tail is 64 KiB, so
    all of this small model would ride: here nothing does."""
    assert pool.run(4, sharded_without_riders) == [[(6, True)] * 3] * 4


def sharded_without_riders() -> list[tuple[int, bool]]:
    from ft import buckets

    before, buckets.LAST_BUCKET_GRADIENT_BYTES = buckets.LAST_BUCKET_GRADIENT_BYTES, -1
    try:
        return sharded()
    finally:
        buckets.LAST_BUCKET_GRADIENT_BYTES = before


def partial_sum() -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(5), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(5), mesh, [Partial()])
    gradients = Gradients()
    gradients.attach([parameter])
    gradients.begin_attempt(ProcessGroupDummy(), 1)
    try:
        gradients.launch_remaining([1.0])
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def test_a_gradient_that_its_ranks_have_not_summed(pool: Pool):
    """A gradient that the group's ranks have not summed is refused: its owner would take one rank's part for the whole."""
    text = "parameter 0 of shape (5,): a gradient that is a partial sum over ranks cannot be reduced over groups"
    assert pool.run(2, partial_sum) == [text] * 2
