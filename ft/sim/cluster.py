"""A whole job in one process: the lighthouse and its state file, groups and their launchers, checkpoints, and what is done to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ft.protocol import messages as m
from ft.protocol.group import Group
from ft.protocol.ledger import Ledger
from ft.protocol.lighthouse import Lighthouse, LighthouseConfig
from ft.protocol.step import Step
from ft.sim import faults, waits
from ft.sim.collectives import Collectives
from ft.sim.faults import Fault
from ft.sim.invariants import Committed, Truth, require
from ft.sim.network import Network
from ft.sim.ranks import DIGEST_INTERVAL, Snapshot
from ft.sim.servers import GroupNode, LighthouseNode
from ft.sim.world import Process, World

PATIENCE_S = 150.0  # without a fault, every live group has to commit within this time
RESTART_S = (1.0, 4.0)  # from the end of a group to its next start: launcher, imports


@dataclass(frozen=True)
class Machines:
    """What is tested. A planted bug is another class here."""

    lighthouse: Callable[..., Lighthouse] = Lighthouse
    group: Callable[..., Group] = Group
    step: Callable[..., Step] = Step
    ledger: Callable[[int, int], Ledger] = Ledger


@dataclass(frozen=True)
class Setting:
    """What a seed decides before anything happens."""

    seed: int
    groups: int
    steps: int
    world_size: int
    spread: bool  # the ranks of a group are on hosts of their own
    compute_s: float
    sum_s: tuple[float, float]  # how long an all-reduce between the groups takes, and a rendezvous
    checkpoint_every: int
    lighthouse: LighthouseConfig
    late_threads: bool  # a trainer may find no core for a moment, while others of its group go on
    slots_per_step: int  # 0: as many as groups are there
    step: dict[str, Any]  # of StepConfig
    faults: tuple[Fault, ...]


def setting(seed: int, groups: int, steps: int) -> Setting:
    """Everything that is drawn for a run, but for what happens inside it."""
    dice, more, slots = World(seed).dice("setting"), World(seed).dice("sums"), World(seed).dice("whole")
    compute_s = dice.between(0.15, 0.4)
    # Most jobs compute for longer than they sum. In the others much may happen to a sum.
    sum_s, breaks = ((0.02, 0.08), False) if more.chance(0.75) else ((0.1, 0.6), True)
    duration_s = steps * compute_s * 1.3
    return Setting(
        seed=seed,
        groups=groups,
        steps=steps,
        world_size=dice.pick((1, 1, 2, 3)),
        spread=dice.chance(0.5),
        compute_s=compute_s,
        sum_s=sum_s,
        checkpoint_every=dice.pick((5, 20)),
        lighthouse=LighthouseConfig(
            min_replicas=1 + dice.index(min(groups, 3)) if dice.chance(0.7) else 1 + groups // 2,
            join_timeout_s=dice.pick((2.0, 10.0)),
            tick_s=0.25,
        ),
        late_threads=World(seed).dice("threads").chance(0.3),
        slots_per_step=1 + slots.index(groups + 2) if slots.chance(0.3) else 0,
        step={
            "keep_gradients": dice.chance(0.8),
            "every_step": dice.chance(0.1),
            "skip_unable": dice.chance(0.8),
            "digest_interval": DIGEST_INTERVAL,
        },
        faults=faults.draw(dice, groups, duration_s) + (faults.interrupted(more, duration_s) if breaks else ()),
    )


@dataclass
class Name:
    """One REPLICA_GROUP_ID: the place that a launcher keeps filled."""

    name: str
    starts: int = 0
    group: GroupNode | None = None
    wanted: bool = True  # False: scaled down
    drains: bool = False  # its next start is to leave at once
    shrink: bool = False  # its next quorum is to have previous members alone


@dataclass
class Cluster:
    setting: Setting
    machines: Machines = field(default_factory=Machines)
    trace: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        setting = self.setting
        self.world = World(setting.seed, trace=self.trace)
        self.dice = self.world.dice("cluster")
        self.dice_of_threads = self.world.dice("threads")
        self.dice_of_sending = self.world.dice("sending")
        self.times = setting.lighthouse.times
        self.network = Network(self.world, faults.quality(self.world.dice("quality"), setting.groups))
        self.collectives = Collectives(self.world, self.network, seconds=setting.sum_s)
        self.truth = Truth(self)
        self.state_file: m.Saved | None = None
        self.lighthouse: LighthouseNode | None = None
        self.lighthouses = 0
        self.names: list[Name] = [Name(f"g{i}") for i in range(setting.groups)]
        self.nodes: dict[str, GroupNode] = {}  # by address
        self.active = 0  # faults that last
        self.calm_since_s = 0.0
        self.stopped_because = ""
        self.transitions: Counter[tuple[type, tuple[type, ...]]] = Counter()
        self.reasons: Counter[str] = Counter()
        self._disturbed_s: dict[str, float] = {}  # process name -> until when it was, or is, out of reach
        self._reason = ""
        self._checkpoints: dict[int, dict[tuple[str, int], Snapshot]] = {}

    # -- a run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises Violation, or whatever else goes wrong in the machines."""
        self.start_lighthouse()
        for name in self.names:  # in any order, some of them late
            late_s = self.dice.between(0.0, 20.0) if self.dice.chance(0.15) else self.dice.between(0.0, 1.0)
            self.world.after(late_s, None, self.start_group, name)
        for fault in self.setting.faults:
            self.world.after(fault.at_s, None, self.suffer, fault)
        self.world.after(1.0, None, self._watch)
        self.world.run(self.is_over)
        for group in self.live():
            for rank in group.ranks:
                if (
                    rank.weights is not None and rank.commit_id == rank.machine.commit_id
                ):  # else its trainer has yet to catch up
                    self.truth.ledger(rank.process.name, rank.commit_id, rank.machine.state_dict()["ledger"])

    def is_over(self) -> bool:
        return bool(self.stopped_because) or self._over

    _over = False

    def _watch(self) -> None:
        """Once a second: are all there, and does every wait end?"""
        live = self.live()
        for group in live:
            waits.check(group)
        if self.active == 0:
            calm_s = self.world.now_s - self.calm_since_s
            for group in live:
                for rank in group.ranks:
                    still_s = self.world.now_s - rank.progress_s
                    require(
                        min(still_s, calm_s) < PATIENCE_S,
                        f"{rank.process.name} has made no step for {still_s:.0f} s, though nothing hinders it",
                    )
            enough = all(rank.machine.step >= self.setting.steps for group in live for rank in group.ranks)
            due = all(fault.at_s < self.world.now_s for fault in self.setting.faults)
            complete = all(name.group is not None for name in self.names if name.wanted)
            self._over = enough and due and complete
        self.world.after(1.0, None, self._watch)

    def saw(self, who: str, event: m.Event, out: m.Out) -> None:
        """Every event of every machine passes here."""
        effects = tuple(map(type, out.effects)) if out.effects else ()
        self.transitions[type(event), effects] += 1
        if out.reason and out.reason != self._reason:
            self._reason = out.reason
            self.reasons[out.reason] += 1
        if self.trace is not None and not (isinstance(event, m.Tick | m.Report | m.BeatAnswered) and not out.effects):
            self.world.note(who, f"<- {brief(event)}")
            for effect in out.effects:
                self.world.note("", f"-> {brief(effect)}")
            if out.reason:
                self.world.note("", f"   ({out.reason})")

    def live(self) -> list[GroupNode]:
        return [name.group for name in self.names if name.group is not None and not name.group.ended]

    # -- starts and ends --------------------------------------------------------------------------------------------

    def start_lighthouse(self) -> None:
        """Unless there is one: two faults may have wanted the same restart, and an address has room for one."""
        if self.lighthouse is not None and self.lighthouse.process.alive:
            return
        self.lighthouses += 1
        self.lighthouse = LighthouseNode(self, self.lighthouses)
        self.lighthouse.start()

    def start_group(self, name: Name) -> None:
        if name.wanted and name.group is None:
            name.starts += 1
            name.group = group = GroupNode(self, name.name, name.starts)
            self.nodes[group.address] = group
            self.calm_since_s = self.world.now_s
            group.start()
            if name.drains:
                group.wants_to_leave()

    def gone(self, group: GroupNode) -> None:
        """The launcher sees its processes gone, and starts the group again."""
        name = self.name_of(group)
        if name.group is group:
            name.group = None
            self.calm_since_s = self.world.now_s
            self.world.after(self.dice.between(*RESTART_S), None, self.start_group, name)

    def name_of(self, group: GroupNode) -> Name:
        return self.names[int(group.name[1:])]

    def job_stopped(self, reason: str) -> None:
        unable = any(fault.kind == "not a number" for fault in self.setting.faults)
        require(unable, f"the job stops without a cause: {reason}")
        self.world.seen["the job stopped by rule"] += 1
        self.stopped_because = reason

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def publish(self, step: int, group: GroupNode, group_rank: int, snapshot: Snapshot) -> None:
        self._checkpoints.setdefault(step, {})[snapshot.commit_id, group_rank] = snapshot

    def newest_checkpoint(self, group_rank: int) -> Snapshot | None:
        """Of those that have every rank's part, the same for all ranks."""
        for step in sorted(self._checkpoints, reverse=True):
            parts = self._checkpoints[step]
            for commit_id, _ in parts:
                if all((commit_id, rank) in parts for rank in range(self.setting.world_size)):
                    return parts[commit_id, group_rank]
        return None

    # -- what the truth asks ----------------------------------------------------------------------------------------

    def holders_of(self, record: Committed) -> list[str]:
        """Live groups with that step in their history, which nothing has kept from being heard lately."""
        found = []
        for group in self.live():
            records = [self.truth.commits_by_id.get(rank.commit_id) for rank in group.ranks if rank.weights is not None]
            whole = len(records) == len(group.ranks)
            holds = whole and all(own is not None and own.at(record.step) is record for own in records)
            if holds and not group.left and self._disturbed_s.get(group.process.name, -1e9) + 40.0 < self.world.now_s:
                found.append(group.process.name)
        return found

    def serves(self, address: str, group_rank: int, reader: Process, quorum_id: int) -> bool:
        """Whether that rank's offer still stands and can be read."""
        group = self.nodes[address]
        rank = group.ranks[group_rank]
        alive = rank.process.alive and not rank.process.stopped
        return alive and not self.network.is_cut(rank.process, reader) and rank.offered(quorum_id) is not None

    # -- faults -----------------------------------------------------------------------------------------------------

    def suffer(self, fault: Fault) -> None:
        live = self.live()
        if self.trace is not None:
            self.world.note("fault", str(fault))
        self.calm_since_s = self.world.now_s
        if "lighthouse" in fault.kind:
            self._hit_lighthouse(fault)
        elif fault.kind == "group joins":
            # Some newcomers ask for previous members alone.
            self.names.append(Name(f"g{len(self.names)}", shrink=fault.share < 0.25))
            self.start_group(self.names[-1])
        elif not live:
            return
        elif "cut" in fault.kind:
            self._cut(fault, live)
        else:
            self._hit_group(fault, live[fault.who % len(live)], live)
        self.world.seen[f"fault: {fault.kind}"] += 1

    def _hit_lighthouse(self, fault: Fault) -> None:
        node = self.lighthouse
        if node is None or not node.process.alive:
            return
        if fault.kind == "lighthouse stopped":
            self.world.stop(node.process)
            self._for(fault.lasts_s, lambda: self.world.resume(node.process))
            return
        if fault.share < 0.3:
            node.dies_writing = True  # at the next write, or in two seconds
            self.world.after(2.0, None, self.world.kill, node.process)
            self._for(2.0 + fault.lasts_s, self.start_lighthouse)
            return
        self.world.kill(node.process)
        if fault.share > 0.8:
            self.world.seen["fault: state file lost"] += 1
            self.state_file, self.truth.forgetful = None, True
        self._for(fault.lasts_s, self.start_lighthouse)

    def _hit_group(self, fault: Fault, group: GroupNode, live: list[GroupNode]) -> None:
        rank = group.ranks[int(fault.share * len(group.ranks))]
        processes = [group.process, *(rank.process for rank in group.ranks)]
        if fault.kind == "rank killed":
            self.world.kill(rank.process)
        elif fault.kind == "group server killed":
            self.world.kill(group.process)
        elif fault.kind == "host lost":  # no kernel is left to close a socket
            for process in processes:
                process.dark = True
            group.kill()
        elif fault.kind == "group stopped":
            self._stop(group, processes, fault.lasts_s)
        elif fault.kind == "rank stopped":
            self._stop(group, [rank.process], fault.lasts_s)
        elif fault.kind == "group server stopped":
            self._stop(group, [group.process], fault.lasts_s)
        elif fault.kind == "group slow":
            group.slow = 1.0 + 30.0 * fault.share**3
            self._for(fault.lasts_s, lambda: setattr(group, "slow", 1.0))
        elif fault.kind == "group leaves" and len(live) > self.setting.lighthouse.min_replicas + 1:
            if fault.share < 0.5:
                group.wants_to_leave()
            else:  # its host is drained when it has just come back, and heals
                self.world.seen["fault: group leaves while it heals"] += 1
                self.name_of(group).drains = True
                group.kill()
        elif fault.kind == "shrink asked":
            self.name_of(group).shrink = True
            if fault.share < 0.3:  # and no previous member is left that could follow
                for one in live:
                    one.kill()
        elif fault.kind == faults.BROKEN:
            group.break_connection()
        elif fault.kind == "not a number":
            group.nan_attempts = 1 + int(fault.share * 3.5)

    def _stop(self, group: GroupNode, processes: list[Process], lasts_s: float) -> None:
        self._disturb(group, lasts_s)
        for process in processes:
            self.world.stop(process)

        def resume() -> None:
            for process in processes:
                self.world.resume(process)

        self._for(lasts_s, resume)

    def _cut(self, fault: Fault, live: list[GroupNode]) -> None:
        cut = faults.cut_for(fault, live[fault.who % len(live)].name, [group.name for group in live], "lighthouse")
        # A pair has to fail three rendezvous of 10 s before one of it sits out.
        lasts_s = fault.lasts_s * (2.0 if fault.kind == "pair cut" else 1.0)
        for group in live:
            self._disturb(group, lasts_s)
        self.network.cut(cut)
        self._for(lasts_s, lambda: self.network.mend(cut))

    def _disturb(self, group: GroupNode, lasts_s: float) -> None:
        name = group.process.name
        self._disturbed_s[name] = max(self._disturbed_s.get(name, 0.0), self.world.now_s + lasts_s)

    def _for(self, lasts_s: float, end: Callable[[], Any]) -> None:
        self.active += 1

        def over() -> None:
            self.active -= 1
            self.calm_since_s = self.world.now_s
            end()

        self.world.after(lasts_s, None, over)


def brief(words: Any) -> str:
    """An event or effect on one line: what is set in it, without the parts that fill a page."""
    shown = []
    for name in words.__dataclass_fields__:
        value = getattr(words, name)
        if isinstance(value, m.Quorum):
            value = f"<{value.quorum_id}: {' '.join(value.ids)} from {value.reference}>"
        elif isinstance(value, m.Part):
            value = f"<{value.quorum_id}: rank {value.replica_rank} of {len(value.members)}{', heals' if value.heal else ''}>"
        elif isinstance(value, m.Member):
            value = f"<{value.replica_id} step {value.step} {value.commit_id[:6]}>"
        elif isinstance(value, m.Call | m.RankCall | m.Vote):
            value = brief(value)
        elif isinstance(value, m.Saved):
            value = f"<last id {value.last_id}, settled {value.settled}>"
        elif isinstance(value, dict | m.Times):
            continue
        if value not in ("", (), None, False, 0):
            shown.append(f"{name}={value}")
    return f"{type(words).__name__}({', '.join(shown)})"


__all__ = ["Cluster", "Machines", "Setting", "replace", "setting"]
