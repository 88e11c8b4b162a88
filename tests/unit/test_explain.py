"""--explain: the ruler on tensors whose sizes are known, the text of small jobs, and the shipped configurations of Llama 3."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn

from configs.check import check_settings
from configs.load import load
from ft.memory import memory
from models import llama
from models.contract import Model
from parallelisms.execution import ExecutionConfig, Precision
from parallelisms.mesh import ParallelismConfig
from tests.multiproc.test_explain import explained
from tests.unit.fakes import add_models
from tools.explain.command import WIDTH, explain, fault_tolerance, job_of, main, requested_ranks
from tools.explain.rank import DeviceType, ExplainedJob, MemoryTracker, Segment, join, ranks

MIB = 1 << 18  # fp32 elements
SIZES = llama.Config(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, hidden_dim=96)
V, T = 70, 64
UNEVEN = ("tok_embeddings layers.0", "layers.1 layers.2 layers.3 norm output")


def job(world_size: int, *, batch: int = 4, device_type: DeviceType = "cuda", **parallelism: object) -> ExplainedJob:
    config = ParallelismConfig(**parallelism)  # type: ignore[arg-type]
    execution = ExecutionConfig(config, precision=Precision(compute=torch.bfloat16))
    return explained(SIZES, execution, world_size, vocab_size=V, seq_len=T, batch=batch, device_type=device_type)


# The ruler


def test_the_ruler_sees_what_comes_and_goes():
    with MemoryTracker() as tracker:
        a = torch.zeros(MIB)
        b = a.view(2, -1) + 1  # a view takes nothing, the sum does
        c = b * 2
        del b
        c.untyped_storage().resize_(0)  # as FSDP frees what it has gathered
        d = torch.zeros(2 * MIB)
        gradient = torch.zeros(MIB // 2)
        del a, c, d
    [segment] = tracker.segments(gradients=tracker.serials([gradient]), resident=set())
    assert segment.peak == (3 << 20, (3 << 20) + (1 << 19))  # a, b and c; then a and d, and the gradient
    assert segment.change == (0, 1 << 19)
    [segment] = tracker.segments(gradients=set(), resident=tracker.serials([gradient]))
    assert segment.change == (0, 0)


def test_the_ruler_sees_what_autograd_keeps():
    model, x = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Tanh()), torch.zeros(512, 512)
    with MemoryTracker() as tracker:
        y = model(x).sum()
        y.backward()
    [segment] = tracker.segments(tracker.serials(p.grad for p in model.parameters()), set())
    # what tanh keeps, its gradient, and the weight's before it is laid out as the weight is; a few bytes for the sum
    assert 3 << 20 <= segment.peak[0] < (3 << 20) + 64
    assert segment.change[1] - segment.change[0] == 1 << 20  # the weight's gradient


def test_segments_join():
    up = Segment("", change=(5, 6), peak=(7, 8))
    down = Segment("", change=(-5, -6), peak=(1, 0))
    assert join([up, up, down]).peak == (12, 14)
    assert join([up, down]).change == (0, 0)


# What follows from a layout


def test_messages_are_those_of_the_formula():
    """Every group is gathered twice, except the head, which stays gathered until the backward; gradients are reduced once, in fp32."""
    [rank] = ranks(job(4))
    padded = [prod((-(-p.shape[0] // 4) * 4, *p.shape[1:])) for p in job(4).model().parameters()]
    head = padded[-1] + padded[-2]
    gathered = sum(c.bytes * n for c, n in rank.collectives.items() if c.kind == "all-gather")
    reduced = sum(c.bytes * n for c, n in rank.collectives.items() if c.kind == "reduce-scatter")
    assert gathered == 2 * (2 * sum(padded) - head)
    assert reduced == 4 * sum(padded)
    assert {c.group for c in rank.collectives} == {"dp_shard"}


def test_what_stays_is_the_parameters_times_their_bytes():
    [rank] = ranks(job(1))
    size = sum(p.numel() for p in job(1).model().parameters())
    steps = 4 * len(list(job(1).model().parameters()))
    assert rank.resident.gradients == 4 * size
    assert rank.resident.optimizer == 8 * size + steps
    assert rank.resident.parameters == 4 * (size + T * SIZES.dim // SIZES.n_heads)  # and the rotary table


def test_later_passes_find_gradients():
    [once], [often] = ranks(job(1)), ranks(replace(job(1), passes=3))
    assert once.peak <= often.peak <= once.peak + once.resident.gradients
    assert often.peak == once.resident.parameters + once.resident.optimizer + once.resident.gradients + once.activations


def frozen(wanted: ExplainedJob, *prefixes: str) -> ExplainedJob:
    """Returns the job with parameters that are not trained."""

    def build() -> Model:
        model = wanted.build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(prefixes))
        return model

    return replace(wanted, build=build)


def test_a_frozen_group_is_gathered_and_not_reduced():
    [rank] = ranks(frozen(job(2), "layers.0.", "tok_embeddings."))
    groups = rank.stages[0].groups
    assert [group.names for group in groups if not group.reduces] == ["tok_embeddings", "layers.0"]
    assert all(group.gathers for group in groups)
    sent = sum(c.bytes * n for c, n in rank.collectives.items() if c.kind == "reduce-scatter")
    assert sum(group.reduces for group in groups) == sent


def test_a_frozen_stage_does_not_stand_for_one_that_is_trained():
    parts = ("tok_embeddings", "layers.0 layers.1", "layers.2 layers.3", "norm output")
    wanted = job(4, pipeline_parallel_degree=4, module_fqns_per_model_part=parts)
    profiles = ranks(frozen(wanted, "layers.0.", "layers.1."))
    assert profiles[1].resident.gradients == 0 < profiles[2].resident.gradients


def test_fault_tolerance_takes_no_memory_for_frozen_parameters(tmp_path: Path):
    (tmp_path / "run.toml").write_text("[fault_tolerance]\nenable = true\n")
    config = load([str(tmp_path / "run.toml")])
    wanted = frozen(job(1, device_type="cpu"), "tok_embeddings.", "layers.", "norm.")
    [rank] = ranks(wanted)
    [head] = [torch.empty(kind.shape, device="meta") for kind in rank.stages[0].kinds if kind.name == "output.weight"]
    assert fault_tolerance(config, wanted)(rank) == memory([head], config.fault_tolerance, in_child=False)
    none = memory([], config.fault_tolerance, in_child=False)
    assert 0 < sum(none.values()) < sum(memory([head], config.fault_tolerance, in_child=False).values())


def test_cuda_keeps_less_of_a_norm():
    """CUDA has fused norm kernels under tensor parallelism; a CPU uses torch's unfused norm."""
    [on_cpu] = ranks(job(2, device_type="cpu", tensor_parallel_degree=2))
    [on_cuda] = ranks(job(2, device_type="cuda", tensor_parallel_degree=2))
    assert on_cuda.activations < 0.9 * on_cpu.activations
    assert on_cuda.resident == on_cpu.resident


# The text


def test_the_text_says_what_is_where():
    text = explain(job(8, pipeline_parallel_degree=2, tensor_parallel_degree=2))
    assert max(map(len, text.splitlines())) <= WIDTH
    for line in (
        "pp        2      0 4          layers: each rank has some of them",
        "rank 0 of pp  tok_embeddings, layers.0 to 1",
        "rank 1 of pp  layers.2 to 3, norm, output",
        "layers.*.feed_forward.w2.weight  32 x 96  rows: dp_shard; columns: tp  16 x 48",
        "1F1B: 4 microbatches through 2 stages on 2 ranks",
        "forward  G:all F:emb F:0 F:1",  # a pipeline gathers before the first microbatch, and reduces after the last
        "backward B:1 B:0 B:emb R:emb R:0 R:1",
    ):
        assert line in text, text
    assert "WARNINGS" in text and "fewer than 1,024 tokens" in text


def test_order_of_issue_under_prefetch():
    text = explain(job(2, fsdp_forward_prefetch=2, fsdp_backward_prefetch=2))
    assert "forward  G:emb G:0 G:1 F:emb G:2 F:0" in text, text
    assert "backward G:3 G:2 B:head" in text, text


@pytest.mark.parametrize(
    ("wanted", "warning"),
    [
        (job(2, batch=2, pipeline_parallel_degree=2, pipeline_parallel_schedule="LoopedBFS"), "2 microbatches for 4 stages"),
        (job(2, pipeline_parallel_degree=2, module_fqns_per_model_part=UNEVEN), "stages have 2 to 5 modules"),
        (job(4), "unevenly sharded, so the last ranks have less: tok_embeddings.weight (70), output.weight (70)"),
        (replace(job(1), execution=ExecutionConfig()), "float32 reaches a small part"),
    ],
)  # fmt: skip
def test_warnings(wanted: ExplainedJob, warning: str):
    text = " ".join(explain(wanted).split())
    assert warning in text.partition("WARNINGS")[2]


def test_a_plain_job_has_no_warning():
    assert "WARNINGS" not in explain(job(1, device_type="cpu"))


# As a user asks


def test_no_file_is_needed_and_nothing_is_left(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text('[model]\ntokenizer_path = "no/such.json"\nvocab_size = 300\nn_layers = 1\n')
    assert main(["run.toml", "--explain", "--ranks", "2", "--training.seq_len=32", "--device=cpu"]) == 0
    assert "run.toml: 2 ranks on CPUs, dp_shard 2." in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_devices_that_are_not_here_are_no_error(capsys, tmp_path):
    (tmp_path / "run.toml").write_text("[model]\nvocab_size = 300\nn_layers = 1\n[training]\nseq_len = 64\n")
    argv = ["--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_rotate_method=ring"]
    more = ["--training.enable_cpu_offload", "--float8.enable", "--device=cuda", "--ranks=2", "--comm.backend=nccl"]
    assert main([str(tmp_path / "run.toml"), "--explain", *argv, *more]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for warning in ("numbers are for allgather", "float8.enable: these numbers", "are in host memory"):
        assert warning in text, text
    assert "fits on" not in text, "what is in host memory is not known to be elsewhere"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ranks", "many"], "--ranks many: must be a whole number from 1"),
        (["--ranks"], "--ranks without a value: must be a whole number from 1"),
        (["--device", "tpu"], "--device tpu: must be cpu or cuda"),
        (["--device"], "--device without a value: must be cpu or cuda"),
        (["--ranks=3", "--parallelism.tensor_parallel_degree=2"], "parallelism.tensor_parallel_degree = 2"),
    ],
)
def test_bad_input_is_told(capsys, tmp_path, argv: list[str], message: str):
    (tmp_path / "run.toml").write_text("[model]\nvocab_size = 300\n")
    assert main([str(tmp_path / "run.toml"), "--explain", *argv]) == 2
    assert message in capsys.readouterr().err


WRONG_MODELS = {  # method -> message
    "def init_weights(self, seed): raise KeyError('extra')": "init_weights raised KeyError: 'extra' (models/fork.py, line 6)",
    "def forward(self, x): return x": "its forward takes no labels (models/contract.py)",
    "def forward(self, x, *, labels=None, positions=None): return super().forward(x)": "a simulated step raised ModelFault: forward with",
    "def forward(self, x, *, labels, positions=None): return self.head(x)": "a simulated step raised AttributeError: ",
}


@pytest.mark.parametrize("method", WRONG_MODELS)
def test_a_model_that_cannot_train_is_told(capsys, tmp_path, monkeypatch, method: str):
    text = f"""
from models.llama import Config as Config_, Llama

class Config(Config_): ...

class Fork(Llama):
    {method}

def build(config, **sizes):
    return Fork(config, **sizes)
"""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "fork.py").write_text(text.lstrip("\n"))
    add_models(monkeypatch, tmp_path / "models")
    (tmp_path / "run.toml").write_text('[model]\nname = "fork"\nvocab_size = 300\n')
    for layout in ([], ["--parallelism.pipeline_parallel_degree=2"] if "ModelFault" in WRONG_MODELS[method] else []):
        assert main([str(tmp_path / "run.toml"), "--explain", *layout]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f'pharos: {tmp_path}/run.toml:2: model.name = "fork": {WRONG_MODELS[method]}')


def test_ranks_come_from_the_launcher_or_the_degrees(monkeypatch):
    for name in ("WORLD_SIZE", "NPROC", "NGPU", "NNODES"):
        monkeypatch.delenv(name, raising=False)
    config = ParallelismConfig(data_parallel_shard_degree=4, tensor_parallel_degree=2)
    assert requested_ranks(config) == 8
    monkeypatch.setenv("NGPU", "8")
    monkeypatch.setenv("NNODES", "4")
    assert requested_ranks(config) == 32
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert requested_ranks(config) == 16


@pytest.mark.parametrize(
    ("name", "parameters", "gpus"),
    [
        ("llama3_1b", 1_235_814_400, 1),
        ("qwen3_0.6b", 596_049_920, 1),
        ("qwen3_32b", 32_762_123_264, 32),
        ("llama3_8b", 8_030_261_248, 8),
        ("llama3_70b", 70_553_706_496, 256),
        ("llama3_405b", 405_853_388_800, 512),
    ],
)
def test_shipped_configurations(name: str, parameters: int, gpus: int, monkeypatch):
    for variable in ("WORLD_SIZE", "NPROC", "NGPU"):
        monkeypatch.delenv(variable, raising=False)
    config = load([f"configs/{name}.toml"])
    assert requested_ranks(config.parallelism) == gpus
    check_settings(config, world_size=gpus)
    wanted = job_of(config, world_size=gpus, device="")
    assert sum(p.numel() for p in wanted.model().parameters()) == parameters
    assert wanted.device_type == "cuda" and wanted.execution.precision.compute == torch.bfloat16
    assert wanted.passes * wanted.local_batch_size * wanted.degrees.data_parallel == config.training.global_batch_size


def test_nothing_of_checkpoints_is_loaded():
    """`--explain` uses no checkpoint, and importing torch.distributed.checkpoint takes a second and some megabytes."""
    loaded = "import sys, tools.explain.command; print('torch.distributed.checkpoint' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", loaded],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"


MIXTURE = """
[model]
name = "moe"
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
head_dim = 8
hidden_dim = 64
expert_hidden_dim = 16
n_experts = 8
vocab_size = 64

[training]
seq_len = 16
"""


@pytest.mark.parametrize(("replicas", "shards", "tp", "ep"), [(2, 1, 2, 1), (2, 1, 2, 2), (1, 2, 2, 1)])
def test_every_parameter_of_a_mixture_in_a_pipeline_has_a_gradient(
    tmp_path: Path, replicas: int, shards: int, tp: int, ep: int
):
    """A regression test: experts sharded over tp alone, with replicas, had no gradient in torch's pipeline stage."""
    (tmp_path / "run.toml").write_text(MIXTURE)
    degrees = {
        "pipeline_parallel": 2,
        "data_parallel_replicate": replicas,
        "data_parallel_shard": shards,
        "tensor_parallel": tp,
        "expert_parallel": ep,
    }
    argv = [f"--parallelism.{axis}_degree={degree}" for axis, degree in degrees.items()]
    config = load([str(tmp_path / "run.toml"), *argv])
    for rank in ranks(job_of(config, world_size=2 * replicas * shards * tp, device="cpu")):
        [stage] = rank.stages
        assert stage.step.resident.gradients == 4 * sum(kind.layers * prod(kind.local_shape) for kind in stage.kinds)


@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel": 2}, {"tensor_parallel": 2}, {"data_parallel_shard": 2}])
def test_muon_has_half_the_state_of_adamw_for_matrices_of_blocks(tmp_path: Path, layout: dict[str, int]):
    (tmp_path / "run.toml").write_text(MIXTURE)
    argv = [f"--parallelism.{axis}_degree={degree}" for axis, degree in layout.items()]
    config = load([str(tmp_path / "run.toml"), "--optimizer.name=Muon", *argv])
    for rank in ranks(job_of(config, world_size=prod(layout.values()), device="cpu")):
        [stage] = rank.stages
        matrices = [k for k in stage.kinds if k.name.startswith("layers.") and len(k.local_shape) > 1]
        one_moment = 4 * sum(kind.layers * prod(kind.local_shape) for kind in matrices)
        assert rank.resident.optimizer == pytest.approx(2 * rank.resident.gradients - one_moment, abs=4 * 20)


def test_a_stage_with_a_dense_block_does_not_stand_for_those_of_experts(tmp_path: Path):
    (tmp_path / "run.toml").write_text(MIXTURE.replace("n_layers = 2", "n_layers = 6\ndense_layers = 2"))
    argv = ["--parallelism.pipeline_parallel_degree=4", "--training.local_batch_size=4"]
    config = load([str(tmp_path / "run.toml"), *argv])
    profiles = ranks(job_of(config, world_size=4, device="cpu"))
    for rank, prefixes in ((1, ("layers.1.", "layers.2.")), (2, ("layers.3.", "layers.4."))):
        named = config.meta_model(64).named_parameters()
        size = sum(parameter.numel() for name, parameter in named if name.startswith(prefixes))
        assert profiles[rank].resident.gradients == 4 * size


def test_experts_that_are_sharded_over_tp_alone_are_freed_after_their_forward(tmp_path: Path):
    (tmp_path / "run.toml").write_text(MIXTURE)
    config = load([str(tmp_path / "run.toml"), "--parallelism.tensor_parallel_degree=2"])
    explained = job_of(config, world_size=2, device="cpu")
    [rank] = ranks(explained)
    gathered = [label for label in rank.stages[0].step.labels if re.match(r"FSDP::all_gather \(.*experts\)", label)]
    assert len(gathered) == 4, "those of both blocks, for the forward and for the backward"
    text = explain(explained)
    for line in (
        "layers.0.feed_forward.experts ... layers.1.feed_forward.experts (2 groups)  2  24.0 KiB  48.0 KiB",
        "the other groups are not sharded: FSDP casts the weights once per step and sends nothing",
    ):
        assert line in re.sub(" {2,}", "  ", text), text
    both = replace(explained, degrees=explained.degrees._replace(dp_shard=2, tp=1))
    [line] = [line.split() for line in explain(both).splitlines() if "layers.0.feed_forward.router ..." in line]
    assert line[-5:] == ["2", "1.00", "KiB", "1.00", "KiB"]
