"""One rank's step, from begin to commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ft.protocol.ledger import Ledger
from ft.protocol.messages import Event, Out


@dataclass(frozen=True)
class StepConfig:
    group_rank: int = 0
    keep_gradients: bool = True
    every_step: bool = False
    heal_backlog: int = 2
    heal_grace_s: float = 30.0
    max_failures: int | None = None
    skip_unable: bool = False
    init_sync: bool = False
    shape: tuple[tuple[str, str], ...] = ()


class Step:
    """In: Begin Part QuorumFailed WantsRestore Restored Configured Computed Reduced ReduceFailed Outcome HealEnded Leaving notices Tick.
    Out: AskQuorum Configure Compute LaunchTail StopWaiting CastVote AbandonGeneration DropGradients Fence CommitStep HoldSums DropHeld
    LoadState LoadCheckpoint Settled GiveUp Stop."""

    step: int  # committed; that of the state in hand

    def __init__(self, config: StepConfig, ledger: Ledger) -> None:
        raise NotImplementedError

    def handle(self, event: Event, now_s: float) -> Out:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """step, commit_id, commit_quorum_id, ledger: JSON. To be read at a step's boundary; part of what is healed and saved."""
        raise NotImplementedError
