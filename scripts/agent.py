"""Runs the ranks of this node under torch's elastic agent: output, signals, and the cause of a failure. Leaves no process.

launch.py calls `run_ranks`; the agent starts lib/lifeline.py, which execs train.py. torchrun is not used: it turns a rank's exit code 2,
and a clean exit after SIGTERM, into 1 with a long traceback.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import IO, Any, cast

from torch.distributed import DistError, Store
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from scripts.launch_settings import (
    MAX_SHORT_RUNS,
    SHORT_RUN_S,
    LaunchSettings,
    forget_old,
    how_ended,
    restart_delay_s,
    say,
    stopped_early,
    under_lifeline,
)
from training.progress import Clock
from training.signals import LOG_JOIN_S, SAME_SIGNAL_S, Signals

POLL_S = 0.1
RENDEZVOUS_TIMEOUT_S = 900  # for the other nodes to join
EXIT_TIMEOUT_S = 60  # for the other nodes to end; one that failed does not come


def run_ranks(
    command: list[str],
    launch_settings: LaunchSettings,
    *,
    nproc: int,
    logs: Path,
    clock: Clock = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> int:
    """Runs `command` as `nproc` ranks of this node until all have exited; returns the exit code. Leaves no process. `pause`: waits for
    that many seconds, before a restart."""
    if "LOGLEVEL" not in os.environ:  # if set, the user wants the log of torch's agent
        agent_log = logging.getLogger("torch.distributed.elastic")
        agent_log.addHandler(logging.NullHandler())
        agent_log.propagate = False
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "none"  # torch's signal handlers would replace ours
    try:
        with (
            closing(Output(logs, launch_settings.log_ranks)) as output,
            closing(LocalRanks(launch_settings.grace_s)) as ranks,
        ):
            spec = _spec(command, launch_settings, nproc, logs)
            result = Agent(spec, output, ranks, clock, pause).run()
            if result.is_failed():
                spec.rdzv_handler.shutdown()  # other nodes stop waiting; after a good end the node of the store may be gone
    except (RendezvousError, DistError) as error:
        say(
            f"rendezvous of {launch_settings.nnodes} nodes at {launch_settings.endpoint or 'this node'} failed: {error.__cause__ or error}"
        )
        return 1
    except OSError as error:  # no space for a log, or no more processes
        say(f"the ranks were not started: {error}")
        return 1
    return report_failure(result, output, ranks) if result.is_failed() else 0


def report_failure(result: RunResult, output: Output, ranks: LocalRanks) -> int:
    """Prints which rank failed first, a rank with bad input before all others, and the last line of its log. Returns the exit code: 2 if it
    reported bad input, 128 + n if signal n stopped it before it could save, else 1."""

    def order(rank: int) -> tuple[bool, bool, float]:
        # Among the ranks that failed first, the one whose log ends first: the others failed because they lost it.
        return (result.failures[rank].exitcode != 2, rank not in ranks.first_failed, output.last_written(rank))

    rank = min(result.failures, key=order)
    code, last_line = result.failures[rank].exitcode, output.last_line(rank)
    if code == 2:
        if not output.shows(rank):
            with suppress(OSError):
                print(last_line, file=sys.stderr)
        return 2
    if ranks.stopping and code == -signal.SIGTERM:  # train.py had no handler yet
        say(stopped_early(ranks.stopping))
        return 128 + ranks.stopping
    how = how_ended(code)
    if code == -signal.SIGKILL and not ranks.killed:
        how += ", by hand or out of memory?"
    elif ranks.stopping:
        how += " while it was stopping; an earlier checkpoint, if there is one, is intact"
    say(f"rank {rank} failed ({how}): {last_line}; log: {output.path(rank)}")
    return 1


def wait_for_nodes(store: Store, count: int, timeout: timedelta) -> None:
    """Waits until `count` nodes have called it, since one of them has the store of the others. Raises DistError after `timeout`.

    torch's own exit barrier lets the last node wait, too: for an answer of a process that the node itself has just allowed to end.
    """
    if store.add("ended", 1) == count:
        # answered, unlike set(): the others know before this process, which may be the one with the store, ends
        store.add("all_ended", 1)
    else:
        store.wait(["all_ended"], timeout)


class Agent(LocalElasticAgent):
    """torch's agent, which also keeps the pids in LocalRanks up to date and limits restarts: MAX_RESTARTS per RESTARTS_WITHIN_S, after
    increasing delays if runs are short, none after MAX_SHORT_RUNS or bad input."""

    def __init__(
        self, spec: WorkerSpec, output: Output, ranks: LocalRanks, clock: Clock, pause: Callable[[float], object]
    ) -> None:
        super().__init__(spec, output, exit_barrier_timeout=EXIT_TIMEOUT_S)  # as in `_exit_barrier`; torch logs it
        self._ranks, self._clock, self._pause, self._restarted_at_s = ranks, clock, pause, list[float]()
        self._started_s, self._short_runs, self._delay_s = 0.0, 0, 0.0

    def _exit_barrier(self) -> None:
        with suppress(DistError):
            nodes = cast(int, self._worker_group.group_world_size)
            wait_for_nodes(cast(Store, self._store), nodes, timedelta(seconds=EXIT_TIMEOUT_S))

    def run(self, role: str = "default") -> RunResult:
        if (result := cast("RunResult | None", super().run(role))) is None:
            raise RendezvousClosedError("NNODES nodes had joined before this one, and have ended")
        return result

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ranks = self._ranks
        with ranks.change:  # a signal that arrives meanwhile is forwarded to all of them afterwards
            pids: dict[int, Any] = super()._start_workers(worker_group)
            ranks.pids = set(pids.values())
            ranks.groups, ranks.started = ranks.groups | ranks.pids, True
            ranks.first_failed = set()
        self._started_s = self._clock()
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # Record the ranks that failed first before torch stops the others.
        ranks, processes = self._ranks, cast(SubprocessContext, self._pcontext).subprocess_handlers
        ranks.first_failed = ranks.first_failed or {
            worker.global_rank for worker in worker_group.workers if processes[worker.local_rank].proc.poll()
        }
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            now_s = self._clock()
            self._short_runs = self._short_runs + 1 if now_s - self._started_s < SHORT_RUN_S else 0
            bad_input = any(failure.exitcode == 2 for failure in result.failures.values())
            if ranks.stopping or bad_input or self._short_runs == MAX_SHORT_RUNS:
                # with no restarts left, torch returns the result: no restart, no waiting for other nodes
                self._remaining_restarts = 0
                return result
            self._delay_s = restart_delay_s(self._short_runs) if self._short_runs else 0.0
            # Old restarts no longer count. max_restarts grows with the remaining restarts, because torch computes the unique number of a
            # restart (TORCHELASTIC_RESTART_COUNT) from their difference.
            past = forget_old(self._restarted_at_s, now_s)
            worker_group.spec.max_restarts += past
            self._remaining_restarts += past
            if self._remaining_restarts > 0:
                self._restarted_at_s.append(now_s)
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._ranks.stopping:
            return  # the ranks save and end; a node that joins does not interrupt them
        self._stop_workers(worker_group)  # now: ranks that wait for a failed one could hang
        self._ranks.end_if_stopping()
        self._pause(self._delay_s)
        self._delay_s = 0.0  # a restart that another node causes has no delay
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        super()._stop_workers(worker_group)
        with self._ranks.change:
            self._ranks.pids = set()
            self._ranks.end_groups()  # now, since the pids may be those of other processes when this job ends


class LocalRanks(Signals):
    """The processes of this node's ranks. Forwards the first stop signal to them as SIGTERM; kills them on a second one or after
    `grace_s`. Forwards SIGUSR1. Signals are handled in a thread (see Signals), so also while the agent waits in C code."""

    def __init__(self, grace_s: float, exit_now: Callable[[int], Any] = os._exit) -> None:
        self.stopping = 0  # number of the first stop signal
        self.killed = False
        self.change = threading.Lock()  # of `pids`
        self.pids = set[int]()  # of running ranks
        self.groups = set[int]()  # Unix process groups of the ranks, in which processes may outlive their rank
        self.started = False  # True once ranks were started
        self.first_failed: set[int] = set()  # global ranks
        self._grace_s = grace_s
        self._timers: list[threading.Timer] = []
        super().__init__(log=say, exit_now=exit_now)

    def handle(self, number: int) -> None:
        with self.change:
            if number == signal.SIGUSR1:
                self._send(signal.SIGUSR1)
            elif not self.pids:
                self._end_between_lives(number)
            elif not self.stopping:
                self.stopping, self._stopping_since = number, time.monotonic()
                self._send(signal.SIGTERM)
                self._after(self._grace_s, lambda: self._kill(f"not saved within {self._grace_s:g} s"))
            elif time.monotonic() - self._stopping_since >= SAME_SIGNAL_S:
                self._kill(f"{signal.Signals(number).name} again")

    def end_if_stopping(self) -> None:
        """Ends this process if a stop signal came while the ranks were ended for a restart."""
        with self.change:
            if self.stopping:
                self._end_between_lives(self.stopping)

    def _end_between_lives(self, number: int) -> None:
        when = "while the ranks were restarted" if self.started else "before any rank was started"
        self._fail(f"stopped by {signal.Signals(number).name} {when}", 128 + number)

    def close(self) -> None:
        """Kills what still runs, including children of ranks. May be called twice."""
        for timer in self._timers:
            timer.cancel()
            timer.join(2 * LOG_JOIN_S)  # one that kills the ranks may be about to say so
        self.end_groups()
        super().close()

    def _send(self, number: signal.Signals) -> None:
        # Only to the ranks, which end the data workers and compilers in their Unix process groups themselves
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _kill(self, why: str) -> None:
        self.killed = True
        self.end_groups()
        self._after(10.0, lambda: self._fail("the ranks were killed, but torch's agent did not return"))
        self._say(f"{why}: killing the ranks")

    def end_groups(self) -> None:
        """Kills the ranks' Unix process groups, with the children of ranks, and forgets them."""
        groups, self.groups = self.groups, set()
        for pid in groups:
            with suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
                os.killpg(pid, signal.SIGKILL)

    def _after(self, seconds: float, action: Any) -> None:
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _fail(self, why: str, code: int = 1) -> None:
        self._say(why)
        self._exit_now(code)  # the main thread may wait in C code for other nodes


class Output(LogsSpecs):
    """Each rank's output in <folder>/rank<N>.log, to which each restart appends; a thread copies that of `shown` ranks to the console."""

    def __init__(self, folder: Path, shown: frozenset[int] | None) -> None:
        super().__init__(str(folder))
        self._folder, self._shown = folder, shown
        self._tails: dict[int, IO[bytes]] = {}  # by global rank; the position is the end of what was copied
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="output", daemon=True)

    def path(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"

    def shows(self, rank: int) -> bool:
        return self._shown is None or rank in self._shown

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Passes each rank's log file to lifeline.py, which redirects the output, so torch does not. Called by torch at each start of the
        ranks."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for env in envs.values():
            rank = int(env["RANK"])
            env["PHAROS_RANK_LOG"] = str(self.path(rank))
            env["PYTHONUNBUFFERED"] = "1"
            if self.shows(rank) and rank not in self._tails:
                self._tails[rank] = self.path(rank).open("ab+")  # positioned at the end
        if not self._thread.is_alive():
            self._thread.start()
        console, none = dict.fromkeys(envs, ""), dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=console, stderrs=console, error_files=none)

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def last_written(self, rank: int) -> float:
        """Returns the time of the log's last write; infinity for a rank that wrote nothing."""
        path = self.path(rank)
        return path.stat().st_mtime if path.exists() and path.stat().st_size else float("inf")

    def last_line(self, rank: int) -> str:
        """Returns the last line that is not C++ logging, such as `[rank0]:[W1121 ...`, which torch writes at exit."""
        lines = list[str]()
        with suppress(OSError), self.path(rank).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16384))
            lines = file.read().decode("utf-8", "replace").split("\n")
        found = (line.strip() for line in reversed(lines) if not re.match(r"\s*$|(\[rank\d+\]:)?\[[WIE]\d{4}", line))
        return next(found, "no output")

    def close(self) -> None:
        """Copies the remaining output. May be called twice."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        for tail in self._tails.values():
            tail.close()

    def _follow(self) -> None:
        while not self._done.wait(POLL_S):
            self._copy(whole_lines=True)
        self._copy(whole_lines=False)

    def _copy(self, *, whole_lines: bool) -> None:
        for tail in list(self._tails.values()):
            # a file server has forgotten the log, the reader of a pipe (`| head`) has gone, or the disk is full: training continues
            with suppress(OSError):
                if os.fstat(tail.fileno()).st_size < tail.tell():  # it was cut, as by logrotate's copytruncate
                    tail.seek(0)
                new = tail.read()
                if whole_lines:
                    complete = new.rfind(b"\n") + 1
                    tail.seek(complete - len(new), os.SEEK_CUR)
                    new = new[:complete]
                sys.stdout.buffer.write(new)
                sys.stdout.buffer.flush()


def rendezvous_id(logs: Path) -> str:
    """Names a rendezvous after <run>/logs or <run>/groups/<id>: the same on every node, and another for other runs and groups of a host."""
    return "-".join(logs.parts[-3::2]) if logs.parent.name == "groups" else logs.parent.name


def _spec(command: list[str], launch_settings: LaunchSettings, nproc: int, logs: Path) -> WorkerSpec:
    """Returns the command of the ranks and the rendezvous: static if NODE_RANK is set, else c10d with node ranks in order of arrival."""
    settings: dict[str, Any] = {"timeout": RENDEZVOUS_TIMEOUT_S, "join_timeout": RENDEZVOUS_TIMEOUT_S}
    endpoint, backend, address = launch_settings.endpoint, "c10d", None
    if launch_settings.nnodes == 1:  # host names may not resolve: laptops, localhost in containers
        endpoint, address, settings["is_host"] = "127.0.0.1:0", "127.0.0.1", True
    elif launch_settings.node_rank is not None:
        backend, settings["rank"] = "static", launch_settings.node_rank
    parameters = RendezvousParameters(
        backend, endpoint, rendezvous_id(logs), launch_settings.nnodes, launch_settings.nnodes, address, **settings
    )
    host, _, port = endpoint.rpartition(":")
    program, *arguments = under_lifeline(command, signal.SIGKILL)
    return WorkerSpec(
        role="train",
        local_world_size=nproc,
        rdzv_handler=get_rendezvous_handler(parameters),
        entrypoint=program,
        args=tuple(word.replace("$", "$$") for word in arguments),  # torch replaces $local_rank
        max_restarts=launch_settings.max_restarts,
        monitor_interval=POLL_S,
        master_addr=host if backend == "static" else None,
        master_port=int(port) if backend == "static" else None,
        local_addr=address,
    )
