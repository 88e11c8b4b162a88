"""The cost of a step to the lighthouse while nothing changes, counted at one that serves a real job."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from typing import Any

import pytest

from ft.manager import Manager
from ft.protocol import messages as m
from ft.rpc.clients import GroupClient
from tests.ft.groups import LIMIT_S, Rank, finish, job
from tests.waiting import in_time

FROM, TO = 3, 9  # committed steps between which is counted


class Counted:
    """An observer of the lighthouse's machine: each call to the machine is an event."""

    def __init__(self) -> None:
        self.events = list[m.Event]()
        self._news = threading.Condition()

    def seen(self, now_s: float, event: m.Event, out: m.Out) -> None:
        with self._news:
            self.events.append(event)
            self._news.notify_all()

    def wait_for_reports(self, since: int, of: set[str]) -> None:
        """Waits until a report of each group of `of` has come, after the first `since` events."""

        def came() -> bool:
            told = {event.replica_id for event in self.events[since:] if isinstance(event, m.Report)}
            return told >= of

        with self._news:
            assert self._news.wait_for(came, LIMIT_S)


@pytest.mark.timeout(300)
def test_a_report_names_the_quorum_that_its_launched_attempts_belong_to():
    sent = list[m.Report]()

    class Client(GroupClient):
        def report(self, report: m.Report, **metrics: Any) -> None:
            sent.append(report)
            super().report(report, **metrics)

    def at(rank: Rank, step: int) -> None:
        if step == FROM:
            assert rank.manager.quorum
            quorum_id, since = rank.manager.quorum.quorum_id, len(sent)
            assert in_time(lambda: {report.quorum_id for report in sent[since:]} >= {quorum_id})

    with job(min_replicas=1) as made:
        make = partial(Manager, connect=Client)
        first = made.group("a", steps=FROM + 2, at=at, make=make)[0]
        finish(first)
    assert {report.quorum_id for report in sent if report.launched} >= {1}
    assert all(report.launched == 0 for report in sent if report.quorum_id == 0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("every_step", [False, True])
def test_a_steady_step_asks_the_lighthouse_nothing(every_step: bool):
    """Beats continue on the open stream. With quorum = "every_step" there is one call for each step of each group."""
    counted, marks = Counted(), list[int]()

    def at(rank: Rank, step: int) -> None:
        if rank.name == "a" and step in (FROM, TO):
            if step == TO:
                assert rank.manager.quorum
                counted.wait_for_reports(marks[0], set(rank.manager.quorum.members))
            marks.append(len(counted.events))

    with job(min_replicas=2, observer=counted.seen) as made:
        ranks = [made.group(name, steps=TO + 3, together=2, at=at, every_step=every_step)[0] for name in "ab"]
        for rank in finish(*ranks):
            assert {size for _, size, _ in rank.commits} == {2}
    first, last = marks
    told = {type(event) for event in counted.events[first:last]}
    asked = Counter(
        (m.name_of(event.member.replica_id), event.member.step)
        for event in counted.events
        if isinstance(event, m.Call) and FROM <= event.member.step < TO
    )
    if every_step:
        assert asked == {(name, step): 1 for name in "ab" for step in range(FROM, TO)}
        assert told <= {m.Tick, m.Report, m.Call}
    else:
        assert not asked and told <= {m.Tick, m.Report}
