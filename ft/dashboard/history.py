"""History of a job since its lighthouse process started: points of the loss curve, and events of the timeline.

It is recorded whether or not a page is open, so it is cheap, O(1) for a report or a tick, and bounded.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Any, Literal, NamedTuple, get_args

from ft.protocol import messages as m
from ft.protocol.group import recover_src_replica_ranks
from ft.protocol.lighthouse import LighthouseMachine

Lane = Literal["membership", "heal", "commit", "corruption", "storage", "settings"]
Grade = Literal["good", "info", "bad"]
LANES = get_args(Lane)
MAX_EVENTS, MAX_POINTS, MAX_SIZES, MAX_GONE = 400, 1000, 400, 4096
MAX_TEXT = 300  # characters of an event
NAMED = 6  # most groups named in an event; of further ones it has the count
MERGED = 12  # an event equal to one of so many newest events is counted there
RATE_S = 60.0  # period of the step rate


# The page gets the fields of these classes in order, except the last. `at_s`: since 1970. `changed`: History.changes at the latest change.


@dataclass
class TimelineEvent:
    number: int
    at_s: float
    lane: int  # index of LANES
    grade: Grade
    step: int
    text: str
    times: int
    changed: int


@dataclass
class Point:
    """The loss of a step, from a heartbeat: with short steps not of each step, and sometimes one step late."""

    at_s: float
    step: int
    loss: float  # nats per token
    changed: int


@dataclass
class Size:
    """Number of live members of the newest quorum, from `at_s` on."""

    at_s: float
    members: int
    changed: int


class Departure(NamedTuple):
    at_s: float
    why: str
    clean: bool


class History:
    """History of a job during one lighthouse process. `changes` counts all changes of it; `items_between` returns the changed items."""

    def __init__(self, machine: LighthouseMachine, wall_clock: Callable[[], float] = time.time) -> None:
        self._machine, self._wall_clock = machine, wall_clock
        self.changes = 0
        self.events: deque[TimelineEvent] = deque(maxlen=MAX_EVENTS)
        self.points: list[Point] = []
        self.sizes: deque[Size] = deque(maxlen=MAX_SIZES)
        self.cut_at = (0, 0)  # newest return of the job to an earlier step: number of that change, and the step
        self.healing: dict[str, tuple[int, tuple[str, ...]]] = {}  # id that heals -> step of the state, its sources
        self.gone: OrderedDict[str, Departure] = OrderedDict()  # by id, the latest last
        self.last_step_s = 0.0  # time of the newest reported commit, in seconds since 1970
        self._numbers = 0
        self._ids: frozenset[str] = frozenset()  # ids of the newest quorum
        self._quorum_id = 0
        # (time, step) of each new step of the last RATE_S, at least two
        self.recent_steps: deque[tuple[float, int]] = deque()
        for replica_id in machine.roster.lost:  # lost before this began
            self.gone[replica_id] = Departure(0.0, "", clean=False)
        self._see_quorum()

    def on_event(self, event: m.Event, out: m.Out) -> None:
        self._see_departures(event.replica_id if isinstance(event, m.Leave) and event.clean else "")
        for effect in out.effects:
            if isinstance(effect, m.Answer):
                self._see_quorum()
            elif isinstance(effect, m.Refuse) and effect.code != "LOST":
                self.add("membership", "bad", f"{effect.replica_id} is refused: {effect.reason}")
            elif isinstance(effect, m.MustRestore) and effect.settled:  # at settled 0 the job only begins
                who = f"{named(effect.replica_ids)} must load a checkpoint"
                self.add(
                    "commit",
                    "bad",
                    f"step {m.describe_step(effect.settled)} was settled, and no group has its state: {who}",
                )
            elif isinstance(effect, m.Notify) and isinstance(effect.notice, m.GenerationAborted):
                if self._ids.isdisjoint(effect.replica_ids):
                    continue  # for a former member only: the newest quorum is not aborted
                self.add("commit", "bad", f"quorum {effect.notice.quorum_id} is aborted: {effect.notice.reason}")

    def reported(self, report: Any) -> None:
        """Records a pharos_pb2.Report."""
        now_s, step = self._wall_clock(), m.step_of(report.step)
        quorum = self._machine.quorum
        if report.step == m.VOID or (quorum and report.step < quorum.reference[0]):
            return  # of a group that heals or is behind, or from before the job went back to a checkpoint
        if not self.recent_steps or step > self.recent_steps[-1][1]:
            if self.recent_steps:
                self.last_step_s = now_s
            self.recent_steps.append((now_s, step))
            while len(self.recent_steps) > 2 and now_s - self.recent_steps[0][0] > RATE_S:
                self.recent_steps.popleft()
            while self.recent_steps[0][0] > now_s:  # the clock was set back
                self.recent_steps.popleft()
        loss = report.mean_loss  # 0: the group's process has committed no step yet
        if math.isfinite(loss) and loss and (not self.points or step > self.points[-1].step):
            self.points.append(Point(round(now_s, 1), step, float(f"{loss:.5g}"), self._change()))
            if len(self.points) > MAX_POINTS:
                self.points = thinned(self.points, MAX_POINTS // 2)
        if report.replica_id in self.healing and step >= self.healing[report.replica_id][0]:
            step, _ = self.healing.pop(report.replica_id)
            self.add("heal", "good", f"{report.replica_id} has the state of step {step}")

    def on_timeline_event(self, replica_id: str, event: Any) -> None:
        """Adds a pharos_pb2.TimelineEvent. Most events happen in all groups, and equal ones are merged, so the group is not named."""
        concerns_one = event.lane == "storage"
        text = f"{replica_id}: {event.text}" if concerns_one else event.text
        self.add(event.lane, "good" if event.lane == "settings" else "bad", text, step=event.step)

    def add(self, lane: Lane, grade: Grade, text: str, *, step: int | None = None) -> None:
        text = clean(text, MAX_TEXT)
        number, step = LANES.index(lane), self.step if step is None else step
        for event in list(self.events)[-MERGED:]:
            if (event.lane, event.text) == (number, text):
                event.times, event.changed = event.times + 1, self._change()
                return
        self._numbers += 1
        at_s = round(self._wall_clock(), 1)
        self.events.append(TimelineEvent(self._numbers, at_s, number, grade, step, text, 1, self._change()))

    def items_between(self, since: int, until: int) -> dict[str, list[list[Any]]]:
        """Returns the items whose latest change is after `since` and not after `until`, as the page gets them."""
        lists: dict[str, Iterable[Any]] = {"points": self.points, "sizes": self.sizes, "events": self.events}
        return {
            name: [list(vars(x).values())[:-1] for x in items if since < x.changed <= until]
            for name, items in lists.items()
        }

    @property
    def step(self) -> int:
        """Returns the newest step that is known to be committed."""
        quorum = self._machine.quorum
        return max(
            self.recent_steps[-1][1] if self.recent_steps else 0, m.step_of(quorum.reference[0]) if quorum else 0
        )

    def steps_per_s(self) -> float:
        """Returns the step rate of the last RATE_S, or of the last two steps if they are further apart; 0 if there was no step."""
        if len(self.recent_steps) < 2:
            return 0.0
        (before_s, _), (ended_s, last) = self.recent_steps[-2], self.recent_steps[-1]
        if self._wall_clock() - ended_s > max(RATE_S, 2 * (ended_s - before_s)):
            return 0.0
        began_s, first = self.recent_steps[0]
        return (last - first) / (ended_s - began_s) if ended_s > began_s else 0.0

    def _see_departures(self, leaves: str) -> None:
        """Records the ids lost since the last call. `leaves`: the id that has left cleanly by this event, else empty."""
        lost = self._machine.roster.lost
        if next(reversed(lost), None) in (next(reversed(self.gone), None), None):
            return
        now_s = self._wall_clock()
        new = list(takewhile(lambda i: i not in self.gone, reversed(lost)))[::-1]
        for replica_id in new:
            self.gone[replica_id] = Departure(now_s, clean(lost[replica_id], MAX_TEXT), replica_id == leaves)
            self.healing.pop(replica_id, None)
        while len(self.gone) > MAX_GONE:
            self.gone.popitem(last=False)
        for why, went in dict.fromkeys((lost[i], i == leaves) for i in new):
            who = [i for i in new if (lost[i], i == leaves) == (why, went)]
            verb = "left" if went else "is lost" if len(who) == 1 else "are lost"
            self.add("membership", "info" if went else "bad", f"{named(who)} {verb}: {why}")
        if new and not self._ids.isdisjoint(new):
            self._see_size()

    def _see_size(self) -> None:
        members = sum(i not in self.gone for i in self._ids)
        self.sizes.append(Size(round(self._wall_clock(), 1), members, self._change()))

    def _see_quorum(self) -> None:
        quorum = self._machine.quorum
        if quorum is None or quorum.quorum_id == self._quorum_id:
            return
        before, self._ids, self._quorum_id = self._ids, frozenset(quorum.ids), quorum.quorum_id
        step = m.step_of(quorum.reference[0])
        if self.points and step < self.points[-1].step:
            self.points = [point for point in self.points if point.step <= step]
            self.recent_steps.clear()
            self.cut_at = (self._change(), step)
        self._see_size()
        new = [i for i in quorum.ids if i not in before]
        out = sorted(before - self._ids)
        words = [f"{named(new)} in"] * bool(new) + [f"{named(out)} out"] * bool(out)
        change = "; ".join(words) or "the same members"
        self.add("membership", "good", f"quorum {quorum.quorum_id} of {len(quorum.ids)} groups: {change}", step=step)
        self.healing = {
            quorum.ids[rank]: (step, tuple(quorum.ids[source] for source in sources))
            for rank, sources in recover_src_replica_ranks(quorum).items()
        }
        if self.healing:
            sources = dict.fromkeys(i for _, ids in self.healing.values() for i in ids)
            verb = "heals" if len(self.healing) == 1 else "heal"
            self.add("heal", "info", f"{named(self.healing)} {verb} step {step} from {named(sources)}", step=step)

    def _change(self) -> int:
        self.changes += 1
        return self.changes


def thinned(points: list[Point], most: int) -> list[Point]:
    """Returns at most `most` of the points: the first, the last, and between them the first in each of equal intervals of steps, whose size
    is a power of two, so that thinning again gives what thinning all points at once would. (Every second point, again and again, would
    leave only the newest: of a long job the last hour.)"""
    first, *_, last = points
    size = 1 << ((last.step - first.step) // (most - 2)).bit_length()
    between = [b for a, b in pairwise(points[:-1]) if a.step // size != b.step // size]
    return [first, *between, last]


def named(ids: Iterable[str]) -> str:
    """Returns the ids as one string, the last ones only as a count if there are more than NAMED."""
    all_ids = list(ids)
    if len(all_ids) > NAMED:
        return f"{', '.join(all_ids[: NAMED - 1])} and {len(all_ids) - NAMED + 1} more"
    return " and ".join(filter(None, [", ".join(all_ids[:-1]), *all_ids[-1:]]))


def clean(text: str, most: int) -> str:
    """Returns a string of another process fit for display: at most `most` characters, unprintable ones (also direction marks) replaced."""
    text = "".join(x if x.isprintable() else "\N{REPLACEMENT CHARACTER}" for x in text[: most + 1])
    return text if len(text) <= most else f"{text[: most - 1]}…"
