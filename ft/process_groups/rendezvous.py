"""The rendezvous of a group's members before torch connects them: a store, and a key of each member's own in it.

torch's own constructors wait for a member that never comes, and nobody can call them off. So each member says in the store that it is
there, and waits for the others; only when all are there is a constructor called. The wait ends at a notice, or when its time is over, and
says who was absent. Members tell each other their shape, too: bytes of another layout would end a peer's process, not a sum.

All of it runs in a GroupInit's thread (group_init.py), for a store may be silent as well: its host may be stopped. The connection to a
store of the form "host:port/prefix" is this meeting's own (store.py), so it can be cut to wake that thread: there the server is asked once
and answers when the last member has come. A store of torch's cannot be called off, and is asked again and again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ft.process_groups.errors import RendezvousFailed
from ft.process_groups.store import StoreClient
from ft.protocol.messages import Shape
from ft.protocol.rules import strangers

if TYPE_CHECKING:
    from ft.process_groups.group_init import GroupInit

VERSION = "2"  # of what members say here, and of what they send each other then
POLL_S = 0.002  # the first pause between two looks; each is half as long again as the one before,
MOST_POLL_S = 0.05  # up to this, and for few members up to what keeps the store as little busy:
MEMBER_POLL_S = 0.002  # so long for each


class Rendezvous:
    """One member's part in the rendezvous of one generation."""

    def __init__(self, group_init: GroupInit, store: Store | str, rank: int, size: int, limit_s: float) -> None:
        self.rank, self.size = rank, size
        self._group_init = group_init
        self.limit_s = limit_s
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
        shape = self._group_init.shape
        digest = hashlib.sha256(repr(shape).encode()).hexdigest()[:16]
        said = [_read(value) for value in self._exchange("here", json.dumps([VERSION, digest, mine]))]
        self._refuse_strangers([(("version of Pharos", version),) for version, _, _ in said])
        if len({digest for _, digest, _ in said}) > 1:  # then it is worth its bytes to know what differs
            shapes = self._exchange("shape", json.dumps(shape))
            self._refuse_strangers([tuple((what, digest) for what, digest in json.loads(value)) for value in shapes])
        return [more for _, _, more in said]

    def _refuse_strangers(self, shapes: Sequence[Shape]) -> None:
        """All members come to the same verdict, and nobody has connected to another before."""
        found = strangers(shapes, self._group_init.holders)
        if found:
            words = "; ".join(
                f"rank {rank} has another {' and '.join(what)} than the job" for rank, what in found.items()
            )
            self._group_init.refuse(tuple(found), words)
            raise RendezvousFailed(words)

    def _exchange(self, name: str, mine: str) -> list[bytes]:
        """Returns each member's word under that name, by rank, once all have spoken. Raises RendezvousFailed."""
        if self.store.compare_set(f"{name}/{self.rank}", "", mine).decode() != mine:
            raise RendezvousFailed(
                f"rank {self.rank} is in this store already: each generation needs a prefix of its own, each member a rank"
            )
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        try:
            return self._values(keys)
        except TimeoutError:
            absent = tuple(rank for rank, key in enumerate(keys) if not self.store.check([key]))
            self._group_init.absent = absent
            raise RendezvousFailed(f"has not formed within {self.limit_s:g} s", absent) from None

    def _values(self, keys: Sequence[str]) -> list[bytes]:
        """Returns all values once they are there. Raises TimeoutError; RendezvousFailed or OSError when it was given up."""
        if self._own is not None:
            self._own.set_timeout(timedelta(seconds=self.left_s()))
            return self._own.multi_get(keys)
        pause_s, longest_s = POLL_S, min(MOST_POLL_S, MEMBER_POLL_S * self.size)
        while not self.store.check(list(keys)):
            if self._group_init.given_up.wait(pause_s):
                raise RendezvousFailed("given up")
            if time.monotonic() > self._until_s:
                raise TimeoutError
            pause_s = min(longest_s, pause_s * 1.5)
        return [self.store.get(key) for key in keys]

    def close(self) -> None:
        """Nothing more is to be asked of the store. Not needed by who gives up."""
        if self._own is not None:
            self._own.close()


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
