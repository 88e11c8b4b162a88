"""Checkpoints in one process: the round trip, names, and when there is something to save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from ft.optim_state import init_optim_state
from tests.unit.checkpoint_job import Job, data_file, same, steps_in
from tests.unit.fakes import Lines
from training.checkpoint import Checkpointer
from training.checkpoint_config import CheckpointConfig
from training.states import ModelState, OptimizerState


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, dtype: torch.dtype, async_mode: str) -> None:
    straight = Job(tmp_path, dtype=dtype, async_mode=async_mode)
    assert straight.checkpointer.load() is None
    straight.train(3)
    straight.checkpointer.save(3)
    losses = straight.train(4)
    straight.checkpointer.close()

    resumed = Job(tmp_path, seed=1, dtype=dtype, async_mode=async_mode)
    assert resumed.checkpointer.load() == 3
    assert resumed.train(4) == losses
    assert same(resumed.everything(), straight.everything())


def test_an_optimizer_is_given_its_first_state_without_a_bit_of_the_weights_changing() -> None:
    weight = nn.Parameter(torch.tensor([-0.0, 0.0, 1e-42, 3.0]))
    fresh, given = (torch.optim.AdamW([nn.Parameter(weight.detach().clone())], lr=0.1) for _ in range(2))
    init_optim_state(given)
    (parameter,) = given.param_groups[0]["params"]
    assert parameter.detach().view(torch.int32).equal(weight.detach().view(torch.int32))
    assert given.param_groups[0]["lr"] == 0.1 and parameter.grad is None
    assert {name: value.sum().item() for name, value in given.state[parameter].items()} == {
        "step": 0,
        "exp_avg": 0,
        "exp_avg_sq": 0,
    }
    for optimizer in (fresh, given):
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = torch.full_like(parameter, 0.3)
        optimizer.step()
    assert fresh.param_groups[0]["params"][0].equal(given.param_groups[0]["params"][0])


def test_an_optimizer_that_has_gradients_is_left_alone() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight])
    init_optim_state(optimizer)
    assert not optimizer.state and weight.grad.equal(torch.ones(2))


def test_the_names_are_those_of_dcp(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    job = Job(tmp_path)
    job.train(1)
    flattened = get_optimizer_state_dict(
        job.model, job.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    kernels = ("fused", "foreach", "capturable", "differentiable")
    names = {name for name in flattened if not name.endswith(kernels)}
    assert ModelState([job.model]).state_dict().keys() == get_model_state_dict(job.model).keys()
    assert OptimizerState([job.model], job.optimizer).state_dict().keys() == names


def test_names_do_not_tell_what_wraps_a_module(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = Job(tmp_path), Job(tmp_path, seed=1)
    wrapped.model[0] = cast(nn.Module, torch.compile(wrapped.model[0], backend="eager"))
    wrapped.model[2] = checkpoint_wrapper(wrapped.model[2])
    assert wrapped.everything().keys() == plain.everything().keys()
    plain.step_and_save(2)
    assert wrapped.checkpointer.load() == 2
    assert same(wrapped.everything(), plain.everything())


def test_a_parameter_without_gradient_is_saved_and_loaded(tmp_path: Path) -> None:
    def job() -> Job:
        made = Job(tmp_path)
        made.model.get_parameter("0.weight").requires_grad_(False)
        return made

    first = job()
    first.step_and_save(2)
    second = job()
    assert second.checkpointer.load() == 2
    assert same(first.everything(), second.everything())


def test_a_save_of_a_step_that_is_held_does_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step_and_save(2)
    before = data_file(tmp_path, 2).stat().st_mtime_ns
    job.checkpointer.save(2, last=True)
    resumed = Job(tmp_path)
    resumed.checkpointer.load()
    resumed.checkpointer.save(2, last=True)
    assert data_file(tmp_path, 2).stat().st_mtime_ns == before


def test_due() -> None:
    def due(**settings: Any) -> list[int]:
        checkpointer = Checkpointer(CheckpointConfig(**settings), Path("nowhere"), {}, log=Lines())
        return [step for step in range(1, 8) if checkpointer.due(step)]

    assert due(interval=3) == [3, 6]
    assert due(interval=3, enable_first_step_checkpoint=True) == [1, 3, 6]
    assert due(interval=3, enable=False) == due(interval=3, load_only=True) == []


def test_checkpoints_can_be_off_or_read_only(tmp_path: Path) -> None:
    off = Job(tmp_path, enable=False)
    assert off.checkpointer.load() is None
    off.step_and_save(1)
    assert steps_in(tmp_path) == []
    Job(tmp_path).step_and_save(2)
    assert Job(tmp_path, enable=False).checkpointer.load() is None
    read_only = Job(tmp_path, load_only=True)
    assert read_only.checkpointer.load() == 2
    read_only.step_and_save(3)
    assert steps_in(tmp_path) == [2]


def test_the_manifest_says_what_the_checkpoint_is(tmp_path: Path) -> None:
    Job(tmp_path).step_and_save(2)
    manifest = json.loads((tmp_path / "checkpoint/step-2/manifest.json").read_text())
    assert {
        key: manifest[key] for key in ("format", "step", "kind", "states", "world_size", "torch", "config_digest")
    } == {
        "format": 1,
        "step": 2,
        "kind": "full",
        "states": ["model", "optimizer", "ledger"],
        "world_size": 1,
        "torch": torch.__version__,
        "config_digest": "",
    }
    assert {file["name"] for file in manifest["files"]} == {".metadata", "__0_0.distcp"}
