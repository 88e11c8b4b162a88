"""Checks the invariants with knowledge of the whole cluster: each check runs at the event that could violate it, and raises Violation.

The history of the job is a tree of commits. Settled steps are its trunk; an unsettled step may have two versions until a quorum has chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ft.protocol import messages as m

if TYPE_CHECKING:
    from tests.simulator.cluster import Cluster
    from tests.simulator.ranks import Given, RankNode, Snapshot, Sums
    from tests.simulator.servers import GroupNode


class Violation(AssertionError):
    """An invariant is violated."""


def require(holds: bool, *words: Any) -> None:
    """Raises Violation unless `holds`. Frequent checks raise it behind an `if`, so that the message is built only for a violation."""
    if not holds:
        raise Violation(" ".join(str(word) for word in words))


@dataclass(slots=True, eq=False)
class Committed:
    """One version of one step."""

    commit_id: str
    step: int
    quorum_id: int
    parent: Committed | None
    slots: tuple[int, ...]
    era: int  # grows when the job goes back to a checkpoint: commits after the old state no longer count
    weights: dict[int, int] = field(default_factory=dict)  # by group_rank: each holds another part of the model
    children: list[Committed] = field(default_factory=list)
    applied: bool = True  # False: a spike, whose slots are skipped
    back_to: Committed | None = None  # of the first state of a branch, whose `parent` is the spike: the checkpoint
    begins_branch: bool = False

    def chain(self) -> Iterator[Committed]:
        """Yields this step and those that its weights come from, newest first."""
        at: Committed | None = self
        while at is not None:
            if at.begins_branch:
                at = at.back_to
            else:
                yield at
                at = at.parent

    def has_commits_after(self, era: int) -> bool:
        """Returns True if a step is committed after this one. A branch that begins is none: each rank loads a checkpoint, and the
        job may be restarted from it before the first commit."""
        return any(child.has_commits_after(era) if child.begins_branch else child.era == era for child in self.children)

    def at(self, step: int) -> Committed | None:
        found: Committed | None = self
        while found is not None and found.step > step:
            found = found.parent
        return found


class Truth:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.min_replicas = cluster.setting.lighthouse.min_replicas
        self.initial: Committed | None = None
        self.commits_by_id: dict[str, Committed] = {}
        self.settled: Committed | None = None  # the newest settled step
        self.era = 0
        self.last_id = 0
        self.newest = m.Quorum(0, ())
        self.forgetful = False  # the lighthouse's state file was lost: an id that nobody received may come again
        self._quorums: dict[tuple[str, int], tuple[str, ...]] = {}  # (epoch, id) -> members, of those issued
        self._entered: dict[tuple[str, int], tuple[str, ...]] = {}
        # (quorum_id, step) -> the one commit_id that its members go on from
        self._base: dict[tuple[str, int, int], str] = {}
        self._next: dict[tuple[str, int, int], str] = {}  # ... and that they come to
        self._votes: dict[tuple[str, m.VoteKey], dict[int, str]] = {}  # (group, vote_key) -> what each rank has said
        # of each group in each quorum: the assignment, and the step
        self._assignments: dict[tuple[Any, ...], tuple[str, int]] = {}
        self._trained: dict[int, list[Committed]] = {}  # slot -> the commits it is in
        self._audited: set[str] = set()  # ledgers, with the history that they belong to: most are alike

    # -- quorums ----------------------------------------------------------------------------------------------------

    def issued(self, quorum: m.Quorum, answered: tuple[str, ...], listening: set[str]) -> None:
        """Checks a new quorum. `answered`: the ids that get the answer. `listening`: the ids that wait for one, or hold a stream."""
        known = self._quorums.get((quorum.epoch, quorum.quorum_id))
        if known is not None and (known == quorum.ids or not self.forgetful):
            require(known == quorum.ids, "quorum", quorum.quorum_id, "has two member sets:", known, quorum.ids)
            return
        self._quorums[quorum.epoch, quorum.quorum_id] = quorum.ids
        require(
            quorum.quorum_id > self.last_id or self.forgetful,
            f"quorum id {quorum.quorum_id} after {self.last_id}: ids must grow",
        )
        self.last_id = max(self.last_id, quorum.quorum_id)
        require(
            len(quorum.members) >= self.min_replicas, f"quorum {quorum.quorum_id} of {quorum.ids}: below min_replicas"
        )
        require(len(set(quorum.ids)) == len(quorum.ids), "one id twice in", quorum.ids)
        names = [member.name for member in quorum.members]
        require(len(set(names)) == len(names), "two lives of one group in", quorum.ids)
        absent = [replica_id for replica_id in answered if replica_id not in listening]
        require(not absent, f"quorum {quorum.quorum_id} names {absent}, who do not listen")
        self._goes_on(quorum)
        self.newest = quorum
        self._keeps_history(quorum)

    def _goes_on(self, quorum: m.Quorum) -> None:
        """Checks that the quorum continues from the furthest state of the previous quorum's processes: what others hold beyond it was
        left behind when the previous quorum was formed without them. Without such a process: from the furthest state of all."""
        states = {m.incarnation_of(x.replica_id): x.state for x in quorum.members if not x.void}
        up_to_date_candidates = [
            states[process] for process in map(m.incarnation_of, self.newest.ids) if process in states
        ]
        allowed = {max(up_to_date_candidates or states.values(), default=None)}
        if self.forgetful:  # the lighthouse may not know the previous one
            allowed.add(max(states.values(), default=None))
        went_on = quorum.reference in allowed
        require(went_on, f"quorum {quorum.quorum_id} goes on from {quorum.reference}, not from {allowed}")

    def majority(self, ids: tuple[str, ...], before: tuple[str, ...], asked: set[str], heard: set[str]) -> None:
        """Unless all previous members are in it, more than half of those whom the lighthouse hears have asked for a quorum. A group that
        has just returned under a new id is one group, though its old stream may still be open."""
        whole = bool(before) and set(before) <= set(ids)
        asking = {m.name_of(replica_id) for replica_id in asked}
        there = asking | {m.name_of(replica_id) for replica_id in heard}
        require(whole or 2 * len(asking) > len(there), f"quorum of {ids}: less than half of {sorted(heard)}")

    def _keeps_history(self, quorum: m.Quorum) -> None:
        """Requires that a settled step stays, unless no reachable group holds it any more."""
        step, _, commit_id = quorum.reference
        if self.settled is None:
            return
        chosen = self.commits_by_id.get(commit_id, self.initial)
        if chosen is not None and step >= self.settled.step and chosen.at(self.settled.step) is self.settled:
            return
        holders = self.cluster.holders_of(self.settled)
        require(
            not holders,
            f"quorum {quorum.quorum_id} goes back to step {step}; {holders} hold settled step {self.settled.step}",
        )
        self.cluster.world.seen["the job went back to a checkpoint"] += 1
        self.era += 1
        self.settled = chosen if chosen is not None and chosen.step else None

    def entered(self, rank: RankNode, part: m.QuorumResult) -> None:
        known = self._entered.setdefault((part.epoch, part.quorum_id), part.members)
        if known != part.members:
            raise Violation(f"quorum {part.quorum_id} has two member sets: {known}, {part.members}")
        if len(part.members) < self.min_replicas:
            raise Violation(f"{rank.process.name} enters a quorum below min_replicas: {part.members}")
        if not (
            part.heal or part.reference[0] == 0 or (rank.weights is not None and rank.commit_id == part.reference[2])
        ):
            raise Violation(
                f"{rank.process.name} at {rank.commit_id or 'void'} enters quorum {part.quorum_id} without healing; "
                f"it goes on from {part.reference}"
            )

    def assigns(self, rank: RankNode, part: m.QuorumResult, attempt: int) -> None:
        """Checks that the open part of the ledger is the same for all ranks of a group, unless its state is still arriving."""
        assignment = (rank.machine.ledger.assignment_id, rank.step)
        key = (rank.group.process.name, part.epoch, part.quorum_id, part.reference, attempt)
        known = self._assignments.setdefault(key, assignment)
        if known != assignment:
            raise Violation(
                f"{rank.process.name}: its assignment is {rank.machine.ledger.assignment}, another rank of its group has another"
            )

    # -- votes ------------------------------------------------------------------------------------------------------

    def votes(self, rank: RankNode, vote: m.Vote) -> None:
        self._votes.setdefault((rank.group.process.name, vote.key), {})[rank.group_rank] = vote.verdict

    def said(self, group: GroupNode, vote_key: m.VoteKey) -> dict[int, str]:
        """Returns the verdicts of the ranks of a group on `vote_key`."""
        return self._votes.get((group.process.name, vote_key), {})

    def decided(self, group: GroupNode, outcome: m.Outcome) -> None:
        """Checks that all ranks have said yes on this very vote if the outcome is yes."""
        if outcome.verdict == "yes":
            key = outcome.key
            said = self.said(group, key)
            without = [rank.group_rank for rank in group.ranks if said.get(rank.group_rank) != "yes"]
            if without:
                raise Violation(f"{group.process.name} decides yes on {key}, and its ranks {without} have not said so")

    def refuses(self, rank: RankNode, vote: m.Vote, reason: str) -> None:
        raise Violation(
            f"{rank.process.name} waits for the word on {vote.key}, and its group has forgotten it: {reason}"
        )

    # -- the step ---------------------------------------------------------------------------------------------------

    def enters(self, rank: RankNode, key: tuple[Any, ...], first: tuple[Any, ...]) -> None:
        if key != first:
            raise Violation(f"{rank.process.name} enters {key}, its group {first}: they hang for ever")

    def ends(self, group: GroupNode, reason: str, *, inside: int) -> None:
        """Checks the end of a group. `inside`: number of its ranks in a collective. If all ranks live, the others went another way."""
        whole = all(rank.process.alive and not rank.process.stopped for rank in group.ranks)
        require(not (whole and inside), f"{group.process.name} ends ({reason}), its ranks wait for each other")

    def differ(self, effect: m.ReportWeightsDiffer) -> None:
        raise Violation(f"after step {effect.step} {effect.replica_ids or 'all'} are said to hold other weights")

    def meets(self, rank: RankNode, part: m.QuorumResult) -> None:
        """Checks that a rank of another layout is in no collective with groups of the job."""
        if not rank.group.fingerprint:
            return
        ours = [i for i in part.members if not self.cluster.names[int(m.name_of(i)[1:])].fingerprint]
        require(not ours, f"{rank.process.name} is of another layout, and sums with {ours}")

    def gives(self, rank: RankNode, epoch: str, quorum_id: int, step: int, given: Given, *, gave: bool) -> None:
        """Checks a contribution. `gave`: its tail says that something of it counts."""
        if not given.gradients and not gave:
            return
        who = rank.process.name
        if rank.weights is None:
            raise Violation(f"{who} is void and adds to step {step + 1}")
        stale = [slot for slot, weights in given.gradients.items() if weights != rank.weights]
        if stale:
            raise Violation(f"{who} adds gradients of {stale} that are not of its weights")
        base = self._base.setdefault((epoch, quorum_id, step), rank.commit_id)
        if base != rank.commit_id:
            raise Violation(f"{who} goes on from {rank.commit_id} in quorum {quorum_id}, others from {base}")

    def commits(self, rank: RankNode, effect: m.CommitStep, part: m.QuorumResult, sums: Sums, parent_id: str) -> None:
        who, commit_id = rank.process.name, effect.commit_id
        key = (part.epoch, part.quorum_id, effect.step)
        if self._next.setdefault(key, commit_id) != commit_id:
            raise Violation(f"{who}: two versions of step {effect.step} in one quorum")
        tokens = sum(sums.tokens.values())
        if effect.divisor != tokens:
            raise Violation(f"{who}: step {effect.step} is divided by {effect.divisor}, {tokens} tokens went in")
        if effect.contributors != sums.contributors:
            raise Violation(f"{who}: contributors {effect.contributors}, not {sums.contributors}")
        if effect.quorum_size < self.min_replicas:
            raise Violation(f"{who} commits step {effect.step} in a quorum of {effect.quorum_size}")
        record = self.commits_by_id.get(commit_id)
        if record is None:
            record = self._new(effect, part, tuple(sums.gradients), self.commits_by_id.get(parent_id, self.initial))
        record.era = self.era  # made once more, the very same, after the job went back to before it
        if not (record.parent is None or record.parent.commit_id == parent_id or record.step == 1):
            raise Violation(f"{who}: {commit_id} after {parent_id}, elsewhere after another")
        weights = record.weights.setdefault(rank.group_rank, rank.weights or 0)
        if weights != rank.weights:
            raise Violation(f"{who}: other weights under commit_id {commit_id} of step {effect.step}")

    def _new(
        self, effect: m.CommitStep, part: m.QuorumResult, slots: tuple[int, ...], parent: Committed | None
    ) -> Committed:
        record = Committed(effect.commit_id, effect.step, part.quorum_id, parent, slots, self.era)
        self.commits_by_id[effect.commit_id] = record
        before = parent.step if parent is not None else 0
        require(record.step == before + 1, f"step {record.step} follows step {before}")
        self._whole(record)
        if self.settled is not None and record.step <= self.settled.step:
            # It had all sums when it was stopped, and resumes after the others have continued: no group can know, and it heals.
            away = part.quorum_id < self.last_id and part.replica_id not in self.newest.ids
            require(away, f"step {record.step} is committed again, as {record.commit_id}, and was settled")
            self.cluster.world.seen["a settled step was committed by one that was away"] += 1
        if parent is not None:
            parent.children.append(record)
            if len(parent.children) > 1:
                self.cluster.world.seen["an unsettled step has two versions"] += 1
            voted = parent.parent if parent.begins_branch and parent.parent else parent
            others = voted.parent.children if voted.parent else []
            rivals = [other for other in others if other is not voted and other.has_commits_after(self.era)]
            require(not rivals, f"a fork two steps deep: {voted.commit_id} and {[r.commit_id for r in rivals]} go on")
        for slot in slots:
            twice = [other for other in self._trained.get(slot, ()) if record.at(other.step) is other]
            require(not twice, f"slot {slot} is trained on in step {record.step} and in step {[t.step for t in twice]}")
            self._trained.setdefault(slot, []).append(record)
        return record

    def _whole(self, record: Committed) -> None:
        """Checks that, with slots_per_step, a step's data does not depend on the groups present; unless one could not use its own."""
        count = self.cluster.setting.slots_per_step
        if not count:
            return
        if self.cluster.setting.rewinds or any(f.kind == "not a number" for f in self.cluster.setting.faults):
            require(len(record.slots) <= count, f"step {record.step} has slots {record.slots}, more than {count}")
            return
        self.cluster.world.seen["slots per step: a whole step"] += 1
        expected = list(range((record.step - 1) * count, record.step * count))
        require(
            sorted(record.slots) == expected, f"step {record.step} has slots {sorted(record.slots)}, not {expected}"
        )

    def goes_back(self, rank: RankNode, spiked: str, checkpoint: str) -> None:
        """The rank has loaded a checkpoint and begun a branch. Of one spike and one checkpoint there is one such state."""
        record, before = self.commits_by_id.get(rank.commit_id), self.commits_by_id[spiked]
        back_to = self.commits_by_id.get(checkpoint)
        who, step = (
            rank.process.name,
            (before.step // m.STEPS_PER_BRANCH + 1) * m.STEPS_PER_BRANCH
            + (back_to.step % m.STEPS_PER_BRANCH if back_to else 0),
        )
        require(rank.step == step, f"{who} goes back from {before.step} to {rank.step}, not to {step}")
        require(
            back_to is None or back_to in before.chain(),
            f"{who} goes back to {checkpoint}, which {spiked} does not come from",
        )
        if record is None:
            record = Committed(
                rank.commit_id, step, before.quorum_id, before, (), self.era, back_to=back_to, begins_branch=True
            )
            self.commits_by_id[rank.commit_id] = record
            before.children.append(record)
        require((record.parent, record.back_to) == (before, back_to), f"{who}: {rank.commit_id} has two origins")
        weights = record.weights.setdefault(rank.group_rank, rank.weights or 0)
        require(weights == rank.weights, f"{who}: other weights after the return to {checkpoint}")

    def settles(self, rank: RankNode, step: int) -> None:
        own = self.commits_by_id.get(rank.commit_id)
        record = own.at(step) if own is not None else None
        if record is None or step == 0:
            return
        if record.step != step:
            raise Violation(f"{rank.process.name} settles step {step} and is at {rank.commit_id}")
        if self.settled is None or step > self.settled.step:
            require(
                self.settled is None or record.at(self.settled.step) is self.settled,
                f"{rank.process.name}: settled step {step} does not follow the settled step {self.settled and self.settled.step}",
            )
            self.settled = record
        elif self.settled.at(step) is not record:
            raise Violation(f"{rank.process.name}: a second version of settled step {step}")

    def heals(self, rank: RankNode, snapshot: Snapshot) -> None:
        record = self.commits_by_id.get(snapshot.commit_id)
        if record is not None:
            weights = record.weights.get(rank.group_rank)
            require(
                weights == snapshot.weights, f"{rank.process.name} healed to other weights than {snapshot.commit_id}'s"
            )

    # -- the end ----------------------------------------------------------------------------------------------------

    def ledger(self, who: str, commit_id: str, state: dict[str, Any]) -> None:
        """Every position before the cursor is in exactly one commit of this history, or still open, or skipped by rule."""
        book = repr((commit_id, state["position"], state["holes"], state["skipped"], state.get("rewinds")))
        if book in self._audited:
            return
        self._audited.add(book)
        record = self.commits_by_id.get(commit_id)
        chain = list(record.chain()) if record else []
        trained = [slot for c in chain if c.applied for slot in c.slots]
        left_out = [slot for c in chain if not c.applied for slot in c.slots]
        require(len(trained) == len(set(trained)), f"{who}: slots in two commits")
        over = {
            slot
            for *_, ranges in state.get("rewinds", ())
            for first, end in ranges
            for slot in range(int(first), int(end))
        }
        forgotten = set(left_out) - set(state["skipped"])
        require(not forgotten, f"{who}: slots {sorted(forgotten)[:9]} of spikes count as trained on")
        missing = set(range(int(state["position"]))) - set(trained) - set(state["holes"]) - set(state["skipped"]) - over
        require(not missing, f"{who}: slots {sorted(missing)[:9]} are lost")
        extra = set(trained) & (set(state["holes"]) | set(state["skipped"]) | over)
        require(
            not extra and all(slot < state["position"] for slot in trained),
            f"{who}: trained slots {extra} count as open",
        )
