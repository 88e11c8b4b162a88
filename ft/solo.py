"""A quorum of one: the manager of a job without fault tolerance. No network, no thread, no gRPC."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any

from ft.protocol.step import Ledger
from ft.seam import Commit, DataAssignment, StepTotals, Stopped, from_checkpoint, to_checkpoint

ALONE = "solo"


class SoloManager:
    """Deals the positions in order, one slot of `slot_size` sequences a step, and commits every finite step; another raises Stopped. Its
    ledger is that of replica groups, so a run may be resumed with fault tolerance or without, with another batch size or count of ranks."""

    def __init__(self, slot_size: int) -> None:
        self.step = 0
        self._ledger = Ledger(slot_size)
        self._registered: set[str] = set()
        self.left, self.writes, self.confirmed_s = False, ("", 0), -inf
        self._until: int | None = None
        self.last_pass: Callable[[int], AbstractContextManager[Any]] = nullcontext
        # the sums of one group are the sums
        self.reduce: Callable[[Sequence[float], float, bool], StepTotals] = StepTotals

    def register(self, name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        if name in self._registered:
            raise ValueError(f"state {name} is registered already")
        self._registered.add(name)

    def begin_step(self, *, until: int | None = None) -> DataAssignment:
        self._until = until
        return DataAssignment(self.step, tuple(self._ledger.deal([ALONE])))

    def commit(self, sums: StepTotals) -> Commit | None:
        divisor, deal = sum(sums.tokens_per_slot), self._ledger.pending
        slots = tuple(deal)
        if not sums.finite:
            raise Stopped(f"step {self.step + 1}: the loss is not a number", slots)
        if divisor == 0:
            named = ", ".join(map(str, slots))
            raise Stopped(f"step {self.step + 1}: none of the sequences from {named} on has a target to learn", slots)
        self.step, self.left = self.step + 1, self.left or self.step + 1 == self._until
        contributed, _ = self._ledger.commit(sums.tokens_per_slot)
        trained, holes = tuple((slot, deal[slot]) for slot in contributed), tuple(self._ledger.holes)
        return Commit(divisor, (0,), sums.loss_sum / divisor, quorum_size=1, slots=trained, holes=holes)

    def state_dict(self) -> dict[str, Any]:
        state = {"step": self.step, "commit_id": "", "commit_quorum_id": 0}
        return to_checkpoint({**state, "ledger": self._ledger.state_dict()})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = from_checkpoint(state)
        self.step = state["step"]
        self._ledger.load_state_dict(state["ledger"], keep_deal=False)

    def leave(self) -> None:
        self.left = True

    is_broken = finished = False

    def _nothing(self, *given: object, **named: object) -> None:
        """There are no other groups to sum with, to wait for or to tell, no page, and nothing to close."""

    attach = want_to_leave = regroup = finish = tell = close = _nothing
