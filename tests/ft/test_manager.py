"""The Manager drives the protocol's machine: replica groups train, die, heal and leave, and every sample counts once."""

from __future__ import annotations

import threading

import pytest

from ft.manager import GroupEnded
from ft.process_groups.baby import ProcessGroupBabyGloo
from ft.protocol.ledger import Ledger
from ft.protocol.step import Step, StepConfig
from tests.ft.groups import SLOT, Rank, job


def test_three_groups_train_as_one():
    with job(min_replicas=3) as made:
        ranks = [made.group(name, steps=5)[0] for name in "abc"]
        for rank in ranks:
            rank.join()
            assert rank.error is None
            assert [size for _, size, _ in rank.commits] == [3] * 5
            assert [who for _, _, who in rank.commits] == [(0, 1, 2)] * 5
        dealt = sorted(slot for rank in ranks for _, slots in rank.computed for slot in slots)
        assert dealt == list(range(0, 15 * SLOT, SLOT))


def test_a_death_costs_the_others_no_step():
    """The victim dies in the middle of a step: what the others computed is kept, and reduced again without it."""
    dead = threading.Event()

    def dies(rank: Rank, step: int) -> None:
        if step == 3:
            rank.kill()
            dead.wait(30)

    with job(min_replicas=2) as made:
        a, b = (made.group(name, steps=8)[0] for name in "ab")
        victim = made.group("c", steps=8, at=dies)[0]
        for rank in (a, b):
            rank.join()
        dead.set()
        victim.join()
        assert isinstance(victim.error, GroupEnded)
        for rank in (a, b):
            assert rank.error is None
            assert [step for step, _, _ in rank.commits] == list(range(1, 9))
            assert [step for step, _ in rank.computed] == list(range(8)), "each step was computed once"
            assert [size for _, size, _ in rank.commits] == [3] * 3 + [2] * 5


def test_a_newcomer_heals_and_takes_part():
    with job(min_replicas=1) as made:
        come, go_on = threading.Event(), threading.Event()

        def waits(rank: Rank, step: int) -> None:
            if step == 4:
                come.set()
                assert go_on.wait(30)

        a = made.group("a", steps=30, at=waits)[0]
        assert come.wait(30)
        b = made.group("b", steps=30)[0]
        go_on.set()
        for rank in (a, b):
            rank.join()
            assert rank.error is None
        assert a.commits[-1][1:] == (2, (0, 1))
        assert max(b.weights) == 30 and min(b.weights) > 4


def test_baby_groups_do_the_same():
    with job(min_replicas=2) as made:
        ranks = [made.group(name, steps=3, group=ProcessGroupBabyGloo)[0] for name in "ab"]
        for rank in ranks:
            rank.join()
            assert [size for _, size, _ in rank.commits] == [2] * 3


def test_ranks_of_a_group_take_the_same_way():
    """Two groups of two ranks; one rank of one group loses its server's process, so the whole group is gone."""

    def dies(rank: Rank, step: int) -> None:
        if step == 2 and rank.group_rank == 0:
            rank.kill()

    with job(min_replicas=1) as made:
        a = made.group("a", size=2, steps=6)
        b = made.group("b", size=2, steps=6, at=dies)
        for rank in a:
            assert rank.join().error is None
            assert [step for step, _, _ in rank.commits] == list(range(1, 7))
        for rank in b:
            assert isinstance(rank.join().error, GroupEnded)


def test_a_group_that_cannot_gives_zeros_and_its_slot_is_dealt_again():
    with job(min_replicas=2) as made:
        a, b = (made.group(name, steps=4)[0] for name in "ab")
        step = b.train_step

        def without_tokens() -> None:
            """One step of it sees nothing to learn from."""
            manager = b.manager
            if manager.step == 1 and not b.unable:
                b.unable = True
                deal = manager.begin_step()
                manager.commit(manager.reduce([0.0] * len(deal.slots), 0.0, False))
                b.model.zero_grad()
            else:
                step()

        b.unable, b.train_step = False, without_tokens  # type: ignore[attr-defined,method-assign]
        for rank in (a, b):
            rank.join()
            assert rank.error is None


def test_a_recorded_run_is_the_machines_own():
    """The Manager has no rule: its events, replayed through a fresh machine, give the same effects."""
    with job(min_replicas=1) as made:
        a, b = (made.group(name, steps=6)[0] for name in "ab")
        for rank in (a, b):
            rank.join()
            config = StepConfig(init_sync=True)
            replayed = Step(config, Ledger(SLOT))
            for now_s, event, out in rank.seen:
                assert replayed.handle(event, now_s) == out


@pytest.mark.parametrize("wish", ["leave"])
def test_who_leaves_says_so_in_the_step_before(wish: str):
    def leaves(rank: Rank, step: int) -> None:
        if step == 3:
            rank.manager.leave()
        if rank.manager.left:
            rank.steps = 0

    with job(min_replicas=1) as made:
        a = made.group("a", steps=10)[0]
        b = made.group("b", steps=10, at=leaves)[0]
        assert a.join().error is None and b.join().error is None
        assert [step for step, _, _ in a.commits] == list(range(1, 11))
        assert [step for step, _ in a.computed] == list(range(10))
        assert b.manager.step == 4 and a.commits[-1][1] == 1
