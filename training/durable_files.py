"""Append-only files with atomic appends, which are read and truncated from the end; file locks; atomic replacement of files."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ft.children import boot_id

WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of a write, which name no file
BLOCK_BYTES = 64 << 10  # bytes per read of `lines_from_end`
LOCK_S = 2.0  # longest wait for a lock, which a live writer holds for one write
DEAD_LOCK_S = 300  # for so long file servers keep a lock of a machine that has died: NFS 90 s, CephFS 300 s


class AppendedFile:
    """A file to which data is appended completely or not at all. Methods raise OSError."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path, self.size_bytes = path, 0
        self.open(os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def open(self, flags: int = os.O_RDWR | os.O_CREAT | os.O_APPEND) -> None:
        self._fd = os.open(self.path, flags | os.O_CLOEXEC, 0o666)
        self.read_size()

    def append(self, piece: bytes) -> None:
        """Appends `piece`; on failure removes what was written of it. Raises OSError also if another process has changed the size."""
        if (end := os.fstat(self._fd).st_size) != self.size_bytes:
            raise OSError(None, f"has {end} bytes, but this process expects {self.size_bytes}", str(self.path))
        try:
            left = memoryview(piece)
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            with suppress(OSError):  # otherwise the next process that opens the file removes that part
                os.ftruncate(self._fd, self.size_bytes)
            raise OSError(error.errno, error.strerror, str(self.path)) from None
        self.size_bytes += len(piece)

    def truncate(self, end: int) -> None:
        if end != self.size_bytes:
            os.ftruncate(self._fd, end)
            self.size_bytes = end

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Locks the file; yields False if the file system has no locks. Raises BlockingIOError if another process holds it for LOCK_S."""
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

    def is_replaced(self) -> bool:
        """Returns True if another process has replaced the file (`replace_by_copy`), or removed it."""
        try:
            return not os.path.samestat(os.fstat(self._fd), self.path.stat())
        except FileNotFoundError:
            return True

    def sync(self) -> None:
        os.fsync(self._fd)

    def read_size(self) -> None:
        """Sets `size_bytes` to the present size of the file."""
        self.size_bytes = os.fstat(self._fd).st_size

    def read(self, start: int, end: int) -> bytes:
        return os.pread(self._fd, end - start, start)

    def close(self) -> None:
        """Closes the file. May be called twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def try_lock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Locks an open file until it is unlocked or the process ends. `shared`: beside other shared locks. False: another process holds it;
    None: the file system has no locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:  # ENOSYS, ENOLCK, EOPNOTSUPP
        return None


def lines_from_end(file: AppendedFile) -> Iterator[tuple[int, bytes]]:
    """Yields offset and text of each line, last line first."""
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


def cause_of(error: OSError, path: object = "") -> str:
    """Formats an error of the system as `path: cause`. `path`: where this program writes, as an error of a write names no file."""
    place = path if error.filename is None and error.errno in WRITE_ERRORS else error.filename
    return f"{place}: {error.strerror}" if error.strerror and place else str(error)


def sync_path(path: Path) -> None:
    """Writes a file, or the entries of a folder, to disk (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # some shared folders of virtual machines cannot sync a folder
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file atomically and durably: after a power failure it has the old or the new content. Raises OSError."""
    with _replacement(path) as file:
        file.write(content)


def replace_by_copy(path: Path, size_bytes: int) -> None:
    """Replaces the file by a copy of its first `size_bytes`; a process that had it open keeps the old file. Raises OSError."""
    with path.open("rb") as source, _replacement(path) as target:
        shutil.copyfileobj(source, target, 1 << 20)
        target.truncate(size_bytes)


@contextmanager
def _replacement(path: Path) -> Iterator[IO[bytes]]:
    """Yields a temporary file that is renamed to `path` at the end. Its name is random: two threads write the same lease, and containers of
    one machine may have the same host name and the same process and thread IDs."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):  # on a full disk the partial file would take space
            temporary.unlink()
        raise


class RunLock(AppendedFile):
    """Locks a run's folder until `close` or the process ends: two launches would remove each other's partial saves. Raises ValueError if
    locked; if another machine holds the lock, only after DEAD_LOCK_S, which is logged: that machine may have died, and a launch in its
    place that ends as one with bad input would not be restarted. `shared`: for a job of replica groups, which share the run's folder with
    each other, but not with a launch without groups. `pause`: waits for that many seconds."""

    def __init__(
        self,
        run_folder: Path,
        *,
        shared: bool = False,
        log: Callable[[str], object] = lambda text: None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        run_folder.mkdir(parents=True, exist_ok=True)
        super().__init__(run_folder / "lock")
        locked = try_lock(self._fd, shared=shared)
        owner, machine = self._read_owner() if locked is False else ("", "")
        # the kernel knows of each lock of its processes, also in containers; a host name may be an earlier machine's, or that of several
        if machine not in ("", boot_id()):
            log(f"{run_folder} is in use by {owner}: waits {DEAD_LOCK_S} s, as that machine may have died")
            for _ in range(DEAD_LOCK_S):
                pause(1.0)
                if (locked := try_lock(self._fd, shared=shared)) is not False:
                    break
            owner, _ = self._read_owner()
        if locked is False:  # None, a file system without locks: the run is not guarded
            self.close()
            raise ValueError(
                f"job.name: {run_folder} is in use by {owner or 'another process'}; wait for it, stop it, or start another run with "
                "--job.name NAME, or, if this is a replica group's folder, give each group its own REPLICA_GROUP_ID"
            )
        # a process that shares the lock may end before the others: its name would mislead
        own = f"process {os.getpid()} on {socket.gethostname()}\n{boot_id()}"
        content = ("replica groups, named in groups/*/lock" if shared else own).encode()
        with suppress(OSError):  # on a full disk the lock is held without the owner's name
            self.read_size()  # another launch may have written its name since the file was opened
            if self.read(0, self.size_bytes) != content:
                self.truncate(0)
                self.append(content)

    def close(self) -> None:
        with suppress(OSError):
            super().close()

    def _read_owner(self) -> tuple[str, str]:
        """Returns the name of the process that has written the file last, and its `boot_id`; "": not known."""
        self.read_size()
        owner, _, machine = self.read(0, self.size_bytes).decode(errors="replace").strip().partition("\n")
        return owner, machine
