"""Fifty starts of a program with a Manager and forked loader workers: no worker dies, whichever of the two is made first.

    python bench/starts.py

A live gRPC channel and worker processes made by fork can kill each other: the child holds gRPC's locks, but not the threads that would
release them. ft sets GRPC_ENABLE_FORK_SUPPORT=0 before gRPC is imported, so that gRPC leaves forks alone. Each start is two groups at once,
each a process with two workers that trains some steps, forks new ones every few steps while the channel is at work, and ends by itself.
Manager and loader take turns to be first, gloo and baby gloo take turns, too. Passes (exit 0) when every process ended with 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.job import LOOPBACK
from bench.pairs import parser

STARTS, STEPS = 50, 20
LIMIT_S = 180.0  # for a start on a busy machine
FIRST, KINDS = ("manager", "loader"), ("ProcessGroupGloo", "ProcessGroupBabyGloo")


def main() -> int:
    parser(__doc__).parse_args()
    from ft import LighthouseServer

    ended, began_s = Counter[str](), time.monotonic()
    for number in range(STARTS // 2):
        first, kind = FIRST[number % 2], KINDS[number // 2 % 2]
        lighthouse = LighthouseServer("127.0.0.1:0", 2)
        try:
            for text in start_two(first, kind, lighthouse.address()):
                ended[f"{first} first, {kind}: {'FAILED' if text else 'ended'}"] += 1
                print(text, end="", file=sys.stderr)
        finally:
            lighthouse.shutdown()
        print(f"{2 * (number + 1)} starts in {time.monotonic() - began_s:.0f} s", flush=True)
    for line, count in sorted(ended.items()):
        print(f"{count:4d}  {line}")
    failed = sum(count for line, count in ended.items() if line.endswith("FAILED"))
    print(f"{'FAILED' if failed else 'passed'}: {sum(ended.values())} starts, {failed} failed")
    return 1 if failed else 0


def start_two(first: str, kind: str, lighthouse: str) -> list[str]:
    """Runs two groups until they end. Returns the output of each that failed; "" for one that ended well."""
    command = [sys.executable, __file__, "--worker", first, kind]
    env = {**os.environ, **LOOPBACK, "TORCHFT_LIGHTHOUSE": lighthouse, "NUM_REPLICA_GROUPS": "2"}

    def run(group: str) -> str:
        own, out = {**env, "REPLICA_GROUP_ID": group}, subprocess.PIPE
        try:
            done = subprocess.run(command, env=own, timeout=LIMIT_S, stdout=out, stderr=subprocess.STDOUT)
        except subprocess.TimeoutExpired as late:
            return f"{(late.stdout or b'').decode()}\nhas not ended after {LIMIT_S:g} s\n"
        return f"{done.stdout.decode()}\nexit code {done.returncode}\n" if done.returncode else ""

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, "01"))


def train(first: str, kind: str) -> None:
    """One group: the example's model and images, a new epoch, so new workers, every few steps."""
    import torch
    from torch.utils.data import DataLoader

    import ft
    from examples.train_ddp import Images, net

    torch.manual_seed(0)
    model = net()
    adam = torch.optim.AdamW(model.parameters())

    def make_manager() -> Any:
        return ft.Manager(
            pg=getattr(ft, kind)(),
            load_state_dict=lambda state: (model.load_state_dict(state["model"]), adam.load_state_dict(state["optim"])),
            state_dict=lambda: {"model": model.state_dict(), "optim": adam.state_dict()},
            min_replica_size=2,
            every_step=True,  # so that the channel is at work when workers are forked
            replica_id=f"starts_{os.environ['REPLICA_GROUP_ID']}",
        )

    manager = make_manager() if first == "manager" else None
    loader = DataLoader(Images(), batch_size=8, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)  # the workers are there
    manager = manager or make_manager()
    ddp, optimizer = ft.DistributedDataParallel(manager, model), ft.Optimizer(manager, adam)
    for step in range(STEPS):
        if step % 3 == 2:
            batches = iter(loader)
        inputs, labels = next(batches)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(ddp(inputs), labels).backward()
        optimizer.step()
    assert manager.current_step() == STEPS, f"{manager.current_step()} of {STEPS} steps were committed"
    manager.shutdown()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        train(*sys.argv[2:])
    else:
        sys.exit(main())
