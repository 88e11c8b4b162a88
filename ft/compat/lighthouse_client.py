"""torchft's LighthouseClient: blocking calls to any lighthouse that speaks torchft's wire."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import grpc

from ft.rpc import codec
from ft.rpc.access import Access
from ft.rpc.clients import answer_of
from ft.rpc.generated import torchft_pb2
from ft.rpc.lighthouse_link import channel


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
    """Client of any lighthouse that speaks torchft's wire. Raises TimeoutError where none answers, RuntimeError where it refuses."""

    def __init__(self, addr: str, connect_timeout: timedelta, *, token: str = "") -> None:
        access = Access(token)
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
        """Waits until there is a quorum with `replica_id` in it. `data` goes to all members, as JSON."""
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
