"""A group whose ranks, or whose lighthouse, speak torchft.

TorchftGroup answers the ranks as torchft's ManagerServer does: it asks once when all ranks have asked, and ANDs their votes.

TorchftConnection connects a group of ours to torchft's lighthouse, as PharosConnection (lighthouse_link.py) does to ours. A member's state
travels in `data`, the JSON that torchft hands through to all members. Nothing is pushed: a death shows when a reduction breaks or times
out, so such a job asks for a quorum before each step (every_step), as torchft does.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any

import grpc

from ft.protocol import messages as m
from ft.protocol.group import GroupConfig, replica_rank
from ft.protocol.rules import reference_state, validate_request
from ft.rpc import codec
from ft.rpc.access import Access
from ft.rpc.driver import now_s
from ft.rpc.generated import torchft_pb2
from ft.rpc.lighthouse_link import CALL_S, LighthouseConnection, channel, status_of
from ft.rpc.serving import CallRefused, Pending, PendingCalls, unary

RETRY_S = 0.1
BEAT_S = 0.1  # as torchft's own groups
OURS = "pharos"  # the key of `data` that holds what torchft's QuorumMember has no field for
_FIELDS = ("commit_id", "commit_quorum_id", "writes_checkpoint", "assigned", "assignment_id", "init_sync")
log = logging.getLogger("pharos.group")
Waiting = list[list[Pending]]  # calls that wait for an answer, by rank; of each rank the newest last


class TorchftGroup:
    """torchft.ManagerService. `kill` ends the group; `metadata` tells where a rank of ours serves its state, or raises ValueError;
    `spawn` starts tasks, and hears of what goes wrong in one."""

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
        self.config, self._kill, self._metadata_of, self._spawn = config, kill, metadata, spawn
        self._lighthouse, self._credentials = channel(lighthouse, access, aio=True), access.metadata()
        self._metadata: dict[int, str] = {}
        # By round (None: a quorum; a number: the votes on that step) and rank. A rank that stops waiting before a round is full was never
        # in it; of one that calls twice the newest call that still waits counts.
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
        self._metadata[self._rank(request.group_rank)] = request.checkpoint_metadata
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

    async def _join(self, round_: int | None, request: Any, context: Any, full: Callable[[Waiting], object]) -> bytes:
        """Waits for the answer of a round. The last rank to ask calls `full` with the waiting calls, by rank."""
        keys = [(round_, rank) for rank in range(self.config.world_size)]
        mine = keys[self._rank(request.group_rank)]

        def feed() -> None:
            # A call whose time is over leaves a moment later.
            waiting = [[one for one in self._pending.get(key, ()) if not one.answer.done()] for key in keys]
            if all(waiting):
                for key in keys:
                    del self._pending[key]
                full(waiting)

        return await self._pending.wait(mine, f"rank {mine[1]}", Pending(request=request), feed, context)

    async def _ask(self, waiting: Waiting, *, step: int, left_s: float) -> None:
        """Tells all ranks what came of it; a failure that leaves no try at once, not at their deadlines."""
        asked = [calls[-1].request for calls in waiting]
        member = m.Member(
            self.config.replica_id,
            self.config.address,
            self.config.store_address,
            step,
            self.config.world_size,
            shrink_only=any(one.shrink_only for one in asked),
            commit_failures=max(one.commit_failures for one in asked),
            reconfigure_handles=tuple(one.reconfigure_handle for one in asked),
        )
        try:
            quorum = await self._ask_lighthouse(member, left_s)
            if self.config.replica_id not in quorum.ids:
                raise CallRefused(
                    grpc.StatusCode.NOT_FOUND, f"{self.config.replica_id} is not in quorum {quorum.quorum_id}"
                )
            for rank, calls in enumerate(waiting):
                reply = torchft_reply(quorum, self.config.replica_id, rank, init_sync=asked[rank].init_sync)
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
        except Exception as error:  # it ends this round, not the group: its ranks may ask again
            log.exception("a round of torchft's calls failed")
            refused = CallRefused(grpc.StatusCode.INTERNAL, repr(error))
        for pending in chain(*waiting):
            pending.fail(refused)

    async def _ask_lighthouse(self, member: m.Member, left_s: float) -> m.Quorum:
        """Tries again as often as `retries` says (-1: always), spread over the ranks' time as the peer does, and never beyond it."""
        retries, loop = self.config.retries or 0, asyncio.get_running_loop()
        pause_s, end_s = max(RETRY_S, left_s / (retries + 1) if retries > 0 else 0.0), loop.time() + left_s
        while True:
            try:
                return await ask_quorum(self._lighthouse, self._credentials, member, end_s - loop.time())
            except grpc.RpcError:
                if retries == 0 or loop.time() + pause_s >= end_s:
                    raise
            retries -= 1
            await asyncio.sleep(pause_s)

    async def _on_metadata(self, data: bytes, context: Any) -> bytes:
        rank = codec.parse(torchft_pb2.CheckpointMetadataRequest, data).rank
        found = self._metadata[rank] if rank in self._metadata else self._metadata_of(rank)
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
    """The ManagerQuorumResponse for a rank whose Manager is torchft's. Steps alone count, for it has no commit ids.

    One thing is not as torchft's: *whether* a group heals is the same for all its ranks (at torchft's first step a group may end with half
    of its own and half of another's state). The source of a rank rotates by group_rank. Raises KeyError for a foreign `replica_id`."""
    me, members = replica_rank(quorum, replica_id), quorum.members
    max_step = max(member.step for member in members)
    front = [rank for rank, member in enumerate(members) if member.step == max_step]
    whole = front[:1] if init_sync and max_step == 0 else front
    healing = [rank for rank in range(len(members)) if rank not in whole]
    source_of = {rank: whole[(place + group_rank) % len(whole)] for place, rank in enumerate(healing)}
    source = source_of.get(me)
    handles = [member.reconfigure_handles for member in members]
    return torchft_pb2.ManagerQuorumResponse(
        quorum_id=quorum.quorum_id,
        recover_src_manager_address="" if source is None else members[source].address,
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=tuple(rank for rank in healing if source_of[rank] == me),
        store_address=members[front[group_rank % len(front)]].store_address,
        max_step=max_step,
        max_replica_rank=front.index(me) if me in front else None,
        max_world_size=len(front),
        replica_rank=me,
        replica_world_size=len(members),
        heal=source is not None,
        commit_failures=max(member.commit_failures for member in members),
        replica_ids=quorum.ids,
        reconfigure_handles=tuple(h[group_rank] for h in handles) if all(len(h) > group_rank for h in handles) else (),
    )


class TorchftConnection(LighthouseConnection):
    """Connection to a lighthouse of torchft's, which takes no reports and no leave: it notices that the heartbeats end."""

    async def _ask(self, call: m.Call) -> None:
        try:
            quorum = await ask_quorum(self._channel, self._metadata, write(call.member), CALL_S)
            self._on_event(m.LighthouseAnswered(read(quorum)))
        except grpc.RpcError as error:
            self._on_event(m.LighthouseFailed(status_of(error)))
        except ValueError as error:
            self._on_event(m.LighthouseRefused(call.member.replica_id, "FAILED_PRECONDITION", str(error)))

    async def _keep_open(self, replica_id: str, settled: Callable[[], int]) -> None:
        """There is no stream: heartbeats are calls of their own, and an answer to one is all that is heard."""
        request = torchft_pb2.LighthouseHeartbeatRequest(replica_id=replica_id).SerializeToString()
        call = self._channel.unary_unary("/torchft.LighthouseService/Heartbeat")
        logged = ""
        while True:
            sent_s = now_s()
            try:
                await call(request, timeout=5.0, metadata=self._metadata)
                logged = ""
                self._on_event(m.BeatAnswered(sent_s))
            except grpc.RpcError as error:
                if status_of(error) != logged:
                    logged = status_of(error)
                    log.warning("no beat reaches the lighthouse: %s", logged)
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
    """Reads a quorum as our lighthouse would have answered it. Raises ValueError for members that are not ours."""
    members = tuple(sorted(map(_member, quorum.members), key=lambda member: member.replica_id))
    return m.Quorum(quorum.quorum_id, members, reference_state(members) or (0, 0, ""), epoch="torchft")


def _member(member: m.Member) -> m.Member:
    try:
        ours = json.loads(member.data)[OURS]
        message = codec.to_message(replace(member, data="", **{name: ours[name] for name in _FIELDS}))  # checks types
    except (json.JSONDecodeError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"{member.replica_id} is not one of Pharos's groups: a quorum holds torchft's or ours, never both"
        ) from None
    found = codec.from_message(m.Member, message)
    if problem := validate_request(m.Call(found)):
        raise ValueError(problem[1])
    return found
