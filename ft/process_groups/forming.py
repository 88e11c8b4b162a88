"""Forming of a generation: a rendezvous of its members in a thread, so that the owner can cancel it or stop waiting for it at any moment.

torch's own constructors wait for members that never join, and cannot be cancelled. So each member registers in a store and waits for the
others, and calls a constructor only when all have registered. A notice or the timeout ends that wait, and the error names the absent
members. Members also compare their fingerprints: data of a different layout would crash a peer's process, not only fail a reduction.

The store may not respond either, as its host may be suspended: any thread can shut down a member's connection to it (store.py).
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any, Protocol

from ft.process_groups.errors import MustExit, ProcessGroupError, RendezvousFailed
from ft.process_groups.store import StoreClient
from ft.protocol.messages import Fingerprint
from ft.protocol.rules import fingerprint_mismatches

# Called with the error, or None, and with the sender's rank of recv_anysource, or -1.
Ended = Callable[[Exception | None, int], object]
ACKNOWLEDGE_S = 1.0  # timeout of telling the store that this member knows of its own mismatch
VERSION = "4"  # version of the keys in the store and of the messages between members


class Engine(Protocol):
    """The executor of one generation's operations: a native group of torch in this process or in a child process."""

    def start(self, operation: Any, ended: Ended) -> None:
        """Starts a base.Operation, and calls `ended` once, from any thread, when nothing reads or writes its tensors any more."""

    def interrupt(self) -> None:
        """Begins to end pending operations, here and on the peers, as far as that needs no wait; `end` does the rest (with NCCL all of it).
        Their works have ended before. Returns at once; may be called from any thread, and twice."""

    def end(self) -> None:
        """Releases all resources, after `interrupt`; returns when nothing touches a tensor any more. May take long, or never return."""


class Rendezvous:
    """One member's part in forming one generation. `build` runs in a thread and returns the engine; before it waits it registers a function
    that interrupts it (`on_cancel`). `limit_s`: timeout. `address`: that of the store. `rank`, `size`, `fingerprint`, `holders`: as in
    ProcessGroup.configure. `arguments`: all of these but `build`, for a child process."""

    def __init__(
        self,
        build: Callable[[Rendezvous], Engine],
        address: str,
        rank: int,
        size: int,
        limit_s: float,
        fingerprint: Fingerprint = (),
        holders: Sequence[int] = (),
    ) -> None:
        self.arguments = address, rank, size, limit_s, fingerprint, holders
        self.rank, self.size, self.limit_s = rank, size, limit_s
        self.began_s, self.is_awaited = time.monotonic(), False
        self.store = StoreClient(address, limit_s)
        self.cancelled = threading.Event()
        self.absent: tuple[int, ...] = ()
        self.mismatched: tuple[int, ...] = ()
        self._until_s = self.began_s + limit_s
        self._lock = threading.Lock()
        self._interrupts: list[Callable[[], object]] = []
        self._over = threading.Event()
        self._engine: Engine | None = None
        self._error: Exception | None = None
        self._reason = ""
        # references of `build` are dropped when this thread ends
        self._thread = threading.Thread(target=self._run, args=(build,), name=f"ft-form-{rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, limit_s: float) -> Engine:
        """Returns the engine. Raises RendezvousFailed if it failed or was cancelled; cancels it if it takes longer than limit_s."""
        self.is_awaited = True
        if not self._over.wait(limit_s):
            self.cancel(f"has not formed within {limit_s:g} s")
        with self._lock:
            if self._engine is not None and not self.cancelled.is_set():
                return self._engine
            cause, mismatched = self._reason or str(self._error), self.mismatched
        if self.rank in mismatched:
            client = StoreClient(self.arguments[0], ACKNOWLEDGE_S)
            with suppress(OSError), closing(client):
                client.connect()
                client.set(f"mismatched/{self.rank}", "")
        missing = f"; absent: replica ranks {', '.join(map(str, self.absent))}" if self.absent else ""
        raise RendezvousFailed(cause + missing, self.absent, mismatched) from self._error

    def cancel(self, reason: str) -> None:
        """Interrupts the owner's wait and the forming thread. From any thread; the first reason counts."""
        with self._lock:
            if self.cancelled.is_set():
                return
            self._reason = self._reason or reason
            self.cancelled.set()
            interrupts = list(self._interrupts)
        self._over.set()
        for interrupt in interrupts:
            interrupt()

    def refuse(self, mismatched: Sequence[int], why: str) -> None:
        """Records that these ranks have a different fingerprint. `wait` then raises that, even if the forming was cancelled before with
        another reason, which is often a consequence: a member that has found the mismatch fails the generation."""
        with self._lock:
            self.mismatched, self._reason = tuple(mismatched), why

    def on_cancel(self, interrupt: Callable[[], object]) -> None:
        """Registers `interrupt`, to be called when the rendezvous is cancelled; at once, if it is cancelled already."""
        with self._lock:
            self._interrupts.append(interrupt)
            late = self.cancelled.is_set()
        if late:
            interrupt()

    def end(self) -> None:
        """Returns, after `cancel`, when the thread has ended, and with it the engine if there is one after all."""
        self._thread.join()
        if isinstance(self._error, MustExit):  # it cannot be ended: the Reaper counts it
            raise self._error
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.interrupt()
            engine.end()

    def _run(self, build: Callable[[Rendezvous], Engine]) -> None:
        try:
            engine = build(self)
        except Exception as error:  # noqa: BLE001 (torch raises any type; `wait` has the error)
            self._error = error if isinstance(error, ProcessGroupError) else ProcessGroupError(str(error))
            self._error.__traceback__ = self._error.__context__ = None  # they would keep what `build` has made
            self.store.close()
        else:
            with self._lock:
                self._engine = engine
            del engine  # this thread must not drop a native group
        self._over.set()
        self._interrupts.clear()

    def left_s(self) -> float:
        """Seconds that are left until the timeout, at least 0.05."""
        return max(0.05, self._until_s - time.monotonic())

    def all_gather(self, mine: Any) -> list[Any]:
        """Connects to the store; returns each member's `mine` (JSON), by rank, if fingerprints are equal. Raises RendezvousFailed."""
        *_, fingerprint, holders = self.arguments
        self._until_s = time.monotonic() + self.limit_s
        self.on_cancel(self.store.hang_up)
        self.store.connect()
        digest = hashlib.sha256(repr(fingerprint).encode()).hexdigest()[:16]
        members = [_read(value) for value in self._exchange("here", json.dumps([VERSION, digest, mine]))]
        self._compare(
            [(("version of the rendezvous", version),) for version, _, _ in members], holders, acknowledge=False
        )
        if len({digest for _, digest, _ in members}) > 1:  # only then the fingerprints themselves are exchanged
            fingerprints = self._exchange("fingerprint", json.dumps(fingerprint))
            self._compare([tuple((name, value) for name, value in json.loads(x)) for x in fingerprints], holders)
        return [more for _, _, more in members]

    def _compare(
        self, fingerprints: Sequence[Fingerprint], holders: Sequence[int], *, acknowledge: bool = True
    ) -> None:
        """Raises the same RendezvousFailed on all members if fingerprints differ, before any member has connected to another. Matching
        members fail only after the mismatched ones have told the store that they know (`wait`), as a notice of the failure could interrupt
        their own comparison. `acknowledge`: the mismatched ones do tell it; those of a different version may not."""
        if found := fingerprint_mismatches(fingerprints, holders):
            reason = "; ".join(
                f"replica rank {i} differs from the job in {' and '.join(names)}" for i, names in found.items()
            )
            self.refuse(tuple(found), reason)
            if acknowledge and self.rank not in found:
                with suppress(OSError):
                    self.store.wait([f"mismatched/{rank}" for rank in found], timedelta(seconds=self.left_s()))
            raise RendezvousFailed(reason)

    def _exchange(self, name: str, mine: str) -> list[bytes]:
        """Returns each member's value under that name, by rank, once all have set theirs. Raises RendezvousFailed."""
        if self.store.compare_set(f"{name}/{self.rank}", "", mine).decode() != mine:
            raise RendezvousFailed(
                f"rank {self.rank} has already joined under this prefix: use a new prefix for each generation and a rank for each member"
            )
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        self.store.set_timeout(timedelta(seconds=self.left_s()))
        try:
            return self.store.multi_get(keys)
        except TimeoutError:
            self.absent = tuple(rank for rank, key in enumerate(keys) if not self.store.check([key]))
            raise RendezvousFailed(f"has not formed within {self.limit_s:g} s", self.absent) from None


def _read(value: bytes) -> tuple[str, str, Any]:
    """Splits a member's value into its version, the digest of its fingerprint, and its `mine`."""
    with suppress(ValueError, TypeError):
        version, digest, more = json.loads(value)
        if version == VERSION:
            return version, str(digest), more
    return "another", "", None
