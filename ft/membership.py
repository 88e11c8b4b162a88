"""Start-up of one replica group: rank 0 starts the group server, a child process, and a store for rendezvous with other groups, and writes
the server's address to the group's own store. Keys contain `restart_count`, for stores that outlive a restart of the ranks.
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
from ft.rpc.clients import GroupServerProcess, is_torchft_lighthouse
from ft.rpc.group_server import Settings

OTHERS_WAIT_S = 60.0  # wait of the other ranks for the server, beyond contact_s; above clients.START_S


@dataclass(frozen=True)
class ReplicaGroupConfig:
    """Settings of a replica group; the same in all its ranks except for group_rank."""

    name: str  # REPLICA_GROUP_ID
    group_rank: int
    world_size: int
    lighthouse: str  # http://host:port
    host: str  # address at which other groups reach this host
    access: Access
    times: Timeouts
    # TORCHELASTIC_RESTART_COUNT where the group's store outlives restarts, so that no rank reads the address of a former server; 0 where
    # each launch has a new store. Nodes count their own restarts, so for a group on several nodes only a new store is safe: all its ranks
    # must have the same value.
    restart_count: int = 0
    max_active_groups: int | None = None  # most groups that are assigned slots; None: no limit
    quorum_retries: int | None = None  # failed lighthouse calls that are repeated; None or -1: no limit
    every_step: bool = False  # request a quorum before each step; required by torchft's lighthouse
    port: int = 0  # port of the group server; 0: any free one
    contact_s: float = 60.0  # longest wait for a lighthouse that does not answer


@dataclass(frozen=True)
class Membership:
    """A rank's place in its own group, which it has joined. Rank 0 has `server`, which it closes, and `rendezvous_store`; other ranks have
    neither."""

    replica_id: str
    address: str  # address of the group server
    server: GroupServerProcess | None = None
    rendezvous_store: TCPStore | None = None

    def sweep(self, quorum_id: int) -> None:
        """Deletes the keys of generations before this quorum's from the rendezvous store, in a thread."""
        if self.rendezvous_store is not None:
            threading.Thread(
                target=sweep, args=(self.rendezvous_store, quorum_id), name="ft-sweep", daemon=True
            ).start()


def join(config: ReplicaGroupConfig, store: Store | None) -> Membership:
    """Starts the group server on rank 0, or reads its address from `store`, the group's own, on any other rank. Raises OSError if the
    server does not start, ValueError if the lighthouse lacks a feature or refuses the token, ConnectionError if there is no lighthouse,
    RuntimeError for one of several ranks without `store`."""
    if store is None and (config.world_size > 1 or config.group_rank > 0):
        raise RuntimeError(
            f"rank {config.group_rank} of {config.world_size} has no store for the address of its group's server"
        )
    own = PrefixStore(f"ft/{config.restart_count}", store) if store is not None and config.world_size > 1 else None
    if config.group_rank == 0:
        return _start(config, own)
    assert own is not None
    limit_s = config.contact_s + OTHERS_WAIT_S
    try:
        own.wait(["group"], timedelta(seconds=limit_s))
        return Membership(**json.loads(own.get("group")))
    except RuntimeError as error:
        raise TimeoutError(f"rank 0 did not start the group's server within {limit_s:g} s: {error}") from None


def _start(config: ReplicaGroupConfig, own: Store | None) -> Membership:
    is_torchft = is_torchft_lighthouse(config.lighthouse, config.access, config.contact_s)
    if is_torchft and not config.every_step:
        raise ValueError(
            'fault_tolerance.quorum = "on_change": torchft\'s lighthouse announces no changes; nearest: "every_step"'
        )
    rendezvous = serve(config.host)
    settings = Settings(
        replica_id=f"{config.name}:{secrets.token_hex(4)}",
        world_size=config.world_size,
        lighthouse=config.lighthouse,
        store_address=str(Endpoint(config.host, rendezvous.port)),
        wire="torchft" if is_torchft else "pharos",
        host=config.host,
        port=config.port,
        access=config.access,
        times=config.times,
        quorum_retries=config.quorum_retries,
        max_active_groups=config.max_active_groups,
    )
    server = GroupServerProcess(settings)
    try:
        if own is not None:
            own.set("group", json.dumps({"replica_id": settings.replica_id, "address": server.address}))
    except BaseException:  # no server of this group may live on, which would keep its name
        server.close()
        raise
    return Membership(settings.replica_id, server.address, server, rendezvous)
