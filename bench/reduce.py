"""Measures the cost of keeping gradients: a step (gradients, all-reduce, division, SGD) with ft/gradients.py and with plain
torch.distributed; and an all-reduce by itself.

    python bench/reduce.py [--megabytes 100] [--rounds 7]         3 processes on loopback; 2 minutes

All sides run in the same processes, alternating; every other round is in reverse order. A value is the median of STEPS steps of the slowest
process, with the CPU time of all (children included; less affected by other programs); ratios are computed per round. A step zeroes the
gradients, creates new ones, all-reduces them, divides, and applies SGD. `plain` all-reduces each .grad and divides it in place. ft keeps
the original gradients until the all-reduces complete (`kept`), or does not (`not kept`), or reduces in a child process (`baby`). `fused`
divides in the learning rate, as the trainer does; otherwise every gradient is divided. In a child a tensor is in shared memory, or is
copied in and out.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

import torch
import torch.distributed as dist
from torch import nn

from bench.job import LOOPBACK, cpu_s
from bench.pairs import ask_all, in_turns, parser, ratio, serve, spread, table, workers
from ft.gradients import Gradients
from ft.process_groups.baby import ProcessGroupBabyGloo
from ft.process_groups.gloo import ProcessGroupGloo
from ft.process_groups.store import StoreClient
from ft.process_groups.store import serve as serve_store

MEMBERS, TENSORS, STEPS, LR = 3, 8, 4, 0.1
SIDES = {
    "step": ("plain", "kept", "kept, fused", "not kept", "not kept, fused", "baby", "baby, fused"),
    "all-reduce": ("plain", "gloo", "baby, shared", "baby, copied"),
}


def main() -> None:
    options = parser(__doc__, megabytes=(100.0, "of fp32 gradients"), rounds=7).parse_args()
    store, command = serve_store(), [sys.executable, __file__, "--worker"]
    with workers({str(rank): command for rank in range(MEMBERS)}, OMP_NUM_THREADS="1") as members:
        ask_all(members, "meet", store=f"127.0.0.1:{store.port}", elements=int(options.megabytes * 1e6 / 4))
        for what, sides in SIDES.items():
            calls = {side: partial(ask_all, members, what.replace("-", "_"), side=side) for side in sides}
            answers = in_turns(calls, options.rounds, warm=1)
            spent = {side: [max(answer["s"] for answer in turn) for turn in turns] for side, turns in answers.items()}
            cpu = {side: [sum(answer["cpu_s"] for answer in turn) for turn in turns] for side, turns in answers.items()}
            rows = []
            for side in sides:
                cpu_ms, by_cpu = f"{1e3 * statistics.median(cpu[side]):.0f}", str(ratio(cpu[side], cpu["plain"]))
                by_plain = str(ratio(spent[side], spent["plain"]))
                rows.append([side, spread(spent[side], ".0f", 1e3), by_plain, cpu_ms, by_cpu])
            tensors = f"{options.megabytes:g} MB" + (f" in {TENSORS} tensors" if what == "step" else "")
            print(f"{what} of {tensors}, {MEMBERS} members, {options.rounds} rounds")
            print(table(["side", "ms", "relative to plain", "CPU ms, all", "relative to plain"], rows), flush=True)


class ReduceMember:
    """A process in three process groups: torch.distributed's, ft's gloo in process, and ft's gloo in a child."""

    def meet(self, store: str, rank: int, elements: int) -> dict[str, Any]:
        os.environ["GLOO_SOCKET_IFNAME"] = LOOPBACK["GLOO_SOCKET_IFNAME"]
        mine = StoreClient(f"{store}/plain", 120.0)
        mine.connect()
        dist.init_process_group("gloo", store=mine, rank=rank, world_size=MEMBERS)
        gloo = ProcessGroupGloo(rendezvous_s=120.0)
        self.baby = ProcessGroupBabyGloo(rendezvous_s=120.0)
        for name, group in (("gloo", gloo), ("baby", self.baby)):
            group.configure(f"{store}/{name}", rank, MEMBERS)
        self.parameters: list[Any] = [nn.Parameter(torch.zeros(elements // TENSORS)) for _ in range(TENSORS)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=LR)
        self.keepers: dict[str, tuple[Any, Gradients]] = {
            "kept": (gloo, Gradients()),
            "not kept": (gloo, Gradients(keep=False)),
            "baby": (self.baby, Gradients(shared=True)),
        }
        for _, gradients in self.keepers.values():
            gradients.attach(self.parameters)
        value = torch.ones(elements)
        self.sums: dict[str, tuple[Any, torch.Tensor]] = {
            "plain": (dist.group.WORLD, value),
            "gloo": (gloo, value),
            "baby, shared": (self.baby, self.baby.empty(elements)),
            "baby, copied": (self.baby, value),
        }
        return {}

    def step(self, side: str, rank: int) -> dict[str, float]:
        name, _, fused = side.partition(", ")
        before = [parameter.detach().clone() for parameter in self.parameters]
        group, gradients = self.keepers.get(name, (None, None))
        figures = self.timed(group, partial(self.one_step, group, gradients, bool(fused)), STEPS)
        for parameter, old in zip(self.parameters, before, strict=True):
            torch.testing.assert_close(parameter.detach(), old - STEPS * LR)
        return figures

    def all_reduce(self, side: str, rank: int) -> dict[str, float]:
        group, value = self.sums[side]
        value.fill_(1.0)
        figures = self.timed(group, lambda: group.allreduce([value]).wait(), 1)
        assert value[0] == value[-1] == MEMBERS
        return figures

    def timed(self, group: Any, call: Callable[[], object], count: int) -> dict[str, float]:
        """Returns the median seconds of a call, and the CPU seconds, including those of the group's child."""
        child = getattr(group, "child", None)
        pids = [os.getpid(), *([child.pid] if child else [])]
        spent, began_s = [], sum(map(cpu_s, pids))
        for _ in range(count):
            dist.barrier()  # begin when all have ended the previous call
            start_s = time.perf_counter()
            call()
            spent.append(time.perf_counter() - start_s)
        return {"s": statistics.median(spent), "cpu_s": (sum(map(cpu_s, pids)) - began_s) / count}

    def one_step(self, group: Any, gradients: Gradients | None, fused: bool) -> None:
        self.optimizer.zero_grad()
        if gradients is None:
            works = []
            for parameter in self.parameters:
                parameter.grad = torch.ones_like(parameter)
                works.append(dist.all_reduce(parameter.grad, async_op=True))
            for work in works:
                work.wait()
        else:
            gradients.begin_attempt(group, MEMBERS)
            with gradients.last_backward():
                for parameter in reversed(self.parameters):  # in the order of a backward pass
                    parameter.grad = torch.ones_like(parameter)
                    for hook in parameter._post_accumulate_grad_hooks.values():
                        hook(parameter)
            gradients.launch_remaining([1.0, 0.0, 1.0, 0.0])
            gradients.wait()
            gradients.deliver()
        if not fused:
            for parameter in self.parameters:
                parameter.grad.div_(MEMBERS)
        self.optimizer.param_groups[0]["lr"] = LR / MEMBERS if fused else LR
        self.optimizer.step()


if __name__ == "__main__":
    if sys.argv[1:] == ["--worker"]:
        torch.set_num_threads(1)
        serve(ReduceMember())
    else:
        main()
