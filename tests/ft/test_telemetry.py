"""The reports of a rank, and how seldom it sends them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from ft.telemetry import SELDOM_S, SENDS, ManagerTelemetry, NoPhaseTimer, Status, ignore_event


class Books(NoPhaseTimer):
    phase_now: tuple[str, float] | None = None

    def long_phase(self) -> tuple[str, float] | None:
        return self.phase_now


class Clock:
    """The time, and the event "closed", whose waits take exactly their timeouts."""

    def __init__(self, ends_s: float) -> None:
        self.now_s, self.ends_s = 100.0, 100.0 + ends_s

    def monotonic(self) -> float:
        return self.now_s

    def wait(self, timeout_s: float) -> bool:
        self.now_s += timeout_s
        return self.now_s > self.ends_s


@pytest.fixture
def clock() -> Clock:
    return Clock(120.0)


def made(
    group_rank: int,
    clock: Clock,
    books: Books | None = None,
    long_phase_s: float = 300.0,
    step: Callable[[], int] = lambda: 0,
    **more: Any,
) -> ManagerTelemetry:
    given = step, books or Books(), ignore_event, lambda *what: None
    return ManagerTelemetry(group_rank, *given, 1, long_phase_s, clock.monotonic, **more)


def sent(one: ManagerTelemetry, clock: Clock, news: Any = lambda status: None) -> list[tuple[float, Status]]:
    reports: list[tuple[float, Status]] = []
    one.report_forever(1.0, clock, lambda figures, status: reports.append((clock.now_s, status)), news)  # type: ignore[arg-type]
    return reports


def test_rank_0_reports_once_a_beat_and_the_others_seldom(clock: Clock):
    assert len(sent(made(0, clock), clock)) == 120
    clock.ends_s += 120
    assert len(sent(made(1, clock), clock)) == 120 / SELDOM_S


def test_what_is_new_is_told_within_a_beat(clock: Clock):
    turns = itertools.count()
    reports = sent(made(1, clock), clock, news=lambda status: next(turns) >= 20)
    assert [at_s for at_s, _ in reports][:2] == [100.5, 110.5]


def test_a_rank_waits_in_the_sums_and_past_them(clock: Clock):
    one = made(1, clock)
    one.wait_began_s = clock.now_s
    one.current_wait = "reduction"
    assert not one.status(1.0).waiting
    clock.now_s += 0.6
    assert one.status(1.0) == Status(waiting=True)
    one.current_wait = ""
    assert one.status(1.0) == Status()
    one.current_wait = "vote"
    assert one.status(1.0) == Status(waiting=True, summed=True), "it has waited since the sums began"
    own = made(1, clock, pending_since_s=lambda: 100.0)  # a torchft program waits for a sum of its own in its body
    assert own.status(1.0) == Status(waiting=True) and own.status(2.0) == Status()


def test_a_wait_is_told_with_the_quorum_before_it(clock: Clock):
    """A group server takes the wait of an older quorum for none; one that is told with the next quorum's ID would count."""
    newest = [4]

    def configured_meanwhile() -> float:
        newest[0] = 5
        return 0.0

    one = made(1, clock, pending_since_s=configured_meanwhile, quorum_id=lambda: newest[0])
    assert one.status(1.0) == Status(waiting=True, quorum_id=4)
    assert one.status(1.0) == Status(waiting=True, quorum_id=5)


def test_a_commit_that_waits_for_readers_is_a_phase_with_a_limit_of_its_own(clock: Clock):
    """The phase is also reported where long phases are not: the other groups would take the wait for a hang."""
    one = made(0, clock, long_phase_s=0.0)
    with one.sends(60.0):
        assert one.status(1.0) == Status(phase=SENDS, phase_limit_s=60.0)
        clock.now_s += 60.0
        assert one.status(1.0) == Status()
    assert one.status(1.0) == Status()


def test_a_long_phase_is_told_until_it_takes_too_long(clock: Clock):
    books = Books()
    one = made(0, clock, books)
    assert one.status(1.0) == Status()
    books.phase_now = ("checkpoint", 12.0)
    assert one.status(1.0) == Status(phase="checkpoint", phase_limit_s=300.0)
    books.phase_now = ("checkpoint", 301.0)
    assert one.status(1.0) == Status()


def test_the_first_step_is_a_long_phase(clock: Clock):
    one = made(0, clock)
    one.first_began_s = clock.now_s
    clock.now_s += 200
    assert one.status(1.0) == Status(phase="first step", phase_limit_s=300.0)
    clock.now_s += 101
    assert one.status(1.0) == Status(), "it takes too long"
    clock.now_s -= 101
    one.first_began_s = math.inf
    assert one.status(1.0) == Status()


def test_a_reason_for_which_every_retry_fails_is_logged_once(clock: Clock, caplog: pytest.LogCaptureFixture):
    steps = [7]
    one, other_rank = (made(rank, clock, step=lambda: steps[0]) for rank in (0, 1))
    for reason in ("b is lost", "b is lost", "AllReduce: Invalid scalar type", "b is lost"):
        one.failed(reason)
        other_rank.failed(reason)
    steps[0] = 8
    one.failed("b is lost")
    assert [record.getMessage() for record in caplog.records] == [
        "a step failed: b is lost",
        "a step failed: AllReduce: Invalid scalar type",
        "a step failed: b is lost",
        "a step failed: b is lost",
    ]
