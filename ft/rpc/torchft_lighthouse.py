"""Our own groups under torchft's lighthouse: what Link (lighthouse_link.py) is to ours, over a wire that knows neither streams nor states.

A member's state travels in `data`, the JSON that torchft hands through to all members. Nothing is pushed: a death shows when a reduction
breaks or times out, so a job under torchft's lighthouse asks for a quorum before each step (every_step), as torchft does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc

from ft.protocol import messages as m
from ft.protocol.plan import reference_state
from ft.protocol.rules import validate_request
from ft.rpc import codec
from ft.rpc.access import Access
from ft.rpc.lighthouse_link import CALL_S, TorchftLink, Wire

OURS = "pharos"  # the key of `data` that holds what torchft's QuorumMember has no field for
_FIELDS: dict[str, type] = {
    "commit_id": str,
    "commit_quorum_id": int,
    "writes_checkpoint": bool,
    "dealt": int,
    "deal_id": str,
    "init_sync": bool,
}


class LinkOverTorchft(Wire):
    """The face of Link."""

    def __init__(
        self,
        address: str,
        access: Access,
        hear: Callable[[m.Event], None],
        spawn: Callable[[Any], asyncio.Task[Any]],
        beat_s: float,
    ) -> None:
        super().__init__(hear, spawn)
        self._link, self._beat_s = TorchftLink(address, access), beat_s

    async def _ask(self, call: m.Call) -> None:
        try:
            self._hear(m.LighthouseAnswered(read(await self._link.quorum(write(call.member), CALL_S))))
        except grpc.RpcError as error:
            self._hear(m.LighthouseFailed(f"{error.code().name}: {error.details()}"))
        except ValueError as error:
            self._hear(m.LighthouseRefused(call.member.replica_id, "FAILED_PRECONDITION", str(error)))

    def open_stream(self, replica_id: str, settled: Callable[[], int]) -> None:
        """There is none: beats are calls of their own, and an answer to one is all that is heard."""
        self._stay(self._link.beat_for_ever(replica_id, self._beat_s, lambda at_s: self._hear(m.BeatAnswered(at_s))))

    async def beat(self, report: Any) -> None:
        """Beats go by themselves, and torchft takes no reports."""

    async def tell(self, happened: Any) -> None:
        """torchft's page shows none of it."""

    async def leave(self, replica_id: str, *, clean: bool, reason: str, finished: bool = False) -> None:
        """torchft's lighthouse takes no leave: it notices that the beats end."""

    async def close(self) -> None:
        await super().close()
        await self._link.close()


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
