"""Healing over HTTP: HttpTransport has a server for this rank's offers (http_server.py); the joiner's side is here.

A fetch uses two threads, one for each source, or both for a single source. The first requests *stripes*, ranges of chunks, from the front
of the state, the second from its back, until they meet; so a faster source sends more. A stripe counts only when its validity token has
arrived: until then the source may have changed its state during the transfer.

Two sources must have the same bits, as the joiner would get a mixture otherwise. So the source that answers first is *chosen* and used at
once; the other is used only after both have sent the digests of all their chunks, and these are equal. Digests have connections of their
own, so a heal from two sources is never slower than from the first one only. If digests differ, an error is logged and the other source is
not used: the next comparison of weights finds the difference. If the chosen source fails before the digests are known to be equal, the
fetch starts anew from the other. If they are equal, each further chunk must have the digest that both have sent: a source whose memory
changes later sends damaged chunks.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import re
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from ft.healing.capture import StagingBuffer, StateView, TensorPayload
from ft.healing.format import DIGEST_BYTES, MAX_HEADER_BYTES, FormatError, StateManifest, chunk_digest
from ft.healing.http_server import MAX_HEAD_BYTES, HealServer, without_first
from ft.healing.transport import (
    VALIDITY_TOKEN_BYTES,
    HealConfig,
    HealEndpoint,
    HealFailed,
    OnBytes,
    Sources,
    StateOffer,
    Transport,
)
from ft.rpc.access import Access, Endpoint

MAX_SOURCES = 2
MAX_DAMAGED = 8  # damaged chunks after which a source is not used any more
MIN_STRIPE, MAX_STRIPE = 64, 1024  # chunks
AGAIN_S = 0.05  # between two requests for an offer that is not made yet
CHECK_S = 0.25  # between two checks by an idle connection whether the other one is too slow
SLOWER = 4.0  # too slow: this many times the time of the connection that waits, and a second
_REPLY = re.compile(
    rb"HTTP/1\.1 (\d{3})[ -~]{0,100}\r\n(?:[ -~]*\r\n)*?Content-Length: (\d{1,15})\r\n[ -~\r\n]*", re.IGNORECASE
)
log = logging.getLogger("pharos.healing")


class HttpTransport(Transport):
    """A rank's transport. `host`: address to listen on. Raises ValueError if other machines could reach it without a token."""

    min_stripe = MIN_STRIPE

    def __init__(self, host: str, replica_id: str, access: Access, config: HealConfig | None = None) -> None:
        super().__init__(replica_id, config)
        self.access = access
        self._shown: StateOffer | None = None  # newest offer, even if withdrawn: joiners are told the reason
        self._fetched = ""  # path of the newest fetch
        # source -> reason of its newest failure in these fetches: a repeated one is logged once; both sources -> that they differ
        self.logged = dict[str, str]()
        self._server = HealServer(host, access, lambda: self._shown, silence_s=self.config.heal_grace_s)
        self.address = self._server.address

    def offer(self, view: StateView, *, quorum_id: int, step: int, joiners: Sequence[str]) -> StateOffer:
        self._shown = super().offer(view, quorum_id=quorum_id, step=step, joiners=joiners)
        return self._shown

    def _make_fetch(self, sources: Sources, into: StateView, quorum_id: int, step: int, progress: OnBytes) -> HttpFetch:
        path = f"/heal/{quorum_id}/{step}"
        if path != self._fetched:
            self._fetched, self.logged = path, {}
        return HttpFetch(self, sources, into, path, progress)

    def _notify_done(self, source: HealEndpoint, quorum_id: int, step: int) -> None:
        connection = SourceConnection(self, source, f"/heal/{quorum_id}/{step}")
        with contextlib.suppress(SourceFailed, OSError, ValueError), contextlib.closing(connection):
            connection.connect(self.done_s)
            connection.request("POST", "done")

    def close(self) -> None:
        super().close()
        self._server.close()
        self._shown = None


class SourceFailed(RuntimeError):
    """This source cannot be used any more. The message is the cause."""


class SourceGone(SourceFailed):
    """This source does not offer the state any more."""


class SourceConnection:
    """A joiner's connection to a source, for one thread, except for `hang_up`. `backwards`: take stripes from the back of the state."""

    def __init__(self, transport: HttpTransport, source: HealEndpoint, path: str, backwards: bool = False) -> None:
        self.source, self.backwards, self._transport, self._path = source, backwards, transport, path
        self._sock: socket.socket | None = None
        self._validity_token = b""
        self.ended = ""  # reason of hang_up; "": not called
        self.failure, self.layout_mismatch, self.gone, self.damaged = "", False, False, 0
        self.stripe: Sequence[int] = ()  # stripe that is being received
        self.moved_s = 0.0  # time.monotonic() at which its last chunk arrived
        self.chunk_s = 0.0  # seconds per chunk of the previous stripe; 0: there was none

    def connect(self, silence_s: float) -> None:
        """Connects. Raises OSError, ValueError, SourceFailed. Timeouts are the kernel's, so that one call can receive a whole chunk."""
        at = Endpoint.parse(self.source.heal_address, "the healing address")
        self._sock = sock = socket.create_connection((at.host, at.port), timeout=silence_s)
        if self.ended:  # hang_up may have been called before there was a socket
            raise SourceFailed(self.ended)
        sock.settimeout(None)
        timeout = struct.pack("@ll", int(silence_s), int(silence_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def request(self, method: str, what: str, fields: str = "") -> int:
        """Sends a request, and returns the length of the reply's body; -1: not offered yet. Raises SourceFailed, OSError, ValueError."""
        assert self._sock is not None
        token = "".join(f"{name}: {value}\r\n" for name, value in self._transport.access.metadata())
        always = f"Host: healing\r\nReader: {self._transport.replica_id}\r\n{token}"
        self._sock.sendall(f"{method} {self._path}/{what} HTTP/1.1\r\n{always}{fields}\r\n".encode("ascii"))
        head = b""
        while not head.endswith(b"\r\n\r\n"):  # byte by byte, as the body is received into tensors
            head += self.read(1)
            if len(head) > MAX_HEAD_BYTES:
                raise SourceFailed(f"the head of its reply has more than {MAX_HEAD_BYTES} bytes")
        status, length = parse_reply(head)
        if status in (200, 206):
            return length
        why = self.read(min(length, 1000)).decode("ascii", "replace").strip()
        if status == 404 and what == "header":
            return -1
        raise (SourceGone if status == 410 else SourceFailed)(f"{status} {why}")

    def read(self, length: int) -> bytes:
        data = bytearray(length)
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, *parts: memoryview) -> None:
        """Receives into `parts`. Raises OSError if the connection ends before, or is silent for too long."""
        assert self._sock is not None
        views = without_first(0, parts)
        while views:
            count = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            if not count:
                raise ConnectionResetError(self.ended or "it closed the connection before the end")
            views = without_first(count, views)

    def read_checked(self, length: int, what: str) -> bytes:
        """Reads data that is followed by its digest and the validity token. Raises SourceFailed and OSError."""
        data, expected = self.read(length - DIGEST_BYTES - VALIDITY_TOKEN_BYTES), self.read(DIGEST_BYTES)
        if chunk_digest(0, memoryview(data)) != expected:
            raise SourceFailed(f"{what} damaged on the way")
        self.read_validity_token()
        return data

    def read_validity_token(self) -> None:
        """Reads the end of a reply, and compares it with that of earlier replies. Raises SourceFailed and OSError."""
        validity_token = self.read(VALIDITY_TOKEN_BYTES)
        self._validity_token = self._validity_token or validity_token
        if not hmac.compare_digest(self._validity_token, validity_token):
            raise SourceFailed("the source changed its offer during the transfer")

    def hang_up(self, why: str) -> None:
        self.ended = self.ended or why
        if self._sock:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._sock:
            self._sock.close()


def parse_reply(head: bytes) -> tuple[int, int]:
    """Returns status and Content-Length of a reply's head. Raises ValueError."""
    found = _REPLY.fullmatch(head)
    if not found:
        raise ValueError("not the reply of a healing server")
    return int(found[1]), int(found[2])


class HttpFetch:
    """One fetch, from one source or two. `run` starts a thread for each connection, which verifies chunks and writes them to the tensors;
    it returns when none of them may write any more. `stop`: from any thread."""

    def __init__(
        self, transport: HttpTransport, sources: Sources, into: StateView, path: str, progress: OnBytes
    ) -> None:
        assert 1 <= len(sources) <= MAX_SOURCES, f"{len(sources)} sources"
        self._sources, self._into, self._config = sources, into, transport.config
        self._min_stripe, self._progress, self._logged = transport.min_stripe, progress, transport.logged
        self._make_thread = transport.make_thread
        parts = sources if len(sources) > 1 else [*sources] * self._config.heal_streams
        self._streams = [SourceConnection(transport, one, path, bool(i % 2)) for i, one in enumerate(parts)]
        both = sources if len(sources) > 1 else ()
        self._digest_connections = [SourceConnection(transport, one, path) for one in both]
        self._lock = threading.Condition()
        self._header = b""
        self._body: TensorPayload | None = None
        self._open: set[int] = set()  # chunks that are neither received nor requested
        self._requested: set[int] = set()  # chunks of the current stripes
        self._touched = False
        self._chosen: HealEndpoint | None = None
        self._equal = len(sources) == 1  # the digests of all sources are known to be equal
        self._digests: dict[HealEndpoint, bytes] = {}
        self._agreed = b""  # digests of all chunks, as both sources have sent them; empty: not known to be equal
        self._verified_bytes = 0
        self._ended = 0  # number of streams that have ended
        self._stopped = ""

    def run(self) -> dict[str, Any]:
        """Fetches the state, and returns it when it is complete and verified. Raises HealFailed."""
        works = [(self._receive, one) for one in self._streams]
        works += [(self._fetch_digests, one) for one in self._digest_connections]
        try:
            for work, connection in works:
                self._make_thread(target=work, args=(connection,), name="heal-fetch", daemon=True).start()
        except RuntimeError as error:  # no more threads: those that have begun must not write during the next try
            self.stop(str(error))
        with self._lock:  # waits for threads that may write, not for those that still connect
            self._lock.wait_for(lambda: not self._requested and (self._over or self._ended == len(self._streams)))
            body, complete = self._body, self._complete
        for connection in [*self._streams, *self._digest_connections]:  # some may wait for a place at their source
            connection.hang_up("the heal has ended")
        if body is not None and complete and not self._stopped:
            return self._into.values_of(body.manifest)
        failed = {one.source.replica_id: one.failure for one in self._streams if one.failure}
        layout_mismatch = not self._stopped and all(connection.layout_mismatch for connection in self._streams)
        raise HealFailed(
            self._stopped or failed,
            touched=self._touched,
            layout_mismatch=layout_mismatch,
            gone_sources={connection.source.replica_id for connection in self._streams if connection.gone},
        )

    @property
    def _complete(self) -> bool:
        return self._body is not None and not self._open and not self._requested

    @property
    def _over(self) -> bool:
        return bool(self._stopped) or self._complete

    def stop(self, reason: str) -> None:
        with self._lock:
            self._stopped = self._stopped or reason
            self._lock.notify_all()
        for connection in [*self._streams, *self._digest_connections]:
            connection.hang_up(reason)

    # -------------------------------------------------------------------------------------------- a connection's thread

    def _receive(self, connection: SourceConnection) -> None:
        try:
            body = self._body_of(self._header_of(connection))
            staging = StagingBuffer(body)
            while stripe := self._claim_stripe(connection):
                self._receive_stripe(connection, body, staging, *stripe)
        except (RuntimeError, OSError, ValueError) as error:
            silent = isinstance(error, BlockingIOError)
            cause = f"it was silent for {self._config.heal_grace_s:g} s" if silent else str(error)
            connection.failure, connection.layout_mismatch = connection.ended or cause, isinstance(error, FormatError)
            connection.gone = isinstance(error, SourceGone)
            if not self._complete and self._logged.get(connection.source.replica_id) != connection.failure:
                self._logged[connection.source.replica_id] = connection.failure
                log.warning("healing from %s: %s", connection.source.replica_id, connection.failure)
        finally:
            connection.close()
            with self._lock:
                self._ended += 1
                # if the chosen source failed before both were known to be equal, all chunks are fetched again from the other
                if connection.source is self._chosen and self._body and not self._equal and not self._complete:
                    self._chosen, self._open, self._verified_bytes = None, set(range(self._body.manifest.chunks)), 0
                self._lock.notify_all()

    def _fetch_digests(self, connection: SourceConnection) -> None:
        """Fetches the digests of a source's chunks. If that fails, only the chosen source is used."""
        try:
            body = self._body_of(self._header_of(connection))
            length = connection.request("GET", "digests")
            if length != DIGEST_BYTES * (body.manifest.chunks + 1) + VALIDITY_TOKEN_BYTES:
                raise SourceFailed(f"digests of {length} bytes")
            self._compare(connection.source, connection.read_checked(length, "its list of digests was"))
        except (SourceFailed, OSError, ValueError) as error:
            log.info("cannot fetch the digests of %s: %s", connection.source.replica_id, error)
        finally:
            connection.close()

    def _header_of(self, connection: SourceConnection) -> bytes:
        deadline = time.monotonic() + self._config.heal_grace_s
        connection.connect(self._config.heal_grace_s)
        while (length := connection.request("GET", "header")) < 0:
            if time.monotonic() > deadline:
                raise SourceFailed("404 not offered yet")
            with self._lock:
                if self._lock.wait_for(lambda: self._over, timeout=AGAIN_S):
                    raise SourceFailed(self._stopped or "the fetch is complete")
        if not DIGEST_BYTES + VALIDITY_TOKEN_BYTES < length <= MAX_HEADER_BYTES + DIGEST_BYTES + VALIDITY_TOKEN_BYTES:
            raise SourceFailed(f"a header of {length} bytes")
        return connection.read_checked(length, "its header was")

    def _body_of(self, header: bytes) -> TensorPayload:
        """Returns the body that the first header describes. Raises SourceFailed if `header` differs, FormatError if our state does."""
        with self._lock:
            if self._body is None:
                self._body = self._into.body_for(StateManifest.parse(header))
                self._header = header
                self._open = set(range(self._body.manifest.chunks))
            elif header != self._header:
                raise SourceFailed("its header differs from the first source's")
            return self._body

    def _compare(self, source: HealEndpoint, digests: bytes) -> None:
        """Records the digests of a source. When those of both are known and equal, both are used."""
        with self._lock:
            assert self._body is not None
            manifest = self._body.manifest
            self._digests[source] = digests
            if len(self._digests) < len(self._sources):
                return
            one, other = self._digests.values()
            self._equal = one == other
            self._agreed = one if self._equal else b""
            self._lock.notify_all()
        pair = " and ".join(one.replica_id for one in self._sources)
        if not self._equal and pair not in self._logged:
            self._logged[pair] = "they differ"
            at = next(place for place in range(len(one)) if one[place] != other[place])
            names = [manifest.entries[i].name for i, _, _ in manifest.pieces(*manifest.span(at // DIGEST_BYTES))]
            where = " or ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]}"
            log.error(
                "%s hold different states, first in %s: healing from one of them only; which one is right is unknown here",
                pair,
                where,
            )

    def _claim_stripe(self, connection: SourceConnection) -> tuple[range, range] | None:
        """Returns the next stripe, and a range with all chunks that are not verified; None: there are none, or the fetch was stopped. Waits
        while the other connection may still return chunks, and while this source must not be used; hangs up the other if it is too slow."""
        with self._lock:
            may = lambda: self._equal or self._chosen in (None, connection.source)  # noqa: E731
            idle_since_s = time.monotonic()
            while not self._lock.wait_for(lambda: self._over or (self._open and may()), CHECK_S):
                for other in (stream for stream in self._streams if stream is not connection):
                    moved_s = max(other.moved_s, idle_since_s) if not connection.chunk_s else idle_since_s
                    waited_s = time.monotonic() - moved_s
                    if is_too_slow(waited_s, len(other.stripe), connection.chunk_s, self._config.heal_grace_s):
                        other.hang_up("it sends far more slowly than the other")
            self._chosen = self._chosen or connection.source
            if self._stopped or not self._open or self._body is None:
                return None
            most = max(self._min_stripe, min(MAX_STRIPE, self._body.manifest.chunks // 64))
            first = last = max(self._open) if connection.backwards else min(self._open)
            while last - first + 1 < most and (first - 1 if connection.backwards else last + 1) in self._open:
                first, last = (first - 1, last) if connection.backwards else (first, last + 1)
            lacks = self._open | self._requested
            connection.stripe = stripe = range(first, last + 1)
            connection.moved_s = time.monotonic()
            self._open.difference_update(stripe)
            self._requested.update(stripe)
            self._touched = True
            return stripe, range(min(lacks), max(lacks) + 1)

    def _receive_stripe(
        self, connection: SourceConnection, body: TensorPayload, staging: StagingBuffer, stripe: range, lacks: range
    ) -> None:
        """Receives a stripe into the tensors; chunks that are not verified are open again. Raises SourceFailed and OSError."""
        verified: list[int] = []
        began_s = time.monotonic()
        try:
            wanted = f"Range: chunks={stripe[0]}-{stripe[-1]}\r\nLacks: {lacks[0]}-{lacks[-1]}\r\n"
            length = connection.request("GET", "body", wanted)
            start, end = body.manifest.span(stripe[0])[0], body.manifest.span(stripe[-1])[1]
            if length != end - start + DIGEST_BYTES * len(stripe) + VALIDITY_TOKEN_BYTES:
                raise SourceFailed(f"{length} bytes for chunks {stripe[0]}-{stripe[-1]}")
            got, expected = [], bytearray(DIGEST_BYTES)
            for chunk in stripe:
                memory = body.direct(chunk, chunk)
                start, end = body.manifest.span(chunk)
                view = staging.view[: end - start] if memory is None else memory
                # damaged data may be written, as the state is void until everything is verified
                connection.fill(view, memoryview(expected))
                agreed = self._agreed[DIGEST_BYTES * chunk : DIGEST_BYTES * (chunk + 1)] or expected
                if agreed == expected and hmac.compare_digest(chunk_digest(chunk, view), expected):
                    got.append(chunk)
                    if memory is None:
                        body.write(chunk, staging)
                connection.moved_s = time.monotonic()
            connection.read_validity_token()
            verified, connection.chunk_s = got, (time.monotonic() - began_s) / len(stripe)
        finally:
            self._return_stripe(connection, stripe, verified)
        if damaged := len(stripe) - len(verified):
            connection.damaged += damaged
            log.warning("healing from %s: %d damaged chunks", connection.source.replica_id, damaged)
        if connection.damaged > MAX_DAMAGED:
            raise SourceFailed(f"{connection.damaged} chunks were damaged on the way")

    def _return_stripe(self, connection: SourceConnection, stripe: range, verified: Sequence[int]) -> None:
        """Ends a stripe: its chunks that are not verified are open again."""
        with self._lock:
            assert self._body is not None
            manifest, connection.stripe = self._body.manifest, ()
            self._requested.difference_update(stripe)
            self._open.update(set(stripe).difference(verified))
            self._verified_bytes += sum(end - start for start, end in map(manifest.span, verified))
            if self._progress:
                self._progress(self._verified_bytes, manifest.total_bytes)
            self._lock.notify_all()


def is_too_slow(waited_s: float, chunks: int, chunk_s: float, grace_s: float) -> bool:
    """Returns True if a connection with a stripe of `chunks` chunks is too slow for the other one, which has waited for `waited_s`: at its
    own `chunk_s` the waiting one would have received them long ago; if it has no speed yet (0), no chunk has arrived for `grace_s` / 3."""
    return bool(chunks) and waited_s > (1 + SLOWER * chunk_s * chunks if chunk_s else grace_s / 3)
