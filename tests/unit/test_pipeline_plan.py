"""Stages of a pipeline: how a model is split, where stages are placed, and errors before a start, with the nearest legal value."""

# ruff: noqa: E501 (exact messages stay on one line)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from configs.check import check
from configs.errors import ConfigError
from configs.load import load
from models import llama
from parallelisms.mesh import ParallelismConfig
from parallelisms.pipeline import split
from parallelisms.pipeline_plan import check_pipeline, placement, stage_count, stage_modules

SHORT = {
    name: f"pipeline_parallel_{name}"
    for name in ("schedule", "schedule_csv", "microbatch_size", "layers_per_stage", "first_stage_less_layers", "last_stage_less_layers")
}  # fmt: skip


def settings(pp: int, **keys: Any) -> ParallelismConfig:
    return ParallelismConfig(pipeline_parallel_degree=pp, **{SHORT.get(key, key): value for key, value in keys.items()})


def complaint(config: ParallelismConfig, *, batch: int = 8, layers: int = 8, compiled: bool = False) -> str:
    try:
        check_pipeline(config, layers=[str(i) for i in range(layers)], local_batch_size=batch, compiled_blocks=compiled)
    except ValueError as error:
        return str(error)
    return ""


def sizes(config: ParallelismConfig, layers: int) -> list[int]:
    """Returns the number of modules of each stage."""
    return [len(stage) for stage in stage_modules(config, [str(i) for i in range(layers)])]


def test_embedding_and_head_count_as_blocks() -> None:
    assert stage_modules(settings(2), ["0", "1", "2", "3"]) == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "layers.3", "norm", "output"],
    ]
    assert sizes(settings(4), 8) == [1 + 2, 3, 2, 1 + 2]  # 10 blocks as 3 3 2 2
    assert sizes(settings(4, first_stage_less_layers=0, last_stage_less_layers=0), 8) == [1 + 2, 2, 2, 2 + 2]
    assert sizes(settings(2, schedule="DualPipeV", last_stage_less_layers=2), 9) == [1 + 2, 3, 3, 1 + 2]
    assert sizes(
        settings(2, schedule="LoopedBFS", layers_per_stage=1, first_stage_less_layers=0, last_stage_less_layers=0), 8
    ) == [2, *[1] * 6, 3]


def test_no_module_is_lost_or_doubled() -> None:
    for n_layers in (4, 5, 8, 13):
        for pp in (2, 4):
            for schedule in ("1F1B", "LoopedBFS"):
                for less in (0, 1, 2):
                    config = settings(pp, schedule=schedule, first_stage_less_layers=less)
                    if stage_count(config, n_layers) <= n_layers and not complaint(config, layers=n_layers):
                        flat = [
                            name for stage in stage_modules(config, [str(i) for i in range(n_layers)]) for name in stage
                        ]
                        assert flat == ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]


def test_by_names() -> None:
    config = settings(2, module_fqns_per_model_part=("tok_embeddings  layers.0", "layers.1 norm output"))
    assert stage_modules(config, ["0", "1"]) == [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]
    assert complaint(config, layers=2) == ""


def test_placement(tmp_path: Path) -> None:
    assert placement(settings(2, schedule="Interleaved1F1B"), 6) == [[0, 2, 4], [1, 3, 5]]
    assert placement(settings(3, schedule="ZBVZeroBubble"), 6) == [[0, 5], [1, 4], [2, 3]]
    (tmp_path / "s.csv").write_text("1F0,1B0\n0F0,2F0,2B0,0B0\n")
    config = settings(2, schedule_csv=str(tmp_path / "s.csv"))
    assert placement(config, 0) == [[1], [0, 2]] and stage_count(config, 8) == 3
    assert complaint(config, batch=1) == ""


@pytest.mark.parametrize(
    "texts",
    [
        ("tok_embeddings layers.0", "layers.1", "layers.2 norm output"),
        ("tok_embeddings layers.0", "layers.1 layers.2 norm output"),
        ("tok_embeddings layers.0 layers.1", "layers.2 norm output"),
    ],
)
def test_any_cut_into_stages_keeps_names_and_computes_the_same(texts: tuple[str, ...]) -> None:
    sizes = llama.Config(dim=8, n_layers=3, n_heads=2, n_kv_heads=1, hidden_dim=8)
    model = llama.build(sizes, vocab_size=11, max_seq_len=4)
    model.init_weights(0)
    config = settings(len(texts), module_fqns_per_model_part=texts)
    parts = [part for rank in range(len(texts)) for part in split(model, rank, config)]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert all("freqs_cis" in dict(part.named_buffers()) for part in parts)
    x = tokens = torch.arange(4).unsqueeze(0)
    for part in parts:
        x = part(x)
    assert torch.equal(x, model(tokens))
    assert len(model.layers) == 3 and model.output is not None  # the whole is as it was


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (settings(2, microbatch_size=3), {}, "parallelism.pipeline_parallel_microbatch_size = 3: must divide training.local_batch_size = 8; nearest: 2 or 4"),
        (settings(2, microbatch_size=8), {}, "parallelism.pipeline_parallel_microbatch_size = 8: makes 1 microbatches of training.local_batch_size = 8, but 1F1B on 2 ranks takes 2 or more; nearest: 4, or training.local_batch_size = 16"),
        (settings(4), {"batch": 2}, "parallelism.pipeline_parallel_microbatch_size = 1: makes 2 microbatches of training.local_batch_size = 2, but 1F1B on 4 ranks takes 4 or more; nearest: training.local_batch_size = 4"),
        (settings(2, schedule="DualPipeV", microbatch_size=4), {"batch": 12}, "parallelism.pipeline_parallel_microbatch_size = 4: makes 3 microbatches of training.local_batch_size = 12, but DualPipeV on 2 ranks takes 4 or more; nearest: 3, or training.local_batch_size = 16"),
        (settings(4, schedule="Interleaved1F1B"), {"batch": 9}, "parallelism.pipeline_parallel_microbatch_size = 1: makes 9 microbatches of training.local_batch_size = 9, but Interleaved1F1B on 4 ranks takes rounds of one length, 4 or more, such as 8 or 12 in all; nearest: 3, or training.local_batch_size = 10"),
        (settings(16), {"batch": 16}, "parallelism.pipeline_parallel_degree = 16: 1F1B makes 16 stages of the model, but there are 8 blocks; nearest: 8"),
        (settings(8, schedule="ZBVZeroBubble"), {}, "parallelism.pipeline_parallel_degree = 8: ZBVZeroBubble makes 16 stages of the model, but there are 8 blocks; nearest: 4"),
        (settings(2, layers_per_stage=3), {}, "parallelism.pipeline_parallel_layers_per_stage = 3: makes 4 stages of 10 blocks (with parallelism.pipeline_parallel_first_stage_less_layers and ..._last_stage_less_layers), but 1F1B takes one on each of the 2 ranks; nearest: 5, or 0"),
        (settings(2, layers_per_stage=2, schedule="LoopedBFS"), {}, "parallelism.pipeline_parallel_layers_per_stage = 2: makes 5 stages of 10 blocks (with parallelism.pipeline_parallel_first_stage_less_layers and ..._last_stage_less_layers), but LoopedBFS takes equally many on each of the 2 ranks; nearest: 3, or 0"),
        (settings(2, layers_per_stage=5, schedule="DualPipeV"), {}, "parallelism.pipeline_parallel_layers_per_stage = 5: makes 2 stages of 10 blocks (with parallelism.pipeline_parallel_first_stage_less_layers and ..._last_stage_less_layers), but DualPipeV takes two on each of the 2 ranks; nearest: 3, or 0"),
        (settings(2, last_stage_less_layers=20), {}, "parallelism.pipeline_parallel_last_stage_less_layers = 20: the last stage has room for 14 blocks in all; nearest: 9"),
        (settings(4, first_stage_less_layers=5), {}, "parallelism.pipeline_parallel_first_stage_less_layers = 5: the first stage has room for 4 blocks in all; nearest: 4"),
        (settings(2, schedule="ZBVZeroBubble"), {"compiled": True}, 'compile.enable = true: ZBVZeroBubble computes the backward in two halves, and a compiled block would compute the whole backward twice; set it to false, or parallelism.pipeline_parallel_schedule = "Interleaved1F1B"'),
        (settings(2, schedule="DualPipeV", fsdp_reshard_after_forward="always"), {}, 'parallelism.fsdp_reshard_after_forward = "always": DualPipeV computes the backward in two halves and needs the parameters gathered in between; nearest: "default" or "never", or parallelism.pipeline_parallel_schedule = "Interleaved1F1B"'),
    ],
)  # fmt: skip
def test_what_is_refused(config: ParallelismConfig, given: dict[str, Any], message: str) -> None:
    assert complaint(config, **given) == message


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("tok_embeddings layers.0", "layers.1", "norm output"), "these are 3 stages, but 1F1B takes one on each of the 2 ranks; nearest: 2 strings"),
        (("tok_embedings layers.0", "layers.1 norm output"), 'the model has no "tok_embedings"; legal: tok_embeddings, layers.0, layers.1, norm, output; nearest: tok_embeddings'),
        (("tok_embeddings layers.0 layers.1", "layers.1 norm output"), '"layers.1" is named 2 times; legal: once'),
        (("tok_embeddings layers.0", "norm output"), "layers.1 in no stage; legal: every module of the model in one stage"),
        (("tok_embeddings layers.1", "layers.0 norm output"), '"layers.1" is in the place of "layers.0"; legal: the order of the model'),
        (("tok_embeddings layers.0 layers.1 norm output", " "), "stage 1 has no module; legal: at least one in each stage"),
    ],
)  # fmt: skip
def test_names_that_are_refused(texts: tuple[str, ...], message: str) -> None:
    found = complaint(settings(2, module_fqns_per_model_part=texts), layers=2)
    assert found == f"parallelism.module_fqns_per_model_part = {list(texts)}: {message}"


def test_every_nearest_setting_is_legal() -> None:
    for pp in (2, 3, 4):
        for schedule in ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"):
            for batch in (1, 5, 6, 9, 12):
                for size in range(1, 7):
                    found = complaint(settings(pp, schedule=schedule, microbatch_size=size), batch=batch, layers=12)
                    for batch_there, size_there in _advised(found, batch, size):
                        advised = settings(pp, schedule=schedule, microbatch_size=size_there)
                        again = complaint(advised, batch=batch_there, layers=12)
                        assert "takes" not in again or "must divide" in found, (found, again)
                        assert "must divide" not in again, (found, again)


def _advised(message: str, batch: int, size: int) -> list[tuple[int, int]]:
    """Returns (batch size, microbatch size) of each alternative behind "nearest:"."""
    words = message.partition("nearest: ")[2].replace(", or", " or").split(" or ")
    return [
        (int(word.rpartition(" ")[2]), size) if word.startswith("training.") else (batch, int(word))
        for word in words
        if word
    ]


def test_a_csv_file_is_checked_with_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "s.csv"
    file.write_text("0F0,0F1,0B0,0I1,0W1\n,1F0,1B0,1F1,1B1\n")
    config = settings(2, schedule_csv=str(file))
    key = f'parallelism.pipeline_parallel_schedule_csv = "{file}"'
    assert complaint(config, batch=2) == ""
    assert complaint(config, batch=4).startswith(f"{key}: stage 0 computes microbatch 2 with F 0")
    assert complaint(config, batch=2, compiled=True).startswith("compile.enable = true")
    assert complaint(settings(3, schedule_csv=str(file)), batch=2).startswith(f"{key}: has lines for 2 ranks")
    assert complaint(settings(2, schedule_csv=str(file), layers_per_stage=2), batch=2).endswith(
        f"but {file} takes the 2 that it names; nearest: 5, or 0"
    )
    text = 'parallelism.pipeline_parallel_schedule_csv = "none.csv": cannot be read: No such file or directory'
    assert complaint(settings(2, schedule_csv="none.csv")) == text


def test_the_check_before_a_start_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(
        "[training]\nseq_len = 64\nlocal_batch_size = 4\n\n[parallelism]\npipeline_parallel_degree = 8\n"
    )
    with pytest.raises(ConfigError) as error:
        check(load(["run.toml"]), world_size=8)
    assert str(error.value) == (
        "run.toml: parallelism.pipeline_parallel_microbatch_size = 1: makes 4 microbatches of training.local_batch_size = 4, but 1F1B on 8 ranks takes 8 or more; nearest: training.local_batch_size = 8"
    )
    with pytest.raises(ConfigError) as error:
        check(load(["run.toml", "--training.local_batch_size=8"]), world_size=8)
    assert (
        str(error.value)
        == "run.toml:6: parallelism.pipeline_parallel_degree = 8: 1F1B makes 8 stages of the model, but there are 6 blocks; nearest: 6"
    )
