"""The cost of keeping gradients: a whole step (gradients, reduction, division, SGD) by ft/gradients.py and by plain torch.distributed.

    python bench/reduce.py                        3 processes on loopback, 100 MB in 8 tensors, 7 rounds; 2 minutes
    python bench/reduce.py --megabytes 400 --rounds 11 --tensors 64

All sides run in the same processes, in turns; every other round runs backwards. A figure is the median of `--steps` steps, of the slowest
process, beside the CPU time of all (children included; it suffers less from other programs); ratios are taken inside a round. A step
zeroes the gradients, makes new ones, sums them over the processes, divides, and applies SGD. `plain` sums each .grad where it is and
divides it in place. Ours keep the originals until the sums are there (`kept`), or not (`not kept`), or sum in a child process (`baby`).
Whoever divides does it where the trainer does: `fused` in the learning rate, else over every gradient, as plain has to.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.job import LOOPBACK, cpu_s
from bench.pairs import ask_all, in_turns, members, parser, ratio, serve, spread, table

SIDES = ("plain", "kept", "kept, fused", "not kept", "not kept, fused", "baby", "baby, fused")
LR = 0.1


def main(argv: Sequence[str]) -> int:
    options = parser(
        __doc__,
        members=3,
        megabytes=(100.0, "of fp32 gradients"),
        tensors=8,
        rounds=7,
        steps=(4, "per side and round"),
        sides=";".join(SIDES),
    ).parse_args(argv)

    from ft.process_groups import store

    server, sides = store.serve(), options.sides.split(";")
    with members(__file__, options.members) as team:
        sizes = {"elements": int(options.megabytes * 1e6 / 4), "tensors": options.tensors}
        ask_all(team, "meet", store=f"127.0.0.1:{server.port}", size=options.members, **sizes)
        steps = partial(ask_all, team, "steps", count=options.steps)
        answers = in_turns({side: partial(steps, side=side) for side in sides}, options.rounds, warm=1)
    spent, cpu = (
        {side: [over(answer[figure] for answer in turn) for turn in turns] for side, turns in answers.items()}
        for figure, over in (("s", max), ("cpu_s", sum))
    )
    rows = []
    for side in sides:
        cpu_ms, by_cpu = f"{1e3 * statistics.median(cpu[side]):.0f}", str(ratio(cpu[side], cpu["plain"]))
        rows.append([side, spread(spent[side], ".0f", 1e3), str(ratio(spent[side], spent["plain"])), cpu_ms, by_cpu])
    what = f"{options.megabytes:g} MB in {options.tensors} tensors, {options.members} members, {options.rounds} rounds"
    print(f"a step of {what}\n{table(['side', 'ms a step', 'by plain', 'CPU ms, all', 'by plain'], rows)}")
    return 0


class MeetingMember:
    """One that meets the others in plain torch.distributed and in groups of ours, in process and in a child."""

    def join(self, store: str, rank: int, size: int) -> tuple[Any, Any]:
        import torch
        import torch.distributed as dist

        from ft.process_groups.baby import ProcessGroupBabyGloo
        from ft.process_groups.gloo import ProcessGroupGloo
        from ft.process_groups.store import StoreClient

        torch.set_num_threads(1)
        interface = os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK["GLOO_SOCKET_IFNAME"]
        mine = StoreClient(f"{store}/plain", 120.0)
        mine.connect()
        dist.init_process_group("gloo", store=mine, rank=rank, world_size=size)
        gloo, baby = (
            kind(rendezvous_s=120.0, interface=interface) for kind in (ProcessGroupGloo, ProcessGroupBabyGloo)
        )
        for name, group in (("gloo", gloo), ("baby", baby)):
            group.configure(f"{store}/{name}", rank, size)
        return gloo, baby


class ReduceMember(MeetingMember):
    def meet(self, store: str, rank: int, size: int, elements: int, tensors: int) -> dict[str, Any]:
        import torch
        from torch import nn

        from ft.gradients import Gradients

        gloo, baby = self.join(store, rank, size)
        self.size = size
        self.parameters: list[Any] = [nn.Parameter(torch.zeros(elements // tensors)) for _ in range(tensors)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=LR)
        self.sides: dict[str, tuple[Any, Gradients]] = {
            "kept": (gloo, Gradients()),
            "not kept": (gloo, Gradients(keep=False)),
            "baby": (baby, Gradients(shared=True)),
        }
        for _, gradients in self.sides.values():
            gradients.attach(self.parameters)
        return {}

    def steps(self, side: str, count: int, rank: int) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        name, _, fused = side.partition(", ")
        sum_up: Callable[[], None] = self.plain if name == "plain" else lambda: self.ours(*self.sides[name])
        child = None if name == "plain" else getattr(self.sides[name][0], "child", None)
        pids = [os.getpid(), *([child.pid] if child else [])]
        spent, before = [], [parameter.detach().clone() for parameter in self.parameters]
        began_s = sum(map(cpu_s, pids))
        for _ in range(count):
            dist.barrier()  # nobody begins before the others have ended
            start_s = time.perf_counter()
            self.optimizer.zero_grad()
            sum_up()
            self.update(fused=bool(fused))
            spent.append(time.perf_counter() - start_s)
        used_s = (sum(map(cpu_s, pids)) - began_s) / count
        for parameter, old in zip(self.parameters, before, strict=True):
            torch.testing.assert_close(parameter.detach(), old - count * LR)
        return {"s": statistics.median(spent), "cpu_s": used_s}

    def plain(self) -> None:
        import torch
        import torch.distributed as dist

        works = []
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
            works.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in works:
            work.wait()

    def ours(self, group: Any, gradients: Any) -> None:
        import torch

        gradients.open(group, self.size)
        with gradients.last_pass():
            for parameter in reversed(self.parameters):  # as a backward does
                parameter.grad = torch.ones_like(parameter)
                for hook in parameter._post_accumulate_grad_hooks.values():
                    hook(parameter)
        gradients.launch([1.0, 0.0, 1.0, 0.0])
        gradients.wait()
        gradients.deliver()

    def update(self, *, fused: bool) -> None:
        if not fused:
            for parameter in self.parameters:
                parameter.grad.div_(self.size)
        self.optimizer.param_groups[0]["lr"] = LR / self.size if fused else LR
        self.optimizer.step()


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve(ReduceMember())
    else:
        sys.exit(main(sys.argv[1:]))
