"""The source's side of healing over HTTP: one server per rank, on one interface, with a thread per connection.

    GET  /heal/QUORUM_ID/STEP/header     the manifest, its digest, the validity token
    GET  /heal/QUORUM_ID/STEP/body       with `Range: chunks=FIRST-LAST`: those chunks, each followed by its digest; the validity token
    GET  /heal/QUORUM_ID/STEP/digests    the digests of all chunks, their digest, the validity token; for joiners with two sources
    POST /heal/QUORUM_ID/STEP/done       the joiner needs nothing more

A refusal has a status and the reason. 404: not offered yet; 410: the offer, or one of these chunks, will not be available any more.

Every request has `Authorization: Bearer TOKEN` if the job has a token, and `Reader: NAME`, the joiner's, equal on all its connections (the
field is older than the word joiner); a request for the body also has `Lacks: FIRST-LAST`, a range with all chunks that the joiner has not
verified, whichever source it will request them from. Chunks are a range unit of our own (RFC 9110, 14.1), so a range cannot begin inside a
digest. No request has a body.

A joiner that is slow, silent or lost costs only its own thread: a fence never waits for a send, as the part of a chunk that the kernel does
not accept at once is copied. http.server restarts its timeout with each byte of a head, and does not limit its size; both are bounded here.
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
from http import HTTPStatus

from ft.healing.capture import StagingBuffer
from ft.healing.format import DIGEST_BYTES, chunk_digest
from ft.healing.transport import VALIDITY_TOKEN_BYTES, StateOffer, TooManyJoiners, Withdrawn
from ft.protocol import messages as m
from ft.rpc.access import Access, Endpoint

MAX_CONNECTIONS = 32  # a joiner with two sources has two at each; with one source, `heal_streams`. Further ones wait
MAX_WAITING = 1024  # a further one's packets are dropped: they come again after 1 s, 3 s, 7 s ...
MAX_HEAD_BYTES = 16 << 10
MAX_FIELDS = 64
HEAD_S = 10.0  # timeout of a connection's first request, and of a whole head
STRANGER_S = 0.5  # age at which a connection without a valid request makes room for another
_REQUEST = re.compile(r"(GET|POST) (/[!-~]{0,255}) HTTP/1\.[01]")
_FIELD = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,64}):[ \t]*([\t -~]*?)[ \t]*")
_PATH = re.compile(r"/heal/(\d{1,18})/(\d{1,18})/(header|body|digests|done)", re.ASCII)
_JOINER = re.compile(r"[\w.:-]{1,128}", re.ASCII)
log = logging.getLogger("pharos.healing")


class BadRequest(ValueError):
    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class HealRequest:
    """A request. For a body: (first, last) of the requested chunks, and of a range with all that the joiner lacks."""

    what: str
    quorum_id: int
    step: int
    joiner: str
    chunks: tuple[int, int] = (0, -1)
    lacks: tuple[int, int] = (0, -1)


def parse_request(head: bytes, access: Access) -> HealRequest:
    """Parses the head of a request, without its empty line. Checks the token before it reveals anything. Raises BadRequest."""
    if len(head) > MAX_HEAD_BYTES or head.count(b"\r\n") > MAX_FIELDS:
        raise BadRequest(431, f"a head of more than {MAX_HEAD_BYTES} bytes, or of more than {MAX_FIELDS} fields")
    first, *lines = head.decode("latin-1").split("\r\n")
    request, found = _REQUEST.fullmatch(first), [_FIELD.fullmatch(line) for line in lines]
    if not request or not all(found):
        raise BadRequest(400, "not an HTTP request")
    fields = {field[1].lower(): field[2] for field in found if field}
    if len(fields) != len(found):
        raise BadRequest(400, "duplicate header field")
    if "transfer-encoding" in fields or fields.get("content-length", "0") != "0":
        raise BadRequest(413, "a request has no body here")
    if not access.permits(fields.items()):
        raise BadRequest(401, "missing or wrong token")
    path, joiner = _PATH.fullmatch(request[2]), fields.get("reader", "")
    if not path:
        raise BadRequest(404, "no such path")
    if request[1] != ("POST" if path[3] == "done" else "GET"):
        raise BadRequest(405, f"{path[3]} is not for {request[1]}")
    if not _JOINER.fullmatch(joiner):
        raise BadRequest(400, "Reader: a name of at most 128 letters, digits and .:_-")
    target = path[3], int(path[1]), int(path[2]), joiner
    if path[3] != "body":
        return HealRequest(*target)
    chunks = re.fullmatch(r"chunks=(\d{1,12})-(\d{1,12})", fields.get("range", ""), re.ASCII)
    lacks = re.fullmatch(r"(\d{1,12})-(\d{1,12})", fields.get("lacks", ""), re.ASCII)
    if not chunks:
        raise BadRequest(416, "Range: chunks=FIRST-LAST")
    if not lacks or not int(lacks[1]) <= int(chunks[1]) <= int(chunks[2]) <= int(lacks[2]):
        raise BadRequest(400, "Lacks: FIRST-LAST, and Range inside it")
    return HealRequest(*target, (int(chunks[1]), int(chunks[2])), (int(lacks[1]), int(lacks[2])))


class HealServer:
    """Serves the offer that `offered` returns, on a free port of `host`. `silence_s`: timeout of a joiner that receives nothing. Raises
    ValueError if other machines could reach the server without token or `insecure`, OSError if it cannot listen there."""

    head_s, stranger_s = HEAD_S, STRANGER_S
    make_thread: Callable[..., threading.Thread] = threading.Thread

    def __init__(
        self, host: str, access: Access, offered: Callable[[], StateOffer | None], *, silence_s: float
    ) -> None:
        if not (Endpoint(host, 0).loopback or access.token or access.insecure):
            raise ValueError(f"healing on {host}: others could reach it, and the job has no token; nearest: 127.0.0.1")
        self.access, self.offered, self.silence_s = access, offered, silence_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, 0), family=family, backlog=MAX_WAITING)
        self.address = f"http://{Endpoint(host, self.listener.getsockname()[1])}"
        self._changed = threading.Condition()  # its lock guards `connections`
        self.connections: dict[_Connection, threading.Thread] = {}  # in the order of their arrival
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name="heal-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections and threads. May be called twice."""
        with self._changed:
            self._closed, threads = True, [self._thread, *self.connections.values()]
            for connection in self.connections:  # with the lock, as one that is no longer listed may close its socket
                connection.end()
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # it is not connected, but this interrupts accept
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for thread in threads:
            thread.join(timeout=HEAD_S)

    def forget(self, connection: _Connection) -> None:
        with self._changed:
            self.connections.pop(connection, None)
            self._changed.notify_all()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                time.sleep(0.0 if self._closed else 0.1)  # no descriptors are left: tries again
                continue
            try:
                self._start(sock)
            except RuntimeError as error:  # no further thread, or the server is closed
                log.warning("a joiner's connection is refused: %s", error)
                sock.close()

    def _start(self, sock: socket.socket) -> None:
        """Starts a thread, once there is a place. Further joiners wait in the listener's queue meanwhile: refused, hundreds of them would
        connect again several times a second. Strangers, connections without a valid request, have as many places of their own, and give
        them up after stranger_s: a few that say nothing would else keep a joiner out for seconds while others heal."""
        with self._changed:
            while not self._closed:
                strangers = [one for one in self.connections if not one.trusted]
                if len(self.connections) - len(strangers) >= MAX_CONNECTIONS:
                    self._changed.wait()
                elif len(strangers) < MAX_CONNECTIONS:
                    break
                elif (left_s := strangers[0].began_s + self.stranger_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    strangers[0].end()
                    del self.connections[strangers[0]]
            if self._closed:
                raise RuntimeError("the server is closed")
            new = _Connection(self, sock)  # here, as its age counts from the moment at which it has a place
            thread = self.make_thread(target=new.run, name="heal-joiner", daemon=True)
            thread.start()  # its `forget` waits for the lock
            self.connections[new] = thread


class _Connection:
    def __init__(self, server: HealServer, sock: socket.socket) -> None:
        self._server, self._sock = server, sock
        self.trusted, self.began_s = False, time.monotonic()  # trusted: it has sent a valid request
        self._room = select.poll()  # ready when the kernel accepts more data
        self._room.register(sock, select.POLLOUT)

    def end(self) -> None:
        """Interrupts the thread, which then closes the socket."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        try:
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (head := self._head()) and self._answer(head):
                pass
        except (OSError, Withdrawn) as error:
            log.info("a joiner's connection has ended: %s", error)
        finally:
            self._server.forget(self)
            self._sock.close()

    def _head(self) -> bytes:
        """Reads a request's head, without its empty line, or the start of one that is too long; empty: the end. Raises OSError."""
        data = b""
        deadline = time.monotonic() + (self._server.silence_s if self.trusted else self._server.head_s)
        while not data.endswith(b"\r\n\r\n") and len(data) <= MAX_HEAD_BYTES + 4:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            more = self._sock.recv(MAX_HEAD_BYTES + 5 - len(data))  # a joiner's next request follows the reply
            if not more:
                return b""
            data += more
        self._sock.setblocking(False)
        return data.removesuffix(b"\r\n\r\n")

    def _answer(self, head: bytes) -> bool:
        """Answers one request. Returns False if the connection must end. Raises OSError and Withdrawn."""
        try:
            request = parse_request(head, self._server.access)
            self.trusted = True
            offer = self._server.offered()
            if offer is None or (request.quorum_id, request.step) > (offer.quorum_id, offer.step):
                raise BadRequest(404, "not offered yet")
            if (request.quorum_id, request.step) != (offer.quorum_id, offer.step):
                raise BadRequest(410, f"on offer is step {m.describe_step(offer.step)} of quorum {offer.quorum_id}")
            if request.lacks[1] >= offer.manifest.chunks:
                raise BadRequest(416, f"there are {offer.manifest.chunks} chunks")
            offer.check()
            offer.add_joiner(request.joiner)
            if request.what == "body":
                # in this order: a fence from here on copies what is wanted
                offer.set_wanted(request.joiner, range(request.lacks[0], request.lacks[1] + 1))
                offer.check(range(request.chunks[0], request.chunks[1] + 1))
        except (BadRequest, Withdrawn, TooManyJoiners) as error:
            status = error.status if isinstance(error, BadRequest) else 410 if isinstance(error, Withdrawn) else 503
            text = f"{error}\n".encode()
            with contextlib.suppress(OSError):
                self._reply(status, len(text))
                self._send(text)
            return status == 404 and self.trusted
        if request.what == "header":
            self._send_checked(offer, offer.header)
        elif request.what == "digests":
            staging, digests = StagingBuffer(offer.body), bytearray()
            for i in range(offer.manifest.chunks):
                with offer.reading():
                    digests += offer.digests.get(i) or offer.digest_of(i, offer.direct(i, i) or offer.read(i, staging))
            self._send_checked(offer, bytes(digests))
        elif request.what == "body":
            self._send_body(offer, request)
        else:
            offer.set_wanted(request.joiner, ())
            self._reply(200, 0)
        return True

    def _send_body(self, offer: StateOffer, request: HealRequest) -> None:
        first, last = request.chunks
        length = offer.manifest.span(last)[1] - offer.manifest.span(first)[0] + DIGEST_BYTES * (last - first + 1)
        length += VALIDITY_TOKEN_BYTES
        self._reply(206, length, f"Content-Range: chunks {first}-{last}/{offer.manifest.chunks}\r\n")
        staging = StagingBuffer(offer.body)
        for chunk in range(first, last + 1):
            self._wait_for_room()  # usually for a whole chunk, which is then sent without a copy
            with offer.reading():
                again = offer.was_sent(request.joiner, chunk)
                live = None if again else offer.direct(chunk, chunk)
                memory = live or offer.read(chunk, staging)
                rest = self._send_at_once([memory, memoryview(offer.digest_of(chunk, memory, anew=again))])
                if live is not None and len(rest) == 2:  # the live memory may change once `reading` has ended
                    staging.view[: len(rest[0])] = rest[0]
                    rest[0] = staging.view[: len(rest[0])]
            self._send(*rest)
            offer.sent(request.joiner, [chunk])
        self._send_validity_token(offer)

    def _send_checked(self, offer: StateOffer, data: bytes) -> None:
        """Replies with `data`, its digest and the validity token."""
        self._reply(200, len(data) + DIGEST_BYTES + VALIDITY_TOKEN_BYTES)
        self._send(data, chunk_digest(0, memoryview(data)))
        self._send_validity_token(offer)

    def _send_validity_token(self, offer: StateOffer) -> None:
        """Ends a reply, all bytes of which were read before the offer is checked here. Raises Withdrawn."""
        offer.check()
        self._send(offer.validity_token)

    def _reply(self, status: int, length: int, field: str = "") -> None:
        field = "WWW-Authenticate: Bearer\r\n" if status == 401 else field
        self._send(f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Length: {length}\r\n{field}\r\n".encode())

    def _send(self, *parts: bytes | memoryview) -> None:
        """Sends all parts. Raises TimeoutError, an OSError, if the joiner receives nothing for silence_s."""
        views = [memoryview(part) for part in parts]
        while views := self._send_at_once(views):
            self._wait_for_room()

    def _send_at_once(self, views: list[memoryview]) -> list[memoryview]:
        """Sends as much as the kernel accepts at once. Returns the rest."""
        with contextlib.suppress(BlockingIOError):
            return without_first(self._sock.sendmsg(views), views) if views else []
        return views

    def _wait_for_room(self) -> None:
        if not self._room.poll(self._server.silence_s * 1000):
            raise TimeoutError("the joiner receives nothing")


def without_first(count: int, views: Sequence[memoryview]) -> list[memoryview]:
    """Returns these parts without their first `count` bytes."""
    left = list(views)
    while left and count >= len(left[0]):
        count -= len(left.pop(0))
    return [left[0][count:], *left[1:]] if left else []
