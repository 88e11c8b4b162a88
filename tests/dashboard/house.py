"""A lighthouse with its page in a thread of this process, so that a test may look inside; and a reader of its stream."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Any

from bench.lighthouse_load import Herd
from ft.dashboard.server import serve_http
from ft.protocol import messages as m
from ft.protocol.lighthouse import LighthouseConfig
from ft.rpc.access import Access, Endpoint
from ft.rpc.lighthouse_flags import LighthouseOptions
from ft.rpc.lighthouse_main import serve, until_stopped
from ft.rpc.lighthouse_service import LighthouseService

TOKEN = "0123456789abcdef"
THREE = ("0:a", "1:b", "2:c")
WAIT_S = 30.0


class House:
    """Groups go to `address`, readers to 127.0.0.1:`port`. heartbeat_s: after which one is silent; by default, never in a test's time."""

    def __init__(
        self,
        *,
        token: str = TOKEN,
        min_replicas: int = 1,
        port: int = 0,
        heartbeat_s: float = 3600.0,
        takeover_s: float | None = 30.0,
        **limits: float,
    ) -> None:
        """limits: attributes of the Feed."""
        self.token, self._limits = token, limits
        self.service: LighthouseService
        self._started, self._error = threading.Event(), None
        config = LighthouseConfig(
            min_replicas=min_replicas,
            join_timeout_s=60.0,
            tick_s=0.02,
            times=m.Timeouts(heartbeat_s / 9, heartbeat_s, 2 * heartbeat_s, takeover_s=takeover_s),
        )
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(config, port)), daemon=True)
        self._thread.start()
        assert self._started.wait(WAIT_S)

    async def _run(self, config: LighthouseConfig, port: int) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        access = Access(self.token)
        async with serve(LighthouseOptions(config, [Endpoint("127.0.0.1", 0)], access)) as (self.service, grpc_port):
            self.address = f"http://127.0.0.1:{grpc_port}"
            async with serve_http(self.service, access, [Endpoint("127.0.0.1", port)], must=True) as page:
                assert page
                self.port = page.port
                for name, value in self._limits.items():
                    assert hasattr(self.feed, name), name
                    setattr(self.feed, name, value)
                self._started.set()
                await until_stopped(self.service.driver, self._stop)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def feed(self) -> Any:
        return self.service.dashboard

    def headers(self, **more: str) -> dict[str, str]:
        return {**({"Authorization": f"Bearer {self.token}"} if self.token else {}), **more}

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), dict(answer.getheaders())
        finally:
            connection.close()

    def order(self, order: object, replica_id: object, **headers: str) -> tuple[int, str]:
        body = json.dumps({"order": order, "replica_id": replica_id}).encode()
        given = {"Content-Type": "application/json", **(headers or self.headers())}
        return self.ask("POST", "/orders", body, **given)[:2]

    def watch(self, **headers: str) -> closing[Reader]:
        return closing(Reader(self, headers))

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()


Houses, Herds, Jobs = Callable[..., House], Callable[[House], Herd], Callable[..., tuple[House, Herd]]


class Reader:
    """A reader of /events. `state` is what a page would know."""

    def __init__(self, house: House, headers: dict[str, str]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", house.port, timeout=WAIT_S)
        self._connection.request("GET", "/events", headers=house.headers(**headers))
        self.answer = self._connection.getresponse()
        self.last_id, self.sizes = "", list[int]()
        self.names: dict[int, str] = {}
        self.born: dict[str, int] = {}
        self.rows: dict[int, list[Any]] = {}
        self.job: dict[str, Any] = {}
        self.events: dict[int, list[Any]] = {}
        self.points: list[list[Any]] = []
        self.begun = 0  # how often all of it was told

    def next(self) -> dict[str, Any]:
        """Returns the next event."""
        data, size = "", 0
        while True:
            line = self.answer.readline()
            assert line, "the stream has ended"
            size += len(line)
            if line == b"\n":
                break
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "id":
                self.last_id = value
            else:
                data += value
        self.sizes.append(size)
        update: dict[str, Any] = json.loads(data)
        self._apply(update)
        return update

    def _apply(self, update: dict[str, Any]) -> None:
        if "begin" in update:
            self.begun += 1
            self.names, self.rows, self.events, self.points = {}, {}, {}, []
        for key in update.get("gone", ()):
            self.names.pop(key), self.rows.pop(key)
        self.names.update({name[0]: name[1] for name in update.get("names", ())})
        self.born.update({name[1]: name[3] for name in update.get("names", ())})
        self.rows.update({key: row for key, *row in update.get("rows", ())})
        self.events.update({event[0]: event for event in update.get("events", ())})
        self.points += update.get("points", ())
        [self.job] = update.get("job", [self.job])

    def until(self, holds: Any) -> Reader:
        """Reads on until `holds(self)`."""
        while not holds(self):
            self.next()
        return self

    def row(self, replica_id: str) -> list[Any]:
        """Returns step, phase, health, quorum id, silence, goodput, flags, note of a group; empty if it has no row."""
        return next((self.rows[key] for key, name in self.names.items() if name == replica_id and key in self.rows), [])

    @property
    def texts(self) -> list[str]:
        return [event[5] for event in self.events.values()]

    def close(self) -> None:
        self.answer.close()
        self._connection.close()
