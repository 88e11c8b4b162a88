"""The sockets of a group, found among all descriptors of this process (Linux).

A gloo group cannot be woken: its abort does nothing, and dropping it waits for what is pending. But when its sockets are shut, all that
waits on them ends within milliseconds, here and at the peers. torch does not tell which they are. A gloo device listens on one port of its
own, and each connection has such a port at one end; members tell each other these ports before they connect (forming.py). So a socket
belongs to a group if its local end is our port or its remote end is a port of a peer: true also for connections that are made late, and
never for a socket that another thread opens at the same moment.
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
Address = tuple[str, int]  # as the kernel names it

MAKES = 20  # of a device, at most, until no other thread begins to listen meanwhile
DESCRIPTORS = Path("/proc/self/fd")
_one_at_a_time = threading.Lock()


def shut(*, local: Collection[Address] = (), remote: Collection[Address] = ()) -> int:
    """Ends all traffic of the sockets whose local end is in `local` or whose remote end is in `remote`; how many there were. Nothing is
    closed: the owner does that, else the number might be another socket's by then. Where no descriptors are left some are missing."""
    count = 0
    with suppress(OSError):
        for sock in _sockets():
            if _belongs(sock, local, remote):
                end([sock], socket.SHUT_RDWR)
                count += 1
    return count


def duplicates(*, local: Collection[Address] = (), remote: Collection[Address] = ()) -> list[socket.socket]:
    """Returns those sockets, under descriptors of the caller's own: when another closes one, the remote end hears of it only once the
    caller does. Raises OSError where no descriptors are left; it then has none."""
    found: list[socket.socket] = []
    try:
        found.extend(sock.dup() for sock in _sockets() if _belongs(sock, local, remote))
    except OSError:
        for sock in found:
            sock.close()
        raise
    return found


def end(socks: Collection[socket.socket], how: int) -> None:
    """SHUT_RD: this end hears no more, and the remote end does not notice. SHUT_RDWR: both see the end, the remote one after all data."""
    for sock in socks:
        with suppress(OSError):  # its peer is gone
            sock.shutdown(how)


def listening_ends(make: Callable[[], Made]) -> tuple[Made, set[Address]]:
    """Calls `make`, which is quick; returns what it made, and where its new socket listens: at most one place. Where another thread of this
    process began to listen in the same moment, one cannot tell whose is whose, and it is made again: a server that was taken for a part of
    a group would lose its connections with it. Raises OSError when it never was alone."""
    with _one_at_a_time:
        for _ in range(MAKES):
            before = {os.fstat(sock.fileno()).st_ino for sock in _sockets()}
            made = make()
            listening = (sock for sock in _sockets() if _listens(sock) and os.fstat(sock.fileno()).st_ino not in before)
            new = {_plain(sock.getsockname()) for sock in listening}
            if len(new) < 2:
                return made, new
            del made
    raise OSError(
        f"other threads of this process began to listen in each of {MAKES} moments in which a gloo device was made"
    )


def local_address_for(host: str) -> str:
    """The address of this machine, a number, that it speaks to `host` with. Raises gaierror where there is no such host, else OSError."""
    for family, kind, _, _, place in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(place)  # of a datagram socket: it looks up the route and sends nothing
            return str(probe.getsockname()[0])
    raise OSError(f"no interface of this machine leads to {host}")


def exactly(sock: socket.socket, count: int) -> bytes:
    """The next `count` bytes. Raises ConnectionError where the other end hangs up before."""
    got = bytearray()
    while len(got) < count:
        part = sock.recv(count - len(got))
        if not part:
            raise ConnectionError("it has hung up")
        got += part
    return bytes(got)


def _sockets() -> Iterator[socket.socket]:
    """Each TCP socket of this process, under a descriptor that lives until the next one is asked for. Raises OSError where none is left."""
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
        except OSError:  # something else has its number by now
            os.close(copy)
            continue
        with found as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock


def _belongs(sock: socket.socket, local: Collection[Address], remote: Collection[Address]) -> bool:
    """A socket that listens does not: gloo's thread dies of an accept that fails, and the process with it."""
    ours = _plain(sock.getsockname()) in local
    with suppress(OSError):  # it has no remote end
        ours = ours or _plain(sock.getpeername()) in remote
    return ours and not _listens(sock)


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _plain(name: tuple[str, int]) -> Address:
    return name[0].removeprefix("::ffff:"), name[1]
