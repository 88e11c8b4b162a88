"""Too much, too slow, too many, and from the wrong people: what a lighthouse bears, over gRPC and HTTP. (test_fuzz.py: nonsense.)"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ft import LighthouseServer
from ft.dashboard import server as page_server
from ft.dashboard.history import History
from ft.dashboard.view import View
from ft.protocol import messages as m
from ft.protocol.lighthouse import LighthouseConfig
from ft.rpc import serving
from ft.rpc.access import Access, Endpoint
from ft.rpc.generated import pharos_pb2, torchft_pb2
from ft.rpc.lighthouse_service import LighthouseService
from tests.rpc.wire import (
    HEARTBEAT,
    OURS,
    QUORUM,
    ROOT,
    TOKEN,
    WAIT_S,
    Stream,
    Wire,
    before_each,
    pharos_call,
    quorum_of,
    refused,
    torchft_call,
)

IDLE = 5000
FLAGS = ("--min_replicas", "1", "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0")


class Running:
    """A lighthouse in a process of its own, with its page."""

    def __init__(self, folder: Path, *flags: str, files: int = 0, errors: str = "errors") -> None:
        program = "import atexit, resource, sys; atexit.register(lambda: print('torch' in sys.modules))\n"
        program += "from ft.rpc.lighthouse_main import main\n"
        if files:
            program += f"resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))\n"
        self.errors = folder / errors
        with self.errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{program}sys.exit(main(sys.argv[1:]))", *FLAGS, *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
        assert self.process.stdout
        self.address = self.process.stdout.readline().strip()
        self.page = self._find(r"https?://(\S+)/status\.json")

    def _find(self, pattern: str) -> str:
        while not (found := re.search(pattern, self.errors.read_text())):
            assert self.process.poll() is None
        return found[1]

    @property
    def rss_mb(self) -> float:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * resource.getpagesize() / 1e6

    @property
    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def get(self, path: str = "/status.json", **headers: str) -> tuple[int, str]:
        request = urllib.request.Request(f"http://{self.page}{path}", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def raw(self, data: bytes) -> bytes:
        """Returns the beginning of the HTTP answer to these bytes."""
        with socket.create_connection(_place(self.page), timeout=WAIT_S) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it need not read to the end
                connection.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                return connection.recv(4096)
        return b""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.terminate()
        assert self.process.wait(WAIT_S) == 0
        assert "Traceback" not in self.errors.read_text()


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("http://").rpartition(":")
    return host, int(port)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("lighthouse")
    (folder / "token").write_text(TOKEN)
    one = Running(folder, "--token_file", "token")
    yield one
    one.close()


# ------------------------------------------------------------------------------------------------ HTTP

GOOD = {"Authorization": f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    "path", ["/status.json", "/metrics", "/events", "/orders", "/../etc/passwd", "/status.json/..", "/x.js"]
)
@pytest.mark.parametrize(
    "word",
    [None, "", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"bearer {TOKEN}", TOKEN, "Bearer \xff\xfe"],
)
def test_no_page_without_the_token(running: Running, path: str, word: str | None):
    """The answer does not even reveal whether a page exists. urllib sends latin-1, so \\xff arrives as a byte that is no UTF-8."""
    assert running.get(path, **({} if word is None else {"Authorization": word})) == (401, "this job has a token\n")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x00\xff\x16\x03\x01" * 20 + b"\r\n\r\n", 400),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nx: " + b"x" * 100_000 + b"\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % i for i in range(1000)) + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n", 400),
        (
            b"POST /status.json HTTP/1.1\r\nhost: a\r\nauthorization: Bearer %s\r\ncontent-length: 3\r\n\r\nabc"
            % TOKEN.encode(),
            405,
        ),
        (b"GET /other HTTP/1.1\r\nhost: a\r\nauthorization: Bearer %s\r\n\r\n" % TOKEN.encode(), 404),
    ],
)
def test_what_is_no_request_is_refused(running: Running, data: bytes, status: int):
    assert b" %d " % status in running.raw(data).partition(b"\r\n")[0]
    assert running.get(**GOOD)[0] == 200


def test_figures_that_are_no_numbers_are_no_broken_page(running: Running):
    wire = Wire(running.address, TOKEN)
    stream = Stream(wire, 'n"\\:1')
    stream.beat(step=3, mean_loss=math.nan, phase='"\\\u2028')
    status = json.loads(running.get(**GOOD)[1], parse_constant=pytest.fail)
    report = status["reports"]['n"\\:1']
    assert (report["mean_loss"], report["phase"]) == (None, '"\\\u2028')
    assert 'pharos_loss{replica="n\\"\\\\:1"} NaN' in running.get("/metrics", **GOOD)[1]
    stream.close()
    wire.close()


def test_figures_beyond_all_measure_are_no_broken_live_page():
    async def story() -> None:
        service = LighthouseService(LighthouseConfig())
        service.machine.handle(m.StreamOpened("a:1"), 0.0)
        view = View(service, History(service.machine))
        for goodput_s, wall_s in ((1e308, 1e-300), (1e308, 1e308), (0.0, 1e308)):
            for name in ("a:1", "b:1"):
                service.reports[name] = pharos_pb2.Report(goodput_s=goodput_s, wall_s=wall_s)
            rows = view.rows()
            json.dumps([rows, view.job(rows), view.static_info("a:1")], allow_nan=False)

    asyncio.run(story())


# ------------------------------------------------------------------------------------------------ connections


def _open_files() -> int:
    """Raises this process's limit as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * IDLE)), hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@pytest.mark.skipif(_open_files() < IDLE + 500, reason="this user may not open 5,000 files (ulimit -Hn)")
def test_thousands_of_idle_connections(running: Running):
    """Idle connections send nothing. The server answers the others, and its memory grows by less than 200 MB."""
    before_mb, idle = running.rss_mb, []
    try:
        for door, count in ((running.page, page_server.MAX_CONNECTIONS * 3), (running.address, IDLE)):
            idle += [socket.create_connection(_place(door)) for _ in range(count)]
            assert running.get(**GOOD)[0] == 200
            wire = Wire(running.address, TOKEN)
            assert wire.code(OURS, pharos_call(m.Call(m.Member("", world_size=0))))[0] == "INVALID_ARGUMENT"
            wire.close()
            if door == running.page:
                assert running.descriptors < page_server.MAX_CONNECTIONS + 100, "the oldest go"
        assert running.rss_mb < before_mb + 200
        print(f"{before_mb:.0f} -> {running.rss_mb:.0f} MB")
    finally:
        for one in idle:
            one.close()


def test_a_low_file_limit_is_said_and_kept_to(tmp_path: Path):
    """A limit of 600 files allows 88 connections and no more; existing ones are served as before."""
    one = Running(tmp_path, files=600)
    assert "at most 88 connections: the limit of open files (ulimit -n) is 600" in one.errors.read_text()
    wire = Wire(one.address)
    wire.send(HEARTBEAT, b"\x0a\x01z")
    idle = [socket.create_connection(_place(one.address), timeout=WAIT_S) for _ in range(200)]
    said = [_first_bytes(connection) for connection in idle]
    assert sum(map(bool, said)) == 87, "an HTTP/2 server begins with its settings; the others are closed"
    wire.send(HEARTBEAT, b"\x0a\x01z")
    for connection in idle:
        connection.close()
    wire.close()
    one.close()


def _first_bytes(connection: socket.socket) -> bytes:
    try:
        return connection.recv(9)
    except ConnectionResetError:
        return b""


def test_a_connection_that_says_nothing_is_closed():
    class Hasty(serving.Server):
        hello_s = 0.2

    async def story() -> None:
        server = Hasty(Access(), {}, [Endpoint("127.0.0.1", 0)])
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.wait_for(reader.read(), WAIT_S)  # its settings, then the end
        writer.close()
        await server.stop()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("limits", "room", "said"),
    [
        ((1024, 1024), 512, "at most 512 connections: the limit of open files (ulimit -n) is 1024"),
        ((256, 1024), 512, "at most 512 connections: the limit of open files (ulimit -n) is 1024"),
        ((1024, 1 << 20), serving.MAX_CONNECTIONS, "the limit of open files is raised from 1024 to 16896"),
        (
            (1024, resource.RLIM_INFINITY),
            serving.MAX_CONNECTIONS,
            "the limit of open files is raised from 1024 to 16896",
        ),
        ((1 << 20, 1 << 20), serving.MAX_CONNECTIONS, ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), serving.MAX_CONNECTIONS, ""),
    ],
)
def test_the_room_there_is(caplog: pytest.LogCaptureFixture, limits: tuple[int, int], room: int, said: str):
    with caplog.at_level(logging.INFO):
        assert serving.room_for_connections(limits, lambda *_: None) == room
    assert (caplog.messages or [""])[-1] == said


def test_addresses_share_the_room():
    class Small(serving.Server):
        room = 100

    async def room() -> int:
        return Small(Access(), {}, [Endpoint("127.0.0.1", 0), Endpoint("127.0.0.2", 0)]).max_connections

    assert asyncio.run(room()) == 50


# ------------------------------------------------------------------------------------------------ calls and streams


def test_thousands_call_at_once_while_the_loop_is_busy():
    """grpc by itself lets 1,000 calls wait for the loop, and cancels some of those beyond."""
    calls = 5000
    started, held, one_ended, go, stop = (threading.Event() for _ in range(5))

    async def hold(data: bytes, _: object) -> bytes:
        held.set()
        assert go.wait(WAIT_S)  # and nothing else runs on this loop
        return data

    async def answer(data: bytes, _: object) -> bytes:
        return data

    async def serve() -> None:
        nonlocal server
        routes = {"/test/Hold": serving.unary(hold), "/test/Answer": serving.unary(answer)}
        server = serving.Server(Access(), routes, [Endpoint("127.0.0.1", 0)])
        await server.start()
        started.set()
        await asyncio.to_thread(stop.wait)
        await server.stop()

    server: serving.Server
    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(WAIT_S)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            first = channel.unary_unary("/test/Hold").future(b"", timeout=WAIT_S)
            assert held.wait(WAIT_S)
            found = [channel.unary_unary("/test/Answer").future(b"%d" % i, timeout=2 * WAIT_S) for i in range(calls)]
            for call in found:
                call.add_done_callback(lambda _: one_ended.set())
            assert not one_ended.wait(1.0), "a call ends while nothing can answer it"
            go.set()
            assert first.result() == b"" and [call.result() for call in found] == [b"%d" % i for i in range(calls)]
    finally:
        go.set()
        stop.set()
        thread.join(WAIT_S)


def test_a_stream_whose_reader_is_too_slow_is_dropped_with_the_reason(lighthouse: LighthouseServer):
    """The client sends and does not read, so answers to beats pile up; gRPC itself buffers no more than a small window of them here."""
    place = lighthouse.address().removeprefix("http://")
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    channel = grpc.insecure_channel(place, options=options)
    up = pharos_pb2.Up
    hello = up(hello=pharos_pb2.Hello(replica_id="slow:1")).SerializeToString()
    beats = (up(report=pharos_pb2.Report(sent_s=60.0 * i)).SerializeToString() for i in range(30_000))
    sent = threading.Event()

    def words() -> Iterator[bytes]:
        yield hello
        yield from beats
        sent.set()

    call = channel.stream_stream("/pharos.Lighthouse/Watch")(words())
    assert sent.wait(WAIT_S * 2), "it reads nothing, and is still heard"
    code, reason = refused(lambda: list(call))
    assert code == "RESOURCE_EXHAUSTED" and reason.startswith("the reader is too slow: 513 messages")
    stream = Stream(Wire(lighthouse.address()), "slow:2")  # lost is final for an id
    stream.beat()
    stream.close()
    channel.close()


def test_calls_without_a_deadline_wait_and_are_forgotten_with_their_caller(lighthouse: LighthouseServer):
    wire, other = Wire(lighthouse.address()), Wire(lighthouse.address())
    wire.channel.unary_unary(QUORUM).future(torchft_call("endless"))
    wire.send(HEARTBEAT, b"\x0a\x07endless")  # comes after it on the same connection
    wire.close()  # the call is cancelled with it
    quorum = [other.begin(QUORUM, torchft_call(name)) for name in "cd"]
    ids = torchft_pb2.LighthouseQuorumResponse.FromString(quorum[0].result(WAIT_S)).quorum.participants
    assert [x.replica_id for x in ids] == ["c", "d"]
    other.close()


def test_what_waits_is_bounded_in_bytes():
    async def story() -> None:
        service = LighthouseService(LighthouseConfig(min_replicas=2))
        service.max_waiting = 1 << 20
        waits = asyncio.ensure_future(service.ask(m.Call(m.Member("a:1")), serving.Pending(600_000)))
        await asyncio.sleep(0)
        with pytest.raises(serving.CallRefused, match="calls of 600000 bytes in all are waiting already") as caught:
            await service.ask(m.Call(m.Member("b:1")), serving.Pending(600_000))
        assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED and not waits.done()

    asyncio.run(story())


# ------------------------------------------------------------------------------------------------ the wrong people


def test_torchft_is_refused_by_a_job_of_ours(lighthouse: LighthouseServer):
    """The beats are refused, too: only the sender is notified, and the job does not count it."""
    wire = Wire(lighthouse.address())
    ours = [wire.pharos(m.Call(m.Member(i))) for i in ("a:1", "b:1")]
    assert quorum_of(ours[0]).ids == ("a:1", "b:1")
    waiting = wire.pharos(m.Call(m.Member("a:1"), known=1, failed=True))
    stream = Stream(wire, "a:1")
    stream.beat()
    reason = "this job's quorums hold members of pharos; torchft cannot join them"
    for name in ("z", "a:1"):
        beat = torchft_pb2.LighthouseHeartbeatRequest(replica_id=name).SerializeToString()
        assert wire.code(HEARTBEAT, beat) == ("FAILED_PRECONDITION", reason)
        assert wire.code(QUORUM, torchft_call(name)) == ("FAILED_PRECONDITION", reason)
    stream.beat()
    assert not waiting.done(), "the honest call of that id is not the stranger's"
    assert quorum_of(wire.pharos(m.Call(m.Member("b:1"), known=1, failed=True))).ids == ("a:1", "b:1")
    stream.close()
    wire.close()


def test_ours_are_refused_by_a_job_of_torchft(lighthouse: LighthouseServer):
    wire = Wire(lighthouse.address())
    theirs = [wire.begin(QUORUM, torchft_call(name)) for name in "ab"]
    theirs[0].result(WAIT_S)
    reason = "this job's quorums hold members of torchft; pharos cannot join them"
    assert wire.code(OURS, pharos_call(m.Call(m.Member("z:1")))) == ("FAILED_PRECONDITION", reason)
    assert refused(Stream(wire, "z:1").beat) == ("FAILED_PRECONDITION", reason)
    again = [wire.begin(QUORUM, torchft_call(name)) for name in "ab"]
    assert torchft_pb2.LighthouseQuorumResponse.FromString(again[0].result(WAIT_S)).quorum.quorum_id == 1
    wire.close()


def test_the_token_is_compared_whole_and_in_constant_time():
    seen, guard = list[str](), Access(TOKEN)
    for value, good in (
        (f"Bearer {TOKEN}", True),
        (b"Bearer " + TOKEN.encode(), True),
        (TOKEN, False),
        ("\udcff", False),
    ):
        with before_each(seen.append):
            assert guard.permits([("x", "y"), ("Authorization", value)]) is good
    assert sum("compare_digest" in name for name in seen) == 4 and not guard.permits([])
    assert Access().permits([])


def test_who_waits_when_it_stops_is_told():
    """Callers get UNAVAILABLE, and none is lost: the server itself ends their streams. Its port is free again."""
    events: list[m.Event] = []
    lighthouse = LighthouseServer(
        "127.0.0.1:0", 2, quorum_tick_ms=10, observer=lambda _, event, out: events.append(event)
    )
    wire = Wire(lighthouse.address())
    call = wire.pharos(m.Call(m.Member("a:1")))
    stream = Stream(wire, "b:1")
    stream.beat()
    lighthouse.shutdown()
    LighthouseServer(lighthouse.address().removeprefix("http://"), 1).shutdown()
    for ends in (lambda: call.result(WAIT_S), lambda: list(stream.call)):
        assert refused(ends) == ("UNAVAILABLE", "this server stops")
    assert any(isinstance(event, m.StreamOpened) for event in events)
    assert not any(isinstance(event, m.StreamClosed) for event in events)
    wire.close()
