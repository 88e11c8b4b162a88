"""Processes of this machine, by pid, without the mistake that a pid may be somebody else's by now."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path


def this_host() -> str:
    """Names this machine and the process numbers that are valid in it: a container may share the name, but not the numbers."""
    space = ""
    with suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return f"{socket.gethostname()} {space}"


class Process:
    """One that lives now. On Linux it is held by a descriptor, so that kill never hits a successor of its pid."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle: int | None = None
        if sys.platform == "linux":
            with suppress(OSError):
                self._handle = os.pidfd_open(pid)

    def is_stopped(self) -> bool:
        """True when stopped by SIGSTOP or a debugger. False where that cannot be known."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def is_dying(self) -> bool:
        """It was killed, and is not gone: it waits in the kernel, for a file server that is away, say, and nothing ends that. False where
        that cannot be known."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return False
        said = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        killed = any(int(said.get(mask, "0"), 16) & 1 << signal.SIGKILL - 1 for mask in ("SigPnd", "ShdPnd"))
        return killed or said.get("State", "").split()[:1] == ["Z"]

    def kill(self) -> None:
        self.send(signal.SIGKILL)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; nothing where the process is gone."""
        with suppress(ProcessLookupError, PermissionError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, number)
            elif sys.platform != "linux":
                os.kill(self.pid, number)
