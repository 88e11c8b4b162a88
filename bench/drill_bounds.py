"""Bounds on how long the faults of the drill may hold the others up: each from the job's own settings, each figure from the diaries.

Flow: drill.py asks `in_time` when the job has ended, with what drill_faults.py injected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from bench.drill_diary import Diary
from bench.drill_faults import Incident
from bench.drill_rules import Verdict, longest_gap_s
from ft.config import FaultTolerance

SLACK_S = 5.0  # to come together, once it is known what to do
QUIET_S = 10.0  # who has committed nothing for so long sits out
BACK_S = 60.0  # after a cable is whole again
STEADY_STEPS = 20
HUNG_LEAST_S, HUNG_ALONE_S = 10.0, 60.0  # that a majority, or anybody, waits at least for who hangs
HUNG_MEDIANS = 5


@dataclass(frozen=True)
class Figure:
    words: str
    is_: float
    at_most: float

    @property
    def holds(self) -> bool:
        return self.is_ <= self.at_most

    def __str__(self) -> str:
        return f"{self.words} {self.is_:.2f}, at most {self.at_most:.2f}"


Diaries = Mapping[str, Diary]
Bound = Callable[[Diaries, Incident, FaultTolerance], Iterator[Figure]]


def in_time(diaries: Diaries, incidents: Sequence[Incident], settings: FaultTolerance) -> Verdict:
    """Every fault that has a bound kept it."""
    told, missed = list[str](), list[str]()
    for incident in incidents:
        for figure in BOUNDS.get(incident.kind, _none)(diaries, incident, settings):
            (told if figure.holds else missed).append(f"{incident.kind}: {figure}")
    words = "; ".join([*(f"NOT {miss}" for miss in missed), *told]) or "no fault that has a bound"
    return Verdict("in time", not missed, words)


def steady_s(diaries: Diaries, incident: Incident) -> float:
    """A step of the survivors before the fault, seconds."""
    gaps = [
        after.at_s - before.at_s
        for name in incident.survivors
        for before, after in pairwise(
            [line for line in diaries[name].since(0.0, "commit") if line.at_s < incident.at_s][-STEADY_STEPS:]
        )
    ]
    return median(gaps) if gaps else math.nan


def _next_s(diaries: Diaries, incident: Incident, since_s: float) -> float:
    """Until the first commit of a survivor after that, seconds; inf: there is none."""
    commits = [line.at_s for name in incident.survivors for line in diaries[name].since(since_s, "commit")[:1]]
    return min(commits, default=math.inf) - since_s


def _none(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    yield from ()


def _hang(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    waits = len(incident.live) - 1
    least_s = HUNG_LEAST_S if 2 * waits > len(incident.live) else HUNG_ALONE_S
    limit_s = max(least_s, HUNG_MEDIANS * steady_s(diaries, incident))
    yield Figure("seconds without a step", longest_gap_s(diaries, incident), limit_s + SLACK_S)


def _pair(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    limit_s = settings.heartbeat_timeout_s + settings.rendezvous_s + SLACK_S
    commits = sorted(line.at_s for diary in diaries.values() for line in diary.since(0.0, "commit"))
    while_s = [at_s for at_s in commits if incident.at_s <= at_s <= incident.repaired_s]
    before_s = [at_s for at_s in commits if at_s < incident.at_s][-1:]
    gaps = [after - before for before, after in pairwise([*before_s, *while_s, incident.repaired_s])]
    yield Figure("seconds without a step of anybody", max(gaps), limit_s)
    quiet = [n for n in incident.live if not _within(diaries[n], incident.repaired_s - QUIET_S, incident.repaired_s)]
    yield Figure("groups that sit out", len(quiet), 1)
    yield Figure("seconds from the repair until all are together", incident.back_s - incident.repaired_s, BACK_S)


def _within(diary: Diary, since_s: float, until_s: float) -> bool:
    return any(line.at_s <= until_s for line in diary.since(since_s, "commit"))


def _away(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    """Without a limit after which others may take the job over, nobody needs the lighthouse to commit: no step waits for it. A look at
    held-out text and a save are among the steps."""
    if settings.takeover_s == 0:
        limit_s = 2 * steady_s(diaries, incident) + SLACK_S
        yield Figure("seconds without a step", longest_gap_s(diaries, incident), limit_s)
    else:
        back_s = _next_s(diaries, incident, incident.repaired_s)
        yield Figure("seconds from its return to the next step", back_s, 2 * SLACK_S)


def _capacity(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    starts = sorted(
        line.at_s for name in incident.hit for line in diaries[name].since(incident.repaired_s, "start")[:1]
    )
    enough = starts[settings.min_replica_size - 2]  # the survivor, and as many of these
    yield Figure("seconds from the start of who was missing", _next_s(diaries, incident, enough), SLACK_S)


def _joiner(diaries: Diaries, incident: Incident, settings: FaultTolerance) -> Iterator[Figure]:
    """Its first death is that of a member; the bound is for those that follow."""
    [name] = incident.hit
    first_s = diaries[name].since(incident.at_s, "start")[0].at_s
    gaps = [
        after.at_s - before.at_s
        for other in incident.survivors
        for before, after in pairwise(diaries[other].since(0.0, "commit"))
        if first_s <= after.at_s <= incident.back_s
    ]
    yield Figure("seconds of the longest step", max(gaps), 2 * steady_s(diaries, incident) + 1)


BOUNDS: dict[str, Bound] = {
    "hang": _hang,
    "pair, in a sum": _pair,
    "pair, store at an end": _pair,
    "pair, while forming": _pair,
    "pair, forming, store at an end": _pair,
    "lighthouse away": _away,
    "capacity": _capacity,
    "joiner": _joiner,
}
