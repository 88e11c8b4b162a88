"""/events: the messages that a watcher receives, how it catches up, and its inability to harm the lighthouse."""

from __future__ import annotations

import asyncio
import http.client
import socket
import time
from contextlib import closing

import pytest

from ft.dashboard.server import MAX_CONNECTIONS, serve_http
from ft.dashboard.view import CONNECTED, HEALS, JOINS, LATE, LEFT, LOST, TRAINS
from ft.protocol.messages import VOID
from ft.rpc.access import Access, Endpoint
from ft.rpc.generated import pharos_pb2
from tests.dashboard.house import THREE, WAIT_S, Herds, House, Houses, Jobs
from tests.waiting import in_time


def test_a_job_as_a_watcher_sees_it(job: Jobs):
    one, groups = job()
    with one.watch() as reader:
        reader.until(lambda r: r.job and all(r.row(i)[:1] == [1] for i in THREE))
        assert reader.row("0:a") == [1, reader.row("0:a")[1], TRAINS, 1, 0, 90, CONNECTED, ""]
        assert reader.answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"
        assert (reader.job["state"], reader.job["members"], reader.job["step"]) == ("good", 3, 1)
        groups.beat(4, waiting=True)
        reader.until(lambda r: r.job["step"] == 5 and r.points[-1][1] == 5)
        groups.lose("2:c")
        reader.until(lambda r: r.row("2:c")[2] == LOST)
        assert reader.row("2:c")[7] == "its connection broke" and reader.row("2:c")[0] == VOID
        reader.until(lambda r: "2:c is lost: its connection broke" in r.texts)
        assert reader.job["headline"] == "Training with fewer groups"
        groups.open(["2:d"])
        reader.until(lambda r: r.row("2:d") and r.row("2:d")[2] == JOINS)
        groups.form(failed=True)
        reader.until(lambda r: r.row("2:d")[2:4] == [HEALS, 2])
        groups.heal("2:d", 0.5)
        groups.beat(0)
        heals = reader.next()
        while not heals.get("heals") or heals["heals"][0][0][2] == 0:
            heals = reader.next()
        [[key, sources, done, total]] = heals["heals"][0]
        assert reader.names[key] == "2:d" and [reader.names[i] for i in sources] == ["0:a", "1:b"] and 2 * done == total
        assert not reader.row("2:c"), "its name has come back"
        groups.heal("2:d", 1.0)
        groups.beat()
        reader.until(lambda r: r.row("2:d")[2] == TRAINS and "2:d has the state of step 5" in r.texts)


def test_the_age_of_a_group_is_that_of_its_report(house: Houses, herd: Herds):
    """A page that is open before the first report of a group gets its age with the report."""
    one = house(min_replicas=3)
    groups = herd(one)
    groups.open(THREE)
    groups.form()
    with one.watch() as reader:
        reader.until(lambda r: r.row("0:a"))
        assert reader.born["0:a"] == 0
        groups.beat()
        reader.until(lambda r: r.born["0:a"])
        assert reader.born["0:a"] < time.time()


def test_a_page_stays_open_however_many_connections_come_and_go(job: Jobs):
    one, groups = job()
    with one.watch() as reader:
        reader.until(lambda r: r.row("0:a"))
        for _ in range(MAX_CONNECTIONS + 1):
            assert one.ask("GET", "/icon.svg")[0] == 200
        groups.beat()
        reader.until(lambda r: r.job["step"] == groups.step)


def test_the_address_of_the_page_is_one_that_was_opened(job: Jobs):
    """The page's address is the one that was opened: the first port may belong to another program."""
    one, _ = job()

    async def opened() -> Endpoint | None:
        at = [Endpoint("127.0.0.1", one.port), Endpoint("127.0.0.2", one.port)]
        async with serve_http(one.service, Access(), at, must=False) as page:
            return page

    assert asyncio.run_coroutine_threadsafe(opened(), one.loop).result(WAIT_S) == Endpoint("127.0.0.2", one.port)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs sockets of IPv6 that accept IPv4, too")
def test_an_address_of_ipv6_is_reached_over_ipv4_too(job: Jobs):
    """The port of gRPC accepts both, too. By default the lighthouse listens on [::]; this is the same kind of socket, for this machine."""
    one, _ = job()

    async def answer() -> bytes:
        async with serve_http(one.service, Access(), [Endpoint("::ffff:127.0.0.1", 0)], must=True) as page:
            assert page
            reader, writer = await asyncio.open_connection("127.0.0.1", page.port)
            writer.write(b"GET /icon.svg HTTP/1.0\r\n\r\n")
            with closing(writer):
                return await reader.readline()

    assert asyncio.run_coroutine_threadsafe(answer(), one.loop).result(WAIT_S) == b"HTTP/1.0 200 OK\r\n"


def test_who_keeps_the_others_waiting_is_named(job: Jobs):
    one, groups = job()
    slow = groups.streams.pop("1:b")
    groups.beat(0, waiting=True)
    with one.watch() as reader:
        reader.until(lambda r: r.row("1:b") and r.row("1:b")[2] == LATE)
        reader.until(lambda r: r.job["headline"] == "Waiting in a step")
        assert reader.job["reason"] == "1:b keeps the others waiting in the all-reduce."
    groups.streams["1:b"] = slow


def test_a_long_phase_is_no_fault_within_its_limit(job: Jobs):
    one, groups = job()
    groups.beat()
    with one.watch() as reader:
        reader.until(lambda r: r.job and r.job["step"] == 2)
        groups.beat(0, phase="validation", phase_limit_s=300.0)
        assert in_time(lambda: all(report.phase_limit_s for report in one.service.reports.values()))
        one.feed.history.last_step_s -= 60
        reader.until(lambda r: r.job["headline"].startswith("No step for "))
        assert reader.job["state"] == "busy"
        assert reader.job["reason"] == "0:a, 1:b and 2:c: validation, which may last longer than a step."
        one.feed.history.last_step_s -= 300  # as of a trainer that hangs in it, whose server repeats the report
        reader.until(lambda r: r.job["state"] == "bad")


def test_one_that_was_cut_off_is_told_what_it_missed(job: Jobs):
    one, groups = job()
    with one.watch() as reader:
        reader.until(lambda r: r.row("2:c"))
        last_id = reader.last_id
    groups.lose("2:c")
    with one.watch(**{"Last-Event-ID": last_id}) as reader:
        while "2:c is lost: its connection broke" not in reader.texts:
            reader.next()
        assert reader.begun == 0, "not all of it again"
    for strange in ("", "other-1", last_id + "0" * 30, "-", f"{last_id.partition('-')[0]}-99999", "x" * 5000):
        with one.watch(**{"Last-Event-ID": strange}) as reader:
            reader.until(lambda r: "2:c is lost: its connection broke" in r.texts)
            assert reader.begun == 1


def test_who_is_away_for_too_long_is_told_all_of_it(job: Jobs):
    one, groups = job(most_updates=2)
    with one.watch() as other:
        with one.watch() as reader:
            reader.until(lambda r: r.row("2:c"))
            last_id = reader.last_id
        for _ in range(4):
            groups.beat()
            step = groups.step
            other.until(lambda r: r.job and r.job["step"] == step)  # noqa: B023 (called at once)
        with one.watch(**{"Last-Event-ID": last_id}) as reader:
            reader.until(lambda r: r.job and r.job["step"] == groups.step)
            assert reader.begun == 1


def test_nobody_watches_and_nothing_is_made(job: Jobs):
    one, groups = job(linger_s=0.0)
    assert not one.feed.awake
    with one.watch() as reader:
        reader.until(lambda r: r.row("2:c"))
        assert one.feed.awake
    while one.feed.watchers:  # the next word to it finds it gone
        groups.beat()
    assert in_time(lambda: not one.feed.awake)
    assert not one.feed.ring
    groups.beat()
    with one.watch() as reader:
        reader.until(lambda r: r.job and r.job["step"] == groups.step and len(r.points) > 1)


def test_too_many_watchers_are_refused_in_words(house: Houses):
    one = house(most_watchers=2)
    with one.watch() as first, one.watch() as second:
        first.next(), second.next()
        status, text, headers = one.ask("GET", "/events", **one.headers())
        assert (status, text) == (503, "2 pages are open already; close one of them\n") and headers["Retry-After"]


def test_one_that_does_not_read_is_dropped_and_costs_a_bounded_amount(house: Houses, herd: Herds):
    one = house(slow_s=0.2, calm_s=0.0, calm_per_group_s=0.0)
    job = herd(one)
    job.open([f"{i:04}:{'x' * 400}" for i in range(300)])  # some 130 KB to begin with
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(WAIT_S)
        sock.connect(("127.0.0.1", one.port))
        request = f"GET /events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {one.token}\r\n\r\n"
        sock.sendall(request.encode())
        assert in_time(lambda: one.feed.watchers)
        number = 0
        while one.feed.watchers:  # until it is dropped, there is more and more for it
            number += 1
            job.beat(phase=f"{number}")
            assert len(one.feed.ring) <= one.feed.most_updates
    with one.watch() as reader:
        assert reader.next()["begin"], "others are served"


def test_a_request_that_never_ends_does_not_keep_the_lighthouse():
    """Its port would stay bound meanwhile, and the next lighthouse could not start. `close` waits for less than aiohttp does by default."""
    one = House()  # no fixture: it is closed here
    with closing(http.client.HTTPConnection("127.0.0.1", one.port, timeout=WAIT_S)) as asker:
        asker.putrequest("POST", "/orders")
        for name, value in one.headers(**{"Content-Length": "1000", "Expect": "100-continue"}).items():
            asker.putheader(name, value)
        asker.endheaders()
        assert asker.sock.recv(100).startswith(b"HTTP/1.1 100 ")  # its handler waits for the body
        one.close()


def test_the_files_of_the_page_hold_nothing_of_the_job(job: Jobs):
    one, _ = job()
    for path in ("/", "/page.js", "/page.css", "/icon.svg"):
        status, text, headers = one.ask("GET", path)
        assert status == 200 and "0:a" not in text, "the same for everybody"
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert one.ask("GET", "/feed.py", **one.headers())[0] == one.ask("GET", "/..%2ffeed.py", **one.headers())[0] == 404


def test_a_job_without_a_token_is_shown_to_who_reaches_it(job: Jobs):
    one, _ = job(token="")
    with one.watch() as reader:
        assert reader.next()["begin"][0]["orders"] is False


def test_a_fault_of_the_page_ends_the_page_and_not_the_job(job: Jobs):
    one, groups = job()
    with one.watch() as reader:
        reader.until(lambda r: r.row("2:c"))
        one.loop.call_soon_threadsafe(one.service.reports.__setitem__, "nobody", object())  # no report at all
        groups.beat()
        with pytest.raises(AssertionError, match="the stream has ended"):
            reader.until(lambda r: False)
    assert one.service.dashboard is None
    assert one.ask("GET", "/events", **one.headers())[:2] == (
        503,
        "the dashboard had an error and is switched off; the error is in the lighthouse's log\n",
    )
    assert groups.form() == 1, "quorums go on"


@pytest.mark.parametrize(
    "bad", [{"lane": "mine"}, {"lane": "commit", "text": "x" * 501}, {"lane": "commit", "step": 1 << 50}]
)
def test_a_stream_that_tells_nonsense_is_refused(job: Jobs, bad: dict[str, object]):
    one, groups = job()
    groups.do(groups.streams["0:a"].write(timeline_event=pharos_pb2.TimelineEvent(**bad)))  # type: ignore[arg-type]
    with one.watch() as reader:
        reader.until(lambda r: r.row("0:a") and r.row("0:a")[2] == LOST)


def test_a_thousand_groups_in_updates_of_50_kb(job: Jobs):
    one, groups = job([f"replica_{i:05d}:0f0e0d0c-0000-4000-8000-{i:012d}" for i in range(1000)])
    with one.watch() as reader:
        reader.until(lambda r: len(r.rows) == 1000 and r.job["step"] == 1)
        before = len(reader.sizes)
        groups.beat(1000)
        reader.until(lambda r: all(row[0] == 1001 for row in r.rows.values()))
        groups.lose(*list(groups.streams)[:500])
        reader.until(lambda r: sum(row[2] == LOST for row in r.rows.values()) == 500)
    print(f"the largest event: {max(reader.sizes)} bytes; once it began: {max(reader.sizes[before:])}")
    assert max(reader.sizes) <= 50_000


@pytest.mark.parametrize("others", [("0:a", "2:c"), ()])
def test_a_clean_leave_is_shown_for_what_it_is(job: Jobs, others: tuple[str, ...]):
    """A clean leave of the last group is shown, too: nobody is left to notify, so the machine has no effect for it."""
    one, groups = job((*others, "1:b"))
    groups.leave("1:b")
    with one.watch() as reader:
        reader.until(lambda r: r.row("1:b") and r.row("1:b")[2] == LEFT)
        reader.until(lambda r: "1:b left: drained" in r.texts)
        assert not any("lost" in text for text in reader.texts)
        reader.until(lambda r: others or (r.job["state"], r.job["headline"]) == ("good", "All groups have left"))
