"""The stream of updates to open pages (watchers): server-sent events, each made once for all watchers.

    tick -> publish: the changes since the last update -> a ring buffer of the newest updates <- each watcher reads at its own pace

The last event of an update has an id. A watcher that reconnects sends the last id that it has (Last-Event-ID), and gets the updates that it
missed, or the whole state. A watcher that is too slow for the ring buffer or its socket is dropped. Driven by the lighthouse's ticks.
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import secrets
import socket
import time
from collections import deque
from itertools import islice

from aiohttp import web

from ft.dashboard.history import History
from ft.dashboard.view import Parts, View
from ft.protocol import messages as m
from ft.rpc.driver import now_s
from ft.rpc.lighthouse_service import LighthouseService

SOCKET_BYTES = 128 << 10  # the kernel's send buffer of a watcher
KEEPALIVE_S = 5.0  # longest interval of updates, so that both sides notice that the other is gone
URGENT_PER_GROUP_S = 0.0004  # shortest interval of updates after an event or a step, for each group
HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}  # no buffering in nginx
MAX_BYTES = 48_000  # bytes of one message
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


class Feed:
    """Listener of the lighthouse's service that sends updates to watchers. Must be made and used on the service's loop."""

    most_watchers = 64
    most_updates, most_bytes = 256, 4 << 20  # size of the ring buffer
    linger_s = 30.0  # updates continue for this time after the last watcher, since it may reconnect
    slow_s = 10.0  # timeout of a write to a watcher
    calm_s, calm_per_group_s = 0.25, 0.001  # interval of updates: the first plus the second for each group

    def __init__(self, service: LighthouseService, *, takes_orders: bool) -> None:
        self.history = History(service.machine)
        self.reported, self.on_timeline_event = self.history.reported, self.history.on_timeline_event
        self.view = View(service, self.history, takes_orders=takes_orders)
        # part of event ids, so that those of a former lighthouse process are invalid
        self.process_tag = secrets.token_hex(4)
        self.watchers: dict[asyncio.Transport, float] = {}  # watcher -> start of its current write; 0: none
        self.ring: deque[bytes] = deque()  # the newest update last; its number is self._number
        self._number = 0
        self.awake = False  # True: updates are made
        self._watched_s = self._published_s = self._sent_s = 0.0  # last tick with watchers, last attempt, last update
        self._whole: tuple[int, bytes] = (0, b"")  # number of an update, and the whole state at it
        self._new_update = asyncio.Event()
        self._over = False

    def on_event(self, event: m.Event, out: m.Out) -> None:
        """Called with each tick, each leave, and each event that had an effect."""
        self.history.on_event(event, out)
        if isinstance(event, m.Tick) and self.awake:
            self._tick(now_s())

    def _tick(self, now: float) -> None:
        for watcher, writes_since_s in self.watchers.items():
            if writes_since_s and now - writes_since_s > self.slow_s:
                watcher.abort()
        if self.watchers:
            self._watched_s = now
        elif now - self._watched_s > self.linger_s:
            self.awake = False
            self.ring.clear()
            return
        groups = len(self.view.sent_rows)
        is_urgent = self.history.changes > self.view.sent_changes  # an event, or a step
        calm_s = self.calm_s + self.calm_per_group_s * groups
        if now - self._published_s >= (URGENT_PER_GROUP_S * groups if is_urgent else calm_s):
            self._published_s = now
            self._publish(now)

    def _publish(self, now: float) -> None:
        parts = self.view.changes()
        if not any(parts.values()) and now - self._sent_s < KEEPALIVE_S:
            return
        self._sent_s = now
        self._number += 1
        self.ring.append(self._bytes(parts))
        while len(self.ring) > self.most_updates or sum(map(len, self.ring)) > self.most_bytes:
            self.ring.popleft()
        self._new_update.set()
        self._new_update = asyncio.Event()

    def _bytes(self, parts: Parts) -> bytes:
        """Returns the events of an update. Only the last one has the id, so a watcher that has the id has all of them."""
        *first, last = messages(parts, time.time())
        lines = [*(f"data: {text}\n\n" for text in first), f"id: {self.process_tag}-{self._number}\ndata: {last}\n\n"]
        return "".join(lines).encode()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Serves GET /events, until the watcher goes or is too slow, or the lighthouse stops."""
        if self._over:
            text = "the dashboard had an error and is switched off; the error is in the lighthouse's log\n"
            raise web.HTTPServiceUnavailable(text=text)
        if len(self.watchers) >= self.most_watchers:
            text = f"{self.most_watchers} pages are open already; close one of them\n"
            raise web.HTTPServiceUnavailable(text=text, headers={"Retry-After": "10"})
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        watcher = request.transport
        assert watcher
        with contextlib.suppress(OSError):  # by default the kernel buffers megabytes for one that does not read
            watcher.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self.watchers[watcher] = 0.0
        try:
            with contextlib.suppress(ConnectionError):  # the watcher is gone
                await self._serve(watcher, response, request.headers.get("Last-Event-ID", ""))
        finally:
            del self.watchers[watcher]
        return response

    async def _serve(self, watcher: asyncio.Transport, response: web.StreamResponse, last_id: str) -> None:
        if not self.awake:
            self.awake, self._watched_s = True, now_s()
            self._number += 1  # so that the ids of earlier watchers are too old
            self.view.changes()
        # number of the update that the watcher has; -1: none, or of a former lighthouse process
        known = re.fullmatch(f"{self.process_tag}-([0-9]{{1,15}})", last_id)
        read = int(known[1]) if known and int(known[1]) <= self._number else -1
        while not self._over:
            if read < self._number - len(self.ring):  # a new watcher, or one that is too late for the ring buffer
                if self._whole[0] != self._number:
                    self._whole = (self._number, self._bytes(self.view.whole()))
                update = self._whole[1]
            else:
                update = b"".join(islice(self.ring, len(self.ring) - (self._number - read), None))
            read = self._number
            if update:
                self.watchers[watcher] = now_s()
                await response.write(update)
                self.watchers[watcher] = 0.0
            if read == self._number and not self._over:
                await self._new_update.wait()

    def end(self) -> None:
        self._over = True
        self._new_update.set()


def messages(parts: Parts, at_s: float) -> list[str]:
    """Returns an update as one or more JSON objects (section -> items) of about MAX_BYTES at most. `at_s`: seconds since 1970."""
    made: list[dict[str, list[str]]] = [{"now": [f"{at_s:.1f}"]}]
    size = 0
    for section, items in parts.items():
        for text in map(_encode, items):
            size += (more := len(text) + len(section) + 8)
            if size > MAX_BYTES:
                made.append({})
                size = more
            made[-1].setdefault(section, []).append(text)
    return ["{" + ",".join(f'"{key}":[{",".join(texts)}]' for key, texts in one.items()) + "}" for one in made]
