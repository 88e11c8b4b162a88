"""All machines together: what a user sees of a job when groups come, die, heal and cannot compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ft.protocol import messages as m
from tests.protocol.job import Job


def slots_of(job: Job) -> list[int]:
    """Slots that went into the first group's commits, in order."""
    rank = job.ranks()[0]
    ledger = rank.machine.ledger
    return sorted(set(range(0, ledger.position, 8)) - set(ledger.holes))


@pytest.mark.parametrize("size", [1, 2])
def test_a_steady_job_sends_the_lighthouse_nothing(size: int):
    job = Job("abc", size=size)
    job.steps(8)  # a started alone, b and c came in and healed
    asked = sum(job.asked.values())
    job.steps(20)
    assert [rank.machine.step for rank in job.ranks()] == [20] * 3 * size
    assert sum(job.asked.values()) == asked
    job.check()


def test_spares_stand_by_without_a_quorum_at_each_step():
    job = Job("abc")
    for group in job.groups.values():
        group.machine.config = replace(group.machine.config, spares_above=2)
    job.steps(8)
    asked = sum(job.asked.values())
    job.steps(20)
    assert sum(job.asked.values()) == asked
    assert [len(rank.computed) for rank in job.ranks()][2] == 0
    job.kill("a")
    job.steps(25)
    assert job.groups["c"].ranks[0].computed, "it takes the place of one that is lost"
    job.check()


@pytest.mark.parametrize("size", [1, 2])
def test_groups_that_start_later_heal_and_are_dealt_slots(size: int):
    job = Job("a", size=size)
    job.steps(5)
    job.start("b")
    job.steps(12)
    assert {rank.machine.step for rank in job.ranks()} == {12}
    assert job.groups["b"].ranks[0].commits[-1].contributors == (0, 1)
    assert slots_of(job) == list(range(0, job.ranks()[0].machine.ledger.position, 8))
    job.check()


@pytest.mark.parametrize("size", [1, 2])
def test_a_killed_group_costs_the_others_no_step_and_its_slot_is_dealt_again(size: int):
    job = Job("abc", size=size)
    job.steps(10)
    before = job.groups["a"].ranks[0].computed[-1]
    victim = job.groups["c"]
    for rank in victim.ranks:
        rank.machine.phase = rank.machine.phase.STOPPED  # it hangs, the others compute and wait
    job.steps(11)
    assert [job.groups[name].ranks[0].machine.step for name in "ab"] == [10, 10]
    computed = [list(rank.computed) for rank in job.ranks() if rank.group is not victim]
    job.kill("c")
    job.settle()
    assert [rank.machine.step for rank in job.ranks()] == [11, 11] * size
    assert [rank.computed for rank in job.ranks()] == computed  # kept gradients: nothing was computed again
    assert job.groups["a"].ranks[0].commits[-1].contributors == (0, 1)
    [hole] = job.ranks()[0].machine.ledger.holes
    assert hole > before[0]
    job.steps(13)
    assert job.ranks()[0].machine.ledger.holes == []
    assert slots_of(job) == list(range(0, job.ranks()[0].machine.ledger.position, 8))
    job.check()


@pytest.mark.parametrize("size", [1, 2])
def test_with_slots_per_step_every_step_has_its_slots_whoever_dies(size: int):
    job = Job("abcd", size=size, slots_per_step=3)  # one of four stands by
    for step, victim in ((6, "b"), (11, "d"), (16, "a")):
        job.steps(step)
        hanging = job.groups[victim]
        for rank in hanging.ranks:
            rank.machine.phase = rank.machine.phase.STOPPED
        job.steps(step + 1)
        job.kill(victim)
        job.settle()
        job.steps(step + 2)
        job.start(victim)
    job.steps(22)
    assert {rank.machine.step for rank in job.ranks()} == {22}
    assert job.ranks()[0].machine.ledger.holes == [] and slots_of(job) == list(range(0, 22 * 3 * 8, 8))
    assert all(commit.divisor == 30 for rank in job.ranks() for commit in rank.commits)
    job.check()


def test_a_killed_group_returns():
    job = Job("abc", size=2)
    job.steps(4)
    job.kill("b")
    job.steps(6)
    job.start("b")
    job.steps(15)
    assert {rank.machine.step for rank in job.ranks()} == {15}
    assert job.groups["b"].ranks[1].commits[-1].contributors == (0, 1, 2)
    job.check()


def test_who_heals_slowly_holds_sums_and_applies_them_in_order():
    job = Job("ab")
    job.steps(3)
    job.start("c")
    job.heals_wait = True
    job.steps(10)
    c = job.groups["c"].ranks[0]
    assert c.machine.void and len(c.held) == 2  # and the others wait for it now
    job.heals_wait = False
    job.settle()
    assert {rank.machine.step for rank in job.ranks()} == {10}
    assert [commit.held for commit in c.commits][:3] == [True, True, False]
    job.check()


@pytest.mark.parametrize("steps_between", [0, 1])
def test_the_only_holder_of_the_state_leaves_once_another_one_has_it(steps_between: int):
    """Those who need it wait to come in, or heal already."""
    job = Job("b")
    job.steps(5)
    job.heals_wait = True
    for name in "ac":
        job.start(name)
    job.steps(5 + steps_between)
    b = job.groups["b"].ranks[0]
    job.rank_event(b, m.Leaving())
    job.steps(12)
    assert b.machine.step < 12 and not any(commit.leave for commit in b.commits), (
        "no more than two steps wait for those who heal"
    )
    job.heals_wait = False
    job.settle()
    left = next(commit.step for commit in b.commits if commit.leave)
    assert all(not job.groups[name].ranks[0].machine.void for name in "ac")
    assert min(job.groups[name].ranks[0].machine.step for name in "ac") >= left
    job.check()


def test_who_heals_too_slowly_is_dropped_and_may_return():
    job = Job("ab")
    job.steps(3)
    job.start("c")
    job.heals_wait = True
    job.steps(20)
    job.tick(25)
    assert {job.groups[name].ranks[0].machine.step for name in "ab"} != {20}
    job.heals.clear()
    job.tick(6)
    job.heals_wait = False
    job.steps(20)
    job.tick(2)
    assert {rank.machine.step for rank in job.ranks()} == {20}
    assert job.groups["c"].machine.replica_id.endswith(".1")
    job.check()


def test_a_loss_that_is_not_a_number_costs_an_attempt_and_no_quorum():
    job = Job("abc")
    job.steps(10)
    asked = sum(job.asked.values())
    bad = list(job.ranks()[0].machine.ledger.pending)[1]
    job.useless = {bad}
    job.steps(11)
    assert {rank.machine.step for rank in job.ranks()} == {11}
    assert sum(job.asked.values()) == asked
    assert job.ranks()[0].commits[-1].contributors == (0, 2)
    assert job.ranks()[0].machine.ledger.holes == [bad]
    job.steps(20)
    assert all(f"({bad},)" in rank.stopped for rank in job.ranks())  # the third time it was of no use
    assert {rank.machine.step for rank in job.ranks()} == {13}
    job.check()


def test_all_groups_killed_at_once_go_on_from_what_they_restore():
    job = Job("ab")
    job.steps(4)
    job.kill("a")
    job.kill("b")
    job.start("a")
    job.start("b")
    job.steps(6)
    job.tick(2)
    assert {rank.machine.step for rank in job.ranks()} == {6}
    job.check()


def test_a_checkpoint_is_read_by_a_cold_start_alone():
    job = Job("ab", restores=True)
    job.steps(4)
    assert job.loads == {"a": 1}  # b came when a held the initial state
    job.kill("a")
    job.steps(5)
    job.start("a")
    job.steps(8)
    job.steps(9)  # its state has come while b stood still; it takes it with the next step
    assert job.loads == {"a": 1} and {rank.machine.step for rank in job.ranks()} == {9}
    job.kill("a")
    job.kill("b")
    job.start("a")
    job.start("b")
    job.steps(10)
    job.tick(2)
    assert job.loads == {"a": 2, "b": 1} and {rank.machine.step for rank in job.ranks()} == {10}
    job.check()


def test_a_newcomer_never_takes_over_before_its_time():
    job = Job("ab")
    job.steps(4)
    job.kill("a")
    job.kill("b")
    job.start("c")
    job.steps(6)
    job.tick(29)
    assert job.groups["c"].ranks[0].machine.step == 0
    assert "may come back" in job.lighthouse.reason
    job.tick(2)
    assert job.groups["c"].ranks[0].machine.step == 6


def test_the_first_loss_is_told_the_rest_shows():
    job = Job("abcde")
    job.steps(4)
    job.notices.clear()
    job.kill("c")
    job.kill("d")
    lost = [notice for notice in job.notices if isinstance(notice, m.MemberLost)]
    assert [notice.replica_ids for notice in lost] == [("c:3",)]
    job.steps(6)
    assert {rank.machine.step for rank in job.ranks()} == {6}
    job.check()
