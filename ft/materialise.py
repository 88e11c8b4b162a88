"""An optimizer's state before its first step: a heal receives into its tensors, checkpoints are saved from them and loaded into them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def materialise(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor] | None = None) -> None:
    """Gives an optimizer that has never stepped the state that its first step would begin with, so that there are tensors to receive
    into; changes no bit of a weight. One that has stepped, or holds gradients, is left alone. `parameters`: these alone get a state, and
    all gradients are put back.

    A step with zero gradients, at rate 0 and without weight decay, makes the tensors; the step counters go back to 0, lest they bend Adam's
    bias correction.
    """
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    own = [p for p in everything if p.requires_grad] if parameters is None else parameters
    gradients = [p.grad for p in everything]
    if any(p in optimizer.state for p in own) or (parameters is None and any(g is not None for g in gradients)):
        return
    rates = [{key: group[key] for key in ("lr", "weight_decay") if key in group} for group in optimizer.param_groups]
    for group, own_rates in zip(optimizer.param_groups, rates, strict=True):
        zero = {key: torch.zeros_like(x) if isinstance(x, torch.Tensor) else 0.0 for key, x in own_rates.items()}
        group.update(zero)
    optimizer.zero_grad(set_to_none=True)
    for parameter in own:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, gradient in zip(everything, gradients, strict=True):
        parameter.grad = gradient
    for group, own_rates in zip(optimizer.param_groups, rates, strict=True):
        group.update(own_rates)
    for state in (optimizer.state.get(parameter, {}) for parameter in own):
        if "step" in state:
            state["step"] = state["step"].zero_() if isinstance(state["step"], torch.Tensor) else 0
