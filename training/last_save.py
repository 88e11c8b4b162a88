"""The end of a run: nobody says that it is finished before its last step is saved.

Floor 3, beside checkpoint.py; train.py makes one when the last step is committed. The group that writes tries until its checkpoint stands,
on storage that fails, too. The others wait for that: they see it in the run's folder, or, where theirs is another, hear it from the writer
as it leaves. If it is lost before, who writes is settled anew, and the next one saves what the one before did not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, Protocol

from training.checkpoint import Checkpointer, CheckpointFailed
from training.progress import Progress

POLL_S = 0.5
PAUSE_S = 10.0  # from a try that failed to the next
SAID_S = 3.0  # a wait for another group's save of more than that is said
GRACE_S = 20.0  # that who was asked to leave still waits for another group's save

Word = Literal["stands", "save", "regroup", "wait", "stop"]


class Manager(Protocol):
    """The part of ft.seam.Seam that is asked."""

    @property
    def writes(self) -> tuple[str, int] | None: ...

    @property
    def is_broken(self) -> bool: ...

    @property
    def finished(self) -> bool: ...

    def finish(self, *, saved: bool) -> None: ...


class LastSave:
    """The last save, on one rank. `save` writes it, and raises CheckpointFailed or OSError; `regroup` settles anew who writes, False: this
    group was asked to leave meanwhile; `asked`: this rank was, since the last call; `tell`: people, of trouble; `say`: the log."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        manager: Manager,
        progress: Progress,
        *,
        save: Callable[[], None],
        regroup: Callable[[], bool],
        asked: Callable[[], bool],
        tell: Callable[[str], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._checkpointer, self._manager, self._progress = checkpointer, manager, progress
        self._save, self._asked, self._tell, self._say = save, asked, tell, say
        self._regroup, self._clock, self._sleep, self._since = regroup, clock, sleep, clock()
        self._failure: Exception | None = None
        self._tried_at: float | None = None
        self._was_asked = False  # this rank
        self._asked_at: float | None = None  # the first of them; on rank 0
        self._told = False

    def make(self, step: int) -> None:
        """Returns when the checkpoint of `step` stands, whoever wrote it. Raises CheckpointFailed where SIGTERM came before."""
        while True:
            with self._progress.phase("checkpoint"):  # each look is one of its own: there is no limit to their number
                self._was_asked |= self._asked()
                word = self._checkpointer.agree(lambda asked: self._word(step, asked), self._was_asked)
                if word == "stands":
                    return self._manager.finish(saved=True)
                if word == "save":
                    self._try()
                elif word == "wait":
                    self._wait(step)
            if word == "stop":
                self._manager.finish(saved=False)
                why = f"asked to leave before step {step}, the last, was known to be saved"
                raise CheckpointFailed(f"{self._failure}; {why}" if self._failure else why)
            if word == "regroup" and not self._regroup():
                self._was_asked, self._asked_at = True, -GRACE_S

    def _word(self, step: int, asked: bool) -> Word:
        """On rank 0: what all ranks do next. asked: one of them was asked to leave."""
        manager, now_s = self._manager, self._clock()
        if self._checkpointer.has(step) or manager.finished:
            return "stands"
        if asked and self._asked_at is None:
            self._asked_at = now_s
        if manager.writes is not None:
            if self._tried_at is None:
                return "save"
            if asked:
                return "stop"
            return "save" if now_s - self._tried_at >= PAUSE_S else "wait"
        if self._asked_at is not None and now_s - self._asked_at >= GRACE_S:
            return "stop"
        return "regroup" if manager.is_broken else "wait"

    def _try(self) -> None:
        self._tried_at = self._clock()
        try:
            self._save()
        except (CheckpointFailed, OSError) as failure:
            if self._failure is None:
                self._tell(f"{failure}; this is the last step: tried again every {PAUSE_S:g} s, until SIGTERM")
            self._failure = failure

    def _wait(self, step: int) -> None:
        if not self._told and self._tried_at is None and self._clock() - self._since >= SAID_S:
            self._told = True
            self._say(f"step {step} is the last: waiting until its checkpoint stands, which another group writes")
        self._sleep(POLL_S)
