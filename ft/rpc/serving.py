"""Shared by the lighthouse and the group server: routes, limits, and the gRPC status of a failure.

Handlers take and give bytes: an answer for a thousand callers is serialised once, and what is no message is refused in words.
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

from ft.rpc.access import Access, Endpoint, try_to_listen

MAX_MESSAGE = 16 << 20  # bytes; the quorum of some 50,000 groups, which a group may have to report
MAX_CONNECTIONS = 16_384
MAX_CALLS = 65_536
CALLS_PER_KEY = 64  # a caller has one, and a late copy or two
MAX_REASON = 1000  # characters
OTHER_FILES = 512  # descriptors kept free of connections; the status page has its own bound, far below this
HELLO_S = 10.0  # until the first byte of a connection and the hello of a stream
STOP_S = 2.0  # that calls have to end in when the server stops
SWEEP_S = 0.1  # at most, between two searches for calls that are due
OUTBOX = 512  # messages a stream's reader may lag behind; a stream that is opened again starts with all that matters
OUTBOX_BYTES = 4 * MAX_MESSAGE
log = logging.getLogger("pharos.serving")

Handler = Callable[[bytes, Any], Awaitable[bytes]]
Route = Callable[["Server"], Any]


class CallRefused(Exception):
    """A call is answered by a status and a reason."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason[:MAX_REASON]


STOPS = CallRefused(grpc.StatusCode.UNAVAILABLE, "this server stops")


def refused(code: str, reason: str) -> CallRefused:
    """The status for a code of a machine of ft.protocol. LOST, STALE: that id or attempt is over, and another one may be asked for."""
    return CallRefused(grpc.StatusCode.ABORTED if code in ("LOST", "STALE") else grpc.StatusCode[code], reason)


def unary(handler: Handler) -> Route:
    return lambda server: grpc.unary_unary_rpc_method_handler(server.serving(handler))


def stream(handler: Callable[[Outbox], Awaitable[None]]) -> Route:
    """`handler` reads and writes through an Outbox, which is closed after it."""

    async def open_and_handle(_: Any, context: Any) -> None:
        # Now, and not with the first message: that may be on its way when a status has to go, and both would carry it.
        await context.send_initial_metadata(())
        outbox = Outbox(context)
        try:
            await handler(outbox)
        finally:
            outbox.close()

    return lambda server: grpc.stream_stream_rpc_method_handler(server.serving(open_and_handle))


class Server(grpc.GenericRpcHandler):  # type: ignore[misc]
    """grpc.aio's server. Looks at the token before anything of a call is read; tells its end to callers, where grpc would print a stack."""

    room: int | None = None  # for connections; by default for as many as this process can hold
    hello_s = HELLO_S

    def __init__(self, access: Access, routes: Mapping[str, Route], at: Sequence[Endpoint]) -> None:
        """Listens; `start` starts it. With port 0, all of `at` get the same free one, `port`. routes: "/package.Service/Method" ->
        unary(...) or stream(...). Raises ValueError."""
        self._access, self._routes = access, routes
        self._handlers: dict[str, Any] = {}  # made at the first call: a group's routes are known only after its port
        self._tasks: set[asyncio.Task[Any]] = set()  # of the calls that it is in the middle of
        self._stops = False
        self.connections = (self.room or room_for_connections()) // len(at)  # at one address
        options = [
            ("grpc.so_reuseport", 0),  # or a second server would quietly share the port
            ("grpc.max_receive_message_length", MAX_MESSAGE),  # before and after decompression; of headers: 16 KiB
            ("grpc.max_send_message_length", -1),
            ("grpc.max_allowed_incoming_connections", self.connections),
            # All may call at once while the loop is busy; of more than 1,000 that wait for it, grpc would cancel some.
            ("grpc.server.max_pending_requests", MAX_CALLS),
            ("grpc.server.max_pending_requests_hard_limit", MAX_CALLS),
            ("grpc.server_handshake_timeout_ms", int(self.hello_s * 1000)),
            ("grpc.max_connection_idle_ms", 300_000),  # without a call; a client connects again by itself
            ("grpc.keepalive_time_ms", 60_000),  # for a host that vanished; with a stream, beats show it long before
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ("grpc.http2.max_ping_strikes", 0),
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=MAX_CALLS)
        self._server.add_generic_rpc_handlers((self,))
        self.port = at[0].port
        for place in at:
            endpoint = Endpoint(place.host, self.port)
            if place.port or not self.port:  # else the free port may be taken on the second address: then do without it
                try_to_listen(endpoint)
            try:
                if access.tls is None:
                    self.port = self._server.add_insecure_port(str(endpoint))
                    continue
                access.tls.server_context()  # says what is wrong with the files
                cert, key, ca = access.tls.read()
                credentials = grpc.ssl_server_credentials([(key, cert)], ca, require_client_auth=ca is not None)
                self.port = self._server.add_secure_port(str(endpoint), credentials)
            except RuntimeError as error:
                if place is at[0] or place.port:
                    raise ValueError(f"--bind {endpoint}: {error}") from None

    def service(self, details: Any) -> Any:
        if not self._access.permits(details.invocation_metadata):
            return grpc.stream_stream_rpc_method_handler(_deny)
        handler = self._handlers.get(details.method)
        if handler is None and details.method in self._routes:
            handler = self._handlers[details.method] = self._routes[details.method](self)
        return handler

    def serving(self, handler: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
        """`handler` as grpc is to call it: what it raises becomes the call's status. A function: grpc is slow with other callables."""

        async def serve(data: Any, context: Any) -> Any:
            task = asyncio.current_task()
            assert task
            self._tasks.add(task)
            try:
                if self._stops:  # the call was on its way
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
        stopped = asyncio.ensure_future(self._server.stop(STOP_S))  # no new calls from here on
        await asyncio.sleep(0)
        self._stops = True
        for task in self._tasks:
            task.cancel()
        await stopped


async def _deny(_: Any, context: Any) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "this job has a token, and the call does not carry it")


def room_for_connections(
    limits: tuple[int, int] | None = None, set_limits: Callable[[int, tuple[int, int]], None] = resource.setrlimit
) -> int:
    """The number of connections that this process can hold, after raising its limit of descriptors (`limits`: soft and hard)."""
    wanted, infinite = MAX_CONNECTIONS + OTHER_FILES, resource.RLIM_INFINITY
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == infinite else min(wanted, hard)
    if soft != infinite and soft < most:
        with suppress(ValueError, OSError):
            set_limits(resource.RLIMIT_NOFILE, (most, hard))
            log.info("the limit of open files is raised from %d to %d", soft, most)
            soft = most
    room = MAX_CONNECTIONS if soft == infinite else min(MAX_CONNECTIONS, max(16, soft - OTHER_FILES))
    if room < MAX_CONNECTIONS:
        log.warning("at most %d connections: the limit of open files (ulimit -n) is %d", room, soft)
    return room


class Pending:
    """A call whose answer comes later, from an effect. size: of the call, in bytes. roster: id of the roster that the caller has; None: a
    caller of torchft's. request: for its owner."""

    def __init__(self, size: int = 0, roster: str | None = "", request: Any = None) -> None:
        self.size, self.roster, self.request = size, roster, request
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.due_s = math.inf  # on the loop's clock

    def give(self, answer: bytes) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, refused: CallRefused) -> None:
        if not self.answer.done():
            self.answer.set_exception(refused)

    def expire(self) -> None:
        self.fail(CallRefused(grpc.StatusCode.CANCELLED, "Timeout expired"))  # torchft's clients look for these words


class PendingCalls(dict[Any, list[Pending]]):
    """The calls that wait for an answer, by key; an effect pops those that it answers. `cancelled` gets a key whose last caller is gone.
    swept: `expire` is called every SWEEP_S or oftener, which costs less than a timer for each call."""

    def __init__(self, cancelled: Callable[[Any], None], *, swept: bool = False) -> None:
        super().__init__()
        self._cancelled, self._swept = cancelled, swept
        self.size = 0  # of all, in bytes

    def expire(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for pending in (pending for calls in self.values() for pending in calls):
            if pending.due_s <= now_s:
                pending.expire()

    async def wait(
        self, key: Any, caller: str, pending: Pending, feed: Callable[[], None], context: Any = None
    ) -> bytes:
        """Calls `feed` and waits for the answer. context: of a call of torchft's, which ends a little before its deadline; a call of ours
        needs no such end: its caller cancels it. Raises CallRefused, also where CALLS_PER_KEY calls wait already."""
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
            if pending in calls:  # the caller has gone, or its deadline has passed
                calls.remove(pending)
                if not calls:
                    del self[key]
                    self._cancelled(key)


class Outbox:
    """Messages down one stream, in order. Bounded: a reader that lags loses its stream; the next begins with all that matters."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._messages: asyncio.Queue[bytes] = asyncio.Queue()
        self._bytes = 0  # of these
        self._reader = asyncio.current_task()  # the handler
        self._writer = asyncio.ensure_future(self._write())
        self.over = False
        self.answered_s = -math.inf  # for its owner: of what the reader said last that was answered, when it said so
        self.wait_reason = ""  # for its owner: the cause of the wait that the reader was sent last
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
        """The first message. Raises ValueError where it does not come soon, CallRefused."""
        try:
            return await asyncio.wait_for(self.read(), HELLO_S) or b""
        except (TimeoutError, asyncio.TimeoutError):
            raise ValueError(f"a stream must begin with a hello within {HELLO_S:g} s") from None

    async def read(self) -> bytes | None:
        """The next message; None: the stream is over, from either side. Raises CallRefused for a reader that was too slow."""
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
        """The handler's next read (the one it waits in, too) says that the stream is over."""
        if not self.over:
            self.over, self._messages = True, asyncio.Queue()
            if self._reader is not None and self._reader is not asyncio.current_task():
                self._reader.cancel()

    def close(self) -> None:
        self._writer.cancel()

    async def _write(self) -> None:
        with suppress(grpc.aio.BaseError):  # the reader notices that the stream broke
            while not self.over:
                message = await self._messages.get()
                self._bytes -= len(message)
                await self._context.write(message)
