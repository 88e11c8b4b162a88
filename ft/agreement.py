"""Agreement of a replica group's ranks on a commit: they all-reduce votes on the host; if all are yes, rank 0 votes for all at the group
server and broadcasts whether the outcome is a yes, from which each rank builds its own Outcome. A rank whose sums failed votes at the
server first, which interrupts those that still wait for their sums.

Without a joint yes each rank votes at the server by itself, so no rank is stuck in a collective while the commit is delayed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from zlib import crc32

import torch
import torch.distributed as dist

from ft.protocol.messages import Outcome, Vote, describe_step
from ft.seam import GroupEnded

if TYPE_CHECKING:
    from ft.rpc.clients import GroupClient

log = logging.getLogger("pharos.manager")


class Agreement:
    """Commit votes of one replica group. `process_group`: a gloo group of all its ranks, in the order of group_rank, used for nothing else.
    All ranks make the same calls. The process group's timeout must exceed every wait for other replica groups:
    a rank waits here while others of its group wait for those."""

    joint_vote_s = 2.0  # timeout of rank 0's vote for all ranks, which wait in the broadcast meanwhile

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group

    def outcome(self, client: GroupClient, vote: Vote, *, free: bool) -> Outcome | None:
        """Returns the group's outcome of a commit vote; called by all its ranks. None: each rank must vote at the server by itself. `free`:
        False if this rank's machine has returned a further effect that must be carried out before the vote is answered: its vote then does
        not count as a yes. Nor does one with `divergent`, as only the server joins the ranks' lists of divergent members. Raises GroupEnded
        if ranks vote on different attempts, or one is gone."""
        outcome = None
        if vote.verdict == "failed":  # one such vote decides: the server interrupts ranks that still wait
            outcome = client.outcome(vote)
        yes = free and vote.verdict == "yes" and not vote.divergent
        vote_key = crc32(repr(vote.key).encode())
        votes = torch.tensor([not yes, vote.change, vote_key, -vote_key], dtype=torch.int64)
        self._carry_out(self._process_group.allreduce, votes, dist.ReduceOp.MAX)
        some_no, change, highest, lowest = votes.tolist()
        if highest != -lowest:
            raise GroupEnded(f"the ranks of this group vote on different attempts, this one on {vote.key}")
        if some_no:
            return outcome
        if vote.group_rank == 0:
            try:
                outcome = client.vote(replace(vote, change=bool(change), joint=True), self.joint_vote_s)
            except RuntimeError as error:  # each rank's own vote gets the same error
                log.info("no outcome of the vote of all ranks on step %s: %s", describe_step(vote.step), error)
            except TimeoutError:  # the server delays the commit; each rank's own vote waits for it
                pass
        agreed = torch.tensor([outcome is not None and outcome.verdict == "yes"], dtype=torch.int64)
        self._carry_out(self._process_group.broadcast, agreed, 0)
        if not agreed.item():
            return None
        return outcome or Outcome("commit", *vote.key[:3], "yes", bool(change), "all ranks voted yes")

    def _carry_out(self, collective: Callable[..., dist.Work], *arguments: object) -> None:
        try:
            collective(*arguments).wait()
        except RuntimeError as error:
            raise GroupEnded(f"the ranks of this group cannot agree on a step: {error}") from None
