"""Simulates groups that save and die while storage fails: the loop of train.py, Saver, Checkpointer, WriterLease, MetricsWriter,
BackgroundWriter and sinks run unchanged under the scheduler of baton.py. Each group has one rank; steps compute nothing, and weights encode
their history.

Manager replaces ft/manager.py: the first group that has the state writes; a death moves that role; a restarted group heals from the others,
or, if no group has the state, all resume from the newest checkpoint.
"""

from __future__ import annotations

import errno
import json
import logging
import random
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

import train
from ft.seam import DataAssignment, GroupReleased
from tests.sim.baton import Baton, Condition, Disk, Outage, Process, Threading
from tests.unit.fakes import Lines
from training import (
    background_writer,
    checkpoint,
    checkpoint_dcp,
    checkpoint_fetch,
    checkpoint_files,
    durable_files,
    sinks,
)
from training.background_writer import BackgroundWriter
from training.checkpoint import SAVE_RETRY_S, Checkpointer, CheckpointFailed
from training.checkpoint_config import CheckpointConfig
from training.checkpoint_files import ROWS_STATE
from training.metrics_writer import SYNC_S, MetricsWriter
from training.progress import Progress
from training.saver import GRACE_S, LAST_SAVE_RETRY_S, Saver
from training.signals import SAVE, STOP
from training.writer_lease import WriterLease

LIMIT_S = 900.0  # a job of some minutes, with all that is done to it
KNOWN_S = 5.0  # a death is known after this at the latest
ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO)
WHO = ("all", "the writer", "the others")


class Plan:
    """A job and its faults, drawn from a seed. Each method adds a fault, and returns the plan."""

    def __init__(self, seed: int, fault_class: str = "") -> None:
        self.rng = rng = random.Random(f"saves {seed}")
        self.seed, self.fault_class = seed, fault_class or list(CLASSES)[seed % len(CLASSES)]
        self.steps, self.interval, self.step_s = rng.randint(6, 12), rng.randint(2, 4), rng.choice((1.0, 3.0, 10.0))
        if self.fault_class in ("storage fails", "the writer dies in a save"):
            self.steps = 20  # a save that failed has time to be made up for
        self.whole_s = self.steps * self.step_s
        self.deaths: list[tuple[str, int]] = []  # in turn: where, and after how many operations
        self.kills_at_s: list[tuple[float, str]] = []  # when, and whom: "writer", "all"
        # from when, after how long, how long, whom, error, slow_s
        self.outages: list[tuple[str, float, float, str, int, float]] = []
        self.asked: list[tuple[str, float, int]] = []  # from when, after how long, how many
        CLASSES[self.fault_class](self)
        if rng.random() < 0.3:
            rng.choice(BESIDES)(self)
        self.groups, self.keep = rng.randint(2, 4), rng.choice((0, 2, 3))
        self.async_mode, self.weights_alone = rng.choice(("disabled", "async")), rng.random() < 0.1
        self.shared = self.fault_class != "folders of their own"
        self.rows_kept = rng.choice((6, 100))  # by a relay; fewer than a job has, in half of them

    def fails(self, since: str) -> Plan:
        self.outages.append((*self.outage(since, 5.0, 30.0, 60.0, 200.0), self.rng.choice(ERRORS), 0.0))
        return self

    def is_slow(self, since: str) -> Plan:
        self.outages.append((*self.outage(since, 10.0, 30.0, 120.0), 0, self.rng.choice((0.5, 3.0, 20.0))))
        return self

    def outage(self, since: str, *long_s: float) -> tuple[str, float, float, str]:
        at_s = self.rng.uniform(0, self.whole_s if since == "the start" else 3.0)
        return since, at_s, self.rng.choice(long_s), self.rng.choice(WHO)

    def dies(self, *where: str) -> Plan:
        """Adds a death at one of these places."""
        self.deaths.append((where[0] if len(where) == 1 else self.rng.choice(where), self.rng.randint(1, 45)))
        return self

    def several_die(self, where: str) -> Plan:
        for _ in range(self.rng.randint(2, 4)):
            self.dies(where)
        return self

    def is_killed(self, whom: str, since: float = 0.0) -> Plan:
        """Adds a SIGKILL. `since`: its earliest time, as a share of the job."""
        self.kills_at_s.append((self.rng.uniform(self.whole_s * since, self.whole_s), whom))
        return self

    def may_all_die(self) -> Plan:
        if self.rng.random() < 0.5:
            self.is_killed("all", 0.5)
        return self

    def is_asked(self, since: str, within_s: float) -> Plan:
        self.asked.append((since, self.rng.uniform(0, within_s), self.rng.randint(1, 4)))
        return self


CLASSES: dict[str, Callable[[Plan], Plan]] = {
    "the writer dies at any time": lambda d: d.is_killed("writer"),
    "the writer dies in a save": lambda d: d.dies("in a save"),
    "the writer dies before its manifest": lambda d: d.dies("before its manifest"),
    "the writer dies after its manifest": lambda d: d.dies("after its manifest"),
    "the writer dies in the last save": lambda d: d.dies("in the last save"),
    "several writers die in a row": lambda d: d.several_die("in a save"),
    "several writers die in the last save": lambda d: d.several_die("in the last save"),
    "the writer commits alone, and dies in its save": lambda d: d.dies("alone").may_all_die(),
    "all die": lambda d: d.is_killed("all"),
    "storage fails": lambda d: d.fails("the start"),
    "storage fails in the last save": lambda d: d.fails("the last save"),
    "storage fails, and the writer dies": lambda d: d.fails("the start").dies("in a save", "in the last save"),
    "storage is slow": lambda d: d.is_slow("the start"),
    "storage is slow in the last save": lambda d: d.is_slow("the last save"),
    "asked to leave": lambda d: d.is_asked("the start", d.whole_s),
    "asked to leave at the end": lambda d: d.is_asked("the end", 60.0).dies("in the last save"),
    "asked to leave at the end, over storage that fails": lambda d: d.is_asked("the end", 60.0).fails("the last save"),
    "folders of their own": lambda d: d.dies("in a save", "in the last save", "after its manifest"),
}
BESIDES: tuple[Callable[[Plan], Plan], ...] = (
    lambda d: d.fails("the start"),
    lambda d: d.is_slow("the start"),
    lambda d: d.dies("in a save"),
    lambda d: d.fails("the last save"),
)


# ------------------------------------------------------------------------------------------------ in the place of ft


@dataclass
class Part:
    """A quorum."""

    quorum_id: int
    members: set[Group]
    participants: tuple[Group, ...]
    arrived: set[Group] = field(default_factory=set)
    released: set[Group] = field(default_factory=set)  # they have the commit to take
    withheld: set[Group] = field(default_factory=set)  # they are to have it when the writer is heard of again
    lost: set[Group] = field(default_factory=set)
    due: bool = False  # another quorum is


class Manager:
    """The manager of one group, with the interface of ft.seam.Seam; state that all groups share is in Job."""

    loaded_ledger: Mapping[str, Any] = MappingProxyType({})
    rewinds = ()

    def __init__(self, job: Job, group: Group) -> None:
        self._job, self._group = job, group
        self.history: list[str] | None = None  # commits; None: it holds nothing
        self.part: Part | None = None
        self.may_exit = self.finished = self.leaving = self.going = False
        self.saved: bool | None = None

    @property
    def step(self) -> int:
        return len(self.history or ())

    @property
    def writer_quorum(self) -> tuple[str, int] | None:
        if self.part is None or self.history is None or self.part.participants[:1] != (self._group,):
            return None
        return "epoch", self.part.quorum_id

    @property
    def needs_new_quorum(self) -> bool:
        return self.part is not None and bool(self.part.lost)

    def begin_step(self, *, until: int) -> None:
        if self.part is None or self.part.due:
            self._ask()
        if self.step >= until:
            self.may_exit = True

    def commit(self) -> bool:
        part, group = self.part, self._group
        assert part is not None
        self._job.arrives(part, group)
        self._job.changed.wait_for(lambda: group in part.released or bool(part.lost))
        if group not in part.released:
            return False
        part.released.discard(group)
        assert self.history is not None
        self.history.append(f"{self.step + 1} of {part.quorum_id}")
        self.may_exit |= self.leaving
        return True

    def _ask(self) -> None:
        job, group = self._job, self._group
        while True:
            job.asking.add(group)
            job.form()
            job.changed.wait_for(lambda: group not in job.asking or self.going)
            if not job.changed.wait_for(lambda: group not in job.asking, 1.5):  # three beats after SIGTERM
                job.asking.discard(group)
                raise GroupReleased(has_state=self.history is not None)
            assert self.part is not None
            if self.part.participants:
                return
            self.history = []
            group.run.restore()

    def leave(self) -> None:
        self.leaving = True

    def want_to_leave(self) -> None:
        self.going = True
        self._job.changed.notify_all()

    def regroup(self, until: int) -> None:
        self._ask()

    def finish(self, *, saved: bool) -> None:
        self.saved = saved

    def close(self) -> None:
        self._job.leaves(self._group, clean=self.may_exit and self.saved is not False, finished=self.saved is True)

    def state_dict(self) -> dict[str, Any]:
        return {"history": json.dumps(self.history)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.history = json.loads(state["history"])


class Weights:
    """Weights that encode their history of steps."""

    def __init__(self, manager: Manager) -> None:
        self._manager, self.values = manager, torch.zeros(2, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        self.values.copy_(weights(self._manager.history or []))
        return {"w": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["w"].clone()


def weights(history: list[str]) -> torch.Tensor:
    return torch.tensor([len(history), zlib.crc32(json.dumps(history).encode())], dtype=torch.float64)


# ------------------------------------------------------------------------------------------------ one group


class Nothing:
    def step(self, step: int) -> None: ...

    def step_done(self) -> None: ...

    def print_estimate(self, step: int) -> None: ...


class Figures(Nothing):
    """Replaces MetricsProcessor."""

    def __init__(self, job: Job, relay: MetricsWriter) -> None:
        self._job, self._relay = job, relay
        self.sync, self.close = relay.sync, relay.close

    def rows(self, history: list[str]) -> None:
        step = len(history)
        self._relay.write("metrics", step, {"loss": float(step)})
        if self._job.random.random() < 0.5:
            self._job.baton.sleep(0.001)  # the background writer is as fast as that
        self._relay.write("samples", step, {"slots": {str(step): history[-1]}})


class Group(Process):
    """One process of a group's only rank."""

    run: Trainer

    def __init__(self, job: Job, name: str) -> None:
        super().__init__(name)
        self.dies_at_manifest = ""
        self.job, self.pending, self.was_asked, self.said = job, 0, False, list[str]()
        self.folder = job.folder if job.plan.shared else job.folder / name
        self.manager = Manager(job, self)
        self.main = job.baton.spawn(name, self._live, self)

    def take(self, which: int = STOP | SAVE) -> int:
        pending, self.pending = self.pending & which, self.pending & ~which
        return pending

    def ask(self) -> None:
        """Handles SIGTERM: the trainer saves and leaves."""
        self.was_asked, self.pending = True, STOP
        self.manager.want_to_leave()

    def _live(self) -> None:
        job = self.job
        how = "failed"
        try:
            run = Trainer(job, self)
            try:
                run.train()
                how = run.verb or "finished already"
            finally:
                if not self.dead:
                    run.close()
        except (CheckpointFailed, OSError) as error:
            how = f"failed: {error}"
        job.ended(self, how)


class Trainer(train.Run):
    """A trainer with the loop of train.py."""

    def __init__(self, job: Job, group: Group) -> None:
        plan, clock = job.plan, job.baton.time
        self.job, self.group, self.verb, group.run = job, group, "", self
        self.config = SimpleNamespace(  # type: ignore[assignment]
            run_folder=group.folder,
            origin=SimpleNamespace(explain=str),
            training=SimpleNamespace(steps=plan.steps),
            validation=SimpleNamespace(enable=False),
            fault_tolerance=SimpleNamespace(enable=True),
            checkpoint=CheckpointConfig(
                interval=plan.interval,
                keep_latest_k=plan.keep,
                async_mode=plan.async_mode,  # type: ignore[arg-type]
                last_save_model_only=plan.weights_alone,
            ),
        )
        self.world, self.coordinate = SimpleNamespace(global_rank=0, world_size=1), SimpleNamespace(counts_tokens=True)  # type: ignore[assignment]
        self.device, self.progress, self.signals = torch.device("cpu"), Progress(clock), group  # type: ignore[assignment]
        self.log, self.manager = Lines(), group.manager  # type: ignore[assignment]
        self.pending_requests, self.save_overdue, self.budgets_end = 0, False, False
        self.loader = SimpleNamespace(load=iter)
        self.background_writer = BackgroundWriter(self.report_storage, clock=clock)
        writes = lambda: group.manager.writer_quorum  # noqa: E731
        self.relay = MetricsWriter(
            group.folder,
            writes,
            lambda step: sinks.Sinks(group.folder, kept_step=step),
            self.background_writer,
            clock=clock,
            rows_kept=plan.rows_kept,
        )
        self.inner_steps = self.slot_size = 1
        self.changes, self.data = {}, SimpleNamespace(continue_segments=lambda *given: "")  # type: ignore[assignment]
        self.metrics_processor = Figures(job, self.relay)  # type: ignore[assignment]
        self.values = Weights(group.manager)
        states = {"model": self.values, "ledger": group.manager, ROWS_STATE: self.relay}
        with self.progress.phase("start"):
            self.checkpointer = Checkpointer(
                self.config.checkpoint,
                group.folder,
                states,
                log=self.log,
                lease=WriterLease(group.folder, writes),
                clock=clock,
                in_thread=self.in_thread,
            )
            self.saver = Saves(self)
            self.exported_step = self.checkpointer.newest_step("model")
            if self.exported_step < plan.steps <= self.checkpointer.newest_step():
                self.checkpointer.load()
                job.loaded(group)

    def in_thread(self, work: Callable[[], None]) -> None:
        Threading(self.job.baton).Thread(target=work, name="look", daemon=True).start()

    def train_step(self) -> bool:
        manager = self.group.manager
        manager.begin_step(until=self.config.training.steps)
        if manager.step >= self.config.training.steps:
            return False
        self.compute_step(DataAssignment(manager.step, ()))
        self.job.baton.sleep(self.job.plan.step_s)
        if not manager.commit():
            return False
        assert manager.history is not None
        self.metrics_processor.rows(manager.history)  # type: ignore[attr-defined]
        self.job.committed(self.group)
        return True

    def restore(self) -> None:
        super().restore()
        self.job.loaded(self.group)

    def report_storage(self, words: str) -> None:
        self.group.said.append(words)

    def sample(self) -> None:
        pass

    def print_summary(self, verb: str, next_command: str = "") -> None:
        self.verb = verb
        if verb == "finished":
            self.job.finished(self.group)

    def start_monitoring(self) -> Any:
        return Nothing(), Nothing(), Nothing(), Nothing()

    def close(self) -> None:
        """Closes resources in the order of main()."""
        failure = None
        for opened in (self.metrics_processor, self.checkpointer, self.manager, self.background_writer):
            try:
                opened.close()
            except (CheckpointFailed, OSError) as error:  # noqa: PERF203 (the others are closed all the same)
                failure = error
        if failure is not None:
            raise failure


class Saves(Saver):
    """The saver of a Trainer; reports each save to the job."""

    def __init__(self, trainer: Trainer) -> None:
        job = self.job = trainer.job
        self.trainer, self.group = trainer, trainer.group
        super().__init__(
            trainer.checkpointer,
            trainer.manager,
            trainer.progress,
            sync=trainer.metrics_processor.sync,
            report=trainer.report_storage,
            info=trainer.log.info,
            clock=job.baton.time,
            sleep=job.baton.sleep,
        )

    def save_now(self, *, last: bool = False, outside_quorum: bool = False) -> None:
        if not outside_quorum:
            self.job.save_begins(self.group, last=last)
        super().save_now(last=last, outside_quorum=outside_quorum)

    def save_due(self) -> None:
        began_s, saving = self.job.baton.now_s, self.trainer.checkpointer.saving
        joins = self.manager.may_exit or (saving is not None and not saving.done())
        super().save_due()
        if self.job.plan.async_mode == "async" and not joins:
            took_s = self.job.baton.now_s - began_s
            self.job.must(took_s <= SYNC_S, f"{self.group.name}: a save held up the step for {took_s:.1f} s")

    def save_last(self, stop_requested: Callable[[], bool]) -> None:
        self.job.say(f"{self.group.name} is at its end")
        self.job.happens("the end")
        super().save_last(stop_requested)


# ------------------------------------------------------------------------------------------------ the job


class Job:
    """Runs a plan, and checks the invariants."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.baton = Baton(plan.seed, LIMIT_S)
        self.disk = Disk(self.baton, folder)
        self.changed = Condition(self.baton)
        self.seen: Counter[str] = self.disk.seen
        self.random = random.Random(f"job {plan.seed}")
        self.known: set[Group] = set()  # of whom nobody knows that they are gone
        self.asking: set[Group] = set()
        self.alive: set[Group] = set()
        self.quorums = 0
        self.deaths = list(plan.deaths)
        self.lines: list[str] = []
        self.newest: dict[Path, int] = {}  # the newest step that has stood
        self.since = self.longest = 0  # the step that all went on from; the newest that is committed
        self.moved_s = 0.0  # when a step was committed last
        self.disturbed_s = 0.0  # when somebody died, left, or came last, or storage failed
        self.due: dict[int, float] = {}  # when a save was
        self.ended_as: Counter[str] = Counter()
        self.began = Counter[str]()  # "the last save", "the end"

    def play(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            fake = Threading(self.baton)
            patch.setattr(background_writer, "threading", fake)
            for module in (checkpoint, checkpoint_fetch):
                patch.setattr(module, "ThreadPoolExecutor", fake.ThreadPoolExecutor)
            patch.setattr(durable_files, "time", SimpleNamespace(monotonic=self.baton.time, sleep=self.baton.sleep))
            self.disk.install(patch)
            self.disk.looks = self.looks
            self.baton.died = self.died
            for number in range(self.plan.groups):
                self.starts("abcd"[number])
            for at_s, whom in self.plan.kills_at_s:
                self.baton.spawn("killer", partial(self.kill, whom), after_s=at_s)
            self.happens("the start")
            self.baton.run()
        self.look_back()

    def say(self, words: str) -> None:
        self.lines.append(f"{self.baton.now_s:8.2f} {words}")

    def must(self, holds: bool, words: str) -> None:
        if not holds:
            raise AssertionError(f"{self.baton.now_s:.1f} s: {words}")

    # ---- who is there

    def starts(self, name: str) -> None:
        group = Group(self, name)
        self.say(f"{name} starts")
        self.alive.add(group)
        self.known.add(group)
        self.disturbed_s = self.baton.now_s

    def form(self) -> None:
        """Forms a quorum if all known groups have requested it."""
        if not self.known or not self.known <= self.asking:
            return
        members = sorted(self.asking, key=lambda group: group.name)
        self.quorums += 1
        whole = [group for group in members if group.manager.history is not None]
        source = max(whole, key=lambda group: group.manager.step) if whole else None
        history = source.manager.history if source else None
        part = Part(self.quorums, set(members), tuple(group for group in whole if group.manager.history == history))
        for group in members:
            group.manager.part = part
            if source and history is not None and group.manager.history != history:
                self.seen["a group heals"] += 1
                group.manager.history = list(history)
                group.run.relay.load_state_dict(source.run.relay.state_dict())
        self.asking.clear()
        self.disturbed_s = self.baton.now_s
        names = ", ".join(group.name for group in part.participants)
        self.say(f"quorum {part.quorum_id}: {names} of {len(members)} at {source.manager.step if source else 0}")
        self.changed.notify_all()

    def arrives(self, part: Part, group: Group) -> None:
        part.released |= part.withheld
        part.withheld = set()
        part.arrived.add(group)
        if part.lost or part.arrived != part.members:
            return self.changed.notify_all()
        part.arrived = set()
        leaving = {member for member in part.members if member.manager.leaving}
        part.due = bool(leaving or self.known - part.members)
        self.known -= leaving
        step = group.manager.step + 1
        if self.deaths[:1] and self.deaths[0][0] == "alone" and step % self.plan.interval == 0:
            self.seen["a commit of one"] += 1
            part.withheld, part.released = part.members - {part.participants[0]}, {part.participants[0]}
        else:
            part.released = set(part.members)
        self.changed.notify_all()

    def leaves(self, group: Group, *, clean: bool, finished: bool) -> None:
        part = group.manager.part
        if part is not None and finished:
            part.released |= part.withheld
            part.withheld = set()
            for member in part.members:
                member.manager.finished = True
        self.forget(group, lost=not clean or not finished)

    def forget(self, group: Group, *, lost: bool = True) -> None:
        """All groups learn that this group is gone, and form a new quorum. `lost`: it has not left with a finished run."""
        self.known.discard(group)
        self.asking.discard(group)
        self.disturbed_s = self.baton.now_s
        if group.manager.part is not None:
            group.manager.part.due = True
            if lost:
                group.manager.part.lost.add(group)
        self.form()
        self.changed.notify_all()

    def died(self, process: Process) -> None:
        group = process
        assert isinstance(group, Group)
        self.seen["deaths"] += 1
        self.say(f"{group.name} is dead")
        self.alive.discard(group)
        self.disturbed_s = self.baton.now_s
        self.look_at_folders()
        gone = partial(self.forget, group)
        self.baton.spawn(f"loss of {group.name}", gone, after_s=self.random.uniform(0, KNOWN_S))
        self.comes_back(group)

    def comes_back(self, group: Group) -> None:
        after_s = self.random.choice((1.0, 10.0, 60.0, 300.0))
        self.baton.spawn("launcher", partial(self.starts, group.name), after_s=KNOWN_S + after_s)

    def kill(self, whom: str) -> None:
        for group in sorted(self.alive, key=lambda group: group.name):
            if whom == "all" or group.manager.writer_quorum is not None:
                self.baton.kill(group)

    def ended(self, group: Group, how: str) -> None:
        self.say(f"{group.name} ends: {how}")
        self.alive.discard(group)
        word = how.partition(":")[0]
        self.ended_as[word] += 1
        self.seen[f"a group ends: {word}"] += 1
        if word == "failed":
            self.forget(group)
            if not group.was_asked:
                self.seen["a start fails"] += 1
                self.must(
                    group.manager.part is None or not group.manager.part.participants,
                    f"{group.name} ends in its loop: {how}",
                )
                self.comes_back(group)
        if word == "finished already":
            self.must(
                self.stands(group.folder) >= self.plan.steps,
                f"{group.name} says that it has finished, and step {self.plan.steps} is not there",
            )

    # ---- what happens

    def happens(self, when: str) -> None:
        """Starts the faults that are planned for the first occurrence of this event."""
        self.began[when] += 1
        if self.began[when] > 1:
            return
        for since, after_s, long_s, whom, error, slow_s in self.plan.outages:
            if since == when:
                begin_s = self.baton.now_s + after_s
                meets = {
                    "all": lambda process: True,
                    "the writer": lambda process: process.manager.writer_quorum is not None,
                    "the others": lambda process: process.manager.writer_quorum is None,
                }[whom]
                room = self.random.randint(0, 6) if error == errno.ENOSPC else 0
                self.disk.outages.append(Outage(begin_s, begin_s + long_s, meets, error, slow_s, room))
                self.say(
                    f"storage is to {'be slow' if slow_s else 'fail'} for {whom} from {begin_s:.1f} to {begin_s + long_s:.1f} s"
                )
        for since, after_s, count in self.plan.asked:
            if since == when:
                self.baton.spawn("SIGTERM", partial(self.ask, count), after_s=after_s)

    def ask(self, count: int) -> None:
        names = sorted(self.alive, key=lambda group: group.name)
        for group in self.random.sample(names, min(count, len(names))):
            self.seen["asked to leave"] += 1
            self.say(f"{group.name} is asked to leave")
            group.ask()

    def save_begins(self, group: Group, *, last: bool) -> None:
        self.say(f"{group.name} saves step {group.manager.step}")
        self.seen["saves"] += 1
        if last:
            self.happens("the last save")
        if not self.deaths or group.dies_at > group.operations:
            return
        where, count = self.deaths[0]
        if where == "in the last save" and not last:
            return
        self.deaths.pop(0)
        if where in ("before its manifest", "after its manifest"):
            group.dies_at_manifest = where
        else:
            group.dies_at = group.operations + count

    # ---- what must hold

    def looks(self, process: Process, what: str) -> None:
        group = process
        assert isinstance(group, Group)
        if group.dies_at_manifest and what.startswith("open step.partial") and what.endswith("manifest.json"):
            if group.dies_at_manifest == "before its manifest":
                group.dies_at = group.operations + 1
        elif group.dies_at_manifest and what == "rename step":
            group.dies_at = group.operations + 2
        if self.baton.current is group.main:
            where = {name for name, _ in group.run.progress.open_phases()}
            self.must(
                bool(where & {"checkpoint", "start"}),
                f"{group.name}: {what} in the step's own thread, outside of a save",
            )

    def stands(self, folder: Path) -> int:
        """Returns the step of the newest complete checkpoint."""
        with self.aside():
            return max(checkpoint_files.newest(folder / "checkpoint", kind=kind) or 0 for kind in ("full", "model"))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Disk operations in this context are not simulated."""
        current, self.baton.current = self.baton.current, None
        try:
            yield
        finally:
            self.baton.current = current

    @property
    def quiet_since_s(self) -> float:
        """Time after which no fault is planned so far."""
        now_s = self.baton.now_s
        ends = [min(outage.until_s, now_s) + outage.slow_s for outage in self.disk.outages if outage.since_s <= now_s]
        return max([self.disturbed_s, *ends])

    def loaded(self, group: Group) -> None:
        history = group.manager.history or []
        self.say(f"{group.name} goes on from step {len(history)}")
        with self.aside():
            newest = checkpoint_files.newest(group.folder / "checkpoint") or 0
        self.must(len(history) >= newest, f"{group.name} goes on from {len(history)}, and step {newest} is there")
        if history:
            self.seen["goes on from a checkpoint"] += 1
            self.must(torch.equal(group.run.values.loaded, weights(history)), f"step {len(history)} is a mixture")
        self.since, self.due = len(history), {}  # what was due in a life before is due when it comes again

    def committed(self, group: Group) -> None:
        manager, now_s = group.manager, self.baton.now_s
        self.longest = max(self.longest, manager.step)
        self.moved_s = now_s
        due = manager.step // self.plan.interval * self.plan.interval
        if due <= self.since or not self.plan.shared:
            return
        self.due.setdefault(due, now_s)
        newest = self.stands(group.folder)
        self.due = {step: due_s for step, due_s in self.due.items() if step > max(newest, self.since)}
        late_s = now_s - max(min(self.due.values(), default=now_s), self.quiet_since_s)
        retry_s = SAVE_RETRY_S if self.disk.outages else 0.0
        self.must(
            late_s <= retry_s + 3 * self.plan.step_s + 1,
            f"a save was due {late_s:.1f} s ago at step {min(self.due, default=0)}, and {newest} is the newest",
        )

    def finished(self, group: Group) -> None:
        self.look_at_folders()
        stands = max(self.stands(folder) for folder in self.folders())
        self.must(stands >= self.plan.steps, f"{group.name} has finished, and step {stands} is the newest")
        late_s = self.baton.now_s - max(self.moved_s, self.quiet_since_s)
        self.must(
            late_s <= LAST_SAVE_RETRY_S + GRACE_S,
            f"{group.name} has finished {late_s:.1f} s after nothing was in the way",
        )

    def folders(self) -> list[Path]:
        names = "abcd"[: self.plan.groups]
        return [self.folder] if self.plan.shared else [self.folder / name for name in names]

    def look_at_folders(self, *, content: bool = False) -> None:
        with self.aside():
            for folder in self.folders():
                for step in checkpoint_files.list_steps(folder / "checkpoint"):
                    self.look_at(checkpoint_files.step_folder(folder / "checkpoint", step), step, content=content)
                newest = checkpoint_files.newest(folder / "checkpoint") or 0
                self.must(
                    newest >= self.newest.get(folder, 0),
                    f"step {self.newest.get(folder)} is gone, {newest} is the newest",
                )
                self.newest[folder] = newest

    def look_at(self, path: Path, step: int, *, content: bool) -> None:
        try:
            manifest = checkpoint_files.read_manifest(path)
            checkpoint_files.verify(path, manifest)
        except checkpoint_files.Damaged as damage:
            self.must(False, f"step {step} is torn: {damage}")
        if content:
            states: dict[str, dict[str, Any]] = {"model": {"w": torch.zeros(2, dtype=torch.float64)}}
            if manifest.kind == "full":
                states["ledger"] = {"history": ""}
            problem = checkpoint_dcp.load_into(states, path, group=None)
            history = json.loads(states["ledger"]["history"]) if manifest.kind == "full" else []
            values = states["model"]["w"].double()
            same = torch.equal(values, weights(history)) if history else int(values[0]) == step
            self.must(not problem and same, f"step {step} cannot be read, or is a mixture: {problem}")

    def look_back(self) -> None:
        """Checks the invariants at the end."""
        self.look_at_folders(content=True)
        done = self.ended_as["finished"] + self.ended_as["finished already"]
        self.must(done > 0 or bool(self.plan.asked), "nobody has finished")
        for folder in self.folders():
            rows = {name: journal(folder / name) for name in (sinks.METRICS, sinks.SAMPLES)}
            steps = {name: [row["step"] for row in found] for name, found in rows.items()}
            for name, found in steps.items():
                self.must(found == sorted(set(found)), f"{name}: {found}")
                if self.plan.shared:
                    last = self.plan.steps if done else len(found)
                    self.must(found == list(range(1, last + 1)), f"{name}: {found}, and {last} steps are committed")
            newest = checkpoint_files.newest(folder / "checkpoint") or 0
            if self.plan.shared and newest == self.plan.steps:
                states = {"ledger": {"history": ""}}
                checkpoint_dcp.load_into(
                    states, checkpoint_files.step_folder(folder / "checkpoint", newest), group=None
                )
                told = [row["slots"][str(row["step"])] for row in rows[sinks.SAMPLES]]
                self.must(
                    told == json.loads(states["ledger"]["history"]),
                    f"{told} was told, and this is not what was committed",
                )


def journal(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass
class Played:
    """Result of a seed. `failure`: "" if all invariants held."""

    plan: Plan
    failure: str
    seen: Counter[str]
    lines: list[str]

    def tell(self) -> str:
        return "\n".join([f"{vars(self.plan)}", *self.lines, self.failure])


def play(seed: int, folder: Path, fault_class: str = "") -> Played:
    """Runs a plan; leaves `folder` empty."""
    plan = Plan(seed, fault_class)
    place = folder / f"saves-{seed}"
    place.mkdir()
    job = Job(plan, place)
    failure = ""
    logging.disable()  # DCP tells each of its steps
    try:
        job.play()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is this seed's)
        failure = f"{type(error).__name__}: {error}"
    finally:
        logging.disable(logging.NOTSET)
    shutil.rmtree(place)
    job.seen[plan.fault_class] += 1
    return Played(plan, failure, job.seen, job.lines)
