"""A rank's part in healing: offers its state to joiners (ranks of groups that heal from this one), or fetches the reference state.

The Manager carries out Configure, Fence, LoadState and DropHeld with this, over a transport (ft/healing).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

from ft.healing.capture import StateRegistry, StateView
from ft.healing.format import FormatError
from ft.healing.transport import HealEndpoint, HealFailed, Transport
from ft.protocol import messages as m
from ft.rpc.access import Access
from ft.rpc.clients import GroupClient

AGAIN_S = 0.1  # between two tries
MACHINE_STATE = "ft"  # name under which the step machine's state is registered
log = logging.getLogger("pharos.healing")


class Healer:
    """Offers and fetches of one rank. `on_event` receives HealEnded; before it `on_cannot_heal` receives the reason if no retry would help:
    no source has this rank's layout, or can send its state. Both are called in the fetch thread; or in the trainer's, inside `fetch`, if
    this rank's own state has values that cannot be sent, so that it has no layout to compare. For the trainer's thread, except for
    `end_offer`."""

    address_s = 5.0  # timeout of the request for a source's address

    def __init__(
        self,
        state: StateRegistry,
        transport: Transport,
        *,
        group_rank: int,
        access: Access,
        grace_s: float,
        on_event: Callable[[m.Event], None],
        on_cannot_heal: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._state, self.transport = state, transport
        self._group_rank, self._access, self._grace_s = group_rank, access, grace_s
        self._on_event, self._on_cannot_heal = on_event, on_cannot_heal
        self._fetching: threading.Thread | None = None
        self._asked: GroupClient | None = None  # the server of a source, which is asked for its healing address
        self._unsendable = ""  # logged reason why the state cannot be sent
        self._ended_quorum = 0  # newest quorum whose offer was ended
        self._cancelled = threading.Event()  # set when the fetch is cancelled
        self._arrived: dict[str, Any] | None = None
        self.received_bytes = 0  # in all heals
        self.touched = False  # True: a heal has written to this rank's tensors
        self.progress = (0, 0)  # verified bytes and total bytes of the current heal; for any thread
        self.one_source = False  # True: fetch from one source, as state may differ between them (LocalSGD)

    def offer(self, quorum: m.QuorumResult) -> None:
        """Offers the state of a step boundary to joiners that heal from this group; withdraws the last offer if there are none. If the
        state cannot be sent, they receive the reason."""
        if quorum.recover_dst_replica_ranks:
            joiners = [quorum.members[rank] for rank in quorum.recover_dst_replica_ranks]
            offered: dict[str, Any] = {"quorum_id": quorum.quorum_id, "step": quorum.reference[0], "joiners": joiners}
            try:
                self.transport.offer(self._state.view(), **offered)
            except FormatError as error:  # this group goes on
                self._report_unsendable(error)
                self.transport.offer(StateView.refusal(str(error)), **offered)
            if quorum.quorum_id <= self._ended_quorum:  # it was ended before it was made
                self.transport.end_offer(quorum.quorum_id, "its quorum is over")
        else:
            self.transport.withdraw("no group of the newest quorum heals from this one")

    def check_state(self) -> None:
        """Logs an error if this group's state cannot be sent."""
        try:
            self._state.view().manifest.encode()
        except FormatError as error:
            self._report_unsendable(error)

    def _report_unsendable(self, error: FormatError) -> None:
        if str(error) != self._unsendable:
            self._unsendable = str(error)
            log.error("no group can heal from this one, as its state cannot be sent: %s", error)

    def end_offer(self, quorum_id: int, reason: str) -> None:
        """Ends the offer of that quorum: its joiners are lost, or heal again in the next one. A commit that waits for them continues."""
        self._ended_quorum = max(self._ended_quorum, quorum_id)
        self.transport.end_offer(quorum_id, reason)

    def fetch(self, quorum: m.QuorumResult) -> None:
        """Starts a thread that fetches the state into this rank's tensors, and reports HealEnded. Sources learn of a failure."""
        self.drop()
        self._cancelled = threading.Event()
        try:
            into = self._state.view()
        except FormatError as error:
            self._on_cannot_heal(str(error))
            return self._on_event(m.HealEnded(quorum.quorum_id, ok=False, reason=str(error)))
        given = quorum, into, self._cancelled
        self._fetching = threading.Thread(target=self._fetch, args=given, name="ft-heal", daemon=True)
        self._fetching.start()

    def load(self) -> None:
        assert self._arrived is not None, "no state has arrived"
        self._state.load(self._arrived)
        self._arrived, self.progress = None, (0, 0)

    def drop(self) -> None:
        """Cancels a fetch, or drops the state that was fetched. Returns when nothing writes to this rank's tensors any more."""
        if self._fetching is not None:
            self._cancelled.set()
            while self._fetching.is_alive():  # it may be between two tries, where `stop` finds nothing
                self.transport.stop("the heal was cancelled")
                if self._asked is not None:  # ends a request: a source whose host is gone does not answer
                    self._asked.close()
                self._fetching.join(AGAIN_S)
            self._fetching, self.progress = None, (0, 0)
        self._arrived = None

    def close(self) -> None:
        self.drop()
        self.transport.close()

    def _fetch(self, quorum: m.QuorumResult, into: StateView, cancelled: threading.Event) -> None:
        until_s, began_s = time.monotonic() + self._grace_s, time.monotonic()
        group_servers = {quorum.members[source.replica_rank]: source.address for source in quorum.sources}
        logged = ""
        wanted = {"quorum_id": quorum.quorum_id, "step": quorum.reference[0]}
        while True:
            found = {name: self.heal_address_of(address) for name, address in group_servers.items()}
            sources = [HealEndpoint(name, at) for name, at in found.items() if at]
            try:
                if not sources:
                    raise HealFailed("no source reported its healing address", touched=False)
                chosen, unused = (sources[:1], sources[1:]) if self.one_source else (sources, [])
                values = self.transport.fetch(chosen, into, **wanted, progress=self._set_progress)
                self.touched = True
                self.transport.notify_done(unused, **wanted)
                break
            except Exception as error:  # noqa: BLE001 (of any kind: the machine waits for HealEnded)
                if str(error) != logged:
                    logged = str(error)
                    log.warning("the state of step %s has not arrived: %s", m.describe_step(quorum.reference[0]), error)
                self.touched |= getattr(error, "touched", True)
                mismatch = isinstance(error, HealFailed) and error.layout_mismatch
                if mismatch and not cancelled.is_set():
                    self._on_cannot_heal(str(error))
                for name in getattr(error, "gone_sources", ()):
                    del group_servers[name]
                if mismatch or cancelled.is_set() or not group_servers or time.monotonic() > until_s:
                    if not cancelled.is_set():
                        self.transport.notify_done(sources, **wanted)
                    return self._on_event(m.HealEnded(quorum.quorum_id, ok=False, reason=str(error)))
            if cancelled.wait(AGAIN_S):
                return self._on_event(m.HealEnded(quorum.quorum_id, ok=False, reason="the heal was cancelled"))
        names = " and ".join([source.replica_id for source in chosen])
        log.info("healed from %s in %.2f s", names, time.monotonic() - began_s)
        self.received_bytes += into.manifest.total_bytes
        self._arrived = values
        self._on_event(m.HealEnded(quorum.quorum_id, ok=True, state=values[MACHINE_STATE]))

    def _set_progress(self, done_bytes: int, total_bytes: int) -> None:
        self.progress = (done_bytes, total_bytes)

    def heal_address_of(self, address: str) -> str:
        """Requests, from the group server at `address`, where that group's rank of the same group_rank serves its state; "": unknown."""
        try:
            with closing(GroupClient(address, self._group_rank, self._access)) as self._asked:
                return self._asked.checkpoint_metadata(self._group_rank, self.address_s)
        except Exception as error:  # noqa: BLE001 (of any kind: the machine waits for HealEnded)
            log.warning("the group server at %s reported no healing address: %s", address, error)
            return ""
