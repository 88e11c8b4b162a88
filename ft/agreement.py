"""Agreement of the ranks of one group that a step holds: among themselves, and one rank asks their server.

A vote of each rank at the server costs it a call a rank and step. Instead:

1. one all-reduce, on the host's side: does every rank say yes, and does one announce a change;
2. if all do, rank 0 asks the server for all of them, and tells the others yes if that is the answer, and soon.

Otherwise each rank asks by itself: so nobody stands in a collective while the server holds a commit, and a no is the server's to spread.
"""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import torch
import torch.distributed as dist

from ft.protocol.messages import Ballot
from ft.seam import GroupEnded


class Agreement:
    """`group`: of gloo, with all ranks of this group in the order of their group_rank. Nobody else uses it, and its timeout lies beyond
    every wait for other groups: ranks that have their sums stand in it until the last one has. All ranks make the same calls."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_say_yes(self, ballot: Ballot, *, yes: bool, change: bool) -> tuple[bool, bool]:
        """Returns (all ranks do, some rank announces a change). Raises GroupEnded where ranks vote on different things, or one is gone."""
        name = crc32(repr(ballot).encode())
        said = torch.tensor([not yes, change, name, -name], dtype=torch.int64)
        self._carry_out(self._group.allreduce, said, dist.ReduceOp.MAX)
        some_no, some_change, highest, lowest = said.tolist()
        if highest != -lowest:
            raise GroupEnded(f"the ranks of this group vote on different things, this one on {ballot}")
        return not some_no, bool(some_change)

    def told(self, yes: bool) -> bool:
        """Broadcasts rank 0's word. Raises GroupEnded where a rank is gone."""
        word = torch.tensor([yes], dtype=torch.int64)
        self._carry_out(self._group.broadcast, word, 0)
        return bool(word.item())

    def _carry_out(self, collective: Callable[..., dist.Work], *arguments: object) -> None:
        try:
            collective(*arguments).wait()
        except RuntimeError as error:
            raise GroupEnded(f"the ranks of this group cannot agree on a step: {error}") from None
