"""What a lighthouse remembers over its own death: one JSON file that is always whole.

Persist must be done before what comes after it: an id that was seen must not come again. So a new id is on disk before its quorum is
answered. A quorum that keeps its id (members that ask again at a later step) is written within a second instead, for all that is lost
with it is how far the job is known to have come, which members report anyway.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ft.protocol import messages as m

FORMAT = "pharos lighthouse 1"
LAZY_S = 1.0
RETRY_S = 1.0
log = logging.getLogger("pharos.lighthouse")


def read(path: Path) -> m.Saved | None:
    """None: there is no such file. Raises ValueError where it is not a state file, OSError where it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is not a state file: {error}") from None
    try:
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        return m.Saved.from_dict(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a state file of this version: {error!r}") from None


def read_or_refuse(path: Path) -> m.Saved | None:
    """At a start: a file that is damaged stops it, for beginning anew could repeat ids. Raises ValueError, which names the way out."""
    try:
        return read(path)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"--state_file: {error}; --recover learns from the groups of the running job instead"
        ) from None


def try_to_write(path: Path) -> None:
    """Leaves nothing behind, and disturbs nobody who writes there. Raises OSError where `write` would."""
    probe = path.with_name(f"{path.name}.{os.getpid()}")
    probe.touch()
    probe.unlink()


def write(path: Path, saved: m.Saved) -> None:
    """Afterwards it is on disk: temporary file, fsync, rename, fsync of the folder. Raises OSError."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **saved.to_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class Keeper:
    """Writes in a thread of its own, one after the other; the loop never waits for a disk.

    A disk that refuses is told, and tried again each second: until then no quorum is answered, and running steps go on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trouble = ""  # why the last attempt failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state-file")
        self._newest: m.Saved | None = None
        self._lazy: asyncio.TimerHandle | None = None

    def keep(self, saved: m.Saved) -> asyncio.Future[None] | None:
        """A future where what comes next must wait for the disk."""
        before, self._newest = self._newest, saved
        if before and _key(before) == _key(saved) and saved.settled >= before.settled:
            if self._lazy is None:
                self._lazy = asyncio.get_running_loop().call_later(LAZY_S, self._write_lazily)
            return None
        return asyncio.ensure_future(self._until_written(saved))

    async def close(self) -> None:
        if self._lazy:
            self._lazy.cancel()
            self._write_lazily()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _write_lazily(self) -> None:
        self._lazy = None
        assert self._newest
        self._thread.submit(self._try, self._newest)

    async def _until_written(self, saved: m.Saved) -> None:
        loop = asyncio.get_running_loop()
        while not await loop.run_in_executor(self._thread, self._try, saved):
            await asyncio.sleep(RETRY_S)

    def _try(self, saved: m.Saved) -> bool:
        try:
            write(self.path, saved)
        except OSError as error:
            if str(error) != self.trouble:
                log.error("%s cannot be written, so no quorum is answered: %s", self.path, error)
            self.trouble = str(error)
            return False
        if self.trouble:
            log.warning("%s is written again", self.path)
        self.trouble = ""
        return True


def _key(saved: m.Saved) -> tuple[Any, ...]:
    return (saved.epoch, saved.last_id, saved.kind)
