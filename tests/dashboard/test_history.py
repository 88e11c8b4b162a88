"""The timeline's account of the events of the lighthouse's machine, with a clock of the test's; its size stays bounded."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from ft.dashboard import history as told
from ft.dashboard.feed import MAX_BYTES, messages
from ft.dashboard.history import LANES, History, clean, named
from ft.protocol import messages as m
from ft.protocol.lighthouse import LighthouseConfig, LighthouseMachine
from ft.rpc.generated import pharos_pb2


class Job:
    """A machine, and its history, at `now_s`."""

    def __init__(self, *ids: str) -> None:
        self.now_s = 1000.0
        self.machine = LighthouseMachine(LighthouseConfig(min_replicas=len(ids)), self.now_s, epoch="e")
        self.history = History(self.machine, lambda: self.now_s)
        for replica_id in ids:
            self.feed(m.StreamOpened(replica_id))
        for replica_id in ids:
            self.feed(m.Call(m.Member(replica_id)))

    def feed(self, event: m.Event) -> None:
        out = self.machine.handle(event, self.now_s)
        if out.effects or isinstance(event, m.Tick | m.Leave):
            self.history.on_event(event, out)

    def report(self, replica_id: str, step: int, **figures: Any) -> None:
        self.history.reported(pharos_pb2.Report(replica_id=replica_id, step=step, **figures))

    @property
    def said(self) -> list[tuple[str, str, str]]:
        return [(LANES[event.lane], event.grade, event.text) for event in self.history.events]


def test_a_quorum_a_death_a_return_and_its_heal():
    job = Job("a:1", "b:1", "c:1")
    assert job.said == [("membership", "good", "quorum 1 of 3 groups: a:1, b:1 and c:1 in")]
    for replica_id in ("a:1", "b:1", "c:1"):
        job.report(replica_id, 7, mean_loss=2.5, commit_quorum_id=1)
    assert [(point.step, point.loss) for point in job.history.points] == [(7, 2.5)], "one for a step"
    job.feed(m.StreamClosed("c:1"))
    assert job.said[1:] == [("membership", "bad", "c:1 is lost: its connection broke")]
    job.feed(m.StreamOpened("c:2"))
    state = {"step": 7, "commit_quorum_id": 1, "commit_id": "x"}
    for member in (m.Member("a:1", **state), m.Member("b:1", **state)):
        job.feed(m.Call(member, known=1, failed=True))
    job.feed(m.Call(m.Member("c:2")))
    assert ("membership", "good", "quorum 2 of 3 groups: c:2 in; c:1 out") in job.said
    assert job.said[-1] == ("heal", "info", "c:2 heals step 7 from a:1 and b:1")
    assert job.history.healing == {"c:2": (7, ("a:1", "b:1"))}
    job.report("c:2", m.VOID)
    assert job.history.healing, "not yet"
    job.report("c:2", 7)
    assert job.said[-1] == ("heal", "good", "c:2 has the state of step 7") and not job.history.healing
    assert [size.members for size in job.history.sizes] == [3, 2, 3]


def test_the_report_of_a_group_that_heals_is_no_step():
    job = Job("a:1", "b:1")
    job.report("a:1", m.VOID, mean_loss=2.0)
    for step in (1000, 1001):
        job.now_s += 1
        job.report("b:1", step, mean_loss=2.0)
    assert job.history.steps_per_s() == 1.0 and [point.step for point in job.history.points] == [1000, 1001]


def test_the_pace_of_steps_that_take_longer_than_a_minute():
    job = Job("a:1")
    for step in (1, 2, 3, 4):
        job.now_s += 70
        job.report("a:1", step)
    job.now_s += 139
    assert job.history.steps_per_s() == 1 / 70
    job.now_s += 2
    assert job.history.steps_per_s() == 0.0, "twice that time without one"
    for step in (5, 6, 7):
        job.now_s += 1
        job.report("a:1", step)
    assert job.history.steps_per_s() == 1.0
    job.now_s -= 1000  # the clock is set back
    for step in (8, 9):
        job.report("a:1", step)
        job.now_s += 10
    assert job.history.steps_per_s() == 0.1


def test_who_leaves_is_not_lost():
    job = Job("a:1", "b:1")
    job.feed(m.Leave("b:1", clean=True, reason="done"))
    assert job.said[-1] == ("membership", "info", "b:1 left: done")
    job.feed(m.Leave("a:1", clean=True, reason="done"))
    assert job.said[-1] == ("membership", "info", "a:1 left: done"), "nobody is left to be told"


def test_many_that_go_at_once_are_one_event_and_a_few_names():
    ids = [f"g{i:03}:1" for i in range(200)]
    job = Job(*ids)
    for replica_id in ids[:150]:  # of a generation only the first loss has an effect; a tick finds the others
        job.feed(m.StreamClosed(replica_id))
    job.now_s += 0.1
    job.feed(m.Tick())
    texts = [text for lane, _, text in job.said if "lost" in text]
    assert texts == [
        "g000:1 is lost: its connection broke",
        "g001:1, g002:1, g003:1, g004:1, g005:1 and 144 more are lost: its connection broke",
    ]
    job.feed(m.Tick())
    assert [text for lane, _, text in job.said if "lost" in text] == texts, "said once"


def test_going_back_to_a_checkpoint_cuts_the_curve():
    job = Job("a:1")
    for step in range(1, 11):
        job.now_s += 1
        job.report("a:1", step, mean_loss=10.0 / step)
    job.feed(m.Leave("a:1", clean=False, reason="ends"))
    job.feed(m.Call(m.Member("a:2", step=4, commit_quorum_id=1, commit_id="x", restored=4)))
    assert job.history.points[-1].step == 4 and job.history.cut_at[1] == 4
    job.now_s += 1
    job.report("a:2", 5, mean_loss=2.0)
    assert job.history.points[-1].step == 5


def test_a_late_report_from_before_a_rewind_counts_for_nothing():
    """A group's heartbeat repeats the newest reports of its ranks, which may be of the branch before."""
    job = Job("a:1")
    job.report("a:1", 80, mean_loss=2.0, commit_quorum_id=1)
    back = m.Member("a:1", step=m.STEPS_PER_BRANCH + 40, commit_quorum_id=1, commit_id="x", restored=40)
    job.feed(m.Call(back, known=1, failed=True))
    job.report("a:1", 80, mean_loss=2.0, commit_quorum_id=1)
    for step in (40, 41):
        job.now_s += 1
        job.report("a:1", m.STEPS_PER_BRANCH + step, mean_loss=3.0, commit_quorum_id=2)
    assert job.history.recent_steps[-1][1] == job.history.points[-1].step == 41


def test_what_is_said_again_is_counted_and_old_events_go():
    history = Job("a:1").history
    for _ in range(3):
        history.on_timeline_event(
            "a:1", pharos_pb2.TimelineEvent(lane="corruption", step=9, text="the weights of b differ")
        )
    [event] = [x for x in history.events if LANES[x.lane] == "corruption"]
    assert (event.times, event.step, event.grade) == (3, 9, "bad")
    for i in range(3 * told.MAX_EVENTS):
        history.add("commit", "bad", f"{i}")
    assert len(history.events) == told.MAX_EVENTS


def test_the_curve_is_bounded_and_keeps_both_ends():
    job = Job("a:1")
    for step in range(1, 5 * told.MAX_POINTS):
        job.now_s += 0.01
        job.report("a:1", step, mean_loss=1.0 + 1 / step)
    points = job.history.points
    assert len(points) <= told.MAX_POINTS and (points[0].step, points[-1].step) == (1, 5 * told.MAX_POINTS - 1)
    assert job.history.steps_per_s() == pytest.approx(100, rel=0.05)


def test_the_curve_of_a_long_job_is_that_of_the_whole_job():
    job, steps = Job("a:1"), 30 * told.MAX_POINTS
    for step in range(1, steps + 1):
        job.report("a:1", step, mean_loss=1.0 + 1 / step)
    gaps = [after.step - before.step for before, after in pairwise(job.history.points)]
    assert told.MAX_POINTS / 4 < len(gaps) < told.MAX_POINTS and max(gaps) <= 8 * steps / told.MAX_POINTS


@pytest.mark.parametrize("loss", [math.nan, math.inf, 0.0])
def test_what_is_no_loss_is_no_point(loss: float):
    job = Job("a:1")
    job.report("a:1", 3, mean_loss=loss)
    assert not job.history.points and job.history.step == 3


@pytest.mark.parametrize(
    ("text", "most", "shown"),
    [
        ("a\u202eb\x1b[2J\n", 99, "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}"),
        ("<img onerror>", 99, "<img onerror>"),
        ("x" * 10_000, 20, "x" * 19 + "…"),
        ("שלום", 99, "שלום"),
    ],
)
def test_texts_of_others(text: str, most: int, shown: str):
    assert clean(text, most) == shown


def test_a_few_names():
    assert [named("abcdefg"[:n]) for n in (0, 1, 2, 3, 7)] == [
        "",
        "a",
        "a and b",
        "a, b and c",
        "a, b, c, d, e and 2 more",
    ]


def test_a_message_is_never_longer_than_it_may_be():
    parts = {
        "names": [[i, "\N{PILE OF POO}" * 512, 8, 0] for i in range(500)],
        "rows": [[i, 1 << 40] for i in range(3000)],
    }
    made = messages(parts, 0.0)
    assert len(made) > 50 and max(map(len, made)) <= MAX_BYTES + 100
    assert sum(text.count("1099511627776") for text in made) == 3000


def test_a_lost_group_that_is_told_so_fails_nobody():
    """ "Quorum 1 continues without this group" is a notice to the excluded group, and no failed commit of the job."""
    job = Job("a:1", "b:1")
    job.feed(m.Leave("b:1", clean=False, reason="gone"))
    job.feed(replace(m.StreamOpened("b:1.1"), quorum=m.Quorum(1, ())))
    assert not [text for lane, _, text in job.said if lane == "commit"]


def test_neither_strange_good_byes_nor_a_clock_that_was_set_back_make_it_grow():
    job = Job("a:1")
    for unique in range(1000):
        job.feed(m.Leave(f"nobody:{unique}"))
    assert not job.history.gone
    job.now_s = 1e6
    for step in range(1, 1001):
        job.report("a:1", step)
        job.now_s = 2000.0 + step  # a fortnight back, and on from there
    assert len(job.history.recent_steps) <= told.RATE_S + 2 and 0.9 < job.history.steps_per_s() < 1.1
