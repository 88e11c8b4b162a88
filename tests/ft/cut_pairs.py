"""Replica groups whose packets to each other are dropped: a network namespace each, joined by a router that drops what a pair sends each
other, in silence (Linux, root). The lighthouse is at the router, so all reach it.

    python -m tests.ft.cut_pairs --when forming --store a      cuts a from b, prints what came of it
    python -m tests.ft.cut_pairs member NAME HOST LIGHTHOUSE   one group: prints a line of JSON for each step that it commits
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
ROUTER = "10.78.0.254"
PACE_S = 0.05  # of a step: the machine has others to serve
LIMIT_S = 120.0  # of any wait


class Router:
    """Raises RuntimeError where this machine makes no namespaces. To be closed when no process of it lives."""

    def __init__(self, names: Sequence[str]) -> None:
        self._prefix = f"pharos-cut-{os.getpid()}-"
        self._spaces: list[str] = []
        self.hosts = {name: f"10.78.{place}.2" for place, name in enumerate(names, 1)}
        if sys.platform != "linux" or os.geteuid() != 0:
            raise RuntimeError("needs root on Linux")
        try:
            self._make("router")
            self.at("router", f"ip addr add {ROUTER}/32 dev lo", "sysctl -qw net.ipv4.ip_forward=1")
            for name, host in self.hosts.items():
                self._plug(name, host.rpartition(".")[0])
            self.cut(*names[:2])
            self.mend(*names[:2])
        except RuntimeError:
            self.close()
            raise

    def cut(self, one: str, other: str, *, one_way: bool = False) -> None:
        """Drops the packets of `one` to `other`, and those that come back unless it is one way."""
        for rule in self._rules(one, other)[: 1 if one_way else 2]:
            self.at("router", f"ip rule add pref 1 {rule} blackhole")

    def mend(self, one: str, other: str) -> None:
        for rule in self._rules(one, other):
            with suppress(RuntimeError):
                self.at("router", f"ip rule del pref 1 {rule} blackhole")

    def through(self, name: str) -> list[str]:
        """Returns the words before a command that run it on that machine, as the same process."""
        return ["ip", "netns", "exec", self._prefix + name]

    def at(self, name: str, *commands: str) -> None:
        for command in commands:
            _run(*self.through(name), *command.split())

    def close(self) -> None:
        while self._spaces:
            with suppress(RuntimeError):
                _run("ip", "netns", "delete", self._spaces.pop())

    def _rules(self, one: str, other: str) -> list[str]:
        a, b = self.hosts[one], self.hosts[other]
        return [f"from {a} to {b}", f"from {b} to {a}"]

    def _make(self, name: str) -> None:
        _run("ip", "netns", "add", self._prefix + name)
        self._spaces.append(self._prefix + name)
        self.at(name, "ip link set lo up")

    def _plug(self, name: str, net: str) -> None:
        self._make(name)
        self.at(
            "router",
            f"ip link add to-{name} type veth peer name eth0 netns {self._prefix + name}",
            f"ip addr add {net}.1/24 dev to-{name}",
            f"ip link set to-{name} up",
        )
        self.at(name, f"ip addr add {net}.2/24 dev eth0", "ip link set eth0 up", f"ip route add default via {net}.1")


@dataclass(frozen=True)
class Commit:
    """One line of a member."""

    at_s: float  # on the machine's monotonic clock
    name: str
    step: int
    quorum_id: int
    members: str  # names, in the order of their ranks


class Job:
    """A lighthouse at the router and a group on each of its machines. `last_id`: quorum ids begin after it, and the store of quorum q is
    at member q modulo their number."""

    def __init__(self, router: Router, folder: Path, *, min_replicas: int, last_id: int = 0) -> None:
        from ft.protocol.messages import Saved
        from ft.rpc.state_file import FORMAT

        self.router, self._folder = router, folder
        self.commits: list[Commit] = []
        self._news = threading.Condition()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        state = folder / "state.json"
        state.write_text(json.dumps({"format": FORMAT, **Saved("job", last_id).to_dict()}))
        flags = [f"--bind={ROUTER}:29510", f"--min_replicas={min_replicas}", f"--state_file={state}", "--insecure"]
        self.lighthouse = f"http://{ROUTER}:29510"
        self._log = (folder / "log").open("w")
        self._start("router", "-m", "ft.rpc.lighthouse_main", *flags, "--http=none")

    def start(self, name: str) -> None:
        host = self.router.hosts[name]
        process = self._start(name, "-m", "tests.ft.cut_pairs", "member", name, host, self.lighthouse)
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        self._processes[name].send_signal(number)

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
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.communicate()
        self._log.close()

    def _start(self, place: str, *argv: str) -> subprocess.Popen[str]:
        self._processes[place] = process = subprocess.Popen(
            [*self.router.through(place), sys.executable, *argv],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        return process

    def _read(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with self._news:
                self.commits.append(Commit(name=name, **json.loads(line)))
                self._news.notify_all()


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"there is no {command[0]} (iproute2)") from None
    if done.returncode or done.stderr:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


# ------------------------------------------------------------------------------------------------ one group


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

    rank = Told(
        name,
        0,
        1,
        lighthouse,
        HashStore(),
        steps=1,
        together=1 << 20,
        options={"dies_with_group": True},
        host=host,
        access=Access(insecure=True),
    )
    signal.signal(
        signal.SIGUSR1, lambda *_: threading.Thread(target=rank.manager.group.interrupt, args=["asked to"]).start()
    )
    rank.run()
    if rank.error:
        raise rank.error
    return 0


# ------------------------------------------------------------------------------------------------ by hand


def main(argv: Sequence[str]) -> int:
    if argv[:1] == ["member"]:
        return member(*argv[1:4])
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--when", choices=["forming", "mid-sum"], default="mid-sum")
    parser.add_argument("--store", choices=["a", "b", "c"], default="c", help="of the first generation after the cut")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--min_replicas", type=int, default=2)
    parser.add_argument("--one_way", action="store_true")
    parser.add_argument("--flap_s", type=float, default=0.0, help="the cut comes and goes, so long each")
    parser.add_argument("--lasts_s", type=float, default=60.0)
    given = parser.parse_args(argv)
    names = "abcdef"[: given.groups]
    router = Router(names)
    # Of three, a and c are the first quorum, all of them the second, and the third is the one that is meant.
    with TemporaryDirectory() as folder:
        job = Job(router, Path(folder), min_replicas=given.min_replicas, last_id=3 + names.find(given.store))
        try:
            _cut(job, given, names)
        except TimeoutError as error:
            print(error)
            return 1
        finally:
            job.close()
            router.close()
    return 0


def _cut(job: Job, given: argparse.Namespace, names: str) -> None:
    router = job.router
    others = names.replace("b", "")
    for name in others:
        job.start(name)
    if given.min_replicas <= len(others):
        job.until(others, 0.0)
    job.start("b")
    job.until(names, 0.0, steps=20)
    router.cut("a", "b", one_way=given.one_way)
    cut_s = time.monotonic()
    if given.when == "forming":
        job.kill("a", signal.SIGUSR1)
    whole = True
    while time.monotonic() < cut_s + given.lasts_s:
        time.sleep(given.flap_s or given.lasts_s)
        if given.flap_s:
            (router.mend if whole else router.cut)("a", "b")
            whole = not whole
    if whole:
        router.mend("a", "b")
    mended_s = time.monotonic()
    during = [x for x in job.commits if cut_s < x.at_s < mended_s]
    gaps = [cut_s, *(x.at_s for x in during), mended_s]
    quorums = {x.quorum_id: x.members for x in during}
    print(f"during {mended_s - cut_s:.1f} s: {len(during)} commits, quorums {quorums}")
    if during:
        longest_s = max(after - before for before, after in zip(gaps, gaps[1:], strict=False))
        print(f"first commit after {during[0].at_s - cut_s:.1f} s, longest gap {longest_s:.1f} s")
    back_s = job.until(names, mended_s)
    print(f"all together {back_s - mended_s:.1f} s after the repair, quorum {job.commits[-1].quorum_id}")
    print("\n".join(x for x in job.said().splitlines() if "quorum" in x)[-2500:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
