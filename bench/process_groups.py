"""All-reduce by process groups that can be given up, beside torch.distributed's own (forming them: forming.py).

    python bench/process_groups.py [--megabytes 100] [--members 3] [--rounds 9]

All sides take turns in the same processes: plain torch.distributed (gloo), our group in process, and in a child, there with tensors in
shared memory (no copy) and with others (copied in and out). Ratios are taken inside a round; a round's figure is its slowest member's.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

import torch
import torch.distributed as dist

from bench.pairs import ask_all, in_turns, parser, ratio, spread, table
from bench.reduce import MeetingMember, meeting

SIDES = ("plain", "gloo", "baby_gloo, shared", "baby_gloo, copied")


def main() -> None:
    options = parser(__doc__, megabytes=100, members=(3, "that sum"), rounds=9).parse_args()
    with meeting(__file__, options.members, count=options.megabytes * 250_000) as team:

        def slowest(side: str) -> float:
            return max(answer["s"] for answer in ask_all(team, "sum", side=side))

        figures = in_turns({side: partial(slowest, side) for side in SIDES}, options.rounds, warm=1)
    rows = [[side, spread(spent, ".3f"), str(ratio(spent, figures["plain"]))] for side, spent in figures.items()]
    print(f"all-reduce of {options.megabytes} MB, {options.members} members, {options.rounds} rounds")
    print(table(["side", "seconds", "by plain"], rows))


class CollectiveMember(MeetingMember):
    def begin(self, count: int) -> None:
        self.sides: dict[str, tuple[Any, torch.Tensor]] = {
            "plain": (dist.group.WORLD, torch.ones(count)),
            "gloo": (self.gloo, torch.ones(count)),
            "baby_gloo, shared": (self.baby, self.baby.empty(count)),
            "baby_gloo, copied": (self.baby, torch.ones(count)),
        }

    def sum(self, side: str, rank: int) -> dict[str, float]:
        group, value = self.sides[side]
        value.fill_(1.0)
        dist.barrier()
        start_s = time.perf_counter()
        group.allreduce([value]).wait()
        spent_s = time.perf_counter() - start_s
        assert value[0] == value[-1] == self.size
        return {"s": spent_s}


if __name__ == "__main__":
    CollectiveMember.serve() if sys.argv[1:] == ["--worker"] else main()
