"""The state of an optimizer before its first step, so that a heal or a checkpoint has tensors to load into."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def init_optim_state(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor] | None = None) -> None:
    """Creates the state that the optimizer's first step would begin with; changes no bit of a weight. Does nothing if there is a state
    already, or, without `parameters`, a gradient. `parameters`: only these get a state, and all gradients are restored.

    A step with zero gradients, rate 0 and no weight decay creates the tensors; then those that it has changed are reset, such as the step
    count (Adam's bias correction). SGD's dampening then counts from the first step on."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    own = trained if parameters is None else parameters
    if any(p in optimizer.state for p in own) or (parameters is None and any(p.grad is not None for p in own)):
        return
    rates = [{key: x for key, x in group.items() if key in ("lr", "weight_decay")} for group in optimizer.param_groups]
    for group, own_rates in zip(optimizer.param_groups, rates, strict=True):
        for key, rate in own_rates.items():
            group[key] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    created = set(own)
    step_with(optimizer, own, [torch.zeros_like(p) for p in own])
    for group, own_rates in zip(optimizer.param_groups, rates, strict=True):
        group.update(own_rates)
        # NAdam has mu_product, ASGD mu and eta, Rprop step_size
        initial = {"step": 0, "mu_product": 1, "mu": 1, "eta": group["lr"], "step_size": group["lr"]}
        for state in (optimizer.state[p] for p in group["params"] if p in created and p in optimizer.state):
            for key in initial.keys() & state.keys():
                state[key] = state[key].fill_(initial[key]) if isinstance(state[key], torch.Tensor) else initial[key]


def step_with(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> None:
    """Steps these parameters only, with these gradients. Afterwards .grad of all parameters is restored."""
    before = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    try:
        optimizer.zero_grad(set_to_none=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
