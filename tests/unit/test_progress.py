"""Seconds per phase and the bar, on a clock that the test moves."""

import threading
from contextlib import closing
from typing import Any

import pytest

from tests.unit.fakes import Clock, Lines
from training.progress import Bar, Progress, duration, quantity


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def progress(clock: Clock) -> Progress:
    return Progress(clock)


def test_a_second_is_counted_once_for_the_innermost_phase(clock: Clock, progress: Progress) -> None:
    with progress.phase("compute"):
        clock.now += 2
        with progress.phase("reduce"):
            clock.now += 3
        clock.now += 1
    clock.now += 10
    with progress.phase("data"):
        clock.now += 4
    assert progress.seconds == {"compute": 3, "reduce": 3, "data": 4}
    assert progress.total() == 20


def test_what_happens_inside_a_long_phase_is_counted_for_it(clock: Clock, progress: Progress) -> None:
    with progress.phase("validation"):
        clock.now += 1
        with progress.phase("data"):
            clock.now += 5
    assert progress.seconds == {"validation": 6}


def test_a_phase_is_closed_by_an_exception(clock: Clock, progress: Progress) -> None:
    with pytest.raises(KeyError), progress.phase("data"):
        clock.now += 5
        raise KeyError
    assert progress.open_phases() == ()
    assert progress.seconds == {"data": 5}


def test_a_phase_is_renewed_while_it_makes_progress(clock: Clock, progress: Progress) -> None:
    with progress.phase("quorum"), progress.phase("checkpoint"):
        clock.now += 200
        progress.renew()
        clock.now += 3
        assert progress.long_phase() == ("checkpoint", 3)
    assert progress.seconds["checkpoint"] == 203


def test_current_names_the_innermost_phase_and_the_time_since_it_was_entered(clock: Clock, progress: Progress) -> None:
    with progress.phase("compute"):
        clock.now += 2
        with progress.phase("reduce"):
            clock.now += 3
            assert progress.open_phases() == (("compute", 5), ("reduce", 3))
        assert progress.open_phases() == (("compute", 5),)


def test_seconds_of_an_open_phase_are_there_already(clock: Clock, progress: Progress) -> None:
    with progress.phase("data"):
        clock.now += 2
        assert progress.spent("data", "compute") == 2
        clock.now += 1
        assert progress.spent("data") == 3


def test_another_thread_may_ask_but_not_enter(clock: Clock, progress: Progress) -> None:
    seen: list[Any] = []

    def ask() -> None:
        seen.append(progress.open_phases())
        try:
            with progress.phase("data"):
                pass
        except AssertionError as error:
            seen.append(str(error))

    with progress.phase("compute"):
        clock.now += 1
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert seen == [(("compute", 1),), "phase 'data': entered by a different thread"]


def test_what_is_thrown_away_is_lost_and_what_was_committed_is_goodput(clock: Clock, progress: Progress) -> None:
    def spend(phase: str, seconds: float) -> None:
        with progress.phase(phase):
            clock.now += seconds

    spend("data", 1), spend("compute", 3), spend("reduce", 2), spend("optimizer", 1)
    progress.commit()
    spend("data", 0.5), spend("compute", 4), spend("waiting", 8)
    assert progress.goodput_s == 6
    progress.lose()
    assert progress.seconds == {"data": 1, "compute": 3, "reduce": 2, "optimizer": 1, "waiting": 8, "lost": 4.5}
    progress.lose()
    assert progress.seconds["lost"] == 4.5, "once"
    spend("compute", 5)
    progress.commit()
    assert progress.goodput_s == 11 and progress.seconds["lost"] == 4.5


def test_what_was_counted_for_one_phase_may_have_been_anothers(clock: Clock, progress: Progress) -> None:
    with progress.phase("reduce"):
        clock.now += 1
        with progress.phase("waiting"):
            clock.now += 5
        progress.move(2, "waiting", "reduce")
    assert progress.seconds == {"reduce": 3, "waiting": 3}


def test_bar_off_a_terminal_is_a_line_now_and_then(clock: Clock) -> None:
    log = Lines()
    with closing(Bar(200, "tokenising", log=log, clock=clock)) as bar:
        for _ in range(8):
            clock.now += 2
            bar.update(20)
    assert log.infos == [
        "tokenising: [######..............]  30%, 60 of 200 B, 10 B/s, 14 s left",
        "tokenising: [############........]  60%, 120 of 200 B, 10 B/s, 8 s left",
    ]


def test_bar_on_a_terminal_is_drawn_over_and_taken_away(clock: Clock) -> None:
    log = Lines(is_terminal=True)
    with closing(Bar(4, "reading", log=log, clock=clock)) as bar:
        clock.now += 1
        bar.update(2)
    assert log.infos == []
    assert log.overwritten == ["reading: [##########..........]  50%, 2 of 4 B, 2 B/s, 1 s left", ""]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (185, "3:05"), (7385, "2:03:05"), (3 * 86400 + 7500, "3 d 02:05")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.00k"),
        (12_345, "12.3k"),
        (99_960, "100k"),
        (4_567_000, "4.57M"),
        (2e15, "2000T"),
    ],
)
def test_quantity(value: float, text: str) -> None:
    assert quantity(value) == text
