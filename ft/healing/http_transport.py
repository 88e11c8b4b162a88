"""Healing over HTTP: the face of transport.py, with a server for this rank's offers and a fetch from others'."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from ft.healing.capture import Snapshot
from ft.healing.http_fetch import Fetch
from ft.healing.http_server import HealServer
from ft.healing.offer import CheckpointOffer
from ft.healing.transport import Fenced, HealConfig, HealFailed, Progress, Source
from ft.rpc.access import Access


class HttpTransport:
    """`host`: the address of the interface that others reach. `replica_id`: this rank's group. Raises ValueError for an address that others
    could reach without a token."""

    def __init__(self, host: str, replica_id: str, access: Access, config: HealConfig | None = None) -> None:
        self._config = config or HealConfig()
        self._access, self._replica_id = access, replica_id
        self._server = HealServer(host, access, silence_s=self._config.heal_grace_s)
        self._offer: CheckpointOffer | None = None
        self._fetch: Fetch | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def address(self) -> str:
        return self._server.address

    def offer(self, snapshot: Snapshot, *, quorum_id: int, step: int, readers: Sequence[str]) -> None:
        self.withdraw("the source has a newer offer")
        self._offer = CheckpointOffer(snapshot, quorum_id=quorum_id, step=step, readers=len(readers))
        self._server.show(self._offer)

    @property
    def is_taken(self) -> bool:
        offer = self._offer
        return offer is not None and offer.is_taken

    def fence(self) -> Fenced:
        if self._offer is None:
            return Fenced.FREE
        outcome = self._offer.fence(self._config.heal_copy_bytes, self._config.heal_grace_s)
        if outcome is Fenced.WITHDRAWN:
            self._offer = None  # the server keeps it, to tell its readers why
        return outcome

    def end_offer(self, quorum_id: int, reason: str) -> None:
        offer = self._offer
        if offer is not None and offer.quorum_id == quorum_id:
            offer.withdraw(reason)

    def withdraw(self, reason: str) -> None:
        if self._offer is not None:
            self._offer.withdraw(reason)
            self._offer = None

    def fetch(
        self, sources: Sequence[Source], into: Snapshot, *, quorum_id: int, step: int, progress: Progress | None = None
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

    def _from(self, sources: Sequence[Source], into: Snapshot | None, **more: Any) -> Fetch:
        return Fetch(sources, into, reader=self._replica_id, access=self._access, config=self._config, **more)

    def tell_done(self, sources: Sequence[Source], *, quorum_id: int, step: int) -> None:
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
        self._server.show(None)
