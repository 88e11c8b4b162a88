"""Files that grow at their end: whole pieces or nothing, read and cut from there. What that costs goes by what is new in them."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

BLOCK_BYTES = 64 << 10  # of a file that is read from its end, at a time
LOCK_S = 2.0  # a live writer locks a file for one write


class AppendedFile:
    """A file that grows by whole pieces: of one that finds no room, nothing stays. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path, self.size_bytes = path, 0
        self.open()

    def open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.read_size()

    def append(self, piece: bytes) -> None:
        """Adds a piece, in one write where the system takes it whole."""
        if (end := os.fstat(self._fd).st_size) != self.size_bytes:
            raise OSError(None, f"has {end} bytes, and {self.size_bytes} were written", str(self.path))
        try:
            left = memoryview(piece)
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            with suppress(OSError):  # else the next one to open it cuts it
                os.ftruncate(self._fd, self.size_bytes)
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self.size_bytes += len(piece)

    def cut(self, end: int) -> None:
        if end != self.size_bytes:
            os.ftruncate(self._fd, end)
            self.size_bytes = end

    @contextmanager
    def held(self) -> Iterator[bool]:
        """Locks the file; False: the file system has no locks. Raises BlockingIOError where another process holds it for LOCK_S."""
        end_s = time.monotonic() + LOCK_S
        while (is_locked := try_lock(self._fd)) is False:
            if time.monotonic() >= end_s:
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(self.path))
            time.sleep(0.02)
        try:
            yield bool(is_locked)
        finally:
            if is_locked and self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def replaced(self) -> bool:
        """True when another process has replaced the file, since it could not lock it (`replace_by_copy`)."""
        try:
            return not os.path.samestat(os.fstat(self._fd), self.path.stat())
        except FileNotFoundError:
            return True

    def sync(self) -> None:
        os.fsync(self._fd)

    def read_size(self) -> None:
        """Takes the file's size now as that of what was written."""
        self.size_bytes = os.fstat(self._fd).st_size

    def read(self, start: int, end: int) -> bytes:
        return os.pread(self._fd, end - start, start)

    def close(self) -> None:
        """May be called twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def try_lock(descriptor: int) -> bool | None:
    """Locks an open file until the process ends, at the latest. False: another process has it; None: the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:  # ENOSYS, ENOLCK, EOPNOTSUPP
        return None


def lines_from_end(file: AppendedFile) -> Iterator[tuple[int, bytes]]:
    """Start and text of each line, the last first."""
    at, rest = file.size_bytes, b""
    while at > 0:
        start = max(0, at - BLOCK_BYTES)
        lines = (file.read(start, at) + rest).split(b"\n")
        end = at + len(rest)
        for line in reversed(lines[1:]):
            yield end - len(line), line
            end -= len(line) + 1
        at, rest = start, lines[0]
    yield 0, rest


def sync_path(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Replaces the content in one instant, on the disk: not even a power cut leaves a part. Raises OSError."""
    with _replacement(path) as file:
        file.write(content)


def replace_by_copy(path: Path, size_bytes: int) -> None:
    """Replaces the file by a copy of its first bytes; a process that had it open keeps the old file. Raises OSError."""
    with path.open("rb") as source, _replacement(path) as target:
        shutil.copyfileobj(source, target, 1 << 20)
        target.truncate(size_bytes)


@contextmanager
def _replacement(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` at the end. Its name is unique: in containers all processes have the same number, and a rank's
    background writer and trainer note the same lease."""
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{threading.get_native_id()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):  # on a full disk the piece that fitted takes room
            temporary.unlink()
        raise


class RunLock(AppendedFile):
    """Locks a run's folder, for two starts at once would take each other's checkpoints for leftovers, until `close` or the end of the
    process. Raises ValueError if another has it."""

    def __init__(self, run_folder: Path) -> None:
        run_folder.mkdir(parents=True, exist_ok=True)
        super().__init__(run_folder / "lock")
        locked = try_lock(self._fd)
        self.read_size()  # another start may have written its name since the file was opened
        if locked is False:  # without locks: better an unguarded run than none
            owner = self.read(0, self.size_bytes).decode().strip() or "another process"
            self.close()
            raise ValueError(
                f"job.name: {run_folder} is being trained by {owner}; wait for it, stop it, or start another run with --job.name NAME"
            )
        with suppress(OSError):  # on a full disk it has no owner's name, and holds all the same
            self.cut(0)
            self.append(f"process {os.getpid()} on {socket.gethostname()}".encode())

    def close(self) -> None:
        with suppress(OSError):
            super().close()
