"""Machines of a drilled job (Linux, root), parts of which can be taken away: a network namespace for each group, joined by one
bridge, whose cables can be cut; and disks that can be full, one for the run, one for what belongs to its groups and its lighthouse.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SUBNET = "10.77.0"  # seen by nobody outside these namespaces
NOBODY = "02:00:00:00:00:01"  # a card that is nowhere
HUB, HUB_ADDRESS = "hub", f"{SUBNET}.254"
DISK_MB = 256  # of each, in memory
NO_ROOT = "needs root on Linux"


def _root() -> bool:
    return sys.platform == "linux" and os.geteuid() == 0


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"there is no {command[0]} (iproute2)") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


class Network:
    """Raises RuntimeError where this machine makes no namespaces, or cannot narrow a link. To be closed when no process of it lives."""

    def __init__(self) -> None:
        if not _root():
            raise RuntimeError(NO_ROOT)
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
        except RuntimeError:
            self.close()
            raise

    def through(self, name: str) -> list[str]:
        """Words that become the command behind them, as the same process, on that machine: the hub or a group, which gets a cable first."""
        if name != HUB and name not in self.addresses:
            self._plug(name)
        return ["ip", "netns", "exec", self._prefix + name]

    def cut(self, name: str, down: bool) -> None:
        """Cuts its cable: nothing gets to it or from it."""
        self._at(HUB, f"ip link set {_cable(name)} {'down' if down else 'up'}")

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
        for space, device in ((HUB, _cable(name)), (name, "eth0")):
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
        self._at(
            HUB,
            f"ip link add {_cable(name)} type veth peer name eth0 netns {self._prefix + name}",
            f"ip link set {_cable(name)} master bridge",
            f"ip link set {_cable(name)} up",
        )
        self._at(name, f"ip addr add {address}/24 dev eth0", "ip link set eth0 up")

    def _at(self, name: str, *commands: str) -> None:
        for command in commands:
            _run("ip", "netns", "exec", self._prefix + name, *command.split())


def _cable(name: str) -> str:
    """Name of a cable's end in the hub; an interface's name has at most 15 characters."""
    return f"to-{name}"


def _shape(megabits: float) -> str:
    return f"tbf rate {round(megabits * 1000)}kbit burst 32kbit latency 400ms"


def no_disk() -> str:
    """The reason why this machine mounts nothing; "": it does."""
    if not _root():
        return NO_ROOT
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
