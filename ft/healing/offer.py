"""One offer of a state: who still needs which chunk, and what happens when the source wants to commit before they have it.

Who sends a chunk from the live tensors holds its connection's lock while it reads them. `fence` waits until little enough is unsent,
then takes all locks, copies the rest aside, and from then on everybody reads the copies. When that does not work in time the offer is
withdrawn: those who read it see that the seal is missing, which ends each reply, and believe nothing of it.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack

import torch

from ft.healing.capture import Snapshot
from ft.healing.format import CHUNK_BYTES, digest
from ft.healing.payload import StagingBuffer
from ft.healing.transport import Fenced

SEAL_BYTES = 16
MAX_READERS = 64  # that are not done
MAX_NAMES = 4096  # of readers in all
LOOK_S = 0.1  # between looks, of a fence that waits for a reader's lock, whether the offer is over


class Withdrawn(RuntimeError):
    """The offer, or this chunk of it, is no more; the text says why."""


class Reader:
    """One joiner. `locks`: one per connection of it, held while the live tensors are read for that one."""

    def __init__(self, chunks: int) -> None:
        self.locks: list[threading.Lock] = []
        self.wants = set(range(chunks))  # not sent yet, or to be sent again


class CheckpointOffer:
    """`readers`: how many joiners are expected; one that has not come yet wants everything."""

    def __init__(self, snapshot: Snapshot, *, quorum_id: int, step: int, readers: int) -> None:
        self.quorum_id, self.step = quorum_id, step
        self.seal = secrets.token_bytes(SEAL_BYTES)
        self.header = snapshot.manifest.encode()
        self.manifest = snapshot.manifest
        self.body = snapshot.body()
        self.over = ""  # why, once it is
        self.fencing = False  # the source waits to commit: whoever sends is to come to an end soon
        self._marks: dict[int, bytes] = {}  # digests of the chunks that somebody has looked at
        self._expected = readers
        self._readers: dict[str, Reader] = {}
        self._aside: dict[int, memoryview] | None = None  # from the fence on
        self._changed = threading.Condition()

    # -------------------------------------------------------------------------------------------- a reader's thread

    def reader(self, name: str) -> Reader:
        """Raises Withdrawn where there are too many."""
        with self._changed:
            if name not in self._readers:
                reading = sum(bool(reader.wants) for reader in self._readers.values())
                if reading >= MAX_READERS or len(self._readers) >= MAX_NAMES:
                    raise Withdrawn(f"{reading} readers already, of {len(self._readers)}")
                self._readers[name] = Reader(self.manifest.chunks)
            return self._readers[name]

    def join(self, reader: Reader) -> threading.Lock:
        """For a new connection of this reader; to be given back by `part`."""
        with self._changed:
            reader.locks.append(threading.Lock())
            return reader.locks[-1]

    def part(self, reader: Reader, lock: threading.Lock) -> None:
        with self._changed:
            reader.locks.remove(lock)

    def wants(self, name: str, chunks: Iterable[int]) -> None:
        """All that this reader still lacks, wherever it means to get it."""
        with self._changed:
            self._readers[name].wants = set(chunks)
            self._changed.notify_all()

    def memory(self, chunk: int) -> memoryview | None:
        """Where the chunk can be sent from: the live tensor, or its copy aside. None: it is to be `read`. The connection's lock is held.
        Raises Withdrawn."""
        self.check()
        if self._aside is None:
            return self.body.direct(chunk, chunk)
        if chunk not in self._aside:
            raise Withdrawn(f"the source went on after step {self.step}, and chunk {chunk} was not asked for before")
        return self._aside[chunk]

    def mark(self, chunk: int, memory: memoryview) -> bytes:
        """The digest of the chunk, which lies in `memory`. The connection's lock is held."""
        return self._marks.get(chunk) or self._marks.setdefault(chunk, digest(chunk, memory))

    def known(self, chunk: int) -> bytes:
        """Its digest, also when the chunk itself was sent and is gone; empty where nobody has asked for either."""
        return self._marks.get(chunk, b"")

    @property
    def fenced(self) -> bool:
        """Whether the live tensors may have changed."""
        return self._aside is not None

    def read(self, chunk: int, bounce: StagingBuffer, at: int = 0) -> memoryview:
        """The chunk in memory that stays as it is: of the bounce, or aside. The connection's lock is held. Raises Withdrawn."""
        self.check()
        if self._aside is not None and (memory := self.memory(chunk)) is not None:
            bounce.view[at * CHUNK_BYTES : at * CHUNK_BYTES + len(memory)] = memory
            return bounce.view[at * CHUNK_BYTES : at * CHUNK_BYTES + len(memory)]
        return self.body.read(chunk, bounce, at)

    @property
    def is_taken(self) -> bool:
        """All that were expected have come, and nothing of it is still to be sent to any of them."""
        with self._changed:
            return not self.over and not self._unsent()

    def check(self) -> None:
        """Raises Withdrawn once the offer is over."""
        if self.over:
            raise Withdrawn(self.over)

    def sent(self, reader: Reader, chunks: Iterable[int]) -> None:
        """No lock is held."""
        with self._changed:
            reader.wants.difference_update(chunks)
            self._changed.notify_all()

    def done(self, name: str) -> None:
        """This reader has verified everything, wherever it came from."""
        with self._changed:
            self._readers.setdefault(name, Reader(0)).wants.clear()
            self._changed.notify_all()

    # -------------------------------------------------------------------------------------------- the source's thread

    def fence(self, copy_bytes: int, grace_s: float) -> Fenced:
        """Afterwards the tensors may change. Takes at most grace_s and the time of a copy."""
        self.fencing = True
        try:
            return self._fence(copy_bytes, grace_s)
        finally:
            self.fencing = False

    def _fence(self, copy_bytes: int, grace_s: float) -> Fenced:
        deadline = time.monotonic() + grace_s
        with self._changed:
            self._changed.wait_for(lambda: self.over or self._unsent_bytes() <= copy_bytes, timeout=grace_s)
            if self.over:
                return Fenced.WITHDRAWN
            if self._aside is not None:
                return Fenced.COPIED if self._aside else Fenced.FREE
            with ExitStack() as held:
                # each is held for one chunk's send over HTTP, for some messages in a group
                for lock in [lock for reader in self._readers.values() for lock in reader.locks]:
                    while not lock.acquire(timeout=LOOK_S):
                        if self.over or time.monotonic() > deadline:
                            return self._end("a reader held its chunk longer than heal_grace_s")
                    held.callback(lock.release)
                if self._unsent_bytes() > copy_bytes:
                    return self._end("the source commits, and its readers were too slow for heal_grace_s")
                self._aside = self._copies()
                return Fenced.COPIED if self._aside else Fenced.FREE

    def withdraw(self, reason: str) -> None:
        """From any thread: nobody gets anything more of it that he would believe, and a fence that waits for readers ends."""
        self.over = self.over or reason  # first: the fence may have the lock, and look
        with self._changed:
            self._end(reason)

    def _unsent(self) -> set[int]:
        if len(self._readers) < self._expected:
            return set(range(self.manifest.chunks))
        return set().union(*(reader.wants for reader in self._readers.values()))

    def _unsent_bytes(self) -> int:
        return len(self._unsent()) * CHUNK_BYTES

    def _copies(self) -> dict[int, memoryview]:
        """A block of memory per chunk, so that nothing larger than the chunks themselves is ever allocated."""
        bounce = StagingBuffer(self.body)
        copies = {}
        for chunk in sorted(self._unsent()):
            memory = self.body.direct(chunk, chunk)
            source = memory if memory is not None else self.body.read(chunk, bounce)
            copy = torch.empty(len(source), dtype=torch.uint8).numpy().data
            copy[:] = source
            copies[chunk] = copy
        return copies

    def _end(self, reason: str) -> Fenced:
        self.over = self.over or reason
        if self._aside:
            self._aside = {}  # up to heal_copy_bytes; the server shows this offer until there is another
        self._changed.notify_all()
        return Fenced.WITHDRAWN
