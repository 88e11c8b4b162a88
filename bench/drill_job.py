"""A job of replica groups as run_replicas.sh starts it, with methods to harm groups and lighthouse; leaving the context ends all processes.
Optionally (Linux, root) a network namespace per group, connected by a bridge with links that can be cut, and disks that can be filled: one
for the run, one for the files of its groups and its lighthouse.

Flow: drill.py creates the job; drill_faults.py injects faults; the event logs of the groups (`EventLog` in job.py) record what they did.
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

from bench.job import EventLine, EventLog, descendants, failure, signal_all, until
from bench.pairs import Failed
from scripts.launch import LaunchSettings, ranks_here, threads_per_rank
from scripts.replicas import ReplicaSupervisor, devices_of_groups, enabled, environment, prepare, start_lighthouse

T = TypeVar("T")
STEADY = 5  # steps of all groups together before the next fault
LIMIT_S = 300.0  # for an expected event
AWAY_S, FULL_S = 180.0, 60.0  # without lighthouse, or below min_replica_size; with a full disk
PAIR_S = 40.0  # without packets between two groups: longer than it takes to exclude one of them
SUBNET = "10.77.0"  # only in these namespaces
NOBODY = "02:00:00:00:00:01"  # MAC address of no interface
HUB, HUB_ADDRESS = "hub", f"{SUBNET}.254"
DISK_MB = 256  # of each, in memory


class DevicePool:
    def __init__(self, devices: Sequence[list[str]]) -> None:
        self._devices = devices
        self._assigned: dict[str, int] = {}  # group -> index into devices

    def of(self, name: str, gone: Collection[str] = ()) -> list[str]:
        """Returns a group's devices. An added group gets those of one that has left, else the first ones, which requires SHARE_GPUS=1."""
        if name not in self._assigned:
            held = {place for other, place in self._assigned.items() if other not in gone}
            self._assigned[name] = min(set(range(len(self._devices))) - held, default=0)
        return self._devices[self._assigned[name]]


class DrillJob(AbstractContextManager["DrillJob"]):
    """`argv`: configuration, overrides. `network`: a namespace per group. `disk`: the run's. `under`: a prefix that limits a resource."""

    def __init__(
        self, argv: Sequence[str], groups: int, *, network: Network | None = None, disk: Disk | None = None,
        under: Sequence[str] = (), drilled: bool = True,
    ) -> None:  # fmt: skip
        self._argv = enabled(argv)
        self._devices = DevicePool(devices_of_groups(groups))
        ranks = len(self._devices.of("0"))
        self.config, self._restarts, _ = prepare(self._argv, groups, ranks=ranks or None)
        self.ranks = ranks or ranks_here(LaunchSettings.read(os.environ))
        self.network, self.disk, self._under = network, disk, list(under)
        self.run = self.config.run_folder
        self.folder, self.checkpoints = self.run / "groups", self.run / self.config.checkpoint.local_folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self._env = {**environment(self.run, groups), "PHAROS_DRILL": str(int(drilled))}
        if disk:
            self._env["TMPDIR"] = str(disk.temporary)
        self._env.setdefault("OMP_NUM_THREADS", threads_per_rank(groups))
        self.groups: dict[str, ReplicaSupervisor] = {}  # including those that have left
        self.event_logs: dict[str, EventLog] = {}
        self.gone: set[str] = set()  # drained, or finished
        self.away: set[str] = set()  # not restarted while in this set
        self.away_s, self.full_s, self.pair_s = AWAY_S, FULL_S, PAIR_S
        self._bind = f"{HUB_ADDRESS if network else '127.0.0.1'}:0"
        self.start_lighthouse()
        for _ in range(groups):
            self.add()

    @property
    def live(self) -> list[str]:
        """The groups of the job that have not left; they may be waiting for a restart."""
        return [name for name in self.groups if name not in self.gone]

    def pick(self, dice: random.Random, names: Collection[str] | None = None) -> str:
        """Draws one of the live groups, or of `names`; depends only on the seed."""
        return dice.choice(sorted(self.live if names is None else names, key=int))

    def start_lighthouse(self) -> None:
        """Starts the lighthouse, or restarts it at the same address with its state file."""
        through = [*(self.network.through(HUB) if self.network else []), *self._under]
        self.lighthouse, self.address = start_lighthouse(self.config, self._env, bind=self._bind, through=through)
        self._bind = self.address.partition("//")[2]

    def kill_lighthouse(self, away_s: float = 0.0) -> None:
        """Kills the lighthouse and restarts it after `away_s`."""
        self.lighthouse.kill()
        self.lighthouse.communicate()
        self.hold(away_s)
        self.start_lighthouse()

    def add(self) -> str:
        name = str(len(self.groups))
        if self.disk:
            self.disk.keep_event_logs(self.folder / name, self.ranks)
        group = self.groups[name] = self.group(name)
        self.event_logs[name] = EventLog(name, self.folder / name, self.ranks)
        group.start()
        return name

    def group(self, name: str, *overrides: str) -> ReplicaSupervisor:
        """Creates a group without starting it or adding it to the job."""
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
        """Returns the pids of the launcher and of all its descendants: ranks, server, and their children."""
        process = self.groups[name].process
        return [process.pid, *descendants(process.pid)] if process else []

    def ranks_of(self, name: str) -> list[int]:
        """Returns the pids of the ranks, by their latest start."""
        starts = [[line.pid for line in lines if line.event == "start"] for lines in self.event_logs[name].ranks]
        return [pids[-1] for pids in starts if pids]

    def server(self, name: str) -> list[int]:
        return [pid for pid in self.processes(name) if b"ft.rpc.group_server" in _command(pid)]

    def kill(self, *names: str) -> float:
        """Kills all processes of these groups with SIGKILL. Returns the time."""
        at_s = time.monotonic()
        signal_all([pid for name in names for pid in self.processes(name)], signal.SIGKILL)
        return at_s

    @property
    def quorum(self) -> EventLine:
        lines = (next(x for x in reversed(self.event_logs[name].ranks[0]) if x.event == "quorum") for name in self.live)
        return max(lines, key=lambda line: line.quorum_id)

    @property
    def step(self) -> int:
        return max(event_log.step for event_log in self.event_logs.values())

    @property
    def over(self) -> bool:
        """True when all groups have exited with code 0."""
        return all(group.code == 0 for group in self.groups.values())

    def has(self, step: int) -> bool:
        """True when that checkpoint is complete."""
        return (self.checkpoints / f"step-{step}" / "manifest.json").exists()

    def look(self) -> None:
        """Restarts dead groups, as run_replicas.sh does, and reads the event logs. Raises Failed if a group has ended unexpectedly."""
        for name, group in self.groups.items():
            group.short_runs = 0  # its deaths are injected
            if name in self.away and group.process is None:
                group.restart_at_s = time.monotonic() + 1
            group.poll(time.monotonic())
            self.event_logs[name].read()
            if group.code is not None and (name not in self.gone or group.code != 0):
                raise self.failure(f"group {name} ended with exit code {group.code}")

    def until(self, what: str, holds: Callable[[], T], limit_s: float = LIMIT_S) -> T:
        return until(what, holds, limit_s, look=self.look, failure=self.failure, poll_s=0.02)

    def hold(self, seconds: float) -> None:
        """Waits for the duration of a fault."""
        end_s = time.monotonic() + seconds
        self.until("the end of a fault", lambda: time.monotonic() >= end_s, seconds + LIMIT_S)

    def together(self, since_s: float = 0.0) -> None:
        """Waits until the last STEADY steps, since `since_s` or now, are of all live groups, on all ranks."""
        since_s = since_s or time.monotonic()

        def holds() -> bool:
            every = [(self.event_logs[name], rank) for name in self.live for rank in range(self.ranks)]
            last = (event_log.since(since_s, "commit", "start", rank=rank)[-STEADY:] for event_log, rank in every)
            return all([line.contributors for line in lines] == [len(self.live)] * STEADY for lines in last)

        self.until(f"{STEADY} steps of {len(self.live)} groups", holds)

    def compared(self) -> None:
        """Waits until all groups have compared weights since the latest start or heal of each: before that, three have no majority."""
        interval, count = self.config.fault_tolerance.digest_interval, len(self.live)

        def is_compared(lines: Sequence[EventLine]) -> bool:
            since = max((number for number, line in enumerate(lines) if line.event in ("start", "healed")), default=0)
            compared = (line for line in lines[since:] if line.event == "commit" and line.step % interval == 0)
            return any(line.contributors == count for line in compared)

        what = "a comparison of the weights of all groups"
        self.until(what, lambda: all(is_compared(self.event_logs[name].ranks[0]) for name in self.live))

    def end(self) -> None:
        for name in self.live:
            self.drain(name)
        self.ended()

    def ended(self) -> None:
        """Waits until all groups have finished; the timeout is per step."""
        self.gone |= set(self.groups)
        while not self.over:
            before = [event_log.step for event_log in self.event_logs.values()]
            event = "a further step, or the end of all groups"
            self.until(event, lambda: self.over or before != [event_log.step for event_log in self.event_logs.values()])  # noqa: B023

    def failure(self, what: str) -> Failed:
        logs = {f"{name} at step {self.event_logs[name].step}": group.log for name, group in self.groups.items()}
        return failure(what, logs)

    def __exit__(self, *_: object) -> None:
        for name, group in self.groups.items():
            self.kill(name)  # also a stopped group; its children have other sessions
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
        raise RuntimeError(f"{command[0]} is not installed (iproute2)") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Network:
    """Network namespaces. Raises RuntimeError if they or traffic control are not supported. Close it when its processes have ended."""

    def __init__(self) -> None:
        self._prefix = f"pharos-{os.getpid()}-"
        self.addresses: dict[str, str] = {}  # of groups that have a link
        self._spaces: list[str] = []
        try:
            self._make(HUB)
            self._at(
                HUB,
                "ip link add try0 type veth peer name try1",  # checks that the kernel supports what is used later
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
        """Returns a command prefix that runs in the namespace of the hub or of a group, whose link is created first."""
        if name != HUB and name not in self.addresses:
            address = self.addresses[name] = f"{SUBNET}.{len(self.addresses) + 1}"
            self._make(name)
            self._at(  # an interface's name has at most 15 characters
                HUB,
                f"ip link add to-{name} type veth peer name eth0 netns {self._prefix + name}",
                f"ip link set to-{name} master bridge",
                f"ip link set to-{name} up",
            )
            self._at(name, f"ip addr add {address}/24 dev eth0", "ip link set eth0 up")
        return ["ip", "netns", "exec", self._prefix + name]

    def cut(self, name: str, down: bool) -> None:
        """Cuts a group's link in both directions."""
        self._at(HUB, f"ip link set to-{name} {'down' if down else 'up'}")

    def blind(self, name: str, on: bool) -> None:
        """Drops all packets that a group sends; it still receives."""
        for address in [HUB_ADDRESS, *(other for who, other in self.addresses.items() if who != name)]:
            self._at(name, f"ip route {'add' if on else 'del'} blackhole {address}/32")

    def part(self, one: str, other: str, on: bool) -> None:
        """Drops packets between two groups without an error: each gets a wrong MAC address of the other."""
        for source, target in ((one, other), (other, one)):
            neighbour = f"{self.addresses[target]} dev eth0"
            how = f"replace {neighbour} lladdr {NOBODY} nud permanent" if on else f"del {neighbour}"
            self._at(source, f"ip neigh {how}")

    def narrow(self, name: str, megabits: float | None) -> None:
        """Limits a group's link, in megabits per second in each direction; None: no limit."""
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

    def _at(self, name: str, *commands: str) -> None:
        for command in commands:
            _run("ip", "netns", "exec", self._prefix + name, *command.split())


def _shape(megabits: float) -> str:
    return f"tbf rate {round(megabits * 1000)}kbit burst 32kbit latency 400ms"


def no_disk() -> str:
    """Returns the reason why this process cannot mount a disk, or ""."""
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
    """Two disks of a run, in memory. Raises RuntimeError. Close it when the job's processes have ended."""

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

    def keep_event_logs(self, folder: Path, ranks: int) -> None:
        """Keeps a group's event logs on a different disk, as a full disk must not lose their lines."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            (folder / f"event_log.{rank}.jsonl").symlink_to(self._elsewhere / f"{folder.name}.{rank}.jsonl")

    @staticmethod
    def fill(place: Path) -> None:
        """Fills a disk to the last byte. Call it repeatedly, as removed files free space."""
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
