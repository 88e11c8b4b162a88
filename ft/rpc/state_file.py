"""The lighthouse's state file: one JSON file, replaced atomically, from which a restarted lighthouse continues.

Quorum ids never repeat: a new id, or the reservation that covers it, is on disk before its quorum is answered. A quorum that keeps its id
is written within a second; if that write is lost, only the newest settled step is lost, which members report.

A disk that is full, read-only or slow stops no job: the file reserves RESERVED ids above its last_id, whose quorums need no write, and a
restart begins after them (`reserved`). A lighthouse that restarts while the disk still fails answers no new quorum until it can write.

A different lighthouse may acquire the file while this one is stopped (so a lock would not do): it writes its owner name to a file beside,
removes partial files of others, then reads. A writer writes a partial file with its own name, checks the owner, then renames it. So at
whatever point this one was stopped, either the new owner has read what this one wrote, or the rename is not done.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

from ft.protocol import messages as m
from ft.protocol.rules import MAX_STEP, request_problem

FORMAT = "pharos lighthouse 1"
RESERVED = 1000  # ids above the file's last_id that may be issued while the disk fails; a restart begins after them
PACE_S = 1.0  # delay of a write that may wait, pause between two tries, and timeout of a write whose id is reserved
PASSING = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}  # errors of a disk that may pass
log = logging.getLogger("pharos.lighthouse")


def read(path: Path) -> m.PersistentState | None:
    """Reads the file; None if there is none. Raises ValueError if it is not a state file, OSError if it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a state file: {error}") from None
    try:
        if data.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        saved = m.PersistentState.from_dict(data)
        _check(saved)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a state file of this version: {error!r}") from None
    return saved


def _check(saved: m.PersistentState) -> None:
    """Raises TypeError or ValueError for a value of a wrong type or range, which would end the lighthouse later."""
    if any(type(number) is not int or not 0 <= number <= MAX_STEP for number in (saved.last_id, saved.settled)):
        raise ValueError(f"out of range: last_id {saved.last_id!r}, settled {saved.settled!r}")
    if type(saved.epoch) is not str or saved.kind not in get_args(m.Kind):
        raise ValueError(f"invalid: epoch {saved.epoch!r}, kind {saved.kind!r}")
    with suppress(ImportError):  # run_lighthouse.sh checks flags and this file before it installs protobuf
        from ft.rpc import codec

        for part in filter(None, (saved.limits, saved.quorum)):
            codec.to_message(part)  # raises TypeError for a field of a wrong type
    if saved.limits and (saved.limits.min_replicas < 1 or not 0 < (saved.limits.takeover_s or 1.0) < math.inf):
        raise ValueError(f"out of range: {saved.limits}")
    if quorum := saved.quorum:
        if list(map(type, quorum.reference)) != [int, int, str]:
            raise ValueError(f"invalid reference {quorum.reference}")
        problems = [request_problem(m.Call(member, saved.kind, known=quorum.quorum_id)) for member in quorum.members]
        if not quorum.members or any(problems) or list(quorum.ids) != sorted(set(quorum.ids)):
            raise ValueError(f"quorum {quorum.quorum_id}: its members are invalid, unsorted or none")


def reserved(saved: m.PersistentState) -> m.PersistentState:
    """Returns the state to continue from, with last_id raised by RESERVED, since these ids may have been issued."""
    return replace(saved, last_id=saved.last_id + RESERVED) if saved.last_id else saved


def read_or_refuse(path: Path) -> m.PersistentState | None:
    """Reads the file at a start. Raises ValueError, which names --recover, for a damaged one: a start without it could repeat ids."""
    try:
        return read(path)
    except (ValueError, OSError) as error:
        instead = "--recover learns from the groups of the running job instead"
        raise ValueError(f"--state_file: {error}; {instead}") from None


def try_to_write(path: Path) -> None:
    """Raises OSError if `write` would. Leaves no file behind, and does not disturb a lighthouse that writes there."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex[:12]}")
    probe.touch()
    probe.unlink()


class Superseded(RuntimeError):
    """A different lighthouse continues from the state file: this one must not answer any more."""


def acquire(path: Path, owner: str = "") -> str:
    """Acquires the file, before `read`; from then on no other lighthouse can write it. Returns the owner name, by default a new one. Raises
    OSError, perhaps after the name was written: a caller that tries again gives the same name, so as not to take it for another's."""
    owner = owner or uuid.uuid4().hex[:12]
    stamp = path.with_name(f"{path.name}.{owner}")
    try:
        try:
            stamp.write_text(owner, encoding="ascii")
        except OSError:  # the disk may be full: a dangling symlink with the name needs no block
            stamp.unlink(missing_ok=True)
            stamp.symlink_to(owner)
        stamp.replace(path.with_name(f"{path.name}.owner"))
    except OSError:
        stamp.unlink(missing_ok=True)
        raise
    for other in path.parent.iterdir():
        if other.name.startswith(f"{path.name}.partial"):
            other.unlink(missing_ok=True)
    return owner


def write(path: Path, saved: m.PersistentState, owner: str = "") -> None:
    """Writes the state: temporary file, fsync, rename, fsync of the folder. Raises OSError; Superseded if `owner` is not the owner."""
    partial = path.with_name(f"{path.name}.partial{owner}")
    with partial.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **asdict(saved)}, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        check_owner(path, owner)
        partial.replace(path)
    except (Superseded, FileNotFoundError):
        partial.unlink(missing_ok=True)
        check_owner(path, owner)  # if the partial file is missing, the new owner removed it
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a file system that cannot sync a folder: see training/durable_files.py
            raise
    finally:
        os.close(folder)


def check_owner(path: Path, owner: str) -> None:
    """Raises Superseded if a different lighthouse has acquired the file."""
    if owner_of(path) not in ("", owner):
        raise Superseded(f"{path} belongs to a lighthouse that was started after this one")


def owner_of(path: Path) -> str:
    """Returns the owner name of the lighthouse that acquired the file last; empty if none has. Raises OSError."""
    stamp = path.with_name(f"{path.name}.owner")
    with suppress(FileNotFoundError):
        return str(stamp.readlink()) if stamp.is_symlink() else stamp.read_text(encoding="ascii")
    return ""


class StateFileWriter:
    """Writes the state file in a thread, so that the loop never waits for the disk. A failed write is logged, and retried each second.
    Once a different lighthouse has acquired the file, waiting and later writes raise Superseded."""

    write_file, acquire_file, pace_s = staticmethod(write), staticmethod(acquire), PACE_S

    def __init__(
        self, path: Path, owner: str = "", saved: m.PersistentState | None = None, *, trouble: str = ""
    ) -> None:
        """`owner`: argument or result of acquire. `saved`: contents of the file. `trouble`: why the file could not be acquired at the
        start; then the first write acquires it, if its owner is still the same. Raises OSError."""
        self.path, self._owner, self._written, self.trouble = path, owner, saved, trouble
        self._before = owner_of(path) if trouble else None
        self._over: Superseded | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state-file")
        self._newest: m.PersistentState | None = None
        self._later: asyncio.Future[None] | None = None  # delayed write of _newest
        self._checking: Future[None] | None = None
        self._checked_s = time.monotonic()

    @classmethod
    def begin(cls, path: Path, *, recover: bool) -> tuple[StateFileWriter, m.PersistentState | None]:
        """Acquires the file and reads it. `recover`: a damaged file counts as none. Raises ValueError if it is unusable."""
        owner, trouble, saved = uuid.uuid4().hex[:12], "", None
        try:
            cls.acquire_file(path, owner)
        except OSError as error:
            if error.errno not in PASSING:
                raise ValueError(f"--state_file {path}: cannot be written: {error.strerror}") from None
            log.error("%s cannot be written, and no new quorum is answered until it can: %s", path.parent, error)
            trouble = str(error)
        try:
            saved = read_or_refuse(path)
        except ValueError as error:
            if not recover:
                raise
            log.warning("%s", error)
        return cls(path, owner, saved, trouble=trouble), saved

    def schedule_write(self, saved: m.PersistentState) -> asyncio.Future[None] | None:
        """Schedules a write. Returns a future if later effects must wait for the disk, else None. Raises Superseded."""
        if self._over:
            raise self._over
        before, self._newest = self._newest, saved
        same = before and (before.epoch, before.last_id, before.kind) == (saved.epoch, saved.last_id, saved.kind)
        if before and same and saved.settled >= before.settled:
            self._later = self._later or asyncio.ensure_future(self._write_newest())
            return None
        return asyncio.ensure_future(self._until_written(saved))

    def check(self) -> None:
        """Raises Superseded within seconds after a different lighthouse has acquired the file, even without writes: else groups would stay
        connected to this one."""
        if self._over:
            raise self._over
        now_s = time.monotonic()
        if now_s - self._checked_s >= 5 * self.pace_s and (self._checking is None or self._checking.done()):
            self._checked_s, self._checking = now_s, self._thread.submit(self._is_ours)

    async def close(self) -> None:
        if self._later and self._newest:
            self._later.cancel()
            self._thread.submit(self._try, self._newest)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    async def _write_newest(self) -> None:
        """Writes the newest state within a second, or as soon as the disk works again."""
        while self._newest and self._written is not self._newest and not self._over:
            await asyncio.sleep(self.pace_s)
            await asyncio.get_running_loop().run_in_executor(self._thread, self._try, self._newest)
        self._later = None

    async def _until_written(self, saved: m.PersistentState) -> None:
        loop = asyncio.get_running_loop()
        while True:
            attempt = loop.run_in_executor(self._thread, self._try, saved)
            there = self._written
            covered = (  # True: the id is among those that the file reserves
                there is not None
                and (there.epoch, there.kind) == (saved.epoch, saved.kind)
                and there.settled <= saved.settled
                and saved.last_id <= there.last_id + RESERVED
            )
            done, _ = await asyncio.wait([attempt], timeout=self.pace_s if covered else None)
            if done and attempt.result():
                return
            if self._over:
                raise self._over
            if covered:
                self._later = self._later or asyncio.ensure_future(self._write_newest())
                return
            await asyncio.sleep(self.pace_s)

    def _try(self, saved: m.PersistentState) -> bool:
        try:
            if self._before is not None:  # it could not be acquired at the start, so this is done now
                # our name is there already if an earlier try failed half-way
                if ours := owner_of(self.path) in (self._before, self._owner):
                    self._owner = self.acquire_file(self.path, self._owner)
                try:
                    there = read(self.path)
                except ValueError:
                    there = None  # damaged, as at the start with --recover
                if not ours or there != self._written:
                    raise Superseded(f"{self.path} was acquired by a different lighthouse before the first write")
                self._before = None
            try:
                self.write_file(self.path, saved, self._owner)
            except OSError:
                check_owner(self.path, self._owner)  # a different lighthouse may have a disk that works
                raise
        except Superseded as error:
            self._over = error
            return False
        except OSError as error:
            if str(error) != self.trouble:
                free = self._written.last_id + RESERVED - saved.last_id if self._written else 0
                log.error("%s cannot be written, %d more quorums are answered: %s", self.path, max(0, free), error)
            self.trouble = str(error)
            return False
        if self.trouble:
            log.warning("%s is written again", self.path)
        self._written, self.trouble = saved, ""
        return True

    def _is_ours(self) -> None:
        try:
            with suppress(OSError):  # the next write reports it
                if self._before is None:  # else it is not acquired yet
                    check_owner(self.path, self._owner)
        except Superseded as error:
            self._over = error
