"""A job of replica groups as run_replicas.sh starts one, whose groups and lighthouse can be harmed. Leaving the context ends all processes.
And machines for it (Linux, root), parts of which can be taken away: a network namespace for each group, joined by one bridge, whose cables
can be cut; and disks that can be full, one for the run, one for what belongs to its groups and its lighthouse.

Flow: drill.py makes one; drill_faults.py does the harm; what the groups did is in their diaries (job.py).
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TypeVar

from bench.job import Diary, DiaryLine, descendants, failure, signal_all, until
from bench.pairs import Failed
from scripts.launch import LaunchSettings, ranks_here, threads_per_rank
from scripts.replicas import ENABLED, ReplicaSupervisor, devices_of_groups, environment, prepare, start_lighthouse

T = TypeVar("T")
STEADY = 5  # steps of all together, after which the next fault may come
LIMIT_S = 300.0  # for what must come
AWAY_S, FULL_S = 180.0, 60.0  # a lighthouse, or capacity; a disk
PAIR_S = 40.0  # a cut cable between two groups: longer than it takes to go on without one of them
SUBNET = "10.77.0"  # seen by nobody outside these namespaces
NOBODY = "02:00:00:00:00:01"  # a card that is nowhere
HUB, HUB_ADDRESS = "hub", f"{SUBNET}.254"
DISK_MB = 256  # of each, in memory


class DevicePool:
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


class DrillJob(AbstractContextManager["DrillJob"]):
    """`argv`: a configuration and overrides. `network`: where groups are machines of their own. `disk`: that the run lies on. `under`: a
    command that becomes the one behind it, with less of something. Raises ValueError for bad settings."""

    def __init__(
        self, argv: Sequence[str], groups: int, *, network: Network | None = None, disk: Disk | None = None,
        under: Sequence[str] = (), drilled: bool = True,
    ) -> None:  # fmt: skip
        self._argv = [*argv, ENABLED]
        self._devices = DevicePool(devices_of_groups(groups))
        ranks = len(self._devices.of("0"))
        self.config, self._restarts, _ = prepare(self._argv, groups, ranks=ranks or None)
        self.ranks = ranks or ranks_here(LaunchSettings.read(os.environ))
        self.network, self.disk, self._under = network, disk, list(under)
        self.run = self.config.run_folder
        self.folder, self.checkpoints = self.run / "groups", self.run / self.config.checkpoint.folder
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

    @property
    def live(self) -> list[str]:
        """The groups that are to be there; one of them may be between two lives."""
        return [name for name in self.groups if name not in self.gone]

    def pick(self, dice: random.Random, names: Collection[str] | None = None) -> str:
        """Draws one of the live groups, or of `names`, by the seed alone."""
        return dice.choice(sorted(self.live if names is None else names, key=int))

    def start_lighthouse(self) -> None:
        """Starts the lighthouse; the next time at the same address, with the state that the last one left."""
        through = [*(self.network.through(HUB) if self.network else []), *self._under]
        self.lighthouse, self.address = start_lighthouse(self.config, self._env, bind=self._bind, through=through)
        self._bind = self.address.partition("//")[2]

    def kill_lighthouse(self, away_s: float = 0.0) -> None:
        """Kills the lighthouse, and starts it again after that time."""
        self.lighthouse.kill()
        self.lighthouse.communicate()
        self.hold(away_s)
        self.start_lighthouse()

    def add(self) -> str:
        name = str(len(self.groups))
        if self.disk:
            self.disk.keep_diaries(self.folder / name, self.ranks)
        group = self.groups[name] = self.group(name)
        self.diaries[name] = Diary(name, self.folder / name, self.ranks)
        group.start()
        return name

    def group(self, name: str, *overrides: str) -> ReplicaSupervisor:
        """Makes a group without starting it; it is not one of the job's yet."""
        asked = {word.partition("=")[0] for word in overrides}
        argv = [word for word in self._argv if word.partition("=")[0] not in asked]
        env, its = {**self._env, "TORCHFT_LIGHTHOUSE": self.address}, self._devices.of(name, self.gone)
        group = ReplicaSupervisor.local(name, [*argv, *overrides], env, self.folder, self._restarts, its)
        group.command[:0] = [*(self.network.through(name) if self.network else []), *self._under]
        group.shown = False
        return group

    def drain(self, name: str) -> None:
        self.gone.add(name)
        self.groups[name].restarts = 0
        self.groups[name].send_signal(signal.SIGTERM)

    def processes(self, name: str) -> list[int]:
        """The launcher, its ranks, their server, and whatever else they have started."""
        process = self.groups[name].process
        return [process.pid, *descendants(process.pid)] if process else []

    def ranks_of(self, name: str) -> list[int]:
        """The ranks' processes: of their latest lives that have begun."""
        starts = [[line.pid for line in lines if line.event == "start"] for lines in self.diaries[name].ranks]
        return [pids[-1] for pids in starts if pids]

    def server(self, name: str) -> list[int]:
        return [pid for pid in self.processes(name) if b"ft.rpc.group_server" in _command(pid)]

    def kill(self, *names: str) -> float:
        """Kills all processes of these groups with SIGKILL. Returns the time."""
        at_s = time.monotonic()
        signal_all([pid for name in names for pid in self.processes(name)], signal.SIGKILL)
        return at_s

    @property
    def quorum(self) -> DiaryLine:
        lines = (next(x for x in reversed(self.diaries[name].ranks[0]) if x.event == "quorum") for name in self.live)
        return max(lines, key=lambda line: line.quorum_id)

    @property
    def step(self) -> int:
        return max(diary.step for diary in self.diaries.values())

    @property
    def over(self) -> bool:
        """True when all groups have ended as they should."""
        return all(group.code == 0 for group in self.groups.values())

    def has(self, step: int) -> bool:
        """True when that checkpoint is whole."""
        return (self.checkpoints / f"step-{step}" / "manifest.json").exists()

    def look(self) -> None:
        """Starts dead groups again, as run_replicas.sh does, and reads the diaries. Raises Failed where a group ended that must not."""
        for name, group in self.groups.items():
            group.short_runs = 0  # its deaths are ours
            if name in self.away and group.process is None:
                group.restart_at_s = time.monotonic() + 1
            group.poll(time.monotonic())
            self.diaries[name].read()
            if group.code is not None and (name not in self.gone or group.code != 0):
                raise self.failure(f"group {name} ended with exit code {group.code}")

    def until(self, what: str, holds: Callable[[], T], limit_s: float = LIMIT_S) -> T:
        return until(what, holds, limit_s, look=self.look, failure=self.failure, poll_s=0.02)

    def hold(self, seconds: float) -> None:
        """Waits so long, for a fault that lasts."""
        end_s = time.monotonic() + seconds
        self.until("the end of a fault", lambda: time.monotonic() >= end_s, seconds + LIMIT_S)

    def together(self, since_s: float = 0.0) -> None:
        """Waits until the last steps, since then or from now on, are of all groups that are to be there, on all their ranks."""
        since_s = since_s or time.monotonic()

        def holds() -> bool:
            every = [(self.diaries[name], rank) for name in self.live for rank in range(self.ranks)]
            last = (diary.since(since_s, "commit", "start", rank=rank)[-STEADY:] for diary, rank in every)
            return all([line.contributors for line in lines] == [len(self.live)] * STEADY for lines in last)

        self.until(f"{STEADY} steps of {len(self.live)} groups", holds)

    def compared(self) -> None:
        """Waits until all groups have compared their weights since the latest life, and heal, of each began: of three groups of which
        one has just healed nobody can tell which has other weights."""
        interval, count = self.config.fault_tolerance.digest_interval, len(self.live)

        def is_compared(lines: Sequence[DiaryLine]) -> bool:
            since = max((number for number, line in enumerate(lines) if line.event in ("start", "healed")), default=0)
            compared = (line for line in lines[since:] if line.event == "commit" and line.step % interval == 0)
            return any(line.contributors == count for line in compared)

        what = "a comparison of the weights of all groups"
        self.until(what, lambda: all(is_compared(self.diaries[name].ranks[0]) for name in self.live))

    def end(self) -> None:
        for name in self.live:
            self.drain(name)
        self.ended()

    def ended(self) -> None:
        """Waits until all groups have finished by themselves, however many steps that takes: each has its time."""
        self.gone |= set(self.groups)
        while not self.over:
            before = [diary.step for diary in self.diaries.values()]
            news = "another step, or the end of all groups"
            self.until(news, lambda: self.over or before != [diary.step for diary in self.diaries.values()])  # noqa: B023

    def failure(self, what: str) -> Failed:
        logs = {f"{name} at step {self.diaries[name].step}": group.log for name, group in self.groups.items()}
        return failure(what, logs)

    def __exit__(self, *_: object) -> None:
        for name, group in self.groups.items():
            self.kill(name)  # a stopped one, too; what it has started has other sessions
            group.end()
        self.lighthouse.kill()
        self.lighthouse.communicate()


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _run(*command: str) -> None:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise RuntimeError("needs root on Linux")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"there is no {command[0]} (iproute2)") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Network:
    """Raises RuntimeError where this machine makes no namespaces, or cannot narrow a link. To be closed when no process of it lives."""

    def __init__(self) -> None:
        self._prefix = f"pharos-{os.getpid()}-"
        self.addresses: dict[str, str] = {}  # of those that have a cable
        self._spaces: list[str] = []
        try:
            self._make(HUB)
            self._at(
                HUB,
                "ip link add try0 type veth peer name try1",  # that this kernel has all that is asked of it later
                f"tc qdisc add dev try0 root {_shape(1.0)}",
                "ip link del try0",
                "ip link add bridge type bridge",
                f"ip addr add {HUB_ADDRESS}/24 dev bridge",
                "ip link set bridge up",
            )
        except BaseException:
            self.close()
            raise

    def through(self, name: str) -> list[str]:
        """Words that become the command behind them, as the same process, on that machine: the hub or a group, which gets a cable first."""
        if name != HUB and name not in self.addresses:
            self._plug(name)
        return ["ip", "netns", "exec", self._prefix + name]

    def cut(self, name: str, down: bool) -> None:
        """Cuts its cable: nothing gets to it or from it."""
        self._at(HUB, f"ip link set to-{name} {'down' if down else 'up'}")

    def blind(self, name: str, on: bool) -> None:
        """Cuts one direction: all that it sends is lost, what others send arrives."""
        for address in [HUB_ADDRESS, *(other for who, other in self.addresses.items() if who != name)]:
            self._at(name, f"ip route {'add' if on else 'del'} blackhole {address}/32")

    def part(self, one: str, other: str, on: bool) -> None:
        """Packets between these two are lost, and the sender is not told; all others arrive. Each has a wrong address of the
        other's card, which the bridge delivers to nobody."""
        for here, there in ((one, other), (other, one)):
            neighbour = f"{self.addresses[there]} dev eth0"
            how = f"replace {neighbour} lladdr {NOBODY} nud permanent" if on else f"del {neighbour}"
            self._at(here, f"ip neigh {how}")

    def narrow(self, name: str, megabits: float | None) -> None:
        """Limits a cable, in megabits per second each way; None: no limit."""
        for space, device in ((HUB, f"to-{name}"), (name, "eth0")):
            what = f"del dev {device} root" if megabits is None else f"add dev {device} root {_shape(megabits)}"
            self._at(space, f"tc qdisc {what}")

    def close(self) -> None:
        while self._spaces:
            with suppress(RuntimeError):
                _run("ip", "netns", "delete", self._spaces.pop())

    def _make(self, name: str) -> None:
        _run("ip", "netns", "add", self._prefix + name)
        self._spaces.append(self._prefix + name)
        self._at(name, "ip link set lo up")

    def _plug(self, name: str) -> None:
        address = self.addresses[name] = f"{SUBNET}.{len(self.addresses) + 1}"
        self._make(name)
        self._at(  # an interface's name has at most 15 characters
            HUB,
            f"ip link add to-{name} type veth peer name eth0 netns {self._prefix + name}",
            f"ip link set to-{name} master bridge",
            f"ip link set to-{name} up",
        )
        self._at(name, f"ip addr add {address}/24 dev eth0", "ip link set eth0 up")

    def _at(self, name: str, *commands: str) -> None:
        for command in commands:
            _run("ip", "netns", "exec", self._prefix + name, *command.split())


def _shape(megabits: float) -> str:
    return f"tbf rate {round(megabits * 1000)}kbit burst 32kbit latency 400ms"


def no_disk() -> str:
    """The reason why this machine mounts nothing; "": it does."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            _mount(Path(folder))
            _run("umount", folder)
        except RuntimeError as why:
            return str(why)
    return ""


def _mount(place: Path) -> None:
    _run("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "pharos-drill", str(place))


class Disk:
    """Two disks of a run. Raises RuntimeError. To be closed when no process of the job lives."""

    def __init__(self, run: Path) -> None:
        self.run, self.groups = run.absolute(), run.absolute() / "groups"
        self.temporary = self.groups / "tmp"
        self._mounted: list[Path] = []
        self._elsewhere = Path(tempfile.mkdtemp(prefix="pharos-drill-"))
        try:
            for place in (self.run, self.groups):
                place.mkdir(parents=True, exist_ok=True)
                _mount(place)
                self._mounted.append(place)
        except RuntimeError:
            self.close()
            raise
        self.temporary.mkdir()

    def keep_diaries(self, folder: Path, ranks: int) -> None:
        """Keeps a group's diaries on another disk: their words on a full one must not be lost to it."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            (folder / f"diary.{rank}.jsonl").symlink_to(self._elsewhere / f"{folder.name}.{rank}.jsonl")

    @staticmethod
    def fill(place: Path) -> None:
        """Fills a disk to the last byte. To be repeated, since files that are removed there make room."""
        with (place / "filler").open("ab", buffering=0) as file:
            for piece in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while file.write(bytes(piece)) == piece:
                        pass

    @staticmethod
    def free(place: Path) -> None:
        (place / "filler").unlink()

    def close(self) -> None:
        """Copies the files back to their places on the real disk."""
        kept = self._elsewhere / "kept"
        if self._mounted:
            shutil.copytree(self.run, kept, ignore=shutil.ignore_patterns("tmp", "filler"))
        while self._mounted:
            _run("umount", "--lazy", str(self._mounted.pop()))
        if kept.exists():
            shutil.copytree(kept, self.run, dirs_exist_ok=True)
        shutil.rmtree(self._elsewhere, ignore_errors=True)
