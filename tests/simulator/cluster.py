"""Simulates a job in one process: lighthouse and state file, groups and launchers, checkpoints, and faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ft.protocol import messages as m
from ft.protocol.group import GroupMachine
from ft.protocol.lighthouse import LighthouseConfig, LighthouseMachine
from ft.protocol.step import Ledger, StepMachine
from tests.simulator import faults, inside
from tests.simulator.collectives import Collectives
from tests.simulator.faults import Fault
from tests.simulator.harm import Harm
from tests.simulator.invariants import Committed, Truth, require
from tests.simulator.liveness import Liveness
from tests.simulator.network import Network
from tests.simulator.ranks import DIGEST_INTERVAL, Snapshot
from tests.simulator.servers import GroupNode, LighthouseNode
from tests.simulator.world import Process, World

PATIENCE_S = 150.0  # without a fault, every live group has to commit within this time
MANY = 50  # groups of which a run has no class of faults: there are enough smaller ones
RESTART_S = (1.0, 4.0)  # from the end of a group to its next start: launcher, imports


@dataclass(frozen=True)
class Machines:
    """The state machines under test. An injected bug replaces one of the classes."""

    lighthouse: Callable[..., LighthouseMachine] = LighthouseMachine
    group: Callable[..., GroupMachine] = GroupMachine
    step: Callable[..., StepMachine] = StepMachine
    ledger: Callable[[int, int], Ledger] = Ledger
    # What is around them, and was otherwise once.
    watchdog_stands: bool = True  # the trainer's, while its group waits for others
    held_is_no_try: bool = True  # a vote that the server holds back is no failed try
    probes: bool = True  # a rank that waits for others probes whether it can reach them


@dataclass(frozen=True)
class Setting:
    """Settings of a run that are drawn from the seed before it starts."""

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
    fault_class: str = ""  # of faults.CLASSES
    loss: float = 0.0  # of packets
    spikes: bool = False  # the trainers do not apply some steps
    rewinds: bool = False  # they go back to a checkpoint at some steps


def setting(seed: int, groups: int, steps: int, fault_class: str | None = None) -> Setting:
    """Draws the settings and faults of a run. `fault_class`: None: by the seed; "": none."""
    dice, more, slots = World(seed).dice("setting"), World(seed).dice("sums"), World(seed).dice("whole")
    compute_s = dice.between(0.15, 0.4)
    # Most jobs compute for longer than they sum. In the others much may happen to a sum.
    sum_s, breaks = ((0.02, 0.08), False) if more.chance(0.75) else ((0.1, 0.6), True)
    duration_s = steps * compute_s * 1.3
    drawn = Setting(
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
        spikes=World(seed).dice("spikes").chance(0.3),
        rewinds=fault_class == faults.REWINDS or (fault_class is None and World(seed).dice("rewinds").chance(0.1)),
    )
    name = faults.class_of(seed) if fault_class is None else fault_class
    return drawn_in(name, drawn, duration_s) if name and (fault_class or groups < MANY) else drawn


def drawn_in(name: str, drawn: Setting, duration_s: float) -> Setting:
    """Returns the settings with the faults of a class; half of the runs have only these."""
    dice, one = World(drawn.seed).dice(name), faults.CLASSES[name]
    others = drawn.faults if dice.chance(0.5) else ()
    found = sorted((*others, *one.draw(dice, drawn.groups, duration_s)), key=lambda fault: fault.at_s)
    if one.min_replicas:
        drawn = replace(drawn, lighthouse=replace(drawn.lighthouse, min_replicas=min(2 + dice.index(2), drawn.groups)))
    loss = dice.between(0.01, 0.2) if one.loss else 0.0
    return replace(drawn, fault_class=name, faults=tuple(found), loss=loss)


@dataclass
class Name:
    """A REPLICA_GROUP_ID with a launcher that restarts its group."""

    name: str
    starts: int = 0
    group: GroupNode | None = None
    wanted: bool = True  # False: scaled down
    drains: bool = False  # its next start is to leave at once
    shrink: bool = False  # its next quorum is to have previous members alone
    site: str = ""  # where it is started, if not where it always was
    fingerprint: str = ""  # what it trains, if not what the job does
    dies_in: list[str] = field(default_factory=list)  # phases of a heal: each start dies in the next of them
    failing_heals: int = 0
    slow_heals: int = 0  # begun from now on, of which nothing comes in time


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
        self.dice_of_checkpoints = self.world.dice("checkpoints")
        self.times = setting.lighthouse.times
        quality = faults.quality(self.world.dice("quality"), setting.groups)
        self.network = Network(self.world, faults.lossy(setting.loss) if setting.loss else quality)
        self.collectives = Collectives(self.world, self.network, seconds=setting.sum_s)
        self.truth = Truth(self)
        self.harm = Harm(self)
        self.liveness = Liveness(self)
        self.network.at_break = self.liveness.broke
        self.state_file: m.PersistentState | None = None
        self.state_owner = 0  # the lighthouse that may write it
        self.lighthouse_config = setting.lighthouse
        self.lighthouse_moves = 0
        self.names_away = False  # the lighthouse's name does not resolve
        self.wrong_token = False  # the next lighthouse's
        self.no_capacity = False  # launchers start nothing
        self.notices_late_s = 0.0  # on their way from a group's server to its ranks
        self.lighthouse: LighthouseNode | None = None
        self.lighthouses = 0
        self.names: list[Name] = [Name(f"g{i}") for i in range(setting.groups)]
        self.nodes: dict[str, GroupNode] = {}  # by address
        self.calm_since_s = 0.0
        self.stopped_because = ""
        self._over = False
        self.transitions: Counter[tuple[type, tuple[type, ...]]] = Counter()
        self.reasons: Counter[str] = Counter()
        self._reason = ""
        self._checkpoints: dict[int, dict[tuple[str, int], Snapshot]] = {}

    # -- a run ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs the job. Raises Violation, or an exception of the state machines."""
        self.start_lighthouse()
        for name in self.names:  # in any order, some of them late
            late_s = self.dice.between(0.0, 20.0) if self.dice.chance(0.15) else self.dice.between(0.0, 1.0)
            self.world.after(late_s, None, self.start_group, name)
        for fault in self.setting.faults:
            self.world.after(fault.at_s, None, self.harm.suffer, fault)
        self.world.after(1.0, None, self._watch)
        self.world.run(lambda: bool(self.stopped_because) or self._over)
        for group in self.live():
            for rank in group.ranks:
                # else its trainer has yet to catch up, or to leave the spike's data out
                if rank.weights is not None and rank.commit_id == rank.machine.commit_id and not rank.is_to_go_back:
                    self.truth.ledger(rank.process.name, rank.commit_id, rank.machine.state_dict()["ledger"])

    def _watch(self) -> None:
        """Checks once a second whether all groups are present and every wait can end."""
        live = self.live()
        for group in live:
            inside.check(group)
        self.liveness.check()
        if self.harm.active == 0:
            calm_s = self.world.now_s - self.calm_since_s
            apart = self.lighthouse.machine.roster.sitting if self.lighthouse else ()
            for group in live:
                for rank in group.ranks:
                    if self.name_of(group).slow_heals or group.machine.replica_id in apart:
                        rank.progress_s = self.world.now_s  # it has to wait
                    still_s = self.world.now_s - rank.progress_s
                    require(
                        min(still_s, calm_s) < PATIENCE_S,
                        f"{rank.process.name} has made no step for {still_s:.0f} s, though nothing hinders it",
                    )
            enough = all(
                rank.machine.step % m.STEPS_PER_BRANCH >= self.setting.steps for group in live for rank in group.ranks
            )
            due = all(fault.at_s < self.world.now_s for fault in self.setting.faults)
            complete = all(name.group is not None for name in self.names if name.wanted)
            self._over = enough and due and complete
        self.world.after(1.0, None, self._watch)

    def saw(self, who: str, event: m.Event, out: m.Out) -> None:
        """Called for every event of every state machine."""
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

    def new_process(self, name: str, host: str, site: str) -> Process:
        """Creates a process with the clock of its host."""
        return Process(name, host, site, clock_s=World(self.setting.seed).dice(f"clock of {host}").between(0.0, 1000.0))

    def start_lighthouse(self, *, beside: bool = False) -> None:
        """Starts a lighthouse unless one runs, since two faults may cause the same restart. `beside`: starts it in any case."""
        if self.lighthouse is not None and self.lighthouse.process.alive and not beside:
            return
        self.lighthouses += 1
        self.state_owner = self.lighthouses
        self.lighthouse = LighthouseNode(self, self.lighthouses)
        self.lighthouse.start()
        self.liveness.lighthouse_starts()

    def start_group(self, name: Name) -> None:
        if self.no_capacity:
            self.world.after(1.0, None, self.start_group, name)
        elif name.wanted and name.group is None:
            name.starts += 1
            name.group = group = GroupNode(self, name.name, name.starts, name.site, fingerprint=name.fingerprint)
            self.nodes[group.address] = group
            self.calm_since_s = self.world.now_s
            self.liveness.restart()
            group.start()
            if name.drains:
                group.wants_to_leave()

    def add_group(self, *, shrink: bool = False, fingerprint: str = "") -> Name:
        """Adds a group of a name that the job did not have."""
        self.names.append(Name(f"g{len(self.names)}", shrink=shrink, fingerprint=fingerprint))
        self.start_group(self.names[-1])
        return self.names[-1]

    def gone(self, group: GroupNode) -> None:
        """The launcher notices that the processes have ended, and restarts the group."""
        name = self.name_of(group)
        if name.group is group:
            name.group = None
            self.calm_since_s = self.world.now_s
            self.liveness.restart()
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

    def newest_checkpoint(
        self, group_rank: int, is_history: Callable[[int], bool] = lambda step: True
    ) -> Snapshot | None:
        """Returns the newest checkpoint that has the parts of all ranks, of those steps that are `is_history`."""
        for step in sorted(filter(is_history, self._checkpoints), reverse=True):
            parts = self._checkpoints[step]
            for commit_id, _ in parts:
                if all((commit_id, rank) in parts for rank in range(self.setting.world_size)):
                    return parts[commit_id, group_rank]
        return None

    # -- what the truth asks ----------------------------------------------------------------------------------------

    def holders_of(self, record: Committed) -> list[str]:
        """Returns the live groups with that step in their history that were reachable recently."""
        found = []
        for group in self.live():
            records = [self.truth.commits_by_id.get(rank.commit_id) for rank in group.ranks if rank.weights is not None]
            whole = len(records) == len(group.ranks)
            holds = whole and all(own is not None and own.at(record.step) is record for own in records)
            if holds and not group.left and self.harm.disturbed_until(group) + 40.0 < self.world.now_s:
                found.append(group.process.name)
        return found

    def serves(self, address: str, group_rank: int, reader: Process, quorum_id: int) -> bool:
        """Returns True if that rank's offer of its state is valid and reachable."""
        group = self.nodes[address]
        rank = group.ranks[group_rank]
        alive = rank.process.alive and not rank.process.stopped
        return alive and not self.network.is_cut(rank.process, reader) and rank.offered(quorum_id) is not None


def brief(words: Any) -> str:
    """Formats an event or effect on one line, with its non-default fields, without long ones."""
    shown = []
    for name in words.__dataclass_fields__:
        value = getattr(words, name)
        if isinstance(value, m.Quorum):
            value = f"<{value.quorum_id}: {' '.join(value.ids)} from {value.reference}>"
        elif isinstance(value, m.QuorumResult):
            value = f"<{value.quorum_id}: rank {value.replica_rank} of {len(value.members)}{', heals' if value.heal else ''}>"
        elif isinstance(value, m.Member):
            value = f"<{value.replica_id} step {value.step} {value.commit_id[:6]}>"
        elif isinstance(value, m.Call | m.RankCall | m.Vote):
            value = brief(value)
        elif isinstance(value, m.PersistentState):
            value = f"<last id {value.last_id}, settled {value.settled}>"
        elif isinstance(value, dict | m.Timeouts):
            continue
        if value not in ("", (), None, False, 0):
            shown.append(f"{name}={value}")
    return f"{type(words).__name__}({', '.join(shown)})"
