"""Muon beside AdamW, against torch's own, and the average of the weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

from bench.resume import checkpoint_values
from ft import SoloManager
from ft.optim_state import init_optim_state
from models import moe
from tests.unit.fakes import Lines
from training.checkpoint import Checkpointer
from training.checkpoint_config import CheckpointConfig
from training.checkpoint_files import EMA_STATE
from training.config import TrainingConfig
from training.ema import EMA
from training.muon import orthogonalize
from training.optimizer import LRSchedulerConfig, OptimizerConfig, OptimizerStep, ParameterGroup, build_optimizer
from training.progress import Progress
from training.states import ModelState

MUON = OptimizerConfig("Muon", lr=0.02, momentum=0.9, weight_decay=0.3)
MATRICES = ("layers.0.attention.wq.weight", "layers.1.feed_forward.router.weight", "layers.1.feed_forward.experts.w2")
SIZES = moe.Config(
    name="moe", dim=16, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=8, hidden_dim=24, expert_hidden_dim=12, n_experts=3,
    dense_layers=1,
)  # fmt: skip


def model() -> nn.Module:
    made = moe.build(SIZES, vocab_size=11, max_seq_len=8)
    made.init_weights(0)
    return made


def give_gradients(parameters: Any, step: int) -> None:
    draws = torch.Generator().manual_seed(step)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=draws)


def as_matrices(part: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters, with each expert's matrix as a separate one."""
    found = dict[str, nn.Parameter]()
    for name, parameter in part.named_parameters():
        several = parameter.unbind() if parameter.ndim == 3 else [parameter]
        found |= {f"{name}.{i}": nn.Parameter(one.detach().clone()) for i, one in enumerate(several)}
    return found


@pytest.mark.parametrize(("adjust", "nesterov"), [("original", True), ("match_rms_adamw", False)])
def test_three_steps_are_those_of_torchs_muon_for_each_matrix_and_of_adamw_for_the_rest(adjust: Any, nesterov: bool):
    config = replace(MUON, adjust_lr_fn=adjust, nesterov=nesterov, groups=(ParameterGroup("*.w2", weight_decay=0.0),))
    part, theirs = model(), as_matrices(model())
    ours = build_optimizer(config, [part], compute=torch.bfloat16)
    hidden = {name: p for name, p in theirs.items() if name.startswith("layers.") and p.ndim == 2}
    rest = [p for name, p in theirs.items() if name not in hidden]
    assert all(f"{name}.0" in hidden for name in MATRICES)
    assert len(rest) == 11  # eight norms in blocks, the last norm, embedding, head
    groups = [
        {"params": [p], "weight_decay": 0.0 if ".w2." in name and "experts" in name else 0.3}
        for name, p in hidden.items()
    ]
    muon = torch.optim.Muon(groups, lr=0.02, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust)
    adamw = torch.optim.AdamW(rest, lr=0.02, betas=(0.9, 0.95), weight_decay=0.3)
    for group in ours.param_groups:
        group["lr"] = 0.02 * group["lr_factor"]
    for step in range(3):
        give_gradients(part.parameters(), step)
        flat = [g for p in part.parameters() for g in (p.grad.unbind() if p.grad.ndim == 3 else [p.grad])]
        for parameter, grad in zip(theirs.values(), flat, strict=True):
            parameter.grad = grad.clone()
        before = {name: p.detach().clone() for name, p in theirs.items()}
        for rule in (ours, muon, adamw):
            rule.step()
        for (name, expected), (_, found) in zip(theirs.items(), as_matrices(part).items(), strict=True):
            moved = (expected - before[name]).norm()
            bound = 0.02 if name in hidden else 1e-6  # the stack's products round bfloat16 in another order
            assert (found - expected).norm() <= bound * moved, (step, name)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (4, 6, 9), (4, 9, 6)])
def test_an_orthogonalised_matrix_is_near_the_orthogonal_factor(shape: tuple[int, ...]):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    found = orthogonalize(matrices, steps=5)
    for one, given in zip(found.view(-1, *shape[-2:]), matrices.view(-1, *shape[-2:]), strict=True):
        u, _, vh = torch.linalg.svd(given, full_matrices=False)
        assert torch.linalg.svdvals(one).sub(1).abs().max() < 0.35
        assert torch.linalg.svdvals(u.T @ one @ vh.T - torch.diag((u.T @ one @ vh.T).diag())).max() < 1e-4


@pytest.fixture
def ranks():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def step_of(part: nn.Module, config: OptimizerConfig) -> tuple[OptimizerStep, list[nn.Parameter]]:
    parameters = list(part.parameters())
    ema = EMA([part], config.ema_decay) if config.ema_decay else None
    schedule, training = LRSchedulerConfig(warmup_steps=0, decay_ratio=0.0), TrainingConfig(max_norm=0.5)
    return OptimizerStep(
        build_optimizer(config, [part]), parameters, config, schedule, training, Progress(), ema=ema
    ), parameters


def test_a_step_divides_and_clips_and_is_left_out_where_the_norm_is_no_number(ranks):
    part = distribute_module(model(), ranks)
    step, parameters = step_of(part, replace(MUON, ema_decay=0.9))

    def train(scale: float, divisor: float) -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, scale)
        step.step(0, divisor)

    def state() -> list[Tensor]:
        buffers = [value for p in parameters for value in step.optimizer.state.get(p, {}).values()]
        assert step.ema is not None
        return [
            x.full_tensor().clone()
            for x in (*parameters, *step.ema.parameters(), *buffers)
            if hasattr(x, "full_tensor")
        ]

    train(3.0, 4.0)
    before = state()
    hidden = next(p for p in parameters if p.ndim == 3)
    size = sum(p.numel() for p in parameters)
    momentum = step.optimizer.state[hidden]["momentum_buffer"].full_tensor()
    assert torch.allclose(momentum, torch.full_like(momentum, 0.1 * 0.5 / size**0.5))  # clipped to a norm of 0.5
    for scale, divisor in ((torch.inf, 4.0), (1.0, 0.0)):
        train(scale, divisor)
        assert all(map(torch.equal, state(), before)) and step.ema.n_averaged == 1
    train(1.0, 4.0)
    assert not any(map(torch.equal, state(), before)) and step.ema.n_averaged == 2


def test_a_state_is_created_and_changes_no_weight():
    part = model()
    before = [p.detach().clone() for p in part.parameters()]
    optimizer = build_optimizer(MUON, [part])
    init_optim_state(optimizer)
    assert all(map(torch.equal, part.parameters(), before))
    for name, parameter in part.named_parameters():
        state, is_hidden = optimizer.state[parameter], name.startswith("layers.") and parameter.ndim > 1
        assert state.keys() == ({"momentum_buffer"} if is_hidden else {"step", "exp_avg", "exp_avg_sq"})
        assert not any(value.any() for value in state.values())


def test_the_average_begins_with_the_first_weights_and_follows_them_in_fp32():
    part = nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    ema = EMA([part], 0.75)
    for number, expected in ((8.0, 8.0), (0.0, 6.0), (0.0, 4.5), (1.0, 3.625)):
        nn.init.constant_(part.weight, number)
        ema.update()
        [average] = ema.parameters()
        assert average.dtype == torch.float32 and torch.equal(average, torch.full((3, 4), expected))
    other = EMA([part], 0.75)
    other.load_state_dict(
        {name: value.clone() if name != "n_averaged" else value for name, value in ema.state_dict().items()}
    )
    for each in (ema, other):
        each.update()
    assert torch.equal(*(next(each.parameters()) for each in (ema, other)))


def test_an_average_begins_and_ends_at_a_branch_point_and_goes_out_with_the_weights_alone(tmp_path: Path):
    part, manager = nn.Linear(4, 3, bias=False), SoloManager(1)

    def checkpointer(ema: EMA | None, **settings: Any) -> Checkpointer:
        states = {"model": ModelState([part]), "ledger": manager, **({EMA_STATE: ema} if ema else {})}
        return Checkpointer(CheckpointConfig(**settings), tmp_path, states, log=Lines())

    checkpointer(None).save(1)
    ema = EMA([part], 0.5)
    assert checkpointer(ema).load() == 1 and ema.n_averaged == 0  # it begins
    ema.update()
    ema.update()
    saver = checkpointer(ema)
    # to step 1, which has no average: one of steps that are given up is none of theirs
    saver.rewind(2, [], lambda: None)
    assert ema.n_averaged == 0
    ema.update()
    saver.save(2)
    again = EMA([part], 0.5)
    assert checkpointer(again).load() == 2 and again.n_averaged == 1
    assert torch.equal(*(each.averages["weight"] for each in (ema, again)))
    assert checkpointer(None).load() == 2  # it ends
    with torch.no_grad():
        part.weight.zero_()
    checkpointer(again, last_save_model_only=True, export_dtype="bfloat16").save(3, last=True)
    values = checkpoint_values(tmp_path / "checkpoint" / "step-3")
    assert torch.equal(values["ema.weight"], ema.averages["weight"].bfloat16()) and not values["model.weight"].any()
    again.load_state_dict({"n_averaged": 1})  # weights were left out of loading
    assert again.n_averaged == 0
