"""Reachability of the other members: a port of this rank's own that answers, and connection attempts to theirs.

A wait for other groups does not say why it lasts: a slow peer, a lost one and a broken link appear alike, and gloo names none. So a rank
that waits for longer than a moment tries to connect to each member by itself. A kernel answers for its processes, whatever they do: slow,
stopped and stuck ones are reachable, and a port without a listener is refused, which is an answer, too. Only silence is a broken link.
"""

from __future__ import annotations

import errno
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

from ft.process_groups.store import parse
from ft.rpc.access import Endpoint

PAUSE_S = 0.5  # at most, until it asks again whether there is a wait to be explained, and closes what has connected
TRIES = 6  # without an answer: a peer whose link loses every fifth packet fails them all once in a million probes
MOST = 64  # members that are probed at once: each takes a few descriptors for a moment
KEPT = 256  # unreachable ids that are remembered beyond their generation
_ANSWERS = {0, errno.ECONNREFUSED, errno.ECONNRESET}  # of a kernel at the other end
_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}  # they say nothing about a link
_RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing leaves nothing behind at either end

SocketAddress = tuple[int, Any]  # address family, address


class Prober:
    """`host`: of this machine, as the others reach it; they probe `handle`. `within_s`: a member without an answer for so long is
    unreachable. Raises OSError where it cannot listen. It works in one thread, from `start` to `close`."""

    wait_s = 1.0  # a wait for other groups of so long is explained
    again_s = 2.0  # between two probes for the same wait, or of unreachable members

    def __init__(self, host: str, within_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._within_s, self._clock = within_s, clock
        self._lock = threading.Condition()
        self._places: dict[str, SocketAddress] = {}
        self._members: frozenset[str] = frozenset()  # of the newest generation
        self._unreachable: dict[str, None] = {}  # in the order in which they became so
        self._wanted = self._done = 0  # counts probes that were asked for, and those that came to an end
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # So many, for what comes while this process is stopped must be answered, too.
        self._listener = socket.create_server((host, 0), family=family, backlog=4096)
        self._listener.setblocking(False)
        self.handle = str(Endpoint(host, self._listener.getsockname()[1]))
        self._thread = threading.Thread(target=self._run, name="ft-probe", daemon=True)

    def start(self, waits_since: Callable[[], float | None], report: Callable[[tuple[str, ...]], None]) -> None:
        """`waits_since`: time.monotonic() at which the wait for other groups began that goes on now, None where there is none. `report` is
        called with the members that were found unreachable during one. Both in the prober's thread."""
        self._waits_since, self._report = waits_since, report
        self._thread.start()

    def watch(self, members: Mapping[str, str]) -> None:
        """The others of the newest generation, each with its handle; one without is not probed. An unreachable one is still probed."""
        places = {replica_id: place for replica_id, handle in members.items() if (place := _place(handle))}
        with self._lock:
            self._members = frozenset(members)
            old = {i: self._places[i] for i in list(self._unreachable)[-KEPT:] if i in self._places}
            self._unreachable = dict.fromkeys(old)
            self._places = {**old, **places}

    @property
    def unreachable(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._unreachable)

    def probe(self, enough: Callable[[], bool] = lambda: False) -> tuple[str, ...]:
        """Probes all members, and returns the unreachable: at once where all answer, and after within_s or a little more where
        one does not. `enough` is asked meanwhile: the answer is no longer needed."""
        with self._lock:
            self._wanted += 1
            mine = self._wanted
            self._lock.notify_all()
            until_s = time.monotonic() + 3 * self._within_s
            while self._done < mine and not self._closed and not enough() and time.monotonic() < until_s:
                self._lock.wait(0.1)
        return self.unreachable

    def close(self) -> None:
        """Its port is closed; no member is tried any more."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        if self._thread.ident is None:
            self._listener.close()

    def _run(self) -> None:
        last_s = float("-inf")
        while not self._closed:
            self._accept()
            now_s, since_s = self._clock(), self._waits_since()
            waits = since_s is not None and now_s - since_s >= self.wait_s
            with self._lock:
                wanted = self._wanted
                due = wanted > self._done or ((waits or self._unreachable) and now_s - last_s >= self.again_s)
                if not due and not self._closed:
                    self._lock.wait(min(PAUSE_S, self.wait_s / 2))
            if due:
                self._probe_members(all_members=waits or wanted > self._done)
                last_s = self._clock()
                with self._lock:
                    self._done = wanted
                    self._lock.notify_all()
        self._listener.close()

    def _probe_members(self, *, all_members: bool) -> None:
        """Probes members (all, or those that are unreachable); their reachability is known when this returns."""
        with self._lock:
            places = [(i, self._places[i]) for i in (self._places if all_members else self._unreachable)]
        silent: dict[str, SocketAddress] = {}
        for first in range(0, len(places), MOST):
            silent |= self._silent(dict(places[first : first + MOST]))
        with self._lock:
            self._unreachable.update(dict.fromkeys(silent))
            self._places = {**silent, **self._places}  # meanwhile the next generation may have begun, without them
            now = tuple(replica_id for replica_id in silent if replica_id in self._members)
        if now and self._waits_since() is not None:
            self._report(now)

    def _silent(self, left: dict[str, SocketAddress]) -> dict[str, SocketAddress]:
        """Tries to connect to each member several times, as packets that are lost on the way are sent again after a second at first, and
        ever later. Returns those that answered none; not before the last try's time is over, however long this process was stopped."""
        with selectors.PollSelector() as selector, ExitStack() as tries:  # one of poll needs no descriptor of its own
            for _ in range(TRIES):
                until_s = self._clock() + self._within_s / TRIES
                for replica_id, (family, address) in list(left.items()):
                    try:
                        sock = socket.socket(family, socket.SOCK_STREAM)
                    except OSError:
                        del left[replica_id]  # no descriptor is left, which says nothing about the link
                        continue
                    tries.callback(_close, sock)
                    sock.setblocking(False)
                    error = sock.connect_ex(address)
                    if error == errno.EINPROGRESS:
                        selector.register(sock, selectors.EVENT_WRITE, replica_id)
                    else:
                        self._note(left, replica_id, error)
                while left and not self._closed:
                    ready = selector.select(max(0.0, until_s - self._clock()))
                    for key, _ in ready:
                        assert isinstance(key.fileobj, socket.socket)
                        selector.unregister(key.fileobj)
                        self._note(left, key.data, key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
                    if not ready:
                        break
        return {} if self._closed else left

    def _note(self, left: dict[str, SocketAddress], replica_id: str, error: int) -> None:
        """Takes the result of one try. A router's or this machine's error about the route counts as silence: the next try may find one."""
        if error in _ANSWERS:
            with self._lock:
                self._unreachable.pop(replica_id, None)
        if error in _ANSWERS or error in _OURS:
            left.pop(replica_id, None)

    def _accept(self) -> None:
        with suppress(OSError):  # that was all; or no descriptor is left, and the kernel has answered already
            while True:
                _close(self._listener.accept()[0])


def _close(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


def _place(handle: str) -> SocketAddress | None:
    """None if the handle is not an address. Host names are not resolved."""
    with suppress(ValueError, OSError):
        host, port, _ = parse(handle)
        [found, *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return int(found[0]), found[4]
    return None
