"""The page itself: files of this package, the same for every job and every visitor (what a job says comes over /events); and the orders
that an operator gives on it: to a group to leave (drain), or to die (kill), down its stream to the lighthouse.

POST /orders {"order": "drain", "replica_id": "left:4f2a"}, with the job's token as a header: a browser sends that for no other site, so a
link or a form elsewhere orders nothing. A job without a token takes no orders, as anybody's page could give them then.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from ft.dashboard.feed import Feed
from ft.dashboard.history import clean
from ft.dashboard.view import DRAINED, KILLED
from ft.protocol import messages as m
from ft.rpc.codec import MAX_TEXT, ORDERS
from ft.rpc.lighthouse_service import LighthouseService

FOLDER = Path(__file__).resolve().parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, no string that becomes code or markup (Trusted Types), in no frame.
POLICY = "; ".join(
    [
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
HEADERS = {  # of every answer
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

BURST, PER_S = 10, 1.0  # orders at once, and how many more a second
MOST_BYTES = 16 << 10  # of a request
FLAGS = {"drain": DRAINED, "kill": KILLED}
log = logging.getLogger("pharos.lighthouse")


FILES = {f"/{path.name}": (path.read_bytes(), TYPES[path.suffix]) for path in FOLDER.iterdir() if path.suffix in TYPES}
FILES["/"] = FILES.pop("/index.html")


async def get_file(request: web.Request) -> web.Response:
    """GET of one of FILES: the path is looked up, never joined."""
    data, kind = FILES[request.path]
    return web.Response(body=data, headers={"Content-Type": kind})


class Orders:
    """Orders of one lighthouse."""

    def __init__(
        self, service: LighthouseService, feed: Feed, *, has_token: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service, self._feed, self._has_token, self._clock = service, feed, has_token, clock
        self._left, self._filled_s = float(BURST), clock()

    async def give(self, request: web.Request) -> web.Response:
        """202: the group was told. Anything else: nothing was done, and the text says why."""
        if not self._has_token:
            text = "this job has no token, so it takes no orders: start the lighthouse with --token_file\n"
            raise web.HTTPForbidden(text=text)
        now_s = self._clock()
        self._left = min(BURST, self._left + PER_S * (now_s - self._filled_s))
        self._filled_s = now_s
        if self._left < 1:
            text = f"too many orders: {BURST} at once, then {PER_S:g} a second\n"
            raise web.HTTPTooManyRequests(text=text, headers={"Retry-After": "1"})
        self._left -= 1
        order, replica_id = self._read(request.content_type, await request.content.read(MOST_BYTES + 1))
        words = self._carry_out(order, replica_id, request.remote or "somewhere")
        log.warning("order from %s: %s %s: %s", request.remote, order, clean(replica_id, MAX_TEXT), words)
        return web.json_response({"order": order, "replica_id": replica_id, "done": words}, status=202)

    def _read(self, content_type: str, data: bytes) -> tuple[str, str]:
        if content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="an order is application/json\n")
        if len(data) > MOST_BYTES:
            raise web.HTTPRequestEntityTooLarge(
                MOST_BYTES, len(data), text=f"an order has at most {MOST_BYTES} bytes\n"
            )
        try:
            asked = json.loads(data)
            order, replica_id = asked["order"], asked["replica_id"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise web.HTTPBadRequest(text='an order is {"order": ..., "replica_id": ...}\n') from None
        if order not in ORDERS or not isinstance(replica_id, str):
            raise web.HTTPBadRequest(text=f"order: legal is {' and '.join(ORDERS)}; replica_id: a group's\n")
        return order, replica_id

    def _carry_out(self, order: str, replica_id: str, who: str) -> str:
        service, history = self._service, self._feed.history
        peer = service.machine.roster.peers.get(replica_id)
        if peer is None:
            raise web.HTTPNotFound(text=f"no such group is alive: {clean(replica_id, MAX_TEXT)}\n")
        if peer.kind == "torchft":
            raise web.HTTPConflict(text="that is a group of torchft's, which takes no orders from here\n")
        flags = self._feed.view.ordered
        if service.order(replica_id, order, f"on the lighthouse's page, from {who}"):
            words = {"drain": "it leaves after its step", "kill": "it ends now"}[order]
        elif order == "kill":
            service.driver.feed(m.Evict(replica_id))
            words = "it has no stream, so it was taken out of the job"
        else:
            raise web.HTTPConflict(text="it has no stream that an order could go down; kill takes it out of the job\n")
        flags[replica_id] = flags.get(replica_id, 0) | FLAGS[order]
        for gone in [i for i in flags if i not in service.machine.roster.peers and i != replica_id]:
            del flags[gone]
        history.add("membership", "info", f"an operator ({who}): {order} {replica_id}, {words}")
        return words
