"""What this group gives to a step: its slots of the deal, what was computed of them, and the tail that says so. Kept by step.py.

Where the rules leave a choice:
- A group marks a slot that it cannot use by UNABLE in the tail, so all ledgers count alike, also those that were not there before.
  It has one sum for all its slots, so if one of several is not a number, it marks them all; one without a token to learn, alone.
- With slots_per_step the slots of a group that died are dealt to the others in the same step. They compute what was added, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ft.protocol.messages import UNABLE, Computed, process_of
from ft.protocol.step_control import StepControl


class LocalContribution:
    """Of one step at a time; kept until that step holds, or its gradients are dropped."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Another step, or the same with other slots: nothing is computed."""
        self.computed: Computed | None = None  # this group's figures; its gradients are kept
        self.tokens: dict[int, float] = {}  # by slot, of those that went into them
        self.excused = False  # the others know that this group's slots are of no use

    def add(self, slots: Sequence[int], event: Computed) -> None:
        """These were computed, besides those that were before. Of a slot of which nothing is said there were no tokens."""
        self.tokens |= {**dict.fromkeys(slots, 0.0), **dict(zip(slots, event.tokens, strict=False))}
        before = self.computed
        if before is not None:
            able, kept = before.able and event.able, before.kept and event.kept
            event = Computed(before.tokens + event.tokens, before.loss_sum + event.loss_sum, able, kept)
        self.computed = event

    def tail(
        self, slots: Sequence[int], dealt: Iterable[int], *, change: bool, digests: int
    ) -> tuple[tuple[float, ...], bool]:
        """Returns the values of the StepControl that this group adds to the sums beside its gradients, and whether these are of use: there
        is something in `slots`, all of which are computed, to learn from. `dealt`: all slots of the step; `digests`: numbers to leave
        room for."""
        able = self.computed is None or self.computed.able
        usable = able and any(self.tokens[slot] > 0 for slot in slots)
        if usable:
            figures = {slot: self.tokens[slot] if self.tokens[slot] > 0 else UNABLE for slot in slots}
        else:
            figures = dict.fromkeys(slots, UNABLE if self.excused else 0.0)
        tokens = map(float, {**dict.fromkeys(dealt, 0.0), **figures}.values())
        loss_sum = self.computed.loss_sum if usable and self.computed else 0.0
        ok = 1.0 if usable or self.excused or not slots else 0.0
        return (*tokens, loss_sum, ok, 1.0 if change else 0.0, *(0.0,) * digests), usable
