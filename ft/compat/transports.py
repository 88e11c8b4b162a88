"""torchft's HTTPTransport and PGTransport, by which a program chooses how a group heals. The Manager makes the transport (ft/healing)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

log = logging.getLogger("pharos.torchft")


class HTTPTransport:
    """Healing over HTTP (ft/healing/http_transport.py), the default. Its arguments have no effect: a heal ends when its quorum does, and
    the state is sent in chunks of 1 MiB."""

    KIND: Literal["http"] = "http"

    def __init__(self, timeout: timedelta, num_chunks: int) -> None:
        log.info("HTTPTransport: timeout and num_chunks have no effect: a heal ends with its quorum")


class PGTransport:
    """Healing over a process group (ft/healing/pg_transport.py). Its arguments have no effect: each heal has a gloo group of its two ranks,
    as `pg` is busy with gradients, and ends when its quorum does; state on a device passes through pinned memory, and is received in place.
    """

    KIND: Literal["pg"] = "pg"

    def __init__(
        self,
        pg: Any,
        timeout: timedelta,
        device: Any,
        state_dict: Callable[[], object] | None = None,
    ) -> None:
        log.info(
            "PGTransport: its arguments have no effect: a heal has a gloo group of its own, and is received in place"
        )
