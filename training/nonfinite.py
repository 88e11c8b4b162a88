"""The error message for a loss or a gradient that is NaN or infinite: rank, parameter, position in the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite

from torch import Tensor

from training.progress import spans

_NAMED = 3  # how many of each are listed; the first tell the story


class NonFinite(RuntimeError):
    """A loss or a gradient is not a number. Nothing was applied."""


def describe(
    rank: int,
    step: int,
    losses: Sequence[tuple[int, Sequence[int], float]],
    named_gradients: Mapping[str, Tensor | None],
) -> str:
    """One line on what is not finite on `rank`, or "". `losses`: slot, positions (sequence indices) and loss sum of each microbatch that
    this rank has run in `step`, which was not taken. `named_gradients`: local tensors; reduced ones may show what another rank caused.
    Waits for the device: the run is over."""
    bad_losses = [
        f"loss {loss} at slot {slot}, {_positions(positions)}" for slot, positions, loss in losses if not isfinite(loss)
    ]
    bad_gradients = []
    for name, gradient in named_gradients.items():
        if gradient is not None and (wrong := gradient.numel() - int(gradient.isfinite().sum())):
            found = {"nan": gradient.isnan(), "inf": gradient.isinf()}
            kinds = [kind for kind, which in found.items() if bool(which.any())]
            bad_gradients.append(f"gradient of {name} ({wrong} of {gradient.numel()} values: {' and '.join(kinds)})")
    parts = [*_first(bad_losses, "microbatches"), *_first(bad_gradients, "parameters")]
    if bad_gradients and losses and not bad_losses:
        run = ", ".join(_positions(positions) for _, positions, _ in losses[:_NAMED])
        parts.append(f"its losses are finite ({run}{', ...' if len(losses) > _NAMED else ''})")
    return f"step {step} not taken, rank {rank}: {'; '.join(parts)}" if parts else ""


def _first(texts: list[str], noun: str) -> list[str]:
    more = len(texts) - _NAMED
    return texts[:_NAMED] + ([f"{more} more {noun}"] if more > 0 else [])


def _positions(positions: Sequence[int]) -> str:
    return spans("position", positions) if positions else "in the order of a stream"
