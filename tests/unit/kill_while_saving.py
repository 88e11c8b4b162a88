"""A program that is killed while it saves, once per instant: for test_checkpoint_kill.py.

    python kill_while_saving.py FOLDER SCENARIO

It prepares FOLDER/base. For n = 1, 2, ... a forked copy of it saves once in FOLDER/n, a copy of that folder, under an
audit hook (PEP 578) that sends it SIGKILL just before its n-th operation on a file there: opening, creating,
renaming, removing; every 200th write counts as one, and is cut in half. It ends with the first n that the save outlives
and prints how many kills there were.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from tests.unit.checkpoint_job import Job
from training.checkpoint_dcp import DigestingStream

_OPERATIONS = frozenset({"open", "os.mkdir", "os.rename", "os.rmdir"})


def prepare(folder: Path, scenario: str) -> Job:
    """Prepares a run that is about to save step 6 after 2 and 4 (and to remove 2), or to replace step 4 by another step 4."""
    Job(folder).step_and_save(2, 4)
    job = Job(folder, keep_latest_k=2)
    job.train({"new": 6, "again": 5}[scenario])
    return job


def main(folder: Path, scenario: str) -> int:
    job = prepare(folder / "base", scenario)
    instant = 0
    while True:
        instant += 1
        here = folder / str(instant)
        shutil.copytree(folder / "base", here)
        pid = os.fork()
        if pid == 0:
            kill_at(instant, here)
            job.checkpointer.folder = here / "checkpoint"
            job.checkpointer.save({"new": 6, "again": 4}[scenario])
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            print(instant - 1)
            return os.waitstatus_to_exitcode(status)


def kill_at(instant: int, folder: Path) -> None:
    count = 0

    def one_more() -> None:
        nonlocal count
        count += 1
        if count == instant:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, args: tuple[Any, ...]) -> None:
        # rmtree removes relative to the folder it has opened
        if event == "os.remove" or (event in _OPERATIONS and str(folder) in str(args[0])):
            one_more()

    write, writes = DigestingStream.write, 0

    def watched_write(self: DigestingStream, data: Any) -> int:
        nonlocal writes
        writes += 1
        if writes % 200:
            return write(self, data)
        view = memoryview(data).cast("B")
        write(self, view[: len(view) // 2])
        self.flush()
        one_more()
        return write(self, view[len(view) // 2 :])

    DigestingStream.write = watched_write  # type: ignore[method-assign]
    sys.addaudithook(watch)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
