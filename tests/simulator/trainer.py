"""Simulates the training thread of train.py and ft/manager.py: executes the effects of the state machine in order, and waits where they
wait.

    begin_step -> Compute:    forward and backward, the sum of figures -> Computed -> ... -> CommitStep: norm, optimizer -> begin_step
                                                                                      ... -> Compute: the step did not hold -> forward
               -> CommitStep: (of zeros, or of held sums) the sum of figures, norm, optimizer -> begin_step

Each of these includes a collective among the ranks of the group (inside.py). While the thread waits, events of other threads (notices, the
end of a heal, votes) still reach the state machine; their effects are executed when the thread is free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ft.protocol import messages as m
from ft.protocol.step import Phase

if TYPE_CHECKING:
    from tests.simulator.ranks import RankNode

OPTIMIZER_S = 0.01


class Trainer:
    """The trainer of one rank. `waits`: the call in which it stands (kind, subject); None: it runs, or waits for the machine's effects."""

    def __init__(self, rank: RankNode) -> None:
        self.rank = rank
        self.waits: tuple[str, Any] | None = ("its start", "")
        self.aside: set[m.VoteKey] = set()  # votes whose outcome is waited for in threads of their own
        self.wish = False  # some rank of the group was asked to leave, and its ranks have told each other
        self.queue: deque[m.Effect] = deque()
        self._running = False
        self.hang_at = ""  # where it is to hang next: call, configured, forward, reduction, vote
        self.hangs = False
        self.holds_interpreter = False  # when it hangs: its process reports nothing more
        self._wakes: Callable[[], None] = lambda: None
        self._late, self._dice = rank.cluster.setting.late_threads, rank.cluster.dice_of_threads
        self._summed = False  # this step's figures are summed over the group's ranks

    def hangs_in(self, place: str, go_on: Callable[[], None]) -> bool:
        """Returns whether the thread stops here: `go_on` continues it. The process lives, and so do its other threads."""
        if self.hang_at != place:
            return False
        self.hang_at, self.hangs, self._wakes = "", True, go_on
        self.waits = ("a hang", place)
        self.rank.world.seen[f"hang: {place}"] += 1
        if self.holds_interpreter and self.rank.report.quorum_id not in (0, self.rank.quorum_id):
            self.rank.world.seen["hang: the last report is of an older quorum"] += 1
        return True

    def wake(self) -> None:
        self.hang_at = ""
        if self.hangs:
            self.hangs, self.waits = False, None
            self._wakes()

    @property
    def is_idle(self) -> bool:
        """Waits for the machine."""
        return self.waits is None and not self.queue

    def begin(self) -> None:
        """Begins the loop's next turn."""
        if self.hangs_in("call", self.begin):
            return
        self.waits, machine = None, self.rank.machine
        if self.wish:
            self.wish = False
            self.rank.world.seen["leave: told at a step's boundary"] += 1
            self.rank.feed(m.Leaving())
        if machine.phase is Phase.BOUNDARY and not self.queue:
            self.rank.feed(m.Begin())
        else:
            self.run()

    def run(self) -> None:
        """Carries out the machine's effects until it has to wait."""
        if self._running or self.waits is not None:
            return
        self._running = True
        queue, do, process = self.queue, self.rank.do, self.rank.process
        if self._late and queue and self._dice.chance(0.05):
            self.waits = ("a core", "")
            self.rank.world.seen["wait: for a core"] += 1
            self.rank.world.after(self._dice.between(0.0, 0.3), process, self.goes_on)
        while queue and self.waits is None and process.alive:
            effect = queue.popleft()
            do[type(effect)](effect)
        self._running = False

    def goes_on(self) -> None:
        """Continues with the machine's effects, and waits for nothing."""
        self.waits = None
        self.run()

    def go_on(self, event: m.Event) -> None:
        """Delivers the awaited event."""
        self.waits = None
        self.rank.feed(event)

    # -- the loop's own turns ---------------------------------------------------------------------------------------

    def compute(self, effect: m.Compute) -> None:
        group = self.rank.group
        if self.hangs_in("forward", lambda: self.compute(effect)):
            return
        self.waits = ("inside", None)

        def computed() -> None:
            self._summed = True
            self.rank.computed(effect, group.able)

        group.inside.enter(self.rank, ("forward", effect.step, effect.slots), group.forward, computed)

    def update(self, effect: m.CommitStep, *, goes_back: bool = False) -> None:
        group, summed, self._summed = self.rank.group, self._summed, False
        self.waits = ("inside", None)

        def updated() -> None:
            if effect.leave:
                self.waits = ("the end", "it leaves")
                group.rank_left()
            elif goes_back:
                self.rank.goes_back()
            else:
                self.begin()

        key = ("update", effect.step, effect.commit_id, summed, "leaves" if effect.leave else "")
        group.inside.enter(self.rank, key, lambda: group.update(summed=summed), updated)

    def restore(self, effect: m.LoadCheckpoint) -> None:
        """Finds, with all ranks of the group, the newest checkpoint that each of them can read."""
        self.waits = ("inside", None)
        self.rank.group.inside.enter(self.rank, ("checkpoint", effect.settled), lambda: 0.1, self.rank.restored)
