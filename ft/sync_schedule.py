"""When groups that step by themselves (semi_sync.py) sum what. Standard library only: the settings are checked before torch is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """`sync_steps`: optimizer steps between two sums of one fragment. `delay`: optimizer steps that its sum may travel. `alpha`: the share
    of its own way that a group keeps meanwhile."""

    sync_steps: int
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0

    @property
    def inner_steps(self) -> int:
        """Between two sums, of different fragments if there are several."""
        return self.sync_steps // self.fragments

    def check(self, names: Sequence[str]) -> None:
        """Raises ValueError, in the words of `names` for the four figures, for what cannot be."""
        steps, count, delay, alpha = names
        fragments = self.fragments
        if fragments < 1:
            raise ValueError(f"{count} = {fragments}: must be at least 1; nearest: 1")
        if self.sync_steps < 1:
            raise ValueError(f"{steps} = {self.sync_steps}: must be at least 1; nearest: {fragments}")
        if self.sync_steps % fragments:
            below = self.sync_steps // fragments * fragments
            nearest = f"{below} or {below + fragments}" if below else f"{fragments}"
            raise ValueError(
                f"{steps} = {self.sync_steps}: must be a multiple of {count} = {fragments}, of which one is summed at a time; "
                f"nearest: {nearest}"
            )
        inner = self.inner_steps
        if not 0 <= self.delay < inner:
            every = f"{steps} / {count} = {inner}" if fragments > 1 else f"{steps} = {inner}"
            raise ValueError(
                f"{delay} = {self.delay}: must be from 0 to {inner - 1}, since the next sum is due after {every} steps; "
                f"nearest: {min(max(self.delay, 0), inner - 1)}"
            )
        if not 0 <= self.alpha <= 1:
            raise ValueError(
                f"{alpha} = {self.alpha:g}: must be from 0 to 1; nearest: {min(max(self.alpha, 0.0), 1.0):g}"
            )
