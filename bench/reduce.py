"""The cost of keeping gradients: a whole step (gradients, reduction, division, SGD) by ft/gradients.py and by plain torch.distributed.

    python bench/reduce.py                        3 processes on loopback, 100 MB in 8 tensors, 7 rounds; 2 minutes
    python bench/reduce.py --megabytes 400 --rounds 11 --tensors 64

All sides run in the same processes, in turns; every other round runs backwards. A figure is the median of `--steps` steps, of the slowest
process, beside the CPU time of all (children included; it suffers less from other programs); ratios are taken inside a round. A step
zeroes the gradients, makes new ones, sums them over the processes, divides, and applies SGD. `plain` sums each .grad where it is and
divides it in place. Ours keep the originals until the sums are there (`kept`), or not (`not kept`), or sum in a child process (`baby`).
Division is where the trainer has it: `fused` in the learning rate, else over every gradient, as plain has to.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

import torch
import torch.distributed as dist
from torch import nn

from bench.job import LOOPBACK, cpu_s
from bench.pairs import Worker, ask_all, in_turns, parser, ratio, serve, spread, table, workers
from ft.gradients import Gradients
from ft.process_groups.baby import ProcessGroupBabyGloo
from ft.process_groups.gloo import ProcessGroupGloo
from ft.process_groups.store import StoreClient
from ft.process_groups.store import serve as serve_store

SIDES = ("plain", "kept", "kept, fused", "not kept", "not kept, fused", "baby", "baby, fused")
LR = 0.1


def main() -> None:
    options = parser(
        __doc__,
        members=3,
        megabytes=(100.0, "of fp32 gradients"),
        tensors=8,
        rounds=7,
        steps=(4, "per side and round"),
    ).parse_args()
    sizes = {"elements": int(options.megabytes * 1e6 / 4), "tensors": options.tensors}
    with meeting(__file__, options.members, **sizes) as team:
        steps = partial(ask_all, team, "steps", count=options.steps)
        answers = in_turns({side: partial(steps, side=side) for side in SIDES}, options.rounds, warm=1)
    spent, cpu = (
        {side: [over(answer[figure] for answer in turn) for turn in turns] for side, turns in answers.items()}
        for figure, over in (("s", max), ("cpu_s", sum))
    )
    rows = []
    for side in SIDES:
        cpu_ms, by_cpu = f"{1e3 * statistics.median(cpu[side]):.0f}", str(ratio(cpu[side], cpu["plain"]))
        rows.append([side, spread(spent[side], ".0f", 1e3), str(ratio(spent[side], spent["plain"])), cpu_ms, by_cpu])
    what = f"{options.megabytes:g} MB in {options.tensors} tensors, {options.members} members, {options.rounds} rounds"
    print(f"a step of {what}\n{table(['side', 'ms a step', 'by plain', 'CPU ms, all', 'by plain'], rows)}")


@contextmanager
def meeting(program: str, members: int, **about: int) -> Iterator[list[Worker]]:
    """Processes that have met, by rank: each is `program --worker`, which serves a MeetingMember. `about`: for its `begin`."""
    store, command = serve_store(), [sys.executable, program, "--worker"]
    with workers({str(rank): command for rank in range(members)}, OMP_NUM_THREADS="1") as team:
        ask_all(team, "meet", store=f"127.0.0.1:{store.port}", size=members, about=about)
        yield team


class MeetingMember:
    """A process that meets the others in plain torch.distributed and in groups of ours, in process and in a child."""

    gloo: Any
    baby: Any

    @classmethod
    def serve(cls) -> None:
        torch.set_num_threads(1)
        serve(cls())

    def meet(self, store: str, rank: int, size: int, about: dict[str, int]) -> dict[str, Any]:
        self.size, interface = size, LOOPBACK["GLOO_SOCKET_IFNAME"]
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        mine = StoreClient(f"{store}/plain", 120.0)
        mine.connect()
        dist.init_process_group("gloo", store=mine, rank=rank, world_size=size)
        self.gloo = ProcessGroupGloo(rendezvous_s=120.0, interface=interface)
        self.baby = ProcessGroupBabyGloo(rendezvous_s=120.0, interface=interface)
        for name, group in (("gloo", self.gloo), ("baby", self.baby)):
            group.configure(f"{store}/{name}", rank, size)
        self.begin(**about)
        return {}

    def begin(self, **about: int) -> None:
        """Prepares the sides, once all have met."""
        raise NotImplementedError


class ReduceMember(MeetingMember):
    def begin(self, elements: int, tensors: int) -> None:
        self.parameters: list[Any] = [nn.Parameter(torch.zeros(elements // tensors)) for _ in range(tensors)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=LR)
        self.sides: dict[str, tuple[Any, Gradients]] = {
            "kept": (self.gloo, Gradients()),
            "not kept": (self.gloo, Gradients(keep=False)),
            "baby": (self.baby, Gradients(shared=True)),
        }
        for _, gradients in self.sides.values():
            gradients.attach(self.parameters)

    def steps(self, side: str, count: int, rank: int) -> dict[str, float]:
        name, _, fused = side.partition(", ")
        group, gradients = self.sides.get(name, (None, None))
        child = getattr(group, "child", None)
        pids = [os.getpid(), *([child.pid] if child else [])]
        spent, before = [], [parameter.detach().clone() for parameter in self.parameters]
        began_s = sum(map(cpu_s, pids))
        for _ in range(count):
            dist.barrier()  # nobody begins before the others have ended
            start_s = time.perf_counter()
            self.optimizer.zero_grad()
            if gradients is None:
                self.plain()
            else:
                self.ours(group, gradients)
            self.update(fused=bool(fused))
            spent.append(time.perf_counter() - start_s)
        used_s = (sum(map(cpu_s, pids)) - began_s) / count
        for parameter, old in zip(self.parameters, before, strict=True):
            torch.testing.assert_close(parameter.detach(), old - count * LR)
        return {"s": statistics.median(spent), "cpu_s": used_s}

    def plain(self) -> None:
        works = []
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
            works.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in works:
            work.wait()

    def ours(self, group: Any, gradients: Gradients) -> None:
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
    ReduceMember.serve() if sys.argv[1:] == ["--worker"] else main()
