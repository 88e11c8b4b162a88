"""Starts examples/train_ddp.py, which has a Manager and forked loader workers, fifty times, and checks that no worker dies.

    python bench/starts.py

A fork of a process with a live gRPC channel can deadlock: the child inherits gRPC's locks, but not the threads that release them. ft sets
GRPC_ENABLE_FORK_SUPPORT=0 before gRPC is imported, so that gRPC has no fork handlers. Each start is two replica groups at once, which exit
by themselves. Exit code: 0 if every process exited with 0, else 1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path, from any folder

from bench.job import LOOPBACK, ROOT
from bench.pairs import parser
from ft import LighthouseServer

STARTS, COMMAND = 50, [sys.executable, "examples/train_ddp.py", "--steps", "20"]


def start(lighthouse: str, group: str) -> bool:
    """Runs a replica group to its end. Returns True if it exited with 0."""
    env = {**os.environ, **LOOPBACK, "TORCHFT_LIGHTHOUSE": lighthouse, "REPLICA_GROUP_ID": group}
    done = subprocess.run(
        COMMAND, cwd=ROOT, env=env, timeout=180.0, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        print(f"{done.stdout}\nexit code {done.returncode}", file=sys.stderr)
    return done.returncode == 0


def main() -> int:
    parser(__doc__).parse_args()
    failed = 0
    for number in range(0, STARTS, 2):
        lighthouse = LighthouseServer("127.0.0.1:0", 2)
        try:
            with ThreadPoolExecutor(2) as threads:
                failed += [*threads.map(partial(start, lighthouse.address()), "01")].count(False)
        finally:
            lighthouse.shutdown()
        print(f"{number + 2} starts, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
