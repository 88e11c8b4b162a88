"""The Manager drives the protocol's machine: replica groups train, die, heal and leave, and every sample counts once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from ft.manager import Manager, ManagerOptions
from ft.process_groups.baby import ProcessGroupBabyGloo
from ft.process_groups.base import ProcessGroup
from ft.process_groups.errors import MustExit, ProcessGroupError
from ft.process_groups.gloo import ProcessGroupGloo
from ft.protocol import compare
from ft.protocol import messages as m
from ft.protocol.compare import DIGEST_WORDS
from ft.protocol.step import Ledger, Phase, StepConfig, StepMachine, Tail
from ft.recording import RecordingManager
from ft.rpc.clients import GroupClient
from ft.seam import BadInput, GroupEnded, Stopped, from_checkpoint, to_checkpoint
from tests.ft.groups import LIMIT_S, SLOT, Rank, Wrapped, finish, group_config, job, lose_the_sums
from tests.waiting import in_time


@pytest.mark.parametrize("kind", [ProcessGroupGloo, ProcessGroupBabyGloo])
def test_three_groups_train_as_one(kind: type[ProcessGroup]):
    """Three groups train as one, and a closed manager leaves no hooks on live parameters: they would keep twice the gradients."""
    with job(min_replicas=3) as made:
        ranks = [made.group(name, steps=5, together=3, group=kind)[0] for name in "abc"]
        for rank in finish(*ranks):
            assert {size for _, size, _ in rank.commits} == {3}
            assert rank.commits[-1][2] == (0, 1, 2)
        assigned = {slot for rank in ranks for _, slots in rank.computed for slot in slots}
        assert assigned == set(range(0, len(assigned) * SLOT, SLOT)), "which of them count, the weights tell"
    hooks = [parameter._post_accumulate_grad_hooks for rank in ranks for parameter in rank.model.parameters()]  # type: ignore[attr-defined]
    assert len(hooks) > 0 and not any(hooks)


@pytest.mark.parametrize("case", ["formed", "failed", "reassigned", "restored"])
def test_a_process_group_forms_while_a_survivor_computes(case: str):
    """A joiner costs the others no wait before the forward: the process group of two is formed only once "a" has computed. Where that fails
    what was computed is kept; where the slots are no longer its own, or its weights are replaced meanwhile, it is dropped, and enters no
    sum (Job.end compares the weights)."""
    has_computed, failures = threading.Event(), ["not formed"] if case == "failed" else []

    class LateGroup(ProcessGroupGloo):
        def wait_formed(self) -> None:
            if self.size() > 1:
                assert has_computed.wait(LIMIT_S), "it waits for the process group, and computes nothing meanwhile"
                if failures:
                    self.interrupt(failures.pop())
            super().wait_formed()

    class MistakenManager(Manager):
        def _effect_ahead(self) -> m.Compute | None:
            ahead = super()._effect_ahead()
            return ahead and replace(ahead, slots=(4000 * SLOT,))

    class RestoredManager(Manager):
        def __init__(self, *what: Any, **more: Any) -> None:
            super().__init__(*what, restore=lambda: self.load_state_dict(self.state_dict()), **more)

        def _wait_formed(self, quorum: m.QuorumResult) -> m.Configured:
            if len(quorum.members) == 2:
                self._effects.append(m.LoadCheckpoint(0))
            return super()._wait_formed(quorum)

    def computes(rank: Rank, slots: tuple[int, ...]) -> bool:
        if rank.members == 2:
            has_computed.set()
        return True

    make = {"reassigned": MistakenManager, "restored": RestoredManager}.get(case, Manager)
    with job(min_replicas=1) as made:
        a = made.group("a", steps=5, together=2, group=LateGroup, able=computes, make=make)[0]
        assert in_time(lambda: len(a.commits) > 2)
        finish(a, made.group("b", steps=5, together=2)[0])
        steps = [step for step, _ in a.computed]
        assert len(steps) - len(set(steps)) == (case in ("reassigned", "restored")), "no other step was computed twice"
        assert not failures and ((4000 * SLOT,) in [slots for _, slots in a.computed]) == (case == "reassigned")


def test_a_death_costs_the_others_no_step():
    """The victim dies in the middle of a step: what the others computed is kept, and reduced again without it."""
    died_at: list[int] = []

    def dies(rank: Rank, slots: tuple[int, ...]) -> bool:
        """Dies before its tail is sent: after all of it is sent, one survivor may have all sums while the other has to heal."""
        if len(rank.together_commits) == 4 and not died_at:
            died_at.append(rank.manager.step)
            rank.kill(a, b)
        return True

    with job(min_replicas=2) as made:
        a, b = (made.group(name, steps=20, together=3)[0] for name in "ab")
        victim = made.group("c", steps=20, together=3, able=dies)[0]
        finish(a, b)
        assert isinstance(victim.join().error, GroupEnded)
        assert died_at
        for rank in (a, b):
            steps, computed = [step for step, _, _ in rank.commits], [step for step, _ in rank.computed]
            assert steps == list(range(steps[0], steps[-1] + 1))
            assert len(computed) == len(set(computed)), "no step was computed twice"
            sizes = {step: size for step, size, _ in rank.commits}
            assert sizes[died_at[0]] == 3 and sizes[steps[-1]] == 2


def test_sums_that_one_survivor_has_and_the_other_not():
    """A collective is not atomic. A member without the sums takes the step from one that has them: its own gradients are in it."""
    broke_at: list[int] = []

    def breaks(rank: Rank, step: int) -> None:
        if len(rank.together_commits) == 3 and not broke_at:
            broke_at.append(step + 1)
            lose_the_sums(rank)

    with job(min_replicas=2) as made:
        a = made.group("a", steps=12, together=2)[0]
        b = made.group("b", steps=12, together=2, at=breaks)[0]
        assert a.join().error is None and b.join().error is None
        [at] = broke_at
        assert {step: who for step, _, who in a.commits}[at] == (0, 1), "both gave"
        assert at in a.weights and at not in b.weights and b.weights[at + 1].equal(a.weights[at + 1])
        for rank in (a, b):
            computed = [step for step, _ in rank.computed]
            assert len(computed) == len(set(computed)), "nothing was computed twice"


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_dead_groups_slot_is_computed_in_the_same_step(deterministic: bool, tmp_path: Path):
    """Each commit has all three slots, with kept gradients and added ones in one sum: job.check looks at the weights."""
    died_at: list[int] = []

    def dies(rank: Rank, slots: tuple[int, ...]) -> bool:
        """Dies with its gradients computed and not yet sent."""
        if len(rank.together_commits) == 4:
            died_at.append(rank.manager.step)
            rank.kill(a, b)
        return True

    options = {"slots_per_step": 3, "deterministic_reduce": deterministic}
    with job(min_replicas=2) as made:
        a, b = (
            made.group(name, steps=12, together=3, options=options, make=partial(RecordingManager, tmp_path / name))[0]
            for name in "ab"
        )
        victim = made.group("c", steps=12, together=3, able=dies, options=options)[0]
        finish(a, b)
        assert isinstance(victim.join().error, GroupEnded)
        for rank in (a, b):
            ledger = from_checkpoint(rank.manager.state_dict())["ledger"]
            assert ledger["holes"] == [] and ledger["position"] == rank.manager.step * 3 * SLOT
        computed = [slot for rank in (a, b) for step, slots in rank.computed for slot in slots if step == died_at[0]]
        first = 3 * died_at[0] * SLOT
        assert sorted(computed) == [first, first + SLOT, first + 2 * SLOT], "each of them once"
    event_logs = [(tmp_path / name / "event_log.0.jsonl").read_text() for name in "ab"]
    events = {json.loads(line)["event"] for event_log in event_logs for line in event_log.splitlines()}
    assert "extended" in events and "refused" not in events, "nothing was thrown away"


def test_a_late_word_on_a_generation_leaves_the_next_alone():
    """The notice's thread may be anywhere between the machine's word and the group when the trainer's has formed the next one."""
    quorums: list[int] = []

    def late(rank: Rank, step: int) -> None:
        if rank.manager.quorum and rank.manager.quorum.quorum_id not in quorums:
            quorums.append(rank.manager.quorum.quorum_id)
            rank.manager.process_group.interrupt("b was lost", min(quorums[0], quorums[-1] - 1))
        if step == 2 and not newcomer:
            newcomer.extend(made.group("b", steps=4, together=2))

    newcomer: list[Rank] = []
    with job(min_replicas=1) as made:
        a = made.group("a", steps=4, together=2, at=late)[0]
        assert a.join().error is None and newcomer[0].join().error is None
        assert len(quorums) >= 2 and not a.seen_of(m.AbandonGeneration)


@pytest.mark.parametrize("size", [1, 2])
def test_who_has_been_sent_the_state_is_dealt_in_the_next_step(size: int):
    """The sender's word goes with the sums of the step of the heal; the joiner's own would go with those of the next step."""

    def comes(rank: Rank, step: int) -> None:
        if step == 4 and rank.group_rank == 0:
            newcomers.extend(made.group("b", steps=10, together=2, size=size))

    def waits(rank: Rank, slots: tuple[int, ...]) -> bool:
        part = rank.manager.quorum
        while part and part.recover_dst_replica_ranks and not rank.manager.healer.transport.is_fully_sent:
            assert not rank.manager.client.gone.is_set()
            time.sleep(0.001)
        return True

    newcomers: list[Rank] = []
    with job(min_replicas=1) as made:
        ranks = made.group("a", steps=10, together=2, size=size, at=comes, able=waits)
        assert [rank.join().error for rank in ranks] == [None] * size
        assert [rank.join().error for rank in newcomers] == [None] * size
        for rank in newcomers:
            assert rank.seen_of(m.LoadState) and min(rank.weights) > 4
        for rank in ranks:
            gave = [len(who) for _, members, who in rank.commits if members == 2]
            assert gave[:2] == [1, 2], "zeros once, and no step more"


class WithoutFingerprint(GroupClient):
    """A client that sends no settings, so that its lighthouse compares nothing, as if it had forgotten all."""

    def quorum(self, call: m.RankCall, timeout_s: float) -> m.QuorumResult | m.RestoreRequired | m.Released:
        return super().quorum(replace(call, fingerprint=()), timeout_s)


@pytest.mark.parametrize("kind", [ProcessGroupGloo, ProcessGroupBabyGloo])
def test_a_stranger_reaches_no_sum_and_costs_one_forming(kind: type[ProcessGroup]):
    """A newcomer with other settings ends with exit code 2, even if the lighthouse has forgotten the job's."""
    settings, others = (
        partial(Manager, connect=WithoutFingerprint, fingerprint=(("optimizer.lr", lr), ("data", "text")))
        for lr in "12"
    )
    trained, refused, last = threading.Event(), threading.Event(), dict[str, int]()

    def ends(rank: Rank, step: int) -> None:
        """Ends all ranks at one step, for nobody is further than the next one."""
        if len(rank.together_commits) == 3:
            trained.set()
        if refused.is_set():
            rank.steps = last.setdefault("step", step + 3) - rank.together_commits[0] + 1

    with job(min_replicas=2) as made:
        together = {"steps": 1 << 30, "together": 2, "make": settings, "group": kind, "at": ends}
        ranks = [made.group(name, **together)[0] for name in "ab"]
        assert trained.wait(LIMIT_S)
        stranger = made.group("c", steps=1, make=others, group=kind)[0].join()
        refused.set()
        assert isinstance(stranger.error, BadInput), stranger.error
        assert "replica rank 2 differs from the job in optimizer.lr" in str(stranger.error)
        assert not stranger.seen_of(m.LaunchRemaining)
        for rank in finish(*ranks):
            assert {size for _, size, _ in rank.commits} == {2}
            assert len(rank.seen_of(m.AbandonGeneration)) == 1


def test_a_former_member_that_is_a_stranger_by_now_waits_and_holds_nobody_up(caplog: pytest.LogCaptureFixture):
    settings = {name: [("optimizer.lr", "1")] for name in "abc"}

    def changes(rank: Rank, step: int) -> None:
        if rank.name == "c" and len(rank.together_commits) == 3:
            settings["c"][:] = [("optimizer.lr", "2")]
            rank.manager.process_group.interrupt("its sockets break")

    with job(min_replicas=2, join_timeout_ms=30_000) as made:
        ranks = [
            made.group(
                name,
                steps=20,
                together=3,
                make=partial(Manager, connect=WithoutFingerprint, fingerprint=settings[name]),
                at=changes,
            )[0]
            for name in "abc"
        ]
        stranger = ranks.pop()
        for rank in finish(*ranks):
            assert len(rank.seen_of(m.AbandonGeneration)) == 2  # the broken one, and that in which they met
        assert stranger.thread.is_alive() and stranger.manager.machine.phase is Phase.ASKING
        assert "replica rank 2 differs from the job in optimizer.lr: this group, replica rank 2, waits" in caplog.text
        # Of the two the one that sees it first reports it, and its report may end the other's comparison: one is enough.
        assert caplog.text.count(
            "replica rank 2 differs from the job in optimizer.lr: left out of the next quorum"
        ) in (1, 2)


def test_gradients_that_cannot_be_summed_are_an_error_each_time_and_no_hang():
    """A caller that continues all the same starts the step again, in another generation."""

    def fails_once(rank: Rank, step: int) -> None:
        if step == 2:
            launch, rank.manager.gradients.launch_remaining = rank.manager.gradients.launch_remaining, cannot  # type: ignore[method-assign]
            for _ in range(2):
                with pytest.raises(RuntimeError, match="cannot be reduced"):
                    rank.train_step()
            rank.manager.gradients.launch_remaining = launch  # type: ignore[method-assign]

    def cannot(*args: object, **more: object) -> None:
        raise RuntimeError("a gradient that cannot be reduced")

    with job(min_replicas=1) as made:
        rank = made.group("a", steps=4, at=fails_once)[0]
        assert rank.join().error is None
        assert [step for step, _, _ in rank.commits] == [1, 2, 3, 4]
        assert [slots for _, slots in rank.computed] == [(0,), (SLOT,), (2 * SLOT,), (3 * SLOT,)], "each but once"


def test_ranks_of_a_group_take_the_same_way():
    """Two groups of two ranks; one rank of one group loses its server's process, so the whole group is gone."""

    def dies(rank: Rank, step: int) -> None:
        if len(rank.together_commits) == 3 and rank.group_rank == 0:
            rank.kill()

    with job(min_replicas=1) as made:
        a = made.group("a", size=2, steps=20, together=2)
        b = made.group("b", size=2, steps=20, together=2, at=dies)
        for rank in finish(*a):
            steps = [step for step, _, _ in rank.commits]
            assert steps == list(range(steps[0], steps[-1] + 1)) and rank.commits[-1][1] == 1
        for rank in b:
            assert isinstance(rank.join().error, GroupEnded)


@pytest.mark.parametrize("keep", [True, False])
def test_a_group_that_cannot_gives_zeros_and_its_slot_is_dealt_again(keep: bool):
    """Nothing is rebuilt: the step holds without the group. Without kept gradients the other group computes its own once more."""
    unable: list[int] = []

    def able(rank: Rank, slots: tuple[int, ...]) -> bool:
        if len(rank.together_commits) == 3 and not unable:
            unable.extend(slots)
        return not unable or slots != tuple(unable)

    with job(min_replicas=1) as made:
        options = {"keep_gradients": keep}
        a = made.group("a", steps=20, together=2, options=options)[0]
        b = made.group("b", steps=20, together=2, able=able, options=options)[0]
        finish(a, b)
        [slot] = unable
        step = next(step for step, slots in b.computed if slots == (slot,))
        [who] = [who for committed, _, who in a.commits if committed == step + 1]
        assert who == (0,), "the step held without it"
        again = [step for rank in (a, b) for step, slots in rank.computed if slot in slots]
        assert len(again) == 2, "and somebody computed that slot later"
        assert [at for at, _ in a.computed].count(step) == 2 - keep


def test_a_recorded_run_is_the_machines_own():
    """The Manager has no rule: its events, replayed through a fresh machine, give the same effects."""
    with job(min_replicas=1) as made:
        a, b = (made.group(name, steps=6)[0] for name in "ab")
        for rank in (a, b):
            rank.join()
            config = StepConfig()
            replayed = StepMachine(config, Ledger(SLOT))
            for now_s, event, out in rank.seen:
                assert replayed.handle(event, now_s) == out


def test_who_leaves_says_so_in_the_step_before():
    asked_at: list[int] = []

    def leaves(rank: Rank, step: int) -> None:
        if len(rank.together_commits) == 3 and not asked_at:
            asked_at.append(step)
            rank.manager.leave()

    with job(min_replicas=1) as made:
        a = made.group("a", steps=20, together=2)[0]
        b = made.group("b", steps=20, together=2, at=leaves)[0]
        assert a.join().error is None and b.join().error is None
        assert asked_at and b.manager.may_exit and b.manager.step == asked_at[0] + 1
        computed = [step for step, _ in a.computed]
        assert len(computed) == len(set(computed)), "nothing failed, so nothing was computed twice"
        assert a.commits[-1][1] == 1
        assert not any(isinstance(event, m.ReduceFailed) for _, event, _ in a.seen)


def test_who_finds_the_job_finished_leaves_as_who_finished_it(caplog: pytest.LogCaptureFixture):
    """A group that restored all of a finished job loses nothing by its end, and sends a clean leave to the lighthouse."""
    caplog.set_level("INFO", "pharos")
    state = {"step": 5, "commit_id": "c", "commit_quorum_id": 3, "ledger": {"position": 5 * SLOT}}
    with job(min_replicas=1) as made:
        manager = Manager(
            ProcessGroupGloo(),
            group_config("a", made.lighthouse),
            ManagerOptions(slot_size=SLOT, dies_with_group=False),
            restore=lambda: manager.load_state_dict(to_checkpoint(state)),
        )
        with closing(manager):
            manager.attach([torch.nn.Linear(2, 2)])
            assert manager.begin_step(until=5).steps_before == 5 and manager.may_exit
    assert [("clean=True" in line, "'done'" in line) for line in caplog.messages if line.startswith("Leave(")] == [
        (True, True)
    ]


@pytest.mark.parametrize("touched", [False, True])
def test_a_partly_healed_state_is_not_taken_for_the_initial_one(touched: bool):
    """The sources are dead and no checkpoint exists: two groups must not call different weights step 0."""
    options = ManagerOptions(slot_size=SLOT, dies_with_group=False)
    with job(min_replicas=1) as made:
        manager = Manager(ProcessGroupGloo(), group_config("a", made.lighthouse), options, restore=lambda: None)
        manager.healer.touched = touched
        with closing(manager), pytest.raises(GroupEnded, match="no longer the initial") if touched else nullcontext():
            manager.attach([torch.nn.Linear(2, 2)])
            assert manager.begin_step().steps_before == 0


def test_trained_weights_are_not_taken_for_the_initial_ones():
    """A torchft program loads its checkpoint before its first quorum; here the order to load one arrives later."""

    class Told(Manager):
        def tell(self) -> None:
            self._effects.append(m.LoadCheckpoint(9))

    def later(rank: Rank, step: int) -> None:
        if step == 3:
            rank.manager.tell()  # type: ignore[attr-defined]

    with job(min_replicas=1) as made:
        error = made.group("a", steps=5, make=Told, at=later)[0].join().error
        assert isinstance(error, GroupEnded) and "no longer the initial" in str(error)


def test_a_generation_that_does_not_end_holds_up_no_close():
    """A thread of gloo's that nobody can wake, say: it goes with the process, which is not to wait for it."""
    closed, ends = threading.Event(), list[bool]()

    def stuck(rank: Rank, step: int) -> None:
        if step == 1:
            rank.manager.process_group.reaper.take(lambda: ends.append(closed.wait(LIMIT_S / 3)), "stuck")

    with job(min_replicas=1) as made:
        a = made.group("a", steps=3, at=stuck)[0]
        assert a.join().error is None  # its last word is the manager's close
        closed.set()
        assert a.manager.process_group.reaper.wait(LIMIT_S) and ends == [True]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("configure", MustExit("3 generations have not ended")),
        ("configure", ProcessGroupError("the fork server dies")),
        ("prepare", ProcessGroupError("the fork server dies")),
    ],
)
def test_a_rank_that_cannot_form_a_further_group_ends_to_be_restarted(call: str, error: Exception):
    def fails(self: ProcessGroupGloo, *what: Any, **more: Any) -> None:
        raise error

    with job(min_replicas=1) as made:
        found = made.group("a", steps=1, group=type("Full", (ProcessGroupGloo,), {call: fails}))[0].join().error
        assert isinstance(found, GroupEnded) and str(found) == str(error)


# ------------------------------------------------------------------------------------------------ weights that went wrong


def test_an_outcome_that_cannot_be_read_in_a_thread_is_the_trainers_error():
    """A vote on a heal is cast in a thread of its own; the trainer would wait for its outcome for ever."""

    class Garbled(GroupClient):
        def outcome(self, vote: m.Vote) -> m.Outcome:
            if vote.kind == "healed":
                raise ValueError("verdict = 'perhaps'")
            return super().outcome(vote)

    others: list[Rank] = []

    def comes(rank: Rank, step: int) -> None:
        if step == 2 and not others:
            others.append(made.group("b", steps=1 << 30, make=partial(Manager, connect=Garbled))[0])
        if others and others[0].error:
            rank.manager.leave()

    with job(min_replicas=1) as made:
        assert made.group("a", steps=1 << 30, at=comes)[0].join().error is None
        assert str(others[0].error) == "verdict = 'perhaps'"
        made.groups.remove(others[0])


def test_a_restarted_group_awaits_the_end_of_its_former_life():
    """A killed trainer that cannot die, and with it its server, keeps the name for heartbeat_timeout_s, as of a heartbeat."""
    waits_s: list[float] = []

    class Notes(GroupClient):
        def ask_quorum(self, call: m.RankCall, within_s: float | None, name_free_s: float) -> m.Event | None:
            waits_s.append(name_free_s)
            return super().ask_quorum(call, within_s, name_free_s)

    with job(min_replicas=1) as made:
        [rank] = finish(made.group("a", steps=1, make=partial(Manager, connect=Notes))[0])
    assert waits_s and min(waits_s) > rank.times.heartbeat_timeout_s + 2 * m.MAX_BEAT_S


def flips_a_bit(rank: Rank, step: int) -> None:
    """Flips a bit in the last weight of group a's rank 0, after step 3."""
    if step == 3 and (rank.name, rank.group_rank) == ("a", 0) and 4 not in rank.weights:
        list(rank.model.parameters())[-1].data.view(torch.int32)[-1] ^= 1


def replaces_a_buffer(rank: Rank, step: int) -> None:
    """A persistent buffer of each model; in that of group a's rank 0, after step 3, a forward has put a tensor of its own."""
    if not [*rank.model.buffers()]:
        rank.model.register_buffer("seen", torch.zeros(3))
    if step == 3 and (rank.name, rank.group_rank) == ("a", 0) and 4 not in rank.weights:
        rank.model.seen = torch.ones(3)


COMPARED: dict[str, Any] = {"options": {"digest_interval": 2}, "at": flips_a_bit}


def copies_in(rank: Rank, *, members: int, interval: int) -> list[set[str]]:
    """Returns, for each comparison, the groups that reported themselves as no witnesses."""
    reduced = [event for _, event, _ in rank.seen if isinstance(event, m.Reduced) and (event.step + 1) % interval == 0]
    tails = [Tail.of(event.tail, DIGEST_WORDS * members).digests for event in reduced]
    names = [m.name_of(member) for member in rank.manager.quorum.members]
    return [{name for place, name in enumerate(names) if min(compare.member_digest(tail, place)) < 0} for tail in tails]


@pytest.mark.parametrize("goes_wrong", [flips_a_bit, replaces_a_buffer])
def test_whose_weights_went_wrong_is_named_and_heals(
    goes_wrong: Callable[[Rank, int], None], caplog: pytest.LogCaptureFixture
):
    """One rank of each group detects it, and all ranks of the odd group heal."""
    shown: list[tuple[str, int, str]] = []  # on the lighthouse's page
    progress_of_heals: list[tuple[int, int]] = []

    class Shown(GroupClient):
        def show_event(self, lane: str, step: int, text: str) -> None:
            shown.append((lane, step, text))

    class Followed(Wrapped):
        def fetch(self, *what: Any, progress: Any, **more: Any) -> dict[str, Any]:
            def follow(done_bytes: int, total_bytes: int) -> None:
                progress_of_heals.append((done_bytes, total_bytes))
                progress(done_bytes, total_bytes)

            return dict(self.inner.fetch(*what, progress=follow, **more))

    def make(*what: Any, **more: Any) -> Manager:
        manager = Manager(*what, connect=Shown, **more)
        manager.healer.transport = Followed(manager.healer.transport)  # type: ignore[assignment]
        return manager

    wrote: dict[tuple[str, int, int], bool] = {}

    def at(rank: Rank, step: int) -> None:
        wrote.setdefault((rank.name, rank.group_rank, step), rank.manager.writer_quorum)
        goes_wrong(rank, step)

    with job(min_replicas=3) as made, caplog.at_level("ERROR", "pharos.manager"):
        a, b, c = (
            made.group(name, size=2, steps=10, together=3, **{**COMPARED, "at": at, "make": make}) for name in "abc"
        )
        for rank in finish(*a, *b, *c):
            assert {size for _, size, _ in rank.commits} == {3}, "nobody went"
            told = [m.name_of(odd) for effect in rank.seen_of(m.ReportWeightsDiffer) for odd in effect.replica_ids]
            assert told == (["a"] if rank.group_rank == 0 else [])
            assert bool(rank.seen_of(m.LoadState)) == (rank.name == "a")
            copies = copies_in(rank, members=3, interval=2)
            assert copies[0] == copies[-1] == set() and [said for said in copies if said] == [{"a"}]
            wrong = [wrote["a", rank.group_rank, step] for step in (3, 4)]
            assert wrong[0] and not wrong[1], "no checkpoint of wrong weights"
            assert not any(buffer.any() for buffer in rank.model.buffers())
        del a[0].weights[4]  # made of the wrong ones; what came after is compared with the others' by the job
        text = "after step 3 the weights of rank 0 of group a differ from those of 2 other groups"
        assert caplog.messages.count(text) == shown.count(("corruption", 3, text)) == 3
        assert progress_of_heals and all(0 < done <= total for done, total in progress_of_heals)


@pytest.mark.parametrize("goes_wrong", [flips_a_bit, replaces_a_buffer])
def test_of_two_groups_nobody_can_tell_and_both_stop(goes_wrong: Callable[[Rank, int], None]):
    """The slower one, too: its sums are complete when the other has stopped and gone; what it hears of that does not end its wait."""

    def slow(rank: Rank, step: int) -> None:
        gradients, machine = rank.manager.gradients, rank.manager.machine
        wait = gradients.wait

        def behind() -> tuple[float, ...]:
            gradients.wait = wait  # type: ignore[method-assign]
            ranks[0].join()
            assert in_time(lambda: "stopped: after step 3" in machine.reason), machine.reason
            assert not machine.abort_reason, "else it would give up what it still waits for"
            return wait()

        goes_wrong(rank, step)
        if step == 3:
            gradients.wait = behind  # type: ignore[method-assign]

    with job(min_replicas=2) as made:
        ranks: list[Rank] = []
        ranks += made.group("a", steps=10, together=2, **{**COMPARED, "at": goes_wrong})
        ranks += made.group("b", steps=10, together=2, **{**COMPARED, "at": slow})
        for rank in ranks:
            error = rank.join().error
            assert isinstance(error, Stopped) and "no majority" in str(error)
            with pytest.raises(Stopped, match="no majority"):  # and it waits for nothing
                rank.manager.begin_step()
            assert max(rank.weights) == 3, "the step that found it is not committed"


def test_whose_weights_went_wrong_may_leave_and_then_goes_back_to_no_checkpoint():
    """The wrong weight makes its loss a spike in the step that compares them."""

    def at(rank: Rank, step: int) -> None:
        flips_a_bit(rank, step)
        if rank.name == "a" and step == 4:
            rank.manager.rewind("step 4 was a spike", partial(pytest.fail, "it has ended"))

    with job(min_replicas=3) as made:
        options = {"digest_interval": 2, "leave_if_divergent": True}
        a, b, c = (made.group(name, steps=10, together=3, at=at, options=options)[0] for name in "abc")
        error = a.join().error
        assert isinstance(error, Stopped) and "on_corruption is leave" in str(error)
        del a.weights[4]  # made of the wrong ones
        b.kill()  # they are too few
        c.kill()


def test_a_writer_that_went_wrong_in_the_last_step_is_replaced():
    """A divergent writer is replaced: otherwise every group would wait for ever for another one to save the step."""

    class Last(Rank):
        def train(self) -> None:
            super().train()
            self.wrote, self.broken = self.manager.writer_quorum, self.manager.needs_new_quorum
            self.manager.regroup(4)
            self.writes = self.manager.writer_quorum

    with job(min_replicas=3) as made:
        a, b, c = (
            made.start(Last(name, 0, 1, made.lighthouse, HashStore(), steps=4, together=3, **COMPARED))
            for name in "abc"
        )
        finish(b, c)
        assert b.broken and c.broken, "as where the writer has died"
        assert not b.wrote and b.writes and not c.writes
        a.kill()  # it heals from them, and they are gone
        a.join()
        del a.weights[4]


def test_a_second_writer_that_dies_after_the_last_step_is_replaced_too():
    """The step that was begun with the first new quorum is dropped, and not taken for one to which no group can contribute."""

    class Last(Rank):
        def train(self) -> None:
            super().train()
            while self.manager.writer_quorum is None:
                assert in_time(lambda: self.manager.needs_new_quorum)
                self.manager.regroup(4)
            self.kill(*(made.groups if self.name == "a" else []))

    with job(min_replicas=1) as made:
        for name in "abc":
            made.start(Last(name, 0, 1, made.lighthouse, HashStore(), steps=4, together=3))
        for rank in made.groups:
            assert rank.join().error is None and max(rank.weights) == max(made.groups[0].weights)


# ------------------------------------------------------------------------------------------------ where the time goes


def test_what_happens_is_told_and_the_time_accounted():
    """A group comes in late, and dies; gradients are not kept, so the others lose what they had computed."""

    def dies(rank: Rank, step: int) -> None:
        if len(rank.together_commits) == 3:
            rank.kill()

    def waits(rank: Rank, step: int) -> None:
        if step == 2 and not late:
            late.extend(made.group("b", steps=20, together=2, options=options, at=dies))

    late: list[Rank] = []
    options = {"keep_gradients": False}
    with job(min_replicas=1) as made:
        a = made.group("a", steps=20, together=2, options=options, at=waits)[0]
        assert a.join().error is None and isinstance(late[0].join().error, GroupEnded)
        b = late[0]
        assert a.told[0] == ("quorum", 0, {"quorum_id": 1, "groups": ["a"], "healing": []})
        assert [event for event, _, _ in b.told[:3]] == ["quorum", "heal", "healed"]
        assert b.told[0][2]["healing"] == ["b"] and b.told[1][2] == {"sources": ["a"]} and b.told[2][2]["bytes"] > 0
        assert [event for event, _, _ in a.told if event not in ("quorum", "heal")] == ["failed", "lost work"]
        assert {"quorum", "rebuild", "waiting", "reduce", "compute", "lost"} <= a.progress.seconds.keys()
        assert {"quorum", "rebuild", "heal"} <= b.progress.seconds.keys() and a.progress.seconds["lost"] > 0
        assert min(a.progress.seconds.values()) >= 0 and sum(a.progress.seconds.values()) <= a.progress.total()
        assert 0 < a.progress.goodput_s <= a.progress.spent("compute", "reduce")
