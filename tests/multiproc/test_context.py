"""Ranks that share every sequence compute what one process computes, with activation checkpointing too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from models import llama
from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.layout import CompileConfig, Layout, Precision
from parallelisms.mesh import ParallelismConfig, build_mesh, degrees
from parallelisms.parallelize import parallelize
from tests.multiproc.pool import Pool
from training.loss import IGNORED, cross_entropy_sum
from training.optimizer import gradient_norm

V, T, BATCH = 61, 32, 2
SIZES = llama.Config(dim=24, n_layers=3, n_heads=6, n_kv_heads=2, hidden_dim=40)
FULL = ActivationCheckpointConfig("full")
SECOND = ActivationCheckpointConfig("selective", "2")
BY_OPERATION = ActivationCheckpointConfig("selective", "op")
EVERYTHING = ActivationCheckpointConfig()


def step(layout: Layout) -> dict[str, Any]:
    """Loss and summed gradients, gathered, of a batch whose sequences have unequal numbers of targets."""
    config, world = layout.parallelism, dist.get_world_size()
    chosen = degrees(config, world)
    with torch.device("meta"):
        model = llama.build(SIZES, vocab_size=V, max_seq_len=T)
    parallel = parallelize(
        model,
        build_mesh(chosen, "cpu"),
        cross_entropy_sum,
        layout,
        local_batch_size=BATCH // chosen.data_parallel,
        seq_len=T,
        device=torch.device("cpu"),
        seed=0,
    )
    draws = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, V, (BATCH, T), generator=draws)
    labels = torch.randint(0, V, (BATCH, T), generator=draws)
    labels[0, :11] = IGNORED
    rows = slice(
        dp_rank := chosen.coordinate(dist.get_rank()).dp_rank, BATCH if chosen.data_parallel == 1 else dp_rank + 1
    )
    unseen = parallel.evaluate(inputs[rows], labels[rows]).clone()
    loss = parallel.forward_backward(inputs[rows], labels[rows]).clone()
    dist.all_reduce(loss)
    dist.all_reduce(unseen)
    assert torch.equal(loss, unseen)
    return {
        "loss": loss,
        "norm": gradient_norm(model.parameters()),
        "gradients": {name: p.grad.full_tensor() for name, p in model.named_parameters()},
    }


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[str, Any]:
    return pool.run(1, step, Layout())[0]


def cp(degree: int, **others: Any) -> ParallelismConfig:
    return ParallelismConfig(context_parallel_degree=degree, **others)


COMPILED = CompileConfig(enable=True, components=("model",), backend="aot_eager")
LAYOUTS = {
    "two": (2, cp(2), EVERYTHING),
    "two, full": (2, cp(2, fsdp_reshard_after_forward="never"), FULL),
    "two, by operation": (2, cp(2), BY_OPERATION),
    "two, one piece each, every second block": (2, cp(2, context_parallel_load_balancer="none"), SECOND),
    "four": (4, cp(4), BY_OPERATION),
    "four, one piece each": (4, cp(4, context_parallel_load_balancer="none"), EVERYTHING),
    "two, and two shards": (4, cp(2, data_parallel_shard_degree=2), FULL),
    "two, and two copies": (4, cp(2, data_parallel_replicate_degree=2), BY_OPERATION),
    "two, and two parts of each matrix": (4, cp(2, tensor_parallel_degree=2), BY_OPERATION),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_one_process(pool: Pool, alone: dict, name: str) -> None:
    world, parallelism, checkpointing = LAYOUTS[name]
    for result in pool.run(world, step, Layout(parallelism, checkpointing)):
        for parameter, value in alone["gradients"].items():
            error = (result["gradients"][parameter] - value).norm() / value.norm()
            assert error <= 1e-5, f"{parameter}: {error:.1e}"
        torch.testing.assert_close(result["loss"], alone["loss"], rtol=1e-5, atol=0)
        torch.testing.assert_close(result["norm"], alone["norm"], rtol=1e-5, atol=0)


def test_compiled_blocks_see_the_collectives(pool: Pool, alone: dict) -> None:
    for result in pool.run(2, step, Layout(cp(2), BY_OPERATION, COMPILED)):
        for parameter, value in alone["gradients"].items():
            error = (result["gradients"][parameter] - value).norm() / value.norm()
            assert error <= 1e-5, f"{parameter}: {error:.1e}"


def test_bf16_gradients_are_near(pool: Pool, alone: dict) -> None:
    layout = Layout(cp(2), BY_OPERATION, precision=Precision(compute=torch.bfloat16))
    reference = torch.cat([g.flatten() for g in alone["gradients"].values()])
    for result in pool.run(2, step, layout):
        whole = torch.cat([g.flatten() for g in result["gradients"].values()])
        assert (whole - reference).norm() / reference.norm() < 0.03
