"""A healing transport: what a source and a joiner ask of it, and the source's bookkeeping, which is the same on every wire.

    source:  offer(state.snapshot(), ...)  at a step's boundary, before the forward
             fence()                       before the optimizer changes the state; a source that has nothing on offer may call it, too
    joiner:  values = fetch(sources, state.snapshot(), ...)     in a thread of its own, while zeros are launched
             state.load(values)            when all ranks of the group have all of it

From the first byte until `fetch` returns, the joiner's tensors are a mixture: its state is void, and void it stays if `fetch` raises.

A StateOffer knows which reader still needs which chunk, and how many threads read the live tensors just now. `fence` waits until
little enough is unsent and no thread reads, copies the rest aside, and from then on all read the copies. When that does not work in
time the offer is withdrawn: its readers see that the seal is missing, which ends each reply, and discard what they received.
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch

from ft.healing.capture import StagingBuffer, StateSnapshot
from ft.healing.format import CHUNK_BYTES, digest

SEAL_BYTES = 16  # an offer's random token, sent last in a reply: proof that the offer was still valid
MAX_JOINERS = 64  # that are not done
MAX_NAMES = 4096  # of readers in all


class HealFailed(RuntimeError):
    """The state was not received. `reason`: by source, where they failed: `blame` has these. `touched`: some of the joiner's tensors may
    hold bytes of it. `layout_mismatch`: every source offers a state of another layout than the joiner's, so no other try will do."""

    def __init__(self, reason: str | Mapping[str, str], *, touched: bool, layout_mismatch: bool = False) -> None:
        failed = {} if isinstance(reason, str) else reason
        super().__init__(reason if isinstance(reason, str) else "; ".join(f"{i}: {why}" for i, why in failed.items()))
        self.touched, self.blame, self.layout_mismatch = touched, tuple(failed), layout_mismatch


class Withdrawn(RuntimeError):
    """The offer, or this chunk of it, is no more; the text says why."""


class Fenced(Enum):
    """Outcome of a fence. In all three cases the state may be changed now."""

    FREE = "no reader needs any more of it"
    COPIED = "what is unsent was copied aside"
    WITHDRAWN = "the offer is withdrawn: its readers heal anew"


@dataclass(frozen=True)
class HealConfig:
    """Limits of healing for one rank; heal_copy_bytes and heal_grace_s come from [fault_tolerance]."""

    heal_copy_bytes: int = 256 << 20  # at most so much is copied aside for readers that are not done at a commit
    heal_grace_s: float = 30.0  # a commit waits so long for the rest to be small; a connection may be silent so long
    heal_streams: int = 2  # connections to a single source: one alone is bound by the core that fills it
    offer_wait_s: float = 30.0  # a joiner waits so long for an offer that is not there yet


@dataclass(frozen=True)
class StateSource:
    """A rank that has the state. `address`: its transport's, from checkpoint_metadata."""

    replica_id: str
    address: str


Sources = Sequence[StateSource]
OnBytes = Callable[[int, int], None] | None  # called with (verified bytes, total bytes) from the transport's threads


class Fetch(Protocol):
    """A heal. `run` blocks, and gives the state or raises HealFailed; `stop`, from another thread, ends it."""

    def run(self) -> dict[str, Any]: ...
    def stop(self, reason: str) -> None: ...


class Transport(ABC):
    """Transport of one rank. `offer`, `fence` and `withdraw` belong to the thread that commits; `fetch` blocks the thread that calls it."""

    address: str  # for joiners (checkpoint_metadata)

    def __init__(self, replica_id: str, config: HealConfig | None = None) -> None:
        self.replica_id, self.config = replica_id, config or HealConfig()
        self._offer: StateOffer | None = None
        self._fetch: Fetch | None = None
        self._lock = threading.Lock()
        self._closed = False

    @abstractmethod
    def _start(self, sources: Sources, into: StateSnapshot, quorum_id: int, step: int, progress: OnBytes) -> Fetch: ...

    def fetch(
        self, sources: Sources, into: StateSnapshot, *, quorum_id: int, step: int, progress: OnBytes = None
    ) -> dict[str, Any]:
        """Receives into the tensors of `into`, from up to two sources; from one alone, and with an error logged, where they do not hold the
        same bits. Returns, after every byte has been verified, the argument of StateRegistry.load. Raises HealFailed."""
        with self._lock:
            if self._closed:
                raise HealFailed("the transport is closed", touched=False)
            assert self._fetch is None, "one fetch at a time"
            self._fetch = fetch = self._start(sources, into, quorum_id, step, progress)
        try:
            values = fetch.run()
        finally:
            with self._lock:
                self._fetch = None
        self.notify_done(sources, quorum_id=quorum_id, step=step)
        return values

    @abstractmethod
    def notify_done(self, sources: Sources, *, quorum_id: int, step: int) -> None:
        """Tells the sources that nothing more of that offer will be read here, whether all has come or none: no fence then waits for this
        joiner. A source that is slow to hear it is not waited for. `fetch` calls it by itself where it has received everything."""

    def stop(self, reason: str) -> None:
        """A fetch that runs in another thread ends now, with HealFailed."""
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

    def offer(self, snapshot: StateSnapshot, *, quorum_id: int, step: int, readers: Sequence[str]) -> StateOffer:
        """Serves this state, and no other, to the joiners (replica ids) until fence or withdraw. An older offer is withdrawn."""
        self.withdraw("the source has a newer offer")
        self._offer = StateOffer(snapshot, quorum_id=quorum_id, step=step, joiners=len(readers))
        return self._offer

    @property
    def is_fully_sent(self) -> bool:
        """True when there is an offer, and each of its readers has been sent all of it. Any thread may ask."""
        offer = self._offer
        return offer is not None and offer.is_fully_sent

    def fence(self) -> Fenced:
        """Lets the offered tensors change afterwards. Never waits longer than heal_grace_s, whatever the readers do."""
        if self._offer is None:
            return Fenced.FREE
        outcome = self._offer.fence(self.config.heal_copy_bytes, self.config.heal_grace_s)
        if outcome is Fenced.WITHDRAWN:
            self.withdraw("the source went on")
        return outcome

    def end_offer(self, quorum_id: int, reason: str) -> None:
        """Ends the offer of that quorum, if that is the present one; a fence that waits for it ends. Any thread may call it."""
        offer = self._offer
        if offer is not None and offer.quorum_id == quorum_id:
            offer.withdraw(reason)

    def withdraw(self, reason: str) -> None:
        """The offer is over, at once: its readers get no further valid seal, so they discard what they have."""
        if self._offer is not None:
            self._offer.withdraw(reason)
            self._offer = None


class StateOffer:
    """A state on offer. `readers`: how many healing ranks are expected; one that has not connected yet still needs every chunk."""

    def __init__(self, snapshot: StateSnapshot, *, quorum_id: int, step: int, readers: int) -> None:
        self.quorum_id, self.step = quorum_id, step
        self.seal = secrets.token_bytes(SEAL_BYTES)
        self.manifest, self.body = snapshot.manifest, snapshot.body()
        self.header = snapshot.manifest.encode()
        self.withdrawn_reason = ""  # why, once it is
        self.fencing = False  # the source waits to commit: a sender is to come to an end soon
        self.digests: dict[int, bytes] = {}  # of the chunks that were read, also when they are gone
        self._expected = readers
        self._wants: dict[str, set[int]] = {}  # by reader: chunks not sent yet, or to be sent again
        self.aside: dict[int, memoryview] | None = None  # copies of chunks, from the fence on
        self._reading, self._copying = 0, False  # threads inside `reading`; a fence keeps others out of it
        self._changed = threading.Condition()

    # -------------------------------------------------------------------------------------------- a reader's thread

    def add_joiner(self, name: str) -> None:
        """Notes a joiner. Raises Withdrawn where there are too many."""
        with self._changed:
            if name not in self._wants:
                reading = sum(map(bool, self._wants.values()))
                if reading >= MAX_JOINERS or len(self._wants) >= MAX_NAMES:
                    raise Withdrawn(f"{reading} readers already, of {len(self._wants)}")
                self._wants[name] = set(range(self.manifest.chunks))

    def set_wanted(self, name: str, chunks: Iterable[int]) -> None:
        """Notes the chunks that this reader still lacks, wherever it means to get them; none: it has verified everything."""
        with self._changed:
            self._wants[name] = set(chunks)
            self._changed.notify_all()

    def sent(self, name: str, chunks: Iterable[int]) -> None:
        with self._changed:
            self._wants[name].difference_update(chunks)
            self._changed.notify_all()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Inside, the tensors stay as they are: a fence waits for the end of it. Raises Withdrawn."""
        with self._changed:
            self._changed.wait_for(lambda: not self._copying)
            self.check()
            self._reading += 1
        try:
            yield
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()

    def direct(self, first: int, last: int) -> memoryview | None:
        """The live memory of chunks first..last, if it is one piece of host memory and may be read yet. Inside `reading`."""
        return self.body.direct(first, last) if self.aside is None else None

    def read(self, chunk: int, staging: StagingBuffer, at: int = 0) -> memoryview:
        """Copies the chunk into place `at` of the buffer. Inside `reading`. Raises Withdrawn."""
        self.check()
        if self.aside is None:
            return self.body.read(chunk, staging, at)
        if chunk not in self.aside:
            raise Withdrawn(f"the source went on after step {self.step}, and chunk {chunk} was not asked for before")
        memory = self.aside[chunk]
        place = staging.view[at * CHUNK_BYTES : at * CHUNK_BYTES + len(memory)]
        place[:] = memory
        return place

    def digest_of(self, chunk: int, memory: memoryview) -> bytes:
        return self.digests.get(chunk) or self.digests.setdefault(chunk, digest(chunk, memory))

    @property
    def is_fully_sent(self) -> bool:
        """True when all expected readers have come, and nothing is still to be sent to any of them."""
        with self._changed:
            return not self.withdrawn_reason and not self._unsent()

    def check(self) -> None:
        """Raises Withdrawn once the offer is over."""
        if self.withdrawn_reason:
            raise Withdrawn(self.withdrawn_reason)

    # -------------------------------------------------------------------------------------------- the source's thread

    def fence(self, copy_bytes: int, grace_s: float) -> Fenced:
        """Lets the tensors change afterwards. Takes at most grace_s and the time of a copy."""
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
                    self._copying = True  # a reader leaves after a chunk over HTTP, after some messages in a group
                    if small and not wait_for(lambda: not self._reading):
                        return self.withdraw("a reader held its chunk longer than heal_grace_s")
                    if self.withdrawn_reason or not is_small():
                        return self.withdraw("the source commits, and its readers were too slow for heal_grace_s")
                    self.aside = self._copies()
                return Fenced.WITHDRAWN if self.withdrawn_reason else Fenced.COPIED if self.aside else Fenced.FREE
            finally:
                self.fencing = self._copying = False
                self._changed.notify_all()

    def withdraw(self, reason: str) -> Fenced:
        """Ends the offer, from any thread: no reader gets a further valid seal, and a waiting fence ends."""
        self.withdrawn_reason = self.withdrawn_reason or reason  # first: the fence may have the lock, and check
        with self._changed:
            if self.aside:
                self.aside = {}  # up to heal_copy_bytes; the server shows this offer until there is another
            self._changed.notify_all()
        return Fenced.WITHDRAWN

    def _unsent(self) -> set[int]:
        if len(self._wants) < self._expected:
            return set(range(self.manifest.chunks))
        return set().union(*self._wants.values())

    def _copies(self) -> dict[int, memoryview]:
        """A block of memory per chunk, so that nothing larger than the chunks themselves is ever allocated."""
        staging = StagingBuffer(self.body)
        copies = {}
        for chunk in sorted(self._unsent()):
            source = self.body.read(chunk, staging)
            copies[chunk] = torch.empty(len(source), dtype=torch.uint8).numpy().data
            copies[chunk][:] = source
        return copies
