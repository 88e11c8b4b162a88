"""The thread that writes: who gives it something to write never waits, and trouble is said once, and when it is over."""

from __future__ import annotations

import threading

from training.scribe import SLOW_S, Scribe

WAIT_S = 50.0


def test_storage_that_hangs_holds_up_nobody_and_is_told_once() -> None:
    now, said = [0.0], list[str]()
    began, goes_on = threading.Event(), threading.Event()
    scribe = Scribe(said.append, clock=lambda: now[0])

    def hangs() -> None:
        began.set()
        assert goes_on.wait(WAIT_S)

    scribe.serve("figures", hangs)
    scribe.wake()
    assert began.wait(WAIT_S)
    scribe.wake()
    assert said == [] and not scribe.flush(0.01)
    now[0] = SLOW_S + 10
    for _ in range(3):
        scribe.wake()
    assert said == ["storage has not taken a write for 20 s; what is new is kept in memory"]
    goes_on.set()
    assert scribe.flush(WAIT_S)
    assert said[1:] == ["storage takes writes again: the last one took 20 s"]
    scribe.close()


def test_a_failure_is_tried_again_and_holds_up_no_other_work() -> None:
    said, tries, done = list[str](), [0], threading.Event()
    scribe = Scribe(said.append, retry_s=0.001)

    def fails_twice() -> None:
        tries[0] += 1
        if tries[0] < 3:
            raise OSError(28, "No space left on device", "x/metrics.jsonl")

    scribe.serve("figures", fails_twice, lambda: 7 if tries[0] == 3 else 0)
    scribe.serve("events", done.set)
    scribe.wake()
    assert done.wait(WAIT_S)
    assert scribe.flush(WAIT_S, patient=True)
    assert said == [
        "figures cannot be written: No space left on device (x/metrics.jsonl); kept in memory, and tried again",
        "figures are written again, after 0 s; 7 rows are lost, for there was no room to keep them",
    ]
    scribe.close()


def test_an_end_says_what_it_takes_along() -> None:
    said = list[str]()
    scribe = Scribe(said.append)

    def fails() -> None:
        raise OSError(30, "Read-only file system", "x")

    scribe.serve("events", fails)
    scribe.wake()
    assert not scribe.flush(WAIT_S)
    scribe.close(WAIT_S)
    scribe.close(WAIT_S)
    assert said[1:] == ["events: the newest are lost, for storage has not come back before the end"]


def test_what_is_no_trouble_of_files_is_tried_again_all_the_same() -> None:
    """A damaged file, or somebody else's library, raises what it likes, and the thread is everybody's."""
    said, tries = list[str](), [0]
    scribe = Scribe(said.append, retry_s=0.001)

    def fails_once() -> None:
        tries[0] += 1
        if tries[0] == 1:
            raise TypeError("cannot unpack")

    scribe.serve("figures", fails_once)
    scribe.wake()
    assert scribe.flush(WAIT_S, patient=True)
    assert said == [
        "figures cannot be written: TypeError: cannot unpack; kept in memory, and tried again",
        "figures are written again, after 0 s; nothing is lost",
    ]
    scribe.close()
