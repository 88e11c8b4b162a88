"""A replica group server's connection to the lighthouse: quorum requests, the Watch stream with heartbeats, and the resulting events.

The lighthouse may be restarted: requests then fail at once and the machine repeats them; the stream is reopened here.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from ft.protocol import messages as m
from ft.rpc import codec
from ft.rpc.access import Access, Endpoint, Tls
from ft.rpc.generated import pharos_pb2
from ft.rpc.serving import MAX_MESSAGE

CALL_S = 120.0  # timeout of one try of a quorum request
LEAVE_S = 1.0  # timeout of Leave
REOPEN_S = (0.2, 0.6)  # range of the pause before the stream is reopened
log = logging.getLogger("pharos.group")

_REFUSALS: dict[grpc.StatusCode, m.RefusalCode] = {
    grpc.StatusCode.ABORTED: "LOST",
    grpc.StatusCode.INVALID_ARGUMENT: "INVALID_ARGUMENT",
    grpc.StatusCode.ALREADY_EXISTS: "ALREADY_EXISTS",
    grpc.StatusCode.FAILED_PRECONDITION: "FAILED_PRECONDITION",
    grpc.StatusCode.UNAUTHENTICATED: "FAILED_PRECONDITION",  # a retry would not help, so the ranks get the reason
}


def channel(address: str, access: Access, *, aio: bool) -> Any:
    """Returns a channel to "http://host:port", "host:port", or with `access.tls` "https://host:port". It connects at its first use, and
    reconnects within a second."""
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE * 4),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5000),  # in spite of its name, the timeout of one attempt
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.dns_min_time_between_resolutions_ms", 1000),  # default: a new address is found after half a minute
        ("grpc.enable_http_proxy", 0),  # connections inside a job never use an HTTP proxy
        ("grpc.use_local_subchannel_pool", 1),
    ]
    place, module = str(Endpoint.parse(address, "address")), grpc.aio if aio else grpc
    if not address.startswith("https://"):
        return module.insecure_channel(place, options=options)
    cert, key, ca = (access.tls or Tls()).read()
    return module.secure_channel(place, grpc.ssl_channel_credentials(ca, key, cert), options=options)


class LighthouseConnection:
    """A group server's connection to a lighthouse: at most one quorum request, and one task that shows that the group is alive. `on_event`
    gets every event, `on_operator_order` every order of an operator; `spawn` starts tasks and handles their errors. `call_s`: timeout of a
    quorum request, after which it is sent again, as it only waits for other groups. For one loop only."""

    call_s = CALL_S

    def __init__(
        self,
        address: str,
        access: Access,
        on_event: Callable[[m.Event], None],
        spawn: Callable[[Any], asyncio.Task[Any]],
        on_operator_order: Callable[[pharos_pb2.Order], None],
    ) -> None:
        self._on_event, self._spawn, self._on_operator_order = on_event, spawn, on_operator_order
        self._channel, self._metadata = channel(address, access, aio=True), access.metadata()
        self._request: asyncio.Task[None] | None = None
        self._presence: asyncio.Task[None] | None = None

    def call(self, call: m.Call, delay_s: float) -> None:
        """Sends a quorum request after `delay_s`, in place of the one before."""

        async def ask() -> None:
            if delay_s:
                await asyncio.sleep(delay_s)
            await self._ask(call)

        if self._request:
            self._request.cancel()
        self._request = self._spawn(ask())

    async def _ask(self, call: m.Call) -> None:
        """Feeds the event of an answer or failure. A request that reaches its timeout waits for other groups, and is sent again."""
        event: m.Event | None = None
        while event is None:
            try:
                event = await self._request_quorum(call)
            except grpc.RpcError as error:  # noqa: PERF203 (a try takes two minutes)
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    event = m.LighthouseFailed(status_of(error))
        self._on_event(event)

    async def _request_quorum(self, call: m.Call) -> m.Event:
        """Sends a quorum request, and returns the event of its answer or refusal. Raises grpc.RpcError."""
        raise NotImplementedError

    def open_stream(
        self, replica_id: str, settled: Callable[[], int], is_stopped: Callable[[], bool] = lambda: False
    ) -> None:
        """Opens a stream in place of the one before, and reopens it when it breaks. `settled`: returns the newest settled step.
        `is_stopped`: returns True while the group is to send no heartbeat, for a connection that sends them without `send`."""
        self.close_stream()
        self._presence = self._spawn(self._keep_open(replica_id, settled, is_stopped))

    async def _keep_open(self, replica_id: str, settled: Callable[[], int], is_stopped: Callable[[], bool]) -> None:
        """Shows the lighthouse that the group is alive, until it is cancelled."""
        raise NotImplementedError

    async def send(self, **up: Any) -> None:
        """Sends a heartbeat (`report`) or an event for the dashboard (`timeline_event`), if a stream is open."""

    async def leave(self, replica_id: str, *, clean: bool, reason: str, finished: bool = False) -> None:
        """Announces that the group leaves, if the lighthouse can be reached; else the lighthouse notices that stream or heartbeats end."""

    def close_stream(self) -> None:
        """Closes the stream: for the lighthouse this group is lost until a stream is opened again."""
        if self._presence:
            self._presence.cancel()

    async def close(self) -> None:
        for task in (self._request, self._presence):
            if task:
                task.cancel()
        await self._channel.close()


class PharosConnection(LighthouseConnection):
    """Connection to a Pharos lighthouse."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._static_quorum = codec.StaticQuorum()
        self._quorum: m.Quorum | None = None
        self._stream: Any = None  # the open stream, once its hello is sent
        self._writing = asyncio.Lock()

    async def _request_quorum(self, call: m.Call) -> m.Event:
        static_quorum, message = self._static_quorum, codec.to_message(call)
        request = pharos_pb2.QuorumRequest(call=message, static_quorum_id=static_quorum.id).SerializeToString()
        try:
            reply = await self._unary("/pharos.Lighthouse/Quorum", request, self.call_s)
            return self._read(codec.parse(pharos_pb2.QuorumReply, reply), static_quorum)
        except grpc.RpcError as error:
            if refusal := _REFUSALS.get(error.code()):
                return m.LighthouseRefused(call.member.replica_id, refusal, str(error.details()))
            raise
        except ValueError as error:
            return m.LighthouseFailed(str(error))

    def _read(self, reply: pharos_pb2.QuorumReply, static_quorum: codec.StaticQuorum) -> m.Event:
        which = reply.WhichOneof("answer")
        if which == "restore":
            return m.LighthouseRequiresRestore(reply.restore.settled)
        times = codec.from_message(m.Timeouts, reply.times) if reply.HasField("times") else None
        limits = codec.from_message(m.JobLimits, reply.limits) if reply.HasField("limits") else None
        quorum = static_quorum.complete(reply.dynamic) if which == "dynamic" else codec.quorum_from(reply.quorum)
        if self._quorum is None or quorum.quorum_id >= self._quorum.quorum_id:
            self._static_quorum = static_quorum if which == "dynamic" else codec.StaticQuorum.of(quorum)
            self._quorum = quorum
        return m.LighthouseAnswered(quorum, times, limits)

    async def leave(self, replica_id: str, *, clean: bool, reason: str, finished: bool = False) -> None:
        leave = codec.to_message(m.Leave(replica_id, clean, reason[:500], finished)).SerializeToString()
        try:
            await self._unary("/pharos.Lighthouse/Leave", leave, LEAVE_S)
        except grpc.RpcError as error:
            log.warning("the lighthouse could not be notified that this group leaves: %s", status_of(error))

    def _unary(self, path: str, request: bytes, timeout_s: float) -> Any:
        return self._channel.unary_unary(path)(request, timeout=timeout_s, metadata=self._metadata)

    async def _keep_open(self, replica_id: str, settled: Callable[[], int], is_stopped: Callable[[], bool]) -> None:
        logged = ""
        while True:
            stream = self._channel.stream_stream("/pharos.Lighthouse/Watch")(metadata=self._metadata)
            try:
                quorum_id, epoch = (self._quorum.quorum_id, self._quorum.epoch) if self._quorum else (0, "")
                hello = pharos_pb2.Hello(replica_id=replica_id, quorum_id=quorum_id, settled=settled(), epoch=epoch)
                await self.write(stream, pharos_pb2.Up(hello=hello))
                self._stream = stream
                while (data := await stream.read()) is not grpc.aio.EOF:
                    await self._on_message(data, stream)
                why = "it was closed"
            except grpc.RpcError as error:
                why = status_of(error)
            except asyncio.InvalidStateError as error:  # it broke before the hello could be written
                why = str(error)
            finally:
                self._stream = None
                stream.cancel()
            if why != logged:
                logged = why
                log.warning("the stream to the lighthouse broke: %s", why)
            await asyncio.sleep(random.uniform(*REOPEN_S))

    async def _on_message(self, data: bytes, stream: Any) -> None:
        try:
            down = codec.parse(pharos_pb2.Down, data)
            which = down.WhichOneof("down")
            if which == "beat_answered":
                self._on_event(m.BeatAnswered(down.beat_answered))
            elif which == "notice":
                self._on_event(codec.notice_from(down.notice))
            elif which == "answer":
                self._on_event(self._read(down.answer, self._static_quorum))
            elif which == "refused":
                self._on_event(codec.from_message(m.LighthouseRefused, down.refused))
            elif which == "waits":
                self._on_event(m.LighthouseWaits(down.waits[: codec.MAX_LINE]))
            elif which == "order":
                self._on_operator_order(down.order)
            elif which == "send_quorum" and self._quorum:
                await self.write(stream, pharos_pb2.Up(quorum=codec.to_message(self._quorum)))
        except ValueError as error:  # of a different version: a reopened stream might begin with it, too
            log.warning("a message of the lighthouse is ignored: %s", error)

    async def send(self, **up: Any) -> None:
        if self._stream is not None:
            # In a task of its own: when the stream is replaced, grpc cancels the task that writes into the old one.
            write = asyncio.ensure_future(self.write(self._stream, pharos_pb2.Up(**up)))
            try:
                await asyncio.wait([write])
            finally:
                write.cancel()  # no effect if it is done, else this task was cancelled
            over = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError, asyncio.CancelledError)
            with suppress(*over):  # _keep_open, which reads the stream, handles its end
                write.result()

    async def write(self, stream: Any, up: Any) -> None:
        async with self._writing:
            await stream.write(up.SerializeToString())


def status_of(error: Any) -> str:
    return f"{error.code().name}: {error.details()}"
