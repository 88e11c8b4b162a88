"""torchft's Optimizer and DistributedDataParallel, over a manager with prescribed answers."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from ft import DistributedDataParallel, Optimizer
from ft.compat.wrappers import tensors_in


def calls_of(manager: Mock) -> list[str]:
    return [name for name, *_ in manager.method_calls]


def test_the_optimizer_steps_only_if_the_step_holds():
    manager, model = Mock(), nn.Linear(2, 2)
    inner = torch.optim.AdamW(model.parameters(), lr=0.5)
    optimizer = Optimizer(manager, inner)  # type: ignore[arg-type]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.1)
    before = [p.clone() for p in model.parameters()]
    optimizer.zero_grad()
    assert inner.state and all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    model(torch.ones(2)).sum().backward()
    manager.should_commit.return_value = False
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    manager.should_commit.return_value = True
    optimizer.step()
    assert not torch.equal(model.weight, before[0]) and calls_of(manager) == ["start_quorum", *["should_commit"] * 2]
    schedule.step()
    assert inner.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(inner.param_groups) == 2
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: 0.0)


class Container(torch.optim.Optimizer):
    """Several optimizers that step as one, each with its own state and rates: torchtitan's OptimizersContainer."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([p for one in optimizers for group in one.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)


def test_a_container_of_optimizers_begins_with_their_states():
    model = nn.Linear(2, 2)
    parts = [torch.optim.AdamW([p], lr=0.5, weight_decay=0.5) for p in model.parameters()]
    optimizer, before = Optimizer(Mock(), Container(*parts)), [p.clone() for p in model.parameters()]  # type: ignore[arg-type]
    optimizer.zero_grad()
    for part, p, q in zip(parts, model.parameters(), before, strict=True):
        assert torch.equal(p, q) and part.state[p]["step"] == 0 and part.param_groups[0]["lr"] == 0.5
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert all(part.state[p]["step"] == 1 for part, p in zip(parts, model.parameters(), strict=True))


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaled_loss_makes_the_same_step(fused: bool):
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = Optimizer(Mock(), torch.optim.SGD(model.parameters(), lr=0.5, fused=fused))  # type: ignore[arg-type]
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2)).sum()).backward()
    scaler.step(optimizer)
    assert model.weight.tolist() == [[-0.5] * 2] * 2


@dataclass
class Output:
    loss: Tensor
    count: int = 3


class Shapes(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.ones(2)), make

    def forward(self, x: float) -> Any:
        return self.make((self.weight * x).sum())


@pytest.mark.parametrize(
    "make",
    [
        lambda loss: loss,
        lambda loss: [{"a": loss}, "text"],
        lambda loss: UserDict(a=loss),
        lambda loss: Output(loss),
        lambda loss: (loss, loss),
    ],
)
def test_a_backward_is_seen_whatever_the_module_returns(make: Callable[[Tensor], Any]):
    manager = Mock()
    ddp = DistributedDataParallel(manager, Shapes(make))  # type: ignore[arg-type]
    ddp.module.weight.register_hook(lambda _: manager.gradient() and None)
    assert set(ddp.state_dict()) == {"module.weight"}  # as torch's has it
    for _ in range(2):
        returned = ddp(2.0)
        sum(tensors_in(returned)).backward()
    with torch.no_grad():
        ddp(2.0)
    with ddp.no_sync():
        next(iter(tensors_in(ddp(2.0)))).backward()
    ddp.require_backward_grad_sync = False  # loops that are written for torch's set it in place of no_sync
    next(iter(tensors_in(ddp(2.0)))).backward()
    sent = ["backward_begins", "gradient", "backward_ended"]
    assert calls_of(manager) == ["attach", *sent * 2, "gradient", "gradient"]


def test_a_module_without_parameters_is_refused():
    with pytest.raises(ValueError, match="no parameter to train"):
        DistributedDataParallel(Mock(), nn.Identity())  # type: ignore[arg-type]
