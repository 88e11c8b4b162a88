"""Replica groups as machines of their own: a network namespace each, joined by one bridge, so that a cable can be cut (Linux, root).

Flow: drill_job.py starts the lighthouse and each group through `ip netns exec`; drill_faults.py cuts, blinds and narrows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

SUBNET = "10.77.0"  # seen by nobody outside these namespaces
NOBODY = "02:00:00:00:00:01"  # a card that is nowhere
HUB, HUB_ADDRESS = "hub", f"{SUBNET}.254"


class Network:
    """Raises RuntimeError where this machine makes no namespaces, or cannot narrow a link. To be closed when no process of it lives."""

    def __init__(self) -> None:
        self._prefix = f"pharos-{os.getpid()}-"
        self._addresses: dict[str, str] = {}
        self._spaces: list[str] = []
        if sys.platform != "linux" or os.geteuid() != 0:
            raise RuntimeError("needs root on Linux")
        try:
            self._make(HUB)
            self._try()
            self._at(HUB, "ip link add bridge type bridge", f"ip addr add {HUB_ADDRESS}/24 dev bridge")
            self._at(HUB, "ip link set bridge up")
        except RuntimeError:
            self.close()
            raise

    def through(self, name: str) -> list[str]:
        """Words that become the command behind them, as the same process, on that machine: the hub or a group, which gets a cable first."""
        if name != HUB and name not in self._addresses:
            self._plug(name)
        return ["ip", "netns", "exec", self._prefix + name]

    def cut(self, name: str, down: bool) -> None:
        """Nothing gets to it or from it."""
        self._at(HUB, f"ip link set {_cable(name)} {'down' if down else 'up'}")

    def blind(self, name: str, on: bool) -> None:
        """Cuts one direction: all that it sends is lost, what others send arrives."""
        for address in [HUB_ADDRESS, *(other for who, other in self._addresses.items() if who != name)]:
            self._at(name, f"ip route {'add' if on else 'del'} blackhole {address}/32")

    def part(self, one: str, other: str, on: bool) -> None:
        """Packets between these two are lost, without a word, to whoever sends them; all others arrive. Each has a wrong address of the
        other's card, which the bridge delivers to nobody."""
        for here, there in ((one, other), (other, one)):
            neighbour = f"{self._addresses[there]} dev eth0"
            self._at(
                here, f"ip neigh {f'replace {neighbour} lladdr {NOBODY} nud permanent' if on else f'del {neighbour}'}"
            )

    def narrow(self, name: str, megabits: float | None) -> None:
        """Per second, each way; None: as wide as before."""
        for space, device in ((HUB, _cable(name)), (name, "eth0")):
            if megabits is None:
                self._at(space, f"tc qdisc del dev {device} root")
            else:
                self._at(space, f"tc qdisc add dev {device} root {_shape(megabits)}")

    def close(self) -> None:
        while self._spaces:
            with suppress(RuntimeError):
                _run("ip", "netns", "delete", self._spaces.pop())

    def _try(self) -> None:
        """True when this kernel has all that is asked of it later."""
        self._at(
            HUB,
            "ip link add try0 type veth peer name try1",
            f"tc qdisc add dev try0 root {_shape(1.0)}",
            "ip link del try0",
        )

    def _make(self, name: str) -> None:
        _run("ip", "netns", "add", self._prefix + name)
        self._spaces.append(self._prefix + name)
        self._at(name, "ip link set lo up")

    def _plug(self, name: str) -> None:
        address = self._addresses[name] = f"{SUBNET}.{len(self._addresses) + 1}"
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
    """Its end in the hub; an interface's name has at most 15 characters."""
    return f"to-{name}"


def _shape(megabits: float) -> str:
    return f"tbf rate {round(megabits * 1000)}kbit burst 32kbit latency 400ms"


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError(f"there is no {command[0]} (iproute2)") from None
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
