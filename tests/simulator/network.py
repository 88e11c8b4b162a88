"""Simulates the network between processes: calls that may be lost, duplicated or reordered; ordered streams that may break; cuts.

It behaves as gRPC over TCP does. A call has one answer or none: a lost request and a lost answer look alike to the caller, and a
retry reaches the server twice. TCP sends a lost packet again, so a message is lost only with its connection, which the caller notices
within seconds; in a cut the caller notices nothing before the call's own deadline. A stream delivers in order or breaks; a dead process
closes its streams, a dead host is only silent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulator.world import Process, World

NOTICED_S = (0.05, 3.0)  # a call's connection is gone: a reset, or no acknowledgement
AGAIN_S = 1.0  # until a request is sent a second time
Answer = Callable[[Any], None]  # None stands for "no answer": refused, broken, or timed out


@dataclass(frozen=True)
class Quality:
    """Quality of every link between two hosts. Within a host nothing is lost or delayed."""

    loss: float = 0.0  # a request, or an answer, never arrives
    duplicate: float = 0.0  # a request is handled twice
    late: float = 0.0  # a message takes up to a second, and others overtake it
    broken: float = 0.0  # a message on a stream finds the stream broken
    delay_s: tuple[float, float] = (0.0005, 0.005)


@dataclass(frozen=True, eq=False)
class Cut:
    """A cut: no message passes from the sites `inside` to those `outside` (None: to all others), nor back unless it is one way."""

    inside: frozenset[str]
    outside: frozenset[str] | None = None
    one_way: bool = False

    def stops(self, source: str, target: str) -> bool:
        return self._passes(source, target) or (not self.one_way and self._passes(target, source))

    def parts(self, sites: frozenset[str]) -> bool:
        """Returns whether the cut stops anything between any two of these sites."""
        outside = sites - self.inside
        return not sites.isdisjoint(self.inside) and bool(outside if self.outside is None else outside & self.outside)

    def _passes(self, source: str, target: str) -> bool:
        return source in self.inside and target not in self.inside and (self.outside is None or target in self.outside)


class Call:
    """A call as its server sees it: `answer` once, now or later; `at_cancel` runs if the caller gives up before that."""

    __slots__ = ("at_cancel", "caller", "network", "open", "request", "server", "waiting")

    def __init__(self, network: Network, caller: Process, server: Process, request: Any, waiting: list[Answer]) -> None:
        self.network, self.caller, self.server = network, caller, server
        self.request = request
        self.waiting = waiting  # shared by the copies of a doubled call: the first answer empties it
        self.open = True
        self.at_cancel: Callable[[], None] | None = None

    def answer(self, reply: Any) -> None:
        if self.open:
            self.open = False
            self.network.calls.pop(self, None)
            self.network.carry_answer(self, reply)

    def cancel(self) -> None:
        if self.open:
            self.open = False
            if self.at_cancel is not None:
                self.at_cancel()


class End:
    """One end of a stream. Its owner sets `message` and `closed`; the latter is called when the other end goes."""

    __slots__ = ("closed", "held", "last_s", "message", "network", "open", "other", "process")

    def __init__(self, network: Network, process: Process) -> None:
        self.network, self.process = network, process
        self.other: End = self
        self.message: Callable[[Any], None] | None = None
        self.closed: Callable[[], None] | None = None
        self.open = True
        self.last_s = 0.0  # when the newest message towards this end arrives: no later one comes before it
        self.held: list[Any] = []  # sent towards this end during a cut

    def send(self, message: Any) -> None:
        if self.open:
            self.network.carry(self.other, message)

    def close(self) -> None:
        if self.open:
            self.open = False
            self.network.carry_close(self.other)


@dataclass(frozen=True)
class Service:
    """The handlers of an address."""

    process: Process
    call: Callable[[Call], None]
    stream: Callable[[Any, End], None]  # what the client said first, and the server's end


class Network:
    def __init__(self, world: World, quality: Quality) -> None:
        self.world = world
        self.quality = quality
        self.at_break: Callable[[], None] = lambda: None  # a connection breaks of itself
        self.cuts: list[Cut] = []
        # those without an answer; dicts, because the order of a set is not the seed's
        self.calls: dict[Call, None] = {}
        self._services: dict[str, Service] = {}
        self._streams: dict[End, None] = {}  # client ends
        self._dice = world.dice("network")

    def listen(self, address: str, service: Service) -> None:
        """Registers a service at an address, in the place of the former one."""
        self._services[address] = service

    # -- calls ------------------------------------------------------------------------------------------------------

    def call(self, caller: Process, address: str, request: Any, answer: Answer, *, timeout_s: float) -> None:
        """`answer` gets the reply, or None when there is none: exactly once, if the caller lives."""
        waiting = [answer]
        service = self._services.get(address)
        if service is None or not service.process.alive:
            hidden = service is not None and self.is_cut(caller, service.process)
            self.world.after(timeout_s if hidden else self.delay_s(caller, caller), caller, _finish, waiting, None)
            return
        server = service.process
        near = caller.host == server.host
        twice = not near and self._happens("doubled", self.quality.duplicate)
        copies = [Call(self, caller, server, request, waiting) for _ in range(1 + twice)]
        for call in copies:
            if not self._is_lost(caller, server):
                self.calls[call] = None
                again_s = 0.0 if call is copies[0] else self._dice.between(0.0, AGAIN_S)
                self.world.after(again_s + self.delay_s(caller, server), server, service.call, call)
            elif not twice and not self.is_cut(caller, server):
                self.world.after(self._dice.between(*NOTICED_S), caller, self._expire, copies)
        self.world.after(timeout_s, caller, self._expire, copies)

    def carry_answer(self, call: Call, reply: Any) -> None:
        if not call.waiting:
            return
        if not self._is_lost(call.server, call.caller):
            self.world.after(self.delay_s(call.server, call.caller), call.caller, _finish, call.waiting, reply)
        elif not self.is_cut(call.server, call.caller):
            self.world.after(self._dice.between(*NOTICED_S), call.caller, _finish, call.waiting, None)

    def _expire(self, copies: list[Call]) -> None:
        for call in copies:
            self._cancel(call)
        _finish(copies[0].waiting, None)

    def _cancel(self, call: Call) -> None:
        """Notifies the server that the caller waits no more, unless it is cut off."""
        if self.calls.pop(call, call) is None and not self.is_cut(call.caller, call.server):
            self.world.after(self.delay_s(call.caller, call.server), call.server, call.cancel)

    # -- streams ----------------------------------------------------------------------------------------------------

    def open(self, client: Process, address: str, hello: Any) -> End | None:
        """The client's end; the server gets its own with `hello` a little later. None: no server listens there, or it is cut off."""
        service = self._services.get(address)
        if service is None or not service.process.alive or self.is_cut(client, service.process):
            return None
        ours, theirs = End(self, client), End(self, service.process)
        ours.other, theirs.other = theirs, ours
        self._streams[ours] = None
        self._in_order(theirs, service.stream, hello, theirs)
        return ours

    def carry(self, to: End, message: Any) -> None:
        if self.is_cut(to.other.process, to.process):
            to.held.append(message)
        elif to.process.site != to.other.process.site and self._happens("stream broken", self.quality.broken):
            self.at_break()
            self.snap(to)
        else:
            self._in_order(to, self._arrive, to, message)

    def snap(self, end: End) -> None:
        """Breaks the connection; both ends are notified."""
        self._in_order(end, self._close, end)
        self._in_order(end.other, self._close, end.other)

    def carry_close(self, to: End) -> None:
        if not self.is_cut(to.other.process, to.process):
            self._in_order(to, self._close, to)

    def _in_order(self, to: End, do: Callable[..., None], *args: Any) -> None:
        to.last_s = max(self.world.now_s + self.delay_s(to.other.process, to.process), to.last_s)
        self.world.after(to.last_s - self.world.now_s, to.process, do, *args)

    def _arrive(self, end: End, message: Any) -> None:
        if end.open and end.message is not None:
            end.message(message)

    def _close(self, end: End) -> None:
        if end.open:
            end.open = False
            if end.closed is not None:
                end.closed()
        if not end.other.open:
            self._streams.pop(end, None)
            self._streams.pop(end.other, None)

    # -- death and cuts ---------------------------------------------------------------------------------------------

    def forget(self, process: Process) -> None:
        """Closes the sockets of a dead process, as its kernel does."""
        for call in [call for call in self.calls if process in (call.caller, call.server)]:
            self._cancel(call) if process is call.caller else self._break(call)
        for end in [end for client in self._streams for end in (client, client.other) if end.process is process]:
            end.close()

    def _break(self, call: Call) -> None:
        del self.calls[call]
        if not self.is_cut(call.server, call.caller):
            self.world.after(self.delay_s(call.server, call.caller), call.caller, _finish, call.waiting, None)

    def is_cut(self, source: Process, target: Process) -> bool:
        if source.site == target.site:
            return False
        if source.dark or target.dark:
            return True
        return bool(self.cuts) and any(cut.stops(source.site, target.site) for cut in self.cuts)

    def is_parted(self, one: str, other: str) -> bool:
        """Returns whether no connection comes about between two sites: each needs an answer, so one direction is enough."""
        return one != other and any(cut.stops(one, other) or cut.stops(other, one) for cut in self.cuts)

    def parts(self, sites: frozenset[str]) -> bool:
        """Returns whether a cut runs between any two of these sites."""
        return any(cut.parts(sites) for cut in self.cuts) if self.cuts else False

    def cut(self, cut: Cut) -> None:
        self.cuts.append(cut)

    def mend(self, cut: Cut) -> None:
        """Removes a cut: messages held by streams arrive late, in order, and ends whose other end closed meanwhile close."""
        self.cuts.remove(cut)
        for end in [end for client in self._streams for end in (client, client.other)]:
            if end.open and not self.is_cut(end.other.process, end.process):
                held, end.held = end.held, []
                for message in held:
                    self._in_order(end, self._arrive, end, message)
                if not end.other.open:
                    self._in_order(end, self._close, end)

    # -- chance -----------------------------------------------------------------------------------------------------

    def delay_s(self, source: Process, target: Process) -> float:
        low, high = self.quality.delay_s
        if source.host == target.host:  # the threads of two processes: an answer and a notice may overtake each other
            return self._dice.between(0.0, low)
        if self.quality.late and self._happens("late", self.quality.late):
            return self._dice.between(high, 1.0)
        return self._dice.between(low, high)

    def _is_lost(self, source: Process, target: Process) -> bool:
        if self.is_cut(source, target):
            return True
        return source.host != target.host and self._happens("lost", self.quality.loss)

    def _happens(self, what: str, probability: float) -> bool:
        if not self._dice.chance(probability):
            return False
        self.world.seen[f"message {what}"] += 1
        return True


def _finish(waiting: list[Answer], reply: Any) -> None:
    if waiting:
        waiting.pop()(reply)
