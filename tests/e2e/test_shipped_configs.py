"""Each file in configs/ starts as it is written, at a small size: without replica groups and with two."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from scripts import prepare_data
from scripts.samples import prove, read
from tests.scripts.tiny_job import ENV, ROOT

pytestmark = pytest.mark.timeout(300)  # up to five processes, each with an import of torch
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.toml"))
# The layout's kind at two ranks, and what else needs the published size, many GPUs or minutes. The rest is as in the file.
SMALL = [
    "--model.tokenizer_path=", "--model.vocab_size=0", "--model.dim=32", "--model.n_heads=4", "--model.n_kv_heads=2",
    "--model.hidden_dim=64", "--training.dataset=store", "--training.dataset_path=text", "--training.steps=5", "--training.seq_len=32",
    "--training.local_batch_size=2", "--training.global_batch_size=8", "--lr_scheduler.warmup_steps=2", "--compile.backend=eager",
    "--metrics.enable_tensorboard=false", "--metrics.log_freq=1", "--sample.tokens=0",
]  # fmt: skip
LAYOUTS = {
    "llama": (1, []),
    "llama3_1b": (1, []),
    "llama3_8b": (2, ["--parallelism.data_parallel_shard_degree=2"]),
    # compiled with tensor parallelism: tests/multiproc/test_layouts.py; a trace takes a minute of two processes beside other tests
    "llama3_70b": (
        2,
        ["--parallelism.data_parallel_shard_degree=1", "--parallelism.tensor_parallel_degree=2", "--compile.enable=false"],
    ),
    "qwen3_0.6b": (1, []),
    "qwen3_32b": (2, ["--parallelism.data_parallel_shard_degree=1", "--parallelism.tensor_parallel_degree=2"]),
    "moe": (1, []),
    "qwen3_30b_a3b": (
        2,
        ["--parallelism.data_parallel_shard_degree=2", "--parallelism.expert_parallel_degree=2", "--model.n_experts=8",
         "--model.experts_per_token=2", "--model.expert_hidden_dim=16"],
    ),
    "llama3_405b": (
        2,
        ["--parallelism.data_parallel_shard_degree=1", "--parallelism.tensor_parallel_degree=1", "--model.n_layers=6",
         "--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_layers_per_stage=2"],
    ),
}  # fmt: skip


def test_every_file_is_here():
    assert sorted(LAYOUTS) == CONFIGS


LATER = [  # both tiers have each kind of layout once, and one configuration with groups
    *((name, 0) for name in ("llama3_1b", "llama3_8b", "qwen3_0.6b", "qwen3_32b")),
    *((name, 2) for name in LAYOUTS if name != "qwen3_0.6b"),
]


@pytest.mark.parametrize(
    "name, groups",
    [
        pytest.param(name, groups, marks=pytest.mark.long if (name, groups) in LATER else ())
        for groups in (0, 2)
        for name in LAYOUTS
    ],
)
def test_five_steps(name: str, groups: int, tmp_path: Path):
    (tmp_path / "text.txt").write_text("".join(f"A line of text, number {number}.\n" for number in range(9000)))
    assert prepare_data.main([f"{tmp_path}/text.txt", "--out", f"{tmp_path}/text", "--processes=1"]) == 0
    ranks, layout = LAYOUTS[name]
    script, *more = ("run_replicas.sh", f"--groups={groups}") if groups else ("run_train.sh",)
    layers = [] if name == "llama3_405b" else ["--model.n_layers=2"]
    done = subprocess.run(
        [f"{ROOT}/scripts/{script}", f"{ROOT}/configs/{name}.toml", *more, *SMALL, *layers, *layout],
        cwd=tmp_path, env={**ENV, "NPROC": str(ranks), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = read(tmp_path / "outputs" / name / "samples.jsonl")
    proof = prove(rows)
    assert proof.exact and proof.steps == 5
    assert proof.sequences == 40 if not groups else 40 <= proof.sequences <= 80  # a group may join after the first step
