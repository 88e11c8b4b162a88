"""A world of saves: replica groups that share a folder, deaths and storage that fail, and the real Checkpointer, Dues, Claim and LastSave.

The simulator of the protocol (ft/sim) knows no files, for ft may not import training. Here the rules of quorums are a few lines (the first
whole group writes; a change makes a new quorum), and all that touches files is the product's. Groups are threads of which one runs at a
time, chosen by virtual time and a seeded generator, so a seed is one history.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoint_job import Ledger, Lines
from training import checkpoint_dues, checkpoint_files
from training.checkpoint import RETRY_S, CheckpointConfig, Checkpointer, CheckpointFailed
from training.claim import Claim
from training.last_save import LastSave
from training.progress import Progress

STEPS, INTERVAL, STEP_S = 24, 8, 10.0
RESTART_S = 40.0  # of a group that died
SLOW_S = 20.0  # of one operation on slow storage
SETTLE_S = RETRY_S + 3 * STEP_S  # from the last fault until all that was due is there
LONGEST_S = 2000.0
MOMENTS = ("before", "in", "after", "last save", "after the last save")
TROUBLES = ("full", "read-only", "slow")


class Died(BaseException):
    """SIGKILL: nothing of this group's life does anything any more."""


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Death:
    """Of the writer. at: the number of a save of the job, from 1, or of an operation in it. times: writers in a row."""

    moment: str
    save: int
    operation: int
    times: int


@dataclass(frozen=True)
class Trouble:
    kind: str
    whose: str  # writer, others, all
    at_s: float
    lasts_s: float


@dataclass(frozen=True)
class Setting:
    seed: int
    groups: int
    deaths: tuple[Death, ...]
    troubles: tuple[Trouble, ...]
    asked: bool  # one of those that wait at the end is asked to leave
    keep: int

    @staticmethod
    def of(seed: int) -> Setting:
        dice = random.Random(seed)
        deaths = tuple(
            Death(dice.choice(MOMENTS), dice.randint(1, 3), dice.randint(1, 16), dice.choice((1, 1, 2)))
            for _ in range(dice.choice((0, 1, 1, 2)))
        )
        troubles = tuple(
            Trouble(
                dice.choice(TROUBLES),
                dice.choice(("writer", "others", "all")),
                dice.choice((dice.uniform(0, STEPS * STEP_S), dice.randint(1, 3) * INTERVAL * STEP_S)),
                dice.choice((20.0, 60.0, 200.0)),
            )
            for _ in range(dice.choice((0, 1, 1, 2)))
        )
        return Setting(seed, dice.choice((2, 3, 4)), deaths, troubles, dice.random() < 0.2, dice.choice((0, 2)))


class Values:
    """A state of one tensor that says which step it is of."""

    def __init__(self) -> None:
        self.values = torch.zeros(64)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state["values"]


class Group(threading.Thread):
    """One life of one group. `manager` is itself: what LastSave asks."""

    def __init__(self, world: World, name: int) -> None:
        super().__init__(name=f"group {name}", daemon=True)
        self.world, self.place = world, name
        self.turn = threading.Semaphore(0)
        self.wakes_s = world.now_s
        self.arrived = self.ended = self.dead = self.finished = self.is_broken = self.whole = False
        self.asked = self.may_touch = False
        self.step = 0
        self.saving = self.operations = 0  # the number of the save that it is in, and of its operations so far
        self.outcome = ""
        self.error: BaseException | None = None

    # ---- what the product asks

    @property
    def writes(self) -> tuple[str, int] | None:
        return ("epoch", self.world.quorum) if self.world.writer is self else None

    def finish(self, *, saved: bool) -> None:
        if saved:
            for group in self.world.members:
                group.finished = True

    # ---- its life

    def run(self) -> None:
        self.turn.acquire()
        try:
            self._live()
        except Died:
            self.outcome = "died"
        except BaseException as error:  # noqa: BLE001 - the world tells it
            self.error = error
        self.ended = True
        self.world.back.release()

    def pause(self, seconds: float) -> None:
        self.wakes_s = self.world.now_s + seconds
        self.world.back.release()
        self.turn.acquire()
        if self.dead:
            raise Died

    def _arrive(self) -> None:
        """Until all who are there have come so far."""
        self.arrived = True
        while self.arrived:
            self.pause(0.5)

    def _live(self) -> None:
        world = self.world
        self.states = {"model": Values(), "ledger": Ledger()}
        config = CheckpointConfig(interval=INTERVAL, keep_latest_k=world.setting.keep, async_mode="disabled")
        self.checkpointer = Checkpointer(
            config,
            world.folder,
            self.states,  # type: ignore[arg-type]
            log=Lines(),
            claim=Claim(world.folder, lambda: self.writes),
            clock=lambda: world.now_s,
        )
        with self._touching():
            self.checkpointer.load()
        self.step = self.states["ledger"].state["step"]  # type: ignore[attr-defined]
        self._arrive()
        wish = False
        while self.step < STEPS:
            before = self.step
            wish |= self.checkpointer.overdue(before)  # which waits for no storage; kept until a step holds
            world.looks_at(self)
            self.pause(STEP_S)
            self._arrive()
            if before < self.step < STEPS and (self.checkpointer.due(self.step) or wish):
                self._save()
            wish &= before == self.step
        self._end()

    def take(self, step: int) -> None:
        self.step = step
        self.states["model"].values = torch.full((64,), float(step))  # type: ignore[attr-defined]
        self.states["ledger"].state.update(step=step, position=step)  # type: ignore[attr-defined]

    def _save(self) -> None:
        """As Run.save."""
        if not self.writes:
            return
        world = self.world
        world.begins_save(self)
        try:
            with self._touching():
                self.checkpointer.save(self.step)
        except (CheckpointFailed, OSError):
            world.seen["a save failed"] += 1
        world.ends_save(self)

    def _end(self) -> None:
        """As Run.finish."""
        world = self.world

        def save() -> None:
            world.begins_save(self)
            with self._touching():
                self.checkpointer.save(self.step, last=True)
            world.ends_save(self)

        def regroup() -> bool:
            world.seen["who writes was settled anew at the end"] += 1
            self._arrive()
            return True

        last = LastSave(
            self.checkpointer,
            self,
            Progress(),
            save=save,
            regroup=regroup,
            asked=lambda: self.asked,
            tell=lambda words: None,
            say=lambda words: None,
            clock=lambda: world.now_s,
            sleep=self.pause,
        )
        try:
            last.make(self.step)
        except CheckpointFailed:
            if not self.asked:
                raise
            self.outcome = "asked to leave"
            return
        self.outcome = "finished"
        world.finishes(self)

    # ---- what storage does

    def _touching(self) -> Any:
        group = self

        class Allowed:
            def __enter__(self) -> None:
                group.may_touch = True

            def __exit__(self, *_: object) -> None:
                group.may_touch = False

        return Allowed()

    def touch(self, kind: str, path: str) -> None:
        if self.dead:
            raise Died
        if self.saving:
            self.operations += 1
            self.world.at_operation(self)
        trouble = self.world.trouble(self)
        if trouble == "slow" and kind == "mkdir":
            self.world.seen["slow: a save took its time"] += 1
            self.pause(SLOW_S)
        if trouble == "read-only" or (trouble == "full" and kind in ("open", "fsync", "mkdir")):
            self.world.seen[f"{trouble}: an operation was refused"] += 1
            number = errno.EROFS if trouble == "read-only" else errno.ENOSPC
            raise OSError(number, os.strerror(number), path)


@dataclass
class World:
    folder: Path
    setting: Setting
    now_s: float = 0.0
    quorum: int = 0
    writer: Group | None = None
    newest: int = 0
    calm_since_s: float = 0.0
    seen: Counter[str] = field(default_factory=Counter)
    members: list[Group] = field(default_factory=list)
    waiting: list[Group] = field(default_factory=list)  # come in with the next quorum
    looks: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.setting.seed + 1)
        self.back = threading.Semaphore(0)
        self.restarts: list[tuple[float, int]] = []
        self.saves = 0
        self.due: dict[Death, int] = {death: death.times for death in self.setting.deaths}
        self.running: Group | None = None
        self.has_asked = False

    # ---- time

    def play(self) -> None:
        for place in range(self.setting.groups):
            self._start(place)
        while any(not group.ended for group in (*self.members, *self.waiting)) or self.restarts:
            self._turn()
            if self.now_s > LONGEST_S:
                raise Broken(f"not over after {LONGEST_S:g} s: {self._where()}")
        if not checkpoint_files.newest(self.folder / "checkpoint") == STEPS:
            raise Broken(f"all have ended, and step {STEPS} is not there: {self._where()}")
        self._check_contents()

    def _turn(self) -> None:
        for at_s, place in [one for one in self.restarts if one[0] <= self.now_s]:
            self.restarts.remove((at_s, place))
            self._start(place)
        live = [group for group in (*self.members, *self.waiting) if not group.ended]
        if not live:
            self.now_s = min(at_s for at_s, _ in self.restarts)
            return
        self._gather()
        self._ask_one()
        wakes_s = min(group.wakes_s for group in live)
        ready = [group for group in live if group.wakes_s <= max(wakes_s, self.now_s)]
        self.now_s = max(self.now_s, wakes_s)
        self._run(self.dice.choice(ready))

    def _run(self, group: Group) -> None:
        self.running = group
        group.turn.release()
        self.back.acquire()
        self.running = None
        if group.ended:
            self._ended(group)

    def _start(self, place: int) -> None:
        group = Group(self, place)
        self.waiting.append(group)
        group.start()

    def _ended(self, group: Group) -> None:
        if group.error is not None:
            raise Broken(f"group {group.place} ended by {group.error!r}") from group.error
        (self.members if group in self.members else self.waiting).remove(group)
        if group is self.writer:
            self.writer = None
        for other in self.members:
            other.is_broken = True
        if group.outcome == "died":
            self.restarts.append((self.now_s + RESTART_S, group.place))

    # ---- quorums, in few words

    def _gather(self) -> None:
        """All who are there have come to the end of a step, or to a quorum: they go on, with those who wait to come in."""
        here = [group for group in self.members if not group.ended]
        if not all(group.arrived for group in here):
            return
        if any(group.step >= STEPS for group in here) and not any(group.is_broken for group in here):
            return
        coming = [] if any(group.step >= STEPS for group in here) else [g for g in self.waiting if g.arrived]
        if not here and len(coming) < len(self.waiting) + len(self.restarts):
            return  # at a job's beginning, or when all have died, for all
        if not here and not coming:
            return
        if coming or any(group.is_broken for group in here) or self.writer is None:
            self.quorum += 1
            best = max(group.step for group in (*here, *coming))
            for group in coming:
                self.waiting.remove(group)
                self.members.append(group)
            self.members.sort(key=lambda group: group.place)
            whole = [group for group in self.members if group in here] or [g for g in self.members if g.step == best]
            self.writer = whole[0]
            for group in self.members:
                group.is_broken = False
                if group.step != best:
                    group.take(best)
        elif self.members[0].step < STEPS:
            step = self.members[0].step + 1
            for group in self.members:
                group.take(step)
            self._check_due(step)
        for group in self.members:
            group.arrived = False

    # ---- faults

    def trouble(self, group: Group) -> str:
        for one in self.setting.troubles:
            if one.at_s <= self.now_s < one.at_s + one.lasts_s:
                self.calm_since_s = max(self.calm_since_s, one.at_s + one.lasts_s)
                if one.whose == "all" or (one.whose == "writer") == (self.writer is group):
                    return one.kind
        return ""

    def begins_save(self, group: Group) -> None:
        self.saves += 1
        group.saving, group.operations = self.saves, 0
        self._maybe_dies(group, "before", self.saves)

    def at_operation(self, group: Group) -> None:
        moment = "last save" if group.step >= STEPS else "in"
        for death in self.due:
            if death.moment == moment and group.operations == death.operation:
                self._maybe_dies(group, moment, group.saving, death)

    def ends_save(self, group: Group) -> None:
        group.saving = 0
        if group.dead:  # in it, and the library has made another error of that
            raise Died
        self._maybe_dies(group, "after the last save" if group.step >= STEPS else "after", self.saves)

    def _maybe_dies(self, group: Group, moment: str, save: int, exactly: Death | None = None) -> None:
        for death, left in self.due.items():
            if left and death.moment == moment and (exactly in (None, death)) and save >= death.save:
                self.due[death] -= 1
                self.seen[f"the writer died: {moment}"] += 1
                self.calm_since_s = self.now_s
                group.dead = True
                raise Died

    # ---- what has to hold

    def looks_at(self, group: Group) -> None:
        """Threads of the product: they look at the folder while the trainer goes on."""
        with group._touching():
            while self.looks:
                self.looks.pop()()

    def _check_due(self, step: int) -> None:
        newest = checkpoint_files.newest(self.folder / "checkpoint") or 0
        if newest < self.newest:
            raise Broken(f"step {self.newest} was saved, and now {newest} is the newest")
        self.newest = newest
        due = (step - 1) // INTERVAL * INTERVAL
        for one in self.setting.troubles:
            if one.at_s <= self.now_s:
                self.calm_since_s = max(self.calm_since_s, one.at_s + one.lasts_s)
        calm_s = self.now_s - self.calm_since_s
        if due > newest and calm_s > SETTLE_S:
            raise Broken(f"step {step}: {due} was due, {newest} is the newest, {calm_s:.0f} s after the last fault")

    def finishes(self, group: Group) -> None:
        """It says that the run is finished."""
        if checkpoint_files.newest(self.folder / "checkpoint") != STEPS:
            raise Broken(f"group {group.place} says that the run is finished, and step {STEPS} is not there")

    def _check_contents(self) -> None:
        for step in checkpoint_files.list_steps(self.folder / "checkpoint"):
            path = checkpoint_files.step_folder(self.folder / "checkpoint", step)
            manifest = checkpoint_files.read_manifest(path)
            checkpoint_files.verify(path, manifest)
            states = {"model": Values(), "ledger": Ledger()}
            config = CheckpointConfig(load_step=step)
            Checkpointer(config, self.folder, states, log=Lines(), claim=Claim(self.folder, lambda: None)).load()  # type: ignore[arg-type]
            if not torch.equal(states["model"].values, torch.full((64,), float(step))):  # type: ignore[attr-defined]
                raise Broken(f"step {step} holds other values")

    def _where(self) -> str:
        return ", ".join(
            f"group {g.place} at step {g.step}{' arrived' if g.arrived else ''}{' writes' if g is self.writer else ''}"
            for g in (*self.members, *self.waiting)
        )

    def _ask_one(self) -> None:
        """SIGTERM to one that waits for the last save."""
        waits = [g for g in self.members if g.step >= STEPS and g is not self.writer and not g.ended]
        if self.setting.asked and waits and not self.has_asked:
            self.has_asked = True
            waits[-1].asked = True
            self.seen["asked to leave while it waits"] += 1


def touched(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """Every operation on files of the run is put to the group that makes it, before it is made."""

    def hook(owner: Any, name: str, kind: str, acts: Callable[..., bool] = lambda *args, **named: True) -> None:
        real = getattr(owner, name)

        def asks(*args: Any, **named: Any) -> Any:
            group = world.running
            if group is not None and group is threading.current_thread() and acts(*args, **named):
                if not group.may_touch:
                    raise Broken(f"{name}{args}: the trainer's thread is held up by storage")
                group.touch(kind, str(args[0]) if args else "")
            return real(*args, **named)

        monkeypatch.setattr(owner, name, asks)

    def writes(path: Path, mode: str = "r", *args: Any, **named: Any) -> bool:
        return any(letter in mode for letter in "wax+")

    hook(Path, "open", "open", writes)
    hook(Path, "mkdir", "mkdir")
    hook(Path, "rename", "rename")
    hook(Path, "replace", "rename")
    hook(Path, "unlink", "remove")
    hook(shutil, "rmtree", "remove")
    hook(os, "fsync", "fsync")
    monkeypatch.setattr(checkpoint_dues, "in_thread", world.looks.append)


def play(folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Plays one seed. Raises Broken. Returns what occurred, and how often."""
    setting = Setting.of(seed)
    world = World(folder, setting)
    with monkeypatch.context() as patched:
        touched(patched, world)
        try:
            world.play()
        finally:
            for group in (*world.members, *world.waiting):  # threads that a failure leaves behind
                group.dead = True
                while not group.ended:
                    group.turn.release()
                    world.back.acquire()
    return world.seen
