"""AdamW or Adam over the parameters, in groups chosen by name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import nn


@dataclass(frozen=True)
class ParameterGroup:
    """[[optimizer.groups]]: an exception for the parameters whose name matches."""

    pattern: Annotated[str, 'shell pattern over parameter names, such as "*norm.weight" or "output.*"']
    weight_decay: Annotated[float, "weight decay of these; -1: optimizer.weight_decay", ">= -1"] = -1.0
    lr_factor: Annotated[float, "their learning rate is the schedule's times this", ">= 0"] = 1.0


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer]: the update rule."""

    name: Annotated[
        Literal["AdamW", "Adam"], "AdamW decays weights apart from the gradient; Adam adds the decay to it"
    ] = "AdamW"
    lr: Annotated[float, "peak learning rate", "> 0"] = 8e-4
    beta1: Annotated[float, "decay of the gradient's running mean", ">= 0", "< 1"] = 0.9
    beta2: Annotated[float, "decay of the squared gradient's running mean", ">= 0", "< 1"] = 0.95
    eps: Annotated[float, "added to the root of the running square", "> 0"] = 1e-8
    weight_decay: Annotated[float, "weight decay, per unit of learning rate", ">= 0"] = 0.1
    implementation: Annotated[Literal["fused", "foreach", "for-loop"], "which of torch's kernels"] = "fused"
    groups: Annotated[tuple[ParameterGroup, ...], "exceptions by name; the first pattern that matches counts"] = ()


def build_optimizer(config: OptimizerConfig, parts: Iterable[nn.Module]) -> torch.optim.Optimizer:
    """One optimizer over all parts. Its state tensors are sharded as the parameters are."""
    named = [(name, parameter) for part in parts for name, parameter in part.named_parameters()]
    rule = {"AdamW": torch.optim.AdamW, "Adam": torch.optim.Adam}[config.name]
    return rule(
        _parameter_groups(config, named),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def check_patterns(config: OptimizerConfig, names: Iterable[str]) -> None:
    """Raises ValueError for a pattern that matches none of the model's parameter names: a typo would else decay what it should not."""
    names = list(names)
    for index, group in enumerate(config.groups):
        if not fnmatch.filter(names, group.pattern):
            kinds = sorted({".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names})
            raise ValueError(
                f'optimizer.groups[{index}].pattern = "{group.pattern}": matches no parameter; the names are {", ".join(kinds)}'
            )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the schedule's rate, times each group's own factor."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]


def _parameter_groups(config: OptimizerConfig, named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """One torch group per exception and one for the rest, empty ones left out."""
    settings = [*config.groups, ParameterGroup("*")]
    members: list[list[nn.Parameter]] = [[] for _ in settings]
    for name, parameter in named:
        first = next(i for i, group in enumerate(settings) if fnmatch.fnmatchcase(name, group.pattern))
        members[first].append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": config.weight_decay if group.weight_decay < 0 else group.weight_decay,
            "lr_factor": group.lr_factor,
        }
        for group, parameters in zip(settings, members, strict=True)
        if parameters
    ]
