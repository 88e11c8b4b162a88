"""All-reduce by process groups that can be given up, beside torch.distributed's own (forming them: forming.py).

    python bench/process_groups.py [--megabytes 100] [--members 3] [--rounds 9]

All sides take turns in the same processes: plain torch.distributed (gloo), our group in process, and in a child, there with tensors in
shared memory (no copy) and with others (copied in and out). Ratios are taken inside a round; a round's figure is its slowest member's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.pairs import Worker, ask_all, members, ratio, serve, table


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--members", type=int, default=3, help="that sum")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(argv)

    from ft.process_groups import store

    server = store.serve()
    with members(__file__, options.members) as team:
        reduce(team, options.megabytes, options.rounds, f"127.0.0.1:{server.port}")
    return 0


def reduce(team: list[Worker], megabytes: int, rounds: int, store: str) -> None:
    sides = ["plain", "gloo", "baby_gloo, shared", "baby_gloo, copied"]
    ask_all(team, "meet", store=f"{store}/sums", size=len(team), bytes=megabytes * 1_000_000)
    figures: dict[str, list[float]] = {side: [] for side in sides}
    for index in range(rounds + 1):
        for side in sides if index % 2 else reversed(sides):
            slowest = max(answer["s"] for answer in ask_all(team, "sum", side=side))
            if index:  # the first round touches the memory
                figures[side].append(slowest)
    rows = []
    for side in sides:
        spent = figures[side]
        seconds = f"{statistics.median(spent):.3f} ({min(spent):.3f}-{max(spent):.3f})"
        rows.append([side, seconds, str(ratio(spent, figures["plain"]))])
    print(f"all-reduce of {megabytes} MB, {len(team)} members, {rounds} rounds")
    print(table(["side", "seconds", "by plain"], rows))


# ---------------------------------------------------------------------------------------------- one member


class CollectiveMember:
    def __init__(self) -> None:
        import torch

        from ft.process_groups.baby import ProcessGroupBabyGloo
        from ft.process_groups.gloo import ProcessGroupGloo

        torch.set_num_threads(1)
        self.interface = "lo" if sys.platform == "linux" else "lo0"
        self.groups: dict[str, Any] = {
            "gloo": ProcessGroupGloo(rendezvous_s=120.0, interface=self.interface),
            "baby_gloo": ProcessGroupBabyGloo(rendezvous_s=120.0, interface=self.interface),
        }
        self.groups["baby_gloo"].prepare()
        self.sides: dict[str, tuple[Any, Any]] = {}

    def meet(self, store: str, rank: int, size: int, bytes: int) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        from ft.process_groups.store import StoreClient

        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        plain = StoreClient(f"{store}/plain", 120.0)
        plain.connect()
        dist.init_process_group("gloo", store=plain, rank=rank, world_size=size)
        for kind, group in self.groups.items():
            group.configure(f"{store}/{kind}", rank, size)
        baby, count = self.groups["baby_gloo"], bytes // 4
        self.sides = {
            "plain": (dist.group.WORLD, torch.ones(count)),
            "gloo": (self.groups["gloo"], torch.ones(count)),
            "baby_gloo, shared": (baby, baby.empty(count).fill_(1.0)),
            "baby_gloo, copied": (baby, torch.ones(count)),
        }
        return {}

    def sum(self, side: str, rank: int) -> dict[str, Any]:
        import torch.distributed as dist

        group, value = self.sides[side]
        value.fill_(1.0)
        dist.barrier()
        start_s = time.perf_counter()
        group.allreduce([value]).wait()
        spent_s = time.perf_counter() - start_s
        assert value[0] == value[-1] == dist.get_world_size()
        return {"s": spent_s}


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve(CollectiveMember())
    else:
        sys.exit(main(sys.argv[1:]))
