"""Files that grow at their end: whole pieces or nothing, read and cut from there. What that costs goes by what is new in them.

Floor 3, under sinks.py (the figures of a run) and events.py.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BLOCK_BYTES = 64 << 10  # of a file that is read from its end, at a time
LOCK_S = 2.0  # who writes, and lives, holds a file for one write


class AppendedFile:
    """A file that grows by whole pieces: of one that finds no room, nothing stays. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._end = os.fstat(self._fd).st_size

    def append(self, piece: bytes) -> None:
        """In one write where the system takes it whole."""
        if (end := os.fstat(self._fd).st_size) != self._end:
            raise OSError(None, f"has {end} bytes, and {self._end} were written", str(self.path))
        try:
            left = memoryview(piece)
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            with suppress(OSError):  # else whoever opens it next cuts it
                os.ftruncate(self._fd, self._end)
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self._end += len(piece)

    def cut(self, end: int) -> None:
        """Keeps so many bytes."""
        if end != self._end:
            os.ftruncate(self._fd, end)
            self._end = end

    @contextmanager
    def held(self) -> Iterator[None]:
        """By this process alone, as far as the file system knows locks. Raises BlockingIOError where another one does not let go."""
        locks = True
        try:
            self.hold()
        except BlockingIOError as error:
            raise BlockingIOError(error.errno, error.strerror, str(self.path)) from None
        except OSError:
            locks = False  # the file system has none: whoever takes over replaces the file
        try:
            yield
        finally:
            if locks:
                self.let_go()

    def hold(self) -> None:
        """Raises BlockingIOError where another one has not let go within LOCK_S, OSError where there are no locks."""
        end_s = time.monotonic() + LOCK_S
        while time.monotonic() < end_s:
            with suppress(BlockingIOError):
                return fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.02)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def let_go(self) -> None:
        if self._fd >= 0:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def replaced(self) -> bool:
        """By another process, which could not have it otherwise (`replace_by_copy`)."""
        try:
            return not os.path.samestat(os.fstat(self._fd), self.path.stat())
        except FileNotFoundError:
            return True

    def sync(self) -> None:
        os.fsync(self._fd)

    def look(self) -> None:
        """From here on the file is what is there now."""
        self._end = os.fstat(self._fd).st_size

    def read(self, start: int, end: int) -> bytes:
        return os.pread(self._fd, end - start, start)

    @property
    def size_bytes(self) -> int:
        return self._end

    def close(self) -> None:
        """May be called twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


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


def replace_by_copy(path: Path, size_bytes: int) -> None:
    """Replaces the file by a copy of its first bytes; whoever had it open has the old file. Raises OSError."""
    temporary = _beside(path)
    try:
        with path.open("rb") as source, temporary.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.truncate(size_bytes)
            os.fsync(target.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def _beside(path: Path) -> Path:
    """Nobody else's: in containers all processes have the same number, and a rank's scribe and trainer note the same claim."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{threading.get_native_id()}")


def replace_file(path: Path, content: bytes) -> None:
    """Whoever opens `path` finds the old content or all of the new; not even a power cut leaves a part."""
    temporary = _beside(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):  # on a full disk the piece that fitted is in everybody's way
            temporary.unlink()
        raise
