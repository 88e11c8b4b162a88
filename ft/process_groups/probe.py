"""Reachability of the other members of a process group: a rank listens on a port of its own, and tries to connect to theirs.

A wait for other replica groups may be due to a slow peer, a lost one or a broken link; gloo does not say which. So a rank that waits for
longer than a moment tries to connect to each member. The kernel answers, whatever the process does: slow, suspended and hanging processes
are reachable; a refusal is an answer, too. Only a broken link gives none.
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

PAUSE_S = 0.5  # longest time between two checks for a wait that needs probes, and for connections to close
TRIES = 6  # connection attempts without an answer: over a link that loses every fifth packet all fail once in a million probes
MOST = 64  # members that are probed at once, each of which takes a few descriptors for a moment
KEPT = 256  # unreachable replica IDs that are remembered after their generation
# seconds for which they are remembered: a host that vanished never answers; a link still cut after that costs one attempt to connect
KEPT_S = 600.0
_ANSWERS = {0, errno.ECONNREFUSED, errno.ECONNRESET}  # results that need a kernel at the other end
_LOCAL = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL}  # independent of the link
_RESET = struct.pack("ii", 1, 0)  # value of SO_LINGER with which closing leaves no state at either end

SocketAddress = tuple[int, Any]  # address family, address


class Prober:
    """Probes the other members, in one thread, from `start` to `close`. `host`: address at which others reach this host; they probe
    `handle`. `within_s`: a member that does not answer for that long is unreachable. Raises OSError if it cannot listen."""

    wait_s = 1.0  # waits for other groups of at least this length are probed
    again_s = 2.0  # between two probes in the same wait, or of unreachable members

    def __init__(self, host: str, within_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._within_s, self._clock = within_s, clock
        self._lock = threading.Condition()
        self._places: dict[str, SocketAddress] = {}
        self._members: frozenset[str] = frozenset()  # members of the newest generation
        self._unreachable: dict[str, float] = {}  # replica ID -> time at which it became unreachable, in this order
        self._wanted = self._done = 0  # numbers of probes that were requested, and that have ended
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # a long backlog, as the kernel must answer while this process is suspended, too
        self._listener = socket.create_server((host, 0), family=family, backlog=4096)
        self._listener.setblocking(False)
        self.handle = str(Endpoint(host, self._listener.getsockname()[1]))
        self._thread = threading.Thread(target=self._run, name="ft-probe", daemon=True)

    def start(self, waits_since: Callable[[], float | None], report: Callable[[tuple[str, ...]], None]) -> None:
        """Starts the thread, which calls both functions. `waits_since`: returns time.monotonic() at the start of the current wait for other
        groups, or None. `report` receives the members that are found unreachable during such a wait."""
        self._waits_since, self._report = waits_since, report
        self._thread.start()

    def watch(self, members: Mapping[str, str]) -> None:
        """Sets the other members of the newest generation: replica ID -> handle ("": not probed). Unreachable older members are still
        probed, after these, for KEPT_S."""
        places = {replica_id: place for replica_id, handle in members.items() if (place := _place(handle))}
        with self._lock:
            self._members = frozenset(members)
            old = {i: self._places[i] for i in list(self._unreachable)[-KEPT:] if i in self._places}
            self._unreachable = {i: self._unreachable[i] for i in old}
            self._places = {**old, **places}

    @property
    def unreachable(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._unreachable)

    def probe(self, enough: Callable[[], bool] = lambda: False) -> tuple[str, ...]:
        """Probes all members. Returns the unreachable ones when the probe has ended (3 * within_s at most), or when `enough()` is True."""
        with self._lock:
            self._wanted += 1
            mine = self._wanted
            self._lock.notify_all()
            until_s = time.monotonic() + 3 * self._within_s
            while self._done < mine and not self._closed and not enough() and time.monotonic() < until_s:
                self._lock.wait(0.1)
        return self.unreachable

    def close(self) -> None:
        """Closes the port, and ends the probes."""
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
            waiting = since_s is not None and now_s - since_s >= self.wait_s
            with self._lock:
                wanted = self._wanted
                due = wanted > self._done or ((waiting or self._unreachable) and now_s - last_s >= self.again_s)
                if not due and not self._closed:
                    self._lock.wait(min(PAUSE_S, self.wait_s / 2))
            if due:
                self._probe_members(all_members=waiting or wanted > self._done)
                last_s = self._clock()
                with self._lock:
                    self._done = wanted
                    self._lock.notify_all()
        self._listener.close()

    def _probe_members(self, *, all_members: bool) -> None:
        """Probes all members, or only unreachable ones, updates `unreachable`, and reports members that are unreachable now. Former members
        are probed last, and forgotten after KEPT_S."""
        with self._lock:
            for replica_id, since_s in list(self._unreachable.items()):
                if replica_id not in self._members and self._clock() - since_s > KEPT_S:
                    del self._unreachable[replica_id], self._places[replica_id]
            wanted = sorted(self._places if all_members else self._unreachable, key=lambda i: i not in self._members)
            places = [(i, self._places[i]) for i in wanted]
        for first in range(0, len(places), MOST):
            silent = self._silent(dict(places[first : first + MOST]))
            with self._lock:
                for replica_id, place in silent.items():
                    self._unreachable.setdefault(replica_id, self._clock())
                    # the next generation may have begun meanwhile, without it
                    self._places.setdefault(replica_id, place)
                now = tuple(replica_id for replica_id in silent if replica_id in self._members)
            if now and self._waits_since() is not None:
                self._report(now)

    def _silent(self, left: dict[str, SocketAddress]) -> dict[str, SocketAddress]:
        """Tries to connect to each member several times, as the kernel repeats a lost packet only after a second, and then ever later.
        Returns members that did not answer, after waiting for the last try even if this process was suspended meanwhile."""
        with selectors.PollSelector() as selector, ExitStack() as tries:  # a PollSelector needs no descriptor
            for _ in range(TRIES):
                until_s = self._clock() + self._within_s / TRIES
                for replica_id, (family, address) in list(left.items()):
                    try:
                        sock = socket.socket(family, socket.SOCK_STREAM)
                    except OSError:
                        del left[replica_id]  # no descriptors are left, which says nothing about the link
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
        """Handles the result of one try. A router's or this machine's error about the route is no answer: the next try may get one."""
        if error in _ANSWERS:
            with self._lock:
                self._unreachable.pop(replica_id, None)
        if error in _ANSWERS or error in _LOCAL:
            left.pop(replica_id, None)

    def _accept(self) -> None:
        with suppress(OSError):  # no connection is left; or no descriptor, but the kernel has answered already
            while True:
                _close(self._listener.accept()[0])


def _close(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


def _place(handle: str) -> SocketAddress | None:
    """Returns the address in a handle, or None if it has none. Host names are not resolved."""
    with suppress(ValueError, OSError):
        host, port, _ = parse(handle)
        [found, *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return int(found[0]), found[4]
    return None
