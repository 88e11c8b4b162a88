"""Healing over HTTP: HttpTransport with a server for this rank's offers (http_server.py), and here the joiner's side.

A fetch has one thread per source, or two for a single source, which meet in the middle. The first takes stripes of chunks from the
front, the second from the back; a faster source so sends more, and the other takes over its rest. A stripe counts when its seal has
come: until then the source may have changed its state under it.

Two sources must hold the same bits, or the joiner would get a mixture that nobody ever had. So the one that answers first is the chosen
one, and gives chunks at once; the other gives none before both have told the digests of all their chunks, and these are equal. They are
told on connections of their own, so a heal from two is never slower than one from the first alone. Where they differ the other gives
nothing, and an error says so: the joiner will equal one of them, and the next comparison of weights finds that they differ. Should the
chosen one fail before that is known, the other begins anew.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from ft.healing.capture import StagingBuffer, StateSnapshot, TensorPayload
from ft.healing.format import DIGEST_BYTES, MAX_HEADER_BYTES, FormatError, StateManifest, digest
from ft.healing.http_requests import MAX_HEAD_BYTES, bounded_ranges, parse_reply, ranges_of, request_head
from ft.healing.http_server import HealServer
from ft.healing.transport import SEAL_BYTES, HealConfig, HealFailed, Progress, StateSource, Transport
from ft.rpc.access import Access, Endpoint

MAX_SOURCES = 2
MAX_DAMAGED = 8  # chunks of one source; then something is wrong that another try won't mend
LEAST_STRIPE, MOST_STRIPE = 64, 1024  # chunks
TELL_S = 1.0
AGAIN_S = 0.05  # between two looks for an offer that is not there yet
LOOK_S = 0.25  # between two looks, of a connection that has nothing left to take, for one that is too slow
SLOWER = 4.0  # times as slow as the one that waits for it, and a second
log = logging.getLogger("pharos.healing")


class HttpTransport(Transport):
    """`host`: the address of the interface that others reach. `replica_id`: this rank's group. Raises ValueError for an address that others
    could reach without a token."""

    def __init__(self, host: str, replica_id: str, access: Access, config: HealConfig | None = None) -> None:
        super().__init__(replica_id, config)
        self._access = access
        self._server = HealServer(host, access, silence_s=self._config.heal_grace_s)
        self._fetch: Fetch | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def address(self) -> str:
        return self._server.address

    def offer(self, snapshot: StateSnapshot, *, quorum_id: int, step: int, readers: Sequence[str]) -> None:
        super().offer(snapshot, quorum_id=quorum_id, step=step, readers=readers)
        self._server.shown = self._offer  # which keeps it when it is withdrawn, to tell its readers why

    def fetch(
        self,
        sources: Sequence[StateSource],
        into: StateSnapshot,
        *,
        quorum_id: int,
        step: int,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        with self._lock:
            if self._closed:
                raise HealFailed("the transport is closed", touched=False)
            assert self._fetch is None, "one fetch at a time"
            self._fetch = self._from(sources, into, quorum_id=quorum_id, step=step, progress=progress)
        try:
            return self._fetch.run()
        finally:
            with self._lock:
                self._fetch = None

    def _from(self, sources: Sequence[StateSource], into: StateSnapshot | None, **more: Any) -> Fetch:
        return Fetch(sources, into, reader=self._replica_id, access=self._access, config=self._config, **more)

    def tell_done(self, sources: Sequence[StateSource], *, quorum_id: int, step: int) -> None:
        if sources:
            self._from(sources, None, quorum_id=quorum_id, step=step).tell_done()

    def stop(self, reason: str) -> None:
        with self._lock:
            fetch = self._fetch
        if fetch:
            fetch.stop(reason)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.stop("the transport is closed")
        self.withdraw("the source is leaving")
        self._server.close()
        self._server.shown = None


class SourceFailed(RuntimeError):
    """This source is of no more use. The text says why."""


class SourceUnlike(SourceFailed):
    """Its state has another layout than ours."""


class Fetch:
    """A heal. `run` blocks; `stop`, from another thread, ends it. `into`: None where there is nothing to do but `tell_done`."""

    def __init__(
        self,
        sources: Sequence[StateSource],
        into: StateSnapshot | None,
        *,
        quorum_id: int,
        step: int,
        reader: str,
        access: Access,
        config: HealConfig,
        progress: Progress | None = None,
    ) -> None:
        assert 1 <= len(sources) <= MAX_SOURCES, f"{len(sources)} sources"
        self.sources, self.into, self.access, self.config = tuple(sources), into, access, config
        self.path, self.reader = f"/heal/{quorum_id}/{step}", reader
        streams = [*sources] if len(sources) > 1 else [*sources] * config.heal_streams
        self._sources = [_FromSource(self, source, backwards=bool(i % 2)) for i, source in enumerate(streams)]
        self._witnesses = [_FromSource(self, source) for source in sources] if len(sources) > 1 else []
        self._progress = progress or (lambda done, total: None)
        self._lock = threading.Condition()
        self._header = b""
        self._manifest: StateManifest | None = None
        self._body: TensorPayload | None = None
        self._open: set[int] = set()  # chunks that nobody receives and nobody has
        self._flying: set[int] = set()
        self._touched = False
        self._chosen: StateSource | None = None
        self._equal = len(sources) == 1  # all sources are known to hold the same
        self._digests: dict[StateSource, bytes] = {}
        self._verified_bytes = 0
        self._ended = 0
        self.stopped = ""

    def run(self) -> dict[str, Any]:
        """The state, complete and verified. Raises HealFailed."""
        for work in [*(one.run for one in self._sources), *(one.witness for one in self._witnesses)]:
            threading.Thread(target=work, name="heal-fetch", daemon=True).start()
        assert self.into is not None
        with self._lock:  # not for a thread that still tries to connect, but for each that may write
            self._lock.wait_for(
                lambda: not self._flying and (self.complete or self.stopped or self._ended == len(self._sources))
            )
            manifest, complete = self._manifest, self.complete
        for one in self._witnesses:
            one.hang_up()
        failed = {one.source.replica_id: one.failure for one in self._sources if one.failure}
        if manifest is None or not complete or self.stopped:
            reason = self.stopped or "; ".join(f"{name}: {why}" for name, why in failed.items())
            unlike = not self.stopped and all(one.unlike for one in self._sources)
            raise HealFailed(reason, touched=self._touched, blame=() if self.stopped else tuple(failed), unlike=unlike)
        self.tell_done()
        return self.into.values_of(manifest)

    def tell_done(self) -> None:
        """Tells the sources that nothing more will be read: a courtesy, so a source that is slow to hear it is not waited for."""
        ends = [_FromSource(self, source).tell_done for source in self.sources]
        told = [threading.Thread(target=end, name="heal-done", daemon=True) for end in ends]
        for thread in told:
            thread.start()
        for thread in told:
            thread.join(TELL_S)

    @property
    def complete(self) -> bool:
        return self._manifest is not None and not self._open and not self._flying

    def stop(self, reason: str) -> None:
        with self._lock:
            self.stopped = self.stopped or reason
            self._lock.notify_all()
        for one in [*self._sources, *self._witnesses]:
            one.hang_up()

    # -------------------------------------------------------------------------------------------- for the sources' threads

    def agree(self, header: bytes) -> TensorPayload:
        """The first source's header decides. Raises SourceFailed where this one has another state, SourceUnlike where it has one that is
        not like ours."""
        with self._lock:
            if self._body is None:
                assert self.into is not None
                try:
                    manifest = StateManifest.parse(header)
                    self._body = self.into.body_for(manifest)
                except FormatError as error:
                    raise SourceUnlike(str(error)) from None
                self._header, self._manifest = header, manifest
                self._open = set(range(manifest.chunks))
            elif header != self._header:
                raise SourceFailed("its state is another than the first source's")
            return self._body

    def compare(self, source: StateSource, digests: bytes) -> None:
        """The digests of all chunks of a source. The last source to send its own lets the others give chunks, if all are the same."""
        with self._lock:
            manifest = self._manifest
            assert manifest is not None
            self._digests[source] = digests
            if len(self._digests) < len(self.sources):
                return
            one, other = self._digests.values()
            self._equal = one == other
            self._lock.notify_all()
        if not self._equal:
            at = next(place for place in range(len(one)) if one[place] != other[place])
            names = [
                manifest.entries[index].name for index, _, _ in manifest.pieces(*manifest.span(at // DIGEST_BYTES))
            ]
            where = " or ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]}"
            log.error(
                "%s hold different states, first in %s: healing from one of them alone, and nobody can tell here whose is right",
                " and ".join(one.replica_id for one in self.sources),
                where,
            )

    def take(self, one: _FromSource, backwards: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """The next stripe, in one piece, and what we lack in all; no stripe: all is verified, or the fetch was stopped. Waits while others
        may yet give chunks back, and while this source must not give any; but not for one that is far too slow."""
        source = one.source

        def enough() -> bool:
            may = self._equal or self._chosen in (None, source)
            return bool(self.stopped or self.complete or (self._open and may))

        with self._lock:
            assert self._manifest is not None
            idle_since_s = time.monotonic()
            while not self._lock.wait_for(enough, LOOK_S):
                for other in self._sources:
                    if other is not one and other.is_too_slow_for(one, idle_since_s):
                        other.hang_up("it sends far more slowly than the other")
            self._chosen = self._chosen or source
            if self.stopped or not self._open:
                return [], []
            most = max(LEAST_STRIPE, min(MOST_STRIPE, self._manifest.chunks // 64))
            ranges = ranges_of(sorted(self._open))
            first, last = ranges[-1] if backwards else ranges[0]
            if backwards:
                first = max(first, last - most + 1)
            stripe = list(range(first, min(last, first + most - 1) + 1))
            lacks = ranges_of(sorted(self._open | self._flying))
            self._open.difference_update(stripe)
            self._flying.update(stripe)
            self._touched = True
            return stripe, lacks

    def give(self, stripe: Sequence[int], verified: set[int]) -> None:
        """A stripe has ended; what is not verified of it is open again."""
        with self._lock:
            assert self._manifest is not None
            self._flying.difference_update(stripe)
            self._open.update(set(stripe) - verified)
            spans = [self._manifest.span(chunk) for chunk in verified]
            self._verified_bytes += sum(end - start for start, end in spans)
            self._progress(self._verified_bytes, self._manifest.total_bytes)
            self._lock.notify_all()

    def ended(self, source: StateSource) -> None:
        """A source's thread is at its end. Was it the chosen one, and may the other hold something else, then all comes from that one."""
        with self._lock:
            self._ended += 1
            if source is self._chosen and self._manifest and not self._equal and not self.complete:
                self._chosen, self._open, self._verified_bytes = None, set(range(self._manifest.chunks)), 0
            self._lock.notify_all()


class _FromSource:
    """A thread and its connection to a source."""

    def __init__(self, fetch: Fetch, source: StateSource, *, backwards: bool = False) -> None:
        self.source, self.failure, self.unlike = source, "", False
        self._fetch, self._backwards = fetch, backwards
        self._damaged = 0
        self._sock: socket.socket | None = None
        self._stripe: Sequence[int] = ()  # that is being received
        self._moved_s = 0.0  # when the last chunk of it came
        self._chunk_s = 0.0  # what one took, of the last stripe; 0: there was none
        self._given_up = ""

    def run(self) -> None:
        try:
            body = self._fetch.agree(self._fetch_header())
            staging = StagingBuffer(body)
            while True:
                stripe, lacks = self._fetch.take(self, self._backwards)
                if not stripe:
                    break
                self._receive_stripe(body, staging, stripe, lacks)
        except (SourceFailed, OSError, ValueError) as error:
            silent = isinstance(error, BlockingIOError)
            words = f"it was silent for {self._fetch.config.heal_grace_s:g} s" if silent else str(error)
            self.failure, self.unlike = self._given_up or words, isinstance(error, SourceUnlike)
            log.warning("healing from %s: %s", self.source.replica_id, self.failure)
        finally:
            if self._sock:
                self._sock.close()
            self._fetch.ended(self.source)

    def witness(self) -> None:
        """Fetches the digests of this source's chunks. It may fail: then one of them gives nothing."""
        try:
            body = self._fetch.agree(self._fetch_header())
            length = self._ask("GET", "digests")
            if length != DIGEST_BYTES * (body.manifest.chunks + 1) + SEAL_BYTES:
                raise SourceFailed(f"digests of {length} bytes")
            seal = self._seal
            digests = self._read_checked(length, "its list of digests was")
            if not hmac.compare_digest(self._seal, seal):
                raise SourceFailed("its offer is another than the one it began with")
            self._fetch.compare(self.source, digests)
        except (SourceFailed, OSError, ValueError) as error:
            log.info("%s does not say what its state is: %s", self.source.replica_id, error)
        finally:
            if self._sock:
                self._sock.close()

    def is_too_slow_for(self, other: _FromSource, idle_since_s: float) -> bool:
        """`other` has nothing left to take since then, and would have had this stripe long ago; or, where it was not allowed to take any
        yet, this one has not sent a single chunk for a third of what it may be silent."""
        now_s = time.monotonic()
        if not self._stripe:
            return False
        if other._chunk_s:
            return now_s - idle_since_s > 1 + SLOWER * other._chunk_s * len(self._stripe)
        return now_s - max(self._moved_s, idle_since_s) > self._fetch.config.heal_grace_s / 3

    def hang_up(self, why: str = "") -> None:
        self._given_up = self._given_up or why
        if self._sock:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def _fetch_header(self) -> bytes:
        deadline = time.monotonic() + self._fetch.config.offer_wait_s
        self._connect(self._fetch.config.heal_grace_s)
        while (length := self._ask("GET", "header", may_wait=time.monotonic() < deadline)) < 0:
            with self._fetch._lock:  # the offer is not there yet; a stop ends the wait
                self._fetch._lock.wait_for(lambda: self._fetch.stopped or self._fetch.complete, timeout=AGAIN_S)
            if self._fetch.stopped or self._fetch.complete:
                raise SourceFailed(self._fetch.stopped or "the other source was faster")
        if not DIGEST_BYTES + SEAL_BYTES < length <= MAX_HEADER_BYTES + DIGEST_BYTES + SEAL_BYTES:
            raise SourceFailed(f"a header of {length} bytes")
        return self._read_checked(length, "its header was")

    def _read_checked(self, length: int, what: str) -> bytes:
        """Data that its digest and the seal follow. Raises SourceFailed, OSError."""
        data = self._read(length)
        found, mark = data[: -DIGEST_BYTES - SEAL_BYTES], data[-DIGEST_BYTES - SEAL_BYTES : -SEAL_BYTES]
        if digest(0, memoryview(found)) != mark:
            raise SourceFailed(f"{what} damaged on the way")
        self._seal = data[-SEAL_BYTES:]
        return found

    def _connect(self, silence_s: float) -> None:
        """Raises OSError and SourceFailed. The kernel keeps the timeouts, so that a receive may wait for a whole chunk in one call."""
        at = Endpoint.parse(self.source.address, "the healing address")
        self._sock = sock = socket.create_connection((at.host, at.port), timeout=silence_s)
        if self._fetch.stopped:  # stop() may have come before there was a socket to hang up
            raise SourceFailed(self._fetch.stopped)
        sock.settimeout(None)
        timeout = struct.pack("@ll", int(silence_s), int(silence_s % 1 * 1e6))
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, timeout)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _ask(self, method: str, what: str, *fields: tuple[str, str], may_wait: bool = False) -> int:
        """The length of the answer, which is still to be read; -1: not offered yet. Raises SourceFailed and OSError."""
        assert self._sock is not None
        always = (("Host", "healing"), ("Reader", self._fetch.reader), *self._fetch.access.metadata())
        self._sock.sendall(request_head(method, f"{self._fetch.path}/{what}", (*always, *fields)))
        head = b""
        while not head.endswith(b"\r\n\r\n"):  # byte by byte: what follows belongs into tensors
            head += self._read(1)
            if len(head) > MAX_HEAD_BYTES:
                raise SourceFailed("no end of its reply's head")
        status, length = parse_reply(head[:-4])
        if status in (200, 206):
            return length
        why = self._read(min(length, 1000)).decode("ascii", "replace").strip()
        if status == 404 and may_wait:
            return -1
        raise SourceFailed(f"{status} {why}")

    def _receive_stripe(
        self, body: TensorPayload, staging: StagingBuffer, stripe: Sequence[int], lacks: list[tuple[int, int]]
    ) -> None:
        """Into the tensors. Raises SourceFailed and OSError, after what is not verified has been given back."""
        verified: set[int] = set()
        self._stripe, self._moved_s = stripe, time.monotonic()
        began_s = self._moved_s
        try:
            got: set[int] = set()
            wanted = (("Range", f"chunks={stripe[0]}-{stripe[-1]}"), ("Lacks", bounded_ranges(lacks)))
            length = self._ask("GET", "body", *wanted)
            start, end = body.manifest.span(stripe[0])[0], body.manifest.span(stripe[-1])[1]
            if length != end - start + DIGEST_BYTES * len(stripe) + SEAL_BYTES:
                raise SourceFailed(f"{length} bytes in place of chunks {stripe[0]}-{stripe[-1]}")
            for chunk in stripe:
                if self._receive_chunk(body, staging, chunk):
                    got.add(chunk)
                self._moved_s = time.monotonic()
            if not hmac.compare_digest(self._read(SEAL_BYTES), self._seal):
                raise SourceFailed("its offer is another than the one it began with")
            verified = got
            self._chunk_s = (time.monotonic() - began_s) / len(stripe)
        finally:
            self._stripe = ()
            self._fetch.give(stripe, verified)
        self._damaged += len(stripe) - len(verified)
        if len(verified) < len(stripe):
            log.warning("healing from %s: %d damaged chunks", self.source.replica_id, len(stripe) - len(verified))
        if self._damaged > MAX_DAMAGED:
            raise SourceFailed(f"{self._damaged} chunks were damaged on the way")

    def _receive_chunk(self, body: TensorPayload, staging: StagingBuffer, chunk: int) -> bool:
        """Receives one chunk; True when its digest is right. A wrong one may be written in place: the state is void until all is right."""
        start, end = body.manifest.span(chunk)
        memory = body.direct(chunk, chunk)
        view = staging.view[: end - start] if memory is None else memory
        mark = bytearray(DIGEST_BYTES)
        self._fill([view, memoryview(mark)])
        if not hmac.compare_digest(digest(chunk, view), mark):
            return False
        if memory is None:
            body.write(chunk, staging)
        return True

    def tell_done(self) -> None:
        """On a connection of its own, as the source may have been slow or have failed. Only a courtesy: one that does not hear it fences as
        if something were missing."""
        with contextlib.suppress(SourceFailed, OSError, ValueError):
            self._connect(TELL_S)
            with self._sock or contextlib.nullcontext():
                self._ask("POST", "done")

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        self._fill([memoryview(data)])
        return bytes(data)

    def _fill(self, views: list[memoryview]) -> None:
        """Raises OSError where the connection ends before, or is silent too long."""
        assert self._sock is not None
        while views:
            count = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            if not count:
                raise ConnectionResetError(self._fetch.stopped or "it closed the connection before the end")
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if views:
                views[0] = views[0][count:]
