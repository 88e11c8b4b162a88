"""Faults of the environment, and of several groups at once: the lighthouse, its name and its disk, links, capacity, clocks, and joiners
that never finish healing. Each is a method with the name of the fault in faults.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.simulator.faults import Fault
from tests.simulator.network import Cut
from tests.simulator.servers import LIGHTHOUSE
from tests.simulator.world import Process

if TYPE_CHECKING:
    from tests.simulator.cluster import Name
    from tests.simulator.harm import Harm
    from tests.simulator.servers import GroupNode

FLAP_S = 2.0  # a link works, and does not
PAUSES_S = (1.0, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0)  # timeouts: a pause ends just before one of them
PHASES = ("asks", "meets", "fetches", "holds", "arrives", "loads")  # of a heal


class Outages:
    def __init__(self, harm: Harm) -> None:
        self.harm, self.cluster, self.world, self.network = harm, harm.cluster, harm.world, harm.network
        self.of: dict[str, Callable[[Fault], None]] = {
            "lighthouse away": self._lighthouse_away,
            "lighthouse forgot": self._lighthouse_away,
            "lighthouse moves": self._lighthouse_moves,
            "second lighthouse": self._second_lighthouse,
            "names away": self._names_away,
            "other times": self._other_settings,
            "other token": self._other_settings,
            "lighthouse disk": self._lighthouse_disk,
            "pair parted": self._pair_parted,
            "pair parted, forming": self._pair_parted,
            "link flaps": self._link_flaps,
            "capacity away": self._capacity_away,
            "members replaced": self._members_replaced,
            "too many groups": self._too_many_groups,
            "half gone": self._half_gone,
            "other layout": self._other_layout,
            "joiner dies": self._joiner_dies,
            "heal fails": self._heal_fails,
            "notices late": lambda fault: self._set(fault, "notices_late_s", 0.2 + 4.0 * fault.share),
            "paused": self._paused,
            # A host's is set an hour ahead, or back. Nothing comes of it: all that a machine is told is Process.now_s.
            "wall clock": lambda fault: None,
            "suspended": self._suspended,
        }

    # -- the lighthouse -----------------------------------------------------------------------------------------------

    def _lighthouse_away(self, fault: Fault) -> None:
        cluster = self.cluster
        if cluster.lighthouse is not None:
            self.world.kill(cluster.lighthouse.process)
        if fault.kind == "lighthouse forgot":
            cluster.state_file, cluster.truth.forgetful = None, True
        self.harm.lasts(fault.lasts_s, cluster.start_lighthouse)

    def _lighthouse_moves(self, fault: Fault) -> None:
        """Kills the lighthouse with its host, and starts it on another one; its name leads there after a while."""
        cluster = self.cluster
        if cluster.lighthouse is None or not cluster.lighthouse.process.alive:
            return
        cluster.lighthouse.process.dark = True
        self.world.kill(cluster.lighthouse.process)
        cluster.lighthouse_moves += 1
        self.world.after(fault.lasts_s * fault.share, None, cluster.start_lighthouse)
        self._set(fault, "names_away", True)

    def _second_lighthouse(self, fault: Fault) -> None:
        """Starts a lighthouse beside the first, at its name and with its state file: that one may be stopped, or seem to be."""
        cluster, first = self.cluster, self.cluster.lighthouse
        if first is None or not first.process.alive:
            return
        if fault.share < 0.5:
            self.world.stop(first.process)
            self.harm.lasts(fault.lasts_s, lambda: self.world.resume(first.process))
        cluster.start_lighthouse(beside=True)

    def _names_away(self, fault: Fault) -> None:
        """Lets names fail: connections stand, new ones do not come about. Some connections break."""
        self._set(fault, "names_away", True)
        live = self.cluster.live()
        for group in live[: int(fault.share * (len(live) + 1))]:
            self.harm.disturb(group, fault.lasts_s)
            group.break_connection()

    def _other_settings(self, fault: Fault) -> None:
        """Starts the lighthouse with other times, or another token, and after a while with the right ones again."""
        cluster, ours = self.cluster, self.cluster.setting.lighthouse

        def restart() -> None:
            if cluster.lighthouse is not None:
                self.world.kill(cluster.lighthouse.process)
            self.world.after(0.5, None, cluster.start_lighthouse)

        def right() -> None:
            cluster.lighthouse_config, cluster.wrong_token = ours, False
            restart()

        if fault.kind == "other times":
            cluster.lighthouse_config = replace(ours, times=replace(ours.times, heartbeat_timeout_s=6.0))
        else:
            cluster.wrong_token = True
        restart()
        self.harm.lasts(fault.lasts_s, right)

    def _lighthouse_disk(self, fault: Fault) -> None:
        """Fills the lighthouse's disk, or makes it read-only or slow: its writes are delayed."""
        node = self.cluster.lighthouse
        if node is not None:
            node.disk_s = self.world.now_s + fault.lasts_s
            self.harm.lasts(fault.lasts_s, lambda: None)

    # -- links --------------------------------------------------------------------------------------------------------

    def _pair(self, fault: Fault) -> Cut | None:
        live = self.cluster.live()
        if len(live) < 2:
            return None
        one = live[fault.who % len(live)]
        other = live[(fault.who + 1 + int(fault.share * (len(live) - 1))) % len(live)]
        if one is other:
            return None
        for group in (one, other):
            self.harm.disturb(group, fault.lasts_s)
        one_way = int(fault.share * 128) % 2 == 0
        self.world.seen[f"pair parted: {'one way' if one_way else 'both ways'}"] += 1
        return Cut(frozenset({one.site}), frozenset({other.site}), one_way=one_way)

    def _pair_parted(self, fault: Fault) -> None:
        """Parts a pair in the middle of its work, or just before a generation is formed."""
        if (cut := self._pair(fault)) is None:
            return
        self.network.cut(cut)
        if fault.kind == "pair parted, forming":
            live = self.cluster.live()
            live[int(fault.share * 7) % len(live)].break_connection()
        self.harm.lasts(fault.lasts_s, lambda: self.network.mend(cut))

    def _link_flaps(self, fault: Fault) -> None:
        if (cut := self._pair(fault)) is None:
            return
        until_s = self.world.now_s + fault.lasts_s

        def turn() -> None:
            if cut in self.network.cuts:
                self.network.mend(cut)
            elif self.world.now_s < until_s:
                self.network.cut(cut)
            if self.world.now_s < until_s:
                self.world.after(FLAP_S, None, turn)

        turn()
        self.harm.lasts(fault.lasts_s + FLAP_S, lambda: None)

    # -- capacity -----------------------------------------------------------------------------------------------------

    def _capacity_away(self, fault: Fault) -> None:
        """Fewer than min_replicas are left, and launchers find no place for more. Some that are left are asked to leave meanwhile."""
        cluster, live = self.cluster, self.cluster.live()
        left = max(0, cluster.setting.lighthouse.min_replicas - 1 - int(fault.share * 2))
        self._set(fault, "no_capacity", True)
        for group in live[left:]:
            self._kill(group)

    def _members_replaced(self, fault: Fault) -> None:
        """All members, or some, are cut off from the lighthouse, though not from each other; and what starts their groups takes them for
        dead, and starts them elsewhere. The old ones are found and ended long after the cut."""
        cluster, live = self.cluster, self.cluster.live()
        gone = live if fault.share < 0.5 else live[: max(1, int(fault.share * len(live)))]
        cut = Cut(frozenset(group.site for group in gone), frozenset({LIGHTHOUSE}))
        self.network.cut(cut)
        for group in gone:
            self.harm.disturb(group, fault.lasts_s)
            name = cluster.name_of(group)
            name.group, name.site = None, f"{group.site}~"
            self.world.after(2.0 + 8.0 * fault.share, None, cluster.start_group, name)

        def end() -> None:
            self.network.mend(cut)
            for group in gone:
                self.world.after(30.0, None, self._kill, group)

        self.harm.lasts(fault.lasts_s, end)

    def _too_many_groups(self, fault: Fault) -> None:
        for _ in range(1 + int(fault.share * 3)):
            self.cluster.add_group()

    def _half_gone(self, fault: Fault) -> None:
        """Kills half of the groups at one instant; with their hosts, or with a message from their kernels."""
        live = self.cluster.live()
        for group in live[:: 2 if fault.who % 2 else -2][: (len(live) + 1) // 2]:
            for process in self._incarnations(group):
                process.dark = fault.share < 0.5
            self._kill(group)

    def _other_layout(self, fault: Fault) -> None:
        """Restarts the lighthouse; before the members have found it a group of another layout is there, again and again."""
        cluster = self.cluster
        self._lighthouse_away(replace(fault, lasts_s=fault.share * 5.0))
        name = cluster.add_group(fingerprint="theirs")

        def end() -> None:
            name.wanted = False
            if name.group is not None:
                name.group.kill()

        self.harm.lasts(fault.lasts_s, end)

    # -- joiners ------------------------------------------------------------------------------------------------------

    def _joiner(self, fault: Fault) -> Name:
        live = self.cluster.live()
        group = live[fault.who % len(live)]
        self._kill(group)
        return self.cluster.name_of(group)

    def _joiner_dies(self, fault: Fault) -> None:
        """Lets a joiner die several times in a row, each time in another phase."""
        if len(self.cluster.live()) > 1:
            first = int(fault.share * len(PHASES))
            times = 2 + fault.who % 4
            self._joiner(fault).dies_in = [
                PHASES[(first + turn * (1 + fault.who % 5)) % len(PHASES)] for turn in range(times)
            ]

    def _heal_fails(self, fault: Fault) -> None:
        """Damages the state on its way, each time; or it is so slow that the sources have to commit without knowing it sent."""
        if len(self.cluster.live()) > 1:
            name = self._joiner(fault)
            if fault.who % 3:
                name.failing_heals = 2 + int(fault.share * 4)
            else:
                # while a group sits out, the others make hundreds of steps
                name.slow_heals = 7 if self.cluster.setting.groups < 6 else 3

    # -- time ---------------------------------------------------------------------------------------------------------

    def _paused(self, fault: Fault) -> None:
        """Pauses any process, until just before some timeout."""
        live, lasts_s = self.cluster.live(), PAUSES_S[fault.who % len(PAUSES_S)] * (0.9 + 0.09 * fault.share)
        kind = int(fault.share * 64) % 4
        if kind == 0 or not live:
            if self.cluster.lighthouse is not None:
                self.harm.stop([self.cluster.lighthouse.process], lasts_s)
            return
        group = live[int(fault.share * 16) % len(live)]
        group.harmed = True
        self.harm.disturb(group, lasts_s)
        processes = self._incarnations(group)
        self.harm.stop([processes[:1], processes[1:2], processes][kind - 1], lasts_s)

    def _suspended(self, fault: Fault) -> None:
        """Suspends a host, or all of them (a laptop's lid). The trainers' clock stands still meanwhile."""
        cluster, live = self.cluster, self.cluster.live()
        groups = live if fault.share < 0.4 else live[fault.who % max(1, len(live)) :][:1]
        processes = [process for group in groups for process in self._incarnations(group)]
        if fault.share < 0.4 and cluster.lighthouse is not None:
            processes.append(cluster.lighthouse.process)
        for group in groups:
            group.harmed = True
            self.harm.disturb(group, fault.lasts_s)
            for rank in group.ranks:
                rank.process.clock_s -= fault.lasts_s
        self.harm.stop(processes, fault.lasts_s)

    def _set(self, fault: Fault, name: str, value: float) -> None:
        """Sets an attribute of the cluster for the duration of the fault, then resets it."""
        setattr(self.cluster, name, value)
        self.harm.lasts(fault.lasts_s, lambda: setattr(self.cluster, name, type(value)()))

    def _kill(self, group: GroupNode) -> None:
        group.harmed = True
        group.kill()

    def _incarnations(self, group: GroupNode) -> list[Process]:
        return [group.process, *(rank.process for rank in group.ranks)]
