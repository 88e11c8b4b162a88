"""One rank's step, and short words for what happens to it."""

from __future__ import annotations

from typing import Any

from ft.protocol import messages as m
from ft.protocol.ledger import Ledger
from ft.protocol.messages import Computed, Outcome, Part, Reduced
from ft.protocol.step import Step, StepConfig


def part(
    quorum_id: int = 1, *, heal: bool = False, step: int = 0, commit: tuple[int, str] = (0, ""), **more: Any
) -> Part:
    """The place of group a in a quorum of a and b."""
    fields: dict[str, Any] = {
        "replica_rank": 0,
        "members": ("a:1", "b:1"),
        "store_address": "s",
        "sources": (m.Source(1, "http://b"),) if heal else (),
        "heals": (),
        "participants": ("b:1",) if heal else ("a:1", "b:1"),
        "dealt": 0,
    }
    return Part(quorum_id, "job", "a:1", reference=(step, *commit), heal=heal, **{**fields, **more})


class Rank:
    """A rank, and short words for what happens to it. Each returns the effects."""

    def __init__(self, *, slots_per_step: int = 0, **config: Any) -> None:
        self.machine = Step(StepConfig(**config), Ledger(8, slots_per_step))
        self.now_s = 0.0

    def see(self, event: m.Event) -> list[m.Effect]:
        return list(self.machine.handle(event, self.now_s).effects)

    @property
    def at(self) -> tuple[int, int, int]:
        assert self.machine.part
        return self.machine.at

    def outcome(self, kind: Any, verdict: Any = "yes", **more: Any) -> list[m.Effect]:
        return self.see(Outcome(kind, *self.at, verdict, **more))

    def reduced(self, *tail: float) -> list[m.Effect]:
        return self.see(Reduced(*self.at, tail))

    def enter(self, event: Part | None = None) -> list[m.Effect]:
        """Through a quorum to the forward."""
        self.see(m.Begin())
        self.see(event or part())
        self.see(m.Configured((event or part()).quorum_id, True))
        return self.outcome("configured")

    def finish(self, *tail: float, change: bool = False) -> list[m.Effect]:
        self.see(Computed((10.0,), 25.0))
        self.reduced(*(tail or (10, 10, 50, 2, 0)))
        return self.outcome("commit", change=change)


def names(effects: list[m.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def only(kind: type[Any], effects: list[m.Effect]) -> Any:
    [effect] = [effect for effect in effects if isinstance(effect, kind)]
    return effect


def source_state(step: int = 5, *, pending: int = 1) -> dict[str, Any]:
    source = Step(StepConfig(), Ledger(8))
    source.step, source.commit_id, source.commit_quorum_id = step, f"c{step}", 1
    source.ledger.position = 80
    source.ledger.deal(("b:1",) * pending)
    return source.state_dict()
