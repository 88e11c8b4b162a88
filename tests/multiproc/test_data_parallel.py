"""Ranks that share the batch compute what one process computes: initial values, gradients, norm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from models import llama
from parallelisms.fsdp import reshard_all
from parallelisms.layout import Layout, Precision
from parallelisms.mesh import ParallelismConfig, build_mesh, degrees
from parallelisms.parallelize import parallelize
from tests.multiproc.pool import Pool
from training.loss import IGNORED, cross_entropy_sum
from training.optimizer import gradient_norm

V, T, BATCH = 61, 16, 4
SIZES = llama.Config(
    dim=24, n_layers=2, n_heads=3, n_kv_heads=1, hidden_dim=40
)  # rows that two and three ranks cannot share evenly


def gradients(dtype: torch.dtype, parallelism: ParallelismConfig, microbatches: int) -> dict[str, Any]:
    """One step's summed gradients, gathered, with this rank's share of a batch whose sequences have unequal numbers of targets."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with torch.device("meta"):
        model = llama.build(SIZES, vocab_size=V, max_seq_len=T)
    parallel = parallelize(
        model,
        build_mesh(degrees(parallelism, world), "cpu"),
        cross_entropy_sum,
        Layout(parallelism, precision=Precision(compute=dtype)),
        local_batch_size=BATCH,
        seq_len=T,
        device=torch.device("cpu"),
        seed=0,
    )
    initial = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, V, (BATCH, T), generator=draws)
    labels = torch.randint(0, V, (BATCH, T), generator=draws)
    for row in range(BATCH):
        labels[row, : 3 * row] = IGNORED
    rows = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    loss = torch.zeros(())
    for x, y in zip(inputs[rows].chunk(microbatches), labels[rows].chunk(microbatches), strict=True):
        loss += parallel.forward_backward(x, y)
    dist.all_reduce(loss)
    norm = gradient_norm(model.parameters())
    whole = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return {"initial": initial, "loss": loss, "norm": norm, "gradients": whole}


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Any]:
    return pool.run(1, gradients, torch.float32, ParallelismConfig(), 1)[0]


LAYOUTS = {
    "one rank": (1, ParallelismConfig(fsdp_reshard_after_forward="always"), 2),
    "fsdp": (2, ParallelismConfig(), 1),
    "fsdp, kept gathered": (2, ParallelismConfig(fsdp_reshard_after_forward="never"), 2),
    "fsdp, uneven": (3, ParallelismConfig(fsdp_reshard_after_forward="always"), 1),
    "fsdp, two blocks a group": (2, ParallelismConfig(fsdp_blocks_per_group=2), 1),
    "fsdp, prefetched": (2, ParallelismConfig(fsdp_forward_prefetch=2, fsdp_backward_prefetch=2), 2),
    "hsdp": (4, ParallelismConfig(data_parallel_replicate_degree=2), 1),
    "ddp": (2, ParallelismConfig(data_parallel_replicate_degree=2), 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_one_process(pool: Pool, alone: dict, layout: str):
    world, parallelism, microbatches = LAYOUTS[layout]
    for result in pool.run(world, gradients, torch.float32, parallelism, microbatches):
        for name, value in alone["initial"].items():
            assert torch.equal(result["initial"][name], value), name  # bit for bit: no layout changes what is drawn
        for name, value in alone["gradients"].items():
            error = (result["gradients"][name] - value).norm() / value.norm()
            assert error <= 1e-5, f"{name}: {error:.1e}"
        torch.testing.assert_close(result["loss"], alone["loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(result["norm"], alone["norm"], rtol=1e-5, atol=0)


def test_bf16_gradients_are_near(pool: Pool, alone: dict):
    for result in pool.run(2, gradients, torch.bfloat16, ParallelismConfig(), 1):
        whole = torch.cat([g.flatten() for g in result["gradients"].values()])
        reference = torch.cat([g.flatten() for g in alone["gradients"].values()])
        assert (whole - reference).norm() / reference.norm() < 0.03
        assert whole.dtype == torch.float32  # accumulated and reduced in fp32


DIVISIONS = (torch.ops.aten.div, torch.ops.aten.div_)


class Divisions(TorchDispatchMode):
    """How many tensors of gradients are divided by one, which is for nothing, or by the ranks."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.factors = (1, dist.get_world_size())

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op.overloadpacket in DIVISIONS and not torch.is_tensor(args[1]) and args[1] in self.factors
        return op(*args, **(kwargs or {}))


def divisions(parallelism: ParallelismConfig) -> int:
    """Of a forward and backward."""
    with Divisions() as seen:
        gradients(torch.float32, parallelism, 1)
    return seen.count


@pytest.mark.parametrize("layout", ["one rank", "fsdp", "hsdp", "ddp"])
def test_no_gradient_is_divided(pool: Pool, layout: str) -> None:
    ranks, parallelism, _ = LAYOUTS[layout]
    assert pool.run(ranks, divisions, parallelism) == [0] * ranks


def losses_around_a_write(parallelism: ParallelismConfig) -> tuple[float, float]:
    """Nats per token of a forward without a backward, and of one after all weights have become 0."""
    with torch.device("meta"):
        model = llama.build(SIZES, vocab_size=V, max_seq_len=T)
    layout = Layout(parallelism, precision=Precision(compute=torch.float32))
    mesh = build_mesh(degrees(parallelism, dist.get_world_size()), "cpu")
    options: dict[str, Any] = {"local_batch_size": 1, "seq_len": T, "device": torch.device("cpu"), "seed": 0}
    parallel = parallelize(model, mesh, cross_entropy_sum, layout, **options)
    shards, tokens = list(model.parameters()), torch.arange(T).view(1, T)
    before = parallel.evaluate(tokens, tokens).item() / T
    reshard_all(parallel.parts)
    with torch.no_grad():
        for shard in shards:
            shard.zero_()
    return before, parallel.evaluate(tokens, tokens).item() / T


@pytest.mark.parametrize("axes", [{}, {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_that_are_written_after_a_look_are_those_of_the_next_forward(
    pool: Pool, ranks: int, axes: dict[str, int]
):
    parallelism = ParallelismConfig(fsdp_reshard_after_forward="never", **(axes if ranks == 2 else {}))
    for before, after in pool.run(ranks, losses_around_a_write, parallelism):
        assert before != pytest.approx(math.log(V), abs=1e-4) and after == pytest.approx(math.log(V), abs=1e-6)
