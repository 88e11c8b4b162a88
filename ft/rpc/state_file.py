"""The lighthouse's memory across restarts: one JSON file that is always whole.

Persist must be done before what comes after it: an id that was seen must not come again. So a new id is on disk before its quorum is
answered. A quorum that keeps its id (members that ask again at a later step) is written within a second instead, for all that is lost
with it is how far the job is known to have come, which members report anyway.

A disk that is full, read-only or slow stops no job: the file stands for RESERVED ids more than it says. Up to there quorums are answered
without it, and whoever starts from the file gives out none of them (`reserved`); so no id comes twice, and ids leap after each restart.
What such a restart has not read are the newest members: they report the quorum that they are in, and until then the claims of those in the
file hold. One that restarts while the disk is still full, or read-only, answers no new quorum until it can write.

Another lighthouse may take the file over while this one is stopped, say, and nobody knows whether it will wake: no lock then, which the
one that is stopped would hold. Who takes over puts its name into a file beside, then removes what others were about to put in place, then
reads. Who writes prepares a file of its own name, looks whose the state is, then renames it. So either the other one has read what was
written here, or nothing is written here any more, wherever this one was stopped.
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
from dataclasses import replace
from pathlib import Path
from typing import get_args

from ft.protocol import messages as m
from ft.protocol.rules import MAX_STEP, validate_request

FORMAT = "pharos lighthouse 1"
RESERVED = 1000  # ids beyond the file's that may be given out while the disk fails; a restart begins after them
PATIENCE_S = 1.0  # with a disk that is slow, where the file reserves the id
LAZY_S = 1.0
LOOK_S = 5.0  # from one look at whose the file is to the next, where nothing is written
RETRY_S = 1.0
PASSING = {errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}  # what a disk says that may work again
log = logging.getLogger("pharos.lighthouse")


def read(path: Path) -> m.Saved | None:
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
        return _checked(m.Saved.from_dict(data))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a state file of this version: {error!r}") from None


def _checked(saved: m.Saved) -> m.Saved:
    """Returns it if each value is of its type and range: a wrong one would end the lighthouse later. Raises TypeError and ValueError."""
    for name in ("last_id", "settled"):
        number = getattr(saved, name)
        if type(number) is not int or not 0 <= number <= MAX_STEP:
            raise ValueError(f"{name} = {number!r}")
    if type(saved.epoch) is not str or saved.kind not in get_args(m.Kind):
        raise ValueError(f"epoch {saved.epoch!r}, kind {saved.kind!r}")
    with suppress(ImportError):  # run_lighthouse.sh looks at the flags, and so here, before it installs protobuf
        from ft.rpc import codec

        for part in filter(None, (saved.terms, saved.quorum)):
            codec.to_message(part)  # says what is of a wrong type
    if saved.terms and (saved.terms.min_replicas < 1 or not 0 < (saved.terms.takeover_s or 1.0) < math.inf):
        raise ValueError(f"{saved.terms}")
    if saved.quorum:
        members, (*numbers, commit_id) = saved.quorum.members, saved.quorum.reference
        if [*map(type, numbers), type(commit_id)] != [int, int, str]:
            raise ValueError(f"reference {saved.quorum.reference}")
        problems = [validate_request(m.Call(member, saved.kind, known=saved.quorum.quorum_id)) for member in members]
        if not members or any(problems) or list(saved.quorum.ids) != sorted(set(saved.quorum.ids)):
            raise ValueError(f"quorum {saved.quorum.quorum_id}: its members")
    return saved


def reserved(saved: m.Saved) -> m.Saved:
    """The state to go on from: none of the ids that the file stands for is free."""
    return replace(saved, last_id=saved.last_id + RESERVED) if saved.last_id else saved


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


def write(path: Path, saved: m.Saved, owner: str = "") -> None:
    """Puts it on disk: temporary file, fsync, rename, fsync of the folder. Raises OSError; TakenOver where it is not `owner`'s."""
    partial = path.with_name(f"{path.name}.partial{owner}")
    with partial.open("w", encoding="utf-8") as file:
        json.dump({"format": FORMAT, **saved.to_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    try:
        _look(path, owner)
        partial.replace(path)
    except (TakenOver, FileNotFoundError):
        partial.unlink(missing_ok=True)
        _look(path, owner)  # it was removed by whose the state is
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _look(path: Path, owner: str) -> None:
    """Raises TakenOver."""
    if owner_of(path) not in ("", owner):
        raise TakenOver(f"{path} belongs to a lighthouse that was started after this one")


def owner_of(path: Path) -> str:
    """The name of the lighthouse that took the file over last; empty: none has. Raises OSError."""
    stamp = path.with_name(f"{path.name}.owner")
    with suppress(FileNotFoundError):
        return str(stamp.readlink()) if stamp.is_symlink() else stamp.read_text(encoding="ascii")
    return ""


class StateFileWriter:
    """Writes in a thread of its own, one after the other; the loop never waits for a disk.

    A disk that refuses is told, and tried again each second; quorums are answered as long as the file reserves their ids, then no more, and
    running steps go on. `owner`: as take_over said. `saved`: what the file says. When another one has taken over, what waits for the disk
    fails by TakenOver, and so does all that comes later. `trouble`: why the file could not be taken over at the start, and whose it was
    then; it is done with the first write. Raises OSError.
    """

    def __init__(self, path: Path, owner: str = "", saved: m.Saved | None = None, *, trouble: str = "") -> None:
        self.path, self._owner, self._written = path, owner, saved
        self._before = owner_of(path) if trouble else None
        self._over: TakenOver | None = None
        self.trouble = trouble  # why the last attempt failed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state-file")
        self._newest: m.Saved | None = None
        self._later: asyncio.Future[None] | None = None  # writes the newest
        self._looking: Future[None] | None = None
        self._looked_s = time.monotonic()

    def keep(self, saved: m.Saved) -> asyncio.Future[None] | None:
        """A future where what comes next must wait for the disk. Raises TakenOver."""
        if self._over:
            raise self._over
        before, self._newest = self._newest, saved
        same = before and (before.epoch, before.last_id, before.kind) == (saved.epoch, saved.last_id, saved.kind)
        if before and same and saved.settled >= before.settled:
            self._write_later()
            return None
        return asyncio.ensure_future(self._until_written(saved))

    def look(self) -> None:
        """Looks whose the file is, at every tick: a lighthouse that has nothing to write, for too few of its groups call, must still
        end when another one has taken over, or those groups stay with it for ever. Raises TakenOver, at most LOOK_S later."""
        if self._over:
            raise self._over
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S and (self._looking is None or self._looking.done()):
            self._looked_s, self._looking = now_s, self._thread.submit(self._is_ours)

    async def close(self) -> None:
        if self._later and self._newest:
            self._later.cancel()
            self._thread.submit(self._try, self._newest)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    def _write_later(self) -> None:
        """Has the newest state written within a second, or as soon as the disk works again."""
        if self._later is None:
            self._later = asyncio.ensure_future(self._write_newest())

    async def _write_newest(self) -> None:
        while self._newest and self._written is not self._newest and not self._over:
            await asyncio.sleep(RETRY_S if self.trouble else LAZY_S)
            await asyncio.get_running_loop().run_in_executor(self._thread, self._try, self._newest)
        self._later = None

    async def _until_written(self, saved: m.Saved) -> None:
        loop = asyncio.get_running_loop()
        while True:
            attempt = loop.run_in_executor(self._thread, self._try, saved)
            there = self._written  # the file stands for what it reserves, too
            covered = (
                there is not None
                and (there.epoch, there.kind) == (saved.epoch, saved.kind)
                and there.settled <= saved.settled
                and saved.last_id <= there.last_id + RESERVED
            )
            done, _ = await asyncio.wait([attempt], timeout=PATIENCE_S if covered else None)
            if done and attempt.result():
                return
            if self._over:
                raise self._over
            if covered:
                self._write_later()
                return
            await asyncio.sleep(RETRY_S)

    def _try(self, saved: m.Saved) -> bool:
        try:
            if self._before is not None:
                self._take_over_late(self._before)
            try:
                write(self.path, saved, self._owner)
            except OSError:
                _look(self.path, self._owner)  # another one may have room
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
        self._written = saved
        if self.trouble:
            log.warning("%s is written again", self.path)
        self.trouble = ""
        return True

    def _is_ours(self) -> None:
        if self._before is None:  # else it is not, yet
            try:
                with suppress(OSError):  # the next write tells it
                    _look(self.path, self._owner)
            except TakenOver as error:
                self._over = error

    def _take_over_late(self, before: str) -> None:
        """Raises OSError while that cannot be; TakenOver where another lighthouse has gone on from the file since this one read it."""
        if owner_of(self.path) == before:
            self._owner = take_over(self.path)
            if read(self.path) == self._written:
                self._before = None
                return
        raise TakenOver(f"{self.path} was another lighthouse's before this one could write it")
