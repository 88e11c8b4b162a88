"""Policy of saving: checkpoints that are due, the checkpoint of a replica group that leaves, and the checkpoint of the last step.

A failed save is retried while training continues. No group reports the run as finished before its last step is saved. The writer group
retries until that checkpoint exists, also on failing storage. The other groups wait until it appears in the run's folder, or until the
writer reports it as it leaves. If the writer is lost before that, the next quorum names a new writer, which saves it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ft.seam import GroupReleased, Seam
from training.checkpoint import SAVE_RETRY_S, Checkpointer, CheckpointFailed
from training.progress import Progress

POLL_S = 0.5
LAST_SAVE_RETRY_S = 10.0  # from a failed save of the last step to its retry
LOG_WAIT_S = 3.0  # a longer wait for another group's save is logged
GRACE_S = 20.0  # how long a group waits for another group's save after a stop request
# Failures that are retried. Checkpointer raises CheckpointFailed; OSError covers storage calls outside of it.
_FAILURES = (CheckpointFailed, OSError)

# The next action for the checkpoint of the last step:
# finish: it exists, from any group; or nothing is to be saved
# save: this group is the writer, and saves it
# upload: the step is saved; wait until it is in the object store, and retry failures
# leave: as upload, after a stop request: the first failure ends it
# regroup: form a quorum, which names a new writer
# wait: for the time of the next attempt, or for another group's save
# stop: end after a stop request, though the step is not known to be saved
LastSaveAction = Literal["finish", "save", "upload", "leave", "regroup", "wait", "stop"]


@dataclass(eq=False)
class Saver:
    """Saves of one rank. `sync`: makes the metrics written so far durable. `report`: reports storage failures. `info`: logs a line."""

    checkpointer: Checkpointer
    manager: Seam
    progress: Progress
    sync: Callable[[], None]
    report: Callable[[str], None]
    info: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._failed = False  # True: the newest due save has failed
        # For the save of the last step:
        self._failure: Exception | None = None
        self._tried_at: float | None = None
        self._stop_requested_at: float | None = None  # time of the first rank's stop request; set on rank 0
        self._logged_wait = False

    def save_due(self) -> None:
        """Saves a step that is due or requested. Raises the failure if the group leaves, since then there is no retry."""
        manager, checkpointer = self.manager, self.checkpointer
        if not manager.writer_quorum:
            # a background save from the time when this group was the writer
            if checkpointer.saving is not None and checkpointer.saving.done():
                try:
                    checkpointer.wait()
                except _FAILURES as failure:
                    self.report(f"{failure}; another group writes the checkpoints now")
            return
        with self.progress.phase("checkpoint"):
            try:
                self.save_now()
                if manager.may_exit:
                    checkpointer.wait()
            except _FAILURES as failure:
                if manager.may_exit:
                    raise
                self.report(f"{failure}; retried in {SAVE_RETRY_S:g} s, while training continues")
                self._failed = True
                return
            if self._failed:
                step = manager.step
                if checkpointer.saving is not None:
                    checkpointer.saving.add_done_callback(lambda done: self._report_saved(step))
                else:
                    self._report_saved(step)
        if manager.may_exit:
            self.wait_uploaded()

    def _report_saved(self, step: int) -> None:
        if self._failed and self.checkpointer.saved_step == step:
            self._failed = False
            self.report(f"checkpoint: step {step} is saved; earlier saves had failed")

    def save_last(self, stop_requested: Callable[[], bool]) -> None:
        """Returns when the checkpoint of the last step exists, from any group. `stop_requested`: returns True if a stop was requested on
        this rank since the last call. Raises CheckpointFailed if a stop was requested before the step was saved."""
        step, requested, since_s = self.manager.step, False, self.clock()
        with self.progress.phase("checkpoint"), suppress(*_FAILURES):
            self.checkpointer.wait()  # a background save uses collectives, as `agree` does; if it failed, this save takes its place
        while True:
            with self.progress.phase("checkpoint"):  # one per iteration, since the watchdog limits its length
                requested |= stop_requested()
                action = self.checkpointer.agree(lambda stop_on_any: self._next_action(step, stop_on_any), requested)
                if action == "finish":
                    self.manager.finish(saved=True)
                    return
                if action in ("upload", "leave"):
                    try:
                        self.checkpointer.wait_uploaded()
                    except CheckpointFailed as failure:
                        if action == "leave":
                            self.manager.finish(saved=False)
                            raise
                        if self._failure is None:
                            self.report(f"{failure}; this is the last step: tried again until SIGTERM")
                        self._failure = failure
                        self.sleep(POLL_S)
                elif action == "save":
                    self._try_last()
                elif action == "wait":
                    if not self._logged_wait and self._tried_at is None and self.clock() - since_s >= LOG_WAIT_S:
                        self._logged_wait = True
                        self.info(f"step {step} is the last: waiting for another group to write its checkpoint")
                    self.sleep(POLL_S)
            if action == "stop":
                self.manager.finish(saved=False)
                why = f"stopped before step {step}, the last, was known to be saved"
                raise CheckpointFailed(f"{self._failure}; {why}" if self._failure else why)
            if action == "regroup":
                try:
                    with self.progress.phase("quorum"):
                        self.manager.regroup(step)
                except GroupReleased:  # a stop was requested while the group waited for others
                    requested, self._stop_requested_at = True, -GRACE_S  # no further grace

    def save_now(self, *, last: bool = False, outside_quorum: bool = False) -> None:
        """Saves the current state. `outside_quorum`: the group leaves while it waits for others. Raises one of _FAILURES."""
        self.sync()  # metrics of steps before a checkpoint are not written again after a resume
        if last or outside_quorum or self.manager.may_exit:  # this save replaces one that failed in the background
            with suppress(*_FAILURES):
                self.checkpointer.wait()
        branch = len(self.manager.rewinds)
        self.checkpointer.save(self.manager.step, branch=branch, last=last, outside_quorum=outside_quorum)

    def wait_uploaded(self) -> None:
        """Returns once the object store has the newest save, if there is one. Raises CheckpointFailed if the store refuses it."""
        self.checkpointer.retry_upload()
        uploaded = False
        while not uploaded:
            with self.progress.phase("checkpoint"):  # one per iteration, since the watchdog limits its length
                uploaded = self.checkpointer.wait_uploaded()

    def _next_action(self, step: int, stop_requested: bool) -> LastSaveAction:
        """Returns the next action of all ranks; called on rank 0. `stop_requested`: on any of them."""
        manager, now_s = self.manager, self.clock()
        if self.checkpointer.last_save_exists(step) or manager.finished:
            return "finish"
        if stop_requested and self._stop_requested_at is None:
            self._stop_requested_at = now_s
        if manager.writer_quorum is not None:
            if self._tried_at is None:
                return "save"
            if self.checkpointer.is_uploading(step):
                return "leave" if stop_requested else "upload"
            if stop_requested:
                return "stop"
            return "save" if now_s - self._tried_at >= LAST_SAVE_RETRY_S else "wait"
        if self._stop_requested_at is not None and now_s - self._stop_requested_at >= GRACE_S:
            return "stop"
        return "regroup" if manager.needs_new_quorum else "wait"

    def _try_last(self) -> None:
        self._tried_at = self.clock()
        try:
            self.save_now(last=True)
        except _FAILURES as failure:
            if self._failure is None:
                self.report(f"{failure}; this is the last step: retried every {LAST_SAVE_RETRY_S:g} s until SIGTERM")
            self._failure = failure
