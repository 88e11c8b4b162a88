"""Healing over HTTP: HttpTransport with a server for this rank's offers (http_server.py), and here the joiner's side.

A fetch has one thread per source, or two for a single source, which meet in the middle. The first takes stripes of chunks from the
front, the second from the back; a faster source so sends more, and the other takes over its rest. A stripe counts when its seal has
come: until then the source may have changed its state under it.

Two sources must hold the same bits, or the joiner would get a mixture that no rank ever had. So the one that answers first is the chosen
one, and gives chunks at once; the other gives none before both have told the digests of all their chunks, and these are equal. They are
told on connections of their own, so a heal from two is never slower than one from the first alone. Where they differ the other gives
nothing, and an error is logged: the joiner will equal one of them, and the next comparison of weights finds that they differ. Should the
chosen one fail before that is known, the other begins anew.
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

from ft.healing.capture import StagingBuffer, StateSnapshot, TensorPayload
from ft.healing.format import DIGEST_BYTES, MAX_HEADER_BYTES, FormatError, StateManifest, digest
from ft.healing.http_server import MAX_HEAD_BYTES, HealServer, after
from ft.healing.transport import (
    SEAL_BYTES,
    HealConfig,
    HealFailed,
    OnBytes,
    Sources,
    StateOffer,
    StateSource,
    Transport,
)
from ft.rpc.access import Access, Endpoint

MAX_SOURCES = 2
MAX_DAMAGED = 8  # chunks of one source; then something is wrong that another try won't mend
MIN_STRIPE, MAX_STRIPE = 64, 1024  # chunks
AGAIN_S = 0.05  # between two requests for an offer that is not there yet
CHECK_S = 0.25  # between two checks, by a connection that has nothing left to take, for one that is too slow
SLOWER = 4.0  # times as slow as the one that waits for it, and a second
_REPLY = re.compile(
    rb"HTTP/1\.1 (\d{3})[ -~]{0,100}\r\n(?:[ -~]*\r\n)*?Content-Length: (\d{1,15})\r\n[ -~\r\n]*", re.IGNORECASE
)
log = logging.getLogger("pharos.healing")


class HttpTransport(Transport):
    """`host`: of the interface to others. `replica_id`: of this group. Raises ValueError where others could reach it without a token."""

    least_stripe = MIN_STRIPE
    done_s = 1.0  # for a source to hear that its reader is done

    def __init__(self, host: str, replica_id: str, access: Access, config: HealConfig | None = None) -> None:
        super().__init__(replica_id, config)
        self.access = access
        self._shown: StateOffer | None = None  # the newest, also when it is withdrawn: its readers are told why
        self._server = HealServer(host, access, lambda: self._shown, silence_s=self.config.heal_grace_s)
        self.address = self._server.address

    def offer(self, snapshot: StateSnapshot, *, quorum_id: int, step: int, readers: Sequence[str]) -> StateOffer:
        self._shown = super().offer(snapshot, quorum_id=quorum_id, step=step, joiners=readers)
        return self._shown

    def _start(self, sources: Sources, into: StateSnapshot, quorum_id: int, step: int, progress: OnBytes) -> HttpFetch:
        return HttpFetch(self, sources, into, f"/heal/{quorum_id}/{step}", progress)

    def notify_done(self, sources: Sources, *, quorum_id: int, step: int) -> None:
        """On new connections, as a source may have been slow or have failed. One that does not hear it fences as if chunks were missing."""

        def notify(source: StateSource) -> None:
            connection = SourceConnection(self, source, f"/heal/{quorum_id}/{step}")
            with contextlib.suppress(SourceFailed, OSError, ValueError), contextlib.closing(connection):
                connection.connect(self.done_s)
                connection.ask("POST", "done")

        threads = [threading.Thread(target=notify, args=(one,), name="heal-done", daemon=True) for one in sources]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.done_s)

    def close(self) -> None:
        super().close()
        self._server.close()
        self._shown = None


class SourceFailed(RuntimeError):
    """This source is of no more use. The text is the cause."""


class SourceConnection:
    """A joiner's connection to a source, of one thread; `hang_up` may come from any."""

    def __init__(self, transport: HttpTransport, source: StateSource, path: str, backwards: bool = False) -> None:
        self.source, self.backwards, self._transport, self._path = source, backwards, transport, path
        self._sock: socket.socket | None = None
        self._seal = b""
        self.ended = ""  # why, once it was hung up
        self.failure, self.layout_mismatch, self.damaged = "", False, 0
        self.stripe: Sequence[int] = ()  # that is being received
        self.moved_s = 0.0  # when the last chunk of it came
        self.chunk_s = 0.0  # what one took, of the last stripe; 0: there was none

    def connect(self, silence_s: float) -> None:
        """Raises OSError and SourceFailed. The kernel keeps the timeouts, so that a receive may wait for a whole chunk in one call."""
        at = Endpoint.parse(self.source.address, "the healing address")
        self._sock = sock = socket.create_connection((at.host, at.port), timeout=silence_s)
        if self.ended:  # that may have come before there was a socket
            raise SourceFailed(self.ended)
        sock.settimeout(None)
        timeout = struct.pack("@ll", int(silence_s), int(silence_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, method: str, what: str, fields: str = "") -> int:
        """The length of the answer, which is still to be read; -1: not offered yet. Raises SourceFailed and OSError."""
        assert self._sock is not None
        token = "".join(f"{name}: {value}\r\n" for name, value in self._transport.access.metadata())
        always = f"Host: healing\r\nReader: {self._transport.replica_id}\r\n{token}"
        self._sock.sendall(f"{method} {self._path}/{what} HTTP/1.1\r\n{always}{fields}\r\n".encode("ascii"))
        head = b""
        while not head.endswith(b"\r\n\r\n"):  # byte by byte: what follows belongs into tensors
            head += self.read(1)
            if len(head) > MAX_HEAD_BYTES:
                raise SourceFailed("the head of its reply is too long")
        status, length = parse_reply(head)
        if status in (200, 206):
            return length
        why = self.read(min(length, 1000)).decode("ascii", "replace").strip()
        if status == 404 and what == "header":
            return -1
        raise SourceFailed(f"{status} {why}")

    def read(self, length: int) -> bytes:
        data = bytearray(length)
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, *parts: memoryview) -> None:
        """Raises OSError where the connection ends before, or is silent too long."""
        assert self._sock is not None
        views = after(0, parts)
        while views:
            count = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            if not count:
                raise ConnectionResetError(self.ended or "it closed the connection before the end")
            views = after(count, views)

    def read_checked(self, length: int, what: str) -> bytes:
        """Data that its digest and the seal follow. Raises SourceFailed, OSError."""
        data, mark = self.read(length - DIGEST_BYTES - SEAL_BYTES), self.read(DIGEST_BYTES)
        if digest(0, memoryview(data)) != mark:
            raise SourceFailed(f"{what} damaged on the way")
        self.read_seal()
        return data

    def read_seal(self) -> None:
        """Ends each reply. Raises SourceFailed, OSError."""
        seal = self.read(SEAL_BYTES)
        self._seal = self._seal or seal
        if not hmac.compare_digest(self._seal, seal):
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
    """Status and Content-Length of a reply's head. Raises ValueError."""
    found = _REPLY.fullmatch(head)
    if not found:
        raise ValueError("no reply of a healing server")
    return int(found[1]), int(found[2])


class HttpFetch:
    def __init__(
        self, transport: HttpTransport, sources: Sources, into: StateSnapshot, path: str, progress: OnBytes
    ) -> None:
        assert 1 <= len(sources) <= MAX_SOURCES, f"{len(sources)} sources"
        self._sources, self._into, self._config = sources, into, transport.config
        self._least_stripe, self._progress = transport.least_stripe, progress
        parts = sources if len(sources) > 1 else [*sources] * self._config.heal_streams
        self._streams = [SourceConnection(transport, one, path, bool(i % 2)) for i, one in enumerate(parts)]
        both = sources if len(sources) > 1 else ()
        self._digest_connections = [SourceConnection(transport, one, path) for one in both]
        self._lock = threading.Condition()
        self._header = b""
        self._body: TensorPayload | None = None
        self._open: set[int] = set()  # chunks that no connection receives or has received
        self._flying: set[int] = set()
        self._touched = False
        self._chosen: StateSource | None = None
        self._equal = len(sources) == 1  # all sources are known to hold the same
        self._digests: dict[StateSource, bytes] = {}
        self._verified_bytes = 0
        self._ended = 0
        self._stopped = ""

    def run(self) -> dict[str, Any]:
        """The state, complete and verified. Raises HealFailed."""
        works = [(self._receive, one) for one in self._streams]
        works += [(self._fetch_digests, one) for one in self._digest_connections]
        for work, connection in works:
            threading.Thread(target=work, args=(connection,), name="heal-fetch", daemon=True).start()
        with self._lock:  # not for a thread that still tries to connect, but for each that may write
            self._lock.wait_for(lambda: not self._flying and (self._over or self._ended == len(self._streams)))
            body, complete = self._body, self._complete
        for connection in self._digest_connections:
            connection.hang_up("the heal has ended")
        if body is not None and complete and not self._stopped:
            return self._into.values_of(body.manifest)
        failed = {one.source.replica_id: one.failure for one in self._streams if one.failure}
        layout_mismatch = not self._stopped and all(connection.layout_mismatch for connection in self._streams)
        raise HealFailed(self._stopped or failed, touched=self._touched, layout_mismatch=layout_mismatch)

    @property
    def _complete(self) -> bool:
        return self._body is not None and not self._open and not self._flying

    @property
    def _over(self) -> bool:
        return bool(self._stopped) or self._complete

    def stop(self, reason: str) -> None:
        with self._lock:
            self._stopped = self._stopped or reason
            self._lock.notify_all()
        for connection in [*self._streams, *self._digest_connections]:
            connection.hang_up(reason)

    # -------------------------------------------------------------------------------------------- the sources' threads

    def _receive(self, connection: SourceConnection) -> None:
        try:
            body = self._agree(self._header_of(connection))
            staging = StagingBuffer(body)
            while stripe := self._claim_stripe(connection):
                self._receive_stripe(connection, body, staging, *stripe)
        except (SourceFailed, OSError, ValueError) as error:
            silent = isinstance(error, BlockingIOError)
            cause = f"it was silent for {self._config.heal_grace_s:g} s" if silent else str(error)
            connection.failure, connection.layout_mismatch = connection.ended or cause, isinstance(error, FormatError)
            log.warning("healing from %s: %s", connection.source.replica_id, connection.failure)
        finally:
            connection.close()
            with self._lock:
                self._ended += 1
                # if the chosen source failed before both were known to be equal, all chunks are fetched anew from the other
                if connection.source is self._chosen and self._body and not self._equal and not self._complete:
                    self._chosen, self._open, self._verified_bytes = None, set(range(self._body.manifest.chunks)), 0
                self._lock.notify_all()

    def _fetch_digests(self, connection: SourceConnection) -> None:
        """Fetches the digests of a source's chunks. It may fail: then one of them gives nothing."""
        try:
            body = self._agree(self._header_of(connection))
            length = connection.ask("GET", "digests")
            if length != DIGEST_BYTES * (body.manifest.chunks + 1) + SEAL_BYTES:
                raise SourceFailed(f"digests of {length} bytes")
            self._compare(connection.source, connection.read_checked(length, "its list of digests was"))
        except (SourceFailed, OSError, ValueError) as error:
            log.info("%s does not tell its digests: %s", connection.source.replica_id, error)
        finally:
            connection.close()

    def _header_of(self, connection: SourceConnection) -> bytes:
        deadline = time.monotonic() + self._config.offer_wait_s
        connection.connect(self._config.heal_grace_s)
        while (length := connection.ask("GET", "header")) < 0:
            if time.monotonic() > deadline:
                raise SourceFailed("404 not offered yet")
            with self._lock:
                if self._lock.wait_for(lambda: self._over, timeout=AGAIN_S):
                    raise SourceFailed(self._stopped or "the other source was faster")
        if not DIGEST_BYTES + SEAL_BYTES < length <= MAX_HEADER_BYTES + DIGEST_BYTES + SEAL_BYTES:
            raise SourceFailed(f"a header of {length} bytes")
        return connection.read_checked(length, "its header was")

    def _agree(self, header: bytes) -> TensorPayload:
        """The first source's header decides. Raises SourceFailed where this one has another state, FormatError for one unlike ours."""
        with self._lock:
            if self._body is None:
                self._body = self._into.body_for(StateManifest.parse(header))
                self._header = header
                self._open = set(range(self._body.manifest.chunks))
            elif header != self._header:
                raise SourceFailed("its header differs from the first source's")
            return self._body

    def _compare(self, source: StateSource, digests: bytes) -> None:
        """The digests of all chunks of a source. The last source to send its own lets the others give chunks, if all are the same."""
        with self._lock:
            assert self._body is not None
            manifest = self._body.manifest
            self._digests[source] = digests
            if len(self._digests) < len(self._sources):
                return
            one, other = self._digests.values()
            self._equal = one == other
            self._lock.notify_all()
        if not self._equal:
            at = next(place for place in range(len(one)) if one[place] != other[place])
            names = [manifest.entries[i].name for i, _, _ in manifest.pieces(*manifest.span(at // DIGEST_BYTES))]
            where = " or ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]}"
            log.error(
                "%s hold different states, first in %s: healing from one of them alone, and nobody can tell here whose is right",
                " and ".join(one.replica_id for one in self._sources),
                where,
            )

    def _claim_stripe(self, connection: SourceConnection) -> tuple[range, range] | None:
        """The next stripe, and a range with all that we lack; None: all is verified, or the fetch was stopped. Waits while others may yet
        give chunks back, and while this source must not give any; but not for one that is far too slow."""
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
            most = max(self._least_stripe, min(MAX_STRIPE, self._body.manifest.chunks // 64))
            first = last = max(self._open) if connection.backwards else min(self._open)
            while last - first + 1 < most and (first - 1 if connection.backwards else last + 1) in self._open:
                first, last = (first - 1, last) if connection.backwards else (first, last + 1)
            lacks = self._open | self._flying
            connection.stripe = stripe = range(first, last + 1)
            connection.moved_s = time.monotonic()
            self._open.difference_update(stripe)
            self._flying.update(stripe)
            self._touched = True
            return stripe, range(min(lacks), max(lacks) + 1)

    def _receive_stripe(
        self, connection: SourceConnection, body: TensorPayload, staging: StagingBuffer, stripe: range, lacks: range
    ) -> None:
        """Into the tensors. Raises SourceFailed and OSError, after what is not verified has been given back."""
        verified: list[int] = []
        began_s = time.monotonic()
        try:
            wanted = f"Range: chunks={stripe[0]}-{stripe[-1]}\r\nLacks: {lacks[0]}-{lacks[-1]}\r\n"
            length = connection.ask("GET", "body", wanted)
            start, end = body.manifest.span(stripe[0])[0], body.manifest.span(stripe[-1])[1]
            if length != end - start + DIGEST_BYTES * len(stripe) + SEAL_BYTES:
                raise SourceFailed(f"{length} bytes in place of chunks {stripe[0]}-{stripe[-1]}")
            got, mark = [], bytearray(DIGEST_BYTES)
            for chunk in stripe:
                memory = body.direct(chunk, chunk)
                start, end = body.manifest.span(chunk)
                view = staging.view[: end - start] if memory is None else memory
                # what is wrong may lie in place: the state is void until all is right
                connection.fill(view, memoryview(mark))
                if hmac.compare_digest(digest(chunk, view), mark):
                    got.append(chunk)
                    if memory is None:
                        body.write(chunk, staging)
                connection.moved_s = time.monotonic()
            connection.read_seal()
            verified, connection.chunk_s = got, (time.monotonic() - began_s) / len(stripe)
        finally:
            self._return_stripe(connection, stripe, verified)
        if damaged := len(stripe) - len(verified):
            connection.damaged += damaged
            log.warning("healing from %s: %d damaged chunks", connection.source.replica_id, damaged)
        if connection.damaged > MAX_DAMAGED:
            raise SourceFailed(f"{connection.damaged} chunks were damaged on the way")

    def _return_stripe(self, connection: SourceConnection, stripe: range, verified: Sequence[int]) -> None:
        """A stripe has ended; what is not verified of it is open again."""
        with self._lock:
            assert self._body is not None
            manifest, connection.stripe = self._body.manifest, ()
            self._flying.difference_update(stripe)
            self._open.update(set(stripe).difference(verified))
            self._verified_bytes += sum(end - start for start, end in map(manifest.span, verified))
            if self._progress:
                self._progress(self._verified_bytes, manifest.total_bytes)
            self._lock.notify_all()


def is_too_slow(waited_s: float, chunks: int, chunk_s: float, grace_s: float) -> bool:
    """True when a connection with a stripe of that many chunks holds up another that has had nothing to take for so long: at `chunk_s` for
    a chunk that one would have had them long ago; or, where it may not take any yet (0), none has come for a third of `grace_s`."""
    return bool(chunks) and waited_s > (1 + SLOWER * chunk_s * chunks if chunk_s else grace_s / 3)
