"""Checks a cluster before an expensive run: every collective, link and rank, the clocks, and the folder of runs.

    NPROC=4 python scripts/check_cluster.py                                  ranks on this machine
    torchrun --nnodes 2 ... scripts/check_cluster.py                         the ranks of a launcher; srun and mpirun, too
    NNODES=2 NODE_RANK=0 RDZV_ENDPOINT=host:port NPROC=8 python scripts/check_cluster.py     the same without a launcher

Flow: this file (forks the ranks unless a launcher started them) -> tools/cluster/rank.py (one rank, phase by phase) ->
cluster/measurements.py -> cluster/verdicts.py (finds faulty and slow ranks) -> cluster/report.py.
Exit code: 0 no findings; 1 findings, each with rank and host; 2 bad input; 130 interrupted.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(folder for folder in sys.path if folder != str(ROOT / "scripts"))]

from ft.children import die_with  # noqa: E402 (our packages first)
from scripts.launch import ranks_here, set_defaults  # noqa: E402
from scripts.launch_settings import LaunchSettings, how_ended  # noqa: E402
from tools.cluster.settings import CheckSettings, RankPlace  # noqa: E402

POLL_S = 0.05
SETTLE_S = 10.0  # beyond --timeout, for the other ranks to end after the first


def main(argv: Sequence[str]) -> int:
    try:
        settings, place = CheckSettings.parse(argv), RankPlace.read(os.environ)
        launch_settings = LaunchSettings.read(os.environ)
        if place is None and launch_settings.nnodes > 1 and launch_settings.node_rank is None:
            legal = f"from 0 to {launch_settings.nnodes - 1}"
            raise ValueError(f"NNODES={launch_settings.nnodes}: each node must be given its NODE_RANK, {legal}")
        quiet_torch()
        set_defaults(os.environ, nproc=launch_settings.nproc or 1)
        from parallelisms.distributed import CommConfig

        CommConfig(
            backend=settings.backend,  # type: ignore[arg-type]  # one of argparse's choices
            init_method=settings.init_method,
            init_timeout_seconds=max(1, int(settings.start_s)),
            train_timeout_seconds=1,
        ).check()
        if place is not None:
            from tools.cluster.rank import run_rank

            exit_now(run_rank(settings, place))
        return start_ranks(settings, launch_settings)
    except ValueError as error:
        say(re.sub(r"^comm\.", "--", str(error)))  # the flags have the names of the keys in [comm]
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


def quiet_torch() -> None:
    """Avoids CUDA initialization and library threads, which do not survive a fork. Called before torch is imported."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # failures are reported once, by rank


def exit_now(code: int) -> NoReturn:
    """Exits without waiting for a thread that may hang in a collective."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def start_ranks(settings: CheckSettings, launch_settings: LaunchSettings) -> int:
    """Runs this node's ranks as forks of this process: saves 150 MB per rank. Returns the exit code. Raises ValueError if the port cannot
    be used."""
    import torch.distributed as dist

    import tools.cluster.rank  # noqa: F401 (imported before the forks)

    nproc, first_node = ranks_here(launch_settings), not launch_settings.node_rank
    host, port = "127.0.0.1", 0  # of the store, on node 0; 0: any free port
    if launch_settings.nnodes > 1:
        host, _, text = launch_settings.endpoint.rpartition(":")
        port = int(text)
    listener = None
    if first_node and settings.init_method == "env://":
        try:
            at: dict[str, Any] = {"address": (host if launch_settings.nnodes == 1 else "", port)}
            if launch_settings.nnodes > 1 and socket.has_dualstack_ipv6():  # nodes may reach it over either protocol
                at |= {"family": socket.AF_INET6, "dualstack_ipv6": True}
            listener = socket.create_server(**at, backlog=1024)
        except OSError as error:
            raise ValueError(f"RDZV_ENDPOINT={host}:{port}: {error.strerror}") from None
        port = listener.getsockname()[1]
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    parent = os.getpid()
    gc.collect()
    gc.freeze()  # so that garbage collection in the ranks does not copy the shared pages
    ranks, store = ForkedRanks(), None
    try:
        for local in range(nproc):
            place = RankPlace((launch_settings.node_rank or 0) * nproc + local, launch_settings.nnodes * nproc, local)
            pid = os.fork()
            if pid == 0:
                run_forked(settings, place, parent, listener)
            ranks.pids[pid] = place.rank
        if listener:  # after the forks: its server is a thread, which a fork does not copy
            arrives, descriptor = timedelta(seconds=settings.start_s), listener.detach()
            with suppress(dist.DistError):  # not reached at this host: the ranks report the same
                store = dist.TCPStore(
                    host, port, None, True, arrives, wait_for_workers=False, master_listen_fd=descriptor
                )
        return ranks.wait(settings.timeout_s + SETTLE_S)
    finally:
        ranks.kill()
        del store


def run_forked(settings: CheckSettings, place: RankPlace, parent: int, listener: socket.socket | None) -> NoReturn:
    """Runs a rank in the forked process, and exits."""
    code = 1
    try:
        die_with(parent)
        if listener:
            listener.close()
        os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.world_size), LOCAL_RANK=str(place.local_rank))
        from tools.cluster.rank import run_rank

        code = run_rank(settings, place)
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 (a fork must not return into its parent's code)
        traceback.print_exc()
    finally:
        exit_now(code)


@dataclass
class ForkedRanks:
    pids: dict[int, int] = field(default_factory=dict)  # pid -> rank, of running processes
    stopped: set[int] = field(default_factory=set)  # ranks that got SIGSTOP

    def wait(self, settle_s: float) -> int:
        """Waits for all ranks and returns the largest exit code. `settle_s` after the first has ended, or once all that run are stopped
        (SIGSTOP), kills these and returns 1."""
        code, end = 0, float("inf")
        while self.pids:
            for pid, rank in list(self.pids.items()):
                done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
                if done and os.WIFSTOPPED(status):
                    self.stopped.add(rank)
                elif done and os.WIFCONTINUED(status):
                    self.stopped.discard(rank)
                elif done:
                    del self.pids[pid]
                    end = min(end, time.monotonic() + settle_s)
                    if (its_code := os.waitstatus_to_exitcode(status)) < 0:
                        say(f"rank {rank} was {how_ended(its_code)}")
                    code = max(code, its_code if its_code >= 0 else 1)
            if self.pids and (time.monotonic() > end or set(self.pids.values()) <= self.stopped):
                for pid, rank in self.pids.items():
                    how = "is stopped (SIGSTOP)" if rank in self.stopped else "hangs"
                    say(f"rank {rank} (pid {pid}) {how} and was killed")
                self.kill()
                return 1
            time.sleep(POLL_S)
        return code

    def kill(self) -> None:
        """Kills the ranks that run. May be called twice."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while self.pids:
            os.waitpid(self.pids.popitem()[0], 0)


def say(text: str) -> None:
    print(f"check_cluster: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
