"""The gRPC server of the lighthouse and of a replica group: routes, limits, and the status of a failure.

Handlers take and return bytes: so an answer for a thousand callers is serialised once, and invalid bytes are refused with a reason.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio

from ft.descriptors import raise_limit
from ft.rpc.access import Access, Endpoint, try_to_listen

MAX_MESSAGE = 16 << 20  # bytes of a message: a quorum of some 50,000 groups, which a group may have to report
MAX_CONNECTIONS = 16_384
MAX_CALLS = 65_536
CALLS_PER_KEY = 64  # waiting calls of one caller, which needs one, and one or two more for late copies
MAX_STATUS_CHARS = 1000  # of the text of a gRPC status
OTHER_FILES = 512  # descriptors kept free of gRPC connections; the dashboard's own limit is far below this
HELLO_S = 10.0  # timeout for the first byte of a connection, and for the hello of a stream
STOP_S = 2.0  # time in which calls must end when the server stops
SWEEP_S = 0.1  # longest interval of searches for waiting calls whose deadline has come
OUTBOX = 512  # messages that a stream's reader may lag behind; a reopened stream begins with all that is needed
OUTBOX_BYTES = 4 * MAX_MESSAGE
log = logging.getLogger("pharos.serving")

Handler = Callable[[bytes, Any], Awaitable[bytes]]
Route = Callable[["Server"], Any]


class CallRefused(Exception):
    """Ends a call with a gRPC status and a reason."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason[:MAX_STATUS_CHARS]


STOPS = CallRefused(grpc.StatusCode.UNAVAILABLE, "this server stops")


def refused(code: str, reason: str) -> CallRefused:
    """Returns the gRPC status for a code of ft.protocol's machines. LOST and STALE (the id or attempt is over) become ABORTED."""
    return CallRefused(grpc.StatusCode.ABORTED if code in ("LOST", "STALE") else grpc.StatusCode[code], reason)


def unary(handler: Handler) -> Route:
    return lambda server: grpc.unary_unary_rpc_method_handler(server.serving(handler))


def stream(handler: Callable[[Outbox], Awaitable[None]]) -> Route:
    """Returns the route of a bidirectional stream. `handler` reads and writes through an Outbox, which is closed when it returns."""

    async def open_and_handle(_: Any, context: Any) -> None:
        # Sent now, not with the first message: if a status follows while that is being sent, both would contain the metadata.
        await context.send_initial_metadata(())
        outbox = Outbox(context)
        try:
            await handler(outbox)
        finally:
            outbox.close()

    return lambda server: grpc.stream_stream_rpc_method_handler(server.serving(open_and_handle))


class Server(grpc.GenericRpcHandler):  # type: ignore[misc]
    """grpc.aio's server with routes. Checks the token before it reads a request. When it stops, callers get UNAVAILABLE."""

    room: int | None = None  # most connections; None: as many as this process can have descriptors for
    hello_s = HELLO_S

    def __init__(
        self,
        access: Access,
        routes: Mapping[str, Route],
        at: Sequence[Endpoint],
        *,
        what: str = "--bind",
        on_denied: Callable[[], None] = lambda: None,
    ) -> None:
        """Binds the addresses `at`; `start` begins to serve. With port 0, all of them get the same free port, `self.port`. `routes`:
        "/package.Service/Method" -> unary(...) or stream(...). Raises ValueError, which names `what`. `on_denied`: called for
        each call without the token."""
        self._access, self._routes, self._on_denied = access, routes, on_denied
        self._handlers: dict[str, Any] = {}  # made at the first call, since `routes` may be filled after this
        self._tasks: set[asyncio.Task[Any]] = set()  # tasks of the calls in progress
        self._stops = False
        self.max_connections = (self.room or room_for_connections()) // len(at)  # at one address
        options = [
            ("grpc.so_reuseport", 0),  # default: a second server would share the port without an error
            ("grpc.max_receive_message_length", MAX_MESSAGE),  # before and after decompression; headers have 16 KiB
            ("grpc.max_send_message_length", -1),
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            # All groups may call at once while the loop is busy; by default grpc cancels calls when 1,000 wait.
            ("grpc.server.max_pending_requests", MAX_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
            ("grpc.server_handshake_timeout_ms", int(self.hello_s * 1000)),
            ("grpc.max_connection_idle_ms", 300_000),  # without a call; clients reconnect at their next call
            ("grpc.keepalive_time_ms", 60_000),  # finds hosts that vanished; with a stream, heartbeats find them sooner
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((self,))
        self.port = at[0].port
        for place in at:
            endpoint = Endpoint(place.host, self.port)
            if place.port or not self.port:  # else: a free port that is used at the second address is not an error
                try_to_listen(endpoint, what)
            try:
                if access.tls:
                    cert, key, ca = access.tls.read()
                    credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=ca is not None)
                    self.port = self._server.add_secure_port(str(endpoint), credentials)
                else:
                    self.port = self._server.add_insecure_port(str(endpoint))
            except RuntimeError as error:
                if place is at[0] or place.port:
                    raise ValueError(f"{what} {endpoint}: {error}") from None

    def service(self, details: Any) -> Any:
        if not self._access.permits(details.invocation_metadata):
            self._on_denied()
            return grpc.stream_stream_rpc_method_handler(_deny)
        handler = self._handlers.get(details.method)
        if handler is None and details.method in self._routes:
            handler = self._handlers[details.method] = self._routes[details.method](self)
        return handler

    def serving(self, handler: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """Wraps `handler` so that what it raises becomes the call's status. Returns a function, since grpc calls other callables slowly."""

        async def serve(data: Any, context: Any) -> Any:
            task = asyncio.current_task()
            assert task
            self._tasks.add(task)
            try:
                if self._stops:  # the call arrived before the stop, and runs after it
                    raise STOPS
                return await handler(data, context)
            except asyncio.CancelledError:
                if not self._stops:
                    raise  # the caller is gone
                refused = STOPS
            except CallRefused as error:
                refused = error
            except ValueError as error:
                refused = CallRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            finally:
                self._tasks.discard(task)
            await context.abort(refused.code, refused.reason)

        return serve

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        stopped = asyncio.ensure_future(self._server.stop(STOP_S))  # from here on no call is accepted
        await asyncio.sleep(0)
        self._stops = True
        for task in self._tasks:
            task.cancel()
        await stopped


async def _deny(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this job has a token, and the call does not contain it")


def room_for_connections(
    limits: tuple[int, int] | None = None, set_limits: Callable[[int, tuple[int, int]], None] = resource.setrlimit
) -> int:
    """Raises this process's limit of descriptors (`limits`: soft, hard). Returns the number of connections that it can then have."""
    limits = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = raise_limit(MAX_CONNECTIONS + OTHER_FILES, limits, set_limits)
    if soft != limits[0]:
        log.info("the limit of open files is raised from %d to %d", limits[0], soft)
    is_infinite = soft == resource.RLIM_INFINITY
    room = MAX_CONNECTIONS if is_infinite else min(MAX_CONNECTIONS, max(16, soft - OTHER_FILES))
    if room < MAX_CONNECTIONS:
        log.warning("at most %d connections: the limit of open files (ulimit -n) is %d", room, soft)
    return room


class Pending:
    """A call that an effect answers later. `size`: in bytes. `static_quorum_id`: the caller's; None: torchft's."""

    def __init__(self, size: int = 0, static_quorum_id: str | None = "", request: Any = None) -> None:
        self.size, self.static_quorum_id, self.request = size, static_quorum_id, request
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.due_s = math.inf  # on the loop's clock

    def give(self, answer: bytes) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, refused: CallRefused) -> None:
        if not self.answer.done():
            self.answer.set_exception(refused)

    def expire(self) -> None:
        self.fail(CallRefused(grpc.StatusCode.CANCELLED, "Timeout expired"))  # torchft's clients parse this string


class PendingCalls(dict[Any, list[Pending]]):
    """Waiting calls by key; effects pop those that they answer. `cancelled` gets a key whose last caller is gone. `swept`: the owner calls
    `expire` at least every SWEEP_S, which costs less than a timer for each call."""

    def __init__(self, cancelled: Callable[[Any], None], *, swept: bool = False) -> None:
        super().__init__()
        self._cancelled, self._swept = cancelled, swept
        self.size = 0  # bytes of all waiting calls

    def expire(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for pending in (pending for calls in self.values() for pending in calls):
            if pending.due_s <= now_s:
                pending.expire()

    async def wait(
        self, key: Any, caller: str, pending: Pending, feed: Callable[[], None], context: Any = None
    ) -> bytes:
        """Calls `feed` and waits for the answer. `context`: of a torchft call, which is failed shortly before its deadline; Pharos callers
        cancel their calls themselves. Raises CallRefused, also if CALLS_PER_KEY calls of this key are waiting already."""
        if len(self.get(key, ())) >= CALLS_PER_KEY:
            raise refused("RESOURCE_EXHAUSTED", f"{CALLS_PER_KEY} calls of {caller} are waiting already")
        self.setdefault(key, []).append(pending)
        self.size += pending.size
        timer, left_s = None, context and context.time_remaining()
        if left_s is not None:
            loop = asyncio.get_running_loop()
            pending.due_s = loop.time() + left_s - min(0.2, left_s / 10)
            if not self._swept or left_s < 20 * SWEEP_S:
                timer = loop.call_at(pending.due_s, pending.expire)
        try:
            feed()
            return await pending.answer
        finally:
            self.size -= pending.size
            if timer:
                timer.cancel()
            calls = self.get(key, [])
            if pending in calls:  # no effect answered it: the caller is gone, or its deadline has passed
                calls.remove(pending)
                if not calls:
                    del self[key]
                    self._cancelled(key)


class Outbox:
    """Queue of messages down one stream, in order. Bounded: the stream of a reader that lags is ended."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._bytes = 0  # bytes of the queued messages
        self._reader = asyncio.current_task()  # task of the handler
        self._writer = asyncio.ensure_future(self._write())
        self.over = False
        self.answered_s = -math.inf  # set by the owner: Report.sent_s of the newest report that was answered
        self.wait_reason = ""  # set by the owner: newest reason of a wait that was sent
        self._too_slow: CallRefused | None = None

    def send(self, message: bytes) -> None:
        if self.over:
            return
        self._messages.put_nowait(message)
        self._bytes += len(message)
        if self._messages.qsize() > OUTBOX or self._bytes > OUTBOX_BYTES:
            waiting = f"{self._messages.qsize()} messages of {self._bytes} bytes in all have not been read"
            self._too_slow = CallRefused(grpc.StatusCode.RESOURCE_EXHAUSTED, f"the reader is too slow: {waiting}")
            self.end()

    async def read_hello(self) -> bytes:
        """Returns the first message. Raises ValueError if none comes within HELLO_S; CallRefused as `read`."""
        try:
            return await asyncio.wait_for(self.read(), HELLO_S) or b""
        except (TimeoutError, asyncio.TimeoutError):
            raise ValueError(f"a stream must begin with a hello within {HELLO_S:g} s") from None

    async def read(self) -> bytes | None:
        """Returns the next message; None if either side has ended the stream. Raises CallRefused if the reader was too slow."""
        data: Any = grpc.aio.EOF
        try:
            if not self.over:
                data = await self._context.read()
        except asyncio.CancelledError:
            if not self.over:
                raise
        if self._too_slow:
            raise self._too_slow
        return None if data is grpc.aio.EOF else data

    def end(self) -> None:
        """Ends the stream: the handler's current or next `read` returns None."""
        if not self.over:
            self.over, self._messages = True, asyncio.Queue()
            if self._reader is not None and self._reader is not asyncio.current_task():
                self._reader.cancel()

    def close(self) -> None:
        self._writer.cancel()

    async def _write(self) -> None:
        with suppress(grpc.aio.BaseError):  # `read` notices a broken stream
            while not self.over:
                message = await self._messages.get()
                self._bytes -= len(message)
                await self._context.write(message)
