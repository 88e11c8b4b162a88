"""A death while the last sums are on their way may leave some survivors with all of them and others without. They end with one history.

    python bench/last_bucket.py [--kills 200] [--seed 1]

Three groups train over gloo, each in a process of its own; a group that has just launched its last bucket gets SIGKILL a random moment
later, and another takes its place, again and again. Each group says after every step what it committed and what its weights are, and of
every reduction whether it had all sums. Passes (exit 0) when no two groups ever held different weights under one commit id, or different
commits of a step that both went on from, no step is missing (a group may have it from another, which had all sums), and all end equal.
Prints in how many of the kills one survivor had all sums and the other had not: the case that this is about.
"""

from __future__ import annotations

import hashlib
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations, pairwise
from multiprocessing import connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.job import Forked, until
from bench.pairs import parser

PARAMETERS, BUCKET_BYTES = (64, 8192), 256 << 10  # 2 MiB in 8 buckets: a reduction takes milliseconds
MOMENT_S = 0.006  # the latest moment of a kill, from the launch of the last bucket
LIMIT_S = 60.0


def train(name: str, lighthouse: str, talk: Any) -> None:
    """Trains one group, until it is told anything."""
    import torch

    from ft.gradients import Gradients
    from ft.manager import Manager, ManagerOptions
    from ft.membership import ReplicaGroupConfig
    from ft.process_groups.gloo import ProcessGroupGloo
    from ft.protocol import messages as m
    from ft.rpc.access import Access

    class Told(Gradients):
        def launch(self, tail: Sequence[float], *, zeros: bool = False) -> None:
            super().launch(tail, zeros=zeros)
            talk.send(("launched", 0))

    def seen(now_s: float, event: m.Event, out: m.Out) -> None:
        if isinstance(event, m.Reduced | m.ReduceFailed):
            talk.send((type(event).__name__, event.step))
        for effect in out.effects:
            if isinstance(effect, m.LoadState):
                talk.send(("healed", effect.step))

    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(PARAMETERS[1])) for _ in range(PARAMETERS[0])])
    config = ReplicaGroupConfig(name, 0, 1, lighthouse, "127.0.0.1", Access(), m.Times())
    gradients, options = Told(bucket_bytes=BUCKET_BYTES), ManagerOptions(init_sync=False)
    manager = Manager(ProcessGroupGloo(), config, options, gradients=gradients, seen=seen)
    manager.register("model", model.state_dict, model.load_state_dict)
    manager.attach([model])
    while not manager.left:
        if talk.poll():
            manager.leave()
        deal = manager.begin_step()
        for slot in deal.slots:
            for parameter in model:
                parameter.grad = torch.full_like(parameter, slot + 1.0)
        commit = manager.commit(manager.reduce([1.0] * len(deal.slots), 0.0, True))
        if commit is None:
            continue
        digest = hashlib.sha256()
        with torch.no_grad():
            for parameter in model:
                parameter -= parameter.grad
                parameter.grad = None
                digest.update(parameter.numpy().data)
        talk.send(("committed", (manager.step, manager.commit_id, digest.hexdigest()[:16], len(commit.contributors))))
    manager.close()


class BucketGroup(Forked):
    def __init__(self, name: str, lighthouse: str) -> None:
        super().__init__(("ft.manager", "ft.process_groups.gloo"), train, name, lighthouse)
        self.name, self.launched = name, 0
        self.commits: dict[int, tuple[str, str, int]] = {}  # step -> commit id, weights, contributors
        self.sums: dict[int, list[str]] = defaultdict(list)  # step -> how its reductions ended
        self.healed: set[int] = set()  # to these steps: another had committed what this group could not

    def read(self) -> None:
        """Reads all messages of the group; one that it was writing as it died is lost."""
        with suppress(EOFError, OSError):
            while self.pipe.poll():
                what, told = self.pipe.recv()
                if what == "committed":
                    self.commits[told[0]] = told[1:]
                elif what == "launched":
                    self.launched += 1
                elif what == "healed":
                    self.healed.add(told)
                else:
                    self.sums[told].append(what)

    @property
    def step(self) -> int:
        return max(self.commits, default=0)

    def together(self, groups: int) -> int:
        return sum(contributors == groups for _, _, contributors in self.commits.values())


def problems(groups: Sequence[BucketGroup]) -> list[str]:
    """Finds states that may not be. A step may have two versions only if nobody went on from one of them."""
    weights: dict[str, str] = {}
    found = []
    for group in groups:
        for step, (commit_id, digest, _) in group.commits.items():
            if weights.setdefault(commit_id, digest) != digest:
                found.append(f"{group.name}, step {step}: other weights under commit {commit_id[:8]}")
        gaps = [step for before, step in pairwise(sorted(group.commits)) if step > before + 1]
        found += [f"{group.name}: no step before {step}" for step in gaps if step - 1 not in group.healed]
    for one, other in combinations(groups, 2):
        for step in one.commits.keys() & other.commits.keys():
            both_went_on = step + 1 in one.commits and step + 1 in other.commits
            if both_went_on and one.commits[step][0] != other.commits[step][0]:
                found.append(f"{one.name} and {other.name} went on from different commits of step {step}")
    return found


def prove(kills: int, seed: int) -> int:
    from ft.compat.lighthouse_server import LighthouseServer

    dice, lighthouse, split, began_s = random.Random(seed), LighthouseServer("127.0.0.1:0", 1), 0, time.monotonic()
    start = partial(BucketGroup, lighthouse=lighthouse.address())
    survivors = [start("a"), start("b")]
    groups = [*survivors]

    def read() -> None:
        live = [group for group in groups if group.process.is_alive()]
        connection.wait([group.pipe for group in live], timeout=0.1)
        for group in live:
            group.read()

    def wait(what: str, holds: Callable[[], bool]) -> None:
        until(what, holds, LIMIT_S, look=read, poll_s=0.0)

    for kill in range(kills):
        victim = start("c")
        groups.append(victim)
        wait("the newcomer takes part", lambda: victim.together(3) >= 2)  # noqa: B023 (called at once)
        before, moment_s = victim.launched, dice.uniform(0.0, MOMENT_S)
        wait("the victim launches its last bucket", lambda: victim.launched > before)  # noqa: B023
        time.sleep(moment_s)
        victim.process.kill()
        victim.process.join()
        step = max(group.step for group in survivors)
        wait("the survivors go on", lambda: all(group.step > step + 1 for group in survivors))  # noqa: B023
        victim.pipe.close()
        failed = [[at for at in range(step - 1, step + 3) if "ReduceFailed" in group.sums[at]] for group in survivors]
        split += failed[0] != failed[1]
        if sys.stderr.isatty():
            sys.stderr.write(f"\r{kill + 1} of {kills} kills, {split} split ")
    for group in survivors:
        group.tell("enough")
    wait("the survivors leave", lambda: not any(group.process.is_alive() for group in survivors))
    for group in survivors:
        group.read()
    lighthouse.shutdown()
    found = problems(groups)
    last = [group.commits[min(one.step for one in survivors)] for group in survivors]
    if last[0][:2] != last[1][:2]:
        found.append("the survivors do not end equal")
    steps = max(group.step for group in survivors)
    print(f"{kills} kills at the last bucket, seed {seed}: {steps} steps in {time.monotonic() - began_s:.0f} s")
    print(f"one survivor had all sums, and the other not: {split} times")
    print("one history: " + ("; ".join(found) if found else "yes"))
    return 1 if found else 0


if __name__ == "__main__":
    given = parser((__doc__ or "").partition("\n")[0], kills=200, seed=1).parse_args()
    sys.exit(prove(given.kills, given.seed))
