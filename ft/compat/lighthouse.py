"""Our own groups under torchft's lighthouse: what Link (lighthouse_link.py) is to ours, over a wire without streams and states.

A member's state travels in `data`, the JSON that torchft hands through to all members. Nothing is pushed: a death shows when a reduction
breaks or times out, so a job under torchft's lighthouse asks for a quorum before each step (every_step), as torchft does.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc

from ft.protocol import messages as m
from ft.protocol.plan import reference_state
from ft.protocol.rules import validate_request
from ft.rpc import codec
from ft.rpc.driver import now_s
from ft.rpc.generated import torchft_pb2
from ft.rpc.lighthouse_link import CALL_S, Wire, status_of

BEAT_S = 0.1  # as torchft's own groups
OURS = "pharos"  # the key of `data` that holds what torchft's QuorumMember has no field for
_FIELDS: dict[str, type] = {
    "commit_id": str,
    "commit_quorum_id": int,
    "writes_checkpoint": bool,
    "dealt": int,
    "deal_id": str,
    "init_sync": bool,
}
log = logging.getLogger("pharos.group")


class LinkOverTorchft(Wire):
    """To a lighthouse of torchft's, which takes no reports and no leave: it notices that the heartbeats end."""

    async def _ask(self, call: m.Call) -> None:
        try:
            quorum = await ask_quorum(self._channel, self._metadata, write(call.member), CALL_S)
            self._hear(m.LighthouseAnswered(read(quorum)))
        except grpc.RpcError as error:
            self._hear(m.LighthouseFailed(status_of(error)))
        except ValueError as error:
            self._hear(m.LighthouseRefused(call.member.replica_id, "FAILED_PRECONDITION", str(error)))

    def open_stream(self, replica_id: str, settled: Callable[[], int]) -> None:
        """There is none: heartbeats are calls of their own, and an answer to one is all that is heard."""
        self._stay(self._beat_for_ever(replica_id))

    async def _beat_for_ever(self, replica_id: str) -> None:
        request = torchft_pb2.LighthouseHeartbeatRequest(replica_id=replica_id).SerializeToString()
        call = self._channel.unary_unary("/torchft.LighthouseService/Heartbeat")
        said = ""
        while True:
            sent_s = now_s()
            try:
                await call(request, timeout=5.0, metadata=self._metadata)
                said = ""
                self._hear(m.BeatAnswered(sent_s))
            except grpc.RpcError as error:
                if status_of(error) != said:
                    said = status_of(error)
                    log.warning("no beat reaches the lighthouse: %s", said)
            await asyncio.sleep(BEAT_S)


async def ask_quorum(to: Any, metadata: Any, member: m.Member, timeout_s: float) -> m.Quorum:
    """The quorum that a torchft lighthouse answers. Raises grpc.RpcError; ValueError for an answer that is none."""
    request = torchft_pb2.LighthouseQuorumRequest(requester=codec.torchft_member(member)).SerializeToString()
    call = to.unary_unary("/torchft.LighthouseService/Quorum")
    reply = await call(request, timeout=timeout_s, metadata=metadata)
    return codec.quorum_from_torchft(codec.parse(torchft_pb2.LighthouseQuorumResponse, reply).quorum)


def write(member: m.Member) -> m.Member:
    """With our part of it in `data`."""
    return replace(member, data=json.dumps({OURS: {name: getattr(member, name) for name in _FIELDS}}))


def read(quorum: m.Quorum) -> m.Quorum:
    """As our lighthouse would have answered. Raises ValueError for members that are not ours."""
    members = tuple(sorted(map(_member, quorum.members), key=lambda member: member.replica_id))
    return m.Quorum(quorum.quorum_id, members, reference_state(members) or (0, 0, ""), epoch="torchft")


def _member(member: m.Member) -> m.Member:
    try:
        ours = json.loads(member.data)[OURS]
        values = {name: ours[name] for name in _FIELDS}
        if any(type(value) is not _FIELDS[name] for name, value in values.items()):
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"{member.replica_id} is not one of Pharos's groups: a quorum holds torchft's or ours, never both"
        ) from None
    found = codec.from_message(m.Member, codec.to_message(replace(member, data="", **values)))
    if problem := validate_request(m.Call(found)):
        raise ValueError(problem[1])
    return found
