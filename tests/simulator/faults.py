"""Draws the faults of a run from its seed before it starts, as a list, so that a failing run can be reduced to fewer faults.

Faults begin in the first two thirds of a run; the last third shows whether all live groups train together again. Every other run has faults
of one class (CLASSES), in rotation, half of them only these.

`DETECTION_S` bounds the time in which the others must detect a fault, and its end; liveness.py checks it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.simulator.network import Cut, Quality
from tests.simulator.world import Dice

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


# Seconds until healthy groups notice, with the timeouts of messages.Timeouts and of the calls of servers.py.
STOPPED_S = 5.0  # heartbeat_timeout_s: a beat that does not come
HUNG_S, ALL_HUNG_S = 10.0, 60.0  # the adaptive limit of a majority that waits; stall_s, for any member
CALL_S = 20.0  # a call that went into a cut
DETECTION_S = {
    "rank killed": 3.0,  # its launcher's look, where nobody's stream says so
    "group server killed": 1.0,
    "host lost": STOPPED_S,
    "group stopped": STOPPED_S,
    "rank stopped": ALL_HUNG_S,  # its server beats on
    "group server stopped": STOPPED_S,
    "group slow": ALL_HUNG_S,
    "group cut off": CALL_S,
    "pair cut": STOPPED_S,
    "one-way cut": CALL_S,
    "halves cut": CALL_S,
    "lighthouse restarted": 35.0,  # takeover_s, where its file is lost
    "lighthouse stopped": STOPPED_S,
    "group leaves": 2.0,
    "group joins": 2.0,
    "not a number": 1.0,
    "shrink asked": 2.0,
    "connection broken": 3.0,
    "trainer hangs": HUNG_S,
    "trainers hang": ALL_HUNG_S,
    "trainer cannot be killed": ALL_HUNG_S,
    "lighthouse away": 5.0,  # from its return: streams, calls, and what was held
    "lighthouse forgot": 35.0,  # takeover_s
    "lighthouse moves": 20.0,  # a silent connection is given up after 15
    "second lighthouse": 35.0,  # the first finds out when it writes, every 10 s; or is silent
    "names away": 5.0,
    "other times": 5.0,
    "other token": 5.0,
    "lighthouse disk": 5.0,
    "pair parted": STOPPED_S,
    "pair parted, forming": STOPPED_S,
    "link flaps": STOPPED_S,
    "capacity away": 5.0,
    "members replaced": 35.0,  # takeover_s
    "too many groups": 2.0,
    "half gone": STOPPED_S,
    "other layout": 35.0,
    "joiner dies": 3.0,
    "heal fails": 3.0,
    "notices late": 5.0,
    "paused": ALL_HUNG_S,
    "wall clock": 0.0,
    "suspended": CALL_S,
}


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
    """Draws faults: more in some runs than in others, none in a few; some of them in bursts, where rules meet."""
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


@dataclass(frozen=True)
class Class:
    """Faults that occur together, under one name. `draw`: of the dice, the groups, and the run's length in seconds."""

    draw: Callable[[Dice, int, float], tuple[Fault, ...]]
    weight: int = 1  # of the turns; 0: played only where it is asked for
    min_replicas: bool = False  # two or three
    loss: bool = False  # of packets


def class_of(seed: int) -> str:
    """Chooses the class of a run that is given none: every other seed has one, in turns."""
    turns = [name for name, one in CLASSES.items() for _ in range(one.weight)]
    return turns[seed // 2 % len(turns)] if seed % 2 and turns else ""


def some(kind: str, most: int, low_s: float, high_s: float) -> Callable[[Dice, int, float], tuple[Fault, ...]]:
    """Returns a draw of one to `most` faults of a kind, after the job has begun; each lasts from `low_s` to `high_s`."""

    def draw(dice: Dice, groups: int, duration_s: float) -> tuple[Fault, ...]:
        at_s = sorted(dice.between(5.0, max(6.0, 0.66 * duration_s)) for _ in range(1 + dice.index(most)))
        return tuple(Fault(at, kind, dice.index(1000), dice.between(low_s, high_s), dice.random()) for at in at_s)

    return draw


def outage(kind: str) -> Callable[[Dice, int, float], tuple[Fault, ...]]:
    """Returns a draw of one outage: of seconds, of minutes, and now and then of an hour."""

    def draw(dice: Dice, groups: int, duration_s: float) -> tuple[Fault, ...]:
        place, at_s = dice.random(), dice.between(5.0, max(6.0, 0.5 * duration_s))
        ranges = ((0.4, 1.0, 15.0), (0.75, 15.0, 60.0), (1.0 - HOURS, 60.0, 240.0), (2.0, 3600.0, 3600.0))
        low_s, high_s = next((low, high) for until, low, high in ranges if place < until)
        return (Fault(at_s, kind, dice.index(1000), dice.between(low_s, high_s), dice.random()),)

    return draw


def each_minute(kind: str) -> Callable[[Dice, int, float], tuple[Fault, ...]]:
    def draw(dice: Dice, groups: int, duration_s: float) -> tuple[Fault, ...]:
        return tuple(Fault(10.0 + 60.0 * turn, kind, dice.index(1000), 0.0, dice.random()) for turn in range(3))

    return draw


def nothing(dice: Dice, groups: int, duration_s: float) -> tuple[Fault, ...]:
    return ()


HOURS = 0.15  # of the outages last one
REWINDS = "back to a checkpoint"
# What real jobs have, and the list above does not.
CLASSES = {
    "a trainer hangs": Class(some("trainer hangs", 2, 15.0, 150.0)),
    "several trainers hang": Class(some("trainers hang", 1, 15.0, 150.0)),
    "a trainer cannot be killed": Class(some("trainer cannot be killed", 1, 100.0, 200.0)),
    "a pair is parted in a sum": Class(some("pair parted", 1, 20.0, 90.0)),
    "a pair is parted while forming": Class(some("pair parted, forming", 1, 20.0, 90.0)),
    "a link flaps": Class(some("link flaps", 1, 20.0, 60.0)),
    "packets are lost": Class(nothing, loss=True),
    "lighthouse away": Class(outage("lighthouse away")),
    "lighthouse away with its file": Class(outage("lighthouse forgot")),
    "lighthouse moves": Class(outage("lighthouse moves")),
    "two lighthouses": Class(some("second lighthouse", 2, 5.0, 60.0)),
    "names do not resolve": Class(outage("names away")),
    "lighthouse with other times": Class(some("other times", 1, 5.0, 60.0)),
    "lighthouse with another token": Class(some("other token", 1, 5.0, 60.0)),
    "lighthouse's disk is full": Class(some("lighthouse disk", 2, 5.0, 60.0)),
    "fewer than min_replicas": Class(outage("capacity away"), min_replicas=True),
    "members cut off, and replaced": Class(some("members replaced", 1, 10.0, 90.0)),
    "more groups than the job has": Class(some("too many groups", 2, 0.0, 0.0)),
    "half of the groups gone": Class(some("half gone", 1, 0.0, 0.0)),
    "half of them gone, every minute": Class(each_minute("half gone")),
    "another layout after a restart": Class(some("other layout", 1, 20.0, 40.0)),
    "a joiner dies, several times": Class(some("joiner dies", 2, 0.0, 0.0)),
    "a heal fails each time": Class(some("heal fails", 2, 0.0, 0.0)),
    "notices late": Class(some("notices late", 2, 10.0, 60.0)),
    "pauses just below each timeout": Class(some("paused", 4, 0.0, 0.0)),
    "wall clocks jump": Class(some("wall clock", 4, 0.0, 0.0)),
    "suspended for a minute": Class(some("suspended", 1, 60.0, 60.0)),
    REWINDS: Class(nothing, weight=0),  # a tenth of the seeds that are given no class
}


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


def lossy(loss: float) -> Quality:
    """Quality of TCP over a link that loses so many packets: most come late, some connections are given up."""
    return Quality(loss=loss / 20, late=min(0.5, 2 * loss), broken=loss / 400, delay_s=(0.0005, 0.02))


def cut_for(fault: Fault, who: str, groups: list[str], lighthouse: str) -> Cut:
    """Returns the cut of a fault. `groups` are the live ones, in the order of their names."""
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
