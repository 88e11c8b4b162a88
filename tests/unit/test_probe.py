"""Reachability by connection attempts on loopback. A silent peer is a port with a full queue: Linux drops packets to it, as a cut link
does."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from ft.process_groups.probe import MOST, TRIES, Prober
from tests.unit.test_process_groups import no_descriptors_left
from tests.waiting import in_time

WITHIN_S = 0.3
LIMIT_S = 60.0

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full queue answers")


@contextmanager
def prober(
    waits_since: Callable[[], float | None] = lambda: None,
    cut: Callable[[tuple[str, ...]], None] = lambda ids: None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Prober]:
    before = set(threading.enumerate())
    made = Prober("127.0.0.1", WITHIN_S, clock=clock)
    made.wait_s = made.again_s = 0.05
    made.start(waits_since, cut)
    [thread] = [thread for thread in set(threading.enumerate()) - before if thread.name == "ft-probe"]
    yield made
    made.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


class Silent:
    """A port that does not answer until `answer` is called."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.handle = "{}:{}".format(*self._listener.getsockname())
        self._first = [socket.create_connection(self._listener.getsockname(), LIMIT_S)]  # one more than the backlog

    def answer(self) -> None:
        self._listener.listen(64)
        self._listener.accept()[0].close()

    def close(self) -> None:
        for sock in (self._listener, *self._first):
            sock.close()


@pytest.fixture
def silent() -> Iterator[Silent]:
    made = Silent()
    yield made
    made.close()


tried: list[object] = []  # addresses that this process has tried to connect to
sys.addaudithook(lambda event, given: tried.append(given[1]) if event == "socket.connect" else None)


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        return "{}:{}".format(*gone.getsockname())


def test_who_answers_is_reachable_whatever_it_does():
    """Peers that serve their port, that accept nothing (as if stopped), and that have exited are all reachable."""
    stopped = Prober("127.0.0.1", WITHIN_S)
    with prober() as other, prober() as mine:
        mine.watch({"b:1": other.handle, "c:1": stopped.handle, "d:1": closed_port(), "e:1": "", "f:1": "not a place"})
        assert mine.probe() == ()
        for _ in range(200):
            assert mine.probe() == ()
    stopped.close()


def test_who_says_nothing_is_unreachable_until_it_answers(silent: Silent):
    with prober() as mine:
        mine.watch({"b:1": silent.handle, "c:1": closed_port()})
        assert mine.probe() == mine.unreachable == ("b:1",)
        mine.watch({"c:1": closed_port()})  # the next generation is without it
        assert mine.unreachable == ("b:1",)
        silent.answer()
        assert in_time(lambda: not mine.unreachable)


def test_who_waits_for_a_moment_looks_why(silent: Silent):
    found, cut = threading.Event(), []

    def tell(ids: tuple[str, ...]) -> None:
        cut.append(ids)
        found.set()

    since_s: list[float] = []
    with prober(lambda: since_s[0] if since_s else None, tell) as mine:
        mine.watch({"b:1": silent.handle, "c:1": mine.handle})
        mine.probe()
        assert not cut  # nobody waits
        since_s.append(time.monotonic())
        assert found.wait(LIMIT_S) and cut[0] == ("b:1",)
        since_s.clear()
        mine.watch({"c:1": mine.handle})
        mine.probe()
        found.clear()
        since_s.append(time.monotonic())  # for c, which answers
        mine.probe()
        assert not found.is_set() and mine.unreachable == ("b:1",)


def test_present_members_are_probed_first_and_former_ones_forgotten(silent: Silent):
    """Vanished hosts never answer, and there may be more of them than are probed at once."""
    gone, later, answers = Silent(), threading.Event(), closed_port()
    vanished = {f"gone:{number}": gone.handle for number in range(MOST)}
    with prober(clock=lambda: time.monotonic() + 1e6 * later.is_set()) as mine:
        mine.watch(vanished)
        mine.probe()
        assert in_time(lambda: len(mine.unreachable) == MOST)
        mine.watch({"b:1": answers, "c:1": silent.handle})
        tried.clear()
        mine.probe()
        places = [(host, int(port)) for host, port in (it.split(":") for it in (answers, silent.handle, gone.handle))]
        assert in_time(lambda: places[0] in tried[:-2])
        assert tried[tried.index(places[0]) :][:3] == places
        assert in_time(lambda: "c:1" in mine.unreachable)
        later.set()
        assert in_time(lambda: mine.unreachable == ("c:1",))
    gone.close()


def test_what_this_process_lacks_is_no_cut_link(silent: Silent):
    with prober() as mine:
        mine.probe()  # its thread has what it needs
        mine.watch({"b:1": silent.handle})
        with no_descriptors_left():
            assert mine.probe() == ()


def test_a_pause_of_this_process_is_no_silence_of_the_others(silent: Silent):
    """A process that resumes after its whole timeout, with one attempt made, still makes all TRIES attempts."""
    paused, place = threading.Event(), (silent.handle.partition(":")[0], int(silent.handle.partition(":")[2]))

    def clock() -> float:
        if place in tried:
            paused.set()
        return time.monotonic() + 100.0 * paused.is_set()

    tried.clear()
    with prober(clock=clock) as mine:
        mine.watch({"b:1": silent.handle})
        while not mine.unreachable:
            mine.probe()
        assert tried.count(place) >= TRIES


def test_who_looks_is_let_go_when_nobody_needs_to_know(silent: Silent):
    with prober() as mine:
        mine.watch({"b:1": silent.handle})
        assert mine.probe(enough=lambda: True) == ()


def test_an_address_of_the_sixth_version():
    if not socket.has_ipv6:
        pytest.skip("there is none here")
    try:
        there = Prober("::1", WITHIN_S)
    except OSError:
        pytest.skip("there is none here")
    with prober() as mine:
        assert there.handle.startswith("[::1]:")
        mine.watch({"b:1": there.handle})
        assert mine.probe() == ()
    there.close()


def test_who_is_silent_while_the_next_generation_begins_without_it_stays_looked_at(silent: Silent):
    tried.clear()
    with prober() as made:
        made.watch({"s:1": silent.handle})
        looking = threading.Thread(target=made.probe)
        looking.start()
        assert in_time(lambda: tried)
        made.watch({"b:1": closed_port()})
        looking.join(LIMIT_S)
        assert made.probe() == ("s:1",)
        silent.answer()
        while made.probe():
            pass
