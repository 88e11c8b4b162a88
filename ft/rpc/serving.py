"""What the lighthouse and the group server share: routes, limits, and how a failure becomes a gRPC status.

Handlers take and give bytes: an answer for a thousand callers is serialised once, and what is no message is refused in words.
"""

from __future__ import annotations

import asyncio
import resource
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from ft.rpc.access import Access, Endpoint, try_to_listen

MAX_MESSAGE = 16 << 20  # bytes; the quorum of some 50,000 groups, which a group may have to report
MAX_METADATA = 16 << 10
MAX_CONNECTIONS = 16_384
MAX_CALLS = 65_536
FIRST_WORD_S = 10.0  # a stream must say who it is within
OUTBOX = (
    512  # messages that a stream's reader may lag behind; a stream that is opened again starts with all that matters
)
OUTBOX_BYTES = 4 * MAX_MESSAGE

Handler = Callable[[bytes, Any], Awaitable[bytes]]
StreamHandler = Callable[[Any], Awaitable[None]]


class Refused(Exception):
    """A call is answered by a status and a reason."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


def unary(handler: Handler) -> Any:
    async def serve(data: bytes, context: Any) -> bytes:
        try:
            return await handler(data, context)
        except Refused as refused:
            await context.abort(refused.code, refused.reason[:1000])
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:1000])
        raise AssertionError("abort raises")

    return grpc.unary_unary_rpc_method_handler(serve)


def stream(handler: StreamHandler) -> Any:
    """`handler` reads with context.read() and writes through an Outbox."""

    async def serve(_: Any, context: Any) -> None:
        try:
            await handler(context)
        except asyncio.CancelledError:
            return  # the client is gone, or this server is about to be; the handler has tidied up
        except Refused as refused:
            await context.abort(refused.code, refused.reason[:1000])
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:1000])

    return grpc.stream_stream_rpc_method_handler(serve)


async def _deny(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this job has a token, and the call does not carry it")


class Router(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Looks at the token before anything of a call is read."""

    def __init__(self, access: Access, routes: Mapping[str, Any]) -> None:
        """routes: "/package.Service/Method" -> unary(...) or stream(...)."""
        self._access, self._routes = access, routes
        self._denied = grpc.stream_stream_rpc_method_handler(_deny)

    def service(self, details: Any) -> Any:
        handler = self._routes.get(details.method)
        return handler if handler is None or self._access.permits(details.invocation_metadata) else self._denied


def listen(access: Access, routes: Mapping[str, Any], at: Sequence[Endpoint]) -> tuple[grpc.aio.Server, int]:
    """A server that is yet to be started, and its port. With port 0, all of `at` get the same free one.

    Raises ValueError where it cannot listen.
    """
    _raise_file_limit()
    options = [
        ("grpc.so_reuseport", 0),  # or a second server would quietly share the port
        ("grpc.max_receive_message_length", MAX_MESSAGE),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", MAX_METADATA),
        ("grpc.absolute_max_metadata_size", MAX_METADATA),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.max_connection_idle_ms", 300_000),  # without a call; a client connects again by itself
        (
            "grpc.keepalive_time_ms",
            60_000,
        ),  # a host that vanished; who has a stream is noticed by its beats long before
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
    server.add_generic_rpc_handlers((Router(access, routes),))
    port = at[0].port
    for place in at:
        endpoint = Endpoint(place.host, port)
        if not (
            place.port == 0 and endpoint.port
        ):  # the first free port may be taken on the second address: then do without it
            try_to_listen(endpoint)
        try:
            port = _add_port(server, endpoint, access)
        except RuntimeError as error:
            if place is at[0] or place.port:
                raise ValueError(f"--bind {endpoint}: {error}") from None
    return server, port


def _add_port(server: Any, endpoint: Endpoint, access: Access) -> int:
    if access.tls is None:
        return int(server.add_insecure_port(str(endpoint)))
    access.tls.server_context()  # says what is wrong with the files
    cert, key, ca = access.tls.read()
    credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=ca is not None)
    return int(server.add_secure_port(str(endpoint), credentials))


def _raise_file_limit() -> None:
    """A connection is a descriptor, and the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_CONNECTIONS + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


class Pending:
    """A call whose answer comes later, from an effect."""

    def __init__(self) -> None:
        self._answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def give(self, answer: bytes) -> None:
        if not self._answer.done():
            self._answer.set_result(answer)

    def fail(self, refused: Refused) -> None:
        if not self._answer.done():
            self._answer.set_exception(refused)

    async def wait(self, context: Any) -> bytes:
        """A little before the caller's deadline it is told so; torchft's clients look for these very words. Raises Refused."""
        left_s = context.time_remaining()
        if left_s is None:
            return await self._answer
        expired = Refused(grpc.StatusCode.CANCELLED, "Timeout expired")
        timer = asyncio.get_running_loop().call_later(left_s - min(0.2, left_s / 10), self.fail, expired)
        try:
            return await self._answer
        finally:
            timer.cancel()


class Outbox:
    """What is to be written down one stream, in order, by a task of its own. A reader that lags too far behind loses its stream: it gets
    a new one with all that matters, and the server's memory stays bounded."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._messages: deque[bytes] = deque()
        self._bytes = 0
        self._more = asyncio.Event()
        self._reader = asyncio.current_task()  # the handler
        self._writer = asyncio.ensure_future(self._write())
        self._over = False

    def send(self, message: bytes) -> None:
        if self.is_over():
            return
        self._messages.append(message)
        self._bytes += len(message)
        self._more.set()
        if len(self._messages) > OUTBOX or self._bytes > OUTBOX_BYTES:
            self.end()

    async def read(self) -> bytes | None:
        """The next message; None: the stream is over, from either side."""
        if self.is_over():
            return None
        try:
            data = await self._context.read()
        except asyncio.CancelledError:
            if self.is_over():
                return None
            raise
        return None if data is grpc.aio.EOF else data

    def is_over(self) -> bool:
        return self._over

    def end(self) -> None:
        """The handler's next read (the one it waits in, too) says that the stream is over."""
        if not self._over:
            self._over = True
            self._messages.clear()
            self._bytes = 0
            if self._reader is not None and self._reader is not asyncio.current_task():
                self._reader.cancel()

    def close(self) -> None:
        self._writer.cancel()

    async def _write(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            while self._messages:
                message = self._messages.popleft()
                self._bytes -= len(message)
                try:
                    await self._context.write(message)
                except grpc.aio.BaseError:
                    return  # the reader notices that the stream broke
