"""An optimizer's state before its first step: a heal receives into its tensors, and checkpoints are saved from them and loaded into them.

The one file of ft that training/ imports, for a checkpoint wants the same; torch alone.
"""

from __future__ import annotations

import torch


def materialise(optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer that has never stepped the state that its first step would begin with, so that there are tensors to receive
    into; changes no bit of a weight. One that has stepped, or holds gradients, is left alone.

    A step with zero gradients at rate 0 makes the tensors; the step counters go back to 0, lest they bend Adam's bias correction.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if optimizer.state or any(p.grad is not None for p in parameters):
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].zero_() if isinstance(state["step"], torch.Tensor) else 0
