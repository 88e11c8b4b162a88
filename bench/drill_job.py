"""A job of replica groups as run_replicas.sh starts one, whose groups and lighthouse can be harmed. Leaving the context ends all processes.

Flow: drill.py makes one; drill_faults.py does the harm; what the groups did is in their diaries (drill_diary.py).
"""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.drill_diary import Diary
from bench.drill_disk import Disk
from bench.drill_net import HUB, HUB_ADDRESS, Network
from bench.job import descendants
from bench.pairs import Failed
from scripts.launch import Plan, ranks_here, threads_per_rank
from scripts.replicas import (
    ENABLED,
    ReplicaSupervisor,
    devices_of_groups,
    environment,
    prepare,
    start_lighthouse,
)

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.02
STEADY = 5  # steps of all together, after which the next fault may come
LIMIT_S = 300.0  # for what must come
AWAY_S, FULL_S = 180.0, 60.0  # a lighthouse, or capacity; a disk
PAIR_S = 40.0  # a cut cable between two groups: longer than it takes to go on without one of them


@dataclass(frozen=True)
class Hurt:
    """Effect of a fault. `hit`: the groups that may lose their place by it. Seconds, of the machine's clock; nan: as soon as it was asked
    for, or all along."""

    target: str  # in words
    hit: Collection[str] = ()
    at_s: float = math.nan  # from then on it counts
    repaired_s: float = math.nan


class DevicePool:
    """The devices of a job's groups, by `deal_devices`."""

    def __init__(self, devices: Sequence[list[str]]) -> None:
        self._devices = devices
        self._dealt: dict[str, int] = {}  # which of them a group has

    def of(self, name: str, gone: Collection[str] = ()) -> list[str]:
        """A group's own devices. One that comes later takes those of a group that has left; where none has, the first's, which
        NCCL allows if groups share them (SHARE_GPUS=1)."""
        if name not in self._dealt:
            held = {place for other, place in self._dealt.items() if other not in gone}
            self._dealt[name] = min(set(range(len(self._devices))) - held, default=0)
        return self._devices[self._dealt[name]]


class DrillJob:
    """`argv`: a configuration and overrides. `network`: where groups are machines of their own. `disk`: that the run lies on. `under`: a
    command that becomes the one behind it, with less of something. Raises ValueError for bad settings."""

    def __init__(
        self,
        argv: Sequence[str],
        groups: int,
        *,
        network: Network | None = None,
        disk: Disk | None = None,
        under: Sequence[str] = (),
        drilled: bool = True,
    ) -> None:
        self._argv = [*argv, ENABLED]
        self._devices = DevicePool(devices_of_groups(groups))
        ranks = len(self._devices.of("0"))
        self.config, self._restarts, self.grace_s = prepare(self._argv, groups, ranks=ranks or None)
        self.ranks = ranks or ranks_here(Plan.read(os.environ))
        self.network, self.disk, self._under = network, disk, list(under)
        self.run = self.config.run_folder
        self.folder = self.run / "groups"
        self.checkpoints = self.run / self.config.checkpoint.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._env = {**environment(self.run, groups), "PHAROS_DRILL": str(int(drilled))}
        if disk:
            self._env["TMPDIR"] = str(disk.temporary)
        self._env.setdefault("OMP_NUM_THREADS", threads_per_rank(groups))
        self.groups: dict[str, ReplicaSupervisor] = {}  # all that ever were
        self.diaries: dict[str, Diary] = {}
        self.gone: set[str] = set()  # on purpose
        self.away: set[str] = set()  # not to be started again for now
        self.away_s, self.full_s, self.pair_s = AWAY_S, FULL_S, PAIR_S
        self._bind = f"{HUB_ADDRESS if network else '127.0.0.1'}:0"
        self.start_lighthouse()
        for _ in range(groups):
            self.add()

    # ------------------------------------------------------------------------------------------------ its parts

    @property
    def live(self) -> list[str]:
        """The groups that are to be there; one of them may be between two lives."""
        return [name for name in self.groups if name not in self.gone]

    def start_lighthouse(self) -> None:
        """Again at the same address, with the state that the last one left."""
        through = [*(self.network.through(HUB) if self.network else []), *self._under]
        self.lighthouse, self.address = start_lighthouse(self.config, self._env, bind=self._bind, through=through)
        self._bind = self.address.partition("//")[2]

    def add(self) -> str:
        """One more group; its name."""
        name = str(len(self.groups))
        if self.disk:
            self.disk.keep_diaries(self.folder / name, self.ranks)
        group = self.groups[name] = self.group(name)
        self.diaries[name] = Diary(name, self.folder / name, self.ranks)
        group.start()
        return name

    def group(self, name: str, *overrides: str) -> ReplicaSupervisor:
        """One that is yet to be started, and is none of the job's."""
        asked = {word.partition("=")[0] for word in overrides}
        argv = [word for word in self._argv if word.partition("=")[0] not in asked]
        env, its = {**self._env, "TORCHFT_LIGHTHOUSE": self.address}, self._devices.of(name, self.gone)
        group = ReplicaSupervisor.here(name, [*argv, *overrides], env, self.folder, self._restarts, its)
        group.command[:0] = [*(self.network.through(name) if self.network else []), *self._under]
        group.shown = False
        return group

    def drain(self, name: str) -> None:
        """It is told to leave, and does not come again."""
        self.gone.add(name)
        self.groups[name].restarts = 0
        self.groups[name].tell(signal.SIGTERM)

    def processes(self, name: str) -> list[int]:
        """The launcher, its ranks, their server, and whatever else they have started."""
        process = self.groups[name].process
        return [process.pid, *descendants(process.pid)] if process else []

    def server(self, name: str) -> int:
        """The process of the group's server."""
        [pid] = [pid for pid in self.processes(name) if b"ft.rpc.group_server" in _command(pid)]
        return pid

    @property
    def writer(self) -> str:
        """The group that saves: the first of those that held the newest state."""
        return max((self.diaries[name].quorum for name in self.live), key=lambda line: line.quorum_id).participants[0]

    def signal(self, pids: Iterable[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    # ------------------------------------------------------------------------------------------------ time

    def look(self) -> None:
        """Starts again who died, as run_replicas.sh does, and reads. Raises Failed where a group ended that must not."""
        for name, group in self.groups.items():
            group.short_lives = 0  # its deaths are ours
            if name in self.away and group.process is None:
                group.again_at_s = time.monotonic() + 1
            group.look(time.monotonic())
            self.diaries[name].read()
            if group.code is not None and (name not in self.gone or group.code != 0):
                raise self.failure(f"group {name} ended with exit code {group.code}")

    def until(self, what: str, holds: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
        end_s = time.monotonic() + limit_s
        while True:
            self.look()
            if holds():
                return
            if time.monotonic() > end_s:
                raise self.failure(f"not in {limit_s:g} s: {what}")
            time.sleep(POLL_S)

    def hold(self, seconds: float) -> None:
        """A fault lasts so long."""
        end_s = time.monotonic() + seconds
        self.until("the end of a fault", lambda: time.monotonic() >= end_s, seconds + LIMIT_S)

    def together(self, since_s: float) -> None:
        """Until the last steps were of all groups that are to be there."""

        def holds() -> bool:
            live = self.live
            return all(self.diaries[name].is_with(len(live), STEADY, since_s) for name in live)

        self.until(f"{STEADY} steps of {len(self.live)} groups", holds)

    def compared(self) -> None:
        """Until each is a witness of its own weights. Of three groups one of which has just healed nobody can tell whose went wrong."""
        interval = self.config.fault_tolerance.digest_interval
        self.until(
            "a comparison of the weights of all groups",
            lambda: all(self.diaries[name].is_compared(len(self.live), interval) for name in self.live),
        )

    def end(self) -> None:
        """All save and leave."""
        for name in self.live:
            self.drain(name)
        self.ended()

    def ended(self) -> None:
        """Until all have finished by themselves, however many steps that takes: each has its time."""
        self.gone |= set(self.groups)
        while not self._over():
            before = self._steps()
            self.until("another step, or the end of all groups", lambda: self._over() or self._steps() != before)  # noqa: B023

    def _over(self) -> bool:
        return all(group.code == 0 for group in self.groups.values())

    def _steps(self) -> list[int]:
        return [diary.step for diary in self.diaries.values()]

    def failure(self, what: str) -> Failed:
        words = []
        for name, group in self.groups.items():
            said = group.log.read_text(errors="replace").splitlines() if group.log.exists() else []
            words.append(f"group {name} at step {self.diaries[name].step}: {' | '.join(said[-4:])}")
        return Failed("\n  ".join([what, *words]))

    def has(self, step: int) -> bool:
        """True when that checkpoint is whole."""
        return (self.checkpoints / f"step-{step}" / "manifest.json").exists()

    def __enter__(self) -> DrillJob:
        return self

    def __exit__(self, *_: object) -> None:
        for name, group in self.groups.items():
            self.signal(
                self.processes(name), signal.SIGKILL
            )  # a stopped one, too; what it has started has other sessions
            group.end()
        self.lighthouse.kill()
        self.lighthouse.communicate()


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def pick(dice: random.Random, names: Sequence[str]) -> str:
    """By the seed alone: not by who came first to what."""
    return dice.choice(sorted(names, key=int))
