"""A quorum of one: the manager of a job without fault tolerance. No network, no thread, no gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ft.seam import Commit, Deal, Sums


class SoloManager:
    """Deals the positions in order, one slot of `slot_size` sequences a step, and commits every step that is finite.

    The cursor counts sequences, not slots, so a run may be resumed with another batch size or number of ranks.
    """

    def __init__(self, slot_size: int) -> None:
        self._slot_size = slot_size
        self._step = 0
        self._position = 0  # the first sequence that no committed step has used
        self._registered: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    @property
    def step(self) -> int:
        return self._step

    def register(self, name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        if name in self._registered:
            raise ValueError(f'state "{name}" is registered already')
        self._registered[name] = (get, set)

    def attach(self, model_parts: Sequence[Any]) -> None:
        """Nothing to sum with: the gradients of one group are the gradients."""

    def begin_step(self) -> Deal:
        return Deal(self._step, (self._position,))

    def reduce(self, tokens_per_slot: Sequence[float], loss_sum: float, finite: bool) -> Sums:
        return Sums(tuple(tokens_per_slot), loss_sum, finite)

    def commit(self, sums: Sums) -> Commit | None:
        divisor = sum(sums.tokens_per_slot)
        if not sums.finite:
            return None
        if divisor == 0:
            raise RuntimeError(
                f"step {self._step + 1}: none of the sequences from {self._position} on has a target to learn"
            )
        self._step += 1
        self._position += self._slot_size
        return Commit(divisor, contributors=(0,), mean_loss=sums.loss_sum / divisor, quorum_size=1)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step, self._position = int(state["step"]), int(state["position"])

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass
