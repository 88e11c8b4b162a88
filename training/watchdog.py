"""Detection of hangs: one log line names the phase of each rank, then the process ends.

A thread on every rank watches the phases of progress.py; ranks communicate through the process group's store, since in a hang no collective
completes. A rank whose data loader hangs is in no collective, so no collective's timeout would end it."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from training.log import Log
from training.progress import LONG_PHASES, PHASES, Clock, Progress, as_ranges

POLL_S = 1.0
ANSWER_S = 5.0  # for the phases of the other ranks
GRACE_S = 20.0  # from the report to the end of the process


def dump_stacks(after_s: float) -> None:
    """Writes every thread's stack to standard error after `after_s` and exits with code 1: in C, so also while Python waits for the GIL.
    Does not wait for room in a pipe that nobody reads: the full pipe may be the cause of the hang, and would block the exit, too."""
    descriptor = sys.stderr.fileno()
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        # opened again, since O_NONBLOCK would hold for all processes that share the open file
        with contextlib.suppress(OSError):
            descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    faulthandler.dump_traceback_later(after_s, exit=True, file=descriptor)


class Watchdog:
    """Reports the phase of each rank after `timeout_s` without a finished step, and then ends the process.

    The first step of a launch, and every phase of progress.LONG_PHASES, may take `long_timeout_s`.

    1. A rank that suspects a hang publishes its phase.
    2. Rank 0 (another rank if 0 is dead) waits up to ANSWER_S for the others and prints one line.
    3. GRACE_S later every rank dumps its stacks and exits.

    A step that finishes in between cancels this, and so does a confirmation by the replica group's server that the group waits for others
    (`last_waiting_for_others_at_s`: its time, on `clock`). `store`: a separate connection (`store.clone()`), since the loop may block in
    a shared one. `record`: saves the flight recorder, once per hang."""

    def __init__(
        self,
        progress: Progress,
        store: dist.Store,
        *,
        global_rank: int,
        world_size: int,
        timeout_s: float,
        long_timeout_s: float,
        log: Log,
        clock: Clock = time.monotonic,
        arm: Callable[[float], None] = dump_stacks,
        disarm: Callable[[], None] = faulthandler.cancel_dump_traceback_later,
        record: Callable[[], object] = lambda: None,
        last_waiting_for_others_at_s: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        self._progress, self._store = progress, store
        self._global_rank, self._world_size = global_rank, world_size
        self._timeout_s, self._long_timeout_s = timeout_s, long_timeout_s
        self._log, self._clock, self._arm, self._disarm = log, clock, arm, disarm
        self._record, self._last_waiting_for_others_at_s = record, last_waiting_for_others_at_s
        self._print_after_s = ANSWER_S if global_rank == 0 else 2 * ANSWER_S  # rank 0 is the first to print
        self._ends_after_s = 2 * ANSWER_S + GRACE_S
        self._steps = 0  # finished since the launch
        self._waiting_since = self._last_poll = clock()
        self._went_on_at = -math.inf  # when the process ran again after it had not run for a while
        self._suspected_at: float | None = None  # None: no hang is suspected
        self._steps_when_suspected = 0
        self._reported = False
        self._report_key = ""
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        def watch() -> None:
            while not self._stopped.wait(POLL_S):
                self.poll()

        self._thread = threading.Thread(target=watch, name="watchdog", daemon=True)
        self._thread.start()

    def step_done(self) -> None:
        self._steps += 1
        self._waiting_since = self._clock()

    def poll(self) -> None:
        """Checks for a hang, publishes the phase, reports or cancels. Called every POLL_S."""
        now = self._clock()
        unseen_s = now - self._last_poll
        if unseen_s > 5 * POLL_S:
            # The process did not run (Ctrl-Z, a suspended machine): that time does not count.
            self._waiting_since, self._went_on_at = min(now, self._waiting_since + unseen_s), now
        self._last_poll, last_waiting_for_others_at_s = now, self._last_waiting_for_others_at_s()
        self._waiting_since = max(self._waiting_since, last_waiting_for_others_at_s)
        waited_s, limit_s = now - self._waiting_since, self._timeout_s if self._steps else self._long_timeout_s
        if long_phase := self._progress.long_phase():
            self._waiting_since = now  # the step's timeout restarts after the phase
            waited_s, limit_s = min(long_phase[1], now - self._went_on_at), self._long_timeout_s
        if self._suspected_at is not None and (
            self._steps != self._steps_when_suspected or last_waiting_for_others_at_s > self._suspected_at
        ):
            self._disarm()
            cause = "a step finished" if self._steps != self._steps_when_suspected else "the group waits for others,"
            self._log.warning(f"continuing: {cause} {now - self._suspected_at:.0f} s after a hang was suspected")
            self._suspected_at = None
            with contextlib.suppress(RuntimeError):  # readers recognise a stale entry by its step
                self._store.delete_key(self._key(self._global_rank))
                self._store.delete_key(self._report_key)  # a second hang in the same step is reported, too
        elif waited_s > limit_s:
            self._suspect(now, waited_s)

    def close(self) -> None:
        """Stops watching; the process is not ended afterwards."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * POLL_S)
        if self._suspected_at is not None:
            self._disarm()
            self._suspected_at = None

    def _suspect(self, now: float, waited_s: float) -> None:
        if self._suspected_at is None:
            self._suspected_at, self._steps_when_suspected, self._reported = now, self._steps, False
            self._arm(self._ends_after_s)  # first, since all that follows may hang
        if self._reported:
            return
        try:
            self._store.set(self._key(self._global_rank), self._own_phase())
            answers = self._answers()
            if len(answers) < self._world_size and now - self._suspected_at < self._print_after_s:
                return
            step = min(answer["step"] for answer in answers.values())
            self._report_key = f"watchdog/told/{step}"
            mine = self._store.add(self._report_key, 1) == 1  # only one rank prints
        except RuntimeError as error:  # the rank that hosts the store is gone: report this rank only
            answers, mine = {self._global_rank: json.loads(self._own_phase())}, True
            self._log.warning("the phases of the other ranks are unknown: %s", str(error).splitlines()[0])
        self._reported = True
        if mine:
            where = describe(answers, self._world_size)
            ends_s = self._ends_after_s - (now - self._suspected_at)
            self._log.error(f"no step for {waited_s:.0f} s: {where}; stack dumps and exit in {ends_s:.0f} s")
        try:
            self._record()
        except Exception as error:  # noqa: BLE001 (this thread must survive, to cancel the exit if a step finishes)
            self._log.warning("the flight recorder cannot be saved: %s", error)

    def _own_phase(self) -> str:
        phases = self._progress.open_phases()
        innermost, seconds = phases[-1] if phases else ("", self._clock() - self._waiting_since)
        names = [PHASES.get(innermost, innermost), *(PHASES[name] for name, _ in phases[:-1] if name in LONG_PHASES)]
        return json.dumps({"step": self._steps, "where": " in ".join(names[:2]), "seconds": seconds})

    def _answers(self) -> dict[int, dict[str, Any]]:
        """Returns the phases that ranks have published for this hang; ranks are at most one step apart."""
        found = {}
        for rank in range(self._world_size):
            if self._store.check([self._key(rank)]):
                answer = json.loads(self._store.get(self._key(rank)))
                if abs(answer["step"] - self._steps) <= 1:
                    found[rank] = answer
        return found

    @staticmethod
    def _key(rank: int) -> str:
        return f"watchdog/rank/{rank}"


def describe(answers: Mapping[int, Mapping[str, Any]], world_size: int) -> str:
    """Returns the phase of each rank, the longest first: `rank 3: data loading for 41 s; ranks 0-1: ... ; rank 2 does not answer`."""
    ranks_at: dict[str, list[int]] = {}
    for rank in sorted(answers):
        ranks_at.setdefault(answers[rank]["where"], []).append(rank)
    seconds = {where: max(answers[rank]["seconds"] for rank in ranks) for where, ranks in ranks_at.items()}
    longest_first = sorted(ranks_at, key=lambda where: -seconds[where])
    parts = [f"{as_ranges('rank', ranks_at[where])}: {where} for {seconds[where]:.0f} s" for where in longest_first]
    silent = [rank for rank in range(world_size) if rank not in answers]
    if silent:
        parts.append(f"{as_ranges('rank', silent)} {'does' if len(silent) == 1 else 'do'} not answer")
    return "; ".join(parts)


def flight_recorder_env(*, trace_buf_size: int, folder: Path) -> dict[str, str]:
    """Returns the environment for torch's flight recorder, which records the last `trace_buf_size` collectives of a rank; 0: off. Set it
    before the first process group is created. Names as in torch 2.13 (FlightRecorder.hpp, ProcessGroupNCCL.hpp). NCCL dumps at its own
    timeouts, except for reductions between replica groups (ft/process_groups/nccl.py). `torchfrtrace FOLDER -p rank_` reads the files."""
    return {
        "TORCH_FR_BUFFER_SIZE": str(trace_buf_size),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1" if trace_buf_size else "0",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "rank_"),  # torch appends the rank
    }


def dump_flight_recorder(folder: Path, global_rank: int) -> Path | None:
    """Saves this rank's flight recorder as torch's own dump does; returns the path; None: torch gives no access. Written first without
    and then with Python's stacks, which can take longer than the process has left."""
    # NCCL's recorder is missing in a build without NCCL; the other one covers gloo.
    dump = getattr(c10d, "_dump_nccl_trace" if dist.get_backend() == "nccl" else "_dump_fr_trace", None)
    if dump is None:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank_{global_rank}"
    path.write_bytes(dump(includeStackTraces=False))
    path.write_bytes(dump())
    return path
