"""Runs one rank of a check in a thread that the main thread watches, and reports even if the thread fails or hangs.

Ranks synchronize at each step through the store, never through the network under test, so that a missing rank is known by name. Every wait
has a deadline: a rank that hangs in C code, or a store whose process has stopped, ends this process too.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from parallelisms.device import DEVICE_TRAITS, pick_device
from parallelisms.distributed import init_default_group, launch_store, open_store
from scripts.launch import cores_here
from tools.cluster import measurements, verdicts
from tools.cluster.measurements import CHECKS, Communicator, operations, seconds, wrong
from tools.cluster.report import publish
from tools.cluster.settings import CROWDED_SHARE, USUAL_SHARE, CheckSettings, RankPlace
from tools.cluster.verdicts import Finding, Names, conclusions

T = TypeVar("T")
POLL_S = 0.05
CHECK_S = 0.5  # how often a waiting rank checks whether another has given up
HOST_NAME = "PHAROS_HOST"  # this node's name in findings; default: the host name
RETRIES = 3  # further measurements of a slow result before it is reported; the best value counts
MAX_PAIRED = 64  # maximum number of ranks for which a wrong operation is repeated between pairs


class RanksMissing(RuntimeError):
    """Ranks did not reach a step in time. Argument: rank -> the last step that it reached."""


class PeerFailed(RuntimeError):
    """Another rank has failed, and reports its failure itself."""


class Control:
    """Barriers and decisions of the ranks, through the store. `step` and `deadline` (monotonic clock) are read by the watching thread."""

    def __init__(self, store: dist.Store, place: RankPlace, *, timeout_s: float) -> None:
        self.step, self.deadline = "start", time.monotonic() + timeout_s
        self._store, self._rank, self._size, self._timeout_s = store, place.rank, place.world_size, timeout_s
        self._count = 0

    def meet(self, step: str, timeout_s: float = 0.0) -> None:
        """Waits until all ranks have reached `step`. Raises RanksMissing, PeerFailed."""
        self._count += 1
        self.step = step
        wait_s = timeout_s or self._timeout_s
        self.deadline = time.monotonic() + wait_s + self._timeout_s  # for the barrier, and for the work after it
        self._store.set(f"at/{self._rank}", f"{self._count} {step}")
        if self._store.add(f"came/{self._count}", 1) == self._size:
            self._store.set(f"go/{self._count}", "")
        if not self._wait(f"go/{self._count}", wait_s):
            seen = {}
            for rank in range(self._size):
                at = self._store.get(f"at/{rank}").decode() if self._store.check([f"at/{rank}"]) else "0 nothing yet"
                count, _, last = at.partition(" ")
                if int(count) < self._count:
                    seen[rank] = last
            raise RanksMissing(seen)
        self.deadline = time.monotonic() + self._timeout_s

    def agree(self, step: str, mine: Any, decide: Callable[[list[Any]], T]) -> T:
        """Gathers each rank's value (JSON) and returns rank 0's decision on them (JSON). Raises RanksMissing, PeerFailed."""
        self._store.set(f"value/{self._count + 1}/{self._rank}", json.dumps(mine))
        self.meet(step)
        key = f"decision/{self._count}"
        if self._rank == 0:
            values = [json.loads(self._store.get(f"value/{self._count}/{rank}")) for rank in range(self._size)]
            self._store.set(key, json.dumps(decide(values)))
        elif not self._wait(key, self._timeout_s):
            raise RanksMissing({0: step})
        decision: T = json.loads(self._store.get(key))
        return decision

    def _wait(self, key: str, timeout_s: float) -> bool:
        """Waits for `key`; False: it was not set in time. Raises PeerFailed."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            # a timeout, or a store that is gone: the deadline ends the wait
            with suppress(dist.DistError, RuntimeError):
                self._store.wait([key], timedelta(seconds=min(CHECK_S, left)))
                return True
            if self._store.check(["given up"]):
                raise PeerFailed("another rank failed")
        return False


def run_rank(settings: CheckSettings, place: RankPlace) -> int:
    """Runs the check as one rank. Returns the exit code: 0 no findings, 1 findings."""
    host = os.environ.get(HOST_NAME) or socket.gethostname()
    method = settings.init_method

    def print_error(text: str) -> None:
        print(f"check_cluster: rank {place.rank} on {host}{text}", file=sys.stderr, flush=True)

    try:
        store = open_store(method, global_rank=place.rank, world_size=place.world_size, timeout_s=settings.start_s)
        store = launch_store(store, global_rank=place.rank, world_size=place.world_size, timeout_s=settings.start_s)
        store.set_timeout(timedelta(seconds=settings.timeout_s))
        control = Control(dist.PrefixStore("control", store), place, timeout_s=settings.timeout_s)
        ending = dist.PrefixStore("control", store.clone())  # type: ignore[attr-defined]  # a connection for this thread
    except (dist.DistError, RuntimeError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}" if method == "env://" else ""
        print_error(f" does not reach the other ranks at {method}{where}: {error}")
        return 1
    # deprecation of names that torch 2.11 still needs
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    thread = CheckThread(settings, place, store, control, host)
    thread.start()
    while thread.is_alive() and time.monotonic() < control.deadline + 1:
        thread.join(POLL_S)
    if thread.is_alive():
        thread.trouble = f"still in {control.step} after {settings.timeout_s:.0f} s"

    def exit_without_store() -> None:
        cause = "its process, rank 0 or the launcher, has stopped or is unreachable"
        print_error(f": the store at {method} does not answer; {cause}; last step: {control.step}")
        os._exit(1)

    timer = threading.Timer(2 * settings.timeout_s + 10, exit_without_store)
    timer.daemon = True
    timer.start()
    return finish(thread, ending)


class CheckThread(threading.Thread):
    """Connects to the other ranks and runs the phases one by one. Adds results to `figures` (JSON) at once, as a later phase may fail."""

    def __init__(
        self, settings: CheckSettings, place: RankPlace, store: dist.Store, control: Control, host: str
    ) -> None:
        super().__init__(name="work", daemon=True)
        self.settings, self.place, self.control = settings, place, control
        self.hosts = [""] * place.world_size
        self.hosts[place.rank] = host
        self.trouble, self.silent = "", dict[int, str]()
        self.figures: dict[str, Any] = {"values": {}, "wrong": [], "seconds": {}, "links": {}}
        self._connection = store

    def run(self) -> None:
        try:
            self.meet()
            self.names, began = Names(self.hosts), time.monotonic()
            self.join_group()
            phases = (self.clocks, self.values, self.speeds, self.links, self.compute, self.disk)
            for number, phase in enumerate(phases, 1):
                summary = phase()
                if self.place.rank == 0:
                    head = f"[{time.monotonic() - began:5.1f} s] {number}/{len(phases)} {phase.__name__:8}"
                    print(f"{head} {summary}", file=sys.stderr, flush=True)
            self.control.meet("leave")
            dist.destroy_process_group()
        except RanksMissing as missing:
            [self.silent] = missing.args
        except PeerFailed:
            pass
        except Exception as error:  # noqa: BLE001 (any error is this rank's finding; the others wait for its report)
            self.trouble = f"{self.control.step}: {_line(error)}"

    def meet(self) -> None:
        """Waits for all ranks and reads their hosts; if some do not come, the hosts of the others."""
        rank, cores = self.place.rank, cores_here()
        self._connection.set(f"host/{rank}", json.dumps([self.hosts[rank], cores]))
        cores_of: dict[str, int] = {}
        try:
            self.control.meet("arrive", self.settings.start_s)
        finally:
            for other in range(self.place.world_size):
                if self._connection.check([f"host/{other}"]):
                    self.hosts[other], cores = json.loads(self._connection.get(f"host/{other}"))
                    cores_of[self.hosts[other]] = cores
        if not self.settings.slow:
            has_cuda = torch.cuda.is_available()
            crowded = not has_cuda and any(self.hosts.count(host) > cores for host, cores in cores_of.items())
            self.settings.slow = CROWDED_SHARE if crowded else USUAL_SHARE

    def join_group(self) -> None:
        """Initializes the process group, which connects every rank to every other."""
        self.control.meet("join the process group", self.settings.start_s)
        device = pick_device(self.place.local_rank, keep_memory=False)
        backend = device.traits.backend if self.settings.backend == "auto" else self.settings.backend
        store, rank, size = dist.PrefixStore("group", self._connection), self.place.rank, self.place.world_size
        init_default_group(
            backend, store, global_rank=rank, world_size=size, timeout=timedelta(seconds=self.settings.op_s)
        )
        self.comm = Communicator(tuple(range(size)), rank, device.torch_device)
        self.figures |= {"device": device.name, "backend": backend}

    def clocks(self) -> str:
        """Compares each rank's clock with that of rank 0, one at a time."""
        self.figures["clock"] = {"ahead_s": 0.0, "error_s": 0.0}
        for rank in range(1, self.place.world_size):
            self.control.meet(f"clocks: rank 0 with rank {rank}")
            if self.place.rank == 0:
                measurements.answer_clock(self.comm, rank)
            elif self.place.rank == rank:
                self.figures["clock"] = measurements.clock_offset(self.comm, 0)
        return "compared"

    def values(self) -> str:
        """Checks the results of each operation; repeats between pairs of ranks those whose results leave the cause open."""
        size, values, bad = self.place.world_size, self.figures["values"], self.figures["wrong"]
        for op, check in CHECKS.items() if size > 1 else ():
            self.control.meet(f"values: {op}")
            try:
                found = wrong(check, self.comm)
            except RuntimeError as error:
                # words of an error for an operation that the backend does not support
                words = ("not support", "not implement", "unsupported", "no backend", "cannot use reduceop")
                if not isinstance(error, NotImplementedError) and not any(word in str(error).lower() for word in words):
                    raise
                values[op] = f"not available: {_line(error)}"
                continue
            values[op] = "wrong" if found else "right"
            bad += [(op, source, self.place.rank, how) for source, how in found]

        def cause_unknown(seen: list[list[tuple[str, int, int, str]]]) -> list[str]:
            rows = [row for own in seen for row in own]
            return [op for op in CHECKS if verdicts.needs_pairs([row[1:] for row in rows if row[0] == op])]

        ops = self.control.agree("values: all of them", bad, cause_unknown)
        if ops and 2 < size <= MAX_PAIRED:
            self.check_pairs(ops)
        right = sum(text == "right" for text in values.values())
        return f"{right} of {len(CHECKS)} operations right" if size > 1 else "skipped: one rank"

    def check_pairs(self, ops: list[str]) -> None:
        """Repeats operations between pairs of neighbours; records the pairs in which this rank receives a wrong result."""
        bad = self.figures["pairs"] = {op: list[tuple[int, int]]() for op in ops}
        rank, size = self.place.rank, self.place.world_size
        for pair in (sorted((first, (first + 1) % size)) for first in range(size)):
            self.control.meet(f"values: rank {pair[0]} and rank {pair[1]} only")
            group = dist.new_group(pair, timeout=timedelta(seconds=self.settings.op_s))
            for op in ops if rank in pair else ():
                if wrong(CHECKS[op], Communicator(tuple(pair), rank, self.comm.device, group)):
                    bad[op].append((pair[0], pair[1]))

    def speeds(self) -> str:
        """Times each operation and size, with all ranks."""
        values = self.figures["values"]
        for size in self.settings.sizes if self.place.world_size > 1 else ():
            for op, run in operations(self.comm, size).items():
                self.control.meet(f"speeds: {op}, {size} bytes")
                if not values.get(op, values.get(f"{op} SUM", "")).startswith("not"):
                    self.figures["seconds"].setdefault(op, {})[str(size)] = seconds(run, self.comm.device)
        return f"{len(self.settings.sizes)} sizes"

    def links(self) -> str:
        """Measures each pair of ranks by itself; repeats slow ones."""

        def suspects(all_links: list[dict[str, dict[str, float]]]) -> list[tuple[int, int]]:
            rows = {(rank, int(peer)): row for rank, links in enumerate(all_links) for peer, row in links.items()}
            share, least = self.settings.slow, self.settings.least_mb_s * 1e6
            found = verdicts.bad_links(self.names, rows, share=share, least=least)
            named = {rank for finding in found for rank in finding.ranks}
            return [pair for pair in chosen if named & set(pair)]

        again = chosen = measurements.pairs(self.hosts)
        for _ in range(1 + RETRIES):
            for number, together in enumerate(made := measurements.disjoint_rounds(again, self.hosts), 1):
                label = ", ".join(f"{a}-{b}" for a, b in together[:3]) + (", ..." if len(together) > 3 else "")
                self.control.meet(f"links: {label}, round {number} of {len(made)}")
                for pair in together:
                    if self.place.rank in pair:
                        row = measurements.measure(self.comm, pair)
                        best = self.figures["links"].setdefault(str(sum(pair) - self.place.rank), row)
                        best["latency_s"] = min(best["latency_s"], row["latency_s"])
                        best["bytes_s"] = max(best["bytes_s"], row["bytes_s"])
            again = self.control.agree("links: all of them", self.figures["links"], suspects)
            if not again:
                break
        return f"{len(chosen)} pairs"

    def compute(self) -> str:
        """Times matmuls on all ranks at the same time."""
        made = self._repeated(
            "compute", lambda: measurements.matmul_flops(self.comm), lambda it: it[0], verdicts.slow_ranks
        )
        self.figures["matmul_flops"], share = max(made)
        if not DEVICE_TRAITS[self.comm.device.type].queues_work:  # on a GPU the thread only waits
            self.figures["core_share"] = share
        return f"rank 0: {self.figures['matmul_flops'] / 1e9:.4g} GFLOP/s"

    def disk(self) -> str:
        """Writes a checkpoint into the folder of runs and reads it."""
        size, numbers = int(self.settings.disk_mib * (1 << 20)), itertools.count()
        if self.place.rank == 0:
            self.settings.folder.mkdir(parents=True, exist_ok=True)
        nonce = self.control.agree("disk: start", os.getpid(), lambda pids: f"{pids[0]}-{time.time_ns()}")
        folder = self.settings.folder.absolute() / f".check_cluster-{nonce}"

        def attempt() -> dict[str, Any]:
            return measurements.measure_folder(self.comm, folder / str(next(numbers)), size)

        try:
            made = self._repeated("disk", attempt, lambda it: size / it["write_s"], verdicts.slow_hosts)
        except CheckpointException as error:
            self.figures["disk"] = {"failures": {rank: _line(cause[0]) for rank, cause in error.failures.items()}}
            return "failed"
        finally:
            if self.place.rank == 0:
                shutil.rmtree(folder, ignore_errors=True)  # fails only where writing failed, which is reported
        rates = {f"{op}_bytes_s": size / min(it[f"{op}_s"] for it in made) for op in ("write", "read")}
        self.figures["disk"] = {**rates, "wrong": next((it["wrong"] for it in made if it["wrong"]), "")}
        return f"rank 0: {rates['write_bytes_s'] / 1e6:.4g} MB/s written"

    def _repeated(
        self, what: str, measure: Callable[[], T], rate: Callable[[T], float], judge: Callable[..., list[Finding]]
    ) -> list[T]:
        """Measures once, and up to RETRIES times again while some rank is slow by its best rate. Returns all measurements."""

        def is_slow(rates: list[float]) -> bool:
            return bool(judge(self.names, dict(enumerate(rates)), what=what, unit="", share=self.settings.slow))

        made: list[T] = []
        for _ in range(1 + RETRIES):
            self.control.meet(f"{what}: start")
            made.append(measure())
            if not self.control.agree(f"{what}: end", max(map(rate, made)), is_slow):
                break
        return made


def finish(thread: CheckThread, store: dist.Store) -> int:
    """Exchanges the reports. The lowest rank with a report prints the findings; the others return its exit code."""
    settings, rank, size = thread.settings, thread.place.rank, thread.place.world_size
    report = {
        "host": thread.hosts[rank],
        "pid": os.getpid(),
        "torch": torch.__version__,
        "step": thread.control.step,
        "trouble": thread.trouble,
        "silent": thread.silent,
        "figures": thread.figures,
    }
    store.set(f"end/{rank}", json.dumps(report))
    if thread.trouble or thread.silent:
        store.set("given up", "")
    with suppress(dist.DistError, RuntimeError):  # a rank that is missing has no report below
        awaited = [f"end/{other}" for other in range(size) if other not in thread.silent]
        store.wait(awaited, timedelta(seconds=0.5 * settings.timeout_s))
    reports = {other: json.loads(store.get(f"end/{other}")) for other in range(size) if store.check([f"end/{other}"])}
    code = 1
    if rank == min(reports) and store.add("reporter", 1) == 1:
        found = conclusions(settings, Names(thread.hosts), reports, settings.timeout_s)
        try:
            publish(settings, thread.hosts, reports, found)
            code = 1 if found else 0
        except OSError as error:
            print(f"check_cluster: {settings.folder}: {error}", file=sys.stderr, flush=True)
        store.set("verdict", str(code))
    else:
        with suppress(dist.DistError, RuntimeError):
            store.wait(["verdict"], timedelta(seconds=settings.timeout_s))
            code = int(store.get("verdict"))
    # Rank 0 may host the store, so it exits after the others have read from it
    end = time.monotonic() + 5
    store.add("left", 1)
    while rank == 0 and store.add("left", 0) < len(reports) and time.monotonic() < end:
        time.sleep(POLL_S)
    return code


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
