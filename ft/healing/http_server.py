"""The source's side of healing over HTTP: a server per rank, on one interface, with a thread per connection and few of them.

    GET  /heal/QUORUM_ID/STEP/header     the manifest, its digest, the seal
    GET  /heal/QUORUM_ID/STEP/body       with `Range: chunks=FIRST-LAST`: those chunks, each followed by its digest; the seal
    GET  /heal/QUORUM_ID/STEP/digests    of all chunks, their digest, the seal: what a joiner with two sources compares
    POST /heal/QUORUM_ID/STEP/done       the joiner has verified all of it

Every request carries `Authorization: Bearer TOKEN` if the job has a token, `Reader: NAME` (the joiner's own, for all its connections)
and, with the body, `Lacks: FIRST-LAST`, a range with all chunks that the joiner has not verified, from wherever it means to get them.
Chunks are a range unit of our own (RFC 9110, 14.1), so a range cannot begin inside a digest. No request has a body.

A reader that is slow, silent or gone costs its own thread and nothing else: a fence never waits for a send, as what the kernel does not
take of a chunk at once is copied. http.server's limit of time begins anew with every byte of a head, and its heads may be long: both are
bounded here.
"""

from __future__ import annotations

import contextlib
import logging
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ft.healing.capture import StagingBuffer
from ft.healing.format import DIGEST_BYTES, digest
from ft.healing.transport import SEAL_BYTES, StateOffer, Withdrawn
from ft.rpc.access import Access, Endpoint

MAX_CONNECTIONS = 32
MAX_HEAD_BYTES = 16 << 10
MAX_FIELDS = 64
HEAD_S = 10.0  # for all of a head, or until a connection asks for something
_REQUEST = re.compile(r"(GET|POST) (/[!-~]{0,255}) HTTP/1\.[01]")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([\t -~]*?)[ \t]*")
_PATH = re.compile(r"/heal/(\d{1,18})/(\d{1,18})/(header|body|digests|done)", re.ASCII)
_READER = re.compile(r"[\w.:-]{1,128}", re.ASCII)
_PHRASES = {200: "OK", 206: "Partial Content", 401: "Unauthorized", 404: "Not Found", 410: "Gone"}
log = logging.getLogger("pharos.healing")


class BadRequest(ValueError):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class HealRequest:
    """For a body: (first, last) of the chunks that are asked for, and of those that the joiner lacks."""

    what: str
    quorum_id: int
    step: int
    reader: str
    chunks: tuple[int, int] = (0, -1)
    lacks: tuple[int, int] = (0, -1)


def parse_request(head: bytes, access: Access) -> HealRequest:
    """A request's head, up to and without its empty line; nothing is told without the token. Raises BadRequest."""
    if len(head) > MAX_HEAD_BYTES or head.count(b"\r\n") > MAX_FIELDS:
        raise BadRequest(431, f"a head of more than {MAX_HEAD_BYTES} bytes, or of more than {MAX_FIELDS} fields")
    first, *lines = head.decode("latin-1").split("\r\n")
    request, found = _REQUEST.fullmatch(first), [_FIELD.fullmatch(line) for line in lines]
    if not request or not all(found):
        raise BadRequest(400, "no HTTP request")
    fields = {field[1].lower(): field[2] for field in found if field}
    if len(fields) != len(found):
        raise BadRequest(400, "duplicate header field")
    if "transfer-encoding" in fields or fields.get("content-length", "0") != "0":
        raise BadRequest(413, "a request has no body here")
    if not access.permits(fields.items()):
        raise BadRequest(401, "this job has a token")
    path, reader = _PATH.fullmatch(request[2]), fields.get("reader", "")
    if not path:
        raise BadRequest(404, "no such page")
    if request[1] != ("POST" if path[3] == "done" else "GET"):
        raise BadRequest(405, f"{path[3]} is not for {request[1]}")
    if not _READER.fullmatch(reader):
        raise BadRequest(400, "Reader: a name of at most 128 letters, digits and .:_-")
    asked = path[3], int(path[1]), int(path[2]), reader
    if path[3] != "body":
        return HealRequest(*asked)
    chunks = re.fullmatch(r"chunks=(\d{1,12})-(\d{1,12})", fields.get("range", ""), re.ASCII)
    lacks = re.fullmatch(r"(\d{1,12})-(\d{1,12})", fields.get("lacks", ""), re.ASCII)
    if not chunks:
        raise BadRequest(416, "Range: chunks=FIRST-LAST")
    if not lacks or not int(lacks[1]) <= int(chunks[1]) <= int(chunks[2]) <= int(lacks[2]):
        raise BadRequest(400, "Lacks: FIRST-LAST, and Range inside it")
    return HealRequest(*asked, (int(chunks[1]), int(chunks[2])), (int(lacks[1]), int(lacks[2])))


class HealServer:
    """Listens on `host`, on a free port, and serves the offer that `offered` gives. `silence_s`: a reader may take nothing for so long.
    Raises ValueError where others could reach it and it has no token, OSError where it cannot listen there."""

    head_s = HEAD_S
    make_thread: Callable[..., threading.Thread] = threading.Thread

    def __init__(
        self, host: str, access: Access, offered: Callable[[], StateOffer | None], *, silence_s: float
    ) -> None:
        if not (Endpoint(host, 0).loopback or access.token or access.insecure):
            raise ValueError(f"healing on {host}: others could reach it, and the job has no token; nearest: 127.0.0.1")
        self.access, self.offered, self.silence_s = access, offered, silence_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=MAX_CONNECTIONS)
        self.address = f"http://{Endpoint(host, self._listener.getsockname()[1])}"
        self._lock = threading.Lock()
        self.connections: dict[_Connection, threading.Thread] = {}  # in the order they came
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="heal-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """May be called twice."""
        with self._lock:
            self._closed = True
            connections = dict(self.connections)
        with contextlib.suppress(OSError):  # not connected: it wakes accept all the same
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in connections:
            connection.end()
        for thread in [self._thread, *connections.values()]:
            thread.join(timeout=HEAD_S)

    def forget(self, connection: _Connection) -> None:
        with self._lock:
            self.connections.pop(connection, None)

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                time.sleep(0.0 if self._closed else 0.1)  # no descriptors left: try again, rarely
                continue
            connection = _Connection(self, sock)
            try:
                self._start(connection)
            except RuntimeError as error:  # one too many, or no thread can be had
                log.warning("a reader of the state is turned away: %s", error)
                sock.close()

    def _start(self, new: _Connection) -> None:
        """One too many: the oldest that has shown no token goes, else the new one. Raises RuntimeError."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the server is closed")
            if len(self.connections) >= MAX_CONNECTIONS:
                without_token = next((one for one in self.connections if not one.trusted), None)
                if without_token is None:
                    raise RuntimeError(f"{MAX_CONNECTIONS} connections already")
                without_token.end()
                del self.connections[without_token]
            thread = self.make_thread(target=new.run, name="heal-joiner", daemon=True)
            thread.start()  # its end waits for the lock
            self.connections[new] = thread


class _Connection:
    def __init__(self, server: HealServer, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self.trusted = False
        self._room = select.poll()  # for data to send
        self._room.register(sock, select.POLLOUT)

    def end(self) -> None:
        """Wakes the thread, which then closes the socket."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (head := self._head()) and self._answer(head):
                pass
        except (OSError, Withdrawn) as error:
            log.info("a reader of the state went away: %s", error)
        finally:
            self._server.forget(self)
            self._sock.close()

    def _head(self) -> bytes:
        """Without its empty line, or as much of one that is too long as was read; empty where the connection has ended. Raises OSError."""
        data = b""
        deadline = time.monotonic() + (self._server.silence_s if self.trusted else self._server.head_s)
        while not data.endswith(b"\r\n\r\n") and len(data) <= MAX_HEAD_BYTES + 4:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            more = self._sock.recv(MAX_HEAD_BYTES + 5 - len(data))  # a reader asks again only when it has its answer
            if not more:
                return b""
            data += more
        self._sock.setblocking(False)
        return data.removesuffix(b"\r\n\r\n")

    def _answer(self, head: bytes) -> bool:
        """Answers one request. Returns False where the connection ends with it. Raises OSError and Withdrawn."""
        try:
            asked = parse_request(head, self._server.access)
            self.trusted = True
            offer = self._server.offered()
            if offer is None or (asked.quorum_id, asked.step) > (offer.quorum_id, offer.step):
                raise BadRequest(404, "not offered yet")
            if (asked.quorum_id, asked.step) != (offer.quorum_id, offer.step):
                raise BadRequest(410, f"on offer is step {offer.step} of quorum {offer.quorum_id}")
            if asked.lacks[1] >= offer.manifest.chunks:
                raise BadRequest(416, f"there are {offer.manifest.chunks} chunks")
            offer.check()
            offer.add_joiner(asked.reader)
        except (BadRequest, Withdrawn) as error:
            status, text = getattr(error, "status", 410), f"{error}\n".encode()
            with contextlib.suppress(OSError):
                self._reply(status, len(text))
                self._send(text)
            return status == 404 and self.trusted
        if asked.what == "header":
            self._send_checked(offer, offer.header)
        elif asked.what == "digests":
            staging, digests = StagingBuffer(offer.body), bytearray()
            for i in range(offer.manifest.chunks):
                with offer.reading():
                    digests += offer.digests.get(i) or offer.digest_of(i, offer.direct(i, i) or offer.read(i, staging))
            self._send_checked(offer, bytes(digests))
        elif asked.what == "body":
            self._send_body(offer, asked)
        else:
            offer.set_wanted(asked.reader, ())
            self._reply(200, 0)
        return True

    def _send_body(self, offer: StateOffer, asked: HealRequest) -> None:
        offer.set_wanted(asked.reader, range(asked.lacks[0], asked.lacks[1] + 1))
        first, last = asked.chunks
        length = offer.manifest.span(last)[1] - offer.manifest.span(first)[0] + DIGEST_BYTES * (last - first + 1)
        self._reply(206, length + SEAL_BYTES, f"Content-Range: chunks {first}-{last}/{offer.manifest.chunks}\r\n")
        staging = StagingBuffer(offer.body)
        for chunk in range(first, last + 1):
            self._wait_for_room()  # for a whole chunk, as a rule: then it is sent from where it lies, without a copy
            with offer.reading():
                live = offer.direct(chunk, chunk)
                memory = live or offer.read(chunk, staging)
                rest = self._send_at_once([memory, memoryview(offer.digest_of(chunk, memory))])
                if live is not None and len(rest) == 2:  # it may change once `reading` has ended
                    staging.view[: len(rest[0])] = rest[0]
                    rest[0] = staging.view[: len(rest[0])]
            self._send(*rest)
            offer.sent(asked.reader, [chunk])
        self._send_seal(offer)

    def _send_checked(self, offer: StateOffer, data: bytes) -> None:
        """`data`, its digest and the seal."""
        self._reply(200, len(data) + DIGEST_BYTES + SEAL_BYTES)
        self._send(data, digest(0, memoryview(data)))
        self._send_seal(offer)

    def _send_seal(self, offer: StateOffer) -> None:
        """Ends a reply whose bytes had all left the tensors before the offer was checked. Raises Withdrawn."""
        offer.check()
        self._send(offer.seal)

    def _reply(self, status: int, length: int, field: str = "") -> None:
        field = "WWW-Authenticate: Bearer\r\n" if status == 401 else field
        phrase = _PHRASES.get(status, "Refused")
        self._send(f"HTTP/1.1 {status} {phrase}\r\nContent-Length: {length}\r\n{field}\r\n".encode())

    def _send(self, *parts: bytes | memoryview) -> None:
        """Raises TimeoutError, an OSError, where the reader takes nothing for too long."""
        views = [memoryview(part) for part in parts]
        while views := self._send_at_once(views):
            self._wait_for_room()

    def _send_at_once(self, views: list[memoryview]) -> list[memoryview]:
        """Sends what the kernel takes without a wait. Returns the rest."""
        with contextlib.suppress(BlockingIOError):
            return after(self._sock.sendmsg(views), views) if views else []
        return views

    def _wait_for_room(self) -> None:
        if not self._room.poll(self._server.silence_s * 1000):
            raise TimeoutError("the reader takes nothing")


def after(count: int, views: Sequence[memoryview]) -> list[memoryview]:
    """The rest of these parts after their first `count` bytes."""
    left = list(views)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    return [left[0][count:], *left[1:]] if left else []
