"""One rank of a check: its work in a thread, watched from here, and its last words, whatever became of the work.

    open the store -> who is where -> work.py in a thread -> last words -> the lowest rank that spoke tells it all

Nothing here waits without a deadline: a rank that hangs in C code, or a store whose holder has stopped, ends this process too.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from parallelisms.device import has_cuda
from parallelisms.rendezvous import InitMethod, open_store
from scripts.launch import cores_here
from tools.cluster.conclude import conclusions
from tools.cluster.control import Control, GivenUp, Silent, last_words
from tools.cluster.report import tell
from tools.cluster.settings import Place, Settings, usual_share
from tools.cluster.verdicts import Finding, Names
from tools.cluster.work import Work

POLL_S = 0.05
HOST_NAME = "PHAROS_HOST"  # what this node is called in findings, where its own name says little (containers)


def run_rank(settings: Settings, place: Place) -> int:
    """The exit code of this rank: 0 all is well, 1 something was found."""
    host = os.environ.get(HOST_NAME) or socket.gethostname()
    try:
        store = _open(settings, place)
        control = Control(
            dist.PrefixStore("control", store), place.rank, place.world_size, timeout_s=settings.timeout_s
        )
        ending = dist.PrefixStore("control", store.clone())  # type: ignore[attr-defined]  # for this thread
    except (dist.DistError, RuntimeError) as error:
        where = (
            f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            if settings.init_method == "env://"
            else ""
        )
        print(
            f"check_cluster: rank {place.rank} on {host} does not reach the others: {settings.init_method}{where}: {error}",
            file=sys.stderr,
        )
        return 1
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="torch"
    )  # new names of collectives that torch 2.11 has not
    watched = _Watched(settings, place, store, control, host)
    watched.start()
    while watched.is_alive() and time.monotonic() < control.deadline + 1:
        watched.join(POLL_S)
    if watched.is_alive():
        watched.trouble = f"still in {control.step} after {settings.timeout_s:.0f} s"
    _end_anyway(settings, place, host, control.step)
    return _finish(watched.settings, place, ending, watched)


def _open(settings: Settings, place: Place) -> dist.Store:
    method = InitMethod.parse(settings.init_method)
    store = open_store(method, global_rank=place.rank, world_size=place.world_size, timeout_s=settings.start_s)
    store.set_timeout(timedelta(seconds=settings.timeout_s))
    return store


class _Watched(threading.Thread):
    """The work, and what came of it."""

    def __init__(self, settings: Settings, place: Place, store: dist.Store, control: Control, host: str) -> None:
        super().__init__(name="work", daemon=True)
        self.trouble, self.silent, self.gave_up, self.work = "", dict[int, str](), False, None
        self.hosts = [""] * place.world_size
        self.hosts[place.rank] = host
        self.control = control
        self.settings, self._place, self._store = settings, place, store

    work: Work | None

    def run(self) -> None:
        try:
            self.hosts = self._meet()
            self.work = Work(self.settings, self._place, self._store, self.control, self.hosts)
            self.work.run()
        except Silent as silent:
            self.silent = silent.seen
        except GivenUp:
            self.gave_up = True
        except Exception as error:  # noqa: BLE001 (whatever it is, it is this rank's finding, and the others wait to hear of it)
            text = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
            self.trouble = f"{self.control.step}: {type(error).__name__}: {text}"

    def _meet(self) -> list[str]:
        """Each rank's host, when all have come."""
        rank, cores = self._place.rank, cores_here()
        self._store.set(f"host/{rank}", json.dumps([self.hosts[rank], cores]))
        cores_of: dict[str, int] = {}
        try:
            self.control.meet("arrive", self.settings.start_s)
        finally:
            for other in range(self._place.world_size):
                if self._store.check([f"host/{other}"]):
                    self.hosts[other], cores = json.loads(self._store.get(f"host/{other}"))
                    cores_of[self.hosts[other]] = cores
        if not self.settings.slow:
            crowded = not has_cuda() and any(self.hosts.count(host) > cores for host, cores in cores_of.items())
            self.settings = replace(self.settings, slow=usual_share(crowded=crowded))
        return self.hosts

    @property
    def failed(self) -> bool:
        return bool(self.trouble or self.silent or self.gave_up)


def _finish(settings: Settings, place: Place, store: dist.Store, watched: _Watched) -> int:
    """Last words of all; the lowest rank that spoke tells what was found, and the others take its exit code."""
    figures: dict[str, Any] = (
        watched.work.figures if watched.work else {"values": {}, "wrong": [], "seconds": {}, "links": {}}
    )
    words = {
        "host": watched.hosts[place.rank],
        "pid": os.getpid(),
        "torch": torch.__version__,
        "step": watched.control.step,
        "trouble": watched.trouble,
        "silent": watched.silent,
        "figures": figures,
    }
    said = last_words(
        store,
        place.rank,
        place.world_size,
        words,
        failed=watched.failed,
        given_up_on=list(watched.silent),
        wait_s=settings.words_s,
    )
    if place.rank == min(said) and store.add("teller", 1) == 1:
        found = conclusions(settings, Names(watched.hosts), said, settings.timeout_s)
        code = _tell(settings, watched.hosts, said, found)
        store.set("verdict", str(code))
    else:
        try:
            store.wait(["verdict"], timedelta(seconds=settings.timeout_s))
            code = int(store.get("verdict"))
        except (dist.DistError, RuntimeError):
            code = 1
    _leave_last(store, place, len(said))
    return code


def _tell(settings: Settings, hosts: list[str], said: dict[int, dict[str, Any]], found: list[Finding]) -> int:
    try:
        tell(settings, hosts, said, found)
    except OSError as error:
        print(f"check_cluster: {settings.folder}: {error}", file=sys.stderr, flush=True)
        return 1
    return 1 if found else 0


def _leave_last(store: dist.Store, place: Place, speakers: int) -> None:
    """Rank 0 may hold the store, and goes when the others have read what they want."""
    end = time.monotonic() + 5
    store.add("left", 1)
    while place.rank == 0 and store.add("left", 0) < speakers and time.monotonic() < end:
        time.sleep(POLL_S)


def _end_anyway(settings: Settings, place: Place, host: str, step: str) -> None:
    """Should the store not answer any more (whoever holds it has stopped), this process says so and ends."""

    def end() -> None:
        print(
            f"check_cluster: rank {place.rank} on {host}: the store at {settings.init_method} does not answer; rank 0 or the "
            f"launcher holds it, and has stopped or is cut off; last step: {step}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(2 * settings.timeout_s + 10, end)
    timer.daemon = True
    timer.start()
