"""Healing over a process group: the same header and digests, from a source to a joiner in a group of two that is theirs alone.

For clusters where groups reach each other by their process groups alone. The group must take tensors in host memory, so it is a gloo one;
what lies on a device passes through pinned memory. Messages are some chunks of one tensor, in place on
both sides where they lie in one piece of memory; the order of messages follows from the header, so nothing else need be agreed on:

    length of the header, header, seal | messages, each followed by its chunks' digests | the chunks that came damaged are asked for
    again, a few times | the seal again, if the offer has stood to the end

The source's thread keeps the tensors as they are while a flight of messages is sent, so a fence waits for those that are under way, at most
heal_grace_s: a flight ends early where one waits.
"""

from __future__ import annotations

import contextlib
import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ft.healing.capture import StagingBuffer, StateSnapshot, TensorPayload
from ft.healing.format import CHUNK_BYTES, DIGEST_BYTES, MAX_HEADER_BYTES, FormatError, StateManifest, digest
from ft.healing.transport import SEAL_BYTES, HealConfig, HealFailed, OnBytes, Sources, StateOffer, Transport

MESSAGE_CHUNKS = 16
WINDOW = 3  # messages under way: one is read or compared while the others are on the wire
FLIGHT = 8  # messages between two checks for a fence
ROUNDS = 3  # of chunks asked for again
MAX_AGAIN = 64  # chunks in one round; more are no accident
log = logging.getLogger("pharos.healing")


class PgTransport(Transport):
    """`make`: a new process group, not configured yet. `address`: of a store for joiners, "host:port/prefix"."""

    def __init__(
        self, make: Callable[[], Any], address: str, replica_id: str, config: HealConfig | None = None
    ) -> None:
        super().__init__(replica_id, config)
        self.make, self.address = make, address
        self._senders: list[_Sender] = []

    def offer(self, snapshot: StateSnapshot, *, quorum_id: int, step: int, readers: Sequence[str]) -> StateOffer:
        offer = super().offer(snapshot, quorum_id=quorum_id, step=step, joiners=readers)
        for reader in readers:
            store = _store(self.address, self.replica_id, reader, quorum_id, step)
            self._senders.append(_Sender(self.make(), store, offer, reader))
        return offer

    def withdraw(self, reason: str) -> None:
        super().withdraw(reason)
        while self._senders:
            self._senders.pop().group.abandon(reason)  # wakes its thread, whatever it waits for

    def _start(self, sources: Sources, into: StateSnapshot, quorum_id: int, step: int, progress: OnBytes) -> PgFetch:
        stores = [_store(one.address, one.replica_id, self.replica_id, quorum_id, step) for one in sources]
        return PgFetch(self, sources, stores, into, progress)

    def notify_done(self, sources: Sources, *, quorum_id: int, step: int) -> None:
        """Does nothing: a sender sees its group end, and serves no reader a second time."""


class PgFetch:
    """Asks one source after the other, until one gives all."""

    def __init__(
        self, transport: PgTransport, sources: Sources, stores: Sequence[str], into: StateSnapshot, progress: OnBytes
    ) -> None:
        self._transport, self._sources, self._stores = transport, sources, stores
        self._into, self._progress = into, progress
        self._group: Any = None
        self._tag = 0  # of the next message of this group
        self._touched = False
        self._stopped = ""

    def run(self) -> dict[str, Any]:
        failed: dict[str, str] = {}
        layout_mismatch = True
        for source, store in zip(self._sources, self._stores, strict=True):
            self._group = group = self._transport.make()
            self._tag = 0
            try:
                if not self._stopped:
                    group.configure(store, 1, 2)
                if self._stopped:  # it may have come before there was anything to abandon
                    break
                return self._from_one()
            except (RuntimeError, ValueError) as error:  # torch raises RuntimeError for whatever happens to a group
                failed[source.replica_id] = str(error)
                layout_mismatch &= isinstance(error, FormatError)
                log.warning("healing from %s: %s", source.replica_id, error)
            finally:
                untouched = threading.Event()
                group.abandon("this heal has ended", untouched.set)
                # a message in flight may still be written into our tensors
                untouched.wait(self._transport.config.heal_grace_s)
        layout_mismatch &= bool(failed) and not self._stopped
        raise HealFailed(self._stopped or failed, touched=self._touched, layout_mismatch=layout_mismatch)

    def stop(self, reason: str) -> None:
        self._stopped = self._stopped or reason
        if self._group is not None:
            self._group.abandon(reason)

    def _from_one(self) -> dict[str, Any]:
        """Raises RuntimeError and ValueError for whatever is wrong."""
        (length,) = struct.unpack("<Q", self._receive(8))
        if not 0 < length <= MAX_HEADER_BYTES:
            raise FormatError(f"a header of {length} bytes")
        data = self._receive(length + SEAL_BYTES)
        manifest, seal = StateManifest.parse(data[:length]), data[length:]
        body = self._into.body_for(manifest)
        self._touched = True
        damaged = self._receive_messages(body, list(_messages(manifest)))
        for _ in range(ROUNDS):
            if len(damaged) > MAX_AGAIN:
                raise RuntimeError(f"{len(damaged)} chunks were damaged on the way")
            asked = torch.tensor([len(damaged), *damaged, *[0] * (MAX_AGAIN - len(damaged))], dtype=torch.int64)
            self._group.send([asked], 0, self._tag).wait()
            self._tag += 1
            if not damaged:
                break
            damaged = self._receive_messages(body, [(chunk, chunk) for chunk in damaged])
        if damaged:
            raise RuntimeError(f"{len(damaged)} chunks were damaged on the way, {ROUNDS} times")
        if self._receive(SEAL_BYTES) != seal:
            raise RuntimeError("the source changed its offer during the transfer")
        with contextlib.suppress(RuntimeError):  # a courtesy: all is verified
            self._group.send([torch.zeros(1, dtype=torch.uint8)], 0, self._tag).wait()
        return self._into.values_of(manifest)

    def _receive_messages(self, body: TensorPayload, messages: list[tuple[int, int]]) -> list[int]:
        """The chunks that came damaged. Others are on their way while one is compared."""
        damaged: list[int] = []
        staging, done = StagingBuffer(body, WINDOW * MESSAGE_CHUNKS), 0
        begun = deque(self._begin(body, staging, messages, number) for number in range(min(WINDOW - 1, len(messages))))
        for number, (first, last) in enumerate(messages):
            data, marks, works, staged = begun.popleft()
            _wait(works)
            if number + WINDOW - 1 < len(messages):
                begun.append(self._begin(body, staging, messages, number + WINDOW - 1))
            expected = _digests(first, data)
            for chunk in range(first, last + 1):
                at = (chunk - first) * DIGEST_BYTES
                if not expected[at : at + DIGEST_BYTES].equal(marks[at : at + DIGEST_BYTES]):
                    damaged.append(chunk)
                elif staged:
                    body.write(chunk, staging, number % WINDOW * MESSAGE_CHUNKS + chunk - first)
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
        start = number % WINDOW * MESSAGE_CHUNKS * CHUNK_BYTES
        data = staging.bytes[start : start + length] if memory is None else torch.frombuffer(memory, dtype=torch.uint8)
        marks = torch.empty((last - first + 1) * DIGEST_BYTES, dtype=torch.uint8)
        return data, marks, [self._start(data), self._start(marks)], memory is None

    def _receive(self, length: int) -> bytes:
        data = torch.empty(length, dtype=torch.uint8)
        self._start(data).wait()
        return bytes(data.numpy().data)

    def _start(self, tensor: torch.Tensor) -> Any:
        self._tag += 1
        return self._group.recv([tensor], 0, self._tag - 1)


def _store(address: str, source: str, joiner: str, quorum_id: int, step: int) -> str:
    return f"{address}/heal/{quorum_id}/{step}/{source}/{joiner}"


def _messages(manifest: StateManifest) -> Iterator[tuple[int, int]]:
    """(first, last) chunk: both sides see the same. Chunks inside one tensor go together, one with parts of several goes alone."""
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
    """A joiner's thread in the source."""

    def __init__(self, group: Any, store: str, offer: StateOffer, name: str) -> None:
        self.group, self._store, self._offer, self._name = group, store, offer, name
        self._tag = 0
        threading.Thread(target=self._run, name="heal-sender", daemon=True).start()

    def _run(self) -> None:
        """Withdrawn ends it, too: the group is dropped then, and the joiner told by its connection."""
        offer = self._offer
        try:
            offer.add_joiner(self._name)
            self.group.configure(self._store, 0, 2)
            self._send(_bytes(struct.pack("<Q", len(offer.header))), _bytes(offer.header + offer.seal))
            staging = StagingBuffer(offer.body, WINDOW * MESSAGE_CHUNKS)
            messages = list(_messages(offer.manifest))
            for again in range(ROUNDS + 1):
                while messages:
                    sent = self._send_flight(messages, staging)
                    offer.sent(self._name, [i for first, last in messages[:sent] for i in range(first, last + 1)])
                    del messages[:sent]
                if again < ROUNDS:
                    asked = torch.empty(MAX_AGAIN + 1, dtype=torch.int64)
                    self.group.recv([asked], 1, self._tag).wait()
                    self._tag += 1
                    count, *chunks = asked.tolist()
                    messages = [(chunk, chunk) for chunk in chunks[: max(0, count)]]
                    if not all(0 <= chunk < offer.manifest.chunks for chunk, _ in messages):
                        raise ValueError("it asks for chunks that do not exist")
                if not messages:
                    break
            offer.check()
            self._send(_bytes(offer.seal))
            offer.set_wanted(self._name, ())
            self.group.recv([torch.empty(1, dtype=torch.uint8)], 1, self._tag).wait()  # or its end: all has arrived
        except (RuntimeError, ValueError) as error:
            log.info("a reader of the state went away: %s", error)
        finally:
            offer.set_wanted(self._name, ())
            self.group.abandon("this reader has ended")

    def _send_flight(self, messages: Sequence[tuple[int, int]], staging: StagingBuffer) -> int:
        """The first few, fewer where a fence waits; returns how many."""
        flying = deque[list[Any]]()
        with self._offer.reading():
            for number, (first, last) in enumerate(messages[:FLIGHT]):
                if len(flying) == WINDOW:
                    _wait(flying.popleft())
                data = self._message(first, last, staging, number % WINDOW * MESSAGE_CHUNKS)
                flying.append([self._start(data), self._start(_digests(first, data))])
                if self._offer.fencing:
                    break
            while flying:
                _wait(flying.popleft())
        return number + 1

    def _message(self, first: int, last: int, staging: StagingBuffer, place: int) -> torch.Tensor:
        """The tensor's own memory, where nothing was copied aside and it is in one piece."""
        self._offer.check()
        if (memory := self._offer.direct(first, last)) is not None:
            return torch.frombuffer(memory, dtype=torch.uint8)
        length = sum(len(self._offer.read(chunk, staging, place + chunk - first)) for chunk in range(first, last + 1))
        return staging.bytes[place * CHUNK_BYTES : place * CHUNK_BYTES + length]

    def _send(self, *tensors: torch.Tensor) -> None:
        _wait([self._start(tensor) for tensor in tensors])

    def _start(self, tensor: torch.Tensor) -> Any:
        self._tag += 1
        return self.group.send([tensor], 1, self._tag - 1)


def _wait(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _digests(first: int, data: torch.Tensor) -> torch.Tensor:
    view = data.numpy().data
    chunks = range(0, len(view), CHUNK_BYTES)
    return _bytes(b"".join(digest(first + i, view[at : at + CHUNK_BYTES]) for i, at in enumerate(chunks)))
