"""Python's garbage, collected by all ranks at the same step: one rank's pause is every rank's wait.

Floor 3; train.py makes one and calls it once a step.
"""

from __future__ import annotations

import gc


class GarbageCollection:
    """With `freq` > 0 takes automatic collection off and collects on every `freq`-th step; with 0 leaves Python alone.

    Whatever lives at construction (modules, the model) is set aside first (gc.freeze), which turns a full collection of
    some 100 ms with torch loaded into one of a few.
    """

    def __init__(self, freq: int) -> None:
        self._freq = freq
        if freq:
            gc.disable()
            gc.collect()
            gc.freeze()

    def step(self, step: int) -> None:
        """Collects if `step`'s turn has come: all generations, for nothing else empties the oldest."""
        if self._freq and step % self._freq == 0:
            gc.collect()

    def close(self) -> None:
        """Gives collection back to Python."""
        if self._freq:
            gc.unfreeze()
            gc.enable()
