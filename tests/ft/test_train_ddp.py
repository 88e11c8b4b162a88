"""examples/train_ddp.py as its head says to run it: two groups with loader workers, one killed and started again."""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
import torch.nn.functional as F

from examples.train_ddp import Images, net
from ft import DistributedSampler, LighthouseServer
from tests.scripts.tiny_job import Started

ROOT = Path(__file__).resolve().parents[2]
BATCH, EVERY = 64, 50  # the example's: images of a group's batch, steps between two lines
WINDOW = 4 * EVERY  # whose losses are compared
LINE = re.compile(r"\[(\d+)\] (\d) groups, loss (\S+), weights (\S+)\n")


class Program(Started):
    """One group's process."""

    def __init__(self, group: int, lighthouse: str, out: Path) -> None:
        command = [sys.executable, ROOT / "examples" / "train_ddp.py", "--steps", "1000000"]
        said = {"TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA_GROUP_ID": str(group), "NUM_REPLICA_GROUPS": "2"}
        super().__init__(command, out, cwd=ROOT, **said)

    @property
    def steps(self) -> dict[int, tuple[int, float, str]]:
        """Returns the printed lines by step: groups, loss, weights."""
        return {int(found[1]): (int(found[2]), float(found[3]), found[4]) for found in LINE.finditer(self.text)}

    def wait_for(self, step: int, groups: int) -> int:
        """The first line of at least that step that so many groups took part in."""

        def found(_: str) -> list[int]:
            return [at for at, (size, _, _) in self.steps.items() if at >= step and size == groups]

        return found(self.until(f"step {step} of {groups} groups", found))[0]


@contextmanager
def job(folder: Path) -> Iterator[Callable[[int], Program]]:
    """Starts a group."""
    with ExitStack() as stack:
        lighthouse, numbers = LighthouseServer("127.0.0.1:0", 1), itertools.count()
        stack.callback(lighthouse.shutdown)

        def start(group: int) -> Program:
            made = Program(group, lighthouse.address(), folder / f"{next(numbers)}.txt")
            stack.callback(made.process.wait)
            stack.callback(made.process.kill)
            return made

        yield start


def losses_without_faults(steps: int) -> list[float]:
    """Returns the loss of each step of two undisturbed groups, computed in one process: the mean over both batches."""
    torch.manual_seed(0)
    images, model = Images(), net()
    adam = torch.optim.AdamW(model.parameters())
    samplers = [
        DistributedSampler(images, replica_group=g, num_replica_groups=2, rank=0, num_replicas=1) for g in (0, 1)
    ]
    orders = [list(sampler) for sampler in samplers]
    batches, losses = math.ceil(len(orders[0]) / BATCH), list[float]()
    for step in range(steps):
        at = step % batches * BATCH
        inputs, labels = zip(*(images[index] for order in orders for index in order[at : at + BATCH]), strict=True)
        adam.zero_grad()
        loss = F.cross_entropy(model(torch.stack(inputs)), torch.tensor(labels))
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


@pytest.mark.timeout(900)  # three programs start, and a run is computed again
def test_the_example_outlives_a_kill(tmp_path: Path):
    with job(tmp_path) as start:
        left, right = start(0), start(1)
        together = left.wait_for(50, groups=2)
        right.process.kill()
        alone = left.wait_for(together, groups=1)
        again = start(1)
        met = again.wait_for(alone, groups=2)
        end = left.wait_for(met + WINDOW, groups=2)
        again.wait_for(end, groups=2)
        common = [step for step in left.steps if step in again.steps or step in right.steps]
        for step in common:
            other = again if step in again.steps else right
            assert left.steps[step][2] == other.steps[step][2], f"step {step}: other weights"
        assert met in common
        printed = range(end - WINDOW + EVERY, end + 1, EVERY)
        losses = [program.steps[step][1] for program in (left, again) for step in printed]
        lost = EVERY * (sum(groups == 1 for step, (groups, _, _) in left.steps.items() if step < end) + 1)
    # It has seen fewer images than a run without faults of as many steps, and no fewer than one of so many steps less as were lost, each
    # half a contribution. Between what those two come to it has to be, but for the noise of its own losses, each of one batch.
    whole = losses_without_faults(end)
    best, worst = (mean(whole[last - WINDOW + EVERY - 1 : last]) for last in (end, end - lost // 2))
    noise = 4 * stdev(losses) / math.sqrt(len(losses))
    assert best - noise <= mean(losses) <= worst + noise, (best, worst, noise, losses, lost, end)
    assert mean(losses) < whole[0] / 2, "it does not learn"
