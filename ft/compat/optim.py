"""torchft's Optimizer: begins a step in zero_grad, and steps only if the step holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ft.materialise import materialise

if TYPE_CHECKING:
    from ft.compat.manager import Manager


class Optimizer(torch.optim.Optimizer):
    """Looks like the optimizer that it wraps, to schedulers too. Closures cannot be had: a step is decided once."""

    def __init__(self, manager: Manager, optim: torch.optim.Optimizer) -> None:
        # not torch's: all state is the wrapped one's
        self.manager, self.optim = manager, optim
        self._is_new = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Also begins the step. Before the first one, an optimizer without state is given what it will need: a group that joins has
        tensors to receive into."""
        self.optim.zero_grad(set_to_none)
        if self._is_new:
            materialise(self.optim)
            self._is_new = False
        self.manager.start_quorum()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing changes where the step does not hold."""
        if closure is not None:
            raise ValueError("Optimizer.step: a closure would compute again what the groups have agreed on")
        if self.manager.should_commit():
            self.optim.step()

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optim"], name)  # param_groups, state, defaults, hooks

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a managed optimizer cannot be copied: it belongs to a manager of this process")

    def __repr__(self) -> str:
        return f"Optimizer({self.optim!r})"
