"""A wire that does what wires do: between a joiner and a source, it may flip a byte, end, stall or slow down, at a byte that is counted."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from ft.rpc.access import Endpoint

# (bytes before these, these) -> what goes on; where it is shorter, the connection ends
Spoil = Callable[[int, bytes], bytes]


class Proxy:
    """Hands everything on; what comes from the source passes `spoil`, `asked` sees what the joiner says before the source does. Counts
    over all its connections."""

    def __init__(self, to: str, spoil: Spoil, asked: Callable[[bytes], object] = lambda data: None) -> None:
        self._to = Endpoint.parse(to, "source")
        self._spoil, self._asked = spoil, asked
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.passed = 0
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, name="proxy", daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=10)
        for sock in self._sockets:
            sock.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                joiner, _ = self._listener.accept()
                source = socket.create_connection((self._to.host, self._to.port))
                self._sockets += [joiner, source]
                for copy, one, other in ((self._plain, joiner, source), (self._spoiled, source, joiner)):
                    thread = threading.Thread(target=copy, args=(one, other), name="proxy", daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _plain(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self._asked(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def _spoiled(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                changed = self._spoil(self.passed, data)
                self.passed += len(data)
                other.sendall(changed)
                if len(changed) < len(data):
                    break
        for sock in (one, other):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def as_it_is(before: int, data: bytes) -> bytes:
    return data


def flip(*places: int) -> Spoil:
    """Flips one bit of each byte at these offsets."""

    def spoil(before: int, data: bytes) -> bytes:
        changed = bytearray(data)
        for place in places:
            if before <= place < before + len(data):
                changed[place - before] ^= 16
        return bytes(changed)

    return spoil


def cut(after: int) -> Spoil:
    """Ends a connection after `after` bytes, and every later one with its first bytes."""
    return lambda before, data: data[: max(0, after - before)]


def hold(after: int, gate: threading.Event, reached: threading.Event | None = None) -> Spoil:
    """Stalls after `after` bytes until the gate opens; the end of the test opens it, too."""

    def spoil(before: int, data: bytes) -> bytes:
        if before + len(data) > after:
            if reached:
                reached.set()
            gate.wait(60)
        return data

    return spoil
