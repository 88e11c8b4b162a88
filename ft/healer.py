"""A rank's part in healing: offers its state to groups that need it, and fetches another group's where its own is not the reference state.

The Manager carries out Configure, Fence, LoadState and DropHeld with this, over a transport (ft/healing).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from ft.healing.capture import StateRegistry, StateSnapshot
from ft.healing.format import FormatError
from ft.healing.transport import HealFailed, StateSource, Transport
from ft.protocol import messages as m
from ft.rpc.access import Access
from ft.rpc.clients import GroupClient

ASK_S = 5.0  # for a source's address
AGAIN_S = 0.1  # between two tries
MACHINE = "ft"  # the name that the step machine's own state travels under
log = logging.getLogger("pharos.healing")


class Healer:
    """`on_event` gets HealEnded, from the fetch's thread; before it `on_layout_mismatch` gets the reason where all sources' states have
    another layout than ours. For the trainer's thread, except `end_offer`."""

    def __init__(
        self,
        state: StateRegistry,
        transport: Transport,
        *,
        group_rank: int,
        access: Access,
        grace_s: float,
        on_event: Callable[[m.Event], None],
        on_layout_mismatch: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._state, self.transport = state, transport
        self._group_rank, self._access, self._grace_s = group_rank, access, grace_s
        self._on_event, self._on_layout_mismatch = on_event, on_layout_mismatch
        self._fetching: threading.Thread | None = None
        self._ended_quorum = 0  # the newest quorum whose offer was ended
        self._over = threading.Event()  # the fetch is abandoned
        self._arrived: dict[str, Any] | None = None
        self.received_bytes = 0  # of all heals
        self.progress = (0, 0)  # of the heal under way: verified bytes, all bytes; for any thread
        self.one_source = False  # True: fetch from one, as sources register state in which they differ, too (LocalSGD)

    def offer(self, quorum: m.QuorumResult) -> None:
        """Serves the state of a step's boundary to the groups that heal from this one; without any, withdraws the last offer."""
        if quorum.recover_dst_replica_ranks:
            readers = [quorum.members[rank] for rank in quorum.recover_dst_replica_ranks]
            snapshot = self._state.snapshot()
            self.transport.offer(snapshot, quorum_id=quorum.quorum_id, step=quorum.reference[0], joiners=readers)
            if quorum.quorum_id <= self._ended_quorum:  # its end came before the offer
                self.transport.end_offer(quorum.quorum_id, "its quorum is over")
        else:
            self.transport.withdraw("no group of the newest quorum heals from this one")

    def end_offer(self, quorum_id: int, reason: str) -> None:
        """Ends the offer of that quorum: its readers are dead, or heal anew in the next one. A commit that waits for one goes on."""
        self._ended_quorum = max(self._ended_quorum, quorum_id)
        self.transport.end_offer(quorum_id, reason)

    def fence(self) -> None:
        """Returns when the state may change: readers are done, or served a copy."""
        outcome = self.transport.fence()
        log.debug("fence: %s", outcome.value)

    def fetch(self, quorum: m.QuorumResult) -> None:
        """Fetches the state in a thread of its own, into this rank's tensors, and feeds back HealEnded. Tells the sources of a final
        failure: their commit would wait for a reader that does not read."""
        self.drop()
        self._over = threading.Event()
        given = quorum, self._state.snapshot(), self._over
        self._fetching = threading.Thread(target=self._fetch, args=given, name="ft-heal", daemon=True)
        self._fetching.start()

    def load(self) -> None:
        assert self._arrived is not None, "a state that has not arrived"
        self._state.load(self._arrived)
        self._arrived, self.progress = None, (0, 0)

    def drop(self) -> None:
        """Gives up a state that is on its way or has arrived. Returns when nothing writes to this rank's tensors."""
        if self._fetching is not None:
            self.progress = (0, 0)
            self._over.set()
            while self._fetching.is_alive():  # it may be between two tries, where `stop` finds nothing
                self.transport.stop("the heal was cancelled")
                self._fetching.join(AGAIN_S)
            self._fetching = None
        self._arrived = None

    def close(self) -> None:
        self.drop()
        self.transport.close()

    def _fetch(self, quorum: m.QuorumResult, into: StateSnapshot, over: threading.Event) -> None:
        until_s, began_s = time.monotonic() + self._grace_s, time.monotonic()
        names = tuple([quorum.members[source.replica_rank] for source in quorum.sources])
        asked = {"quorum_id": quorum.quorum_id, "step": quorum.reference[0]}
        while True:
            found = [self.ask(source.address) for source in quorum.sources]
            sources = [StateSource(name, at) for name, at in zip(names, found, strict=True) if at]
            try:
                if not sources:
                    raise HealFailed("no source says where its state is", touched=False)
                chosen, spared = (sources[:1], sources[1:]) if self.one_source else (sources, [])
                values = self.transport.fetch(chosen, into, **asked, progress=self._set_progress)
                self.transport.notify_done(spared, **asked)
                break
            except (HealFailed, FormatError) as error:
                log.warning("the state of step %d has not come: %s", quorum.reference[0], error)
                mismatch = isinstance(error, HealFailed) and error.layout_mismatch
                if mismatch and not over.is_set():
                    self._on_layout_mismatch(str(error))
                if mismatch or over.is_set() or time.monotonic() > until_s:
                    if not over.is_set():
                        self.transport.notify_done(sources, **asked)
                    return self._on_event(m.HealEnded(quorum.quorum_id, ok=False, reason=str(error), blame=names))
            if over.wait(AGAIN_S):
                return self._on_event(m.HealEnded(quorum.quorum_id, ok=False, reason="the heal was cancelled"))
        log.info("healed from %s in %.2f s", " and ".join(names), time.monotonic() - began_s)
        self.received_bytes += into.manifest.total_bytes
        self._arrived = values
        self._on_event(m.HealEnded(quorum.quorum_id, ok=True, state=values[MACHINE]))

    def _set_progress(self, done_bytes: int, total_bytes: int) -> None:
        self.progress = (done_bytes, total_bytes)

    def ask(self, address: str) -> str:
        """Returns the address where that group's rank of the same group_rank serves its state; "": unknown."""
        try:
            with closing(GroupClient(address, self._group_rank, self._access)) as client:
                return client.checkpoint_metadata(self._group_rank, ASK_S)
        except (TimeoutError, RuntimeError, ValueError) as error:
            log.warning("%s does not say where its state is: %s", address, error)
            return ""
