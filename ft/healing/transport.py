"""Interface of the transports by which a source (a rank with the state) sends it to a joiner (a rank that heals), and StateOffer, the
source's side.

    source:  offer(state.view(), ...)                     at a step boundary, before the forward
             fence()                                      before the optimizer changes the state; without an offer it returns at once
    joiner:  values = fetch(sources, state.view(), ...)   in a thread of its own, while zeros are launched
             state.load(values)                           when all ranks of the group have received everything

From the first byte until `fetch` returns, the joiner's tensors are a mixture: its state is void, and stays void if `fetch` raises.

A StateOffer knows which joiner still needs which chunk, and how many threads are reading the live tensors. `fence` waits until few enough
bytes are unsent and no thread reads, and copies the unsent chunks aside; from then on joiners are served from the copies. If that does not
succeed in time, the offer is withdrawn: each reply ends with a *validity token*, which is then missing, so joiners discard what they have.

A forward may still write to offered buffers (BatchNorm's statistics): a chunk's digest, made for one joiner, is then not that of the bytes
sent to another, which requests the chunk again. What a joiner requests again is copied, and its digest is that of the copy. Such buffers
must come from one source (heal_from_one of compat/manager.py): the digests on which two sources agree are those of before the forward.
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from ft.healing.capture import StagingBuffer, StateView
from ft.healing.format import CHUNK_BYTES, chunk_digest
from ft.protocol import messages as m

VALIDITY_TOKEN_BYTES = 16  # an offer's random token, sent last in a reply: proves that the offer was still valid
MAX_JOINERS = 64  # joiners that have not received everything; over HTTP fewer, as each has several of MAX_CONNECTIONS
MAX_NAMES = 4096  # joiners in all


class HealFailed(RuntimeError):
    """The state was not received. `reason`: a string, or one for each source that failed. `touched`: some of the joiner's tensors may be
    overwritten. `layout_mismatch`: all sources offer a state with a different layout than the joiner's, so a retry is useless.
    `gone_sources`: those that do not offer this state any more, so a retry with them is useless."""

    def __init__(
        self,
        reason: str | Mapping[str, str],
        *,
        touched: bool,
        layout_mismatch: bool = False,
        gone_sources: Collection[str] = (),
    ) -> None:
        super().__init__(reason if isinstance(reason, str) else "; ".join(f"{i}: {why}" for i, why in reason.items()))
        self.touched, self.layout_mismatch, self.gone_sources = touched, layout_mismatch, gone_sources


class Withdrawn(RuntimeError):
    """The offer, or this chunk of it, is not available any more; the message is the reason."""


class TooManyJoiners(RuntimeError):
    """This joiner must wait until others have received everything."""


class Fenced(Enum):
    """Outcome of a fence. In all three cases the state may be changed now."""

    FREE = "no joiner needs any more of it"
    COPIED = "the unsent chunks were copied aside"
    WITHDRAWN = "the offer is withdrawn: its joiners heal again"


@dataclass(frozen=True)
class HealConfig:
    """Limits of healing for one rank; heal_copy_bytes and heal_grace_s come from [fault_tolerance]."""

    heal_copy_bytes: int = 256 << 20  # most bytes that are copied aside for joiners at a commit
    # longest wait of a commit until no more is needed, and of a joiner for an offer; timeout of a silent connection
    heal_grace_s: float = 30.0
    heal_streams: int = 2  # connections to a single source: one alone is limited by the core that serves it


@dataclass(frozen=True)
class HealEndpoint:
    """A rank that has the state, of one of the groups in QuorumResult.sources. `heal_address`: its Transport.address."""

    replica_id: str
    heal_address: str


Sources = Sequence[HealEndpoint]
OnBytes = Callable[[int, int], None] | None  # called with (verified bytes, total bytes) from the transport's threads


class Fetch(Protocol):
    """One fetch. `run` blocks until it returns the state or raises HealFailed; `stop`, from a different thread, cancels it."""

    def run(self) -> dict[str, Any]: ...
    def stop(self, reason: str) -> None: ...


class Transport(ABC):
    """Transport of one rank. `offer`, `fence` and `withdraw` are for the thread that commits; `fetch` blocks the thread that calls it."""

    address: str  # for joiners: the healing address (torchft: checkpoint_metadata)
    done_s = 1.0  # timeout of telling the sources that this joiner needs nothing more
    make_thread: Callable[..., threading.Thread] = threading.Thread

    def __init__(self, replica_id: str, config: HealConfig | None = None) -> None:
        self.replica_id, self.config = replica_id, config or HealConfig()
        self._offer: StateOffer | None = None
        self._fetch: Fetch | None = None
        self._lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def _make_fetch(self, sources: Sources, into: StateView, quorum_id: int, step: int, progress: OnBytes) -> Fetch:
        """Returns a fetch, which begins with its `run`."""

    def fetch(
        self, sources: Sources, into: StateView, *, quorum_id: int, step: int, progress: OnBytes = None
    ) -> dict[str, Any]:
        """Receives the state into the tensors of `into`, from one or two sources; if these differ in a bit it logs an error and uses only
        one. Verifies every byte, and returns the argument of StateRegistry.load. Raises HealFailed."""
        with self._lock:
            if self._closed:
                raise HealFailed("the transport is closed", touched=False)
            assert self._fetch is None, "one fetch at a time"
            self._fetch = fetch = self._make_fetch(sources, into, quorum_id, step, progress)
        try:
            values = fetch.run()
        finally:
            with self._lock:
                self._fetch = None
        self.notify_done(sources, quorum_id=quorum_id, step=step)
        return values

    def notify_done(self, sources: Sources, *, quorum_id: int, step: int) -> None:
        """Tells the sources that this joiner needs nothing more of their offers, so that no fence waits for it. Waits for at most done_s.
        `fetch` calls it when it has received everything; after a final failure the caller must. Uses new connections, as those of
        the fetch may be slow or broken. A source that is not told fences as if chunks were missing."""
        threads = [
            self.make_thread(target=self._notify_done, args=(one, quorum_id, step), name="heal-done", daemon=True)
            for one in sources
        ]
        until_s = time.monotonic() + self.done_s
        with suppress(RuntimeError):  # no further thread: the others are not told
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(max(0.0, until_s - time.monotonic()))

    @abstractmethod
    def _notify_done(self, source: HealEndpoint, quorum_id: int, step: int) -> None:
        """Tells one source, in a thread. Never raises."""

    def stop(self, reason: str) -> None:
        """Cancels a fetch that runs in a different thread, which then raises HealFailed."""
        with self._lock:
            fetch = self._fetch
        if fetch:
            fetch.stop(reason)

    def close(self) -> None:
        """Ends all threads and connections. May be called twice."""
        with self._lock:
            self._closed = True
        self.stop("the transport is closed")
        self.withdraw("the source is leaving")

    def offer(self, view: StateView, *, quorum_id: int, step: int, joiners: Sequence[str]) -> StateOffer:
        """Offers this state to `joiners` (replica IDs), until it is withdrawn or replaced. Withdraws an older offer."""
        self.withdraw("the source has a newer offer")
        self._offer = StateOffer(view, quorum_id=quorum_id, step=step, joiners=len(joiners))
        return self._offer

    @property
    def is_fully_sent(self) -> bool:
        """True when there is an offer, and it was sent to each of its joiners in full. For any thread."""
        offer = self._offer
        return offer is not None and offer.is_fully_sent

    def fence(self) -> Fenced:
        """Returns when the offered tensors may change. Waits at most heal_grace_s, whatever the joiners do."""
        if self._offer is None:
            return Fenced.FREE
        outcome = self._offer.fence(self.config.heal_copy_bytes, self.config.heal_grace_s)
        if outcome is Fenced.WITHDRAWN:
            self.withdraw("the source has committed")
        return outcome

    def end_offer(self, quorum_id: int, reason: str) -> None:
        """Withdraws the current offer if it is that quorum's, which ends a waiting fence. From any thread."""
        offer = self._offer
        if offer is not None and offer.quorum_id == quorum_id:
            offer.withdraw(reason)

    def withdraw(self, reason: str) -> None:
        """Withdraws the offer at once: joiners get no further validity token, and so discard what they have received."""
        if self._offer is not None:
            self._offer.withdraw(reason)
            self._offer = None


class StateOffer:
    """A state that is offered. `joiners`: how many are expected; one that has not connected yet still needs every chunk."""

    def __init__(self, view: StateView, *, quorum_id: int, step: int, joiners: int) -> None:
        self.quorum_id, self.step = quorum_id, step
        self.validity_token = secrets.token_bytes(VALIDITY_TOKEN_BYTES)
        self.manifest, self.body = view.manifest, view.body()
        self.header = view.manifest.encode()
        self.withdrawn_reason = ""  # "": it is not withdrawn
        self.fencing = False  # True: the source waits to commit, so senders should pause soon
        self.digests: dict[int, bytes] = {}  # digests of all chunks that were ever read
        self._expected = joiners
        self._wants: dict[str, set[int]] = {}  # by joiner: chunks that were not sent yet, or are to be sent again
        self._sent: dict[str, bytearray] = {}  # by joiner that lacks chunks: for each chunk 1 if it was sent before
        self.aside: dict[int, memoryview] | None = None  # copies of unsent chunks; None: no fence yet
        self._reading, self._copying = 0, False  # threads inside `reading`; True: a fence lets no more in
        self._changed = threading.Condition()

    # -------------------------------------------------------------------------------------------- a joiner's thread

    def add_joiner(self, name: str) -> None:
        """Registers a joiner. Raises TooManyJoiners."""
        with self._changed:
            if name not in self._wants:
                receiving = sum(map(bool, self._wants.values()))
                if receiving >= MAX_JOINERS or len(self._wants) >= MAX_NAMES:
                    raise TooManyJoiners(f"{receiving} joiners already, of {len(self._wants)} in all")
                self._wants[name] = self._available(range(self.manifest.chunks))

    def set_wanted(self, name: str, chunks: Iterable[int]) -> None:
        """Sets the chunks that this joiner still lacks, whichever source it will request them from; empty: it has verified everything.
        Chunks that were not copied at a fence do not count: this source cannot send them, and no fence may wait for them."""
        with self._changed:
            self._wants[name] = wanted = self._available(chunks)
            if not wanted:
                self._sent.pop(name, None)
            elif name not in self._sent:
                self._sent[name] = bytearray(self.manifest.chunks)
            self._changed.notify_all()

    def _available(self, chunks: Iterable[int]) -> set[int]:
        return set(chunks) if self.aside is None else self.aside.keys() & chunks

    def sent(self, name: str, chunks: Iterable[int]) -> None:
        with self._changed:
            self._wants[name].difference_update(chunks)
            if flags := self._sent.get(name):
                for chunk in chunks:
                    flags[chunk] = 1
            self._changed.notify_all()

    def was_sent(self, name: str, chunk: int) -> bool:
        """Returns True if this joiner requests the chunk again: the bytes that it received have another digest."""
        flags = self._sent.get(name)
        return flags is not None and flags[chunk] == 1

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps the tensors unchanged in the block: a fence waits for its end, or withdraws the offer, so that no validity token follows.
        Raises Withdrawn."""
        with self._changed:
            self._changed.wait_for(lambda: not self._copying)
            self.check()
            self._reading += 1
        try:
            yield
        finally:
            with self._changed:
                self._reading -= 1
                self._release()
                self._changed.notify_all()

    def direct(self, first: int, last: int) -> memoryview | None:
        """Returns the live memory of chunks first..last; None if it is not one piece of host memory, or was fenced. Inside `reading`."""
        return self.body.direct(first, last) if self.aside is None else None

    def read(self, chunk: int, staging: StagingBuffer, at: int = 0) -> memoryview:
        """Copies the chunk to place `at` of the buffer. Inside `reading`. Raises Withdrawn."""
        self.check()
        if self.aside is None:
            return self.body.read(chunk, staging, at)
        if (memory := self.aside.get(chunk)) is None:
            raise self._gone(chunk)
        place = staging.view[at * CHUNK_BYTES : at * CHUNK_BYTES + len(memory)]
        place[:] = memory
        return place

    def digest_of(self, chunk: int, memory: memoryview, *, anew: bool = False) -> bytes:
        """Returns the digest that was made for the first joiner; `anew`: makes it from `memory`, which must be a copy."""
        if anew:
            self.digests[chunk] = digest = chunk_digest(chunk, memory)
            return digest
        return self.digests.get(chunk) or self.digests.setdefault(chunk, chunk_digest(chunk, memory))

    @property
    def is_fully_sent(self) -> bool:
        """True when all expected joiners have registered, and were sent everything."""
        with self._changed:
            return not self.withdrawn_reason and len(self._wants) >= self._expected and not self._unsent()

    def check(self, chunks: Iterable[int] = ()) -> None:
        """Raises Withdrawn if the offer is withdrawn, or if one of these chunks is not available after a fence."""
        if self.withdrawn_reason:
            raise Withdrawn(self.withdrawn_reason)
        if missing := set(chunks) - self._available(chunks):
            raise self._gone(min(missing))

    def _gone(self, chunk: int) -> Withdrawn:
        after = m.describe_step(self.step)
        return Withdrawn(f"the source has committed after step {after}, and chunk {chunk} was not wanted then")

    # -------------------------------------------------------------------------------------------- the source's thread

    def fence(self, copy_bytes: int, grace_s: float) -> Fenced:
        """Returns when the tensors may change. Takes at most grace_s and the time of a copy."""
        deadline = time.monotonic() + grace_s

        def wait_for(ready: Callable[[], bool]) -> bool:
            self._changed.wait_for(
                lambda: self.withdrawn_reason or ready(), timeout=max(0.0, deadline - time.monotonic())
            )
            return not self.withdrawn_reason and ready()

        is_small = lambda: len(self._unsent()) * CHUNK_BYTES <= copy_bytes  # noqa: E731
        with self._changed:
            self.fencing = True
            try:
                small = wait_for(is_small)
                if self.aside is None:
                    self._copying = True  # senders leave `reading` after a chunk (HTTP), or after some messages
                    if small and not wait_for(lambda: not self._reading):
                        return self.withdraw("a chunk was still in use at the end of heal_grace_s")
                    if self.withdrawn_reason or not is_small():
                        return self.withdraw("the source commits, and its joiners took longer than heal_grace_s")
                    try:
                        self.aside = self._copies()
                    except (MemoryError, RuntimeError) as error:  # torch's error for memory is a RuntimeError
                        return self.withdraw(f"the source has no memory for a copy: {error}")
                return Fenced.WITHDRAWN if self.withdrawn_reason else Fenced.COPIED if self.aside else Fenced.FREE
            finally:
                self.fencing = self._copying = False
                self._changed.notify_all()

    def withdraw(self, reason: str) -> Fenced:
        """Withdraws the offer, from any thread: no joiner gets a further validity token, and a waiting fence ends."""
        self.withdrawn_reason = self.withdrawn_reason or reason  # set first: a fence that holds the lock checks it
        with self._changed:
            if self.aside:
                self.aside = {}  # frees up to heal_copy_bytes, as the server keeps this offer until the next one
            self._release()
            self._changed.notify_all()
        return Fenced.WITHDRAWN

    def _release(self) -> None:
        """Drops the tensors of a withdrawn offer that no thread reads: a program's state_dict may return copies."""
        if self.withdrawn_reason and not self._reading:
            self.body.release()

    def _unsent(self) -> set[int]:
        if len(self._wants) < self._expected:
            return set(range(self.manifest.chunks))
        return set().union(*self._wants.values())

    def _copies(self) -> dict[int, memoryview]:
        """Copies the unsent chunks, each into memory of its own, so that no more than these is allocated."""
        staging = StagingBuffer(self.body)
        copies = {}
        for chunk in sorted(self._unsent()):
            source = self.body.read(chunk, staging)
            copies[chunk] = torch.empty(len(source), dtype=torch.uint8).numpy().data
            copies[chunk][:] = source
            self.digests.pop(chunk, None)  # made before the forward, which may have changed buffers
        return copies
