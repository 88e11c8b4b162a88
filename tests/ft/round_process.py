"""One replica group of test_rounds_killed.py as a process of its own, which does harm to itself at a place in a round that is told.

    python -m tests.ft.round_process NAME LIGHTHOUSE GROUPS HARM

Once six have been together, and the last round was of so many GROUPS, HARM is kill-in-inner-steps, kill-in-prepare, kill-in-outer-step or
stop-in-inner-steps; or none; or back, of the one that was stopped, in its next life. A line of JSON for each round that holds. The job
ends two rounds after that one is among three.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

from ft.sync_schedule import Schedule
from tests.ft.round_groups import Commit, Group

SCHEDULE = Schedule(8, fragments=2, delay=1, alpha=0.5)
PREPARED = SCHEDULE.inner_steps - SCHEDULE.delay - 1  # after this optimizer step of a round its sums are on their way
PLACES = {"inner-steps": 0, "prepare": PREPARED, "outer-step": None}
ALL = 6  # groups
BACK = 3  # groups, when the one that stopped is among them again


class Harmed(Group):
    together: int
    harm: str
    met = False  # a round of all groups was there
    done = False  # the harm to this group, or to the one that stopped

    def harm_at(self, place: int | None) -> None:
        what, _, where = self.harm.partition("-in-")
        if where and self.met and not self.done and self.contributors == self.together and place == PLACES[where]:
            self.done = True
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    @property
    def contributors(self) -> int:
        """To the last round."""
        return len(self.history[max(self.history)].slots) if self.history else 0

    def round(self) -> Commit | None:
        commit = super().round()
        if commit is not None:
            self.met |= self.contributors == ALL
            self.done |= self.met and self.contributors == BACK - 1
            if self.done and self.contributors == BACK:
                self.rounds_to_do = min(self.rounds_to_do, self.manager.step + 2)
            self.say(commit)
        return commit

    def say(self, commit: Commit) -> None:
        digest = hashlib.sha256()
        for weights in self.history[self.manager.step].outer:
            digest.update(weights.numpy().tobytes())
        line: dict[str, Any] = {"step": self.manager.step, "slots": commit.slots, "holes": commit.holes}
        print(json.dumps({**line, "digest": digest.hexdigest(), "computed": self.computed}), flush=True)


def main(name: str, lighthouse: str, groups: str, harm: str) -> None:
    group = Harmed(name, lighthouse, SCHEDULE, 1 << 20)
    group.together, group.harm, group.done = int(groups), harm, harm == "back"
    group.inside = lambda group, place: group.harm_at(place)  # type: ignore[attr-defined]
    group.before_commit = lambda group: group.harm_at(None)  # type: ignore[attr-defined]
    group._run()
    if group.error is not None:
        raise group.error


if __name__ == "__main__":
    main(*sys.argv[1:])
