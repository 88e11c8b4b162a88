"""Storage that fails or waits when a test says so, and a background writer that writes at once, in the test's own thread."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.unit.fakes import replace_system_call
from training.background_writer import BackgroundWriter


class AtOnce(BackgroundWriter):
    """A writer without a thread: each call writes, or fails, in the caller's thread. `said`: all reported messages."""

    def __init__(self) -> None:
        self.said: list[str] = []
        super().__init__(self.said.append)

    def wake(self) -> None:
        self._requested += 1
        if self.write_all():
            self._done = self._requested


def until_written(background_writer: BackgroundWriter) -> None:
    """Waits until all pending data is written, also while storage fails."""
    while not background_writer.flush(50.0):
        pass


class SlowStore(MemoryFileSystem):
    """memory:// as slow://: `lets_go` releases reads of a checkpoint's last file; listing fails while `is_away`."""

    protocol = "slow"
    lets_go = threading.Event()
    is_away = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(str(path).removeprefix("slow:/"))

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        assert ".metadata." not in path or self.lets_go.wait(50)
        return super().cat_file(path, *arguments, **options)

    def find(self, path: str, *arguments: Any, **options: Any) -> Any:
        if self.is_away:
            raise ConnectionError("no route")
        return super().find(path, *arguments, **options)


fsspec.register_implementation("slow", SlowStore, clobber=True)


class Disk:
    """Injects errors for files under `folder`. full: ENOSPC once `room` more bytes are written; read_only: EROFS for every change."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = str(folder), monkeypatch
        self.refuses: int | None = None
        self.room = 0
        self._open, self._write, self._io_open = os.open, os.write, open
        replace_system_call(monkeypatch, "open", self._opens)
        replace_system_call(monkeypatch, "write", self._writes)
        self._replace = Path.replace
        monkeypatch.setattr(Path, "replace", lambda path, target: self._replaces(path, target))

    @contextmanager
    def full(self, room: int = 0) -> Iterator[None]:
        self.refuses, self.room = errno.ENOSPC, room
        yield
        self.refuses = None

    @contextmanager
    def read_only(self) -> Iterator[None]:
        self.refuses, self.room = errno.EROFS, 0
        yield
        self.refuses = None

    def _fail(self, path: str) -> None:
        assert self.refuses
        raise OSError(self.refuses, os.strerror(self.refuses), path)

    def _opens(self, path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if self.refuses == errno.EROFS and str(path).startswith(self._folder) and flags & (os.O_RDWR | os.O_WRONLY):
            self._fail(str(path))
        return self._open(path, flags, *rest, **named)

    def _writes(self, fd: int, data: Any) -> int:
        path = str(Path(f"/proc/self/fd/{fd}").readlink())
        if self.refuses and path.startswith(self._folder):
            if not self.room:
                self._fail(path)
            size, self.room = min(self.room, len(data)), max(0, self.room - len(data))
            return self._write(fd, bytes(data)[:size])
        return self._write(fd, data)

    def _replaces(self, path: Path, target: Path) -> Path:
        if self.refuses and str(target).startswith(self._folder):
            self._fail(str(target))
        return self._replace(path, target)
