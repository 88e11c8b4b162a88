"""What goes wrong in a run, drawn from its seed before it starts: a list, so that a failing run can be told with fewer entries.

Times are spread over the first two thirds of a run; the last third shows whether all live groups find together again.
"""

from __future__ import annotations

from dataclasses import dataclass

from ft.sim.network import Cut, Quality
from ft.sim.world import Dice

# How often each kind is drawn, in hundredths. Every one must be seen in 1,000 seeds.
KINDS = {
    "rank killed": 16,
    "group server killed": 8,
    "host lost": 6,
    "group stopped": 8,
    "rank stopped": 5,
    "group server stopped": 4,
    "group slow": 6,
    "group cut off": 7,
    "pair cut": 5,
    "one-way cut": 4,
    "halves cut": 4,
    "lighthouse restarted": 8,
    "lighthouse stopped": 4,
    "group leaves": 4,
    "group joins": 5,
    "not a number": 6,
    "shrink asked": 3,
}
BROKEN = "connection broken"  # drawn apart from these, by `interrupted`


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    who: int  # which of the groups that live then, modulo their number
    lasts_s: float
    share: float  # a number in [0, 1) for what the kind still leaves open

    def __str__(self) -> str:
        return f"{self.at_s:7.2f} s: {self.kind}, group #{self.who}, {self.lasts_s:.2f} s"


def draw(dice: Dice, groups: int, duration_s: float) -> tuple[Fault, ...]:
    """More faults in some runs than in others, none in a few; some of them in bursts, where rules meet."""
    number = int(dice.between(0.0, 10.0 + groups * 0.1))
    found: list[Fault] = []
    at_s = 0.0
    for _ in range(number):
        in_burst = bool(found) and dice.chance(0.4)
        at_s = at_s + dice.between(0.0, 1.5) if in_burst else dice.between(0.0, 0.66 * duration_s)
        # Most are short; some outlast the heartbeat timeout (5 s), the heal grace and the takeover (30 s).
        lasts_s = dice.pick((dice.between(0.05, 2.0), dice.between(2.0, 8.0), dice.between(8.0, 45.0)))
        found.append(Fault(at_s, _kind(dice), dice.index(1000), lasts_s, dice.random()))
    return tuple(sorted(found, key=lambda fault: fault.at_s))


def interrupted(dice: Dice, duration_s: float) -> tuple[Fault, ...]:
    """Connections between group servers and the lighthouse that break: the group lives, is lost at once, and returns within a second. So
    it may have committed a step that the others, told of its loss, have given up and make again without it."""
    found = [
        Fault(dice.between(0.0, 0.66 * duration_s), BROKEN, dice.index(1000), 0.0, 0.0) for _ in range(dice.index(9))
    ]
    return tuple(sorted(found, key=lambda fault: fault.at_s))


def quality(dice: Dice, groups: int) -> Quality:
    """Half of the runs have a good network, the others one of several bad ones. A broken stream is a lost group, so of more groups each
    one's breaks less often: 50 that lose one of themselves every two seconds (seed 781) have no time to form a quorum in between."""
    if dice.chance(0.5):
        return Quality()
    return Quality(
        loss=dice.pick((0.0, 0.002, 0.02)),
        duplicate=dice.pick((0.0, 0.01, 0.1)),
        late=dice.pick((0.0, 0.002, 0.02)),
        broken=dice.pick((0.0, 0.0005, 0.005)) * min(1.0, 5 / groups),
        delay_s=(0.0005, dice.pick((0.005, 0.05))),
    )


def cut_for(fault: Fault, who: str, groups: list[str], lighthouse: str) -> Cut:
    """`groups` are the live ones, in the order of their names."""
    others = [name for name in groups if name != who]
    if fault.kind == "pair cut" and others:  # both still reach the lighthouse
        return Cut(frozenset({who}), frozenset({others[int(fault.share * len(others))]}))
    if fault.kind == "halves cut":  # the lighthouse is on one side
        return Cut(frozenset(groups[: max(1, int(fault.share * len(groups)))]))
    if fault.kind == "one-way cut":
        inside, outside = ({who}, None) if fault.share < 0.5 else ({lighthouse, *others}, frozenset({who}))
        return Cut(frozenset(inside), outside, one_way=True)
    return Cut(frozenset({who}), frozenset({lighthouse}) if fault.share < 0.4 else None)


def _kind(dice: Dice) -> str:
    place = dice.random() * sum(KINDS.values())
    for kind, weight in KINDS.items():
        place -= weight
        if place < 0:
            return kind
    return kind
