"""The lighthouse's memory across restarts: one JSON file that is always whole.

Quorum ids never repeat: a new id is on disk before its quorum is answered. A quorum that keeps its id is written within a second: all that
is lost with it is how far the job has come, which its members report.

A disk that is full, read-only or slow stops no job: the file reserves RESERVED ids beyond its own, which are answered without it, and a
restart begins after them (`reserved`). A lighthouse that restarts while the disk still fails answers no new quorum until it can write.

Another lighthouse may take the file over while this one is stopped (a lock would be the stopped one's): it puts its name into a file
beside, removes the partial files of others, then reads. A writer prepares a file of its own name, checks the owner, then renames it. So
either the other one has read what was written here, or nothing is written here any more, wherever this one was stopped.
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
from ft.protocol.rules import MAX_STEP, validate_request

FORMAT = "pharos lighthouse 1"
RESERVED = 1000  # ids beyond the file's that may be given out while the disk fails; a restart begins after them
PACE_S = 1.0  # until what may wait is written, between two tries, and until a disk is too slow where the file reserves the id
PASSING = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}  # what a disk says that may work again
log = logging.getLogger("pharos.lighthouse")


def read(path: Path) -> m.PersistentState | None:
    """Reads the file; None: there is none. Raises ValueError where it is not a state file, OSError where it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a state file: {error}") from None
    try:
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        saved = m.PersistentState.from_dict(data)
        _check(saved)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a state file of this version: {error!r}") from None
    return saved


def _check(saved: m.PersistentState) -> None:
    """Raises TypeError and ValueError for a value of a wrong type or range: it would end the lighthouse later."""
    if any(type(number) is not int or not 0 <= number <= MAX_STEP for number in (saved.last_id, saved.settled)):
        raise ValueError(f"last_id {saved.last_id!r}, settled {saved.settled!r}")
    if type(saved.epoch) is not str or saved.kind not in get_args(m.Kind):
        raise ValueError(f"epoch {saved.epoch!r}, kind {saved.kind!r}")
    with suppress(ImportError):  # run_lighthouse.sh looks at the flags, and so here, before it installs protobuf
        from ft.rpc import codec

        for part in filter(None, (saved.terms, saved.quorum)):
            codec.to_message(part)  # says what is of a wrong type
    if saved.terms and (saved.terms.min_replicas < 1 or not 0 < (saved.terms.takeover_s or 1.0) < math.inf):
        raise ValueError(f"{saved.terms}")
    if quorum := saved.quorum:
        if list(map(type, quorum.reference)) != [int, int, str]:
            raise ValueError(f"reference {quorum.reference}")
        problems = [validate_request(m.Call(member, saved.kind, known=quorum.quorum_id)) for member in quorum.members]
        if not quorum.members or any(problems) or list(quorum.ids) != sorted(set(quorum.ids)):
            raise ValueError(f"quorum {quorum.quorum_id}: its members")


def reserved(saved: m.PersistentState) -> m.PersistentState:
    """The state to go on from: none of the ids that the file stands for is free."""
    return replace(saved, last_id=saved.last_id + RESERVED) if saved.last_id else saved


def read_or_refuse(path: Path) -> m.PersistentState | None:
    """At a start: a file that is damaged stops it, for beginning anew could repeat ids. Raises ValueError, which names the way out."""
    try:
        return read(path)
    except (ValueError, OSError) as error:
        instead = "--recover learns from the groups of the running job instead"
        raise ValueError(f"--state_file: {error}; {instead}") from None


def try_to_write(path: Path) -> None:
    """Leaves nothing behind, and disturbs nobody who writes there. Raises OSError where `write` would."""
    probe = path.with_name(f"{path.name}.{os.getpid()}")
    probe.touch()
    probe.unlink()


class TakenOver(RuntimeError):
    """Another lighthouse goes on from the state file: this one must answer nobody any more."""


def take_over(path: Path) -> str:
    """Takes the file over, before `read`; from then on no other lighthouse writes there. Returns the name to write by. Raises OSError."""
    owner = uuid.uuid4().hex[:12]
    stamp = path.with_name(f"{path.name}.{owner}")
    try:
        try:
            stamp.write_text(owner, encoding="ascii")
        except OSError:  # the disk is full, maybe: a link that names it, and leads nowhere, needs no room
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
    """Puts it on disk: temporary file, fsync, rename, fsync of the folder. Raises OSError; TakenOver where it is not `owner`'s."""
    partial = path.with_name(f"{path.name}.partial{owner}")
    with partial.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **asdict(saved)}, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        check_owner(path, owner)
        partial.replace(path)
    except (TakenOver, FileNotFoundError):
        partial.unlink(missing_ok=True)
        check_owner(path, owner)  # it was removed by whose the state is
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_owner(path: Path, owner: str) -> None:
    """Raises TakenOver where another lighthouse has taken the file over."""
    if owner_of(path) not in ("", owner):
        raise TakenOver(f"{path} belongs to a lighthouse that was started after this one")


def owner_of(path: Path) -> str:
    """The name of the lighthouse that took the file over last; empty: none has. Raises OSError."""
    stamp = path.with_name(f"{path.name}.owner")
    with suppress(FileNotFoundError):
        return str(stamp.readlink()) if stamp.is_symlink() else stamp.read_text(encoding="ascii")
    return ""


class StateFileWriter:
    """Writes in a thread of its own; the loop never waits for a disk. A disk that refuses is logged and tried again each second. After a
    takeover all that waits for the disk, and all that comes later, fails by TakenOver."""

    write_file, take_file_over, pace_s = staticmethod(write), staticmethod(take_over), PACE_S

    def __init__(
        self, path: Path, owner: str = "", saved: m.PersistentState | None = None, *, trouble: str = ""
    ) -> None:
        """`owner`: take_over's. `saved`: the file's. `trouble`: why the file could not be taken over at the start; the first write does it,
        if the file still has its owner of now. Raises OSError."""
        self.path, self._owner, self._written, self.trouble = path, owner, saved, trouble
        self._before = owner_of(path) if trouble else None
        self._over: TakenOver | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state-file")
        self._newest: m.PersistentState | None = None
        self._later: asyncio.Future[None] | None = None  # writes the newest
        self._checking: Future[None] | None = None
        self._checked_s = time.monotonic()

    @classmethod
    def begin(cls, path: Path, *, recover: bool) -> tuple[StateFileWriter, m.PersistentState | None]:
        """Takes the file over, and reads it. recover: one that is damaged counts as none. Raises ValueError: it cannot be used."""
        owner, trouble, saved = "", "", None
        try:
            owner = cls.take_file_over(path)
        except OSError as error:
            if error.errno not in PASSING:  # no time will help
                raise ValueError(f"--state_file {path}: cannot be written: {error.strerror}") from None
            log.error("nothing can be kept in %s, no new quorum is answered until it can: %s", path.parent, error)
            trouble = str(error)
        try:
            saved = read_or_refuse(path)
        except ValueError as error:
            if not recover:
                raise
            log.warning("%s", error)
        return cls(path, owner, saved, trouble=trouble), saved

    def keep(self, saved: m.PersistentState) -> asyncio.Future[None] | None:
        """A future where what comes next must wait for the disk. Raises TakenOver."""
        if self._over:
            raise self._over
        before, self._newest = self._newest, saved
        same = before and (before.epoch, before.last_id, before.kind) == (saved.epoch, saved.last_id, saved.kind)
        if before and same and saved.settled >= before.settled:
            self._later = self._later or asyncio.ensure_future(self._write_newest())
            return None
        return asyncio.ensure_future(self._until_written(saved))

    def check(self) -> None:
        """Raises TakenOver within some seconds, for one that has nothing to write: else its groups would stay with it for ever."""
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
        """Within a second, or as soon as the disk works again."""
        while self._newest and self._written is not self._newest and not self._over:
            await asyncio.sleep(self.pace_s)
            await asyncio.get_running_loop().run_in_executor(self._thread, self._try, self._newest)
        self._later = None

    async def _until_written(self, saved: m.PersistentState) -> None:
        loop = asyncio.get_running_loop()
        while True:
            attempt = loop.run_in_executor(self._thread, self._try, saved)
            there = self._written
            covered = (  # by the ids that the file reserves
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
            if self._before is not None:  # it could not be taken over at the start
                ours = owner_of(self.path) == self._before
                self._owner = self.take_file_over(self.path) if ours else ""
                if not ours or read(self.path) != self._written:
                    raise TakenOver(f"{self.path} was another lighthouse's before this one could write it")
                self._before = None
            try:
                self.write_file(self.path, saved, self._owner)
            except OSError:
                check_owner(self.path, self._owner)  # another one may have room
                raise
        except TakenOver as error:
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
            with suppress(OSError):  # the next write tells it
                if self._before is None:  # else it is not, yet
                    check_owner(self.path, self._owner)
        except TakenOver as error:
            self._over = error
