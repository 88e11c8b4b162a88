"""Arbitrary input to the server's parser; and the server itself answers all of it, and continues."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ft.healing.http_server import BadRequest, HealRequest, parse_request
from ft.healing.http_transport import HttpTransport, parse_reply
from ft.rpc.access import Access
from tests.healing.states import large

ACCESS = Access(token="a token of the test's own")
FIELDS = (("Reader", "j"), ("Range", "chunks=3-4"), ("Lacks", "1-9"))


def good(*fields: tuple[str, str], path: str = "/heal/3/7/body", method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields or FIELDS)]
    return "\r\n".join(lines).encode()


def parse(data: bytes) -> HealRequest:
    return parse_request(data, Access())


def test_a_good_request():
    assert parse(good()) == HealRequest("body", 3, 7, "j", chunks=(3, 4), lacks=(1, 9))
    assert parse(good(("Reader", "j"), path="/heal/3/7/done", method="POST")).what == "done"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", 400),
        (b"GET /heal/3/7/body HTTP/2.0", 400),
        (b"GET /heal/3/7/body HTTP/1.1\nReader: j", 400),
        (good() + b"\r\nreader: k", 400),
        (good() + b"\r\n folded", 400),
        (good() + b"\r\nContent-Length: 5", 413),
        (good() + b"\r\nTransfer-Encoding: chunked", 413),
        (good() + b"\r\nX: \xff", 400),
        (good() + b"\r\nX: " + b"x" * 20_000, 431),
        (good() + b"".join(b"\r\nX%d: 1" % i for i in range(100)), 431),
        (good(path="/heal/3/7/../../etc/passwd"), 404),
        (good(path="/heal/-3/7/body"), 404),
        (good(path="/heal/" + "9" * 19 + "/7/body"), 404),
        (good(method="POST"), 405),
        (good(("Range", "chunks=3-4")), 400),
        (good(("Reader", "a b"), *FIELDS[1:]), 400),
        (good(FIELDS[0], ("Range", "bytes=0-9"), FIELDS[2]), 416),
        (good(FIELDS[0], ("Range", "chunks=0-1,3-4"), FIELDS[2]), 416),
        (good(FIELDS[0], ("Range", "chunks=0-3"), FIELDS[2]), 400),
        (good(FIELDS[0], ("Range", "chunks=3-10"), FIELDS[2]), 400),
        (good(FIELDS[0], ("Range", "chunks=4-3"), FIELDS[2]), 400),
        (good(*FIELDS[:2], ("Lacks", "3-9,9-10")), 400),
    ],
)
def test_a_bad_request_is_refused_with_a_status(data: bytes, status: int):
    with pytest.raises(BadRequest) as refused:
        parse(data)
    assert refused.value.status == status


def parse_or_refuse(data: bytes) -> None:
    try:
        asked = parse(data)
    except BadRequest as error:
        assert 400 <= error.status < 500 and str(error).isascii()
        return
    assert asked.what != "body" or asked.lacks[0] <= asked.chunks[0] <= asked.chunks[1] <= asked.lacks[1]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes):
    parse_or_refuse(data)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_good_request_with_some_bytes_changed(data: st.DataObject):
    text = bytearray(good())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    parse_or_refuse(bytes(text))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30), st.text(max_size=30), st.text(alphabet="0123456789-,", max_size=40))
def test_any_fields(reader: str, unit: str, lacks: str):
    parse_or_refuse(f"GET /heal/3/7/body HTTP/1.1\r\nReader: {reader}\r\nRange: {unit}\r\nLacks: {lacks}".encode())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=120))
def test_any_reply(data: bytes):
    try:
        status, length = parse_reply(data)
    except ValueError:
        return
    assert 0 <= status <= 999 and 0 <= length < 10**15


@pytest.fixture(scope="module")
def server() -> Iterator[HttpTransport]:
    transport = HttpTransport("127.0.0.1", "a", ACCESS)
    transport.offer(large(1, chunks=10).view(), quorum_id=3, step=7, joiners=["j"])
    yield transport
    transport.close()


def ask(server: HttpTransport, data: bytes) -> bytes:
    """Returns the status line of the answer, or nothing where the connection was closed."""
    with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as sock:
        sock.settimeout(30)
        sock.sendall(data + b"\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        try:
            return sock.recv(1000).partition(b"\r\n")[0]
        except ConnectionResetError:  # what it had not read when it closed
            return b""


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_server_answers_anything_and_goes_on(server: HttpTransport, data: st.DataObject):
    text = bytearray(good(*FIELDS, *ACCESS.metadata()))
    place = data.draw(st.integers(0, len(text) - 1))
    text[place : place + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=6))
    answer = ask(server, bytes(text))
    assert not answer or answer.split()[1][:1] in (b"2", b"4"), answer
    assert ask(server, good(*FIELDS, *ACCESS.metadata())) == b"HTTP/1.1 206 Partial Content"


@pytest.mark.parametrize(
    ("fields", "path", "status"),
    [
        (FIELDS, "/heal/3/7/body", b"401"),
        ((*FIELDS, ("Authorization", "Bearer wrong")), "/heal/3/7/body", b"401"),
        ((FIELDS[0],), "/heal/3/7/nothing", b"401"),  # without a token nothing is told, not even what there is
        ((*FIELDS[:2], ("Lacks", "3-11"), *ACCESS.metadata()), "/heal/3/7/body", b"416"),
        ((*FIELDS, *ACCESS.metadata()), "/heal/3/6/body", b"410"),
        ((*FIELDS, *ACCESS.metadata()), "/heal/3/8/body", b"404"),
    ],
)
def test_what_the_server_refuses(server: HttpTransport, fields: tuple[tuple[str, str], ...], path: str, status: bytes):
    assert ask(server, good(*fields, path=path)).split()[1] == status
