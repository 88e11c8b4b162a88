"""Semi-synchronous training: groups step by themselves, and agree now and then on what they have come to.

    Local SGD             every H steps the weights are averaged                                  Stich, arXiv 1805.09767
    DiLoCo                what a group has moved away from the agreed weights is a gradient; the mean of the groups' is given to an
                          outer optimizer                                                         Douillard et al., arXiv 2311.08105
    Streaming DiLoCo      the model is split into fragments, synchronised one at a time, in turn; the all-reduce overlaps the next steps
                          (delay), and on arrival each group blends in its local weights (alpha)  Douillard et al., arXiv 2501.18512

Flow: semi_sync_manager.py does this for train.py, local_sgd.py for loops that are written for torchft; both sum `pseudo_gradients` and
hand the mean to `step`. Groups agree on the *outer* weights, which change in `step` alone, by the same bits in every group. The model has
*local* weights, each group's own until a `step` of their fragment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ft.buckets import dtensor_like, to_local
from ft.optim_state import init_optim_state, step_with

Named = Sequence[tuple[str, nn.Parameter]]


class Fragment:
    """Weights that are agreed on together: `named`, of the model. `optimizer`: the outer one, over these weights (and maybe others); None:
    the outer weights are the mean of the local ones. `alpha`: weight of a group's local weights, 0 to 1. Raises ValueError for
    a weight that the optimizer does not have."""

    def __init__(self, named: Named, optimizer: torch.optim.Optimizer | None, *, alpha: float = 0.0) -> None:
        self.names = [name for name, _ in named]
        self.local = [parameter for _, parameter in named]
        self.outer = [nn.Parameter(parameter.detach().clone()) for parameter in self.local]
        self._optimizer, self._alpha = optimizer, alpha
        if optimizer is not None:
            known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if missing := [name for name, parameter in named if id(parameter) not in known]:
                raise ValueError(f"the outer optimizer does not have {missing[0]}, which is to be summed")
            init_optim_state(optimizer, self.local)
            self.reset()  # a step at rate 0 may make 0.0 of -0.0

    def parameters(self) -> Iterator[nn.Parameter]:
        """The outer weights, as a module has parameters: what a manager sums the gradients of, and compares."""
        return iter(self.outer)

    @torch.no_grad()
    def pseudo_gradients(self) -> list[Tensor]:
        """This group's share of the mean, by local shard: outer minus local weights; without an outer optimizer the local ones."""
        local = _shards(self.local)
        if self._optimizer is None:
            return [shard.clone() for shard in local]
        return list(torch._foreach_sub(_shards(self.outer), local))

    @torch.no_grad()
    def step(self, means: Sequence[Tensor]) -> None:
        """The outer step: `means` of all groups' pseudo-gradients, by parameter. Then local = (1 - alpha) * outer + alpha * local."""
        local, outer = _shards(self.local), _shards(self.outer)
        went = [shard.clone() for shard in local] if self._alpha else []
        if self._optimizer is None:
            torch._foreach_copy_(outer, list(means))
            torch._foreach_copy_(local, outer)
        else:
            torch._foreach_copy_(local, outer)
            gradients = [dtensor_like(parameter, mean) for parameter, mean in zip(self.local, means, strict=True)]
            step_with(self._optimizer, self.local, gradients)  # the inner steps' gradients, for the user to read, stay
            torch._foreach_copy_(outer, local)
        if went:
            torch._foreach_lerp_(local, went, self._alpha)

    @torch.no_grad()
    def swap(self) -> None:
        """Local and outer weights change places. Twice is nothing."""
        local, outer = _shards(self.local), _shards(self.outer)
        went = [shard.clone() for shard in local]
        torch._foreach_copy_(local, outer)
        torch._foreach_copy_(outer, went)

    @torch.no_grad()
    def reset(self) -> None:
        """The local weights are the outer ones: what this group did by itself is undone."""
        torch._foreach_copy_(_shards(self.local), _shards(self.outer))

    def weights(self) -> dict[str, Tensor]:
        """The outer ones, live (DTensors where sharded)."""
        return {name: outer.detach() for name, outer in zip(self.names, self.outer, strict=True)}

    def optimizer_state(self) -> dict[str, Any]:
        """State of the outer optimizer: NAME.momentum_buffer, ...; live."""
        return {f"{name}.{key}": value for name, own in self._optimizer_states() for key, value in own.items()}

    def state_dict(self) -> dict[str, Any]:
        """All that groups agree on."""
        return {"weights": self.weights(), "optimizer": self.optimizer_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The local weights stay as they are."""
        self.load_weights(state["weights"])
        self.load_optimizer_state(state["optimizer"])

    @torch.no_grad()
    def load_weights(self, state: dict[str, Tensor]) -> None:
        """Takes over what is there; so does load_optimizer_state."""
        for name, outer in zip(self.names, self.outer, strict=True):
            if name in state:
                outer.copy_(state[name])

    @torch.no_grad()
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        for name, own in self._optimizer_states():
            for key, value in own.items():
                given = state.get(f"{name}.{key}", value)
                own[key] = value.copy_(given) if isinstance(value, Tensor) else given

    def _optimizer_states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._optimizer is not None:
            for name, parameter in zip(self.names, self.local, strict=True):
                yield name, self._optimizer.state.get(parameter, {})


def cut(named: Named, count: int) -> list[Named]:
    """A model in `count` fragments: whole blocks (a layer, with all its weights) in their order, as even as that allows; the same in
    all groups. Raises ValueError where there are fewer blocks."""
    blocks: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        block = re.sub(r"(?<![^.])(\d+)\..*", r"\1", name)  # up to the first number, as in layers.3
        blocks.setdefault(block, []).append((name, parameter))
    if len(blocks) < count:
        raise ValueError(
            f"fault_tolerance.num_fragments = {count}: the model has {len(blocks)} blocks to share out; nearest: {len(blocks)}"
        )
    sizes = {block: sum(parameter.numel() for _, parameter in members) for block, members in blocks.items()}
    fragments: list[list[tuple[str, nn.Parameter]]] = [[]]
    left, filled, names = sum(sizes.values()), 0, list(blocks)
    for place, block in enumerate(names):
        more = count - len(fragments)  # fragments that are still to be begun
        full = filled + sizes[block] / 2 > left / (more + 1)
        if fragments[-1] and more and (full or len(names) - place <= more):
            left, filled = left - filled, 0
            fragments.append([])
        fragments[-1] += blocks[block]
        filled += sizes[block]
    return list(fragments)


def _shards(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [to_local(parameter.detach()) for parameter in parameters]
