"""The lighthouse's HTTP server, on the loop that serves gRPC:

    /                     the dashboard's files, the same for every job and visitor
    /events  /orders      updates of the job's state; orders of an operator: a replica group leaves (drain) or is killed (kill),
                          or groups without the state may continue (takeover)
    /status.json /metrics the same state for programs

All but the files require the job's token, if it has one: `Authorization: Bearer TOKEN`. Browsers do not add this header to requests from
other sites, so a link or a form there cannot send an order. A job without a token accepts no orders, since any site could send them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ft.dashboard.feed import Feed
from ft.dashboard.history import clean
from ft.dashboard.view import DRAINED, KILLED
from ft.protocol import messages as m
from ft.protocol.roster import takeover_order_s
from ft.protocol.rules import MAX_TEXT
from ft.rpc.access import Access, Endpoint
from ft.rpc.codec import ORDERS
from ft.rpc.lighthouse_service import LighthouseService
from ft.rpc.serving import STOP_S

FOLDER = Path(__file__).resolve().parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {f"/{path.name}": (path.read_bytes(), TYPES[path.suffix]) for path in FOLDER.iterdir() if path.suffix in TYPES}
FILES["/"] = FILES.pop("/index.html")
# Content security policy: only files of this server, no inline code, no strings as code or markup (Trusted Types), no frames.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {  # in every response
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

BURST, PER_S = 10, 1.0  # rate limit of orders: token bucket of this size, refilled with so many a second
MAX_BYTES = 16 << 10  # bytes of a request
MAX_CONNECTIONS = 256
IDLE_S = 75.0  # keep-alive of a connection; longer than the usual scrape interval of Prometheus
HANDSHAKE_S = 10.0
BACKLOG = 100  # connections accepted at once; below MAX_CONNECTIONS, so that the oldest connection is fully set up
FLAGS = {"drain": DRAINED, "kill": KILLED}
TAKEOVER = "takeover"  # an order to the lighthouse itself: replica_id is ""
log = logging.getLogger("pharos.lighthouse")
# field of Report -> name and help of its gauge, which has the label `replica`
METRICS = {
    "step": ("pharos_step", "Committed steps of the branch (semi-sync: rounds), -1 while healing"),
    "median_step_s": ("pharos_step_seconds", "Median duration of a step (semi-sync: of a round)"),
    "healed_bytes": ("pharos_healed_bytes", "Bytes received from other groups since the process started"),
    "goodput_s": ("pharos_goodput_seconds", "Time spent in steps that were committed"),
    "wall_s": ("pharos_wall_seconds", "Time since the group's process started"),
    "mean_loss": ("pharos_loss", "Mean loss of the newest step, nats per token"),
}


@asynccontextmanager
async def serve_http(
    service: LighthouseService, access: Access, at: Sequence[Endpoint], *, must: bool
) -> AsyncIterator[Endpoint | None]:
    """Serves HTTP. Yields the first address that could be opened; None: there is none, which is logged. `must`: raises ValueError if the
    first of `at` cannot be opened."""
    quiet = logging.getLogger("pharos.http")
    # no stack traces of invalid requests, which are answered with 400: a client could fill the disk with them
    quiet.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
    app, feed = _app(service, access)
    runner = web.AppRunner(
        app,
        access_log=None,
        handle_signals=False,
        keepalive_timeout=IDLE_S,
        shutdown_timeout=STOP_S / 2,  # aiohttp waits for so long twice: for an answer, then for the cancelled handler
        logger=quiet,
    )
    await runner.setup()
    tls = access.tls.server_context() if access.tls else None
    options: dict[str, Any] = {"backlog": BACKLOG, "ssl": tls, "ssl_handshake_timeout": HANDSHAKE_S if tls else None}
    loop, servers = asyncio.get_running_loop(), list[asyncio.Server]()
    first: Endpoint | None = None
    try:
        for place in at:
            try:
                made: Any = _Newest(runner.server)
                where = _listens_at(place, first.port if first else place.port)
                servers.append(await loop.create_server(made, **where, **options))
            except OSError as error:
                if must and place is at[0]:
                    raise ValueError(f"--http {place}: {error.strerror}") from None
                log.warning("no dashboard on %s: %s", place, error.strerror)
                continue
            opened = Endpoint(place.host, int(servers[-1].sockets[0].getsockname()[1]))
            first = first or opened
            url = f"http{'s' if tls else ''}://{opened}"
            log.info("the dashboard: %s/; for programs: %s/status.json, /metrics", url, url)
        yield first
    finally:
        for server in servers:
            server.close()
        feed.end()
        await runner.cleanup()


def _listens_at(place: Endpoint, port: int) -> dict[str, Any]:
    """Returns the arguments of create_server for an address: for one of IPv6 a socket, as asyncio's own would accept no IPv4, and that of
    all interfaces must, as gRPC's does."""
    if ":" not in place.host or "%" in place.host or not socket.has_dualstack_ipv6():
        return {"host": place.host, "port": port}
    return {"sock": socket.create_server((place.host, port), family=socket.AF_INET6, dualstack_ipv6=True)}


class _Newest:
    """Protocol factory that closes the oldest open connection above MAX_CONNECTIONS: idle connections of one client exclude no other."""

    def __init__(self, make: Any) -> None:
        self._make, self._open = make, deque[Any]()

    def __call__(self) -> Any:
        if len(self._open) == MAX_CONNECTIONS:
            # closed ones have no transport, nor have the newest, which are not set up yet
            closed = [one for one in islice(self._open, MAX_CONNECTIONS - BACKLOG) if one.transport is None]
            for one in closed:
                self._open.remove(one)
            if not closed:
                self._open.popleft().force_close()
        self._open.append(self._make())
        return self._open[-1]


def _app(service: LighthouseService, access: Access) -> tuple[web.Application, Feed]:
    registry = CollectorRegistry()
    registry.register(_Collector(service))
    feed = Feed(service, takes_orders=bool(access.token))
    orders = Orders(service, feed, has_token=bool(access.token))
    service.dashboard = feed

    async def status_json(_: web.Request) -> web.Response:
        return web.json_response(status(service), dumps=lambda page: json.dumps(page, allow_nan=False))

    async def metrics(_: web.Request) -> web.Response:
        headers = {"Content-Type": exposition.CONTENT_TYPE_LATEST}
        return web.Response(body=exposition.generate_latest(registry), headers=headers)

    async def file(request: web.Request) -> web.Response:
        data, kind = FILES[request.path]  # a lookup: the path is never joined to a folder
        return web.Response(body=data, content_type=kind, charset="utf-8")

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
    app.add_routes([web.get(path, file) for path in FILES])
    app.on_response_prepare.append(harden)
    return app, feed


class Orders:
    """An operator's orders from the page, accepted only where the job has a token: BURST at once, then PER_S a second."""

    def __init__(
        self, service: LighthouseService, feed: Feed, *, has_token: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service, self._feed, self._has_token, self._clock = service, feed, has_token, clock
        self._left, self._filled_s = float(BURST), clock()

    async def give(self, request: web.Request) -> web.Response:
        """Answers 202 if the order was sent to the group or carried out here. With a different status nothing was done, and the body has
        the cause."""
        if not self._has_token:
            text = "this job has no token, so it accepts no orders: start the lighthouse with --token_file\n"
            raise web.HTTPForbidden(text=text)
        now_s = self._clock()
        self._left = min(BURST, self._left + PER_S * (now_s - self._filled_s))
        self._filled_s = now_s
        if self._left < 1:
            text = f"too many orders: {BURST} at once, then {PER_S:g} a second\n"
            raise web.HTTPTooManyRequests(text=text, headers={"Retry-After": "1"})
        self._left -= 1
        order, replica_id = self._read(request.content_type, await request.read())
        words = self._carry_out(order, replica_id, request.remote or "somewhere")
        log.warning("order from %s: %s %s: %s", request.remote, order, clean(replica_id, MAX_TEXT), words)
        return web.json_response({"order": order, "replica_id": replica_id, "done": words}, status=202)

    def _read(self, content_type: str, data: bytes) -> tuple[str, str]:
        if content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="an order is application/json\n")
        if len(data) > MAX_BYTES:
            text = f"an order has at most {MAX_BYTES} bytes\n"
            raise web.HTTPRequestEntityTooLarge(MAX_BYTES, len(data), text=text)
        try:
            asked = json.loads(data)
            order, replica_id = asked["order"], asked["replica_id"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise web.HTTPBadRequest(text='an order is {"order": ..., "replica_id": ...}\n') from None
        if order not in (*ORDERS, TAKEOVER) or not isinstance(replica_id, str):
            legal = " or ".join((*ORDERS, TAKEOVER))
            raise web.HTTPBadRequest(text=f"order: legal is {legal}; replica_id: a string\n")
        return order, replica_id

    def _carry_out(self, order: str, replica_id: str, who: str) -> str:
        service, history = self._service, self._feed.history
        if order == TAKEOVER:
            service.driver.feed(m.TakeOver())
            valid_s = takeover_order_s(service.config.times.takeover_s)
            words = f"groups may continue without the members that held the state, for {valid_s:g} s and as long as a group waits"
            history.add("membership", "info", f"an operator ({who}) allows a takeover")
            return words
        peer = service.machine.roster.peers.get(replica_id)
        if peer is None:
            raise web.HTTPNotFound(text=f"no such group is alive: {clean(replica_id, MAX_TEXT)}\n")
        if peer.kind == "torchft":
            raise web.HTTPConflict(text="that is a torchft group, which cannot get orders from here\n")
        flags = self._feed.view.ordered
        if service.order(replica_id, order, f"on the lighthouse's dashboard, from {who}"):
            words = {"drain": "it leaves after its step", "kill": "it ends now"}[order]
        elif order == "kill":
            service.driver.feed(m.Evict(replica_id))
            words = "it has no stream for orders, so it is removed from the job"
        else:
            raise web.HTTPConflict(text="it has no stream for orders; kill removes it from the job\n")
        flags[replica_id] = flags.get(replica_id, 0) | FLAGS[order]
        for gone in [i for i in flags if i not in service.machine.roster.peers and i != replica_id]:
            del flags[gone]
        history.add("membership", "info", f"an operator ({who}): {order} {replica_id}, {words}")
        return words


def status(service: LighthouseService) -> dict[str, Any]:
    """Returns the lighthouse's state as JSON values: members by replica_rank, and the newest report of each group."""
    quorum, saved = service.machine.quorum, service.machine.saved
    names = ("step", "commit_quorum_id", "waiting", "settled", "phase", *list(METRICS)[1:])
    whole = [quorum.ids[rank] for rank in quorum.holders] if quorum else []
    members = [
        {
            **{name: getattr(member, name) for name in ("replica_id", "address", "world_size")},
            "step": m.step_of(member.step),
            "heals": saved.kind == "pharos" and member.replica_id not in whole,
            "connected": member.replica_id in service.streams,
        }
        for member in (quorum.members if quorum else ())
    ]
    reports = {
        replica_id: {name: getattr(report, name) for name in names}
        for replica_id, report in sorted(service.reports.items())
    }
    for report in reports.values():
        report |= {name: m.step_of(report[name]) for name in ("step", "settled")}
        # JSON has no NaN and Inf, which a loss may be
        report |= {name: None for name, it in report.items() if isinstance(it, float) and not math.isfinite(it)}
    return {
        "reason": service.machine.reason,
        "kind": saved.kind,
        "epoch": saved.epoch,
        "settled": m.step_of(saved.settled),
        "branch": saved.settled // m.STEPS_PER_BRANCH,
        "min_replicas": service.config.min_replicas,
        "waiting": service.waiting_ids,
        "streams": len(service.streams),
        "state_file_trouble": service.state_writer.trouble if service.state_writer else "",
        "quorum": quorum
        and {
            "quorum_id": quorum.quorum_id,
            "age_s": round(time.time() - service.issued_at, 1) if service.issued_at else None,
            "step": m.step_of(quorum.reference[0]),
            "members": members,
        },
        "reports": reports,
    }


@dataclass(eq=False)
class _Collector:
    """Prometheus collector. It makes all metrics at each scrape, so groups that are gone have none."""

    service: LighthouseService

    def collect(self) -> Iterator[Any]:
        service, quorum = self.service, self.service.machine.quorum
        settled, waiting, streams = service.machine.saved.settled, len(service.waiting_ids), len(service.streams)
        # a quorum keeps its members until the next one, for which too few may be left
        alive = sum(i in service.machine.roster.peers for i in quorum.ids) if quorum else 0
        for kind, name, text, value in (
            (GaugeMetricFamily, "pharos_quorum_id", "Id of the newest quorum", quorum.quorum_id if quorum else 0),
            (GaugeMetricFamily, "pharos_quorum_members", "Members of it", len(quorum.members) if quorum else 0),
            (GaugeMetricFamily, "pharos_live_members", "Members of it that neither left nor were lost", alive),
            (GaugeMetricFamily, "pharos_settled_step", "Newest step that is final", m.step_of(settled)),
            (
                GaugeMetricFamily,
                "pharos_branch",
                "Times that the job went back to a checkpoint",
                settled // m.STEPS_PER_BRANCH,
            ),
            (GaugeMetricFamily, "pharos_waiting_groups", "Groups whose quorum request waits", waiting),
            (GaugeMetricFamily, "pharos_streams", "Groups with an open stream", streams),
            (CounterMetricFamily, "pharos_quorums", "Quorums issued", service.issued),
            (CounterMetricFamily, "pharos_losses", "Generations that lost a member", service.lost),
            (CounterMetricFamily, "pharos_refusals", "Requests refused", service.refused),
        ):
            yield kind(name, text, value=value)
        for field, (name, text) in METRICS.items():
            family = GaugeMetricFamily(name, text, labels=["replica"])
            for replica_id, report in service.reports.items():
                value = getattr(report, field)
                family.add_metric([replica_id], m.step_of(value) if field == "step" else value)
            yield family
