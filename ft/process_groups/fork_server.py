"""The fork server: a process with torch imported, which forks a child process for each generation of a process group (baby.ChildGroup).

A trainer has one fork server, started with its first process group that uses children and kept until its end, so that no generation waits
for an import. It starts no thread, and the pages of torch are shared. A child is ended reliably: Child.kill sends SIGKILL through a pidfd
(except on macOS), so never to a process that reuses the pid. No child outlives the trainer: Linux kills the fork server with the thread
that started it, and each child with the fork server; on other systems all exit when their socket closes.

multiprocessing's fork server would not do: its children outlive it, and while it is suspended it blocks its caller.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ft.children import unsignalled
from ft.process_groups.errors import ProcessGroupError
from ft.process_groups.sockets import recv_exactly

FORK, REAP, READY = b"fork", b"reap", b"ready"
ANSWER_S = 10.0  # timeout of a request for a child: a fork takes milliseconds
PREPARE_S = 300.0  # timeout of the import of torch
MAX_DESCRIPTORS = 8  # most descriptors of one message
_HEAD = struct.Struct("<I")
_ROOT = Path(__file__).resolve().parents[2]


class Channel:
    """A Unix socket for whole messages, each with its descriptors. One thread receives; any may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """Returns a channel, and the socket at its other end, for the child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(ours), theirs

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Sends a message. Descriptors are duplicated, and remain the caller's. Raises OSError if the other end is closed."""
        assert len(descriptors) <= MAX_DESCRIPTORS
        with self._sending:
            head = _HEAD.pack(len(message))
            if descriptors:
                socket.send_fds(self._socket, [head], list(descriptors))
            self._socket.sendall(message if descriptors else head + message)

    def receive(self) -> tuple[bytes, list[int]] | None:
        """Returns the next message and its descriptors, which the caller must close; None: the other end is closed."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _HEAD.size, MAX_DESCRIPTORS)
            head += recv_exactly(self._socket, _HEAD.size - len(head)) if head else b""
            return (recv_exactly(self._socket, *_HEAD.unpack(head)), descriptors) if head else None
        except OSError:
            return None

    def poll(self, limit_s: float) -> bool:
        """Waits until there is a message or the other end is closed. Returns False if neither happens within limit_s."""
        poll = select.poll()  # select does not support descriptors from 1024 on
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * limit_s))

    def hang_up(self) -> None:
        """Shuts the socket down, which interrupts the receiving threads at both ends."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class Child:
    """A forked process as its parent sees it: to talk to, to kill, to wait for."""

    def __init__(self, pid: int, channel: Channel, fork_server: ForkServer) -> None:
        self.pid, self.channel, self.fork_server = pid, channel, fork_server
        self._handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None  # macOS
        self._lock = threading.Lock()
        self._closed = False

    def kill(self) -> None:
        """Kills the process, which ends its mappings of shared memory, and shuts the channel down. May be called twice."""
        with self._lock:
            if self._closed:
                return
            with suppress(ProcessLookupError):
                if self._handle is not None:
                    signal.pidfd_send_signal(self._handle, signal.SIGKILL)
                else:
                    os.kill(self.pid, signal.SIGKILL)
            self.channel.hang_up()  # before `end` may close it: the descriptor could be another socket's by then

    def end(self) -> None:
        """Waits, after `kill`, until the process has ended (not on macOS, which has no pidfd), and closes the channel."""
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


class ForkServer:
    """The parent's end. If the server dies or does not answer within answer_s, it is killed with its children; the next call starts one."""

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
        self._lock = threading.Lock()  # for one request at a time
        self._control: Channel | None = None
        self._ready = False  # True: it has imported torch
        self.pid = 0
        self._process: subprocess.Popen[bytes] | None = None

    def warm(self) -> None:
        """Starts the fork server, without waiting for it."""
        with self._lock:
            self._start()

    def prepare(self) -> None:
        """Returns when the fork server has imported torch. Raises ProcessGroupError."""
        with self._lock:
            for _ in range(2):
                if self._ready:
                    return
                control = self._start()
                message = control.receive() if control.poll(PREPARE_S) else None
                self._ready = message is not None and message[0] == READY
                if not self._ready:
                    self._stop()
            raise ProcessGroupError("the fork server for child processes dies or hangs before it has imported torch")

    def child(self) -> Child:
        """Forks a child. Raises ProcessGroupError."""
        why = "the fork server dies or does not answer"
        for _ in range(2):
            self.prepare()
            ours, theirs = Channel.pair()
            with theirs, self._lock:
                control = self._control
                if control is not None:
                    with suppress(OSError):
                        control.send(FORK, [theirs.fileno()])
                    answer = control.receive() if control.poll(self._answer_s) else None
                    if answer is None:
                        self._stop()
                    elif pid := int(answer[0]):
                        return Child(pid, ours, self)
                    else:
                        why = "the fork server has no process or descriptor left for one"
            ours.close()
        raise ProcessGroupError(f"no child process: {why}")

    def reap(self) -> None:
        """Makes the fork server reap children that have ended."""
        with self._lock, suppress(OSError):
            if self._control is not None:
                self._control.send(REAP)

    def close(self) -> None:
        """Ends the fork server with all its children. May be called twice; `child` starts a new one."""
        with self._lock:
            self._stop()

    def _start(self) -> Channel:
        if self._control is None:
            self._control, theirs = Channel.pair()
            started = threading.Event()
            # this thread stays, as Linux kills the fork server when the thread that started it ends
            threading.Thread(target=self._keep, args=(theirs, started), name="ft-fork-server", daemon=True).start()
            started.wait()
        return self._control

    def _keep(self, theirs: socket.socket, started: threading.Event) -> None:
        descriptor = theirs.fileno()
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}
        try:
            # unsignalled: only the end of this process, or `_stop`, ends it
            with theirs, unsignalled():
                self._process = process = subprocess.Popen(
                    [sys.executable, "-m", "ft.process_groups.fork_server_main", str(descriptor), str(os.getpid())],
                    pass_fds=[descriptor],
                    stdin=subprocess.DEVNULL,
                    cwd=_ROOT,  # `-m` searches there first
                    env={**os.environ, **own},
                )
            self.pid = process.pid
        finally:
            started.set()
        process.wait()

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
