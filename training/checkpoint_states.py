"""The states of model and optimizer as flat dictionaries under full parameter names, which any layout can load.

Flow: train.py makes them over what it built; checkpoint.py asks them for live tensors to write from and to read into.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ft.materialise import materialise

FIGURES = "figures"  # what metrics_writer.py remembers of this run's own files; only groups that share a run have it


class ModelState:
    """The weights and persistent buffers of all model parts under their full names, whatever wraps or shards them."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, Any]:
        """Live tensors (DTensors where sharded); reading into them changes the model."""
        return {plain_name(name): value for part in self._parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what is there; names that are missing stay as they are."""
        for part in self._parts:
            own = {name: state[plain] for name in part.state_dict() if (plain := plain_name(name)) in state}
            part.load_state_dict(own, strict=False)


class OptimizerState:
    """An optimizer's state by parameter name: "state.<parameter>.exp_avg", "param_groups.<parameter>.lr", ...

    The names are those of DCP's flattened optimizer state dicts, without its restrictions: one optimizer may span
    several model parts, a part may have several optimizers. Which kernel does the update (fused, foreach, ...) is the
    machine's business: neither saved nor restored.
    """

    _NOT_STATE = frozenset({"params", "fused", "foreach", "capturable", "differentiable"})

    def __init__(
        self, parts: Sequence[nn.Module], optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    ) -> None:
        self._parts = parts
        self._optimizers = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)

    def state_dict(self) -> dict[str, Any]:
        """Live tensors, made first where there are none yet: a fresh optimizer has nothing to load into."""
        for optimizer in self._optimizers:
            materialise(optimizer)
        entries: dict[str, Any] = {}
        for name, group, state in self._walk():
            entries.update({f"state.{name}.{key}": value for key, value in state.items()})
            entries.update({f"param_groups.{name}.{key}": v for key, v in group.items() if key not in self._NOT_STATE})
        return entries

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what is there; names that are missing stay as they are."""
        for name, group, own in self._walk():
            for target, prefix in ((own, "state"), (group, "param_groups")):
                for key in target.keys() - self._NOT_STATE:
                    if (full := f"{prefix}.{name}.{key}") not in state:
                        continue
                    if not isinstance(target[key], torch.Tensor):
                        target[key] = state[full]
                    elif target[key] is not state[full]:  # it keeps its identity: it may be live in a compiled step
                        target[key].copy_(state[full])

    def _walk(self) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
        """For every parameter that is optimized: its name, its group, its state."""
        names = {parameter: plain_name(name) for part in self._parts for name, parameter in part.named_parameters()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    # optimizer.state is a defaultdict: looking up would make an entry
                    yield names[parameter], group, optimizer.state.get(parameter, {})


def plain_name(name: str) -> str:
    """The name without what torch.compile and activation checkpointing wrap around modules, as DCP has it."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
