"""Disks of a job that can be full: the run lies on one, what belongs to its groups and its lighthouse on another (Linux, root).

Flow: drill.py makes one before the job; drill_outages.py fills it; drill_job.py puts TMPDIR on it, and the diaries, by which the drill
judges, somewhere else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

SIZE_MB = 256  # of each, in memory


def refusal() -> str:
    """Why this machine mounts nothing; "": it does."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    with tempfile.TemporaryDirectory() as folder:
        try:
            _mount(Path(folder))
            _run("umount", folder)
        except RuntimeError as why:
            return str(why)
    return ""


class Disk:
    """Raises RuntimeError. To be closed when no process of the job lives."""

    def __init__(self, run: Path) -> None:
        self.run, self.groups = run.absolute(), run.absolute() / "groups"
        self.temporary = self.groups / "tmp"
        self._mounted: list[Path] = []
        self._elsewhere = Path(tempfile.mkdtemp(prefix="pharos-drill-"))
        try:
            for place in (self.run, self.groups):
                place.mkdir(parents=True, exist_ok=True)
                _mount(place)
                self._mounted.append(place)
        except RuntimeError:
            self.close()
            raise
        self.temporary.mkdir()

    def keep_diaries(self, folder: Path, ranks: int) -> None:
        """Keeps a group's diaries on another disk: their words on a full one must not be lost to it."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            (folder / f"diary.{rank}.jsonl").symlink_to(self._elsewhere / f"{folder.name}.{rank}.jsonl")

    @staticmethod
    def fill(place: Path) -> None:
        """To the last byte; again and again, for what is removed there makes room."""
        with (place / "filler").open("ab", buffering=0) as file:
            for piece in (1 << 20, 1 << 12, 1):
                with suppress(OSError):
                    while file.write(bytes(piece)) == piece:
                        pass

    @staticmethod
    def free(place: Path) -> None:
        (place / "filler").unlink()

    def close(self) -> None:
        """Copies the files back to their places on the real disk."""
        kept = self._elsewhere / "kept"
        if self._mounted:
            shutil.copytree(self.run, kept, ignore=shutil.ignore_patterns("tmp", "filler"))
        while self._mounted:
            _run("umount", "--lazy", str(self._mounted.pop()))
        if kept.exists():
            shutil.copytree(kept, self.run, dirs_exist_ok=True)
        shutil.rmtree(self._elsewhere, ignore_errors=True)


def _mount(place: Path) -> None:
    _run("mount", "-t", "tmpfs", "-o", f"size={SIZE_MB}m", "pharos-drill", str(place))


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
