"""Semi-synchronous training: replica groups step by themselves, and reduce their weights, or changes of weights, only now and then.

    Local SGD             every H steps the weights are averaged                                  Stich, arXiv 1805.09767
    DiLoCo                outer minus local weights are a group's pseudo-gradient; an outer optimizer steps with the mean of those of
                          all groups                                                              Douillard et al., arXiv 2311.08105
    Streaming DiLoCo      the model is split into fragments, reduced one at a time, in turn; the all-reduce overlaps the next steps
                          (delay), and then each group blends in its local weights (alpha)        Douillard et al., arXiv 2501.18512

Flow: semi_sync_manager.py does this for train.py, compat/local_sgd.py for loops that are written for torchft; both reduce
`pseudo_gradients` and pass the mean to `step`. The *outer* weights are those that groups agree on; only `step` changes them, to the same
bits in every group. The model has the *local* weights, which differ between groups until a `step` of their fragment."""

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
    """The weights of a model that are reduced together (`named`). `optimizer`: their outer optimizer; None: the outer weights are the mean
    of local ones. `alpha`: weight of a group's local weights, 0 to 1. Raises ValueError for a weight that `optimizer` lacks."""

    def __init__(self, named: Named, optimizer: torch.optim.Optimizer | None, *, alpha: float = 0.0) -> None:
        self.names = [name for name, _ in named]
        self.local = [parameter for _, parameter in named]
        self.outer = [nn.Parameter(parameter.detach().clone()) for parameter in self.local]
        self._optimizer, self._alpha = optimizer, alpha
        if optimizer is not None:
            known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if missing := [name for name, parameter in named if id(parameter) not in known]:
                raise ValueError(f"the outer optimizer does not have {missing[0]}, a weight of the fragment")
            init_optim_state(optimizer, self.local)
            self.reset()  # a step at learning rate 0 may turn -0.0 into 0.0

    def parameters(self) -> Iterator[nn.Parameter]:
        """Returns the outer weights, like a module's parameters: the manager reduces their gradients and compares their digests."""
        return iter(self.outer)

    @torch.no_grad()
    def pseudo_gradients(self) -> list[Tensor]:
        """Returns this group's share of the mean, in local shards: outer minus local weights; without outer optimizer the local weights."""
        local = _shards(self.local)
        if self._optimizer is None:
            return [shard.clone() for shard in local]
        return list(torch._foreach_sub(_shards(self.outer), local))

    @torch.no_grad()
    def step(self, means: Sequence[Tensor]) -> None:
        """Makes the outer step with the means of pseudo-gradients, by parameter; then local = (1 - alpha) * outer + alpha * local."""
        local, outer = _shards(self.local), _shards(self.outer)
        before = [shard.clone() for shard in local] if self._alpha else []
        if self._optimizer is None:
            torch._foreach_copy_(outer, list(means))
            torch._foreach_copy_(local, outer)
        else:
            torch._foreach_copy_(local, outer)
            gradients = [dtensor_like(parameter, mean) for parameter, mean in zip(self.local, means, strict=True)]
            step_with(self._optimizer, self.local, gradients)  # restores .grad of the inner steps
            torch._foreach_copy_(outer, local)
        if before:
            torch._foreach_lerp_(local, before, self._alpha)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges local and outer weights; a second call undoes that."""
        local, outer = _shards(self.local), _shards(self.outer)
        before = [shard.clone() for shard in local]
        torch._foreach_copy_(local, outer)
        torch._foreach_copy_(outer, before)

    @torch.no_grad()
    def reset(self) -> None:
        """Sets the local weights to the outer ones, which undoes this group's own steps."""
        torch._foreach_copy_(_shards(self.local), _shards(self.outer))

    def weights(self) -> dict[str, Tensor]:
        """Returns the outer weights by name, not copied (DTensors where sharded)."""
        return {name: outer.detach() for name, outer in zip(self.names, self.outer, strict=True)}

    def optimizer_state(self) -> dict[str, Any]:
        """Returns the outer optimizer's state, not copied: NAME.momentum_buffer, ..."""
        return {f"{name}.{key}": value for name, own in self._optimizer_states() for key, value in own.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns all state of the fragment that groups agree on."""
        return {"weights": self.weights(), "optimizer": self.optimizer_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what `state_dict` returned. Does not change the local weights."""
        self.load_weights(state["weights"])
        self.load_optimizer_state(state["optimizer"])

    @torch.no_grad()
    def load_weights(self, state: dict[str, Tensor]) -> None:
        """Loads the outer weights that `state` has, and leaves the others; load_optimizer_state does likewise."""
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


def split(named: Named, count: int, *, of: str = "the model") -> list[Named]:
    """Splits a model into `count` fragments of whole blocks (a layer, with all its weights) in their order, as evenly as blocks allow; the
    result is the same in all groups. Raises ValueError if there are fewer blocks."""
    blocks: dict[str, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named:
        block = re.sub(r"(?<![^.])(\d+)\..*", r"\1", name)  # up to the first number, as in layers.3
        blocks.setdefault(block, []).append((name, parameter))
    if len(blocks) < count:
        raise ValueError(
            f"fault_tolerance.num_fragments = {count}: must be at most {len(blocks)}, the blocks of {of}; nearest: {len(blocks)}"
        )
    sizes = {block: sum(parameter.numel() for _, parameter in members) for block, members in blocks.items()}
    fragments: list[list[tuple[str, nn.Parameter]]] = [[]]
    left, filled, names = sum(sizes.values()), 0, list(blocks)
    for place, block in enumerate(names):
        more = count - len(fragments)  # fragments that are still empty
        full = filled + sizes[block] / 2 > left / (more + 1)
        if fragments[-1] and more and (full or len(names) - place <= more):
            left, filled = left - filled, 0
            fragments.append([])
        fragments[-1] += blocks[block]
        filled += sizes[block]
    return list(fragments)


def _shards(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [to_local(parameter.detach()) for parameter in parameters]
