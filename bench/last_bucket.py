"""Checks that survivors stay consistent when a group dies during the last all-reduce, which may complete in only some of them.

    python bench/last_bucket.py

Three replica groups train over gloo, each in a process; a group that has launched its last bucket gets SIGKILL a random time later and is
replaced, repeatedly. Each records its steps (ft/recording.py), which are checked as in the drill (drill_faults.py): the survivors lose no
step, and of each step all groups continue from one commit, with the same weights. Also prints how many steps a survivor healed from the
other one, whose all-reduces had completed: the case under test.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.job import EventLog, Forked, until
from bench.pairs import parser

PARAMETERS, BUCKET_BYTES = (64, 8192), 256 << 10  # 2 MiB in 8 buckets: a reduction takes milliseconds
MOMENT_S = 0.006  # maximum delay of a kill after the launch of the last bucket
LIMIT_S = 60.0


def train(folder: Path, lighthouse: str, talk: Any) -> None:
    """Trains group `folder.name` until a message comes. Group c sends a message when it launches the last bucket of a step."""
    import torch

    from ft.gradients import Gradients
    from ft.manager import ManagerOptions
    from ft.membership import ReplicaGroupConfig
    from ft.process_groups.gloo import ProcessGroupGloo
    from ft.protocol.messages import Timeouts
    from ft.recording import RecordingManager
    from ft.rpc.access import Access

    class NotifyingGradients(Gradients):
        def launch_remaining(self, tail: Sequence[float], *, zeros: bool = False) -> None:
            super().launch_remaining(tail, zeros=zeros)
            talk.send("launched")

    torch.set_num_threads(1)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(PARAMETERS[1])) for _ in range(PARAMETERS[0])])
    config = ReplicaGroupConfig(folder.name, 0, 1, lighthouse, "127.0.0.1", Access(), Timeouts())
    gradients = (NotifyingGradients if folder.name == "c" else Gradients)(bucket_bytes=BUCKET_BYTES)
    manager = RecordingManager(folder, ProcessGroupGloo(), config, ManagerOptions(init_sync=False), gradients=gradients)
    manager.register_state("model", model.state_dict, model.load_state_dict)
    manager.attach([model])
    while not manager.may_exit:
        if talk.poll():
            manager.leave()
        assignment = manager.begin_step()
        for slot in assignment.slots:
            for parameter in model:
                parameter.grad = torch.full_like(parameter, slot + 1.0)
        if manager.commit(manager.reduce([1.0] * len(assignment.slots), 0.0, True)) is not None:
            with torch.no_grad():
                for parameter in model:
                    parameter -= parameter.grad
                    parameter.grad = None
    manager.close()


def check(kills: int) -> int:
    from bench.drill_faults import Incident, Verdict, bitwise_equal, survivors_went_on
    from ft.compat.lighthouse import LighthouseServer

    dice, lighthouse, began_s = random.Random(1), LighthouseServer("127.0.0.1:0", 1), time.monotonic()
    incidents, both = list[Incident](), frozenset("ab")
    with tempfile.TemporaryDirectory() as runs:
        event_logs = {name: EventLog(name, Path(runs, name)) for name in "abc"}

        def start(name: str) -> Forked:
            return Forked(("ft.recording", "ft.process_groups.gloo"), train, Path(runs, name), lighthouse.address())

        def read() -> None:
            for event_log in event_logs.values():
                event_log.read()

        def wait(what: str, holds: Callable[[], bool]) -> None:
            until(what, holds, LIMIT_S, look=read)

        def together(since_s: float) -> bool:
            return [line.contributors for line in event_logs["c"].since(since_s, "commit")].count(3) >= 2

        def go_on(since_s: float) -> bool:
            return all(len(event_logs[name].since(since_s, "commit")) > 2 for name in both)

        survivors = [start(name) for name in "ab"]
        for _ in range(kills):
            victim = start("c")
            wait("the new group takes part", partial(together, time.monotonic()))
            while victim.pipe.poll():
                victim.hear()
            victim.hear()  # the next launch
            time.sleep(dice.uniform(0.0, MOMENT_S))
            at_s, step = time.monotonic(), max(event_logs[name].step for name in both)
            victim.kill()
            if incidents:
                incidents[-1].back_s = at_s  # includes the join of the next group, at which no step may be lost either
            wait("the survivors go on", partial(go_on, at_s))
            incidents.append(Incident("group c", "c", at_s, kind="kill", survivors=both, step=step, live=both))
            incidents[-1].back_s = time.monotonic()
        for group in survivors:
            group.tell("enough")
        wait("the survivors leave", lambda: not any(group.process.is_alive() for group in survivors))
        lighthouse.shutdown()
        read()
    steps = max(event_log.step for event_log in event_logs.values())
    print(f"{kills} kills at the last bucket: {steps} steps in {time.monotonic() - began_s:.0f} s")
    trained = {step: set(both) for step in range(steps + 1)}
    verdicts = [survivors_went_on(event_logs, incidents, trained), bitwise_equal(event_logs, incidents)]
    last = min(event_logs[name].step for name in both)
    commits = [line for name in both for line in event_logs[name].since(0.0, "commit") if line.step == last]
    ends = {(line.commit_id, line.digest) for line in commits}
    verdicts.append(Verdict("the survivors end equal", len(commits) == 2 and len(ends) == 1, f"step {last}"))
    print(*verdicts, sep="\n")
    return 0 if all(verdict.holds for verdict in verdicts) else 1


if __name__ == "__main__":
    parser(__doc__).parse_args()
    sys.exit(check(200))
