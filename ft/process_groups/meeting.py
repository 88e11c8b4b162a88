"""Where the members of a group meet before torch connects them: a store, and a key of each member's own in it.

torch's own constructors wait for a member that never comes, and nobody can call them off. So each member says in the store that it is
there, and polls for the others; only when all are there is a constructor called. The polling ends at a notice, or when its time is over,
and says who was absent.

All of it runs in a thread of the formation (forming.py), for a store may be silent as well: its host may be stopped. The connection to a
store of the form "host:port/prefix" is this meeting's own, so it can be cut to wake that thread.
"""

from __future__ import annotations

import json
import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ft.process_groups import sockets
from ft.process_groups.errors import RendezvousFailed
from ft.process_groups.sockets import Address

if TYPE_CHECKING:
    from ft.process_groups.forming import Formation

POLL_S = (0.002, 0.05)  # the first pause, and the longest; each is half as long again as the one before


def parse(address: str) -> tuple[str, int, str]:
    """host, port and prefix of "host:port/prefix"; an IPv6 host stands in brackets. Raises ValueError."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.%\w]+)\]|([^\s:\[\]/]+)):(\d{1,5})(?:/(.*))?", address)
    if not found or not 0 < int(found[3]) < 65536:
        raise ValueError(f"store address {address!r}: must be host:port/prefix, such as 10.0.0.1:29500/job/7/0")
    return found[1] or found[2], int(found[3]), found[4] or ""


class Meeting:
    """One member's part in the rendezvous of one generation."""

    def __init__(self, formation: Formation, store: Store | str, rank: int, size: int, limit_s: float) -> None:
        self.rank, self.size = rank, size
        self._formation = formation
        self._limit_s = limit_s
        self._until_s = time.monotonic() + limit_s
        self.store = _connect(formation, store, limit_s) if isinstance(store, str) else store

    def left_s(self) -> float:
        """Time that is left to form the group, at least a moment."""
        return max(0.05, self._until_s - time.monotonic())

    def gather(self, mine: Any) -> list[Any]:
        """What each member says of itself (JSON), by rank, once all are there. Raises RendezvousFailed."""
        said = json.dumps(mine)
        if self.store.compare_set(f"here/{self.rank}", "", said).decode() != said:
            raise RendezvousFailed(
                f"rank {self.rank} is in this store already: each generation needs a prefix of its own, each member a rank"
            )
        there: dict[int, Any] = {self.rank: mine}
        pause_s, longest_s = POLL_S
        while True:
            for rank in range(self.size):
                if rank not in there and self.store.check([f"here/{rank}"]):
                    there[rank] = json.loads(self.store.get(f"here/{rank}"))
            absent = tuple(rank for rank in range(self.size) if rank not in there)
            self._formation.absent = absent
            if not absent:
                return [there[rank] for rank in range(self.size)]
            if self._formation.given_up.wait(pause_s):
                raise RendezvousFailed("given up", absent)
            if time.monotonic() > self._until_s:
                raise RendezvousFailed(f"has not formed within {self._limit_s:g} s", absent)
            pause_s = min(longest_s, pause_s * 1.5)


def address_of(store: Store) -> tuple[str, int]:
    """Of the server behind a store of torch, for a child process that needs a connection of its own. Raises ValueError."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        raise ValueError(
            f"a child process cannot reach a {type(store).__name__}: needs a TCPStore, or host:port/prefix"
        )
    return store.host, store.port


def _connect(formation: Formation, address: str, limit_s: float) -> Store:
    host, port, prefix = parse(address)

    def connect() -> TCPStore:
        return TCPStore(host, port, None, False, timedelta(seconds=limit_s), wait_for_workers=False)

    near: set[Address] = set()
    if sockets.can_be_found():
        store, near = sockets.near_ends(connect, port=port)
        formation.at_giving_up(lambda: sockets.shut(near=near))
    else:
        store = connect()
    return dist.PrefixStore(prefix, store)
