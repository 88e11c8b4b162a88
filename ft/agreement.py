"""Agreement of the ranks of one group that a step holds: among themselves, and one rank asks their server.

A vote of each rank at the server costs it a call a rank and step. Instead:

1. one all-reduce, on the host's side: does every rank say yes, and does one announce a change;
2. if all do, rank 0 asks the server for all of them, and tells the others yes if that is the answer, and soon.

Otherwise each rank asks by itself: so nobody stands in a collective while the server holds a commit, and a no is the server's to spread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING
from zlib import crc32

import torch
import torch.distributed as dist

from ft.protocol.messages import Ballot, Outcome, Vote
from ft.seam import GroupEnded

if TYPE_CHECKING:
    from ft.rpc.clients import GroupClient

WHOLE_VOTE_S = 2.0  # the vote of all ranks together: while it waits, they stand in a collective
log = logging.getLogger("pharos.manager")


class Agreement:
    """`group`: of gloo, with all ranks of this group in the order of their group_rank. Nobody else uses it, and its timeout lies beyond
    every wait for other groups: ranks that have their sums stand in it until the last one has. All ranks make the same calls.
    `whole_vote_s`: the server's time for the answer to all ranks."""

    def __init__(self, group: dist.ProcessGroup, *, whole_vote_s: float = WHOLE_VOTE_S) -> None:
        self._group, self._whole_vote_s = group, whole_vote_s

    def outcome(self, client: GroupClient, vote: Vote, *, able: bool) -> Outcome | None:
        """The group's word on a commit; all ranks call this for the same votes. None: each is to ask the server by itself. able: this rank
        may wait for it here. Raises GroupEnded."""
        outcome = None
        if vote.verdict == "failed":  # the first decides, and ranks that still wait for sums are told
            outcome = client.outcome(vote)
        yes = able and vote.verdict == "yes" and not vote.blame
        all_do, change = self.all_say_yes(vote.key, yes=yes, change=vote.change)
        if not all_do:
            return outcome
        if vote.group_rank == 0:
            try:
                outcome = client.vote(replace(vote, change=change, whole=True), self._whole_vote_s)
            except RuntimeError as error:  # what it means is found out by each rank
                log.info("no outcome of the vote of all ranks on step %d: %s", vote.step, error)
            except TimeoutError:  # it is held
                pass
        word = torch.tensor([outcome is not None and outcome.verdict == "yes"], dtype=torch.int64)
        self._carry_out(self._group.broadcast, word, 0)  # rank 0's
        if not word.item():
            return None
        return outcome or Outcome(
            "commit", vote.quorum_id, vote.attempt, vote.step, "yes", change, "all ranks said yes"
        )

    def all_say_yes(self, ballot: Ballot, *, yes: bool, change: bool) -> tuple[bool, bool]:
        """Returns (all ranks do, some rank announces a change). Raises GroupEnded where ranks vote on different things, or one is gone."""
        name = crc32(repr(ballot).encode())
        said = torch.tensor([not yes, change, name, -name], dtype=torch.int64)
        self._carry_out(self._group.allreduce, said, dist.ReduceOp.MAX)
        some_no, some_change, highest, lowest = said.tolist()
        if highest != -lowest:
            raise GroupEnded(f"the ranks of this group vote on different things, this one on {ballot}")
        return not some_no, bool(some_change)

    def _carry_out(self, collective: Callable[..., dist.Work], *arguments: object) -> None:
        try:
            collective(*arguments).wait()
        except RuntimeError as error:
            raise GroupEnded(f"the ranks of this group cannot agree on a step: {error}") from None
