"""Parameter groups by name, and the rate that follows the schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from training.optimizer import OptimizerConfig, ParameterGroup, build_optimizer, check_patterns, set_learning_rate


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


def test_the_rate_is_set_times_each_groups_factor():
    optimizer = build_optimizer(OptimizerConfig(groups=GROUPS), [model()])
    set_learning_rate(optimizer, 0.1)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.1, 0.05, 0.1])


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_every_kernel_moves_the_weights_alike(name: str, implementation: str):
    part = model()
    torch.manual_seed(0)
    for parameter in part.parameters():
        nn.init.normal_(parameter)
        parameter.grad = torch.randn_like(parameter)
    before = [p.detach().clone() for p in part.parameters()]
    optimizer = build_optimizer(
        OptimizerConfig(name=name, lr=0.01, weight_decay=0.0, implementation=implementation), [part]
    )
    optimizer.step()
    for old, new in zip(before, part.parameters(), strict=True):
        torch.testing.assert_close(
            old - new, 0.01 * new.grad.sign(), rtol=1e-4, atol=1e-6
        )  # Adam's first step is lr * sign


def test_a_pattern_that_matches_nothing_is_refused():
    names = [name for name, _ in model().named_parameters()]
    check_patterns(OptimizerConfig(groups=GROUPS), names)
    with pytest.raises(
        ValueError,
        match=r'optimizer.groups\[0\].pattern = "\*bias": matches no parameter; the names are layers.\*.weight',
    ):
        check_patterns(OptimizerConfig(groups=(ParameterGroup("*bias"),)), names)
