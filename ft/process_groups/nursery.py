"""Where child processes come from: one process with torch imported, which forks them (baby_worker.py says how).

A process that trains has one nursery, started when its first group of children is made and kept until its end, so that no generation
waits for an import. A child's end is certain: Child.kill sends SIGKILL through a descriptor, never to a successor of its number.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from ft.process_groups.baby_worker import FORK
from ft.process_groups.channel import Channel
from ft.process_groups.errors import GroupError

# torch's TCPStore looks up the name of its peer's address at each connection, and a lost packet costs the resolver's 5 seconds.
QUICK_DNS = "timeout:1 attempts:5"
_ROOT = Path(__file__).resolve().parents[2]


class Child:
    """A forked child, and the channel to it."""

    def __init__(self, pid: int, channel: Channel, nursery: Nursery) -> None:
        self.pid, self.channel = pid, channel
        self._nursery = nursery
        self._handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
        self._lock = threading.Lock()
        self._closed = False

    def kill(self) -> None:
        """At once; what it does with shared memory ends with it. The channel ends for who receives. May be called twice."""
        with self._lock:
            if self._closed:
                return
            with suppress(ProcessLookupError):
                if self._handle is not None:
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)
                else:
                    os.kill(self.pid, signal.SIGKILL)
        self.channel.hang_up()

    def end(self) -> None:
        """After kill: returns when the process is gone."""
        if self._handle is not None:
            poll = select.poll()
            poll.register(self._handle, select.POLLIN)
            poll.poll()
        with self._lock:
            self._closed = True
            if self._handle is not None:
                os.close(self._handle)
        self._nursery.bury()
        self.channel.close()

    def memory_bytes(self) -> int:
        """Resident, with the pages that it shares with others."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        return 0


class Nursery:
    """One process that forks children. If it dies, the next call starts another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: Channel | None = None
        self.pid = 0
        self._process: subprocess.Popen[bytes] | None = None

    def child(self) -> Child:
        """A new one. Waits for the import of torch when the nursery has just been started, else milliseconds."""
        with self._lock:
            for _ in range(2):
                control = self._started()
                ours, theirs = Channel.pair()
                with theirs:
                    with suppress(OSError):
                        control.send(FORK, [theirs.fileno()])
                    answer = control.receive()
                if answer is not None:
                    return Child(int(answer[0]), ours, self)
                ours.close()  # the nursery has died
                self._stop()
            raise GroupError("no child process: the nursery dies at once")

    def warm(self) -> None:
        """Starts it, without waiting for it."""
        with self._lock:
            self._started()

    def bury(self) -> None:
        """The nursery takes leave of children that have ended."""
        with self._lock:
            if self._control is not None:
                with suppress(OSError):
                    self._control.send(b"bury")

    def close(self) -> None:
        """Ends it, and with it all children. May be called twice; `child` starts it again."""
        with self._lock:
            self._stop()

    def _started(self) -> Channel:
        if self._control is not None:
            return self._control
        self._control, theirs = Channel.pair()
        started = threading.Event()
        # Linux kills the nursery when the thread that started it ends: so that thread stays.
        threading.Thread(target=self._keep, args=(theirs, started), name="ft-nursery", daemon=True).start()
        started.wait()
        return self._control

    def _keep(self, theirs: object, started: threading.Event) -> None:
        import socket

        assert isinstance(theirs, socket.socket)
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with theirs:
            self._process = process = subprocess.Popen(
                [sys.executable, "-m", "ft.process_groups.baby_worker", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,  # `-m` looks there first
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "OMP_NUM_THREADS": "1",
                    "RES_OPTIONS": os.environ.get("RES_OPTIONS", QUICK_DNS),
                    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",
                },
            )
        self.pid = process.pid
        started.set()
        process.wait()

    def _stop(self) -> None:
        if self._control is not None:
            self._control.hang_up()
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@functools.cache
def nursery_of_this_process() -> Nursery:
    return Nursery()
