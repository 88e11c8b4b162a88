"""Bounds on the time without a commit, and the reasons for which a process may end.

While `min_replicas` groups exist that are well and reach the lighthouse and each other, some group commits within the detection time of
the faults there were (faults.DETECTION_S), rendezvous_s and SLACK_S: since the last commit, since the last fault began or ended, or since
there are so many again. Longer only
- by heal_grace_s where a heal is open, for the others wait so long for one that has too many steps held; twice where it fails, and the
  group is needed: then the next heal follows at once;
- by the join timeout where a group that is well has not called: one that starts, or a member;
- by the join timeout where there are too few without one that sits out, for its heals have failed: nobody else may come;
- by takeover_s where none of those is a member of the newest quorum with a state, for the others may come back;
- by the slowest group's steps;
- by the detection time of each connection that a bad network breaks meanwhile.

A group whose heals fail each time costs the others less and less: once three in a row have failed, their commits wait for it for no more
than half of the time that goes by, and heal_grace_s.

No rank ends without a fault of its own group: it waits out faults elsewhere, and a former member waits out a refusal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ft.protocol import messages as m
from ft.protocol.step import Phase
from tests.simulator.faults import BROKEN, DETECTION_S
from tests.simulator.invariants import Violation, require

if TYPE_CHECKING:
    from tests.simulator.cluster import Cluster
    from tests.simulator.servers import GroupNode

SLACK_S = 5.0
HEALS_FREE = 3  # that may fail in a row, and cost what they cost
NAME_S = 90.0  # until a name is free of one that hangs, or is cut off
FORGOTTEN_S = 60.0  # after it ended, a fault has been dealt with


@dataclass
class Heals:
    """Failed heals in a row of one process."""

    since_s: float
    failed: int = 0
    cost_s: float = 0.0  # to the others, since the third


class Liveness:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.world = cluster, cluster.world
        self.longest_s = 0.0  # without a commit, while there could have been one
        self.detection_s = 0.0  # the longest of the run's faults
        self._since_s = 0.0
        self._faults: list[tuple[float, float, str]] = []  # (until when it counts, its detection time, its kind)
        self._refused_s: dict[str, float] = {}  # name -> since when another has it
        self._extra: dict[str, float] = {}  # in this wait
        self._heals: dict[str, Heals] = {}  # of processes whose heals fail each time

    def fault(self, kind: str, detection_s: float, lasts_s: float = 0.0) -> None:
        now_s = self.world.now_s
        self._faults = [one for one in self._faults if one[0] > now_s]
        self._faults.append((now_s + lasts_s + detection_s + FORGOTTEN_S, detection_s, kind))
        self.detection_s = max(self.detection_s, detection_s)
        self.restart()

    def broke(self) -> None:
        """Adds the detection time of a connection that a bad network has broken."""
        self._extra[BROKEN] = self._extra.get(BROKEN, 0.0) + DETECTION_S[BROKEN]

    def restart(self) -> None:
        """Begins the wait anew after a change, without allowances."""
        self._since_s, self._extra = self.world.now_s, {}

    def check(self) -> None:
        """Checks the bounds once a second."""
        able = self._able()
        self._check_heals(able)
        if len(able) < self.cluster.setting.lighthouse.min_replicas:
            self.restart()
            return
        self._note_extras(able)
        times, now_s = self.cluster.times, self.world.now_s
        waited_s = now_s - self._since_s
        self.longest_s = max(self.longest_s, waited_s)
        known_s = max((detection_s for until_s, detection_s, _ in self._faults if until_s > now_s), default=0.0)
        allowed_s = known_s + times.rendezvous_s + SLACK_S + sum(self._extra.values())
        if waited_s > allowed_s:
            node = self.cluster.lighthouse
            why = node.machine.reason if node is not None else "there is no lighthouse"
            kinds = sorted({kind for until_s, _, kind in self._faults if until_s > now_s})
            raise Violation(
                f"no commit for {waited_s:.0f} s, while {[group.process.name for group in able]} are well; after {kinds or 'nothing'} "
                f"{known_s:g} s may pass, and besides {times.rendezvous_s + SLACK_S:g} s, {self._extra or ''}: {why}"
            )

    def _able(self) -> list[GroupNode]:
        """Groups that are well, and reach the lighthouse and each other: of those that a cut parts, as many as may be."""
        node, network = self.cluster.lighthouse, self.cluster.network
        if node is None or not node.process.alive or node.process.stopped or node.hindered:
            return []
        able = [group for group in self.cluster.live() if self._is_well(group)]
        if not network.cuts:
            return able
        able = [group for group in able if not network.is_parted(group.site, node.process.site)]
        while able:
            parted = {one: sum(network.is_parted(one.site, other.site) for other in able) for one in able}
            worst = max(able, key=lambda one: parted[one])
            if not parted[worst]:
                break
            able.remove(worst)
        return able

    def _is_well(self, group: GroupNode) -> bool:
        processes = [group.process, *(rank.process for rank in group.ranks)]
        if self.cluster.names_away and not group.is_connected:
            return False
        whole = all(process.alive and not process.stopped for process in processes)
        return whole and not group.left and not group.wish and not any(rank.trainer.hangs for rank in group.ranks)

    def _note_extras(self, able: list[GroupNode]) -> None:
        setting, times = self.cluster.setting, self.cluster.times
        newest = {m.incarnation_of(replica_id) for replica_id in self.cluster.truth.newest.ids}
        if any(rank.machine.heal for group in self.cluster.live() for rank in group.ranks):
            self._extra["a heal"] = times.heal_grace_s * (2 if self._heals else 1)  # one that fails, and the next
        if any(group.process_id not in newest for group in able):
            self._extra["who starts"] = setting.lighthouse.join_timeout_s
        rests = [g for g in able if (heals := self._heals.get(g.process_id)) and heals.failed >= HEALS_FREE]
        if len(able) - len(rests) < setting.lighthouse.min_replicas:
            self._extra["sits out"] = setting.lighthouse.join_timeout_s
        up_to_date_candidates = [
            g for g in able if g.process_id in newest and all(rank.weights is not None for rank in g.ranks)
        ]
        if not up_to_date_candidates and times.takeover_s is not None:
            self._extra["succession"] = times.takeover_s
        slow_s = 2 * setting.compute_s * max(group.slow for group in able)
        if slow_s > 1.0:
            self._extra["slow steps"] = max(slow_s, self._extra.get("slow steps", 0.0))

    def joins(self, group: GroupNode) -> None:
        """Forgets the refusal of a group that has become a member."""
        self._refused_s.pop(group.name, None)

    def lighthouse_starts(self) -> None:
        """Resets what a new lighthouse process cannot know: since when a name is refused, and which heals have failed."""
        self._refused_s.clear()
        self._heals.clear()

    # -- heals that fail ----------------------------------------------------------------------------------------------

    def heal_failed(self, group: GroupNode) -> None:
        heals = self._heals.setdefault(group.process_id, Heals(self.world.now_s))
        heals.failed += 1
        if heals.failed == HEALS_FREE:
            heals.since_s = self.world.now_s

    def _check_heals(self, able: list[GroupNode]) -> None:
        """Checks the time that the others wait for heals while there are enough of them without the healing groups."""
        slow = {group.name: group for group in able if group.process_id in self._heals}
        if not slow or len(able) - len(slow) < self.cluster.setting.lighthouse.min_replicas:
            return
        waited_for = {name for group in able for rank in group.ranks for name in rank.slow_readers if rank.fences}
        waited_for |= {
            name for name, group in slow.items() if any(r.machine.phase is Phase.AWAITING_STATE for r in group.ranks)
        }
        for name in waited_for & slow.keys():
            heals = self._heals[slow[name].process_id]
            if heals.failed < HEALS_FREE:
                continue
            heals.cost_s += 1.0
            allowed_s = self.cluster.times.heal_grace_s + SLACK_S + (self.world.now_s - heals.since_s) / 2
            if heals.cost_s > allowed_s:
                raise Violation(
                    f"the others have waited {heals.cost_s:.0f} s for {name}, of whose heals {heals.failed} in a row have failed, since "
                    f"the third of them {self.world.now_s - heals.since_s:.0f} s ago"
                )

    # -- ends ---------------------------------------------------------------------------------------------------------

    def ends(self, group: GroupNode, who: str, why: str, *, member: bool) -> None:
        """A process of the group ends by itself."""
        if "two groups with the name" in why:
            since_s = self._refused_s.setdefault(group.name, self.world.now_s)
            waited_s = self.world.now_s - since_s
            require(waited_s < NAME_S, f"{who} has been refused its name for {waited_s:.0f} s: {why}")
        hindered = group.harmed or self.cluster.name_of(group).slow_heals
        if not (hindered or group.left or self.cluster.stopped_because or not member):
            raise Violation(f"{who} ends, and nothing was done to its group: {why}")
