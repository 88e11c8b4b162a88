"""A group on its way to stand: built in a thread that its owner never waits for longer than it wants to, once all members are there.

torch's own constructors wait for a member that never comes, and nobody can call them off. So each member says in a store that it is there,
and waits for the others; only when all are there is a constructor called. The wait ends at a notice, or when its time is over, and says
who was absent. Members tell each other their shape, too: bytes of another layout would end a peer's process, not a sum.

A store may be silent as well: its host may be stopped. The connection to one of the form "host:port/prefix" is this member's own
(store.py), so it can be cut to wake the thread: there the server is asked once and answers when the last member has come. A store of
torch's cannot be called off, and is asked again and again.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ft.process_groups.errors import GroupError, RendezvousFailed
from ft.process_groups.store import StoreClient
from ft.protocol.messages import Shape
from ft.protocol.rules import shape_mismatches

Ended = Callable[[Exception | None, int], None]  # the error if there was one; the rank that a message came from, or -1
PREPARE_S = 300.0  # the longest that a fork server may take to import torch
VERSION = "2"  # of what members say in the store, and of what they send each other then
POLL_S = 0.002  # the first pause between two looks; each is half as long again as the one before,
MOST_POLL_S = 0.05  # up to this, and for few members up to what keeps the store as little busy:
MEMBER_POLL_S = 0.002  # so long for each


class Engine(Protocol):
    """The executor of one generation's operations: torch's group in this process, or in a child."""

    def start(self, operation: Any, ended: Ended) -> None:
        """Starts it (base.Operation), and calls `ended` once, from any thread, when nothing reads or writes its tensors any more."""

    def wake(self) -> None:
        """Ends what is pending as soon as may be, here and at the peers. Returns at once; may be called from any thread, and twice."""

    def end(self) -> None:
        """After wake: returns when nothing of it touches a tensor, and all that it had is given back. May take long, or not come back."""


class GroupInit:
    """`build` runs in a thread of its own and returns the engine. It names what wakes it (`at_giving_up`) as it goes. What must be there
    first, and has nothing to do with the others, is `prepare`'s: its time is not the rendezvous's. `shape`, `holders`: as
    ProcessGroup.configure's."""

    def __init__(
        self,
        name: str,
        build: Callable[[GroupInit], Engine],
        prepare: Callable[[], None] = lambda: None,
        *,
        shape: Shape = (),
        holders: Sequence[int] = (),
    ) -> None:
        self.shape, self.holders = shape, holders
        self.began_s = time.monotonic()
        self.given_up = threading.Event()
        self.absent: tuple[int, ...] = ()
        self.mismatched: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], object]] = []
        self._prepared, self._over = threading.Event(), threading.Event()
        self._engine: Engine | None = None
        self._error: Exception | None = None
        self._reason = ""
        # The thread has what `build` holds, and drops it at its end.
        self._thread = threading.Thread(target=self._run, args=(prepare, build), name=f"ft-form-{name}", daemon=True)

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
        raise RendezvousFailed(cause + missing, self.absent, self.mismatched) from self._error

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

    def refuse(self, mismatched: Sequence[int], why: str) -> None:
        """These ranks have another shape. That is the cause, even if the word of a member that found it out first came before."""
        with self._lock:
            self.mismatched, self._reason = tuple(mismatched), why

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

    def _run(self, prepare: Callable[[], None], build: Callable[[GroupInit], Engine]) -> None:
        try:
            prepare()
            self._prepared.set()
            engine = build(self)
        except Exception as error:  # noqa: BLE001 (torch raises what it likes; the cause goes to who waits)
            self._error = error if isinstance(error, GroupError) else GroupError(str(error))
        else:
            with self._lock:
                self._engine = engine
            del engine  # a group of torch must not be dropped by this thread
        self._end_waiting()
        self._wakers.clear()

    def _end_waiting(self) -> None:
        self._over.set()
        self._prepared.set()


class Rendezvous:
    """One member's part in the rendezvous of one generation, in the thread of its `group_init`."""

    def __init__(self, group_init: GroupInit, store: Store | str, rank: int, size: int, limit_s: float) -> None:
        self.group_init, self.rank, self.size, self.limit_s = group_init, rank, size, limit_s
        self._until_s = time.monotonic() + limit_s
        self._own: StoreClient | None = None
        if isinstance(store, str):
            self._own = store = StoreClient(store, limit_s)
            group_init.at_giving_up(self._own.hang_up)
            self._own.connect()
        self.store = store
        server = self._own or _server_behind(store)
        self.host = server.host if server else None  # of the store, where it has one

    def left_s(self) -> float:
        """Time that is left to form the group, at least a moment."""
        return max(0.05, self._until_s - time.monotonic())

    def gather(self, mine: Any) -> list[Any]:
        """Returns each member's word on itself (JSON), by rank, once all are there and have the same shape. Raises RendezvousFailed."""
        shape = self.group_init.shape
        digest = hashlib.sha256(repr(shape).encode()).hexdigest()[:16]
        said = [_read(value) for value in self._exchange("here", json.dumps([VERSION, digest, mine]))]
        self._refuse_mismatched([(("version of Pharos", version),) for version, _, _ in said])
        if len({digest for _, digest, _ in said}) > 1:  # then it is worth its bytes to know what differs
            shapes = self._exchange("shape", json.dumps(shape))
            self._refuse_mismatched([tuple((what, digest) for what, digest in json.loads(value)) for value in shapes])
        return [more for _, _, more in said]

    def close(self) -> None:
        """Nothing more is to be asked of the store. Not needed by who gives up."""
        if self._own is not None:
            self._own.close()

    def _refuse_mismatched(self, shapes: Sequence[Shape]) -> None:
        """All members come to the same verdict, and nobody has connected to another before."""
        if found := shape_mismatches(shapes, self.group_init.holders):
            words = "; ".join(
                f"rank {rank} has another {' and '.join(what)} than the job" for rank, what in found.items()
            )
            self.group_init.refuse(tuple(found), words)
            raise RendezvousFailed(words)

    def _exchange(self, name: str, mine: str) -> list[bytes]:
        """Returns each member's word under that name, by rank, once all have spoken. Raises RendezvousFailed."""
        if self.store.compare_set(f"{name}/{self.rank}", "", mine).decode() != mine:
            raise RendezvousFailed(
                f"rank {self.rank} has already joined under this prefix: use a new prefix for each generation and a rank for each member"
            )
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        try:
            if self._own is not None:
                self._own.set_timeout(timedelta(seconds=self.left_s()))
                return self._own.multi_get(keys)
            pause_s, longest_s = POLL_S, min(MOST_POLL_S, MEMBER_POLL_S * self.size)
            while not self.store.check(keys):
                if self.group_init.given_up.wait(pause_s):
                    raise RendezvousFailed("given up")
                if time.monotonic() > self._until_s:
                    raise TimeoutError
                pause_s = min(longest_s, pause_s * 1.5)
            return [self.store.get(key) for key in keys]
        except TimeoutError:
            absent = tuple(rank for rank, key in enumerate(keys) if not self.store.check([key]))
            self.group_init.absent = absent
            raise RendezvousFailed(f"has not formed within {self.limit_s:g} s", absent) from None


def _read(value: bytes) -> tuple[str, str, Any]:
    """Splits a member's word into its version, the digest of its shape, and the rest."""
    with suppress(ValueError, TypeError):
        version, digest, more = json.loads(value)
        if version == VERSION:
            return version, str(digest), more
    return "another", "", None


def address_of(store: Store) -> tuple[str, int]:
    """Address of the server behind a store of torch, for a child process that needs a connection of its own. Raises ValueError."""
    server = _server_behind(store)
    if server is None:
        raise ValueError(
            f"a child process cannot reach a {type(store).__name__}: needs a TCPStore, or host:port/prefix"
        )
    return server.host, server.port


def _server_behind(store: Store) -> TCPStore | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None
