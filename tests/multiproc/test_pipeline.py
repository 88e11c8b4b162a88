"""Pipelines of two and four ranks compute what one process computes: every schedule, composed with FSDP, evaluation in between."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models import llama
from parallelisms.activation_checkpoint import ActivationCheckpointConfig
from parallelisms.execution import ExecutionConfig, Precision
from parallelisms.mesh import ParallelismConfig, degrees
from parallelisms.pipeline_schedule import cell_text, table
from tests.multiproc.pool import Pool
from tests.multiproc.test_layouts import on_cpu
from training.loss import IGNORED, cross_entropy_sum
from training.optimizer import gradient_norm

V, T, BATCH, CALLS = 61, 8, 8, 2  # sequences of a data-parallel rank; forward_backward is called twice
SIZES = llama.Config(dim=16, n_layers=8, n_heads=4, n_kv_heads=2, hidden_dim=24)
Setting = dict[str, Any]
NO_WEIGHTS = {"pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0}
SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "LoopedBFS": 2,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}


def build() -> llama.Llama:
    with torch.device("meta"):
        return llama.build(SIZES, vocab_size=V, max_seq_len=T)


def batch(call: int, n_sequences: int) -> tuple[Tensor, Tensor]:
    """Sequences with unequal numbers of targets, one of them without any."""
    draws = torch.Generator().manual_seed(call)
    inputs = torch.randint(0, V, (n_sequences, T), generator=draws)
    labels = torch.randint(0, V, (n_sequences, T), generator=draws)
    for row in range(n_sequences):
        labels[row, : (3 * row + call) % (T + 1)] = IGNORED
    return inputs, labels


@functools.cache
def alone(n_sequences: int) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Gradients, loss sum of the training batches and of the held-out one, from a plain model."""
    model = build().to_empty(device="cpu")
    model.init_weights(0)
    losses = []
    for call in range(CALLS):
        inputs, labels = batch(call, n_sequences)
        loss = cross_entropy_sum(model(inputs), labels)
        loss.backward()
        losses.append(loss.detach())
    inputs, labels = batch(9, n_sequences)
    with torch.no_grad():
        held_out = cross_entropy_sum(model(inputs), labels)
    return {name: p.grad for name, p in model.named_parameters()}, torch.stack(losses).sum(), held_out


def differences(settings: dict[str, Setting], dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Any]]:
    """Returns, for each setting, the modules of this rank, and their differences from one process."""
    return {label: difference(dict(setting), dtype) for label, setting in settings.items()}


def difference(setting: Setting, dtype: torch.dtype) -> dict[str, Any]:
    checkpointing = ActivationCheckpointConfig(mode=setting.pop("activation_checkpoint", "none"))
    chunk_tokens, precision = setting.pop("loss_chunk_tokens", 0), Precision(compute=dtype)
    frozen: tuple[str, ...] = setting.pop("frozen", ())
    config = ParallelismConfig(**setting)
    where = degrees(config, dist.get_world_size())
    execution = ExecutionConfig(config, checkpointing, precision=precision, loss_chunk_tokens=chunk_tokens)
    model = build()
    for name in (trained := dict(model.named_parameters())):
        if name.startswith(frozen):
            trained[name].requires_grad_(False)
    parallel = on_cpu(model, execution, batch=BATCH, seq_len=T)
    coordinate, n_sequences = where.coordinate(dist.get_rank()), BATCH * where.data_parallel
    rows = slice(coordinate.dp_rank * BATCH, (coordinate.dp_rank + 1) * BATCH)
    loss, looks = torch.zeros(()), []
    for call in range(CALLS):
        look = torch.zeros(())
        for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):  # of another size than the training's batches
            inputs, labels = batch(9, n_sequences)
            look += parallel.evaluate(inputs[rows][half], labels[rows][half])
        dist.all_reduce(look)
        looks.append(look)
        inputs, labels = batch(call, n_sequences)
        loss += parallel.forward_backward(inputs[rows], labels[rows])
    mine = torch.stack((loss, torch.zeros(())))
    dist.all_reduce(loss)
    norm = gradient_norm(p for part in parallel.parts for p in part.parameters())
    gradients, loss_alone, held_out = alone(n_sequences)
    named = [named for part in parallel.parts for named in part.named_parameters()]
    here = {name: p.grad.full_tensor().float() for name, p in named if p.grad is not None}
    assert here.keys() == {name for name, _ in named if not name.startswith(frozen)}
    whole = torch.stack([g.norm() for name, g in gradients.items() if not name.startswith(frozen)]).norm()
    return {
        "pipeline": (coordinate.dp_rank, coordinate.cp_rank, coordinate.tp_rank),
        "parts": [[name for name, _ in part.named_parameters()] for part in parallel.parts],
        "gradients": {name: float((g - gradients[name]).norm() / gradients[name].norm()) for name, g in here.items()},
        "loss": float((loss - loss_alone).abs() / loss_alone),
        "looks": [float((look - held_out).abs() / held_out) for look in looks],
        "norm": float((norm - whole).abs() / whole),
        "share": mine[0].item(),
    }


def assert_equal(results: list[dict[str, dict[str, Any]]], label: str, bound: float = 1e-5) -> None:
    """Checks the bound on the differences, and that every parameter is on exactly one rank of each pipeline."""
    everything = sorted(alone_names())
    for place in {result[label]["pipeline"] for result in results}:
        pipeline = [result[label] for result in results if result[label]["pipeline"] == place]
        names = sorted(name for one in pipeline for part in one["parts"] for name in part)
        assert names == everything, label
    for result in results:
        one = result[label]
        wrong = {name: error for name, error in one["gradients"].items() if not error <= bound}
        assert not wrong, label
        assert one["loss"] <= bound and one["norm"] <= bound and max(one["looks"]) <= bound, (label, one)


def alone_names() -> list[str]:
    return [name for name, _ in build().named_parameters()]


def pipeline(schedule: str, pp: int, **more: Any) -> Setting:
    return {"pipeline_parallel_degree": pp, "pipeline_parallel_schedule": schedule, **more}


@pytest.mark.parametrize(("world", "pp"), [(2, 2), (4, 4)])
def test_every_schedule(pool: Pool, world: int, pp: int) -> None:
    results = pool.run(world, differences, {schedule: pipeline(schedule, pp) for schedule in SCHEDULES})
    for schedule, stages in SCHEDULES.items():
        assert_equal(results, schedule)
        assert [len(result[schedule]["parts"]) for result in results] == [stages] * world
    v = results[0]["ZBVZeroBubble"]
    assert "tok_embeddings.weight" in v["parts"][0] and "output.weight" in v["parts"][1]
    assert v["share"] > 0 and all(result["ZBVZeroBubble"]["share"] == 0 for result in results[1:])


def test_frozen_stages(pool: Pool) -> None:
    """A rank without any gradient takes part in the norm."""
    first, last = ("tok_embeddings", *(f"layers.{i}." for i in range(4))), ("layers.7.", "norm", "output")
    frozen = {"first": first, "last": last, "all but the head": ("tok_embeddings", "layers", "norm")}
    settings = {
        f"{which}, {schedule}": pipeline(schedule, 2, frozen=names)
        for which, names in frozen.items()
        for schedule in ("1F1B", "ZBVZeroBubble")
    }
    results = pool.run(2, differences, settings)
    for label in settings:
        assert_equal(results, label)


@pytest.mark.timeout(240)  # seven pipelines: 46 s beside two other tests
def test_composed(pool: Pool, tmp_path: Path) -> None:
    """FSDP or DDP in each stage, checkpointing, a loss in chunks, a CSV file, splits by names and count, more stages than torch keeps
    gathered."""
    file = tmp_path / "schedule.csv"
    file.write_text("\n".join(",".join(map(cell_text, row)) for row in table("DualPipeV", 2, 4, BATCH)))
    shards, copies = {"data_parallel_shard_degree": 2}, {"data_parallel_replicate_degree": 2}
    names = [
        "tok_embeddings",
        "layers.0",
        "layers.1 layers.2",
        f"{' '.join(f'layers.{i}' for i in range(3, 8))} norm output",
    ]
    norm_apart = [
        "tok_embeddings layers.0 layers.1",
        "layers.2 layers.3 layers.4",
        "layers.5 layers.6 layers.7 norm",
        "output",
    ]
    settings = {
        "1F1B": pipeline("1F1B", 2, **shards, fsdp_reshard_after_forward="always"),
        "zero bubble": pipeline(
            "InterleavedZeroBubble", 2, **shards, pipeline_parallel_layers_per_stage=5, loss_chunk_tokens=3
        ),
        "looped": pipeline("LoopedBFS", 2, **shards, pipeline_parallel_layers_per_stage=1, **NO_WEIGHTS),
        "V": pipeline("ZBVZeroBubble", 2, **shards, activation_checkpoint="full", pipeline_parallel_microbatch_size=2),
        "V, copies": pipeline("DualPipeV", 2, **copies, module_fqns_per_model_part=names),
        "V, norm apart": pipeline("ZBVZeroBubble", 2, **shards, module_fqns_per_model_part=norm_apart),
        "CSV": pipeline("1F1B", 2, **shards, pipeline_parallel_schedule_csv=str(file)),
    }
    results = pool.run(4, differences, settings, timeout_s=200.0)
    for label in settings:
        assert_equal(results, label)
    assert [len(part) for part in results[0]["looped"]["parts"]] == [10, 9, 9, 9]


@pytest.mark.long  # the parity proof has pipelines with tensor and with context parallelism
def test_with_matrices_and_sequences_cut(pool: Pool) -> None:
    """Ranks that see the same loss count it once."""
    settings = {
        "TP": pipeline("ZBVZeroBubble", 2, tensor_parallel_degree=2),
        "CP": pipeline("DualPipeV", 2, context_parallel_degree=2),
    }
    results = pool.run(4, differences, settings, timeout_s=200.0)
    for label in settings:
        assert_equal(results, label)


def test_bf16_is_near(pool: Pool) -> None:
    """Hidden states travel in bf16; gradients are summed over microbatches in fp32, save those of weights between two halves."""
    settings = {schedule: pipeline(schedule, 2) for schedule in ("1F1B", "ZBVZeroBubble")}
    results = pool.run(2, differences, settings, torch.bfloat16)
    for label in settings:
        assert_equal(results, label, bound=0.03)
        assert max(result[label]["loss"] for result in results) < 0.003
