"""The rule by which a step is a spike, and the values of earlier steps that it compares with."""

from __future__ import annotations

import json
import math
import struct
from collections import deque
from typing import Any

import torch
from torch import Tensor

from ft.seam import Commit
from training.config import TrainingConfig
from training.progress import as_ranges

_GREATEST = torch.finfo(torch.float32).max


class SpikeRule:
    """A step is a spike if its loss or the norm of its gradient is NaN or infinite, or exceeds the mean of the window by more than
    training.spike_factor standard deviations. The window has the values of the newest training.spike_window steps that were applied, so a
    spike does not raise the next bound; until it is full, only NaN and Inf count. All ranks of all groups have the same values and bounds,
    in fp32, so they take the same decision, and the fused kernel (`accepts`) the same as the host (`judge`). The window is part of every
    checkpoint: a run that goes back to one (on_spike = rewind) compares with the steps before that one."""

    def __init__(self, config: TrainingConfig) -> None:
        self._factor = config.spike_factor
        self._window = deque[tuple[float, float]](maxlen=config.spike_window)  # loss and gradient norm of each step
        self.in_a_row = 0  # spikes up to the newest step

    def bounds(self, divisor: float) -> tuple[float, float]:
        """Returns the greatest loss, and the greatest norm of a gradient summed over `divisor` tokens, that are no spike."""
        if not self._window or len(self._window) < (self._window.maxlen or 0):
            return _GREATEST, _GREATEST
        losses, norms = zip(*self._window, strict=True)
        return _fp32(self._bound(losses)), _fp32(self._bound(norms) * divisor)

    def _bound(self, values: tuple[float, ...]) -> float:
        mean = math.fsum(values) / len(values)  # fsum: the same bits in every version of Python
        return mean + self._factor * math.sqrt(
            math.fsum((value - mean) * (value - mean) for value in values) / len(values)
        )

    def accepts(self, norm: Tensor, loss: Tensor, divisor: float) -> Tensor:
        """Returns True, as a tensor on the device, if the step is not a spike; without a host sync. `norm`: of the sum over `divisor`
        tokens, fp32."""
        max_loss, max_norm = self.bounds(divisor)
        return (loss <= max_loss) & (norm <= max_norm)  # false of NaN and Inf

    def judge(self, norm: float, loss: float, divisor: float) -> str:
        """Returns why the step with these values, those of `accepts`, is a spike; "": it is none, and enters the window."""
        max_loss, max_norm = self.bounds(divisor)
        words = [
            _words(name, value, bound, self._factor, len(self._window))
            for name, value, bound, is_spike in (
                ("loss", loss, max_loss, not loss <= max_loss),
                ("gradient norm", norm / divisor, max_norm / divisor, not norm <= max_norm),
            )
            if is_spike
        ]
        self.in_a_row = self.in_a_row + 1 if words else 0
        if not words:
            self._window.append((loss, norm / divisor))
        return " and ".join(words)

    def reset(self) -> None:
        self.in_a_row = 0
        self._window.clear()

    def state_dict(self) -> dict[str, Any]:
        """Returns the window as one JSON string: its length varies, and that of a checkpoint's values must not."""
        return {"window": json.dumps({"in_a_row": self.in_a_row, "values": list(self._window)})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads the window; if it is longer than this run's, its newest values."""
        loaded = json.loads(state["window"])
        self.in_a_row = int(loaded["in_a_row"])
        self._window.clear()
        self._window.extend((float(loss), float(norm)) for loss, norm in loaded["values"])


def _fp32(value: float) -> float:
    """Returns the nearest number of fp32."""
    return float(struct.unpack("f", struct.pack("f", min(value, _GREATEST)))[0])


def _words(name: str, value: float, bound: float, factor: float, steps: int) -> str:
    if not math.isfinite(value):
        return f"{name} {value}"
    return f"{name} {value:.6g} above {bound:.6g}, the mean of {steps} steps and {factor:g} standard deviations"


def not_applied(step: int, commit: Commit, spike: str, slot_size: int) -> str:
    """Returns a text such as "step 80 not applied: loss nan; positions 40-47"."""
    positions = sorted(slot + place for slot, _ in commit.slots for place in range(slot_size))
    return f"step {step} not applied: {spike}; {as_ranges('position', positions)}"
