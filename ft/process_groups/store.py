"""The store for the rendezvous of a process group: torch's TCPStore, with a client whose waits any thread can interrupt, and
without look-ups of names.

torch's server and client can fail whole generations. Both look up the name of each address that connects (for their log; with a PTR query
even for loopback, as the address is an IPv6-mapped IPv4 one). The server does so in its only thread: if one DNS packet is lost, all members
wait for the resolver's timeout of 5 s. And a client that waits for a silent server cannot be cancelled. So `serve` starts torch's server
without these look-ups, and StoreClient implements its protocol over a socket of its own.

The protocol (torch/csrc/distributed/c10d/TCPStoreBackend.hpp; undocumented, and equal in all supported versions of torch): one byte is the
command, integers have 8 bytes in the host's order, strings follow their length, and each key begins with "/".
"""

# mypy: disable-error-code="override"
# torch's stubs have several signatures for `wait` and `set`; one function takes them all.

from __future__ import annotations

import ctypes
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store, TCPStore

from ft.process_groups.sockets import recv_exactly

T = TypeVar("T")
_VALIDATE, _SET, _COMPARE_SET, _GET, _ADD, _CHECK, _WAIT, _, _DELETE = range(9)
_MULTI_GET, _CANCEL_WAIT, _PING = 10, 12, 13
_MAGIC = 0x3C85F7CE  # sent by torch's clients
_YES = 0  # reply to _CHECK and _WAIT
_MAX_BYTES = 1 << 26  # size limit of a value
_INTEGER = struct.Struct("=q")


def parse(address: str) -> tuple[str, int, str]:
    """Splits "host:port/prefix" into host, port and prefix; an IPv6 host is in brackets. Raises ValueError."""
    found = re.fullmatch(r"(?:\[([\w:.%]+)\]|([^\s:\[\]/]+)):(\d{1,5})(?:/(.*))?", address)
    if not found or not 0 < int(found[3]) < 65536:
        raise ValueError(f"store address {address!r}: must be host:port/prefix, such as 10.0.0.1:29500/job/7/0")
    return found[1] or found[2], int(found[3]), found[4] or ""


def serve(host: str = "127.0.0.1", timeout_s: float = 60.0) -> TCPStore:
    """Starts torch's store on a free port of that address only, as it has no token. torch then makes no look-ups in this process."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host.partition("%")[0], 0), family=family, backlog=1024) as listening:
        port = listening.getsockname()[1]
        more: dict[str, Any] = {"wait_for_workers": False, "master_listen_fd": listening.detach()}
        with without_dns():
            return TCPStore(host, port, None, True, timedelta(seconds=timeout_s), **more)


def sweep(store: TCPStore, quorum_id: int) -> None:
    """Deletes the keys ".../quorum_id/number/..." of generations before this one; 24 members leave 10 KB per
    generation. Only the store's owner calls it: so the store does not end during the call."""
    for key in store.list_keys():
        found = re.match(r"[^/]+/(\d+)/\d+/", key)
        if found and int(found[1]) < quorum_id:
            store.delete_key(key)


class StoreClient(Store):
    """One member's connection, like torch's PrefixStore over a TCPStore, but `hang_up`, from any thread, interrupts every wait. Raises
    OSError if the server cannot be reached within limit_s, closes the connection, or is no TCPStore of torch."""

    def __init__(self, address: str, limit_s: float) -> None:
        super().__init__()
        self.host, self._port, prefix = parse(address)
        self._where = f"the store at {self.host}:{self._port}"
        self._prefix = f"/{prefix}/" if prefix else "/"
        self._limit_s = limit_s
        self._asking = threading.Lock()
        self._closing = threading.Lock()
        self._socket: socket.socket | None = None
        self._gone = False

    def connect(self) -> None:
        """Connects to the server. To be called once, before all other methods."""
        until_s, error = time.monotonic() + self._limit_s, OSError(f"{self._where}: not reached in time")
        for family, kind, protocol, _, place in socket.getaddrinfo(self.host, self._port, type=socket.SOCK_STREAM):
            sock = socket.socket(family, kind, protocol)
            sock.settimeout(max(0.05, until_s - time.monotonic()))
            with self._closing:
                self._socket = sock
            try:
                self._greet(sock, place)
                return
            except OSError as problem:
                error = problem
                sock.close()
            if self._gone:
                break
        raise error

    def hang_up(self) -> None:
        """Interrupts blocked callers; the client cannot be used afterwards."""
        with self._closing:
            self._gone = True
            if self._socket is not None:
                with suppress(OSError):  # not connected, or closed
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        with self._closing:
            if self._socket is not None:
                self._socket.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda: None, _SET, self._key(key), _bytes(value))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask(self._string, _COMPARE_SET, self._key(key), _bytes(expected_value), _bytes(desired_value))

    def get(self, key: str) -> bytes:
        """Waits for the key, and returns its value. Raises TimeoutError."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits for all keys, and returns their values. Raises TimeoutError."""
        self.wait(keys)
        return self._ask(lambda: [self._string() for _ in keys], _MULTI_GET, len(keys), *map(self._key, keys))

    def add(self, key: str, value: int) -> int:
        return self._ask(self._integer, _ADD, self._key(key), value)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns True if all keys exist."""
        return self._ask(self._yes, _CHECK, len(keys), *map(self._key, keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits for all keys. Raises TimeoutError."""
        limit_s = timeout.total_seconds() if timeout else self._limit_s

        def wait() -> None:
            try:
                self._exactly(1, limit_s)
            except TimeoutError:
                self._send(_CANCEL_WAIT)
                if not self._yes():
                    raise TimeoutError(f"{self._where}: no {', '.join(keys)} within {limit_s:g} s") from None
                self._exactly(1)  # the keys came before the cancellation, which the server answers all the same

        self._ask(wait, _WAIT, len(keys), *map(self._key, keys))

    def delete_key(self, key: str) -> bool:
        return self._ask(self._integer, _DELETE, self._key(key)) > 0

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit_s = timeout.total_seconds()

    def _greet(self, sock: socket.socket, place: Any) -> None:
        nonce = struct.pack("=I", os.getpid())
        with self._problems():
            if not self._gone:
                sock.connect(place)
            if self._gone:  # from here on hang_up interrupts this thread
                raise OSError("cancelled")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(bytes([_VALIDATE]) + struct.pack("=I", _MAGIC) + bytes([_PING]) + nonce)
        if self._exactly(len(nonce)) != nonce:
            raise OSError(f"{self._where} is not torch's TCPStore")

    def _key(self, key: str) -> bytes:
        return (self._prefix + key).encode()

    def _send(self, what: int, *parts: int | bytes) -> None:
        """Sends a command in one packet."""
        assert self._socket is not None, "connect() first"
        message = bytearray([what])
        for part in parts:
            message += _INTEGER.pack(part if isinstance(part, int) else len(part))
            message += b"" if isinstance(part, int) else part
        with self._problems():
            self._socket.settimeout(self._limit_s)
            self._socket.sendall(message)

    def _ask(self, answer: Callable[[], T], what: int, *parts: int | bytes) -> T:
        with self._asking:
            self._send(what, *parts)
            return answer()

    def _string(self) -> bytes:
        count = self._integer()
        if not 0 <= count <= _MAX_BYTES:
            raise OSError(f"{self._where}: a value of {count} bytes")
        return self._exactly(count)

    def _integer(self) -> int:
        return int(_INTEGER.unpack(self._exactly(_INTEGER.size))[0])

    def _yes(self) -> bool:
        return self._exactly(1)[0] == _YES

    def _exactly(self, count: int, limit_s: float | None = None) -> bytes:
        assert self._socket is not None
        with self._problems():
            self._socket.settimeout(limit_s or self._limit_s)
            return recv_exactly(self._socket, count)

    @contextmanager
    def _problems(self) -> Iterator[None]:
        """Adds the store's address to an OSError."""
        try:
            yield
        except OSError as error:
            kind = TimeoutError if isinstance(error, TimeoutError) else OSError
            raise kind(f"{self._where}: {error}") from None


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


class _Resolver(ctypes.Structure):
    """The first fields of glibc's struct __res_state, of which each thread has one (resolver(3))."""

    _fields_ = (("retrans", ctypes.c_int), ("retry", ctypes.c_int))


@contextmanager
def without_dns() -> Iterator[None]:
    """Makes every DNS query of this thread fail at once with "try again". After such a failure torch makes no further look-ups in this
    process; it logs that once. Without glibc nothing is changed, and look-ups may be slow."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "__res_state") or not hasattr(libc, "__res_init"):
        yield
        return
    libc.__res_state.restype = ctypes.POINTER(_Resolver)
    libc.__res_init()
    state = libc.__res_state().contents
    tries, state.retry = state.retry, 0
    try:
        yield
    finally:
        state.retry = tries
