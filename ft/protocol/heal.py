"""A group that is behind: its state is on its way. Kept by step.py, which holds what its generation commits meanwhile.

Where the rules leave a choice:
- The group's word that all ranks have the state says nothing about when to take it: they hear it at different places in the step. So each
  later outcome says that it was decided after that word (Outcome.healed), and the first such one is the place. Where a rank waits for
  the word alone, all of them do.
- Once a rank has an open heal, it asks for no quorum before the group's word on it: else one rank might ask as void, another as whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ft.protocol.messages import HealEnded, Outcome, Part, State, Vote


class Healing:
    """A rank's heal, from the part that asks for it to the group's word on whether all ranks hold the whole state."""

    def __init__(self, group_rank: int) -> None:
        self.open: OpenHeal | None = None  # fetching, or waiting for the group's word
        self.failed = False  # the last one was closed without a state, and the group is still behind
        self._group_rank = group_rank

    def begin(self, part: Part, attempt: int) -> None:
        self.open, self.failed = OpenHeal(part.quorum_id, attempt, part.reference), False

    def ended(self, event: HealEnded) -> Vote | None:
        """The vote on what has come; None if it is of another heal, or this one was voted on."""
        heal = self.open
        if heal is None or event.quorum_id != heal.quorum_id or heal.voted:
            return None
        heal.state = event.state if isinstance(event.state, dict) else {}  # it came over the wire
        found = (heal.state.get("step"), heal.state.get("commit_quorum_id"), heal.state.get("commit_id"))
        whole = event.ok and found == heal.reference
        reason = "" if whole else event.reason or f"the state is {found}"
        return self._vote(heal, "yes" if whole else "failed", reason, event.blame)

    def give_up(self, why: str) -> Vote | None:
        """The vote against it; None if there is none, or it was voted on."""
        return self._vote(self.open, "failed", why) if self.open and not self.open.voted else None

    def hears(self, outcome: Outcome) -> bool:
        """The group's word: whether it is on this heal. If it is a yes, all ranks have the whole state, and `close` gives it."""
        heal = self.open
        if heal is None or (outcome.quorum_id, outcome.attempt, outcome.step) != heal.place:
            return False
        if outcome.verdict == "yes":
            heal.agreed = True
        else:
            self.open, self.failed = None, True
        return True

    def close(self) -> dict[str, Any]:
        """The state that has come, and is agreed on."""
        heal = self.open
        assert heal is not None
        self.open = None
        return heal.state

    def forget(self) -> None:
        """A state has come by another way."""
        self.open, self.failed = None, False

    def _vote(
        self, heal: OpenHeal, verdict: Literal["yes", "failed"], reason: str, blame: tuple[str, ...] = ()
    ) -> Vote:
        heal.voted = True
        return Vote(self._group_rank, "healed", *heal.place, verdict, False, reason, blame)


@dataclass
class OpenHeal:
    quorum_id: int
    attempt: int
    reference: State  # what is to come
    voted: bool = False
    agreed: bool = False  # all ranks have it
    state: dict[str, Any] = field(default_factory=dict)  # what has come

    @property
    def place(self) -> tuple[int, int, int]:
        """By which votes and outcomes name it."""
        return self.quorum_id, self.attempt, self.reference[0]
