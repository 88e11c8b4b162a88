"""Healing over a process group: the same header and digests, in a process group of two for one source and one joiner.

For clusters where replica groups reach each other only by process groups. The group must support tensors in host memory, so it uses gloo;
state on a device passes through pinned memory. Each rank has a store. A joiner numbers its requests in its source's store, and the two form
a process group for each, so a failed transfer can be requested again. A message has some chunks of one tensor, in place in host memory if
possible. The header determines the order of the messages:

    length and digest of the header | header, validity token | messages, each followed by its chunks' digests | damaged chunks again, which
    the joiner requests up to MAX_REQUESTS times | the validity token again, if the offer is still valid

The source's thread keeps the tensors unchanged while a *flight* of messages is sent. A fence makes it end early, and waits for that.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch

from ft.healing.capture import StagingBuffer, StateView, TensorPayload
from ft.healing.format import CHUNK_BYTES, DIGEST_BYTES, MAX_HEADER_BYTES, FormatError, StateManifest, chunk_digest
from ft.healing.transport import (
    VALIDITY_TOKEN_BYTES,
    HealConfig,
    HealEndpoint,
    HealFailed,
    OnBytes,
    Sources,
    StateOffer,
    Transport,
    Withdrawn,
)
from ft.process_groups.store import StoreClient, serve, sweep
from ft.protocol.messages import incarnation_of
from ft.rpc.access import Endpoint

LENGTH_BYTES = 3  # of the first message's 8: enough for MAX_HEADER_BYTES
MESSAGE_CHUNKS = 16
IN_FLIGHT = 3  # messages in progress: one is read or verified while the others are being sent
FLIGHT = 8  # most messages between two checks for a fence
MAX_REQUESTS = 3  # requests for damaged chunks
MAX_AGAIN = 64  # damaged chunks in one request; with more the fetch fails
STORE_S = 5.0  # timeout of a call of a store
REQUEST_LIMIT = timedelta(days=1)  # longest wait for a request of a joiner, whose heal has ended long before
FETCH, DONE = "fetch", "done"  # what a joiner requests
log = logging.getLogger("pharos.healing")


class PgTransport(Transport):
    """A rank's transport. `make`: makes a process group, not configured yet. `host`: address of this rank's store, which has no token."""

    def __init__(self, make: Callable[[], Any], host: str, replica_id: str, config: HealConfig | None = None) -> None:
        super().__init__(replica_id, config)
        self.make, self._store = make, serve(host)
        self.address = str(Endpoint(host, self._store.port))
        self._senders: list[_Sender] = []

    def offer(self, view: StateView, *, quorum_id: int, step: int, joiners: Sequence[str]) -> StateOffer:
        offer = super().offer(view, quorum_id=quorum_id, step=step, joiners=joiners)
        sweep(self._store, quorum_id)
        for joiner in joiners:
            prefix = _prefix(self.address, self.replica_id, joiner, quorum_id, step)
            self._senders.append(_Sender(self.make, prefix, offer, joiner))
        return offer

    def withdraw(self, reason: str) -> None:
        super().withdraw(reason)
        while self._senders:
            self._senders.pop().end(reason)

    def _make_fetch(self, sources: Sources, into: StateView, quorum_id: int, step: int, progress: OnBytes) -> PgFetch:
        prefixes = [_prefix(one.heal_address, one.replica_id, self.replica_id, quorum_id, step) for one in sources]
        return PgFetch(self, sources, prefixes, into, progress)

    def _notify_done(self, source: HealEndpoint, quorum_id: int, step: int) -> None:
        prefix = _prefix(source.heal_address, source.replica_id, self.replica_id, quorum_id, step)
        with contextlib.suppress(OSError, ValueError), contextlib.closing(StoreClient(prefix, self.done_s)) as store:
            _request(store, DONE)


class PgFetch:
    """One fetch, which tries one source after the other."""

    def __init__(
        self, transport: PgTransport, sources: Sources, prefixes: Sequence[str], into: StateView, progress: OnBytes
    ) -> None:
        self._transport, self._sources, self._prefixes = transport, sources, prefixes
        self._into, self._progress = into, progress
        self._group: Any = None
        self._store: StoreClient | None = None
        self._tag = 0  # tag of the next message
        self._touched = False
        self._stopped = ""

    def run(self) -> dict[str, Any]:
        failed: dict[str, str] = {}
        layout_mismatch = True
        for source, prefix in zip(self._sources, self._prefixes, strict=True):
            self._group = group = self._transport.make()
            self._tag = 0
            try:
                with contextlib.closing(StoreClient(prefix, STORE_S)) as self._store:
                    number = 0 if self._stopped else _request(self._store, FETCH)
                if not self._stopped:
                    group.configure(f"{prefix}/{number}", 1, 2)
                if self._stopped:  # `stop` may have been called before there was a process group
                    break
                return self._fetch()
            except (RuntimeError, ValueError, OSError) as error:  # RuntimeError: all failures of a process group
                failed[source.replica_id] = str(error)
                layout_mismatch &= isinstance(error, FormatError)
                log.warning("healing from %s: %s", source.replica_id, error)
            finally:
                untouched = threading.Event()
                group.abandon("this heal has ended", untouched.set)
                # a message may still be written into our tensors
                untouched.wait(self._transport.config.heal_grace_s)
        layout_mismatch &= bool(failed) and not self._stopped
        raise HealFailed(self._stopped or failed, touched=self._touched, layout_mismatch=layout_mismatch)

    def stop(self, reason: str) -> None:
        self._stopped = self._stopped or reason
        if self._store is not None:
            self._store.hang_up()
        if self._group is not None:
            self._group.interrupt(reason)  # `fetch` abandons it, and waits until nothing writes to tensors

    def _fetch(self) -> dict[str, Any]:
        """Fetches the state from one source. Raises RuntimeError and ValueError for all failures."""
        announced = self._receive(8)
        length = int.from_bytes(announced[:LENGTH_BYTES], "little")
        if not 0 < length <= MAX_HEADER_BYTES:
            raise FormatError(f"a header of {length} bytes")
        data = self._receive(length + VALIDITY_TOKEN_BYTES)
        header, validity_token = data[:length], data[length:]
        if _announcement(header) != announced:
            raise RuntimeError("the header was damaged on the way, or the source is of another version")
        manifest = StateManifest.parse(header)
        body = self._into.body_for(manifest)
        self._touched = True
        damaged = self._receive_messages(body, list(_messages(manifest)))
        for _ in range(MAX_REQUESTS):
            if len(damaged) > MAX_AGAIN:
                raise RuntimeError(f"{len(damaged)} chunks were damaged on the way")
            again = torch.tensor([len(damaged), *damaged, *[0] * (MAX_AGAIN - len(damaged))], dtype=torch.int64)
            self._group.send([again], 0, self._tag).wait()
            self._tag += 1
            if not damaged:
                break
            damaged = self._receive_messages(body, [(chunk, chunk) for chunk in damaged])
        if damaged:
            raise RuntimeError(f"{len(damaged)} chunks were damaged on the way, {MAX_REQUESTS} times")
        if self._receive(VALIDITY_TOKEN_BYTES) != validity_token:
            raise RuntimeError("the source changed its offer during the transfer")
        with contextlib.suppress(RuntimeError):  # optional: everything is verified
            self._group.send([torch.zeros(1, dtype=torch.uint8)], 0, self._tag).wait()
        return self._into.values_of(manifest)

    def _receive_messages(self, body: TensorPayload, messages: list[tuple[int, int]]) -> list[int]:
        """Receives messages, and returns the damaged chunks. While one message is verified the next ones are received."""
        damaged: list[int] = []
        staging, done = StagingBuffer(body, IN_FLIGHT * MESSAGE_CHUNKS), 0
        begun = deque(
            self._begin(body, staging, messages, number) for number in range(min(IN_FLIGHT - 1, len(messages)))
        )
        for number, (first, last) in enumerate(messages):
            data, expected, works, staged = begun.popleft()
            _wait(works)
            if number + IN_FLIGHT - 1 < len(messages):
                begun.append(self._begin(body, staging, messages, number + IN_FLIGHT - 1))
            computed = _digests(first, data)
            for chunk in range(first, last + 1):
                at = (chunk - first) * DIGEST_BYTES
                if not computed[at : at + DIGEST_BYTES].equal(expected[at : at + DIGEST_BYTES]):
                    damaged.append(chunk)
                elif staged:
                    body.write(chunk, staging, number % IN_FLIGHT * MESSAGE_CHUNKS + chunk - first)
            done += len(data)
            if self._progress:
                self._progress(min(done, body.manifest.total_bytes), body.manifest.total_bytes)
        return damaged

    def _begin(
        self, body: TensorPayload, staging: StagingBuffer, messages: Sequence[tuple[int, int]], number: int
    ) -> tuple[torch.Tensor, torch.Tensor, list[Any], bool]:
        first, last = messages[number]
        length = body.manifest.span(last)[1] - body.manifest.span(first)[0]
        memory = body.direct(first, last)
        start = number % IN_FLIGHT * MESSAGE_CHUNKS * CHUNK_BYTES
        data = staging.bytes[start : start + length] if memory is None else torch.frombuffer(memory, dtype=torch.uint8)
        expected = torch.empty((last - first + 1) * DIGEST_BYTES, dtype=torch.uint8)
        return data, expected, [self._start(data), self._start(expected)], memory is None

    def _receive(self, length: int) -> bytes:
        data = torch.empty(length, dtype=torch.uint8)
        self._start(data).wait()
        return bytes(data.numpy().data)

    def _start(self, tensor: torch.Tensor) -> Any:
        self._tag += 1
        return self._group.recv([tensor], 0, self._tag - 1)


def _prefix(address: str, source: str, joiner: str, quorum_id: int, step: int) -> str:
    """Returns the prefix of a joiner's keys in its source's store, as `sweep` expects it. Each side knows itself by the ID of its launch,
    and the other by that in the quorum, which has a rejoin count if that one was lost meanwhile: only the incarnations are equal."""
    return f"{address}/heal/{quorum_id}/{step}/{incarnation_of(source)}/{incarnation_of(joiner)}"


def _announcement(header: bytes) -> bytes:
    """Returns the first message: length and digest of the header. It is as long as a length was in earlier versions, which refuse this one;
    at a message of another length gloo ends the process."""
    return len(header).to_bytes(LENGTH_BYTES, "little") + hashlib.blake2b(header, digest_size=8 - LENGTH_BYTES).digest()


def _request(store: StoreClient, what: str) -> int:
    """Writes the next request of a joiner to its source's store, and returns its number. Raises OSError."""
    store.connect()
    number = store.add("requests", 1)
    store.set(f"request/{number}", what)
    return number


def _messages(manifest: StateManifest) -> Iterator[tuple[int, int]]:
    """Yields each message's first and last chunk: chunks of one tensor share a message; one with parts of several tensors has its own."""
    first = 0
    while first < manifest.chunks:
        last = first
        start = manifest.span(first)[0]
        while last + 1 < min(manifest.chunks, first + MESSAGE_CHUNKS):
            end = manifest.span(last + 1)[1]
            if [high - low for _, low, high in manifest.pieces(start, end)] != [end - start]:
                break
            last += 1
        yield first, last
        first = last + 1


class _Sender:
    """A source's thread for one joiner: serves its requests until one has succeeded, or the joiner needs nothing more."""

    def __init__(self, make: Callable[[], Any], prefix: str, offer: StateOffer, name: str) -> None:
        self._make, self._prefix, self._offer, self._name = make, prefix, offer, name
        self._store = StoreClient(prefix, STORE_S)
        self._group: Any = None
        self._tag = 0
        self._ended = ""  # reason of `end`; "": not called
        threading.Thread(target=self._run, name="heal-sender", daemon=True).start()

    def end(self, reason: str) -> None:
        """Interrupts the thread, wherever it waits."""
        self._ended = reason
        self._store.hang_up()
        if self._group is not None:
            self._group.abandon(reason)

    def _run(self) -> None:
        offer, number = self._offer, 0
        try:
            offer.add_joiner(self._name)
            self._store.connect()
            while True:
                self._store.wait([f"request/{number + 1}"], REQUEST_LIMIT)
                number = self._store.add("requests", 0)  # the newest: the joiner has given up those before
                if self._store.get(f"request/{number}") == DONE.encode() or self._serve(number):
                    break
                offer.set_wanted(self._name, range(offer.manifest.chunks))
        except (RuntimeError, OSError) as error:
            log.info("%s is not served any more: %s", self._name, self._ended or error)
        finally:
            offer.set_wanted(self._name, ())
            self._store.close()

    def _serve(self, number: int) -> bool:
        """Sends the state for a request. Returns False if the joiner has not received all of it: then it notices that its process group
        ends. Raises Withdrawn if the offer is withdrawn."""
        offer = self._offer
        self._group, self._tag = self._make(), 0
        try:
            if self._ended:  # `end` may have been called before there was a process group
                raise Withdrawn(self._ended)
            self._group.configure(f"{self._prefix}/{number}", 0, 2)
            self._send(_bytes(_announcement(offer.header)), _bytes(offer.header + offer.validity_token))
            staging = StagingBuffer(offer.body, IN_FLIGHT * MESSAGE_CHUNKS)
            messages = list(_messages(offer.manifest))
            for again in range(MAX_REQUESTS + 1):
                while messages:
                    sent = self._send_flight(messages, staging, live=again == 0)
                    offer.sent(self._name, [i for first, last in messages[:sent] for i in range(first, last + 1)])
                    del messages[:sent]
                if again < MAX_REQUESTS:
                    wanted = torch.empty(MAX_AGAIN + 1, dtype=torch.int64)
                    self._group.recv([wanted], 1, self._tag).wait()
                    self._tag += 1
                    count, *chunks = wanted.tolist()
                    messages = [(chunk, chunk) for chunk in chunks[: max(0, count)]]
                    if not all(0 <= chunk < offer.manifest.chunks for chunk, _ in messages):
                        raise ValueError("it requests chunks that do not exist")
                if not messages:
                    break
            offer.check()
            self._send(_bytes(offer.validity_token))
            offer.set_wanted(self._name, ())
            self._group.recv([torch.empty(1, dtype=torch.uint8)], 1, self._tag).wait()  # fails if the joiner has ended
            return True
        except (RuntimeError, ValueError) as error:
            log.info("sending the state to %s has ended: %s", self._name, error)
            offer.check()
            return False
        finally:
            self._group.abandon("this request is served")

    def _send_flight(self, messages: Sequence[tuple[int, int]], staging: StagingBuffer, *, live: bool) -> int:
        """Sends the first messages, at most FLIGHT, and fewer if a fence waits; returns their number. `live`: without a copy if possible,
        so that a forward that writes to the chunks meanwhile damages them."""
        pending = deque[list[Any]]()
        with self._offer.reading():
            for number, (first, last) in enumerate(messages[:FLIGHT]):
                if len(pending) == IN_FLIGHT:
                    _wait(pending.popleft())
                data = self._message(first, last, staging, number % IN_FLIGHT * MESSAGE_CHUNKS, live=live)
                pending.append([self._start(data), self._start(_digests(first, data))])
                if self._offer.fencing:
                    break
            while pending:
                _wait(pending.popleft())
        return number + 1

    def _message(self, first: int, last: int, staging: StagingBuffer, place: int, *, live: bool) -> torch.Tensor:
        """Returns the bytes of a message: `live` the tensor's own memory if that is one piece and nothing was copied aside, else a copy."""
        self._offer.check()
        if live and (memory := self._offer.direct(first, last)) is not None:
            return torch.frombuffer(memory, dtype=torch.uint8)
        length = sum(len(self._offer.read(chunk, staging, place + chunk - first)) for chunk in range(first, last + 1))
        return staging.bytes[place * CHUNK_BYTES : place * CHUNK_BYTES + length]

    def _send(self, *tensors: torch.Tensor) -> None:
        _wait([self._start(tensor) for tensor in tensors])

    def _start(self, tensor: torch.Tensor) -> Any:
        self._tag += 1
        return self._group.send([tensor], 1, self._tag - 1)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _digests(first: int, data: torch.Tensor) -> torch.Tensor:
    view = data.numpy().data
    chunks = range(0, len(view), CHUNK_BYTES)
    return _bytes(b"".join(chunk_digest(first + i, view[at : at + CHUNK_BYTES]) for i, at in enumerate(chunks)))
