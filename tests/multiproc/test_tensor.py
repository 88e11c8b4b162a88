"""Ranks that share every matrix and the sequence compute what one process computes: initial values, loss, gradients, norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from models import llama
from parallelisms.layout import CompileConfig, Layout, Precision
from parallelisms.mesh import ParallelismConfig, build_mesh, degrees
from parallelisms.parallelize import parallelize
from tests.multiproc.pool import Pool
from training.loss import IGNORED, cross_entropy_sum
from training.optimizer import gradient_norm

T, BATCH = 16, 4
SIZES = llama.Config(dim=24, n_layers=2, n_heads=4, n_kv_heads=4, hidden_dim=40)
ALONE = ParallelismConfig()


@dataclass(frozen=True)
class Case:
    """One way to compute the same."""

    parallelism: ParallelismConfig = ALONE
    vocab: int = 61
    chunk_tokens: int = 0
    loss: str = "ours"
    microbatches: int = 1
    dtype: torch.dtype = torch.float32
    compile: bool = False


def plain_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """As a user may write one: of whole logits."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def step(case: Case) -> dict[str, Any]:
    """Initial values, and what a step and a look at a batch of unequal sequences give, gathered."""
    with torch.device("meta"):
        model = llama.build(SIZES, vocab_size=case.vocab, max_seq_len=T)
    layout = Layout(
        case.parallelism,
        compile=CompileConfig(case.compile, backend="aot_eager"),
        precision=Precision(compute=case.dtype),
        loss_chunk_tokens=case.chunk_tokens,
    )
    shape = degrees(case.parallelism, dist.get_world_size())
    parallel = parallelize(
        model,
        build_mesh(shape, "cpu"),
        {"ours": cross_entropy_sum, "plain": plain_loss}[case.loss],
        layout,
        local_batch_size=BATCH,
        seq_len=T,
        device=torch.device("cpu"),
        seed=0,
    )
    initial = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    held = sum(p.to_local().numel() for p in model.parameters())
    inputs, labels = batch(case.vocab)
    here = (
        slice(None, None)
        if shape.data_parallel == 1
        else rows(shape.coordinate(dist.get_rank()).dp_rank, shape.data_parallel)
    )
    seen = parallel.evaluate(inputs[here], labels[here])
    assert all(p.grad is None for p in model.parameters())
    loss = torch.zeros(())
    for x, y in zip(inputs[here].chunk(case.microbatches), labels[here].chunk(case.microbatches), strict=True):
        loss += parallel.forward_backward(x, y)
    for value in (loss, seen):
        dist.all_reduce(value)
    norm = gradient_norm(model.parameters())
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return {"initial": initial, "loss": loss, "seen": seen, "norm": norm, "gradients": gradients, "held": held}


def rows(dp_rank: int, dp_size: int) -> slice:
    return slice(dp_rank * BATCH // dp_size, (dp_rank + 1) * BATCH // dp_size)


def batch(vocab: int) -> tuple[Tensor, Tensor]:
    """One sequence has no target at all, and the last token of the vocabulary is one."""
    draws = torch.Generator().manual_seed(1)
    inputs, labels = (torch.randint(0, vocab, (BATCH, T), generator=draws) for _ in range(2))
    labels[0], labels[1, :5], labels[2, 3] = IGNORED, IGNORED, vocab - 1
    return inputs, labels


@pytest.fixture(scope="module")
def alone(pool: Pool) -> dict[int, dict[str, Any]]:
    return {vocab: pool.run(1, step, Case(vocab=vocab))[0] for vocab in (61, 62, 64, 259)}


def cut(**keys: Any) -> ParallelismConfig:
    return ParallelismConfig(**{f"{key}_degree": value for key, value in keys.items()})


TP2, TP4 = cut(tensor_parallel=2), cut(tensor_parallel=4)
TP2_SHARD2 = cut(tensor_parallel=2, data_parallel_shard=2)
TP2_COPIES2 = cut(tensor_parallel=2, data_parallel_replicate=2)
GATHERED = ParallelismConfig(tensor_parallel_degree=2, disable_loss_parallel=True)
CASES = {
    "tp2": (2, Case(TP2)),
    "tp2-chunks": (2, Case(TP2, chunk_tokens=7)),
    "tp2-gathered": (2, Case(GATHERED)),
    "tp2-gathered-chunks": (2, Case(GATHERED, chunk_tokens=7)),
    "tp2-another-loss": (2, Case(TP2, loss="plain")),
    "tp2-even": (2, Case(TP2, vocab=64, chunk_tokens=16, microbatches=2)),
    "tp2-compiled": (2, Case(TP2, chunk_tokens=16, compile=True)),
    "tp4": (4, Case(TP4)),
    "tp4-259-chunks": (4, Case(TP4, vocab=259, chunk_tokens=5)),
    "tp2-shard2": (4, Case(TP2_SHARD2, microbatches=2)),
    "tp2-shard2-259": (4, Case(TP2_SHARD2, vocab=259, chunk_tokens=9)),
    "tp2-shard2-even": (4, Case(TP2_SHARD2, vocab=62)),
    "tp2-copies2": (4, Case(TP2_COPIES2, chunk_tokens=9)),
    "chunks": (1, Case(chunk_tokens=7)),
    "chunks-another-loss": (1, Case(chunk_tokens=7, loss="plain")),
}


@pytest.mark.parametrize("name", CASES)
def test_shared_matrices_give_what_one_process_gives(pool: Pool, alone: dict[int, dict[str, Any]], name: str):
    world, case = CASES[name]
    expected = alone[case.vocab]
    results = pool.run(world, step, case)
    for result in results:
        for parameter, value in expected["initial"].items():
            assert torch.equal(result["initial"][parameter], value), parameter
        for parameter, value in expected["gradients"].items():
            error = (result["gradients"][parameter] - value).norm() / value.norm()
            assert error <= 1e-5, f"{parameter}: {error:.1e}"
        for scalar in ("loss", "seen", "norm"):
            torch.testing.assert_close(result[scalar], expected[scalar], rtol=1e-5, atol=0)
    # Of the matrices each rank holds its share, of the norms the whole on each tensor-parallel rank
    norms = (2 * SIZES.n_layers + 1) * SIZES.dim
    shares = degrees(case.parallelism, world)
    matrices = shares.dp_replicate * (expected["held"] - norms)
    assert sum(result["held"] for result in results) == matrices + shares.dp_replicate * shares.tp * norms


@pytest.mark.parametrize(("chunk_tokens", "disable_loss_parallel"), [(0, False), (7, False), (7, True)])
def test_bf16_gradients_are_near(pool: Pool, alone: dict, chunk_tokens: int, disable_loss_parallel: bool):
    layout = ParallelismConfig(tensor_parallel_degree=2, disable_loss_parallel=disable_loss_parallel)
    for result in pool.run(2, step, Case(layout, chunk_tokens=chunk_tokens, dtype=torch.bfloat16)):
        for parameter, value in alone[61]["gradients"].items():
            error = (result["gradients"][parameter] - value).norm() / value.norm()
            assert error <= 0.03, f"{parameter}: {error:.1e}"
