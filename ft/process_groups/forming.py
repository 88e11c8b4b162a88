"""How a generation forms: in a thread that its owner never waits for longer than it wants to, once all members are there.

torch's own constructors wait for a member that never comes, and nobody can call them off. So each member writes into a store that it is
there, and waits for the others; only when all are there is a constructor called. The wait ends at a notice, or when its time is over, and
the error names the absent. Members compare their fingerprints, too: bytes of another layout would end a peer's process, not a sum.

The store may be silent as well, as its host may be stopped: each member's connection (store.py) can be shut down by another thread.
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

from ft.process_groups.errors import ProcessGroupError, RendezvousFailed
from ft.process_groups.fork_server import PREPARE_S
from ft.process_groups.store import StoreClient
from ft.protocol.messages import Fingerprint
from ft.protocol.rules import fingerprint_mismatches

# Called with the error if there was one, and with the rank that a message came from, or -1.
Ended = Callable[[Exception | None, int], object]
ACKNOWLEDGE_S = 1.0  # to tell the store that this member knows of its own mismatch
VERSION = "3"  # of what members write into the store, and of what they send each other then


class Engine(Protocol):
    """The executor of one generation's operations: torch's group in this process, or in a child."""

    def start(self, operation: Any, ended: Ended) -> None:
        """Starts it (base.Operation), and calls `ended` once, from any thread, when nothing reads or writes its tensors any more."""

    def interrupt(self) -> None:
        """Ends what is pending as soon as may be, here and at the peers. Returns at once; may be called from any thread, and twice."""

    def end(self) -> None:
        """After interrupt: returns when nothing of it touches a tensor, and all it had is given back. May take long, or not come back."""


class Rendezvous:
    """One member's part in forming one generation. `build` runs in a thread of its own and returns the engine; it names whatever wakes it
    (`on_cancel`) before it waits. `prepare` is done first, and not on the time of the rendezvous, `limit_s`. `address`: that of the
    store. `rank`, `size`, `fingerprint`, `holders`: as ProcessGroup.configure's. `arguments`: those six, for a rendezvous in a child."""

    def __init__(
        self,
        build: Callable[[Rendezvous], Engine],
        address: str,
        rank: int,
        size: int,
        limit_s: float,
        fingerprint: Fingerprint = (),
        holders: Sequence[int] = (),
        *,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.arguments = address, rank, size, limit_s, fingerprint, holders
        self.rank, self.size, self.limit_s = rank, size, limit_s
        self.began_s = time.monotonic()
        self.store = StoreClient(address, limit_s)
        self.cancelled = threading.Event()
        self.absent: tuple[int, ...] = ()
        self.mismatched: tuple[int, ...] = ()
        self._until_s = self.began_s + limit_s
        self._lock = threading.Lock()
        self._interrupts: list[Callable[[], object]] = []
        self._prepared, self._over = threading.Event(), threading.Event()
        self._engine: Engine | None = None
        self._error: Exception | None = None
        self._reason = ""
        # The thread has what `build` holds, and drops it at its end.
        self._thread = threading.Thread(target=self._run, args=(prepare, build), name=f"ft-form-{rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self, limit_s: float) -> Engine:
        """The engine. Raises RendezvousFailed when it was cancelled, did not come within the limit once all was prepared (it is then
        cancelled), or failed."""
        if not self._prepared.wait(PREPARE_S) or not self._over.wait(limit_s):
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
        missing = f"; absent: ranks {', '.join(map(str, self.absent))}" if self.absent else ""
        raise RendezvousFailed(cause + missing, self.absent, mismatched) from self._error

    def cancel(self, reason: str) -> None:
        """Wakes the owner, and the thread that builds. From any thread; the first reason counts."""
        with self._lock:
            if self.cancelled.is_set():
                return
            self._reason = self._reason or reason
            self.cancelled.set()
            interrupts = list(self._interrupts)
        self._end_waiting()
        for interrupt in interrupts:
            interrupt()

    def refuse(self, mismatched: Sequence[int], why: str) -> None:
        """These ranks have another fingerprint. That is the cause, even if a member that saw it first has had the rendezvous cancelled
        before."""
        with self._lock:
            self.mismatched, self._reason = tuple(mismatched), why

    def on_cancel(self, interrupt: Callable[[], object]) -> None:
        """`interrupt` is called when the group is cancelled while it forms; at once, if it is already."""
        with self._lock:
            self._interrupts.append(interrupt)
            late = self.cancelled.is_set()
        if late:
            interrupt()

    def end(self) -> None:
        """After cancel: returns when the thread is gone, and the engine with it if there is one after all."""
        self._thread.join()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.interrupt()
            engine.end()

    def _run(self, prepare: Callable[[], None], build: Callable[[Rendezvous], Engine]) -> None:
        try:
            prepare()
            self._prepared.set()
            engine = build(self)
        except Exception as error:  # noqa: BLE001 (torch raises what it likes; the cause goes to who waits)
            self._error = error if isinstance(error, ProcessGroupError) else ProcessGroupError(str(error))
        else:
            with self._lock:
                self._engine = engine
            del engine  # a group of torch must not be dropped by this thread
        self._end_waiting()
        self._interrupts.clear()

    def _end_waiting(self) -> None:
        self._over.set()
        self._prepared.set()

    # ------------------------------------------------------------------------------------------------ for `build`

    def left_s(self) -> float:
        """Time that is left to form the group, at least a moment."""
        return max(0.05, self._until_s - time.monotonic())

    def all_gather(self, mine: Any) -> list[Any]:
        """Connects to the store. Returns the `mine` (JSON) of all, by rank, once they are there, of one fingerprint. Raises
        RendezvousFailed."""
        *_, fingerprint, holders = self.arguments
        self._until_s = time.monotonic() + self.limit_s
        self.on_cancel(self.store.hang_up)
        self.store.connect()
        digest = hashlib.sha256(repr(fingerprint).encode()).hexdigest()[:16]
        members = [_read(value) for value in self._exchange("here", json.dumps([VERSION, digest, mine]))]
        self._compare([(("version of Pharos", version),) for version, _, _ in members], holders, acknowledge=False)
        if len({digest for _, digest, _ in members}) > 1:  # then the fingerprints themselves are worth their bytes
            fingerprints = self._exchange("fingerprint", json.dumps(fingerprint))
            self._compare([tuple((name, value) for name, value in json.loads(x)) for x in fingerprints], holders)
        return [more for _, _, more in members]

    def _compare(
        self, fingerprints: Sequence[Fingerprint], holders: Sequence[int], *, acknowledge: bool = True
    ) -> None:
        """All members come to the same result, and none has connected to another before. A member fails only after those of another
        fingerprint have told the store that they know (`wait`): else a notice of the failure could end their own comparison. `acknowledge`:
        they do so, as those of another version may not."""
        if found := fingerprint_mismatches(fingerprints, holders):
            reason = "; ".join(f"rank {i} has another {' and '.join(names)} than the job" for i, names in found.items())
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
    """Splits what a member has set into its version, the digest of its fingerprint, and the rest."""
    with suppress(ValueError, TypeError):
        version, digest, more = json.loads(value)
        if version == VERSION:
            return version, str(digest), more
    return "another", "", None
