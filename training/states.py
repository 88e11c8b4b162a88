"""Model and optimizer as states of a checkpoint: flat dictionaries by full name, independent of wrappers and sharding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ft.optim_state import init_optim_state

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful  # its import takes a second


class ModelState:
    """Weights and persistent buffers of all model parts."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        """Returns the live tensors (DTensors if sharded); loading into them changes the model."""
        return {plain_name(name): value for part in self._parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the names that are in `state`; others keep their values."""
        for part in self._parts:
            values = {name: state[plain] for name in part.state_dict() if (plain := plain_name(name)) in state}
            part.load_state_dict(values, strict=False)


class OptimizerState:
    """Optimizer state by parameter name: "state.<parameter>.exp_avg", "param_groups.<parameter>.lr", ... The names are those of DCP's
    flattened optimizer state dicts; here an optimizer may also span several model parts."""

    # the choice of kernel depends on the machine
    _NOT_STATE = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})

    def __init__(self, parts: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        self._parts = parts
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Returns the live tensors; creates those of a fresh optimizer first, since loading is in place."""
        init_optim_state(self._optimizer)
        entries = ((prefix, key, value) for prefix, values in self._walk() for key, value in values.items())
        return {f"{prefix}.{key}": value for prefix, key, value in entries if key not in self._NOT_STATE}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the names that are in `state`; others keep their values."""
        for prefix, target in self._walk():
            if prefix.startswith("param_groups."):
                continue  # settings, which are those of this launch's configuration
            for key in target.keys() - self._NOT_STATE:
                if (full := f"{prefix}.{key}") not in state:
                    continue
                if not isinstance(target[key], torch.Tensor):
                    target[key] = state[full]
                elif target[key] is not state[full]:  # in place: a compiled step may refer to the tensor
                    target[key].copy_(state[full])

    def _walk(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the state and the parameter group of every optimized parameter, each with the prefix of its keys."""
        names = {parameter: plain_name(name) for part in self._parts for name, parameter in part.named_parameters()}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                # optimizer.state is a defaultdict: [] would create an entry
                yield f"state.{names[parameter]}", self._optimizer.state.get(parameter, {})
                yield f"param_groups.{names[parameter]}", group


def live_states(states: Mapping[str, Stateful], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Returns the state_dict of each of `names`, without those that are empty."""
    return {name: values for name in names if (values := states[name].state_dict())}


def plain_name(name: str) -> str:
    """Returns the name without the prefixes of torch.compile and activation checkpointing, as DCP does."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
