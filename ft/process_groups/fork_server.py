"""The source of child processes: one process with torch imported, which forks them (baby_worker.py).

A process that trains has one fork server, started when its first group of children is made and kept until its end, so that no generation
waits for an import. A child's end is certain: Child.kill sends SIGKILL through a descriptor, never to a successor of its number.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from ft.children import unsignalled
from ft.process_groups.baby_worker import BURY, FORK, READY
from ft.process_groups.channel import Channel
from ft.process_groups.errors import GroupError
from ft.process_groups.group_init import PREPARE_S

_ROOT = Path(__file__).resolve().parents[2]
ANSWER_S = 10.0  # for a fork server to hand out a child, which takes milliseconds, or a fork


class Child:
    """A forked child, and the channel to it."""

    def __init__(self, pid: int, channel: Channel, fork_server: ForkServer) -> None:
        self.pid, self.channel = pid, channel
        self.fork_server = fork_server
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
        self.fork_server.reap()
        self.channel.close()

    def memory_bytes(self) -> int:
        """Resident, with the pages that it shares with others."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        return 0


class ForkServer:
    """The parent's end of one process that forks children. If it dies, or is stopped, the next call starts another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # of the conversation with it
        self._control: Channel | None = None
        self._ready = False  # torch is imported there
        self.pid = 0
        self._process: subprocess.Popen[bytes] | None = None

    def warm(self) -> None:
        """Starts it, without waiting for it."""
        with self._lock:
            self._start()

    def prepare(self) -> None:
        """Returns when torch is imported there. Raises GroupError."""
        with self._lock:
            for _ in range(2):
                if self._ready:
                    return
                control = self._start()
                message = control.receive() if control.waits(PREPARE_S) else None
                self._ready = message is not None and message[0] == READY
                if not self._ready:  # it has died, or is stopped
                    self._stop()
            raise GroupError("no fork server for child processes: it dies, or stops, before it has imported torch")

    def child(self) -> Child:
        """A new one: the spare, else it is forked now; where the fork server has died it is started again first."""
        for _ in range(2):
            self.prepare()
            ours, theirs = Channel.pair()
            with theirs, self._lock:
                answer = self._ask_for_child(theirs.fileno())
            if answer is not None:
                return Child(int(answer), ours, self)
            ours.close()
        raise GroupError("no child process: the fork server dies at once, or does not answer")

    def reap(self) -> None:
        """The fork server takes leave of children that have ended."""
        with self._lock:
            if self._control is not None:
                with suppress(OSError):
                    self._control.send(BURY)

    def close(self) -> None:
        """Ends it, and with it all children. May be called twice; `child` starts it again."""
        with self._lock:
            self._stop()

    def _ask_for_child(self, theirs: int) -> bytes | None:
        """Its number; None when the fork server has died, or does not answer: one that is stopped is ended, and its children with it."""
        if self._control is None:
            return None
        with suppress(OSError):
            self._control.send(FORK, [theirs])
        answer = self._control.receive() if self._control.waits(ANSWER_S) else None
        if answer is None:
            self._stop()
            return None
        return answer[0]

    def _start(self) -> Channel:
        if self._control is not None:
            return self._control
        self._control, theirs = Channel.pair()
        started = threading.Event()
        # Linux kills the fork server when the thread that started it ends: so that thread stays.
        threading.Thread(target=self._keep, args=(theirs, started), name="ft-fork-server", daemon=True).start()
        started.wait()
        return self._control

    def _keep(self, theirs: socket.socket, started: threading.Event) -> None:
        with theirs:
            try:
                self._process = process = self._spawn(theirs.fileno())
                self.pid = process.pid
            finally:
                started.set()
        process.wait()

    @staticmethod
    def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with unsignalled():  # it is killed with its generation, or when this process ends, and by nobody else
            return subprocess.Popen(
                [sys.executable, "-m", "ft.process_groups.baby_worker", str(descriptor), str(os.getpid())],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,  # `-m` looks there first
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "OMP_NUM_THREADS": "1",
                    "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",
                },
            )

    def _stop(self) -> None:
        self._ready = False
        if self._control is not None:
            self._control.hang_up()
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@functools.cache
def fork_server_of_this_process() -> ForkServer:
    return ForkServer()
