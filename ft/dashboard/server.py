"""The lighthouse's pages, on the loop that serves gRPC:

    /                     the live page (ft/dashboard), whose files hold nothing of the job and are everybody's
    /events  /orders      what it shows, and what an operator orders
    /status.json /metrics for programs

All but the files want the job's token, where there is one: `Authorization: Bearer TOKEN`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ft.dashboard.feed import Feed
from ft.dashboard.pages import FILES, HEADERS, Orders, get_file
from ft.rpc.access import Access, Endpoint
from ft.rpc.lighthouse_service import LighthouseService

MAX_CONNECTIONS = 256
IDLE_S = 75.0  # longer than a Prometheus scrapes apart, usually
HANDSHAKE_S = 10.0
BACKLOG = 100  # taken at one go; far less than MAX_CONNECTIONS, so that the oldest one is always complete
log = logging.getLogger("pharos.lighthouse")
# of Report -> name and help of a gauge with the label `replica`
FIGURES = {
    "step": ("pharos_step", "Committed optimizer steps, -1 while healing"),
    "median_step_s": ("pharos_step_seconds", "Median length of a step"),
    "healed_bytes": ("pharos_healed_bytes", "Bytes received from other groups since the start"),
    "goodput_s": ("pharos_goodput_seconds", "Time spent in steps that were committed"),
    "wall_s": ("pharos_wall_seconds", "Time since the group's start"),
    "mean_loss": ("pharos_loss", "Mean loss of the newest step, nats per token"),
}


@asynccontextmanager
async def serve_http(
    service: LighthouseService, access: Access, at: Sequence[Endpoint], *, must: bool
) -> AsyncIterator[int]:
    """The port. must: raise ValueError where it cannot listen; else that is said, and the port is 0."""
    quiet = logging.getLogger("pharos.http")
    # not the stack of a client's mistake: it has been answered with 400, and it could fill a disk with it
    quiet.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
    app = _app(service, access)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, keepalive_timeout=IDLE_S, logger=quiet)
    await runner.setup()
    tls = access.tls.server_context() if access.tls else None
    options: dict[str, Any] = {"backlog": BACKLOG, "ssl": tls, "ssl_handshake_timeout": HANDSHAKE_S if tls else None}
    loop, open_, port = asyncio.get_running_loop(), list[asyncio.Server](), 0
    try:
        for place in at:
            try:
                made: Any = _Newest(runner.server)
                open_.append(await loop.create_server(made, place.host, port or place.port, **options))
            except OSError as error:
                if must and place is at[0]:
                    raise ValueError(f"--http {place}: {error.strerror}") from None
                log.warning("no page on %s: %s", place, error.strerror)
                continue
            port = port or int(open_[-1].sockets[0].getsockname()[1])
            where = f"http{'s' if tls else ''}://{Endpoint(place.host, port)}"
            log.info("the live page: %s/; for programs: %s/status.json, /metrics", where, where)
        yield port
    finally:
        for server in open_:
            server.close()
        await runner.cleanup()


class _Newest:
    """Makes connections, and drops the oldest for one too many: whoever holds many open and says nothing keeps nobody else out."""

    def __init__(self, make: Any) -> None:
        self._make, self._open = make, deque[Any]()

    def __call__(self) -> Any:
        if len(self._open) == MAX_CONNECTIONS:
            self._open.popleft().force_close()  # nothing, where it is closed already
        self._open.append(self._make())
        return self._open[-1]


def _app(service: LighthouseService, access: Access) -> web.Application:
    registry = CollectorRegistry()
    registry.register(_Collector(service))
    feed = Feed(service, orders=bool(access.token))
    orders = Orders(service, feed, has_token=bool(access.token))
    service.page = feed

    async def status_json(_: web.Request) -> web.Response:
        return web.json_response(status(service), dumps=lambda page: json.dumps(page, allow_nan=False))

    async def metrics(_: web.Request) -> web.Response:
        headers = {"Content-Type": exposition.CONTENT_TYPE_LATEST}
        return web.Response(body=exposition.generate_latest(registry), headers=headers)

    @web.middleware
    async def with_token(request: web.Request, handler: Callable[[web.Request], Awaitable[Any]]) -> Any:
        if request.path not in FILES and not access.permits(request.headers.items()):
            raise web.HTTPUnauthorized(text="this job has a token\n", headers={"WWW-Authenticate": "Bearer"})
        return await handler(request)

    async def harden(_: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(HEADERS)

    app = web.Application(middlewares=[with_token], client_max_size=1 << 16)
    app.add_routes([web.get("/status.json", status_json), web.get("/metrics", metrics)])
    app.add_routes([web.get("/events", feed.stream), web.post("/orders", orders.give)])
    app.add_routes([web.get(path, get_file) for path in FILES])
    app.on_response_prepare.append(harden)
    app.on_shutdown.append(feed.close)
    return app


def status(service: LighthouseService) -> dict[str, Any]:
    """The lighthouse's state as JSON values. Members in the order of their replica_rank; reports as they came last."""
    quorum, saved = service.machine.quorum, service.machine.saved
    names = ("step", "commit_quorum_id", "waiting", "settled", "phase", *list(FIGURES)[1:])
    whole = [quorum.ids[rank] for rank in quorum.holders] if quorum else []
    members = [
        {
            "replica_id": member.replica_id,
            "address": member.address,
            "step": member.step,
            "world_size": member.world_size,
            "heals": saved.kind == "pharos" and member.replica_id not in whole,
            "connected": member.replica_id in service.streams,
        }
        for member in (quorum.members if quorum else ())
    ]
    return {
        "reason": service.machine.reason,
        "kind": saved.kind,
        "epoch": saved.epoch,
        "settled": saved.settled,
        "min_replicas": service.config.min_replicas,
        "waiting": service.waiting_ids,
        "streams": len(service.streams),
        "state_file_trouble": service.keeper.trouble if service.keeper else "",
        "quorum": quorum
        and {
            "quorum_id": quorum.quorum_id,
            "age_s": round(time.time() - service.issued_at, 1) if service.issued_at else None,
            "step": quorum.reference[0],
            "members": members,
        },
        "reports": {
            replica_id: {name: _finite(getattr(report, name)) for name in names}
            for replica_id, report in sorted(service.reports.items())
        },
    }


def _finite(value: Any) -> Any:
    """None for NaN and Inf, such as a loss that has overflowed: JSON has no word for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class _Collector:
    """Made anew at each scrape: a group that is gone leaves nothing behind."""

    def __init__(self, service: LighthouseService) -> None:
        self._service = service

    def collect(self) -> Iterator[Any]:
        service, quorum = self._service, self._service.machine.quorum
        settled, waiting, streams = service.machine.saved.settled, len(service.waiting_ids), len(service.streams)
        for kind, name, text, value in (
            (GaugeMetricFamily, "pharos_quorum_id", "The current generation", quorum.quorum_id if quorum else 0),
            (GaugeMetricFamily, "pharos_quorum_members", "Groups in it", len(quorum.members) if quorum else 0),
            (GaugeMetricFamily, "pharos_settled_step", "The newest step that can never be taken back", settled),
            (GaugeMetricFamily, "pharos_waiting_groups", "Groups whose call is not answered yet", waiting),
            (GaugeMetricFamily, "pharos_streams", "Groups that are connected", streams),
            (CounterMetricFamily, "pharos_quorums", "Quorums answered", service.issued),
            (CounterMetricFamily, "pharos_losses", "Generations that lost a member", service.lost),
            (CounterMetricFamily, "pharos_refusals", "Calls refused", service.refused),
        ):
            yield kind(name, text, value=value)
        for field, (name, text) in FIGURES.items():
            family = GaugeMetricFamily(name, text, labels=["replica"])
            for replica_id, report in service.reports.items():
                family.add_metric([replica_id], getattr(report, field))
            yield family
