"""Messages between a group and its child: a Unix socket, each message with the descriptors that go with it.

What a group says is dataclasses, pickled: a process to its own child. What the child says is JSON: the child talks to the network, and
nothing that comes from there is ever unpickled.
"""

from __future__ import annotations

import array
import select
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ft.process_groups.operations import Operation
from ft.protocol.messages import Shape

READY, FAILED, ENDED, DROPPED = (
    "ready",
    "failed",
    "ended",
    "dropped",
)  # of replies: [what, number, error, more]; more of FAILED: absent ranks, and strangers; of DROPPED: what Unmap named
MOST_DESCRIPTORS = 8  # of one message
_HEAD = struct.Struct("<I")


class Channel:
    """Whole messages both ways. One thread receives; any may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    @staticmethod
    def pair() -> tuple[Channel, socket.socket]:
        """One end as a channel, the other for the child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Channel(ours), theirs

    def send(self, message: bytes, descriptors: list[int] | None = None) -> None:
        """Raises OSError when the other end is gone. Descriptors are duplicated, and remain the caller's."""
        with self._sending:
            head = _HEAD.pack(len(message))
            given = array.array("i", descriptors or [])
            assert len(given) <= MOST_DESCRIPTORS
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, given)] if given else []
            self._socket.sendmsg([head], rights)
            self._socket.sendall(message)

    def receive(self) -> tuple[bytes, list[int]] | None:
        """The next message and its descriptors, which are the caller's to close; None when the other end is gone."""
        try:
            room = socket.CMSG_LEN(MOST_DESCRIPTORS * array.array("i").itemsize)
            head, rights, _, _ = self._socket.recvmsg(_HEAD.size, room)
            given = array.array("i")
            for level, kind, data in rights:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    given.frombytes(data[: len(data) - len(data) % given.itemsize])
            head += self._exactly(_HEAD.size - len(head)) if head else b""
            if not head:
                return None
            return self._exactly(_HEAD.unpack(head)[0]), given.tolist()
        except (EOFError, OSError):
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

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(count - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


@dataclass(frozen=True)
class Form:
    """Build the group; answered by READY or FAILED."""

    kind: str  # gloo, nccl
    store: str
    rank: int
    size: int
    limit_s: float
    interface: str | None
    device: int | None  # CUDA device, for nccl
    shape: Shape = ()
    holders: Sequence[int] = ()


@dataclass(frozen=True)
class Map:
    """The descriptor that comes along is memory, to be known by this number."""

    number: int
    size: int


@dataclass(frozen=True)
class MapDevice:
    """Memory of a GPU, to be known by this number: what torch's `_share_cuda_` gave for it."""

    number: int
    export: tuple[Any, ...]


@dataclass(frozen=True)
class Unmap:
    """Answered by DROPPED."""

    numbers: list[int]


@dataclass(frozen=True)
class Start:
    """Start an operation, with a SharedTensor for each tensor; answered by ENDED. `after`: a CUDA event of the parent to wait for first."""

    number: int
    operation: Operation
    after: Any = None
