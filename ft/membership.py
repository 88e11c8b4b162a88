"""Start of one group: rank 0 starts the group's server, a child process, and a store for rendezvous with other groups, and writes their
addresses to the group's own store (the launcher's, or torch.distributed's), which outlives restarts: keys contain
their count.
"""

from __future__ import annotations

import json
import secrets
import threading
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from ft.process_groups.store import serve, sweep
from ft.protocol.messages import Timeouts
from ft.rpc.access import Access, Endpoint
from ft.rpc.clients import GroupProcess, is_torchft_lighthouse
from ft.rpc.group_server import Settings

START_S = 60.0  # that ranks give rank 0 to start the server


@dataclass(frozen=True)
class ReplicaGroupConfig:
    """Settings of a group; the same in all its ranks, but for group_rank."""

    name: str  # REPLICA_GROUP_ID
    group_rank: int
    world_size: int
    lighthouse: str  # http://host:port
    host: str  # of this machine, as other groups reach it
    access: Access
    times: Timeouts
    restart_count: int = 0  # TORCHELASTIC_RESTART_COUNT
    max_active_groups: int | None = None
    retries: int | None = None
    every_step: bool = False  # a quorum before each step; then torchft's lighthouse will do, too
    port: int = 0  # of the group's server
    contact_s: float = 60.0  # limit of the wait for a lighthouse that does not answer


@dataclass(frozen=True)
class Membership:
    """A rank's place in its group. `server` and `rendezvous` are rank 0's to close."""

    replica_id: str
    address: str  # of the group's server
    server: GroupProcess | None = None
    rendezvous: TCPStore | None = None

    def sweep(self, quorum_id: int) -> None:
        """Removes from the store, in a thread, the keys of generations before this one, which is formed or was abandoned."""
        if self.rendezvous is not None:
            threading.Thread(target=sweep, args=(self.rendezvous, quorum_id), name="ft-sweep", daemon=True).start()


def join(config: ReplicaGroupConfig, store: Store | None) -> Membership:
    """`store`: the group's own, if it has several ranks. Raises RuntimeError where the server does not start; ValueError for a lighthouse
    that lacks a feature, or refuses the token; ConnectionError where there is none."""
    key = f"ft/{config.restart_count}"
    if config.group_rank == 0:
        made = _start(config)
        if store is not None and config.world_size > 1:
            PrefixStore(key, store).set("group", json.dumps({"replica_id": made.replica_id, "address": made.address}))
        return made
    if store is None:
        raise RuntimeError(
            f"rank {config.group_rank} of {config.world_size} has no store to find its group's server by"
        )
    limit_s, own = config.contact_s + START_S, PrefixStore(key, store)
    try:
        own.wait(["group"], timedelta(seconds=limit_s))
        return Membership(**json.loads(own.get("group")))
    except RuntimeError as error:
        raise RuntimeError(f"rank 0 did not start the group's server within {limit_s:g} s: {error}") from None


def _start(config: ReplicaGroupConfig) -> Membership:
    torchfts = is_torchft_lighthouse(config.lighthouse, config.access, config.contact_s)
    if torchfts and not config.every_step:
        raise ValueError(
            'fault_tolerance.quorum = "on_change": the lighthouse is torchft\'s, which announces no change; nearest: "every_step"'
        )
    rendezvous = serve(config.host)
    settings = Settings(
        replica_id=f"{config.name}:{secrets.token_hex(4)}",
        world_size=config.world_size,
        lighthouse=config.lighthouse,
        store_address=str(Endpoint(config.host, rendezvous.port)),
        wire="torchft" if torchfts else "pharos",
        host=config.host,
        port=config.port,
        access=config.access,
        times=config.times,
        retries=config.retries,
        max_active_groups=config.max_active_groups,
    )
    server = GroupProcess(settings)
    return Membership(settings.replica_id, server.address, server, rendezvous)
