"""torchft's LighthouseClient, for our lighthouse or torchft's, and LighthouseServer: a lighthouse in a thread, for tests and small jobs."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc

from ft.protocol import messages as m
from ft.protocol.lighthouse import LighthouseConfig
from ft.rpc import codec
from ft.rpc.access import Access, Endpoint, Tls, endpoints
from ft.rpc.clients import answer_of
from ft.rpc.driver import Observer
from ft.rpc.generated import torchft_pb2
from ft.rpc.lighthouse_flags import LighthouseOptions
from ft.rpc.lighthouse_link import channel
from ft.rpc.lighthouse_main import serve, until_stopped

log = logging.getLogger("pharos.torchft")


@dataclass(frozen=True)
class QuorumMember:
    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: dict[str, Any] | None = None


@dataclass(frozen=True)
class LighthouseQuorum:
    quorum_id: int
    participants: list[QuorumMember]
    created: Any  # protobuf's Timestamp: seconds, nanos


class LighthouseClient:
    """Blocking client of a lighthouse with torchft's protocol. Raises TimeoutError if it does not answer, RuntimeError if it refuses."""

    def __init__(self, addr: str, connect_timeout: timedelta, *, token: str = "", tls: Tls | None = None) -> None:
        access = Access(token, tls=tls)
        self._channel, self._metadata = channel(addr, access, aio=False), access.metadata()
        try:
            grpc.channel_ready_future(self._channel).result(timeout=connect_timeout.total_seconds())
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise TimeoutError(f"no lighthouse at {addr}") from None

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str | None = None,
        store_address: str | None = None,
        step: int | None = None,
        world_size: int | None = None,
        shrink_only: bool | None = None,
        data: dict[Any, object] | None = None,
    ) -> LighthouseQuorum:
        """Waits for a quorum with `replica_id` in it. `data` is sent to all members, as JSON."""
        member = torchft_pb2.QuorumMember(
            replica_id=replica_id,
            address=address or "",
            store_address=store_address or "",
            step=step or 0,
            world_size=1 if world_size is None else world_size,
            shrink_only=bool(shrink_only),
            data="" if data is None else json.dumps(data),
        )
        request = torchft_pb2.LighthouseQuorumRequest(requester=member)
        call = self._channel.unary_unary("/torchft.LighthouseService/Quorum")
        answer = answer_of(call, request, timeout.total_seconds(), self._metadata)
        quorum = codec.parse(torchft_pb2.LighthouseQuorumResponse, answer).quorum
        members = []
        for x in quorum.participants:
            given = json.loads(x.data) if x.data else None
            members.append(
                QuorumMember(x.replica_id, x.address, x.store_address, x.step, x.world_size, x.shrink_only, given)
            )
        return LighthouseQuorum(quorum.quorum_id, members, quorum.created)

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        call = self._channel.unary_unary("/torchft.LighthouseService/Heartbeat")
        request = torchft_pb2.LighthouseHeartbeatRequest(replica_id=replica_id)
        answer_of(call, request, timeout.total_seconds(), self._metadata)

    def close(self) -> None:
        self._channel.close()


class LighthouseServer:
    """A lighthouse in a thread of this process. `bind`: "host:port"; port 0: any free one. `state`: its state file; None: keep the state
    only in memory. `observer`: receives every event of its state machine with the effects.

    Without `token` and `insecure` it listens only on loopback, whatever address `bind` has, and logs a warning if that is not loopback.
    Raises ValueError if it cannot listen.
    """

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int = 100,
        quorum_tick_ms: int = 100,
        heartbeat_timeout_ms: int = 5000,
        *,
        token: str = "",
        insecure: bool = False,
        state: Path | None = None,
        observer: Observer | None = None,
    ) -> None:
        access = Access(token, insecure)
        asked = Endpoint.parse(bind, "bind")
        safe = asked.loopback or token or insecure
        at = [asked] if safe else endpoints(None, asked.port, access)
        if not safe:
            log.warning(
                "LighthouseServer(bind=%r) listens on localhost only: give it a token, or insecure=True, for groups on other machines",
                bind,
            )
        config = LighthouseConfig(
            min_replicas=min_replicas,
            join_timeout_s=join_timeout_ms / 1000,
            tick_s=quorum_tick_ms / 1000,
            times=m.Timeouts(heartbeat_timeout_s=heartbeat_timeout_ms / 1000),
        )
        started: Future[int] = Future()
        self._host = asked.host if safe and not asked.wildcard else socket.gethostname() if safe else "localhost"
        run = self._run(LighthouseOptions(config, at, access, state), observer, started)
        self._thread = threading.Thread(target=asyncio.run, args=(run,), name="lighthouse", daemon=True)
        self._thread.start()
        self._port = started.result()

    def address(self) -> str:
        """Returns http://host:port."""
        return f"http://{Endpoint(self._host, self._port)}"

    def shutdown(self) -> None:
        """Fails pending calls, and closes the port. May be called twice."""
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=10)

    async def _run(self, options: LighthouseOptions, observer: Observer | None, started: Future[int]) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with serve(options, observer=observer) as (service, port):
                started.set_result(port)
                await until_stopped(service.driver, self._stop)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)
