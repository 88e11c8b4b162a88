"""One replica group of test_rounds_killed.py as a process of its own, which does harm to itself at a place in a round when it is told to.

    python -m tests.ft.round_process NAME LIGHTHOUSE HARM FILE

HARM, once there is a FILE: kill-in-inner-steps, kill-in-prepare, kill-in-outer-step or stop-in-inner-steps; or none. A line of JSON for
each round that holds. The job ends two rounds after the one that was stopped is with the two that nothing happens to again.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from ft.sync_schedule import Schedule
from tests.ft.round_groups import Commit, Group

SCHEDULE = Schedule(8, fragments=2, delay=1, alpha=0.5)
PREPARED = SCHEDULE.inner_steps - SCHEDULE.delay - 1  # after this optimizer step of a round its sums are on their way
PLACES = {"inner-steps": 0, "prepare": PREPARED, "outer-step": None}
ALL = 6  # groups
UNHARMED, BACK = {"a", "b"}, {"a", "b", "f"}


class Harmed(Group):
    harm: str
    told: Path
    met = False  # a round of all six was there: until then groups come in one by one
    alone = False  # after it, one of the two that nothing happens to

    def harm_at(self, place: int | None) -> None:
        what, _, where = self.harm.partition("-in-")
        if where and place == PLACES[where] and self.told.exists():
            self.harm = "none"
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    def round(self) -> Commit | None:
        commit = super().round()
        if commit is not None:
            groups = {owner.partition(":")[0] for _, owner in commit.slots}
            self.met |= len(groups) == ALL
            self.alone |= self.met and groups == UNHARMED
            if self.alone and groups == BACK:
                self.rounds_to_do = min(self.rounds_to_do, self.manager.step + 2)
            self.say(commit)
        return commit

    def say(self, commit: Commit) -> None:
        digest = hashlib.sha256()
        for weights in self.history[self.manager.step].outer:
            digest.update(weights.numpy().tobytes())
        line: dict[str, Any] = {"step": self.manager.step, "slots": commit.slots, "holes": commit.holes}
        print(json.dumps({**line, "digest": digest.hexdigest(), "computed": self.computed}), flush=True)


def main(name: str, lighthouse: str, harm: str, told: str) -> None:
    faulthandler.register(signal.SIGUSR1)
    group = Harmed(name, lighthouse, SCHEDULE, 1 << 20)
    group.harm, group.told, group.alone = harm, Path(told), harm == "none" and name not in UNHARMED
    group.inside = lambda group, place: group.harm_at(place)  # type: ignore[attr-defined]
    group.before_commit = lambda group: group.harm_at(None)  # type: ignore[attr-defined]
    group.run()
    if group.error is not None:
        raise group.error


if __name__ == "__main__":
    main(*sys.argv[1:])
