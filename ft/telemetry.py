"""Durations and events of a Manager: for the log, training/progress.py and training/background_writer.py, and once per heartbeat for the
group server, the lighthouse and its dashboard. Written by the trainer's thread, and read by the thread "ft-report". Each second counts for
the innermost phase only:

    quorum    waiting for a quorum               rebuild   forming the process group with the other replica groups
    heal      a state is on its way, to this group or from it
    reduce    the reduction itself             waiting   in a reduction, for groups that are later than this one
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal, Protocol

from ft.protocol import messages as m
from ft.protocol.messages import name_of

KEPT = 21  # newest steps, whose median duration is reported
SELDOM_S = 30.0  # between two equal reports of a rank other than 0; rank 0 reports once per heartbeat
SENDS = "sending its state"
log = logging.getLogger("pharos.manager")


class PhaseTimer(Protocol):
    """An account of seconds by phase."""

    @property
    def goodput_s(self) -> float:
        """Seconds spent on committed steps. From any thread."""
        return 0.0

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def long_phase(self) -> tuple[str, float] | None:
        """Name of the current phase, if its duration does not depend on a step's, and the seconds since it began. From any thread."""
        return None

    def move(self, seconds: float, from_phase: str, to_phase: str) -> None:
        """Moves seconds that were counted for one phase to another."""
        return

    def lose(self) -> None:
        """Counts what was computed since the last commit as lost."""
        return


class NoPhaseTimer(PhaseTimer):
    """An account that counts nothing."""


class RecordEvent(Protocol):
    """A receiver of a group's events by name, from rank 0: "quorum" (quorum_id, groups, healing), "heal" (sources), "healed" (bytes),
    "failed" (reason), "lost work"; and from any rank "weights differ" (rank, groups; empty: no majority has equal weights)."""

    def __call__(self, event: str, step: int, **what: object) -> None: ...


def ignore_event(event: str, step: int, **what: object) -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Status:
    """Values that are reported at once when they change. `waiting`: this rank entered a reduction with other groups more than half a
    heartbeat ago, and is still in it or in the vote after it; `summed`: it is in the vote, so its own reduction is over. `phase`: name of a
    long phase, with its time limit; "" and 0: none. `quorum_id`: ID of the newest quorum, as of before the rest was read; 0: none."""

    waiting: bool = False
    summed: bool = False
    phase: str = ""
    phase_limit_s: float = 0.0
    quorum_id: int = 0


class ManagerTelemetry:
    """The telemetry of one Manager. `step`: returns the step of the trainer's state. `inner_steps`: optimizer steps of one commit; the
    protocol counts commits. `long_phase_s`: time limit of a phase whose duration does not depend on a step's, and of the first step; 0: not
    reported. `show_event`: shows a message in a lane of the dashboard, at the protocol's step. `pending_since_s`: returns the start of the
    oldest reduction that waits for other groups; None: there is none. `quorum_id`: returns the ID of the newest quorum. For the
    trainer's thread, except for `status` and `report_forever`, which run in the thread "ft-report"."""

    def __init__(
        self,
        group_rank: int,
        step: Callable[[], int],
        phase_timer: PhaseTimer,
        record_event: RecordEvent,
        show_event: Callable[[str, int, str], None],
        inner_steps: int = 1,
        long_phase_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        pending_since_s: Callable[[], float | None] = lambda: None,
        quorum_id: Callable[[], int] = lambda: 0,
    ) -> None:
        self._pending_since_s, self._quorum_id = pending_since_s, quorum_id
        self._group_rank, self._step, self.phase_timer, self._record_event = group_rank, step, phase_timer, record_event
        self._show_event, self._inner_steps, self._long_phase_s = show_event, inner_steps, long_phase_s
        self._clock = clock
        # "": no wait; "reduction": for other groups, in a reduction; "vote": for ranks of this group, which may be in a reduction
        self.current_wait: Literal["", "reduction", "vote"] = ""
        self.wait_began_s = 0.0  # start of the newest reduction's wait
        self.first_began_s: float | None = None  # start of the first step; infinite once a step is committed
        self._sends: tuple[float, float] | None = None  # start and time limit of a commit's wait for joiners
        self.waits: deque[float] = deque(maxlen=KEPT)  # seconds, of complete reductions
        self.step_seconds: deque[float] = deque(maxlen=KEPT)
        self._began_s = self.committed_at_s = clock()
        self.mean_loss = 0.0  # of the newest step
        self._failure = (0, "")  # step and reason of the newest failure

    @property
    def median_step_s(self) -> float:
        """Median duration of the newest steps; 0: there is none."""
        return statistics.median(self.step_seconds) if self.step_seconds else 0.0

    @contextmanager
    def sends(self, limit_s: float) -> Iterator[None]:
        """Wraps the wait of a commit until joiners have received this group's state, or enough of it."""
        self._sends = (self._clock(), limit_s)
        try:
            yield
        finally:
            self._sends = None

    def lost(self) -> None:
        """Counts what was computed for this step as lost."""
        self.phase_timer.lose()
        self.event("lost work")

    def event(self, name: str, **what: object) -> None:
        """Reports, on rank 0, an event that all ranks of the group see."""
        if self._group_rank == 0:
            self._record_event(name, self._step(), **what)

    def failed(self, reason: str) -> None:
        """Reports that a generation failed, and with it the attempt at a step. A retry that fails for the same reason is not logged."""
        self.event("failed", reason=reason)
        if self._group_rank == 0:
            if (failure := (self._step(), reason)) != self._failure:
                self._failure = failure
                log.warning("a step failed: %s", reason)
            self._show_event("commit", self._step() // self._inner_steps, f"a step failed: {reason}")

    def quorum(self, quorum: m.QuorumResult) -> None:
        """Reports a quorum: its members, and which of them heal from which."""
        members, sources = quorum.members, [quorum.members[source.replica_rank] for source in quorum.sources]
        # spares beyond max_active_groups, too; but only torchft's interface sets that, and its Manager is given no receiver of events
        healing = [name_of(member) for member in members if member not in quorum.participants]
        self.event("quorum", quorum_id=quorum.quorum_id, groups=[*map(name_of, members)], healing=healing)
        at = m.describe_step(quorum.reference[0], self._inner_steps)
        text = f"quorum {quorum.quorum_id} at step {at}: {len(members)} groups ({', '.join(map(name_of, members))})"
        if quorum.heal:
            self.event("heal", sources=[*map(name_of, sources)])
            text += f"; this group heals from {' and '.join(sources)}"
        if quorum.recover_dst_replica_ranks:
            text += f"; {', '.join(members[rank] for rank in quorum.recover_dst_replica_ranks)} heal from this group"
        log.info("%s", text)

    def difference(self, effect: m.ReportWeightsDiffer, members: tuple[str, ...]) -> None:
        """Reports that the weights of groups differ."""
        rank, divergent, step = self._group_rank, effect.replica_ids, m.step_of(effect.step) * self._inner_steps
        self._record_event("weights differ", step, rank=rank, groups=[*map(name_of, divergent)])
        whose = " and ".join(f"group {name_of(member)}" for member in divergent or members)
        others = len(members) - len(divergent)
        than = f"those of {others} other groups" if divergent else "each other, and no majority has equal ones"
        text = f"after step {step} the weights of rank {rank} of {whose} differ from {than}"
        self._show_event("corruption", m.step_of(effect.step), text)
        log.error("%s", text)

    def status(self, beat_s: float) -> Status:
        """This rank's status. A wait counts once it lasts half of `beat_s`: nearly every step has a shorter one."""
        quorum_id = self._quorum_id()  # first: a wait of an older quorum must not be reported as the newest one's
        now_s, wait = self._clock(), self.current_wait
        since_s = self.wait_began_s if wait else self._pending_since_s()
        waiting = since_s is not None and now_s - since_s > beat_s / 2
        phase, seconds, max_s = "", 0.0, self._long_phase_s
        if sends := self._sends:
            phase, seconds, max_s = SENDS, now_s - sends[0], sends[1]
        elif long_phase := self.phase_timer.long_phase():
            phase, seconds = long_phase
        elif (began_s := self.first_began_s) is not None and began_s < math.inf:
            phase, seconds = "first step", now_s - began_s
        limit_s = max_s if seconds < max_s else 0.0  # a phase that lasts longer is not reported
        is_summed = waiting and wait == "vote"
        return Status(waiting, is_summed, phase if limit_s else "", limit_s if phase else 0.0, quorum_id)

    def report_forever(
        self,
        beat_s: float,
        closed: threading.Event,
        send: Callable[[dict[str, float], Status], None],
        more: Callable[[Status], object],
    ) -> None:
        """Reports in a thread of its own, when `status` or the result of `more` has changed; else rank 0 reports once per heartbeat and
        other ranks every SELDOM_S, as a report of every rank in every heartbeat would be most of their server's work."""
        sent, sent_s = object(), -math.inf
        while not closed.wait(beat_s / 2):
            now_s, status = self._clock(), self.status(beat_s)
            values = (status, more(status))
            if values == sent and now_s - sent_s < (0.9 * beat_s if self._group_rank == 0 else SELDOM_S):
                continue
            sent, sent_s = values, now_s
            goodput_s, wall_s = self.phase_timer.goodput_s, now_s - self._began_s
            send(dict(goodput_s=goodput_s, wall_s=wall_s, mean_loss=self.mean_loss), status)
