"""Agreement of the ranks of one group on a commit: an all-reduce of the votes on the host, then, if all are yes, one call of rank 0 to the
group's server for all ranks, and a broadcast of its answer.

Without a yes in time each rank votes at the server by itself: none is stuck in a collective while a commit is delayed or a no announced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from zlib import crc32

import torch
import torch.distributed as dist

from ft.protocol.messages import Outcome, Vote
from ft.seam import GroupEnded

if TYPE_CHECKING:
    from ft.rpc.clients import GroupClient

log = logging.getLogger("pharos.manager")


class Agreement:
    """`group`: of gloo, with all ranks of this group in the order of their group_rank, and for this alone. Its timeout is longer than every
    wait for other groups: ranks that have their sums wait in it for those that do not. All ranks make the same calls."""

    whole_vote_s = 2.0  # limit of the server's answer to all ranks, which wait in a collective meanwhile

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def outcome(self, client: GroupClient, vote: Vote, *, able: bool) -> Outcome | None:
        """The group's outcome of a commit vote; all ranks call this for the same votes. None: each is to vote at the server. `able`: this
        rank may wait here. Raises GroupEnded where ranks vote on different things, or one is gone."""
        outcome = None
        if vote.verdict == "failed":  # the first decides, and ranks that still wait for sums are told
            outcome = client.outcome(vote)
        yes, vote_key = able and vote.verdict == "yes" and not vote.blame, crc32(repr(vote.key).encode())
        votes = torch.tensor([not yes, vote.change, vote_key, -vote_key], dtype=torch.int64)
        self._carry_out(self._group.allreduce, votes, dist.ReduceOp.MAX)
        some_no, change, highest, lowest = votes.tolist()
        if highest != -lowest:
            raise GroupEnded(f"the ranks of this group vote on different things, this one on {vote.key}")
        if some_no:
            return outcome
        if vote.group_rank == 0:
            try:
                outcome = client.vote(replace(vote, change=bool(change), whole=True), self.whole_vote_s)
            except RuntimeError as error:  # each rank's own vote meets it, too
                log.info("no outcome of the vote of all ranks on step %d: %s", vote.step, error)
            except TimeoutError:  # the server delays the commit
                pass
        agreed = torch.tensor([outcome is not None and outcome.verdict == "yes"], dtype=torch.int64)
        self._carry_out(self._group.broadcast, agreed, 0)
        if not agreed.item():
            return None
        return outcome or Outcome("commit", *vote.key[:3], "yes", bool(change), "all ranks said yes")

    def _carry_out(self, collective: Callable[..., dist.Work], *arguments: object) -> None:
        try:
            collective(*arguments).wait()
        except RuntimeError as error:
            raise GroupEnded(f"the ranks of this group cannot agree on a step: {error}") from None
