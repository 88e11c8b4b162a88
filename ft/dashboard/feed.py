"""The stream of updates to whoever watches: server-sent events, each made once for all.

    tick -> publish: what has changed since the last update -> a ring of the newest ones <- each watcher reads at its own pace

The last event of an update has an id. Who was cut off says the last one that it has (Last-Event-ID), and is told what it missed, or all of
it where that is too long ago. A watcher costs a place in a set: what it has not read is in the ring, and who is too slow for the ring, or
for its socket, is dropped. No timers: the lighthouse's ticks are enough.
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections import deque
from dataclasses import dataclass
from itertools import islice

from aiohttp import web

from ft.dashboard.history import History
from ft.dashboard.updates import Parts, Told, messages
from ft.dashboard.view import View
from ft.protocol import messages as m
from ft.rpc.driver import now_s
from ft.rpc.lighthouse_service import LighthouseService

SOCKET_BYTES = 128 << 10  # that the kernel keeps of what a watcher has not read
STILL_S = 5.0  # a word at least so often: so both sides notice that the other is gone
URGENT_PER_GROUP_S = 0.0004  # where something has happened
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}  # nginx would hold it back


@dataclass(frozen=True)
class FeedLimits:
    watchers: int = 64
    ring: int = 256  # updates that are kept for those who lag, or come back
    ring_bytes: int = 4 << 20
    linger_s: float = 30.0  # updates are made for so long after the last watcher, who may only have been cut off
    slow_s: float = 10.0  # that a write may take
    calm_s: float = 0.25  # between two updates
    calm_per_group_s: float = 0.001


@dataclass(eq=False)
class Watcher:
    transport: asyncio.Transport
    writes_since_s: float = 0.0  # 0: it does not


class Feed:
    """DashboardListener of the lighthouse's service. To be made and used on its loop."""

    def __init__(self, service: LighthouseService, *, orders: bool, limits: FeedLimits | None = None) -> None:
        """orders: whether they can be given."""
        self.limits = limits or FeedLimits()
        self.history = History(service.machine)
        self.reported, self.told = self.history.reported, self.history.told
        self.view = View(service, self.history)
        self._told = Told(self.view, self.history, orders=orders)
        self.boot = secrets.token_hex(4)  # an id of another lighthouse's life means nothing here
        self.watchers: set[Watcher] = set()
        self.ring: deque[bytes] = deque()  # the newest last; its number is self._number
        self._ring_bytes = 0
        self._number = 0
        self.awake = False  # somebody watches, or has just watched
        self._watched_s = self._published_s = self._spoke_s = 0.0
        self._whole: tuple[int, bytes] = (0, b"")  # for who knows nothing; made once an update
        self._news = asyncio.Event()
        self._over = False

    # ---- the lighthouse tells it

    def saw(self, event: m.Event, out: m.Out) -> None:
        self.history.saw(event, out)
        if isinstance(event, m.Tick) and self.awake:
            self._tick(now_s())

    # ---- updates

    def _tick(self, now: float) -> None:
        for watcher in self.watchers:
            if watcher.writes_since_s and now - watcher.writes_since_s > self.limits.slow_s:
                watcher.transport.abort()
        if self.watchers:
            self._watched_s = now
        elif now - self._watched_s > self.limits.linger_s:
            self.awake = False
            self.ring.clear()
            self._ring_bytes = 0
            return
        limits, groups = self.limits, self._told.groups
        calm_s = limits.calm_s + limits.calm_per_group_s * groups
        if now - self._published_s >= (URGENT_PER_GROUP_S * groups if self._told.is_behind else calm_s):
            self._published_s = now
            self._publish(now)

    def _publish(self, now: float) -> None:
        parts = self._told.changes()
        if not any(parts.values()) and now - self._spoke_s < STILL_S:
            return
        self._spoke_s = now
        self._number += 1
        update = self._bytes(parts)
        self.ring.append(update)
        self._ring_bytes += len(update)
        while len(self.ring) > self.limits.ring or self._ring_bytes > self.limits.ring_bytes:
            self._ring_bytes -= len(self.ring.popleft())
        self._news.set()
        self._news = asyncio.Event()

    def _bytes(self, parts: Parts) -> bytes:
        """Events of an update; the last one has its id, so who has that has all those before it."""
        *first, last = messages(parts, time.time())
        lines = [*(f"data: {text}\n\n" for text in first), f"id: {self.boot}-{self._number}\ndata: {last}\n\n"]
        return "".join(lines).encode()

    # ---- watchers

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """GET /events. Ends when the watcher goes, is too slow, or the lighthouse stops."""
        if self._over:
            raise web.HTTPServiceUnavailable(
                text="the page had a fault and is switched off; the lighthouse's log has it\n"
            )
        if len(self.watchers) >= self.limits.watchers:
            text = f"{self.limits.watchers} pages are open already; close one of them\n"
            raise web.HTTPServiceUnavailable(text=text, headers={"Retry-After": "10"})
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        assert request.transport
        with contextlib.suppress(OSError):  # the kernel would take megabytes for one that does not read
            request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        watcher = Watcher(request.transport)
        self.watchers.add(watcher)
        try:
            with contextlib.suppress(ConnectionError):  # it went
                await self._serve(watcher, response, request.headers.get("Last-Event-ID", ""))
        finally:
            self.watchers.discard(watcher)
        return response

    async def _serve(self, watcher: Watcher, response: web.StreamResponse, last_id: str) -> None:
        if not self.awake:
            self.awake, self._watched_s = True, now_s()
            self._number += 1  # so what an earlier watcher has is too long ago
            self._told.changes()
        # the number of the update that it has; -1: of none that means anything here
        boot, _, number = last_id.partition("-")
        known = boot == self.boot and number.isascii() and number.isdigit() and len(number) < 16
        read = int(number) if known and int(number) <= self._number else -1
        while not self._over:
            if read < self._number - len(self.ring):  # it begins, or its place is lost
                if self._whole[0] != self._number:
                    self._whole = (self._number, self._bytes(self._told.whole()))
                update, read = self._whole[1], self._number
            else:
                missed = islice(self.ring, len(self.ring) - (self._number - read), None)
                update, read = b"".join(missed), self._number
            if update:
                watcher.writes_since_s = now_s()
                await response.write(update)
                watcher.writes_since_s = 0.0
            if read == self._number and not self._over:
                await self._news.wait()

    def end(self) -> None:
        """Ends all streams."""
        self._over = True
        self._news.set()

    async def close(self, _: web.Application) -> None:
        self.end()
