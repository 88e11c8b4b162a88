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

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.pairs import ask_all, members, ratio, serve, table

SIDES = ("plain", "kept", "kept, fused", "not kept", "not kept, fused", "baby", "baby, fused")
LR = 0.1


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=100.0, help="of fp32 gradients")
    parser.add_argument("--tensors", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="per side and round")
    parser.add_argument("--sides", default=";".join(SIDES))
    options = parser.parse_args(argv)
    sides = options.sides.split(";")

    from ft.process_groups import store

    server = store.serve()
    figures: dict[str, list[float]] = {side: [] for side in sides}
    cpu: dict[str, list[float]] = {side: [] for side in sides}
    with members(__file__, options.members) as team:
        sizes = {"elements": int(options.megabytes * 1e6 / 4), "tensors": options.tensors}
        ask_all(team, "meet", store=f"127.0.0.1:{server.port}", size=options.members, **sizes)
        for index in range(options.rounds + 1):
            for side in sides if index % 2 else reversed(sides):
                answers = ask_all(team, "steps", side=side, count=options.steps)
                if index:  # the first round touches the memory
                    figures[side].append(max(answer["s"] for answer in answers))
                    cpu[side].append(sum(answer["cpu_s"] for answer in answers))
    rows = []
    for side in sides:
        spent, cpu_ms = figures[side], f"{1e3 * statistics.median(cpu[side]):.0f}"
        ms = f"{1e3 * statistics.median(spent):.0f} ({1e3 * min(spent):.0f}-{1e3 * max(spent):.0f})"
        rows.append([side, ms, str(ratio(spent, figures["plain"])), cpu_ms, str(ratio(cpu[side], cpu["plain"]))])
    what = f"{options.megabytes:g} MB in {options.tensors} tensors, {options.members} members, {options.rounds} rounds"
    print(f"a step of {what}\n{table(['side', 'ms a step', 'by plain', 'CPU ms, all', 'by plain'], rows)}")
    return 0


# ---------------------------------------------------------------------------------------------- one member


class ReduceMember:
    def meet(self, store: str, rank: int, size: int, elements: int, tensors: int) -> dict[str, Any]:
        import torch
        import torch.distributed as dist
        from torch import nn

        from ft.gradients import Gradients
        from ft.process_groups.baby import ProcessGroupBabyGloo
        from ft.process_groups.gloo import ProcessGroupGloo
        from ft.process_groups.store import StoreClient

        torch.set_num_threads(1)
        interface = os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
        mine = StoreClient(f"{store}/plain", 120.0)
        mine.connect()
        dist.init_process_group("gloo", store=mine, rank=rank, world_size=size)
        self.size = size
        self.parameters: list[Any] = [nn.Parameter(torch.zeros(elements // tensors)) for _ in range(tensors)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=LR)
        gloo = ProcessGroupGloo(rendezvous_s=120.0, interface=interface)
        baby = ProcessGroupBabyGloo(rendezvous_s=120.0, interface=interface)
        self.sides: dict[str, tuple[Any, Gradients]] = {
            "kept": (gloo, Gradients()),
            "not kept": (gloo, Gradients(keep=False)),
            "baby": (baby, Gradients(shared=True)),
        }
        for name, group in (("gloo", gloo), ("baby", baby)):
            group.configure(f"{store}/{name}", rank, size)
        for _, gradients in self.sides.values():
            gradients.attach(self.parameters)
        return {}

    def steps(self, side: str, count: int, rank: int) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        name, _, fused = side.partition(", ")
        sum_up: Callable[[], None] = self.plain if name == "plain" else lambda: self.ours(*self.sides[name])
        group = None if name == "plain" else self.sides[name][0]
        spent, before = [], [parameter.detach().clone() for parameter in self.parameters]
        began_s = cpu_s(group)
        for _ in range(count):
            dist.barrier()  # nobody begins before the others have ended
            start_s = time.perf_counter()
            self.optimizer.zero_grad()
            sum_up()
            self.update(fused=bool(fused))
            spent.append(time.perf_counter() - start_s)
        used_s = (cpu_s(group) - began_s) / count
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


def cpu_s(group: Any) -> float:
    """That this process has used, and the group's child if it has one."""
    child = getattr(group, "child", None)
    if child is None or sys.platform != "linux":
        return time.process_time()
    fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    return time.process_time() + sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")  # user and system time


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        serve(ReduceMember())
    else:
        sys.exit(main(sys.argv[1:]))
