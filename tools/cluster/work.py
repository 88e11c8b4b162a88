"""What one rank does from the process group's start to its end, phase by phase. rank.py runs it in a thread and watches.

Everything that is found goes into `figures`, as JSON: the last words of a rank hold whatever it got done.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from parallelisms.device import DIFFERENCES, pick_device
from parallelisms.distributed import join
from tools.cluster import machine, verdicts
from tools.cluster.control import Control
from tools.cluster.links import measure, pairs, rounds
from tools.cluster.settings import Place, Settings
from tools.cluster.speeds import operations, seconds
from tools.cluster.values import CHECKS, Check, Team, Wrong
from tools.cluster.verdicts import Finding, Names

AGAIN = 3  # how often what looks slow is measured again before it is said: the best figure counts
MOST_PAIRED = 64  # ranks among which a wrong result is looked for two by two


class Work:
    """The phases, in order. `run` raises what stopped it."""

    def __init__(self, settings: Settings, place: Place, store: dist.Store, control: Control, hosts: list[str]) -> None:
        self.settings, self.place, self.control, self.names = settings, place, control, Names(hosts)
        self.figures: dict[str, Any] = {"values": {}, "wrong": [], "seconds": {}, "links": {}}
        self._store, self._started = store, time.monotonic()

    def run(self) -> None:
        self.join()
        phases = (self.clocks, self.values, self.speeds, self.links, self.compute, self.disk)
        for number, phase in enumerate(phases, 1):
            said = phase()
            if self.place.rank == 0:
                took = time.monotonic() - self._started
                print(f"[{took:5.1f} s] {number}/{len(phases)} {phase.__name__:8} {said}", file=sys.stderr, flush=True)
        self.control.meet("leave")
        dist.destroy_process_group()

    def join(self) -> None:
        """The process group: every rank connects to every other one."""
        self.control.meet("join the process group", self.settings.start_s)
        device = pick_device(self.place.local_rank, keep_memory=False)
        backend = device.backend if self.settings.backend == "auto" else self.settings.backend
        join(
            backend,
            dist.PrefixStore("group", self._store),
            global_rank=self.place.rank,
            world_size=self.place.world_size,
            timeout=timedelta(seconds=self.settings.op_s),
        )
        self.team = Team(tuple(range(self.place.world_size)), self.place.rank, device.torch_device)
        self.figures |= {"device": device.name, "backend": backend}

    def clocks(self) -> str:
        """Each rank in turn against rank 0's."""
        self.figures["clock"] = {"ahead_s": 0.0, "error_s": 0.0}
        for rank in range(1, self.place.world_size):
            self.control.meet(f"clocks: rank 0 with rank {rank}")
            if self.place.rank == 0:
                machine.tell_time(self.team, rank)
            elif self.place.rank == rank:
                self.figures["clock"] = machine.clock_offset(self.team, 0)
        return "compared"

    def values(self) -> str:
        """Each operation with checked numbers; where all see a wrong one, again two ranks at a time."""
        wrong: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for op, check in self.checks().items():
            self.control.meet(f"values: {op}")
            for found in self._checked(op, check):
                wrong[op].append((found.source, found.at, found.how))
        self.figures["wrong"] = [(op, *row) for op, rows in wrong.items() for row in rows]

        def unclear(said: list[dict[str, list[tuple[int, int, str]]]]) -> list[str]:
            return [op for op in CHECKS if verdicts.needs_pairs([row for rows in said for row in rows.get(op, ())])]

        ops = self.control.agree("values: all of them", wrong, unclear)
        if ops and 2 < self.place.world_size <= MOST_PAIRED:
            self.figures["pairs"] = self._pairs(ops)
        right = sum(text == "right" for text in self.figures["values"].values())
        return (
            f"{right} of {len(CHECKS)} operations right"
            if self.place.world_size > 1
            else "one rank has nobody to talk to"
        )

    def checks(self) -> dict[str, Check]:
        return CHECKS if self.place.world_size > 1 else {}

    def _checked(self, op: str, check: Check) -> list[Wrong]:
        try:
            found = list(check(self.team))
        except (RuntimeError, NotImplementedError) as error:
            if not _not_there(error):
                raise
            self.figures["values"][op] = f"not available: {_line(error)}"
            return []
        self.figures["values"][op] = "wrong" if found else "right"
        return found

    def _pairs(self, ops: list[str]) -> dict[str, list[tuple[int, int]]]:
        """By operation the pairs of neighbours between whom it is wrong, as far as this rank sees."""
        bad: dict[str, list[tuple[int, int]]] = {op: [] for op in ops}
        size = self.place.world_size
        for first in range(size):
            pair = tuple(sorted((first, (first + 1) % size)))
            self.control.meet(f"values: rank {pair[0]} with rank {pair[1]} alone")
            group = dist.new_group(list(pair), timeout=timedelta(seconds=self.settings.op_s))
            if self.place.rank in pair:
                team = Team(pair, self.place.rank, self.team.device, group)
                for op in ops:
                    if list(CHECKS[op](team)):
                        bad[op].append((pair[0], pair[1]))
        return bad

    def speeds(self) -> str:
        """Seconds per operation and size, all ranks together."""
        for size in self.settings.sizes if self.place.world_size > 1 else ():
            for op, run in operations(self.team, size).items():
                self.control.meet(f"speeds: {op}, {size} bytes")
                if not self.figures["values"].get(op, self.figures["values"].get(f"{op} SUM", "")).startswith("not"):
                    self.figures["seconds"].setdefault(op, {})[str(size)] = seconds(run, self.team.device)
        return f"{len(self.settings.sizes)} sizes"

    def links(self) -> str:
        """Every pair by itself; what looks slow is measured again."""

        def suspects(said: list[dict[str, dict[str, float]]]) -> list[tuple[int, int]]:
            links = {(rank, int(peer)): row for rank, rows in enumerate(said) for peer, row in rows.items()}
            slow = verdicts.slow_links(
                self.names, {link: row["bytes_s"] for link, row in links.items()}, **self._bounds()
            ) + verdicts.late_links(self.names, {link: row["latency_s"] for link, row in links.items()})
            named = {rank for finding in slow for rank in finding.ranks}
            return [pair for pair in chosen if slow and named & set(pair)]

        chosen = pairs(self.names.hosts)
        again = chosen
        for _ in range(1 + AGAIN):
            for number, together in enumerate(made := rounds(again, self.names.hosts), 1):
                self.control.meet(f"links: {_told(together)}, round {number} of {len(made)}")
                for pair in together:
                    if self.place.rank in pair:
                        peer = str(sum(pair) - self.place.rank)
                        self._best(peer, measure(self.team, pair))
            again = [(a, b) for a, b in self.control.agree("links: all of them", self.figures["links"], suspects)]
            if not again:
                break
        return f"{len(chosen)} pairs"

    def _best(self, peer: str, row: dict[str, float]) -> None:
        before = self.figures["links"].setdefault(peer, row)
        before["latency_s"] = min(before["latency_s"], row["latency_s"])
        before["bytes_s"] = max(before["bytes_s"], row["bytes_s"])

    def _bounds(self) -> dict[str, float]:
        return {"share": self.settings.slow, "least": self.settings.least_mb_s * 1e6}

    def compute(self) -> str:
        """Matrix products, all ranks at once."""
        looks: list[tuple[float, float]] = []

        def look() -> float:
            looks.append(machine.matmul_flops(self.team))
            return looks[-1][0]

        best = self._confirmed("compute", look, verdicts.slow_ranks)
        self.figures["matmul_flops"], share = max(looks)
        if not DIFFERENCES[self.team.device.type].queues_work:  # else the thread only waits
            self.figures["core_share"] = share
        return f"rank 0: {best / 1e9:.4g} GFLOP/s"

    def _confirmed(self, what: str, rate: Callable[[], float], judge: Callable[..., list[Finding]]) -> float:
        """The best of one measurement, or of several where some rank looks slow."""

        def is_slow(said: list[float]) -> bool:
            rates = dict(enumerate(said))
            return bool(judge(self.names, rates, what=what, unit="", share=self.settings.slow))

        best = 0.0
        for _ in range(1 + AGAIN):
            self.control.meet(f"{what}: start")
            best = max(best, rate())
            if not self.control.agree(f"{what}: end", best, is_slow):
                break
        return best

    def disk(self) -> str:
        """A checkpoint into the folder of runs, and back."""
        if self.place.rank == 0:
            self.settings.folder.mkdir(parents=True, exist_ok=True)
        nonce = self.control.agree("disk: start", os.getpid(), lambda said: f"{said[0]}-{time.time_ns()}")
        folder = self.settings.folder.absolute() / f".check_cluster-{nonce}"
        attempts: list[dict[str, Any]] = []

        def attempt() -> float:
            attempts.append(machine.try_folder(self.team, folder / str(len(attempts)), self.settings.disk_bytes))
            return self.settings.disk_bytes / attempts[-1]["write_s"]

        try:
            self._confirmed("disk", attempt, verdicts.slow_hosts)
        except CheckpointException as error:
            self.figures["disk"] = {"failures": {rank: _line(cause[0]) for rank, cause in error.failures.items()}}
            return "failed"
        finally:
            if self.place.rank == 0:
                machine.remove(folder)
        size = self.settings.disk_bytes
        self.figures["disk"] = {
            "write_bytes_s": size / min(row["write_s"] for row in attempts),
            "read_bytes_s": size / min(row["read_s"] for row in attempts),
            "wrong": next((row["wrong"] for row in attempts if row["wrong"]), ""),
        }
        return f"rank 0: {self.figures['disk']['write_bytes_s'] / 1e6:.4g} MB/s written"


def _not_there(error: Exception) -> bool:
    """Whether torch says that a backend has no such operation, rather than that it failed."""
    words = ("not support", "not implement", "unsupported", "no backend", "cannot use reduceop")
    return isinstance(error, NotImplementedError) or any(word in str(error).lower() for word in words)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"


def _told(together: list[tuple[int, int]]) -> str:
    return ", ".join(f"{a}-{b}" for a, b in together[:3]) + (", ..." if len(together) > 3 else "")
