"""A whole job of pure machines in one thread: a lighthouse, groups of ranks, and a network that loses and delays nothing.

It does what drivers have to do, at its shortest: the machines have to fit together. Faults in the network are tests/simulator's.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from typing import Any

from ft.protocol import messages as m
from ft.protocol.group import Group, GroupConfig
from ft.protocol.lighthouse import Lighthouse, LighthouseConfig
from ft.protocol.step import Ledger, Phase, Step, StepConfig


class Rank:
    def __init__(self, group: GroupOfRanks, group_rank: int, *, slots_per_step: int = 0, **config: Any) -> None:
        self.group, self.group_rank = group, group_rank
        self.machine = Step(StepConfig(group_rank=group_rank, **config), Ledger(8, slots_per_step))
        self.weights = "initial"
        self.sums: m.Reduced | None = None
        self.held: dict[int, m.Reduced] = {}
        self.fetched: tuple[dict[str, Any], str] | None = None
        self.commits: list[m.CommitStep] = []
        self.computed: list[tuple[int, ...]] = []
        self.stopped = ""


class GroupOfRanks:
    def __init__(self, replica_id: str, size: int, now_s: float, **config: Any) -> None:
        self.machine = Group(GroupConfig(replica_id, size, f"http://{replica_id}", f"store-{replica_id}"), now_s)
        self.ranks = [Rank(self, rank, **config) for rank in range(size)]


class Job:
    """`steps(n)` runs until every live group has committed step n, or nothing moves any more."""

    def __init__(self, names: str = "abc", *, size: int = 1, min_replicas: int = 1, **config: Any) -> None:
        self.now_s, self.size, self.config = 0.0, size, config
        self.lighthouse = Lighthouse(LighthouseConfig(min_replicas=min_replicas), 0.0, epoch="job", fresh=True)
        self.groups: dict[str, GroupOfRanks] = {}
        self.queue: deque[Any] = deque()
        self.launched: dict[Any, dict[int, tuple[Rank, m.LaunchTail]]] = {}
        self.offers: dict[Any, tuple[dict[str, Any], str]] = {}
        self.heals: list[tuple[Rank, m.Part]] = []
        self.heals_wait = False
        self.useless: set[int] = set()  # slots whose loss is not a number
        self.limit = 0
        self.notices: list[m.Notice] = []
        self.asked: Counter[str] = Counter()
        self.loads: Counter[str] = Counter()  # of checkpoints
        self.starts = 0
        for name in names:
            self.start(name)

    # ---- what a test does

    def start(self, name: str) -> GroupOfRanks:
        self.starts += 1
        group = self.groups[name] = GroupOfRanks(f"{name}:{self.starts}", self.size, self.now_s, **self.config)
        self._lighthouse(m.StreamOpened(group.machine.replica_id))
        for rank in group.ranks:
            self._group(group, m.RankStream(rank.group_rank, True))
            self.queue.append((self.rank_event, rank, m.Begin()))
        return group

    def kill(self, name: str) -> None:
        group = self.groups.pop(name)
        self.queue = deque(item for item in self.queue if group not in (item[1], getattr(item[1], "group", None)))
        self.heals = [(rank, part) for rank, part in self.heals if rank.group is not group]
        self._lighthouse(m.StreamClosed(group.machine.replica_id))

    def steps(self, limit: int) -> None:
        self.limit = limit
        for rank in self.ranks():
            self.queue.append((self.rank_event, rank, m.Begin()))
        self.settle()

    def settle(self) -> None:
        """Until nothing is left to do without time passing."""
        for _ in range(100_000):
            if self.queue:
                do, *arguments = self.queue.popleft()
                do(*arguments)
            elif self.heals and not self.heals_wait:
                self.heal()
            else:
                return
        raise AssertionError("it goes round and round")

    def heal(self) -> None:
        rank, part = self.heals.pop(0)
        rank.fetched = self.offers[part.quorum_id, part.sources[0].replica_rank, rank.group_rank]
        self.rank_event(rank, m.HealEnded(part.quorum_id, True, rank.fetched[0]))

    def tick(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.now_s += 0.1
            for group in self.groups.values():
                self._lighthouse(m.Beat(group.machine.replica_id))
                self._group(group, m.BeatAnswered(self.now_s))
                for rank in group.ranks:
                    self.rank_event(rank, m.Tick())
            self._lighthouse(m.Tick())
            self.settle()

    def ranks(self) -> list[Rank]:
        return [rank for group in self.groups.values() for rank in group.ranks]

    def check(self) -> None:
        """Equal commit ids, equal weights; within a group all the same."""
        names: dict[str, str] = {}
        for rank in self.ranks():
            if not rank.machine.void:
                assert names.setdefault(rank.machine.commit_id, rank.weights) == rank.weights
        for group in self.groups.values():
            assert len({(rank.machine.commit_id, rank.weights) for rank in group.ranks}) == 1

    # ---- drivers

    def _lighthouse(self, event: m.Event) -> None:
        for effect in self.lighthouse.handle(event, self.now_s).effects:
            if isinstance(effect, m.Answer):
                for group in self._groups(effect.replica_ids):
                    self.queue.append((self._group, group, m.LighthouseAnswered(effect.quorum, m.Times())))
            elif isinstance(effect, m.MustRestore):
                for group in self._groups(effect.replica_ids):
                    self.queue.append((self._group, group, m.LighthouseWantsRestore(effect.settled)))
            elif isinstance(effect, m.Refuse):
                for group in self._groups((effect.replica_id,)):
                    refusal = m.LighthouseRefused(effect.replica_id, effect.code, effect.reason)
                    self.queue.append((self._group, group, refusal))
            elif isinstance(effect, m.Notify):
                self.notices.append(effect.notice)
                for group in self._groups(effect.replica_ids):
                    self.queue.append((self._group, group, effect.notice))

    def _groups(self, ids: tuple[str, ...]) -> list[GroupOfRanks]:
        return [group for group in self.groups.values() if group.machine.replica_id in ids]

    def _group(self, group: GroupOfRanks, event: m.Event) -> None:
        for effect in group.machine.handle(event, self.now_s).effects:
            rank = group.ranks[effect.group_rank] if hasattr(effect, "group_rank") else None
            if isinstance(effect, m.CallLighthouse):
                self.asked[effect.call.member.name] += 1
                self.queue.append((self._lighthouse, effect.call))
            elif isinstance(effect, m.OpenStream):
                self.queue.append((self._lighthouse, m.StreamOpened(effect.replica_id, group.machine.quorum)))
            elif isinstance(effect, m.CloseStream):
                self.queue.append((self._lighthouse, m.StreamClosed(m.process_of(group.machine.replica_id))))
            elif isinstance(effect, m.EndGroup):
                raise AssertionError(effect.reason)
            elif isinstance(effect, m.AnswerRank):
                self.queue.append((self.rank_event, rank, effect.answer))
            elif isinstance(effect, m.AnswerVote):
                self.queue.append((self.rank_event, rank, effect.outcome))
            elif isinstance(effect, m.NotifyRank):
                self.queue.append((self.rank_event, rank, effect.notice))
            elif isinstance(effect, m.FailRank):
                raise AssertionError(effect.reason)

    def rank_event(self, rank: Rank, event: m.Event) -> None:
        if isinstance(event, m.Begin) and rank.machine.step >= self.limit:
            return
        if isinstance(event, m.Reduced):
            rank.sums = event
        for effect in rank.machine.handle(event, self.now_s).effects:
            getattr(self, "_do_" + type(effect).__name__)(rank, effect)

    def _do_AskQuorum(self, rank: Rank, effect: m.AskQuorum) -> None:  # noqa: N802 (named after the effect)
        self.queue.append((self._group, rank.group, effect.call))

    def _do_CastVote(self, rank: Rank, effect: m.CastVote) -> None:  # noqa: N802
        self.queue.append((self._group, rank.group, effect.vote))

    def _do_Configure(self, rank: Rank, effect: m.Configure) -> None:  # noqa: N802
        part = effect.part
        if part.recover_dst_replica_ranks:
            offer = (rank.machine.state_dict(), rank.weights)
            self.offers[part.quorum_id, part.replica_rank, rank.group_rank] = offer
        if part.heal:
            self.heals.append((rank, part))
        self.queue.append((self.rank_event, rank, m.Configured(part.quorum_id, True)))

    def _do_Compute(self, rank: Rank, effect: m.Compute) -> None:  # noqa: N802
        rank.computed.append(effect.slots)
        able = not self.useless & set(effect.slots)
        computed = m.Computed(tuple(10.0 for _ in effect.slots), 25.0, able)
        self.queue.append((self.rank_event, rank, computed))

    def _do_LaunchTail(self, rank: Rank, effect: m.LaunchTail) -> None:  # noqa: N802
        key = (effect.quorum_id, effect.step, effect.attempt, rank.group_rank)
        column = self.launched.setdefault(key, {})
        assert rank.machine.part is not None
        column[rank.machine.part.replica_rank] = (rank, effect)
        if len(column) == len(rank.machine.part.members):
            widths = {len(launch.tail) for _, launch in column.values()}
            assert len(widths) == 1, f"tails of different lengths: {widths}"
            total = tuple(sum(values) for values in zip(*(launch.tail for _, launch in column.values()), strict=True))
            for other, launch in column.values():
                reduced = m.Reduced(launch.quorum_id, launch.attempt, launch.step, total)
                self.queue.append((self.rank_event, other, reduced))

    def _do_InterruptCollectives(self, rank: Rank, effect: m.InterruptCollectives) -> None:  # noqa: N802
        step = rank.machine
        failed = m.ReduceFailed(effect.quorum_id, step.at[1], step.at[2], effect.reason)
        self.queue.append((self.rank_event, rank, failed))

    def _do_CommitStep(self, rank: Rank, effect: m.CommitStep) -> None:  # noqa: N802
        sums = rank.held.pop(effect.step) if effect.held else rank.sums
        assert sums is not None
        rank.weights = hashlib.sha256(f"{rank.weights} {sums.tail[:-1]}".encode()).hexdigest()
        rank.commits.append(effect)
        self.queue.append((self.rank_event, rank, m.Begin()))

    def _do_HoldSums(self, rank: Rank, effect: m.HoldSums) -> None:  # noqa: N802
        assert rank.sums is not None
        rank.held[effect.step] = rank.sums

    def _do_DropHeld(self, rank: Rank, effect: m.DropHeld) -> None:  # noqa: N802
        rank.held, rank.fetched = {}, None

    def _do_LoadState(self, rank: Rank, effect: m.LoadState) -> None:  # noqa: N802
        assert rank.fetched is not None
        rank.weights = rank.fetched[1]

    def _do_Stop(self, rank: Rank, effect: m.Stop) -> None:  # noqa: N802
        rank.stopped = effect.reason

    def _do_LoadCheckpoint(self, rank: Rank, effect: m.LoadCheckpoint) -> None:  # noqa: N802
        rank.weights = "initial"
        self.loads[m.name_of(rank.group.machine.replica_id)] += 1
        self.queue.append((self.rank_event, rank, m.Restored(None)))

    def _do_GiveUp(self, rank: Rank, effect: m.GiveUp) -> None:  # noqa: N802
        replica_id = rank.group.machine.replica_id
        self._lighthouse(m.Leave(replica_id, clean=False, reason=effect.reason))
        self.queue.append((self._group, rank.group, m.LighthouseRefused(replica_id, "LOST", effect.reason)))

    def _nothing(self, rank: Rank, effect: m.Effect) -> None:
        pass

    _do_AbandonGeneration = _do_DropGradients = _do_Fence = _do_Settled = _nothing  # noqa: N815


def phases(job: Job) -> set[Phase]:
    return {rank.machine.phase for rank in job.ranks()}
