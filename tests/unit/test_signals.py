"""Signals as requests; real signals to this process where they matter."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tests.unit.fakes import Clock
from training.log import Log
from training.signals import SAVE, STOP, Signals


class Watched:
    """Signals whose arrivals a test can wait for."""

    def __init__(self) -> None:
        self.clock, self.out = Clock(), io.StringIO()
        self.exits: list[int] = []
        self.arrived = threading.Semaphore(0)
        self.signals = Signals(log=Log(stream=self.out).info, clock=self.clock, exit_now=self.exits.append)
        original = self.signals.handle

        def received(number: int) -> None:
            original(number)
            self.arrived.release()

        self.signals.handle = received  # type: ignore[method-assign]

    def kill(self, number: int) -> None:
        os.kill(os.getpid(), number)
        assert self.arrived.acquire(timeout=20)


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.signals.close()


@pytest.mark.parametrize(("number", "wish"), [(signal.SIGTERM, STOP), (signal.SIGINT, STOP), (signal.SIGUSR1, SAVE)])
def test_a_signal_is_a_wish_that_is_taken_once(watched: Watched, number: int, wish: int) -> None:
    assert watched.signals.take() == 0
    watched.kill(number)
    assert watched.signals.take() == wish
    assert watched.signals.take() == 0
    assert watched.out.getvalue().startswith(f"[0] {signal.Signals(number).name}: saving after this step")


@pytest.mark.parametrize(("before", "is_taken"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_the_end_of_the_terminal_is_a_wish_to_stop_unless_nohup_ignores_it(
    before: signal.Handlers, is_taken: bool
) -> None:
    old = signal.signal(signal.SIGHUP, before)
    try:
        watched = Watched()
        assert (signal.getsignal(signal.SIGHUP) != before) == is_taken
        if is_taken:
            watched.kill(signal.SIGHUP)
            assert watched.signals.take() == STOP
        watched.signals.close()
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, old)


def test_a_run_that_saves_nothing_does_not_say_that_it_saves(watched: Watched) -> None:
    watched.signals.nothing_saved = "nothing is saved (checkpoint.enable = false)"
    watched.kill(signal.SIGUSR1)
    watched.kill(signal.SIGTERM)
    lines = [line.partition("] ")[2] for line in watched.out.getvalue().splitlines()]
    assert lines == [
        "SIGUSR1: nothing is saved (checkpoint.enable = false)",
        "SIGTERM: nothing is saved (checkpoint.enable = false), leaving after this step; another one ends the run at once",
    ]


def test_wishes_add_up(watched: Watched) -> None:
    watched.kill(signal.SIGUSR1)
    watched.kill(signal.SIGTERM)
    assert watched.signals.take(SAVE) == SAVE and watched.signals.take(SAVE) == 0
    assert watched.signals.take() == STOP


def test_a_second_stop_signal_ends_at_once_and_says_so(watched: Watched, capfd: pytest.CaptureFixture[str]) -> None:
    watched.kill(signal.SIGINT)
    watched.clock.now += 3
    watched.kill(signal.SIGTERM)
    assert watched.exits == [128 + signal.SIGTERM]
    assert capfd.readouterr().err == "SIGTERM again: ending at once, without saving\n"


AGAIN = """
import os, signal, threading
from training.signals import Signals
now, said = [0.0], threading.Event()
signals = Signals(log=lambda line: said.set(), clock=lambda: now[0])
os.kill(os.getpid(), signal.SIGINT)
assert said.wait(50)
now[0] = 3.0
os.kill(os.getpid(), signal.SIGINT)
threading.Event().wait(50)
"""


def test_a_second_stop_signal_ends_at_once_where_nobody_reads_what_it_says() -> None:
    """Standard error is a pipe without a reader, as in `run_train.sh CONFIG 2>&1 | tee log` after the first Ctrl-C."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([sys.executable, "-c", AGAIN], stderr=write, check=False)
    finally:
        os.close(write)
    assert done.returncode == 128 + signal.SIGINT


def test_a_machine_without_a_thread_for_the_line_reads_the_next_signal() -> None:
    class Lacks(Signals):
        def handle(self, number: int) -> None:
            numbers.append(number)
            arrived.release()
            raise RuntimeError("can't start new thread")

    numbers, arrived = list[int](), threading.Semaphore(0)
    signals = Lacks(log=print)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            assert arrived.acquire(timeout=20)
    finally:
        signals.close()
    assert numbers == [signal.SIGTERM, signal.SIGINT]


def test_the_same_wish_by_two_ways_is_one(watched: Watched) -> None:
    watched.kill(signal.SIGINT)
    watched.clock.now += 0.5
    watched.kill(signal.SIGTERM)
    assert watched.exits == [] and watched.signals.take() == STOP


def test_saving_may_be_asked_for_again_and_again(watched: Watched) -> None:
    for _ in range(3):
        watched.clock.now += 10
        watched.kill(signal.SIGUSR1)
        assert watched.signals.take() == SAVE
    assert watched.exits == []


def test_close_gives_the_signals_back() -> None:
    """Handlers are restored: a background process of a shell starts with SIGINT ignored."""
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(kind) for kind in kinds]
    watched = Watched()
    assert all(signal.getsignal(kind) is not was for kind, was in zip(kinds, before, strict=True))
    watched.signals.close()
    watched.signals.close()
    assert [signal.getsignal(kind) for kind in kinds] == before
    assert not [thread for thread in threading.enumerate() if thread.name == "signals"]


def test_a_second_stop_signal_ends_a_loop_that_is_stuck_in_c_code() -> None:
    program = """
import ctypes, os, signal, sys, threading
from training.log import Log
from training.signals import Signals
times = iter([0.0, 10.0])
signals = Signals(log=Log().info, clock=lambda: next(times))
libc = ctypes.CDLL(None)
def twice():
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
        stuck.wait(0.2)
stuck = threading.Event()
threading.Timer(0.2, twice).start()
libc.pthread_join  # the main thread waits below without ever running Python code
lock = (ctypes.c_char * 64)()
libc.pthread_mutex_lock(lock)
libc.pthread_mutex_lock(lock)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert done.stdout == "[0] SIGTERM: saving after this step, then leaving; another one ends the run at once\n"
    assert done.stderr == "SIGTERM again: ending at once, without saving\n"


def test_a_signal_to_a_forked_child_is_the_childs(watched: Watched) -> None:
    ready, say_ready = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)  # should SIGTERM do nothing
            os.write(say_ready, b"!")
            signal.pause()  # SIGTERM has its default action, as before `Signals`
        finally:
            os._exit(0)  # never back into pytest
    os.close(say_ready)
    assert os.read(ready, 1)
    os.close(ready)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert watched.signals.take() == 0


def test_handlers_belong_to_the_main_thread() -> None:
    failures = []

    def make() -> None:
        try:
            Signals(log=Log().info)
        except AssertionError as error:
            failures.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert failures == ["signal handlers belong to the main thread"]


def test_whoever_waits_for_others_hears_of_a_stop_at_once(watched: Watched) -> None:
    asked: list[str] = []
    watched.signals.on_stop_request(lambda: asked.append("heard"))
    watched.kill(signal.SIGUSR1)
    assert asked == []
    watched.kill(signal.SIGTERM)
    watched.kill(signal.SIGTERM)
    assert asked == ["heard"], "once"
    watched.signals.on_stop_request(lambda: asked.append("late"))
    assert asked == ["heard", "late"], "who comes after it"


class Stuck(io.StringIO):
    """An output stream whose reader has stopped reading."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def write(self, text: str) -> int:
        self.goes_on.wait(60)
        return super().write(text)


def test_output_that_nobody_reads_does_not_keep_the_second_signal_waiting() -> None:
    """The log blocks, and standard error is a full pipe."""
    stuck, clock, exits = Stuck(), Clock(), list[int]()
    signals = Signals(log=Log(stream=stuck).info, clock=clock, exit_now=exits.append)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    kept = os.dup(2)
    heard = threading.Thread(
        target=lambda: [signals.handle(signal.SIGUSR1), signals.handle(signal.SIGTERM), later()], daemon=True
    )

    def later() -> None:
        clock.now += 3
        signals.handle(signal.SIGTERM)

    os.dup2(writer, 2)
    try:
        heard.start()
        heard.join(20)
        assert exits == [128 + signal.SIGTERM] and signals.take() == STOP | SAVE
    finally:
        os.dup2(kept, 2)
        stuck.goes_on.set()
        for descriptor in (kept, reader, writer):
            os.close(descriptor)
        signals.close()
