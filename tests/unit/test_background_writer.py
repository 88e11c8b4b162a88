"""The background writer: callers never wait, and a failure is reported once, and again when it is over."""

from __future__ import annotations

import threading

from tests.unit.storage import until_written
from training.background_writer import SLOW_S, BackgroundWriter

WAIT_S = 50.0


def test_storage_that_hangs_holds_up_nobody_and_is_told_once() -> None:
    now, said = [0.0], list[str]()
    began, goes_on = threading.Event(), threading.Event()
    background_writer = BackgroundWriter(said.append, clock=lambda: now[0])

    def hangs() -> None:
        began.set()
        assert goes_on.wait(WAIT_S)

    background_writer.register("metrics", hangs)
    background_writer.wake()
    assert began.wait(WAIT_S)
    background_writer.wake()
    assert said == [] and not background_writer.flush(0.01)
    now[0] = SLOW_S + 10
    for _ in range(3):
        background_writer.wake()
    assert said == ["storage has not accepted a write for 20 s; new rows are kept in memory"]
    goes_on.set()
    assert background_writer.flush(WAIT_S)
    assert said[1:] == ["storage accepts writes again: the last one took 20 s"]
    background_writer.close()


def test_a_failure_is_tried_again_and_holds_up_no_other_work() -> None:
    said, tries, done = list[str](), [0], threading.Event()
    background_writer = BackgroundWriter(said.append, retry_s=0.001)

    def fails_twice() -> None:
        tries[0] += 1
        if tries[0] < 3:
            raise OSError(28, "No space left on device", "x/metrics.jsonl")

    background_writer.register("metrics", fails_twice, lambda: 7 if tries[0] == 3 else 0)
    background_writer.register("events", done.set)
    background_writer.wake()
    assert done.wait(WAIT_S)
    until_written(background_writer)
    assert said == [
        "metrics cannot be written: No space left on device (x/metrics.jsonl); kept in memory and retried",
        "metrics can be written again, after 0 s; 7 rows are lost, since there was no room to keep them",
    ]
    background_writer.close()


def test_an_end_says_what_it_takes_along() -> None:
    said = list[str]()
    background_writer = BackgroundWriter(said.append)

    def fails() -> None:
        raise OSError(30, "Read-only file system", "x")

    background_writer.register("events", fails)
    background_writer.wake()
    assert not background_writer.flush(WAIT_S)
    background_writer.close(WAIT_S)
    background_writer.close(WAIT_S)
    assert said[1:] == ["events: the newest rows are lost, since storage has not recovered before the end"]


def test_a_recovery_at_the_end_loses_nothing_and_is_an_event() -> None:
    """Its report is an event, for which the thread has to run the tasks once more."""
    said, events, written, is_full = list[str](), list[str](), list[str](), [True]

    def report(message: str) -> None:
        said.append(message)
        events.append(message)
        background_writer.wake()

    def write_metrics() -> None:
        if is_full[0]:
            raise OSError(28, "No space left on device", "x/metrics.jsonl")

    background_writer = BackgroundWriter(report, retry_s=1000.0)
    background_writer.register("events", lambda: written.extend(events[len(written) :]))
    background_writer.register("metrics", write_metrics)
    background_writer.wake()
    assert not background_writer.flush(WAIT_S)
    is_full[0] = False
    background_writer.close(WAIT_S)
    assert [line.partition(";")[0] for line in said] == [
        "metrics cannot be written: No space left on device (x/metrics.jsonl)",
        "metrics can be written again, after 0 s",
    ]
    assert written == said


def test_what_is_no_trouble_of_files_is_tried_again_all_the_same() -> None:
    """Any exception is retried: damaged files and third-party libraries raise various types, and all kinds of data share the thread."""
    said, tries = list[str](), [0]
    background_writer = BackgroundWriter(said.append, retry_s=0.001)

    def fails_once() -> None:
        tries[0] += 1
        if tries[0] == 1:
            raise TypeError("cannot unpack")

    background_writer.register("metrics", fails_once)
    background_writer.wake()
    until_written(background_writer)
    assert said == [
        "metrics cannot be written: TypeError: cannot unpack; kept in memory and retried",
        "metrics can be written again, after 0 s; nothing is lost",
    ]
    background_writer.close()
