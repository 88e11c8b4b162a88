"""A group on its way to stand: built in a thread that its owner never waits for longer than it wants to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ft.process_groups.errors import GroupError, RendezvousFailed
from ft.process_groups.operations import Operation
from ft.protocol.messages import Shape

Ended = Callable[[Exception | None, int], None]  # the error if there was one; the rank that a message came from, or -1


class Engine(Protocol):
    """The executor of one generation's operations: torch's group in this process, or in a child."""

    def start(self, operation: Operation, ended: Ended) -> None:
        """Starts it, and calls `ended` once, from any thread, when nothing reads or writes its tensors any more."""

    def wake(self) -> None:
        """Ends what is pending as soon as may be, here and at the peers. Returns at once; may be called from any thread, and twice."""

    def end(self) -> None:
        """After wake: returns when nothing of it touches a tensor, and all that it had is given back. May take long, or not come back."""


PREPARE_S = 300.0  # the longest that a fork server may take to import torch


class GroupInit:
    """`build` runs in a thread of its own and returns the engine. It names what wakes it (`at_giving_up`) as it goes. What must be there
    first, and has nothing to do with the others, is `prepare`'s: its time is not the rendezvous's."""

    def __init__(
        self,
        name: str,
        build: Callable[[GroupInit], Engine],
        prepare: Callable[[], None] = lambda: None,
        *,
        shape: Shape = (),
        holders: Sequence[int] = (),
    ) -> None:
        self.shape, self.holders = shape, holders  # as ProcessGroup.configure's
        self.began_s = time.monotonic()
        self.given_up = threading.Event()
        self.absent: tuple[int, ...] = ()
        self.strangers: tuple[int, ...] = ()
        self._build, self._prepare = build, prepare
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], object]] = []
        self._prepared, self._over = threading.Event(), threading.Event()
        self._engine: Engine | None = None
        self._error: Exception | None = None
        self._reason = ""
        self._thread = threading.Thread(target=self._run, name=f"ft-form-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, limit_s: float) -> Engine:
        """The engine. Raises RendezvousFailed when it was given up, did not come within the limit once all was prepared (it is then given
        up), or failed."""
        if not self._prepared.wait(PREPARE_S) or not self._over.wait(limit_s):
            self.give_up(f"has not formed within {limit_s:g} s")
        with self._lock:
            if self._engine is not None and not self.given_up.is_set():
                return self._engine
            cause = self._reason or str(self._error)
        missing = f"; absent: ranks {', '.join(map(str, self.absent))}" if self.absent else ""
        raise RendezvousFailed(cause + missing, self.absent, self.strangers) from self._error

    def give_up(self, reason: str) -> None:
        """Wakes who waits, and the thread that builds. From any thread; what came first counts."""
        with self._lock:
            if self.given_up.is_set():
                return
            self._reason = self._reason or reason
            self.given_up.set()
            wakers = list(self._wakers)
        self._end_waiting()
        for wake in wakers:
            wake()

    def refuse(self, strangers: Sequence[int], why: str) -> None:
        """These ranks have another shape. That is the cause, even if the word of a member that found it out first came before."""
        with self._lock:
            self.strangers, self._reason = tuple(strangers), why

    def at_giving_up(self, wake: Callable[[], object]) -> None:
        """`wake` is called when the group is given up while it forms; at once, if it is already."""
        with self._lock:
            self._wakers.append(wake)
            late = self.given_up.is_set()
        if late:
            wake()

    def end(self) -> None:
        """After give_up: returns when the thread is gone, and the engine with it if there is one after all."""
        self._thread.join()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.wake()
            engine.end()

    def _run(self) -> None:
        try:
            self._prepare()
            self._prepared.set()
            engine = self._build(self)
        except Exception as error:  # noqa: BLE001 (torch raises what it likes; the cause goes to who waits)
            self._error = error if isinstance(error, GroupError) else GroupError(str(error))
        else:
            with self._lock:
                self._engine = engine
            del engine  # a group of torch must not be dropped by this thread
        self._end_waiting()
        self._build = _nothing  # and what it holds
        self._wakers.clear()

    def _end_waiting(self) -> None:
        self._over.set()
        self._prepared.set()


def _nothing(group_init: GroupInit) -> Engine:
    raise AssertionError("built twice")
