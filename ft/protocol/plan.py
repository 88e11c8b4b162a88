"""What one rank of one group does in a quorum: pure functions of the quorum, so that all groups come to the same plan."""

from __future__ import annotations

from ft.protocol.messages import Member, Part, Quorum


def plan(
    quorum: Quorum, replica_id: str, group_rank: int, *, spares_above: int | None = None, known: bool = False
) -> Part:
    """The part of a rank of our own members."""
    raise NotImplementedError


def reference_members(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Those at the highest (step, commit_quorum_id, commit_id); void ones never. Empty: all are void."""
    raise NotImplementedError
