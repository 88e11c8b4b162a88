"""Replica groups on machines of their own, whose packets to each other can be dropped (bench/drill_machines.py). The lighthouse is at the
hub, so all reach it.

    python -m tests.ft.cut_pairs NAME HOST LIGHTHOUSE   one group: prints a line of JSON for each step that it commits
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.drill_machines import HUB, HUB_ADDRESS, Network

ROOT = Path(__file__).resolve().parents[2]
PACE_S = 0.05  # of a step: the machine has others to serve
LIMIT_S = 120.0  # of any wait


@dataclass(frozen=True)
class Commit:
    """One line of a member."""

    at_s: float  # on the machine's monotonic clock
    name: str
    step: int
    quorum_id: int
    members: str  # names, in the order of their ranks


class Job:
    """A lighthouse at the hub and a group on each of its machines."""

    def __init__(self, network: Network, folder: Path, names: Sequence[str], *, min_replicas: int) -> None:
        self._network, self._folder = network, folder
        self.commits: list[Commit] = []
        self._news = threading.Condition()
        self._processes: list[subprocess.Popen[str]] = []
        lighthouse = f"{HUB_ADDRESS}:29510"
        flags = [f"--bind={lighthouse}", f"--min_replicas={min_replicas}", "--state_file=none", "--insecure"]
        self._log = (folder / "log").open("w")
        self._start(HUB, "-m", "ft.rpc.lighthouse_main", *flags, "--http=none")
        for name in names:
            network.through(name)
            member = ("-m", "tests.ft.cut_pairs", name, network.addresses[name], f"http://{lighthouse}")
            process = self._start(name, *member)
            threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def until(self, members: str, since_s: float, *, steps: int = 3) -> float:
        """When `steps` steps of a quorum of just these were committed, after since_s; the time of the first. Raises TimeoutError."""

        def found() -> list[Commit]:
            return [x for x in self.commits if x.at_s > since_s and x.members == members and x.name == members[0]]

        with self._news:
            if not self._news.wait_for(lambda: len(found()) >= steps, LIMIT_S):
                newest = self.commits[-1] if self.commits else None
                raise TimeoutError(f"no {steps} steps of {members} in {LIMIT_S:g} s; newest {newest}\n{self.said()}")
            return found()[0].at_s

    def said(self) -> str:
        self._log.flush()
        return (self._folder / "log").read_text()[-4000:]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._log.close()

    def _start(self, place: str, *argv: str) -> subprocess.Popen[str]:
        command, env = [*self._network.through(place), sys.executable, *argv], {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": self._log}
        process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)  # type: ignore[call-overload]
        self._processes.append(process)
        return process  # type: ignore[no-any-return]

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._news:
                self.commits.append(Commit(name=name, **json.loads(line)))
                self._news.notify_all()


def member(name: str, host: str, lighthouse: str) -> int:
    """Trains until it is killed."""
    import logging

    from torch._C._distributed_c10d import HashStore

    from ft.protocol.messages import name_of
    from ft.rpc.access import Access
    from tests.ft.groups import Rank

    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(message)s")

    class Told(Rank):
        def train_step(self) -> None:
            time.sleep(PACE_S)
            before = self.manager.step
            super().train_step()
            part = self.manager.part
            if self.manager.step > before and part:
                members = "".join(map(name_of, part.members))
                line = {"at_s": time.monotonic(), "step": self.manager.step, "quorum_id": part.quorum_id}
                print(json.dumps({**line, "members": members}), flush=True)
            self.seen.clear()
            self.commits.clear()
            self.weights.clear()

    how = {"steps": 1, "together": 1 << 20, "options": {"dies_with_group": True}, "access": Access(insecure=True)}
    rank = Told(name, 0, 1, lighthouse, HashStore(), host=host, **how)
    rank.run()
    if rank.error:
        raise rank.error
    return 0


if __name__ == "__main__":
    sys.exit(member(*sys.argv[1:]))
