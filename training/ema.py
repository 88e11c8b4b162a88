"""Exponential moving average of the weights (Polyak and Juditsky 1992, doi 10.1137/0330046), to evaluate and to export."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from training.states import plain_name


class EMA:
    """The average of each parameter, fp32 and sharded as the parameter is. The first update takes the weights; each later one moves the
    average towards them by (1 - decay) of the distance, as torch's AveragedModel does.

    It is saved in checkpoints as EMA_STATE, sent to healing groups, and compared between groups as weights are (hence `parameters`)."""

    def __init__(self, parts: Iterable[nn.Module], decay: float) -> None:
        named = [(plain_name(name), parameter) for part in parts for name, parameter in part.named_parameters()]
        self.averages = {name: torch.zeros_like(p, dtype=torch.float32, requires_grad=False) for name, p in named}
        self.n_averaged = 0  # updates since the average began
        self._weights = [parameter for _, parameter in named]
        self._average = get_ema_multi_avg_fn(decay)

    def parameters(self) -> Iterator[Tensor]:
        yield from self.averages.values()

    @torch.no_grad()
    def update(self) -> None:
        """Follows the weights of a committed step."""
        both = [*self.averages.values(), *self._weights]
        shards = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in both]
        averages, weights = shards[: len(both) // 2], [shard.float() for shard in shards[len(both) // 2 :]]
        if self.n_averaged:
            self._average(averages, weights, self.n_averaged)
        else:
            torch._foreach_copy_(averages, weights)
        self.n_averaged += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns the live tensors; loading into them changes the average."""
        return {**self.averages, "n_averaged": self.n_averaged}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the averages; resets them if that of any parameter is missing."""
        # of another model, or left out of loading
        if not {*self.averages, "n_averaged"} <= state.keys():
            self.reset()
            return
        for name, average in self.averages.items():
            if average is not state[name]:
                average.copy_(state[name])
        self.n_averaged = state["n_averaged"]

    def reset(self) -> None:
        """Forgets the average: the next update takes the weights."""
        self.n_averaged = 0
