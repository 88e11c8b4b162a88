"""Replica groups whose ranks, or whose lighthouse, use torchft's protocol.

TorchftGroup answers the ranks like torchft's ManagerServer: it requests one quorum once all ranks have called, and commits if all vote yes.

TorchftConnection connects one of our groups to torchft's lighthouse, as PharosConnection (lighthouse_link.py) does to ours. A member's
state is in `data`, JSON that torchft passes on to all members. That lighthouse sends no notices: a loss is noticed when a reduction fails
or times out, so such a job requests a quorum before each step (every_step), as torchft does. After a restart it numbers quorums from 1
again, while a group's quorum ids must grow (QuorumIds).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import chain
from typing import Any

import grpc

from ft.protocol import messages as m
from ft.protocol.group import GroupConfig
from ft.protocol.rules import reference_state, request_problem
from ft.rpc import codec
from ft.rpc.access import Access
from ft.rpc.driver import now_s
from ft.rpc.generated import torchft_pb2
from ft.rpc.lighthouse_link import LighthouseConnection, channel, status_of
from ft.rpc.serving import CallRefused, Pending, PendingCalls, unary

RETRY_S = 0.1
BEAT_S = 0.1  # seconds between heartbeats, as of torchft's groups
OURS = "pharos"  # key of `data` with the values for which torchft's QuorumMember has no field
IDS = "ids"  # key in it of the member's QuorumIds, which earlier versions lack
MAX_ID = 1 << 62
_FIELDS = ("commit_id", "commit_quorum_id", "writes_checkpoint", "assigned", "assignment_id", "init_sync")
log = logging.getLogger("pharos.group")
Waiting = list[list[Pending]]  # pending calls by rank, the newest last


class TorchftGroup:
    """The gRPC service torchft.ManagerService. `kill`: ends the group. `metadata`: gives a rank's healing address, or raises ValueError."""

    def __init__(
        self,
        config: GroupConfig,
        lighthouse: str,
        access: Access,
        *,
        kill: Callable[[str], None],
        metadata: Callable[[int], str],
        spawn: Callable[[Any], object],
    ) -> None:
        self.config, self._kill, self._heal_address_of, self._spawn = config, kill, metadata, spawn
        self._lighthouse, self._metadata = channel(lighthouse, access, aio=True), access.metadata()
        self._heal_addresses: dict[int, str] = {}  # by rank
        # By joint call (None: a quorum request; a number: the votes on that step) and rank. A rank that stops waiting before all have
        # called was never in the joint call; if a rank calls twice, its newest call that still waits counts.
        self._pending = PendingCalls(lambda key: None)
        self.routes = {
            "/torchft.ManagerService/Quorum": unary(self._on_quorum),
            "/torchft.ManagerService/CheckpointMetadata": unary(self._on_metadata),
            "/torchft.ManagerService/ShouldCommit": unary(self._on_vote),
            "/torchft.ManagerService/Kill": unary(self._on_kill),
        }

    async def _on_quorum(self, data: bytes, context: Any) -> bytes:
        request = codec.parse(torchft_pb2.ManagerQuorumRequest, data)
        left_s = context.time_remaining()
        if left_s is None:
            raise ValueError("missing timeout")
        self._heal_addresses[self._rank(request.group_rank)] = request.checkpoint_metadata
        return await self._join(
            None, request, context, lambda waiting: self._spawn(self._ask(waiting, step=request.step, left_s=left_s))
        )

    async def _on_vote(self, data: bytes, context: Any) -> bytes:
        request = codec.parse(torchft_pb2.ShouldCommitRequest, data)

        def decide(waiting: Waiting) -> None:
            commit = all(calls[-1].request.should_commit for calls in waiting)
            for pending in chain(*waiting):
                pending.give(torchft_pb2.ShouldCommitResponse(should_commit=commit).SerializeToString())

        return await self._join(request.step, request, context, decide)

    async def _join(
        self, voted_step: int | None, request: Any, context: Any, full: Callable[[Waiting], object]
    ) -> bytes:
        """Waits for the reply of a joint call: a quorum request (`voted_step` = None), or the votes on a step. The call that completes it
        calls `full` with the waiting calls, by rank."""
        keys = [(voted_step, rank) for rank in range(self.config.world_size)]
        mine = keys[self._rank(request.group_rank)]

        def feed() -> None:
            # a call that has timed out is removed a moment later
            waiting = [[one for one in self._pending.get(key, ()) if not one.answer.done()] for key in keys]
            if all(waiting):
                for key in keys:
                    del self._pending[key]
                full(waiting)

        return await self._pending.wait(mine, f"rank {mine[1]}", Pending(request=request), feed, context)

    async def _ask(self, waiting: Waiting, *, step: int, left_s: float) -> None:
        """Requests a quorum, and gives all ranks their replies, or the failure at once when no retries are left."""
        requests = [calls[-1].request for calls in waiting]
        member = m.Member(
            self.config.replica_id,
            self.config.address,
            self.config.store_address,
            step,
            self.config.world_size,
            shrink_only=any(one.shrink_only for one in requests),
            commit_failures=max(one.commit_failures for one in requests),
            reconfigure_handles=tuple(one.reconfigure_handle for one in requests),
        )
        try:
            quorum = await self._ask_lighthouse(member, left_s)
            if self.config.replica_id not in quorum.ids:
                raise CallRefused(
                    grpc.StatusCode.NOT_FOUND, f"{self.config.replica_id} is not in quorum {quorum.quorum_id}"
                )
            for rank, calls in enumerate(waiting):
                reply = torchft_reply(quorum, self.config.replica_id, rank, init_sync=requests[rank].init_sync)
                for pending in calls:
                    pending.give(reply.SerializeToString())
            return
        except CallRefused as error:
            refused = error
        except grpc.RpcError as error:
            refused = CallRefused(grpc.StatusCode.UNAVAILABLE, f"the lighthouse did not answer: {error.details()}")
            if error.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
                refused = CallRefused(grpc.StatusCode.CANCELLED, "Timeout expired")
        except ValueError as error:
            refused = CallRefused(grpc.StatusCode.INTERNAL, str(error))
        except Exception as error:  # it ends this joint call, not the group: its ranks may call again
            log.exception("a quorum request of torchft's ranks failed")
            refused = CallRefused(grpc.StatusCode.INTERNAL, repr(error))
        for pending in chain(*waiting):
            pending.fail(refused)

    async def _ask_lighthouse(self, member: m.Member, left_s: float) -> m.Quorum:
        """Requests a quorum; retries (-1: no limit; None: 0, as in torchft) are spread over the ranks' timeout, and never beyond it."""
        retries, loop = self.config.quorum_retries or 0, asyncio.get_running_loop()
        pause_s, end_s = max(RETRY_S, left_s / (retries + 1) if retries > 0 else 0.0), loop.time() + left_s
        while True:
            try:
                return await ask_quorum(self._lighthouse, self._metadata, member, end_s - loop.time())
            except grpc.RpcError:
                if retries == 0 or loop.time() + pause_s >= end_s:
                    raise
            retries -= 1
            await asyncio.sleep(pause_s)

    async def _on_metadata(self, data: bytes, context: Any) -> bytes:
        rank = codec.parse(torchft_pb2.CheckpointMetadataRequest, data).rank
        found = self._heal_addresses[rank] if rank in self._heal_addresses else self._heal_address_of(rank)
        return torchft_pb2.CheckpointMetadataResponse(checkpoint_metadata=found).SerializeToString()

    async def _on_kill(self, data: bytes, context: Any) -> bytes:
        self._kill(f"killed by request: {codec.parse(torchft_pb2.KillRequest, data).msg}")
        return b""

    async def close(self) -> None:
        await self._lighthouse.close()

    def _rank(self, rank: int) -> int:
        if not 0 <= rank < self.config.world_size:
            raise ValueError(f"rank {rank}: this group has ranks 0 to {self.config.world_size - 1}")
        return rank


def torchft_reply(quorum: m.Quorum, replica_id: str, group_rank: int, *, init_sync: bool = True) -> Any:
    """Returns the ManagerQuorumResponse for a rank of torchft's Manager. Only steps decide which group heals, as torchft has no commit IDs.

    Unlike in torchft, *whether* a group heals is the same for all its ranks (at the first step of torchft half of a group's ranks may
    heal). A rank's source rotates by group_rank."""
    me, members = quorum.ids.index(replica_id), quorum.members
    max_step = max(member.step for member in members)
    newest = [rank for rank, member in enumerate(members) if member.step == max_step]
    sources = newest[:1] if init_sync and max_step == 0 else newest
    healing = [rank for rank in range(len(members)) if rank not in sources]
    source_of = {rank: sources[(place + group_rank) % len(sources)] for place, rank in enumerate(healing)}
    source = source_of.get(me)
    handles = [member.reconfigure_handles for member in members]
    return torchft_pb2.ManagerQuorumResponse(
        quorum_id=quorum.quorum_id,
        recover_src_manager_address="" if source is None else members[source].address,
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=tuple(rank for rank in healing if source_of[rank] == me),
        store_address=members[newest[group_rank % len(newest)]].store_address,
        max_step=max_step,
        max_replica_rank=newest.index(me) if me in newest else None,
        max_world_size=len(newest),
        replica_rank=me,
        replica_world_size=len(members),
        heal=source is not None,
        commit_failures=max(member.commit_failures for member in members),
        replica_ids=quorum.ids,
        reconfigure_handles=tuple(h[group_rank] for h in handles) if all(len(h) > group_rank for h in handles) else (),
    )


@dataclass(frozen=True)
class QuorumIds:
    """The newest quorum of a group as torchft's lighthouse numbers it, and as its members do. Each member states its own in a request."""

    offset: int = 0  # is added to the lighthouse's ids
    newest: int = 0  # the sum
    members: str = ""  # hash of the quorum's replica IDs

    @staticmethod
    def after(quorum: m.Quorum, stated: Sequence[QuorumIds]) -> QuorumIds:
        """Returns the ids of a quorum, by those that its members have `stated`, so equal in all. If the lighthouse's id is below an earlier
        one, or the same for other members or after a failure, the lighthouse has begun anew: its ids are then added to the newest."""
        members = hashlib.sha256("/".join(sorted(quorum.ids)).encode()).hexdigest()[:16]
        offset = max((ids.offset for ids in stated), default=0)
        newest = max((ids.newest for ids in stated), default=0)
        is_same = {ids.members for ids in stated if ids.newest == newest} == {members}
        is_same = is_same and not any(member.commit_failures for member in quorum.members)
        if quorum.quorum_id + offset < newest + (not is_same):
            offset = newest
        return QuorumIds(offset, quorum.quorum_id + offset, members)


class TorchftConnection(LighthouseConnection):
    """Connection to torchft's lighthouse, which accepts no reports and no leave: it notices only that heartbeats end."""

    _ids = QuorumIds()

    async def _request_quorum(self, call: m.Call) -> m.Event:
        member = encode_member(call.member, self._ids)
        try:
            quorum, self._ids = decode_quorum(await ask_quorum(self._channel, self._metadata, member, self.call_s))
        except ValueError as error:
            return m.LighthouseRefused(call.member.replica_id, "FAILED_PRECONDITION", str(error))
        # torchft's lighthouse never requires a checkpoint to be loaded
        is_new_job = all(member.void for member in quorum.members)
        return m.LighthouseRequiresRestore(0) if is_new_job else m.LighthouseAnswered(quorum)

    async def _keep_open(self, replica_id: str, settled: Callable[[], int], is_stopped: Callable[[], bool]) -> None:
        """Sends heartbeats, each in a call of its own, as there is no stream; the lighthouse sends nothing but replies."""
        request = torchft_pb2.LighthouseHeartbeatRequest(replica_id=replica_id).SerializeToString()
        call = self._channel.unary_unary("/torchft.LighthouseService/Heartbeat")
        logged = ""
        while True:
            if is_stopped():
                await asyncio.sleep(BEAT_S)
                continue
            sent_s = now_s()
            try:
                await call(request, timeout=5.0, metadata=self._metadata)
                logged = ""
                self._on_event(m.BeatAnswered(sent_s))
            except grpc.RpcError as error:
                if status_of(error) != logged:
                    logged = status_of(error)
                    log.warning("no heartbeat reaches the lighthouse: %s", logged)
            await asyncio.sleep(BEAT_S)


async def ask_quorum(to: Any, metadata: Any, member: m.Member, timeout_s: float) -> m.Quorum:
    """Requests a quorum from a lighthouse with torchft's protocol. Raises grpc.RpcError; ValueError for an invalid reply."""
    request = torchft_pb2.LighthouseQuorumRequest(requester=codec.torchft_member(member)).SerializeToString()
    call = to.unary_unary("/torchft.LighthouseService/Quorum")
    reply = await call(request, timeout=timeout_s, metadata=metadata)
    return codec.quorum_from_torchft(codec.parse(torchft_pb2.LighthouseQuorumResponse, reply).quorum)


def encode_member(member: m.Member, ids: QuorumIds = QuorumIds()) -> m.Member:
    """Returns the member with our own fields in `data`."""
    fields = {name: getattr(member, name) for name in _FIELDS}
    return replace(member, data=json.dumps({OURS: {**fields, IDS: astuple(ids)}}))


def decode_quorum(quorum: m.Quorum) -> tuple[m.Quorum, QuorumIds]:
    """Returns the quorum as our lighthouse would send it, and its ids. Raises ValueError for members that are torchft's."""
    decoded = sorted(map(_member, quorum.members), key=lambda pair: pair[0].replica_id)
    members, ids = tuple(member for member, _ in decoded), QuorumIds.after(quorum, [stated for _, stated in decoded])
    return m.Quorum(ids.newest, members, reference_state(members) or (0, 0, ""), epoch="torchft"), ids


def _member(member: m.Member) -> tuple[m.Member, QuorumIds]:
    try:
        ours = json.loads(member.data)[OURS]
        offset, newest, members = ours.get(IDS, astuple(QuorumIds()))
        if not (isinstance(offset, int) and isinstance(newest, int) and 0 <= offset <= newest < MAX_ID):
            raise ValueError(f"{member.replica_id} states impossible quorum ids: {offset}, {newest}")
        message = codec.to_message(replace(member, data="", **{name: ours[name] for name in _FIELDS}))  # checks types
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"{member.replica_id} is not a group of Pharos: a quorum must not have groups of both torchft and Pharos"
        ) from None
    found = codec.from_message(m.Member, message)
    if problem := request_problem(m.Call(found)):
        raise ValueError(problem)
    return found, QuorumIds(offset, newest, str(members))
