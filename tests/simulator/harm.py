"""Executes the faults of faults.py on the processes and the network of a simulated cluster, and ends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.simulator import faults
from tests.simulator.faults import Fault
from tests.simulator.outages import Outages
from tests.simulator.servers import LIGHTHOUSE
from tests.simulator.world import Process

if TYPE_CHECKING:
    from tests.simulator.cluster import Cluster
    from tests.simulator.servers import GroupNode

HANGS = ("call", "forward", "reduction", "vote", "configured")


class Harm:
    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.world, self.network = cluster, cluster.world, cluster.network
        self.active = 0  # faults that last
        self.outages = Outages(self)
        self._disturbed_s: dict[str, float] = {}  # process name -> until when it was, or is, out of reach

    def suffer(self, fault: Fault) -> None:
        cluster, live = self.cluster, self.cluster.live()
        if cluster.trace is not None:
            self.world.note("fault", str(fault))
        cluster.calm_since_s = self.world.now_s
        known_s = faults.DETECTION_S[fault.kind]
        waits = [group for group in live if not any(rank.trainer.hangs or rank.trainer.hang_at for rank in group.ranks)]
        if fault.kind == "trainer hangs" and 2 * (len(waits) - 1) <= len(live):
            known_s = faults.ALL_HUNG_S  # the groups that wait are no majority
        cluster.liveness.fault(fault.kind, known_s, fault.lasts_s)
        if fault.kind in self.outages.of:
            self.outages.of[fault.kind](fault)
        elif "lighthouse" in fault.kind:
            self._hit_lighthouse(fault)
        elif fault.kind == "group joins":
            cluster.add_group(shrink=fault.share < 0.25)  # some newcomers ask for previous members alone
        elif not live:
            return
        elif "cut" in fault.kind:
            self._cut(fault, live)
        else:
            self._hit_group(fault, live[fault.who % len(live)], live)
        self.world.seen[f"fault: {fault.kind}"] += 1

    def disturbed_until(self, group: GroupNode) -> float:
        """Returns the time in seconds until which the group was last out of reach; -1e9 if it never was."""
        return self._disturbed_s.get(group.process.name, -1e9)

    def _hit_lighthouse(self, fault: Fault) -> None:
        cluster, node = self.cluster, self.cluster.lighthouse
        if node is None or not node.process.alive:
            return
        if fault.kind == "lighthouse stopped":
            self.world.stop(node.process)
            self.lasts(fault.lasts_s, lambda: self.world.resume(node.process))
            return
        if fault.share < 0.3:
            node.dies_writing = True  # at the next write, or in two seconds
            self.world.after(2.0, None, self.world.kill, node.process)
            self.lasts(2.0 + fault.lasts_s, cluster.start_lighthouse)
            return
        self.world.kill(node.process)
        if fault.share > 0.8:
            self.world.seen["fault: state file lost"] += 1
            cluster.state_file, cluster.truth.forgetful = None, True
        self.lasts(fault.lasts_s, cluster.start_lighthouse)

    def _hit_group(self, fault: Fault, group: GroupNode, live: list[GroupNode]) -> None:
        name = self.cluster.name_of(group)
        rank = group.ranks[int(fault.share * len(group.ranks))]
        group.harmed = True
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
        elif fault.kind == "trainer hangs":
            self._hang(fault, group)
        elif fault.kind == "trainers hang":  # at one instant
            first = live.index(group)
            for place in range(2 + int(fault.share * (len(live) - 2))):
                self._hang(fault, live[(first + place) % len(live)])
        elif fault.kind == "trainer cannot be killed":
            self._hang(fault, group, kills=True)
        elif fault.kind == "group slow":
            group.slow = 1.0 + 30.0 * fault.share**3
            self.lasts(fault.lasts_s, lambda: setattr(group, "slow", 1.0))
        elif fault.kind == "group leaves" and len(live) > self.cluster.setting.lighthouse.min_replicas + 1:
            if fault.share < 0.5:
                group.wants_to_leave()
            else:  # its host is drained when it has just come back, and heals
                self.world.seen["fault: group leaves while it heals"] += 1
                name.drains = True
                group.kill()
        elif fault.kind == "shrink asked":
            name.shrink = True
            if fault.share < 0.3:  # and no previous member is left that could follow
                for one in live:
                    one.kill()
        elif fault.kind == faults.BROKEN:
            group.break_connection()
        elif fault.kind == "not a number":
            group.nan_attempts = 1 + int(fault.share * 3.5)

    def _hang(self, fault: Fault, group: GroupNode, *, kills: bool = False) -> None:
        """Stops one trainer's thread at its next place; in the end it continues, or is killed. kills: its launcher tries to end it
        sooner, in vain: the process waits for a disk, and its group's server lives with it, while another starts elsewhere."""
        self.disturb(group, fault.lasts_s)
        group.harmed = True
        trainer = group.ranks[int(fault.share * 7) % len(group.ranks)].trainer
        trainer.hang_at = HANGS[int(fault.share * 64) % len(HANGS)]
        trainer.holds_interpreter = bool(int(fault.share * 512) % 2)

        def end() -> None:
            if kills or int(fault.share * 256) % 2:
                group.stuck = False
                group.kill()
            else:
                trainer.wake()

        def replace() -> None:
            if trainer.hangs:
                group.stuck = True
                group.kill()

        if kills:
            self.world.after(fault.share * 0.5 * fault.lasts_s, None, replace)
        self.lasts(fault.lasts_s, end)

    def _stop(self, group: GroupNode, processes: list[Process], lasts_s: float) -> None:
        self.disturb(group, lasts_s)
        self.stop(processes, lasts_s)

    def stop(self, processes: list[Process], lasts_s: float) -> None:
        for process in processes:
            self.world.stop(process)

        def resume() -> None:
            for process in processes:
                self.world.resume(process)

        self.lasts(lasts_s, resume)

    def _cut(self, fault: Fault, live: list[GroupNode]) -> None:
        cut = faults.cut_for(fault, live[fault.who % len(live)].site, [group.site for group in live], LIGHTHOUSE)
        # A pair has to fail three rendezvous of 10 s before one of it sits out.
        lasts_s = fault.lasts_s * (2.0 if fault.kind == "pair cut" else 1.0)
        for group in live:
            self.disturb(group, lasts_s)
        self.network.cut(cut)
        self.lasts(lasts_s, lambda: self.network.mend(cut))

    def disturb(self, group: GroupNode, lasts_s: float) -> None:
        name = group.process.name
        self._disturbed_s[name] = max(self._disturbed_s.get(name, 0.0), self.world.now_s + lasts_s)

    def lasts(self, lasts_s: float, end: Callable[[], Any]) -> None:
        self.active += 1

        def over() -> None:
            self.active -= 1
            self.cluster.calm_since_s = self.world.now_s
            self.cluster.liveness.restart()
            end()

        self.world.after(lasts_s, None, over)
