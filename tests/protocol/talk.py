"""Talking to a lighthouse: short words for what is said to it, and for what of its answers a test looks at."""

from __future__ import annotations

from typing import Any

from ft.protocol import messages as m
from ft.protocol.lighthouse import Lighthouse, LighthouseConfig
from ft.protocol.messages import Kind, Member


class Talk:
    """A lighthouse and what it said last. Groups are named by letters; "a" is a:1."""

    def __init__(self, kind: Kind = "pharos", **config: Any) -> None:
        saved, fresh = config.pop("saved", None), config.pop("fresh", True)
        self.machine = Lighthouse(LighthouseConfig(**config), 0.0, epoch="job", saved=saved, fresh=fresh)
        self.kind, self.now_s = kind, 0.0
        self.asked: dict[str, int] = {}  # the number of each group's newest question

    def say(self, event: m.Event, at: float | None = None) -> list[m.Effect]:
        self.now_s = self.now_s if at is None else at
        return list(self.machine.handle(event, self.now_s).effects)

    def call(
        self, name: str, at: float | None = None, *, step: int = 0, id_: int | str = 1, **more: Any
    ) -> list[m.Effect]:
        fields = {
            key: more.pop(key) for key in list(more) if key not in ("known", "failed", "blame", "shape", "number")
        }
        commit = {"commit_id": f"c{step}", "commit_quorum_id": max(0, min(step, 1))} if self.kind == "pharos" else {}
        member = Member(**{"replica_id": f"{name}:{id_}", "step": step, **commit, **fields})
        if self.kind == "pharos":
            more.setdefault("number", self.asked.get(name, 0) + 1)
            self.asked[name] = more["number"]
        return self.say(m.Call(member, self.kind, **more), at)

    def calls(self, names: str, at: float | None = None, **more: Any) -> list[m.Effect]:
        return [effect for name in names for effect in self.call(name, at, **more)]

    def tick(self, at: float) -> list[m.Effect]:
        """As a driver does: every 0.1 s. Returns what the last one brought."""
        effects: list[m.Effect] = []
        while self.now_s < at - 1e-9:
            effects = self.say(m.Tick(), round(self.now_s + 0.1, 3))
        return effects

    def beats(self, names: str, until: float) -> list[m.Effect]:
        said: list[m.Effect] = []
        while self.now_s < until - 1e-9:
            at = round(self.now_s + 0.1, 3)
            said += [effect for name in names for effect in self.say(m.Beat(f"{name}:1", self.kind), at)]
            said += self.say(m.Tick(), at)
        return said

    @property
    def quorum(self) -> tuple[int, str]:
        """(quorum_id, names)"""
        q = self.machine.quorum
        return (q.quorum_id, "".join(member.name for member in q.members)) if q else (0, "")

    @property
    def reason(self) -> str:
        return self.machine.reason


def notices(effects: list[m.Effect]) -> list[tuple[str, tuple[str, ...]]]:
    return [(type(e.notice).__name__, e.replica_ids) for e in effects if isinstance(e, m.Notify)]


def refusals(effects: list[m.Effect]) -> list[tuple[str, str]]:
    return [(e.code, e.reason) for e in effects if isinstance(e, m.Refuse)]


def formed(names: str, kind: Kind = "pharos", **config: Any) -> Talk:
    """A job whose members are `names`, all at step 0 of one quorum."""
    shape = config.pop("shape", ())
    talk = Talk(kind, **{**config, "min_replicas": len(names)})
    talk.calls(names, shape=shape)
    assert talk.quorum == (1, names)
    talk.machine.config = LighthouseConfig(**{"min_replicas": 1, **config})
    return talk
