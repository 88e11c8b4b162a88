"""The ranks of one group act as one: one call to the lighthouse, one outcome per vote."""

from __future__ import annotations

from dataclasses import dataclass, field

from ft.protocol.messages import Event, Out, Times


@dataclass(frozen=True)
class GroupConfig:
    replica_id: str
    world_size: int
    address: str = ""
    store_address: str = ""
    times: Times = field(default_factory=Times)
    retries: int | None = None  # failed lighthouse calls that are tried again; None: as long as the ranks wait
    retry_s: float = 1.0
    spares_above: int | None = None


class Group:
    """In: RankCall RankCancelled RankStream Vote LighthouseAnswered/Failed/Refused/WantsRestore BeatAnswered AskMetadata notices Tick.
    Out: CallLighthouse OpenStream AnswerRank FailRank RestoreRank AnswerVote NotifyRank Metadata EndGroup."""

    def __init__(self, config: GroupConfig, now_s: float) -> None:
        raise NotImplementedError

    @property
    def replica_id(self) -> str:
        """The live id: another one after this group was lost and returned."""
        raise NotImplementedError

    def handle(self, event: Event, now_s: float) -> Out:
        raise NotImplementedError
