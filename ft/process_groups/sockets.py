"""The sockets of a gloo process group, found among all descriptors of this process (Linux).

A gloo group cannot be interrupted: its abort does nothing, and dropping it waits for pending operations. But when its sockets are shut
down, all waits on them end within milliseconds, here and on the peers. torch does not tell which sockets these are. A gloo device listens
on one port of its own, and each connection has such a port at one end; members exchange these ports before they connect (forming.py). So a
socket belongs to the group if its local port is ours or its remote port is a peer's. That holds for later connections, too, and never for a
different thread's socket.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")
Address = tuple[str, int]  # IP address and port

MAX_TRIES = 20  # to make a device while no other thread begins to listen
DESCRIPTORS = Path("/proc/self/fd")
# Seconds, seconds, a number: the first probe of an idle connection, the next ones, and how many may stay without an answer. A firewall
# forgets a connection that is idle for 240 s or more, and then drops its packets: at the next all-reduce all groups would wait in vain.
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 8}
_one_at_a_time = threading.Lock()


def shutdown_matching(*, local: Collection[Address] = (), remote: Collection[Address] = ()) -> int:
    """Shuts down the sockets whose local address is in `local` or whose remote address is in `remote`, and returns their number. Does not
    close them: only their owner may, as a descriptor can be reused. If no descriptors are left, some sockets are missed."""
    count = 0
    with suppress(OSError):
        for sock in _sockets():
            if _belongs(sock, local, remote):
                shutdown([sock], socket.SHUT_RDWR)
                count += 1
    return count


def keep_alive(*, local: Collection[Address] = (), remote: Collection[Address] = ()) -> None:
    """Makes the kernel probe these sockets while they are idle, as between the rounds of semi-synchronous training. If descriptors run out,
    some are missed."""
    with suppress(OSError):
        for sock in _sockets():
            if _belongs(sock, local, remote):
                for name, value in KEEPALIVE.items():
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def duplicates(*, local: Collection[Address] = (), remote: Collection[Address] = ()) -> list[socket.socket]:
    """Returns duplicates of the sockets that shutdown_matching would shut down; while they are open, a peer does not notice that the
    originals were closed. Raises OSError if descriptors run out."""
    found: list[socket.socket] = []
    try:
        found.extend(sock.dup() for sock in _sockets() if _belongs(sock, local, remote))
    except OSError:
        for sock in found:
            sock.close()
        raise
    return found


def shutdown(socks: Collection[socket.socket], how: int) -> None:
    """Shuts sockets down. SHUT_RD: this end receives no more, unnoticed by the peer. SHUT_RDWR: the peer sees it, after all data."""
    for sock in socks:
        with suppress(OSError):  # its peer is gone
            sock.shutdown(how)


def listening_ends(make: Callable[[], Made], descriptors: Path = DESCRIPTORS) -> tuple[Made, set[Address]]:
    """Calls `make`, which must be quick; returns its result and the address on which its new socket listens (at most one). If a different
    thread of this process began to listen meanwhile, the two cannot be told apart, and `make` is called again: else that server's
    connections would be shut down with the group's. Raises OSError if that happens each time. No address without /proc (macOS): there gloo
    runs in a child process only, which is killed, so that its sockets need not be found."""
    if not descriptors.is_dir():
        return make(), set()
    with _one_at_a_time:
        for _ in range(MAX_TRIES):
            before = {os.fstat(sock.fileno()).st_ino for sock in _sockets()}
            made = make()
            listening = (sock for sock in _sockets() if _listens(sock) and os.fstat(sock.fileno()).st_ino not in before)
            new = {_plain(sock.getsockname()) for sock in listening}
            if len(new) < 2:
                return made, new
            del made
    raise OSError(
        f"other threads of this process began to listen in each of {MAX_TRIES} moments in which a gloo device was made"
    )


def local_address_for(host: str) -> str:
    """Returns this machine's numeric source address of connections to `host`. Raises gaierror if there is no such host, else OSError."""
    for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(place)  # of a datagram socket: looks up the route, and sends nothing
            return str(probe.getsockname()[0])
    raise OSError(f"no interface of this machine leads to {host}")


def recv_exactly(sock: socket.socket, count: int) -> bytes:
    """Receives exactly `count` bytes. Raises ConnectionError if the peer closes the connection before."""
    got = bytearray()
    while len(got) < count:
        part = sock.recv(count - len(got))
        if not part:
            raise ConnectionError("the peer closed the connection")
        got += part
    return bytes(got)


def _sockets() -> Iterator[socket.socket]:
    """Yields each TCP socket of this process, under a descriptor that is closed before the next. Raises OSError if descriptors run out."""
    for path in list(DESCRIPTORS.iterdir()):
        try:
            if not stat.S_ISSOCK(path.stat().st_mode):
                continue
            copy = os.dup(int(path.name))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            continue  # closed since it was listed
        try:
            found = socket.socket(fileno=copy)
        except OSError:  # its descriptor is reused already
            os.close(copy)
            continue
        with found as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock


def _belongs(sock: socket.socket, local: Collection[Address], remote: Collection[Address]) -> bool:
    """Returns True for a socket of the group, except for its listening one: if an accept fails, gloo's thread ends the process."""
    ours = _plain(sock.getsockname()) in local
    with suppress(OSError):  # it has no remote end
        ours = ours or _plain(sock.getpeername()) in remote
    return ours and not _listens(sock)


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _plain(name: tuple[str, int]) -> Address:
    return name[0].removeprefix("::ffff:"), name[1]
