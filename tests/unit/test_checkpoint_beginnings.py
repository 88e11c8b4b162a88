"""Weights only, and the start of a run: its seed, a requested step, another run's checkpoint."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from configs.schema import JobConfig, RunConfig
from tests.unit.checkpoint_job import Job, data_file, flip_a_bit, same
from training.checkpoint import CheckpointFailed
from training.checkpoint_config import CheckpointConfig
from training.components import Components


def test_the_last_save_can_be_the_weights_alone(tmp_path: Path) -> None:
    job = Job(tmp_path, last_save_model_only=True, export_dtype="bfloat16")
    job.step_and_save(2)
    job.train(2)
    job.checkpointer.save(4, last=True)
    assert job.checkpointer.newest_step("model") == 4
    copy = Job(tmp_path, seed=1)
    assert copy.checkpointer.newest_step("model") == 4
    assert copy.checkpointer.load() == 2  # what can be gone on from

    weights = Job(tmp_path / "other", seed=1, initial_load_path=str(tmp_path / "checkpoint/step-4"))
    assert weights.checkpointer.load() is None
    expected = {name: value.bfloat16().float() for name, value in job.model.named_parameters()}
    assert same(dict(weights.model.named_parameters()), expected)
    assert weights.model.get_buffer("1.num_batches_tracked") == 4


def test_another_run_gives_no_tensor_that_follows_from_the_configuration(tmp_path: Path) -> None:
    """A buffer computed from the configuration is not loaded from another run, and is not rounded by a 16-bit export."""
    computed = ["model.1.running_mean"]
    job = Job(tmp_path, computed=computed, last_save_model_only=True, export_dtype="bfloat16")
    job.step_and_save(2)
    saved = job.model.get_buffer("1.running_mean").clone()
    job.train(2)
    job.checkpointer.save(4, last=True)

    again = Job(tmp_path, seed=1, computed=computed)
    assert again.checkpointer.load() == 2 and torch.equal(again.model.get_buffer("1.running_mean"), saved)
    for step in (2, 4):
        path = tmp_path / f"checkpoint/step-{step}"
        other = Job(tmp_path / f"from-{step}", seed=1, computed=computed, initial_load_path=str(path))
        other.checkpointer.load()
        assert not other.model.get_buffer("1.running_mean").any()
        assert other.model.get_buffer("1.running_var").ne(1).any()
    plain = Job(tmp_path / "plain", seed=1, initial_load_path=str(path))
    plain.checkpointer.load()
    exported = plain.model.get_buffer("1.running_mean")
    assert torch.equal(exported, job.model.get_buffer("1.running_mean")) and not torch.equal(
        exported, exported.bfloat16().float()
    )


def test_the_weights_alone_take_the_place_of_a_full_checkpoint_of_the_last_step(tmp_path: Path) -> None:
    job = Job(tmp_path, last_save_model_only=True)
    job.step_and_save(2, 4)
    job.checkpointer.save(4, last=True)
    assert job.checkpointer.newest_step("model") == 4
    assert Job(tmp_path).checkpointer.load() == 2


def test_weights_alone_are_not_gone_on_from(tmp_path: Path) -> None:
    job = Job(tmp_path, last_save_model_only=True)
    job.checkpointer.save_seed()
    job.train(2)
    job.checkpointer.save(2, last=True)
    with pytest.raises(
        ValueError, match=r"step 2 in .* has only the weights .*checkpoint.initial_load_path = \".*/step-2\""
    ):
        Job(tmp_path).checkpointer.load()
    assert Job(tmp_path, load_step=0).checkpointer.load() == 0


def test_a_run_begins_with_its_seed(tmp_path: Path) -> None:
    Job(tmp_path, seed=3).checkpointer.save_seed()
    job = Job(tmp_path, seed=4)
    assert job.checkpointer.load() == 0
    assert job.checkpointer.newest_step("model") == 0
    assert same(job.everything(), Job(tmp_path, seed=3).everything())


def test_a_seed_is_made_of_fresh_weights(tmp_path: Path) -> None:
    for _ in range(2):  # the second takes the place of the first
        job = Job(tmp_path, seed=3, create_seed_checkpoint=True)
        assert job.checkpointer.load() is None
        job.checkpointer.save_seed()
    Job(tmp_path).step_and_save(2)
    with pytest.raises(ValueError, match=r"create_seed_checkpoint = true: .* has step 2 of an earlier run"):
        Job(tmp_path, create_seed_checkpoint=True).checkpointer.load()


def test_load_step(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step_and_save(2)
    there = job.everything()
    job.step_and_save(4, 6)
    again = Job(tmp_path, load_step=2)
    assert again.checkpointer.load() == 2
    assert same(again.everything(), there)
    assert not again.checkpointer.last_save_exists(6), "that step 6 is of the other continuation"
    again.step_and_save(4, 6)
    assert again.checkpointer.last_save_exists(6)
    with pytest.raises(ValueError, match=r"checkpoint\.load_step = 5: not in .*; steps there: 2, 4, 6; nearest: 4"):
        Job(tmp_path, load_step=5).checkpointer.load()
    with pytest.raises(ValueError, match=r"checkpoint\.load_step = 5: not in .*; there are no checkpoints in it"):
        Job(tmp_path / "other", load_step=5).checkpointer.load()
    flip_a_bit(data_file(tmp_path, 4))
    with pytest.raises(CheckpointFailed, match=r"\(step 4: __0_0\.distcp: bytes .*\); set a different load_step"):
        Job(tmp_path, load_step=4).checkpointer.load()


def test_the_summary_tells_that_load_step_begins_there_again() -> None:
    """A restarted rank loads `load_step` again, as each launch does."""
    said = dict[int, str]()
    for step in (-1, 0, 200):
        run = MagicMock()
        run.config.checkpoint = CheckpointConfig(load_step=step)
        Components.print_summary(run, "stopped at")
        said[step] = run.metrics_processor.print_summary.call_args.kwargs["next_command"]
    assert said == {
        -1: "the same command resumes the run",
        0: "the same command begins again at step 0; without checkpoint.load_step it resumes the run",
        200: "the same command begins again at step 200; without checkpoint.load_step it resumes the run",
    }


def test_settings_that_a_full_disk_refuses_are_written_later(tmp_path: Path) -> None:
    """The background writer's thread writes them; the step that requests it continues."""
    (tmp_path / "run").write_text("a file where the folder should be")
    run = MagicMock(config=RunConfig(job=JobConfig("run", str(tmp_path))), slot_size=8)
    Components.request_config(run)
    run.background_writer.wake.assert_called_once()
    with pytest.raises(OSError):
        Components.write_config(run)
    (tmp_path / "run").unlink()
    Components.write_config(run)
    assert (tmp_path / "run/config.toml").exists() and not run.config_is_due


def test_the_summary_of_a_run_that_saves_nothing_names_no_checkpoint() -> None:
    run = MagicMock()
    run.config.run_folder = Path("outputs/a")
    for settings, reason in (
        ({"enable": False}, "checkpoint.enable = false"),
        ({"load_only": True}, "checkpoint.load_only = true"),
    ):
        run.config.checkpoint = CheckpointConfig(**settings)
        Components.print_summary(run, "finished")
        told = run.metrics_processor.print_summary.call_args.kwargs
        assert (told["saved"], told["next_command"]) == (f"nothing is saved ({reason})", "tensorboard --logdir outputs")


def test_commands_of_the_summary_can_be_pasted() -> None:
    run = MagicMock()
    run.config.checkpoint, run.config.run_folder = CheckpointConfig(), Path("my outputs/a b%d'e")
    Components.print_summary(run, "finished")
    commands = run.metrics_processor.print_summary.call_args.kwargs["next_command"].split("; ")
    assert [shlex.split(command) for command in commands] == [
        ["python", "scripts/generate.py", "my outputs/a b%d'e"],
        ["tensorboard", "--logdir", "my outputs"],
    ]


def test_another_runs_weights_are_a_beginning(tmp_path: Path) -> None:
    first = Job(tmp_path / "first")
    first.step_and_save(2)
    path = str(tmp_path / "first/checkpoint/step-2")

    tuned = Job(tmp_path / "tuned", seed=1, initial_load_path=path)
    assert tuned.checkpointer.load() is None
    assert same(tuned.model.state_dict(), first.model.state_dict())
    assert tuned.ledger.state == {"step": 0, "position": 0}

    whole = Job(tmp_path / "whole", seed=1, initial_load_path=path, initial_load_model_only=False)
    assert whole.checkpointer.load() == 2
    assert same(whole.everything(), first.everything())

    tuned.step_and_save(1)
    resumed = Job(tmp_path / "tuned", seed=2, initial_load_path=path)
    assert resumed.checkpointer.load() == 1  # its own now
    assert same(resumed.everything(), tuned.everything())

    (Path(path) / "manifest.json").unlink()  # as another program's checkpoint
    with pytest.raises(
        ValueError, match=r"has no manifest\.json, so only its weights .*initial_load_model_only = true"
    ):
        Job(tmp_path / "other", initial_load_path=path, initial_load_model_only=False).checkpointer.load()
    other = Job(tmp_path / "other", seed=1, initial_load_path=path)
    assert other.checkpointer.load() is None and same(other.model.state_dict(), first.model.state_dict())


def test_a_part_of_another_runs_weights(tmp_path: Path) -> None:
    first = Job(tmp_path / "first")
    first.step_and_save(2)
    path = str(tmp_path / "first/checkpoint/step-2")
    tuned = Job(tmp_path / "tuned", seed=1, initial_load_path=path, exclude_from_loading=("model.2",))
    tuned.model[2] = head = nn.Linear(5, 9)
    before = head.weight.detach().clone()
    tuned.checkpointer.load()
    assert head.weight.equal(before)
    assert tuned.model.get_parameter("0.weight").equal(first.model.get_parameter("0.weight"))
    more = Job(tmp_path / "more", seed=1, initial_load_path=path, exclude_from_loading=("model.2.gain",))
    more.model[2] = head = nn.Linear(5, 3)
    head.gain = nn.Parameter(torch.ones(3))  # that only this run has
    more.checkpointer.load()
    assert head.weight.equal(first.model.get_parameter("2.weight")) and head.gain.equal(torch.ones(3))
    adapted = Job(tmp_path / "adapted", seed=1, initial_load_path=path, exclude_from_loading=("model.*.gain_lora_?",))
    for module in (adapted.model[0], adapted.model[2]):
        module.gain_lora_a = nn.Parameter(torch.ones(3))
    adapted.checkpointer.load()
    assert adapted.model[0].weight.equal(first.model.get_parameter("0.weight"))
    with pytest.raises(ValueError, match=r'exclude_from_loading: no name begins with "model\.head"'):
        Job(tmp_path / "other", initial_load_path=path, exclude_from_loading=("model.head",)).checkpointer.load()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_another_programs_checkpoint_is_a_beginning_with_a_warning(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import save

    first = Job(tmp_path / "first")
    save({"model": first.model.state_dict()}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    job = Job(tmp_path / "mine", seed=1, initial_load_path=str(tmp_path / "theirs"))
    assert job.checkpointer.load() is None
    assert same(job.model.state_dict(), first.model.state_dict())
    assert len(job.log.warnings) == 1 and "not verified" in job.log.warnings[0]


def test_a_beginning_that_is_damaged_or_none(tmp_path: Path) -> None:
    Job(tmp_path / "first").step_and_save(2)
    run = tmp_path / "first"

    def message(path: Path) -> str:
        with pytest.raises(ValueError) as error:
            CheckpointConfig(initial_load_path=str(path)).check_files()
        return str(error.value).removeprefix(f'checkpoint.initial_load_path = "{path}": ')

    assert message(run) == f'a folder of checkpoints, not a checkpoint; nearest: "{run}/checkpoint/step-2"'
    assert message(run / "checkpoint/step-4") == "no such folder; steps there: 2; nearest: 2"
    assert message(tmp_path) == "not a checkpoint, as it has no file .metadata"
    flip_a_bit(data_file(run, 2))
    with pytest.raises(CheckpointFailed, match=r"initial_load_path = .*: damaged: __0_0\.distcp: bytes"):
        Job(tmp_path / "mine", initial_load_path=str(run / "checkpoint/step-2")).checkpointer.load()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial_load_path": "x", "enable": False}, 'initial_load_path = "x": needs checkpoint.enable = true'),
        ({"create_seed_checkpoint": True, "enable": False}, "create_seed_checkpoint = true: needs checkpoint.enable"),
        ({"folder": "./"}, 'folder = "./": must be a folder of its own; nearest: "checkpoint"'),
        (
            {"folder": "../ckpt"},
            'folder = "../ckpt": must be inside the run\'s folder, or absolute, without ".."; nearest: "ckpt"',
        ),
        (
            {"folder": "/a/../b"},
            'folder = "/a/../b": must be inside the run\'s folder, or absolute, without ".."; nearest: "/a/b"',
        ),
        ({"folder": "initial/"}, 'folder = "initial/": a copy of checkpoint.initial_load_path has that name; nearest'),
        ({"create_seed_checkpoint": True, "load_only": True}, "load_only = true: no seed checkpoint would be written"),
        ({"create_seed_checkpoint": True, "initial_load_path": "x"}, 'initial_load_path = "x": a seed has freshly'),
        ({"exclude_from_loading": ("a", "b")}, 'exclude_from_loading = ["a", "b"]: needs checkpoint.initial_load_path'),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"checkpoint.{message}")):
        CheckpointConfig(**settings).check()


def test_a_folder_that_storage_does_not_show_now_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    Job(tmp_path).step_and_save(2)
    (tmp_path / "checkpoint").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoint").symlink_to("checkpoint")
    error = r"cannot be read: Too many levels of symbolic links .*; refusing to start a new run over it$"
    with pytest.raises(CheckpointFailed, match=error):
        Job(tmp_path).checkpointer.load()
