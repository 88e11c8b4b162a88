"""The part of one rank of one group in a quorum: pure functions of the quorum, so that all groups come to the same plan.

The lighthouse has chosen who takes part and from which state all go on; group.py asks here for each of its waiting ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from ft.protocol.messages import Member, Part, Quorum, Source, State


def reference_state(members: Sequence[Member]) -> State | None:
    """The furthest state among `members`: the highest (step, commit_quorum_id), commit_id only to have one answer. None: all are void."""
    return max((m.state for m in members if not m.void), default=None)


def recover_src_replica_ranks(quorum: Quorum) -> dict[int, tuple[int, ...]]:
    """The replica rank of each group that must fetch the reference state, with those of its sources, at most two, taken in turns.
    Another commit_id than the reference's is enough to heal, at an equal or a higher step too; a void member always does. At step 0
    with init_sync initial states differ under one name, so all but the first reference member fetch."""
    whole, members = quorum.holders, quorum.members
    if quorum.reference[0] == 0 and any(m.init_sync for m in members):
        whole = whole[:1]
    free = [rank for rank in whole if not members[rank].writes_checkpoint] or whole  # the writer is busy enough
    healing = sorted(set(range(len(members))).difference(whole))
    return {
        rank: tuple(free[(place + offset) % len(free)] for offset in range(min(2, len(free))))
        for place, rank in enumerate(healing)
    }


def plan(
    quorum: Quorum, replica_id: str, group_rank: int, *, spares_above: int | None = None, same_generation: bool = False
) -> Part:
    """The part of a rank of our own members. `spares_above`: only so many groups are dealt slots; the rest stand by with zeros.

    Only the store depends on group_rank, to spread the load: a group heals with all its ranks, from the same groups, or not at all.
    Raises KeyError when `replica_id` is not in the quorum.
    """
    me, members = replica_rank(quorum, replica_id), quorum.members
    holders = [members[rank] for rank in quorum.holders]
    sources = recover_src_replica_ranks(quorum)
    return Part(
        quorum_id=quorum.quorum_id,
        epoch=quorum.epoch,
        replica_id=replica_id,
        replica_rank=me,
        members=quorum.ids,
        store_address=holders[(group_rank + quorum.quorum_id) % len(holders)].store_address,
        reference=quorum.reference,
        heal=me in sources,
        sources=tuple(Source(rank, members[rank].address) for rank in sources.get(me, ())),
        recover_dst_replica_ranks=tuple(rank for rank, from_ranks in sources.items() if me in from_ranks),
        participants=tuple(x.replica_id for rank, x in enumerate(members) if rank not in sources)[:spares_above],
        dealt=holders[0].dealt if len({m.deal_id for m in holders}) == 1 else 0,
        same_generation=same_generation,
        handles=tuple(
            x.reconfigure_handles[group_rank] if len(x.reconfigure_handles) == x.world_size > group_rank else ""
            for x in members
        ),
    )


def replica_rank(quorum: Quorum, replica_id: str) -> int:
    """The place in the quorum. Raises KeyError when it has none."""
    for rank, member in enumerate(quorum.members):
        if member.replica_id == replica_id:
            return rank
    raise KeyError(f"{replica_id} is not in quorum {quorum.quorum_id}")
