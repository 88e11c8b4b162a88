"""Who is in: the quorum rules, and what the lighthouse tells whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from ft.protocol.messages import Event, Out, Saved, Times


@dataclass(frozen=True)
class LighthouseConfig:
    min_replicas: int = 1
    join_timeout_s: float = 60.0
    tick_s: float = 0.1
    times: Times = field(default_factory=Times)
    supersede_s: float = 1.0
    sit_out_s: float = 10.0


class Lighthouse:
    """In: Call CallCancelled Beat StreamOpened StreamClosed Report Leave TakeOver Evict Tick.
    Out: Persist Answer Refuse MustRestore Notify."""

    def __init__(
        self, config: LighthouseConfig, now_s: float, *, epoch: str, saved: Saved | None = None, fresh: bool = False
    ) -> None:
        """`epoch`: unique to this start, used unless `saved` or a report names the job's. saved: the state file. fresh: a state file is
        kept, but there was none yet. Neither: members' reports are waited for, one heartbeat timeout long."""
        raise NotImplementedError

    def handle(self, event: Event, now_s: float) -> Out:
        raise NotImplementedError
