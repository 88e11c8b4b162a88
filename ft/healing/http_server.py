"""The source's side of healing over HTTP: a server per rank, on one interface, with a thread per connection and few of them.

It serves the one offer that stands, to readers with the token. A reader that is slow, silent or gone costs its own thread and nothing
else: no send blocks while it holds a lock, no read waits longer than it may. http.server has neither: its sends block, and its limit of
time begins anew with every byte of a head.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections.abc import Sequence

from ft.healing.capture import StagingBuffer
from ft.healing.format import DIGEST_BYTES, digest
from ft.healing.http_requests import MAX_HEAD_BYTES, Asked, BadRequest, parse_head, parse_request, reply_head
from ft.healing.transport import SEAL_BYTES, CheckpointOffer, Reader, Withdrawn
from ft.rpc.access import Access, Endpoint

MAX_CONNECTIONS = 32
HEAD_S = 10.0  # for a whole head, or until a connection asks for something
log = logging.getLogger("pharos.healing")


class HealServer:
    """Listens on `host`, on a free port. `silence_s`: a reader may take nothing for so long. Raises ValueError where others could reach
    it and it has no token, OSError where it cannot listen there."""

    def __init__(self, host: str, access: Access, *, silence_s: float) -> None:
        if not (Endpoint(host, 0).loopback or access.token or access.insecure):
            raise ValueError(f"healing on {host}: others could reach it, and the job has no token; nearest: 127.0.0.1")
        self.access, self.silence_s = access, silence_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_CONNECTIONS)
        self.address = f"http://{Endpoint(host, self._listener.getsockname()[1])}"
        self._lock = threading.Lock()
        self.shown: CheckpointOffer | None = None  # what is served
        self._connections: dict[_Connection, None] = {}  # in the order they came
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="heal-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            self._closed = True
            connections = list(self._connections)
        with contextlib.suppress(OSError):  # not connected: it wakes accept all the same
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            connection.end()
        for thread in [self._thread, *(connection.thread for connection in connections)]:
            thread.join(timeout=HEAD_S)

    @property
    def connections(self) -> int:
        return len(self._connections)

    def forget(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.pop(connection, None)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # no descriptors left: try again, rarely
                continue
            connection = _Connection(self, sock)
            try:
                if self._take_in(connection):
                    continue
            except RuntimeError as error:  # no thread can be had: as with one too many
                log.warning("a reader of the state is turned away: %s", error)
                self.forget(connection)
            connection.end()
            sock.close()

    def _take_in(self, new: _Connection) -> bool:
        """Starts it, if there is room. One too many: the oldest that has shown no token goes, else the new one."""
        with self._lock:
            if self._closed:
                return False
            if len(self._connections) >= MAX_CONNECTIONS:
                stranger = next((connection for connection in self._connections if not connection.trusted), None)
                if stranger is None:
                    return False
                stranger.end()
                del self._connections[stranger]
            self._connections[new] = None
            new.thread.start()
            return True


class _Connection:
    def __init__(self, server: HealServer, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self.trusted = False
        self._lock = threading.Lock()  # of what is being read
        self.thread = threading.Thread(target=self._run, name="heal-reader", daemon=True)

    def end(self) -> None:
        """Wakes the thread, which then closes the socket."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while head := self._head():
                if not self._answer(head):
                    return
        except (OSError, Withdrawn) as error:
            log.info("a reader of the state went away: %s", error)
        finally:
            self._server.forget(self)
            self._sock.close()

    def _head(self) -> bytes:
        """Without its empty line; empty where the connection has ended. Raises OSError."""
        data = b""
        deadline = time.monotonic() + (self._server.silence_s if self.trusted else HEAD_S)
        while not data.endswith(b"\r\n\r\n"):
            self._wait_for(select.POLLIN, deadline - time.monotonic(), "said nothing")
            more = self._sock.recv(MAX_HEAD_BYTES + 4 - len(data))  # a reader asks again only when it has its answer
            data += more
            if not more:
                return b""
            if len(data) > MAX_HEAD_BYTES:
                self._error(431, "a long head")
                return b""
        return data[:-4]

    def _answer(self, head: bytes) -> bool:
        """Answers one request. Returns False where the connection ends with it. Raises OSError and Withdrawn."""
        try:
            request = parse_head(head)
            if not self._server.access.permits(request.fields):
                raise BadRequest(401, "this job has a token")
            self.trusted = True
            asked = parse_request(request)
            offer = self._server.shown
            if offer is None or (asked.quorum_id, asked.step) > (offer.quorum_id, offer.step):
                raise BadRequest(404, "not offered yet")
            if (asked.quorum_id, asked.step) != (offer.quorum_id, offer.step):
                raise BadRequest(410, f"on offer is step {offer.step} of quorum {offer.quorum_id}")
            if asked.last >= offer.manifest.chunks or any(last >= offer.manifest.chunks for _, last in asked.lacks):
                raise BadRequest(416, f"there are {offer.manifest.chunks} chunks")
            offer.check()
            reader = offer.reader(asked.reader)
        except BadRequest as error:
            self._error(error.status, str(error))
            return error.status == 404 and self.trusted
        except Withdrawn as error:
            self._error(410, str(error))
            return False
        if asked.what == "header":
            self._send_checked(offer, offer.header)
        elif asked.what == "digests":
            self._send_digests(offer, reader, asked)
        elif asked.what == "body":
            self._send_body(offer, reader, asked)
        else:
            offer.done(asked.reader)
            self._send(reply_head(200, 0))
        return True

    def _error(self, status: int, reason: str) -> None:
        text = (reason + "\n").encode()
        with contextlib.suppress(OSError):
            self._send(reply_head(status, len(text)), text)

    def _send_body(self, offer: CheckpointOffer, reader: Reader, asked: Asked) -> None:
        offer.wants(asked.reader, (chunk for first, last in asked.lacks for chunk in range(first, last + 1)))
        start, end = offer.manifest.span(asked.first)[0], offer.manifest.span(asked.last)[1]
        length = end - start + DIGEST_BYTES * (asked.last - asked.first + 1) + SEAL_BYTES
        self._send(reply_head(206, length, f"chunks {asked.first}-{asked.last}/{offer.manifest.chunks}"))
        staging: StagingBuffer | None = None
        with offer.reading(reader) as self._lock:
            for chunk in range(asked.first, asked.last + 1):
                staging = self._send_chunk(offer, chunk, staging)
                offer.sent(reader, [chunk])
        self._send_seal(offer)

    def _send_chunk(self, offer: CheckpointOffer, chunk: int, staging: StagingBuffer | None) -> StagingBuffer | None:
        """The lock is held while the tensors are looked at, never while waiting for the reader: in between, a fence may move the chunk
        aside. Returns the buffer, made when first needed."""
        mark = b""
        staged: memoryview | None = None
        sent = 0
        while True:
            with self._lock:
                memory = staged if staged is not None else offer.memory(chunk)
                if memory is None:
                    staging = staging or StagingBuffer(offer.body)
                    memory = staged = offer.read(chunk, staging)
                mark = mark or offer.digest_of(chunk, memory)
                sent += self._try_to_send([memory[sent:], memoryview(mark)[max(0, sent - len(memory)) :]])
                if sent == len(memory) + DIGEST_BYTES:
                    return staging
            self._wait_for(select.POLLOUT, self._server.silence_s, "took nothing")

    def _send_digests(self, offer: CheckpointOffer, reader: Reader, asked: Asked) -> None:
        """The lock is held for a chunk at a time, as when they are sent: a fence may come in between."""
        staging, digests = None, bytearray()
        with offer.reading(reader) as lock:
            for chunk in range(offer.manifest.chunks):
                with lock:
                    if not (found := offer.known(chunk)):
                        memory = offer.memory(chunk)
                        if memory is None:
                            staging = staging or StagingBuffer(offer.body)
                            memory = offer.read(chunk, staging)
                        found = offer.digest_of(chunk, memory)
                digests += found
        self._send_checked(offer, digests)

    def _send_checked(self, offer: CheckpointOffer, data: bytes | bytearray) -> None:
        """`data`, its digest and the seal."""
        self._send(reply_head(200, len(data) + DIGEST_BYTES + SEAL_BYTES), data, digest(0, memoryview(data)))
        self._send_seal(offer)

    def _send_seal(self, offer: CheckpointOffer) -> None:
        """Ends a reply whose bytes had all left the tensors before the offer was checked. Raises Withdrawn."""
        offer.check()
        self._send(offer.seal)

    def _send(self, *parts: bytes | bytearray) -> None:
        for part in parts:
            view = memoryview(part)
            while len(view):
                if taken := self._try_to_send([view]):
                    view = view[taken:]
                else:
                    self._wait_for(select.POLLOUT, self._server.silence_s, "took nothing")

    def _try_to_send(self, parts: Sequence[memoryview]) -> int:
        """Sends as much as the kernel takes at once; returns how much. Raises OSError."""
        try:
            return self._sock.sendmsg(parts, [], socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def _wait_for(self, event: int, timeout_s: float, failing: str) -> None:
        """The socket itself stays blocking: with a timeout, Python would wait inside the send, with the lock held."""
        waiting = select.poll()
        waiting.register(self._sock, event)
        if not waiting.poll(max(0.0, timeout_s) * 1000):
            raise TimeoutError(f"it {failing} in its time")
