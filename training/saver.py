"""Saves of a run, beside its steps: those that are due, that of a group which leaves, and the last one.

A save that fails is tried again, while training goes on. No group reports that a run is finished before its last step is saved. The group
that writes tries until that checkpoint exists, on failing storage too. The others wait until they see it in the run's folder, or the writer
reports it as it leaves. If the writer is lost before, the next quorum names another one, which saves it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ft.seam import GroupReleased, Seam
from training.checkpoint import RETRY_S, Checkpointer, CheckpointFailed
from training.progress import Progress

POLL_S = 0.5
PAUSE_S = 10.0  # from a try of the last save that failed to the next
LOG_WAIT_S = 3.0  # a longer wait for another group's save is logged
GRACE_S = 20.0  # for which a group that was asked to leave still waits for another group's save

Action = Literal["finish", "save", "regroup", "wait", "stop"]


@dataclass(eq=False)
class Saver:
    """The saves of one rank. `sync`: makes the metrics of the steps so far durable. `report`: of trouble with storage. `info`: logs."""

    checkpointer: Checkpointer
    manager: Seam
    progress: Progress
    sync: Callable[[], None]
    report: Callable[[str], None]
    info: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._fails = False  # the newest save that was due
        # Of the last save:
        self._failure: Exception | None = None
        self._tried_at: float | None = None
        self._asked_at: float | None = None  # to leave, the first of the ranks; on rank 0
        self._logged_wait = False

    def save(self) -> None:
        """Saves a step that is due, or asked for. Raises CheckpointFailed or OSError where the group leaves: there is no next try."""
        manager = self.manager
        if not manager.writer_quorum:
            return
        with self.progress.phase("checkpoint"):
            try:
                self.write()
            except (CheckpointFailed, OSError) as failure:
                if manager.may_exit:
                    raise
                self.report(f"{failure}; tried again in {RETRY_S:g} s, while training goes on")
                self._fails = True
                return
            if self._fails:
                self.report(f"checkpoint: step {manager.step} is saved, after others were not")
            self._fails = False

    def save_last(self, asked: Callable[[], bool]) -> None:
        """Returns when the checkpoint of the last step exists, whoever wrote it. `asked`: this rank was asked to leave since the last call.
        Raises CheckpointFailed where SIGTERM came before."""
        step, was_asked, since_s = self.manager.step, False, self.clock()
        while True:
            with self.progress.phase("checkpoint"):  # one for each turn, for there is no limit to their number
                was_asked |= asked()
                action = self.checkpointer.agree(lambda any_asked: self._next_action(step, any_asked), was_asked)
                if action == "finish":
                    return self.manager.finish(saved=True)
                if action == "save":
                    self._try_last()
                elif action == "wait":
                    if not self._logged_wait and self._tried_at is None and self.clock() - since_s >= LOG_WAIT_S:
                        self._logged_wait = True
                        self.info(f"step {step} is the last: waiting for another group to write its checkpoint")
                    self.sleep(POLL_S)
            if action == "stop":
                self.manager.finish(saved=False)
                why = f"asked to leave before step {step}, the last, was known to be saved"
                raise CheckpointFailed(f"{self._failure}; {why}" if self._failure else why)
            if action == "regroup":
                try:
                    with self.progress.phase("quorum"):
                        self.manager.regroup(step)
                except GroupReleased:  # asked to leave while it waited for others
                    was_asked, self._asked_at = True, -GRACE_S

    def write(self, *, last: bool = False, settled: bool = True) -> None:
        """Saves the current state. Not `settled`: a group leaves while it waits for others. Raises CheckpointFailed and OSError."""
        self.sync()  # metrics that a power cut takes after the checkpoint of their step would be lost for ever
        if last or not settled or self.manager.may_exit:  # the last try makes up for one that failed in the background
            with suppress(CheckpointFailed, OSError):
                self.checkpointer.wait()
        self.checkpointer.save(self.manager.step, last=last, settled=settled)

    def _next_action(self, step: int, asked: bool) -> Action:
        """The next action of all ranks, decided on rank 0. `asked`: one of them was asked to leave."""
        manager, now_s = self.manager, self.clock()
        if self.checkpointer.has(step) or manager.finished:
            return "finish"
        if asked and self._asked_at is None:
            self._asked_at = now_s
        if manager.writer_quorum is not None:
            if self._tried_at is None:
                return "save"
            if asked:
                return "stop"
            return "save" if now_s - self._tried_at >= PAUSE_S else "wait"
        if self._asked_at is not None and now_s - self._asked_at >= GRACE_S:
            return "stop"
        return "regroup" if manager.needs_new_quorum else "wait"

    def _try_last(self) -> None:
        self._tried_at = self.clock()
        try:
            self.write(last=True)
        except (CheckpointFailed, OSError) as failure:
            if self._failure is None:
                self.report(f"{failure}; this is the last step: tried again every {PAUSE_S:g} s, until SIGTERM")
            self._failure = failure
