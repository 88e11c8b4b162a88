"""The source of child processes: one process with torch imported, the fork server, which forks a child for each generation
(baby.ChildGroup).

A process that trains has one fork server, started when its first group of children is made and kept until its end, so that no generation
waits for an import. It starts no thread, and the pages of torch are shared. But a fork of so large a process, and the first writes of the
child to pages that it shares, take tens of milliseconds on a busy machine. So one child, the standby, is always forked ahead, when no group
waits: it gets its socket when it is asked for. A child's end is certain: Child.kill sends SIGKILL through a descriptor, never to a
successor of its number. None outlives the process that trains: Linux kills the fork server with the thread that started it and each child
with it; should that fail, all exit when their socket ends.

multiprocessing's fork server does not do here: it has no standby child, its children outlive it, and one that is stopped blocks its caller.
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
from ft.process_groups.sockets import exactly

FORK, REAP, READY = b"fork", b"reap", b"ready"
ANSWER_S = 10.0  # for a fork server to hand out a child, which takes milliseconds, or a fork
PREPARE_S = 300.0  # the longest that it may take to import torch
MAX_DESCRIPTORS = 8  # of one message
_HEAD = struct.Struct("<I")
_ROOT = Path(__file__).resolve().parents[2]


class Channel:
    """Whole messages both ways over a Unix socket, each with its descriptors. One thread receives; any may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """One end as a channel, the other for the child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(ours), theirs

    def send(self, message: bytes, descriptors: Sequence[int] = ()) -> None:
        """Raises OSError when the other end is gone. Descriptors are duplicated, and remain the caller's."""
        assert len(descriptors) <= MAX_DESCRIPTORS
        with self._sending:
            head = _HEAD.pack(len(message))
            if descriptors:
                socket.send_fds(self._socket, [head], list(descriptors))
            self._socket.sendall(message if descriptors else head + message)

    def receive(self) -> tuple[bytes, list[int]] | None:
        """The next message and its descriptors, which are the caller's to close; None when the other end is gone."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _HEAD.size, MAX_DESCRIPTORS)
            head += exactly(self._socket, _HEAD.size - len(head)) if head else b""
            return (exactly(self._socket, *_HEAD.unpack(head)), descriptors) if head else None
        except OSError:
            return None

    def waits(self, limit_s: float) -> bool:
        """Waits until something can be received or the other end is gone; False: neither within the limit."""
        poll = select.poll()  # not select, which knows no descriptors from 1024 on
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * limit_s))

    def hang_up(self) -> None:
        """Wakes the thread that receives, at both ends."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class Child:
    def __init__(self, pid: int, channel: Channel, fork_server: ForkServer) -> None:
        self.pid, self.channel, self.fork_server = pid, channel, fork_server
        self._handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None  # macOS
        self._lock = threading.Lock()
        self._closed = False

    def kill(self) -> None:
        """Sends SIGKILL: its mappings of shared memory end with it, and the receiving thread sees the channel end. May be called twice."""
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


class ForkServer:
    """The parent's end of one fork server. If that dies, or does not answer within answer_s because it is stopped, it is ended, and its
    children with it; the next call starts another."""

    def __init__(self, answer_s: float = ANSWER_S) -> None:
        self._answer_s = answer_s
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
        """Returns when torch is imported there. Raises ProcessGroupError."""
        with self._lock:
            for _ in range(2):
                if self._ready:
                    return
                control = self._start()
                message = control.receive() if control.waits(PREPARE_S) else None
                self._ready = message is not None and message[0] == READY
                if not self._ready:
                    self._stop()
            raise ProcessGroupError(
                "no fork server for child processes: it dies, or stops, before it has imported torch"
            )

    def child(self) -> Child:
        """A new child: the standby, or one that is forked now. Raises ProcessGroupError."""
        for _ in range(2):
            self.prepare()
            ours, theirs = Channel.pair()
            with theirs, self._lock:
                control = self._control
                if control is not None:
                    with suppress(OSError):
                        control.send(FORK, [theirs.fileno()])
                    answer = control.receive() if control.waits(self._answer_s) else None
                    if answer is not None:
                        return Child(int(answer[0]), ours, self)
                    self._stop()
            ours.close()
        raise ProcessGroupError("no child process: the fork server dies at once, or does not answer")

    def reap(self) -> None:
        """Has the fork server wait for children that have ended."""
        with self._lock, suppress(OSError):
            if self._control is not None:
                self._control.send(REAP)

    def close(self) -> None:
        """Ends it, and with it all children. May be called twice; `child` starts it again."""
        with self._lock:
            self._stop()

    def _start(self) -> Channel:
        if self._control is None:
            self._control, theirs = Channel.pair()
            started = threading.Event()
            # Linux kills the fork server when the thread that started it ends: so that thread stays.
            threading.Thread(target=self._keep, args=(theirs, started), name="ft-fork-server", daemon=True).start()
            started.wait()
        return self._control

    def _keep(self, theirs: socket.socket, started: threading.Event) -> None:
        descriptor = theirs.fileno()
        path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES"}
        try:
            # unsignalled: it is killed with its generation, or when this process ends, and by nothing else
            with theirs, unsignalled():
                self._process = process = subprocess.Popen(
                    [sys.executable, "-m", "ft.process_groups.baby_worker", str(descriptor), str(os.getpid())],
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
