"""Parameter groups by name, and the rate that follows the schedule."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.config import TrainingConfig
from training.optimizer import (
    LRSchedulerConfig,
    OptimizerConfig,
    OptimizerStep,
    ParameterGroup,
    ShardedAdam,
    Update,
    build_optimizer,
    check_patterns,
)
from training.progress import Progress
from training.spikes import SpikeRule


def model() -> nn.Module:
    part = nn.Module()
    part.norm = nn.LayerNorm(2, bias=False)
    part.layers = nn.ModuleDict({"0": nn.Linear(2, 2, bias=False), "1": nn.Linear(2, 2, bias=False)})
    return part


GROUPS = (ParameterGroup("*norm.weight", weight_decay=0.0), ParameterGroup("layers.1.*", lr_factor=0.5))


def test_the_first_matching_pattern_counts_and_the_rest_is_left_alone():
    part = model()
    config = OptimizerConfig(weight_decay=0.2, groups=(*GROUPS, ParameterGroup("norm.*", weight_decay=9.0)))
    groups = build_optimizer(config, [part]).param_groups
    assert [(len(g["params"]), g["weight_decay"], g["lr_factor"]) for g in groups] == [
        (1, 0.0, 1.0),
        (1, 0.2, 0.5),
        (1, 0.2, 1.0),
    ]
    assert groups[0]["params"][0] is part.norm.weight


@pytest.fixture
def ranks():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
@pytest.mark.parametrize(("scale", "divisor", "moves"), [(1.0, 4.0, True), (1.0, 0.0, False), (torch.inf, 4.0, False)])
def test_a_step_divides_clips_and_sets_the_rate_times_each_groups_factor(
    ranks, implementation: Any, scale: float, divisor: float, moves: bool
):
    config = OptimizerConfig(lr=0.4, implementation=implementation, groups=GROUPS)
    schedule = LRSchedulerConfig(warmup_steps=3, decay_ratio=0.0)
    part = distribute_module(model(), ranks)
    parameters = list(part.parameters())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, scale)
    before, count = [p.full_tensor().clone() for p in parameters], sum(p.numel() for p in parameters)
    optimizer = build_optimizer(config, [part])
    step = OptimizerStep(optimizer, parameters, config, schedule, TrainingConfig(max_norm=0.5), Progress())
    grad_norm, lr, _ = step.step(0, divisor)
    assert grad_norm == pytest.approx(scale * count**0.5 / (divisor or 1))
    assert lr == pytest.approx(0.1 if moves else 0.0)
    assert [torch.equal(p.full_tensor(), old) for p, old in zip(parameters, before, strict=True)] == [not moves] * 3
    if moves:
        assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.1, 0.05, 0.1])
        means = [optimizer.state[p]["exp_avg"].full_tensor() / (1 - config.beta1) for p in parameters]
        assert torch.cat([g.flatten() for g in means]).norm().item() == pytest.approx(0.5, rel=1e-4)
    if moves or not divisor:
        assert all(p.grad is None for p in parameters)
    else:  # what is not a number can be looked for
        assert all(
            torch.equal(p.grad.full_tensor(), torch.full_like(old, scale))
            for p, old in zip(parameters, before, strict=True)
        )


class Unscaled(ShardedAdam):
    """A new optimizer, whose kernel knows neither grad_scale nor found_inf."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"])


@pytest.mark.parametrize("kind", [Unscaled, torch.optim.SGD])
def test_an_optimizer_gets_divided_gradients_unless_its_class_says_that_its_kernels_divide(ranks, kind: Any):
    part = distribute_module(model(), ranks)
    parameters, training = list(part.parameters()), TrainingConfig(max_norm=0.0)
    config, schedule = OptimizerConfig(lr=0.5, implementation="fused"), LRSchedulerConfig(0, decay_ratio=0.0)
    optimizer = kind([{"params": parameters, "lr_factor": 1.0}], lr=0.5)
    step = OptimizerStep(optimizer, parameters, config, schedule, training, Progress())
    before = [p.full_tensor().clone() for p in parameters]
    for scale in (4.0, torch.inf):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, scale)
        step.step(0, 8.0)
    for parameter, old in zip(parameters, before, strict=True):
        torch.testing.assert_close(parameter.full_tensor(), old - 0.5 * 4.0 / 8.0)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_spike_is_not_applied_and_not_in_the_window(ranks, implementation: Any):
    part = distribute_module(model(), ranks)
    parameters, training = list(part.parameters()), TrainingConfig(spike_window=4, spike_factor=3.0)
    config = OptimizerConfig(lr=0.4, implementation=implementation)
    optimizer, rule = build_optimizer(config, [part]), SpikeRule(training)
    step = OptimizerStep(optimizer, parameters, config, LRSchedulerConfig(), training, Progress(), rule)

    def train(number: int, loss: float, scale: float, divisor: float = 2.0) -> Update:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, scale)
        return step.step(number, divisor, loss)

    updates = [train(number, 5.0 - number, 1.0 + number / 8) for number in range(4)]
    assert all(update.lr > 0 and not update.spike for update in updates)
    state = torch.cat([p.full_tensor().flatten() for p in parameters]).clone()
    moments = [optimizer.state[p]["exp_avg"].full_tensor().clone() for p in parameters]
    window = rule.state_dict()
    nan = float("nan")
    for in_a_row, (loss, scale, spike) in enumerate(
        [
            (8.0, 1.0, "loss 8 above "),
            (3.0, 9.0, "gradient norm "),
            (nan, 1.0, "loss nan"),
            (3.0, nan, "gradient norm nan"),
        ],
        1,
    ):
        update = train(4, loss, scale)
        assert update.lr == 0 and update.spike.startswith(spike) and rule.in_a_row == in_a_row
        of_mean = scale / 2.0 * sum(p.numel() for p in parameters) ** 0.5
        assert update.grad_norm == pytest.approx(of_mean, nan_ok=True)
    assert torch.equal(torch.cat([p.full_tensor().flatten() for p in parameters]), state)
    for parameter, moment in zip(parameters, moments, strict=True):
        assert torch.equal(optimizer.state[parameter]["exp_avg"].full_tensor(), moment)
        assert optimizer.state[parameter]["step"].item() == 4
    assert json.loads(rule.state_dict()["window"])["values"] == json.loads(window["window"])["values"]
    update = train(4, 0.0, 0.5, divisor=0.0)  # without tokens there is nothing to judge
    assert (update.lr, update.spike, rule.in_a_row) == (0.0, "", 4)
    assert train(5, 3.0, 1.0).lr > 0 and rule.in_a_row == 0


class DTensorOps(TorchDispatchMode):
    """Records the operations on a DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs))):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_an_update_of_shards_is_torchs_without_its_dispatch(ranks, name: str, implementation: str):
    kinds = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}
    torch.manual_seed(0)
    theirs = distribute_module(model(), ranks)
    ours = distribute_module(model(), ranks)
    config = OptimizerConfig(name=name, lr=0.01, implementation=implementation)
    own = build_optimizer(config, [ours])
    settings = {key: value for key, value in own.defaults.items() if key != "decoupled_weight_decay"}
    peer = kinds[name](theirs.parameters(), **settings)
    ours.load_state_dict(theirs.state_dict())
    for _ in range(3):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            one.grad = torch.full_like(one, torch.randn(()).item())
            other.grad = one.grad.clone()
        with DTensorOps() as ops:
            own.step()
        peer.step()
    assert ops.seen == []
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(own.state[one][key], DTensor)
            assert torch.equal(own.state[one][key].full_tensor(), peer.state[other][key].full_tensor())


def test_a_pattern_that_matches_nothing_is_refused():
    check_patterns(OptimizerConfig(groups=GROUPS), made := model())
    with pytest.raises(
        ValueError,
        match=r'optimizer.groups\[0\].pattern = "\*bias": matches no parameter that the optimizer steps; the names are layers.\*.weight',
    ):
        check_patterns(OptimizerConfig(groups=(ParameterGroup("*bias"),)), made)


def test_a_pattern_that_matches_only_frozen_parameters_is_refused():
    made = model()
    made.norm.weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"optimizer.groups\[0\].pattern = .*; the names are layers.\*.weight$"):
        check_patterns(OptimizerConfig(groups=GROUPS), made)


@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_rank_whose_parameters_are_all_frozen_takes_part_in_a_step(ranks, implementation: Any):
    """A stage of a pipeline may be frozen as a whole; its rank has the norm of the others."""
    part = distribute_module(model().requires_grad_(False), ranks)
    config, schedule = OptimizerConfig(implementation=implementation), LRSchedulerConfig(0, decay_ratio=0.0)
    parameters, training = list(part.parameters()), TrainingConfig()
    step = OptimizerStep(build_optimizer(config, [part]), parameters, config, schedule, training, Progress())
    assert step.step(0, 8.0) == Update(0.0, config.lr)
