"""A group's first contact, before it joins: the presence of a lighthouse, its wire, and a refused token."""

from __future__ import annotations

import logging
import socket
import threading

import pytest

from ft import LighthouseServer
from ft.rpc import clients
from ft.rpc.access import Access
from ft.rpc.clients import is_torchft_lighthouse

TOKEN, OTHER = "a" * 32, "b" * 32


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    ("token", "said"), [(OTHER, "has a different token"), ("", "requires a token, and it is not set")]
)
def test_a_token_that_is_not_taken(token: str, said: str):
    server = LighthouseServer("127.0.0.1:0", 1, token=TOKEN)
    try:
        assert not is_torchft_lighthouse(server.address(), Access(TOKEN))
        with pytest.raises(ValueError, match=f"PHAROS_TOKEN: the lighthouse at {server.address()} {said}"):
            is_torchft_lighthouse(server.address(), Access(token))
    finally:
        server.shutdown()


def test_no_lighthouse_is_said_at_once_and_waited_for(caplog: pytest.LogCaptureFixture):
    port, servers, said = free_port(), list[LighthouseServer](), threading.Event()

    class StartsIt(logging.Handler):
        """The lighthouse comes when its absence has been said."""

        def emit(self, record: logging.LogRecord) -> None:
            assert f"no lighthouse answers at TORCHFT_LIGHTHOUSE = http://127.0.0.1:{port}" in record.getMessage()
            assert not said.is_set(), "once"
            said.set()
            servers.append(LighthouseServer(f"127.0.0.1:{port}", 1))

    handler = StartsIt()
    clients.log.addHandler(handler)
    try:
        assert not is_torchft_lighthouse(f"http://127.0.0.1:{port}", Access())
        assert said.is_set()
    finally:
        clients.log.removeHandler(handler)
        for server in servers:
            server.shutdown()


def test_no_lighthouse_for_too_long():
    with pytest.raises(ConnectionError, match=r"no lighthouse answers at .* within 0 s: "):
        is_torchft_lighthouse(f"http://127.0.0.1:{free_port()}", Access(), patience_s=0.0)
