"""A record of each step of a rank, for fault drills: with PHAROS_DRILL=1 start.py makes a RecordingManager instead of a Manager.

bench/drill.py reads FOLDER/event_log.RANK.jsonl while the job runs. A line has `event`, `at_s` (the host's monotonic clock), `pid`, `step`:

    start                    a process of this rank has started
    quorum                   it is in a quorum: quorum_id, participants (names), and `heals`: it has begun to fetch state
    commit                   commit_id, contributors (number of groups), `digest` of this rank's weights when the next step begins
    refused                  a step has failed, and its gradients were dropped
    extended                 a step continues with kept gradients, and slots of a lost group were added to it
    healed, restored         the state was loaded from other groups, or from a checkpoint
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from ft.buckets import to_local
from ft.digest import compared
from ft.manager import Manager
from ft.protocol import messages as m
from ft.seam import Commit, DataAssignment, StepTotals


class RecordingManager(Manager):
    """A Manager that writes the record to `folder`. It overrides those private methods of Manager that carry out what is recorded."""

    def __init__(self, folder: Path, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / f"event_log.{self._config.group_rank}.jsonl").open("a", encoding="utf-8")
        self._pending_commit: dict[str, Any] | None = None  # its line is written after the optimizer's step
        self._dropped = False  # True: gradients of this step were dropped
        self._write_line("start")

    def begin_step(self, *, until: int | None = None) -> DataAssignment:
        self._write_commit()
        return super().begin_step(until=until)

    def commit(self, totals: StepTotals) -> Commit | None:
        commit = super().commit(totals)
        if commit is None:  # with keep_global_batch also if slots of a lost group were added
            self._write_line("refused" if self._dropped else "extended")
        else:
            self._pending_commit = {"at_s": time.monotonic(), "contributors": len(commit.contributors)}
        self._dropped = False
        return commit

    def close(self, *, at_exit: bool = False) -> None:
        if self.may_exit:  # else the optimizer may not have stepped after the commit
            self._write_commit()
        super().close(at_exit=at_exit)
        self._file.close()

    def _drop_gradients(self) -> None:
        super()._drop_gradients()
        self._dropped = True

    def _configure(self, quorum: m.QuorumResult) -> m.Event | None:
        event = super()._configure(quorum)
        names = [replica_id.partition(":")[0] for replica_id in quorum.participants]
        self._write_line("quorum", quorum_id=quorum.quorum_id, participants=names, heals=quorum.heal)
        return event

    def _load_state(self, step: int) -> None:
        super()._load_state(step)
        self._write_line("healed")

    def _load_checkpoint(self) -> m.Event:
        event = super()._load_checkpoint()
        self._write_line("restored")
        return event

    def _write_commit(self) -> None:
        if self._pending_commit is not None:
            fields, self._pending_commit = self._pending_commit, None
            digest = hashlib.blake2b(digest_size=16)
            for weight in compared(self._parts):
                shard = to_local(weight.detach()).contiguous().view(-1).view(torch.uint8)
                digest.update(shard.cpu().numpy().data)
            self._write_line("commit", **fields, commit_id=self.commit_id, digest=digest.hexdigest())

    def _write_line(self, event: str, **fields: Any) -> None:
        if self._file.closed:
            return
        line = {"event": event, "at_s": time.monotonic(), "pid": os.getpid(), "step": self.step, **fields}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
