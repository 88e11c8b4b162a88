"""One replica group of test_rounds_killed.py as a process of its own, which does harm to itself at a place in a round when it is told to.

    python -m tests.ft.round_process NAME LIGHTHOUSE HARM FILE

HARM, once there is a FILE: kill-in-inner-steps, kill-in-prepare, kill-in-outer-step or stop-in-inner-steps; or none. Before it comes to
harm it writes into FILE how many rounds there are. A line of JSON for each round that holds. Once there is a file `soon` in the same
folder, group a writes the last round's number into `end`.
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

from ft.config import Schedule
from tests.ft.round_groups import Commit, Group

SCHEDULE = Schedule(8, fragments=2, delay=1, alpha=0.5)
PREPARED = SCHEDULE.inner_steps - SCHEDULE.delay - 1  # after this optimizer step of a round its sums are on their way
ROUNDS_TO_HEAR = 5  # no round holds without the sums of a, so nobody is far ahead of it
PLACES = {"inner-steps": 0, "prepare": PREPARED, "outer-step": None}


class Harmed(Group):
    harm: str
    told: Path

    def harm_at(self, place: int | None) -> None:
        what, _, where = self.harm.partition("-in-")
        if where and place == PLACES[where] and self.told.exists():
            self.harm = "none"
            self.told.write_text(str(self.manager.step))
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)

    def round(self) -> Commit | None:
        end, soon = self.told.with_name("end"), self.told.with_name("soon")
        if self.name == "a" and soon.exists():
            soon.write_text(str(self.manager.step + ROUNDS_TO_HEAR))
            soon.rename(end)
        if end.exists():
            self.rounds_to_do = int(end.read_text())
        commit = super().round()
        if commit is not None:
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
    group.harm, group.told = harm, Path(told)
    group.inside = lambda group, place: group.harm_at(place)  # type: ignore[attr-defined]
    group.before_commit = lambda group: group.harm_at(None)  # type: ignore[attr-defined]
    group.run()
    if group.error is not None:
        raise group.error


if __name__ == "__main__":
    main(*sys.argv[1:])
