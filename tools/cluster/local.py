"""Ranks on this machine: forked from this process, which has imported torch once for all of them, and outlived by nobody.

A process that imports torch has 150 MB of its own; one that is forked from it shares them. check_cluster.py calls `run_local`
where no launcher has started it.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch.distributed as dist

from scripts.lib.lifeline import follow
from tools.cluster.settings import Place, Settings

POLL_S = 0.05
SETTLE_S = 10.0  # what the others may take after the last word was due


@dataclass(frozen=True)
class Node:
    """This machine's share of the ranks."""

    nproc: int
    nnodes: int = 1
    number: int = 0
    host: str = "127.0.0.1"  # where node 0's ranks are met
    port: int = 0  # 0: any that is free


def run_local(settings: Settings, node: Node, run: Callable[[Settings, Place], int]) -> int:
    """Runs this node's ranks; returns the exit code of the check. Leaves no process. Raises ValueError: the port cannot be had."""
    listener = _listen(node) if node.number == 0 and settings.init_method == "env://" else None
    port = listener.getsockname()[1] if listener else node.port
    parent = os.getpid()
    gc.collect()
    gc.freeze()  # so that collections in the ranks leave the shared pages alone
    ranks = Ranks()
    for local in range(node.nproc):
        place = Place(node.number * node.nproc + local, node.nnodes * node.nproc, local)
        pid = os.fork()
        if pid == 0:
            _become(settings, node, place, port, parent, listener, run)
        ranks.pids[pid] = place.rank
    store = None
    try:
        if listener:  # only now: its server is a thread, which a fork would not copy
            fd = listener.detach()
            store = dist.TCPStore(node.host, port, None, True, wait_for_workers=False, master_listen_fd=fd)
        return ranks.wait(settings.timeout_s + SETTLE_S)
    finally:
        ranks.kill()
        del store


def _listen(node: Node) -> socket.socket:
    try:
        return socket.create_server(("127.0.0.1" if node.nnodes == 1 else "", node.port), backlog=1024)
    except OSError as error:
        raise ValueError(f"RDZV_ENDPOINT={node.host}:{node.port}: {error.strerror}") from None


def _become(
    settings: Settings,
    node: Node,
    place: Place,
    port: int,
    parent: int,
    listener: socket.socket | None,
    run: Callable[[Settings, Place], int],
) -> None:
    """The rest of a forked process' life."""
    code = 1
    try:
        follow(parent)
        if listener:
            listener.close()
        names = {
            "RANK": place.rank,
            "WORLD_SIZE": place.world_size,
            "LOCAL_RANK": place.local_rank,
            "MASTER_PORT": port,
        }
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update({"MASTER_ADDR": node.host, "TORCHELASTIC_USE_AGENT_STORE": "True"})
        code = run(settings, place)
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 (a fork must not run what is behind its parent's main)
        traceback.print_exc()
    finally:
        with suppress(BrokenPipeError):
            sys.stdout.flush()
        os._exit(code)


@dataclass
class Ranks:
    """The processes that were forked."""

    pids: dict[int, int] = field(default_factory=dict)  # rank by pid, of those that live
    stopped: set[int] = field(default_factory=set)  # ranks

    def wait(self, settle_s: float) -> int:
        """Until all have ended; those that hang on after the first for longer than `settle_s`, or are stopped when all others
        are gone, are ended and named. Returns 0 if every rank did."""
        code, end = 0, float("inf")
        while self.pids:
            for pid, rank in list(self.pids.items()):
                done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if not done:
                    continue
                if os.WIFSTOPPED(status):
                    self.stopped.add(rank)
                elif os.WIFCONTINUED(status):
                    self.stopped.discard(rank)
                else:
                    del self.pids[pid]
                    code = max(code, self._ended(rank, os.waitstatus_to_exitcode(status)))
                    end = min(end, time.monotonic() + settle_s)
            if self.pids and (time.monotonic() > end or set(self.pids.values()) <= self.stopped):
                for pid, rank in self.pids.items():
                    how = "is stopped (SIGSTOP)" if rank in self.stopped else "hangs"
                    say(f"rank {rank} (process {pid}) {how}, and was ended")
                self.kill()
                return 1
            time.sleep(POLL_S)
        return code

    def _ended(self, rank: int, code: int) -> int:
        if code < 0:
            say(f"rank {rank} was ended by {signal.Signals(-code).name}")
            return 1
        return code

    def kill(self) -> None:
        """May be called twice."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self.pids:
            os.waitpid(self.pids.popitem()[0], 0)


def say(text: str) -> None:
    print(f"check_cluster: {text}", file=sys.stderr, flush=True)
