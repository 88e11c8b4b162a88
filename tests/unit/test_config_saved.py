"""The saved config of a run: it reads back equal, and a start that would falsify the run is refused."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated

import pytest

import models.llama
from configs.check import check_settings
from configs.errors import ConfigError
from configs.load import load, section_types
from configs.saved import CONFIG_FILE, check_saved, save, shared_setting_digests, to_toml
from configs.schema import JobConfig, RunConfig
from training.config import ResumeConfig, TrainingConfig
from training.optimizer import ParameterGroup

TOML = """\
[training]
steps = 20

[optimizer]
lr = 3e-3
"""


def configure(folder: Path, *argv: str, toml: str = TOML) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(toml, encoding="utf-8")
    return load([str(file), "--job.dump_folder", str(folder), *argv])


def refusal(config: RunConfig) -> list[str]:
    """Returns the lines of the message except the last, which names the alternatives."""
    with pytest.raises(ConfigError) as error:
        check_saved(config, config.run_folder)
    *lines, out = str(error.value).split("\n")
    assert out == (
        f"{config.run_folder} has a run with the saved settings: restore them, or start a new run with --job.name NAME"
    )
    return lines


def test_every_setting_is_written_and_reads_back_equal(tmp_path: Path) -> None:
    config = configure(tmp_path)
    odd = 'a "quoted" \\ path\twith\nlines, é, \U0001f600, \x7f and = ]'
    groups = (ParameterGroup("*norm*", 0.0), ParameterGroup('"x"', 1e-30, 1 / 3))
    config = replace(
        config,
        job=replace(config.job, description=odd),
        optimizer=replace(config.optimizer, lr=0.1 + 0.2, eps=5e-324, groups=groups),
        compile=replace(config.compile, components=()),
        checkpoint=replace(config.checkpoint, exclude_from_loading=("a", 'b"')),
        training=replace(config.training, max_norm=1e22),
    )
    save(config, tmp_path / "there")
    assert load([str(tmp_path / "there" / CONFIG_FILE)]) == config
    written = to_toml(config)
    for name, section in {**section_types(RunConfig), "model": models.llama.Config}.items():
        body = written.split(f"[{name}]\n")[1].split("\n[")[0]
        for key in fields(section):
            assert f"{key.name} = " in body or f"[{name}.{key.name}]" in written


def test_saving_leaves_nothing_else_and_replaces(tmp_path: Path) -> None:
    for steps in ("5", "6"):
        save(configure(tmp_path, "--training.steps", steps), tmp_path / "a" / "b")
    assert [file.name for file in (tmp_path / "a" / "b").iterdir()] == [CONFIG_FILE]
    assert load([str(tmp_path / "a" / "b" / CONFIG_FILE)]).training.steps == 6


def test_a_new_run_has_nothing_to_compare_with(tmp_path: Path) -> None:
    check_saved(configure(tmp_path), tmp_path / "run")
    (tmp_path / "run").mkdir()
    check_saved(configure(tmp_path), tmp_path / "run")


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ("--model.dim=128", "saved 256, now 128"),
        ("--model.tokenizer_path=x.json", 'saved "", now "x.json"'),
        ("--training.dataset=files", 'saved "stdlib", now "files"'),
        ("--training.dataset_path=a.txt", 'saved "", now "a.txt"'),
        ("--training.dataset_held_out=0.5", "saved 0.0, now 0.5"),
        ("--training.seq_len=64", "saved 2048, now 64"),
        ("--training.local_batch_size=4", "saved 8, now 4"),
        ("--training.global_batch_size=8", "saved -1, now 8"),
        ("--training.max_norm=2", "saved 1.0, now 2.0"),
        ("--training.on_spike=skip", 'saved "stop", now "skip"'),
        ("--training.spike_window=128", "saved 0, now 128"),
        (
            "--training.skip=[{first = 1, end = 2}]",
            "saved [], now [{first = 1, end = 2}]",
        ),  # as older versions write it
        ("--training.seed=7", "saved 0, now 7"),
        ("--training.dtype=bfloat16", 'saved "float32", now "bfloat16"'),
        ("--optimizer.weight_decay=0", "saved 0.1, now 0.0"),
        (
            '--optimizer.groups=[{pattern = "a"}]',
            'saved [], now [{pattern = "a", weight_decay = -1.0, lr_factor = 1.0}]',
        ),
        ("--lr_scheduler.warmup_steps=1", "saved 200, now 1"),
        ("--fault_tolerance.should_quantize=true", "saved false, now true"),
    ],
)
def test_what_makes_another_run_is_refused(tmp_path: Path, changed: str, difference: str) -> None:
    save(configure(tmp_path), tmp_path / "run")
    key = changed.split("=")[0]
    name = key.removeprefix("--")
    branches = not name.startswith(("model.", "fault_tolerance.")) and name != "training.dtype"
    assert refusal(configure(tmp_path, changed)) == [f"{key}: {difference}", *([cure(name)] if branches else [])]


def test_a_run_with_checkpoints_tells_how_another_begins_with_its_weights(tmp_path: Path) -> None:
    save(configure(tmp_path), tmp_path / "run")
    (tmp_path / "run" / "checkpoint" / "step-4").mkdir(parents=True)
    weights = f"add --checkpoint.initial_load_path {tmp_path}/run/checkpoint/step-N"
    with pytest.raises(ConfigError, match=rf"--job.name NAME \(from these weights: {weights}\)$"):
        check_saved(configure(tmp_path, "--model.dim=128"), tmp_path / "run")


def cure(*keys: str) -> str:
    named = f"{' and '.join(keys)} from the next step on: --resume.allow={','.join(keys)}"
    return f"to continue this run with the new {named}"


def test_a_run_without_validation_tells_how_it_can_validate(tmp_path: Path) -> None:
    save(configure(tmp_path), tmp_path / "run")
    validated = ("--validation.enable", "--lr_scheduler.warmup_steps=2")
    allowed = ("--training.dataset_held_out=0.03", "--resume.allow=training.dataset_held_out")
    with pytest.raises(ConfigError, match=f"no documents out so far; .* were trained on: {' '.join(allowed)}$"):
        check_settings(configure(tmp_path, *validated), world_size=1, device_type="cpu")
    check_settings(configure(tmp_path, *validated, *allowed), world_size=1, device_type="cpu")
    check_saved(configure(tmp_path, *validated[:1], *allowed), tmp_path / "run")


def test_what_resume_allow_names_may_change(tmp_path: Path) -> None:
    save(configure(tmp_path), tmp_path / "run")
    changes = ["--optimizer.lr=1e-3", "--training.max_norm=2"]
    assert refusal(configure(tmp_path, *changes, "--resume.allow=optimizer.lr")) == [
        "--training.max_norm: saved 1.0, now 2.0",
        f"{cure('training.max_norm').partition('=')[0]}=optimizer.lr,training.max_norm",
    ]
    keys = (
        "optimizer.lr, training.max_norm,optimizer.eps,optimizer.ema_decay,training.steps"  # the last may change anyway
    )
    allowed = configure(tmp_path, *changes, "--optimizer.ema_decay=0.99", f"--resume.allow={keys}")
    assert check_saved(allowed, tmp_path / "run") == {
        "optimizer.lr": "0.003 -> 0.001",
        "optimizer.ema_decay": "0.0 -> 0.99",
        "training.max_norm": "1.0 -> 2.0",
    }
    save(allowed, tmp_path / "run")
    assert check_saved(allowed, tmp_path / "run") == {}


@pytest.mark.parametrize(
    ("allow", "message"),
    [
        ("model.dim", "model.dim: cannot change in a run; legal: training.dataset, training.dataset_path, "),
        ("optimizer.name", "optimizer.name: cannot change in a run; legal: training.dataset, training.dataset_path, "),
        ("optimizer.l", "optimizer.l: no such key; legal: training.dataset, training.dataset_path, "),
    ],
)
def test_what_may_never_change(tmp_path: Path, allow: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_saved(configure(tmp_path, f"--resume.allow={allow}"), tmp_path / "run")
    assert str(caught.value).startswith(f'--resume.allow = "{allow}": {message}')


@pytest.mark.parametrize(
    "changed",
    [
        "--training.steps=40",
        "--training.steps=5",
        "--lr_scheduler.total_steps=40",
        "--training.dataloader.num_workers=2",
        "--training.gc_freq=1",
        "--training.mixed_precision_param=float32",
        "--float8.filter_fqns=['w2']",
        "--optimizer.implementation=foreach",
        "--training.enable_cpu_offload",
        "--training.loss_chunk_tokens=64",
        "--parallelism.fsdp_reshard_after_forward=never",
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=4",
        "--parallelism.tensor_parallel_degree=2",
        "--parallelism.context_parallel_degree=2",
        "--parallelism.pipeline_parallel_degree=2",
        "--parallelism.pipeline_parallel_schedule=GPipe",
        "--activation_checkpoint.mode=full",
        "--checkpoint.interval=1",
        "--validation.enable",
        "--metrics.log_freq=1",
        "--profiling.enable_profiling",
        "--comm.init_timeout_seconds=700",
        "--compile.enable",
        "--sample.tokens=3",
        "--job.description=longer",
    ],
)
def test_what_leaves_the_run_the_same_may_change(tmp_path: Path, changed: str) -> None:
    save(configure(tmp_path), tmp_path / "run")
    check_saved(configure(tmp_path, changed), tmp_path / "run")


@pytest.mark.parametrize(
    ("changed", "is_shared"),
    [
        ("--lr_scheduler.total_steps=40", True),
        ("--optimizer.implementation=foreach", True),
        ("--optimizer.lr=1", True),
        ("--parallelism.tensor_parallel_degree=2", True),
        ("--training.steps=40", True),
        ("--float8.filter_fqns=['w2']", True),
        ("--training.enable_cpu_offload", True),
        ("--training.mixed_precision_param=float32", False),
        ("--metrics.log_freq=1", False),
        ("--training.gc_freq=1", False),
    ],
)
def test_groups_share_what_their_weights_depend_on(tmp_path: Path, changed: str, is_shared: bool) -> None:
    differs = shared_setting_digests(configure(tmp_path, changed)) != shared_setting_digests(configure(tmp_path))
    assert differs == is_shared


@dataclass(frozen=True)
class Curriculum:
    """[curriculum]: a section of a fork."""

    begin: Annotated[float, "factor of the loss at step 0", "> 0"] = 1.0


@dataclass(frozen=True)
class ForkTraining(TrainingConfig):
    z_loss: Annotated[float, "factor of a term of the loss", ">= 0"] = 0.0


@dataclass(frozen=True)
class ForkConfig(RunConfig):
    training: ForkTraining = field(default_factory=ForkTraining)
    curriculum: Curriculum = field(default_factory=Curriculum)


@pytest.mark.parametrize(
    ("section", "value", "key"),
    [("curriculum", Curriculum(2.0), "curriculum.begin"), ("training", ForkTraining(z_loss=2.0), "training.z_loss")],
)
def test_a_key_of_a_fork_is_shared_and_kept_unless_it_is_listed(
    tmp_path: Path, section: str, value: object, key: str
) -> None:
    config = ForkConfig(job=JobConfig("run", str(tmp_path)))
    save(config, config.run_folder)
    changed = replace(config, **{section: value})
    assert shared_setting_digests(config) != shared_setting_digests(changed)
    assert refusal(changed)[0].startswith(f"{key}: saved ")
    assert list(check_saved(replace(changed, resume=ResumeConfig(key)), config.run_folder)) == [key]


def test_the_local_batch_only_matters_where_it_makes_the_step(tmp_path: Path) -> None:
    save(configure(tmp_path, "--training.global_batch_size=32"), tmp_path / "run")
    check_saved(
        configure(tmp_path, "--training.global_batch_size=32", "--training.local_batch_size=4"), tmp_path / "run"
    )


def test_all_differences_with_their_lines(tmp_path: Path) -> None:
    save(configure(tmp_path), tmp_path / "run")
    changed = configure(tmp_path, "--training.seed=1", toml="[optimizer]\nlr = 1\n[training]\nsteps = 20\n")
    assert refusal(changed) == [
        f"{tmp_path}/run.toml:2: optimizer.lr: saved 0.003, now 1.0",
        "--training.seed: saved 0, now 1",
        cure("training.seed", "optimizer.lr"),
    ]
    assert refusal(configure(tmp_path, toml="")) == [
        f"{tmp_path}/run.toml: optimizer.lr: saved 0.003, now 0.0008",
        cure("optimizer.lr"),
    ]


def test_a_stream_continues_no_other_data(tmp_path: Path) -> None:
    save(configure(tmp_path), tmp_path / "run")
    stream = ("--training.dataset=huggingface", "--training.dataset_path=a/b")
    allow = "--resume.allow=training.dataset,training.dataset_path"
    assert refusal(configure(tmp_path, *stream, allow)) == [
        '--training.dataset: saved "stdlib", now "huggingface"',
        '--training.dataset_path: saved "", now "a/b"',
    ]


def test_another_model_is_one_difference(tmp_path: Path) -> None:
    save(configure(tmp_path), tmp_path / "run")
    saved = tmp_path / "run" / CONFIG_FILE
    saved.write_text(
        saved.read_text().replace('name = "llama"', 'name = "other"').replace("dim = 256\n", "width = 3\n")
    )
    assert refusal(configure(tmp_path)) == [f'{tmp_path}/run.toml: model.name: saved "other", now "llama"']


def test_a_file_of_another_version(tmp_path: Path) -> None:
    """A key added since has its default; a removed one matters only if its section still exists."""
    save(configure(tmp_path), tmp_path / "run")
    saved = tmp_path / "run" / CONFIG_FILE
    text = saved.read_text().replace("dim = 256\n", "").replace("log_freq = 10\n", "gone = 3\n")
    saved.write_text(text)
    check_saved(configure(tmp_path), tmp_path / "run")
    assert refusal(configure(tmp_path, "--model.dim=64")) == ["--model.dim: saved 256, now 64"]
    saved.write_text(text.replace("lr = 0.003\n", "lr = 0.003\nrate = 3\n"))
    assert refusal(configure(tmp_path)) == [
        f"{tmp_path}/run.toml: optimizer.rate: saved 3, now no such key; to continue without it, remove it from {saved}"
    ]
    saved.write_text(text)
    check_saved(configure(tmp_path), tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"[model", "not TOML: Expected ']' at the end of a table declaration: [model"),
        (b"# \xff", "not UTF-8: byte 0xff; save the file as UTF-8"),
        (b"training = 3", "training = 3: must be a table"),
        (b"training.global_batch_size = 'all'", 'training.global_batch_size = "all": must be a number'),
        (b"training.global_batch_size = true", "training.global_batch_size = true: must be a number"),
        (b"training.dataset_held_out = [1]", "training.dataset_held_out = [1]: must be a number"),
    ],
)
def test_a_saved_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, cause: str) -> None:
    (tmp_path / "run").mkdir()
    saved = tmp_path / "run" / CONFIG_FILE
    saved.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        check_saved(configure(tmp_path), tmp_path / "run")
    assert str(error.value) == f"{saved}:1: {cause}; an earlier launch of this run wrote it: restore it, or remove it"


def test_ranks_that_would_make_another_step_are_refused(tmp_path: Path) -> None:
    """A batch size left to the ranks (training.global_batch_size = -1) is saved when the run starts."""
    save(configure(tmp_path), tmp_path / "run", batch=16)  # 2 ranks of 8
    config = configure(tmp_path)
    check_saved(config, tmp_path / "run", world_size=2)
    check_saved(configure(tmp_path, "--training.local_batch_size=4"), tmp_path / "run", world_size=4)
    check_saved(configure(tmp_path, "--parallelism.tensor_parallel_degree=2"), tmp_path / "run", world_size=4)
    check_saved(configure(tmp_path, "--training.global_batch_size=16"), tmp_path / "run", world_size=1)
    with pytest.raises(ConfigError) as error:
        check_saved(config, tmp_path / "run", world_size=3)
    assert str(error.value).split("\n")[0] == (
        f"{tmp_path}/run.toml: training.global_batch_size: saved 16 sequences of a step, now -1, which is 24: training.local_batch_size "
        "= 8 on 3 data-parallel ranks; nearest: --training.global_batch_size=16 keeps the batch size on these ranks"
    )


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    """Unchanged settings are not rewritten: a group that restarts on a full disk needs no space."""
    save(configure(tmp_path), tmp_path / "run")
    inode = (tmp_path / "run" / CONFIG_FILE).stat().st_ino
    save(configure(tmp_path), tmp_path / "run")
    assert (tmp_path / "run" / CONFIG_FILE).stat().st_ino == inode
    save(configure(tmp_path, "--training.steps=7"), tmp_path / "run")
    assert (tmp_path / "run" / CONFIG_FILE).stat().st_ino != inode
