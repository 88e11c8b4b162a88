"""States to heal: a source's, and a joiner's of the same shape with other contents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ft.healing.capture import StateRegistry, StateView
from ft.healing.format import CHUNK_BYTES

WORDS = CHUNK_BYTES // 4  # fp32 numbers in a chunk


@dataclass
class Group:
    """A group's rank: its registered state, and what has been loaded into it."""

    values: dict[str, Any]
    loaded: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = StateRegistry()
        for name in self.values:
            self.state.register_state(
                name, lambda name=name: self.values[name], lambda it, name=name: self._load(name, it)
            )

    def view(self) -> StateView:
        return self.state.view()

    def _load(self, name: str, value: Any) -> None:
        self.loaded[name] = value


def large(seed: int, chunks: int = 40) -> Group:
    """One tensor of some chunks and a few small ones around it, and a ledger."""
    generator = torch.Generator().manual_seed(seed)
    model = {
        "first": torch.randn(7, generator=generator),
        "weights": torch.arange(chunks * WORDS - 1000) * float(seed),
        "last": torch.randn(3, 5, generator=generator),
    }
    return Group({"model": model, "ledger": {"step": seed, "holes": [seed, seed + 1]}})


def equal(one: Any, other: Any) -> bool:
    """Compares bit for bit, types included."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.dtype != other.dtype or one.shape != other.shape:
            return False
        plain = (x.detach().clone(memory_format=torch.contiguous_format) for x in (one, other))
        return torch.equal(*(x.view(-1).view(torch.uint8) for x in plain))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return repr(one) == repr(other)
