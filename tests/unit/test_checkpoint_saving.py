"""Retention and removal of checkpoints, failed saves, and saves in the background."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint_job import Job, data_file, flip_a_bit, same, steps_in
from training import checkpoint_files
from training.checkpoint import SAVE_RETRY_S, CheckpointFailed
from training.progress import Progress
from training.saver import Saver
from training.sinks import METRICS, last_rows

# What is kept


def test_the_newest_k_are_kept(tmp_path: Path) -> None:
    job = Job(tmp_path, keep_latest_k=2)
    job.step_and_save(1, 2, 3, 4)
    assert steps_in(tmp_path) == [3, 4]
    Job(tmp_path, keep_latest_k=0).step_and_save(5, 6)
    assert steps_in(tmp_path) == [3, 4, 5, 6]


def test_what_load_step_goes_back_behind_is_set_aside_by_the_first_save(tmp_path: Path) -> None:
    """Later steps belong to an abandoned history: the next launch resumes from the new one, and nothing is deleted."""
    job = Job(tmp_path, keep_latest_k=0)
    job.step_and_save(2, 4, 6)
    content = data_file(tmp_path, 6).read_bytes()
    job.step_and_save(8)
    again = Job(tmp_path, keep_latest_k=3, load_step=2)
    assert again.checkpointer.load() == 2 and steps_in(tmp_path) == [2, 4, 6, 8]
    again.ledger.state["position"] = 1000
    again.step_and_save(3)
    assert steps_in(tmp_path) == [2, 3]
    [warning] = again.log.warnings
    assert warning == (
        f"checkpoint: steps 4, 6, 8, newer than checkpoint.load_step = 2, set aside as {tmp_path}/checkpoint/step-*.abandoned*"
    )
    assert data_file(tmp_path, "6.abandoned").read_bytes() == content
    again.step_and_save(6)
    resumed = Job(tmp_path, keep_latest_k=2)
    assert resumed.checkpointer.load() == 6 and same(resumed.everything(), again.everything())
    twice = Job(tmp_path, load_step=3)
    twice.checkpointer.load()
    twice.step_and_save(4)
    assert steps_in(tmp_path) == [2, 3, 4] and (tmp_path / "checkpoint/step-6.abandoned-2").exists()


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    Job(tmp_path).step_and_save(2, 4, 6)
    flip_a_bit(data_file(tmp_path, 6))
    job = Job(tmp_path, keep_latest_k=2)
    assert job.checkpointer.load() == 4
    job.step_and_save(7)
    assert steps_in(tmp_path) == [4, 6, 7]
    job.step_and_save(8)
    assert steps_in(tmp_path) == [7, 8]


def test_seed_export_and_strangers_are_not_removed(tmp_path: Path) -> None:
    job = Job(tmp_path, keep_latest_k=2, last_save_model_only=True)
    job.checkpointer.save_seed()
    (tmp_path / "checkpoint/step-1").mkdir()
    job.train(2)
    job.checkpointer.save(2, last=True)
    job.step_and_save(3, 4, 5)
    assert steps_in(tmp_path) == [0, 1, 2, 4, 5]


# Leftovers


def test_leftovers_of_a_kill_are_told_in_one_line_and_removed(tmp_path: Path) -> None:
    Job(tmp_path).step_and_save(2)
    folder = tmp_path / "checkpoint"
    for name in ("step-4.partial", "step-1.partial"):
        (folder / name).mkdir()
        (folder / name / "__0_0.distcp").write_bytes(b"half")
    (folder / "step-2").rename(folder / "step-2.replaced")
    job = Job(tmp_path)
    assert job.checkpointer.load() == 2
    (line,) = job.log.warnings
    done = "removed step-1.partial, restored step-2, which was being replaced, removed step-4.partial"
    assert line == f"checkpoint: a save was interrupted by a kill: {done}"
    assert [path.name for path in folder.iterdir()] == ["step-2"]


def test_a_reader_leaves_leftovers_alone(tmp_path: Path) -> None:
    Job(tmp_path).step_and_save(2)
    (tmp_path / "checkpoint/step-4.partial").mkdir()
    assert Job(tmp_path, load_only=True).checkpointer.load() == 2
    assert (tmp_path / "checkpoint/step-4.partial").exists()


# Saves that fail


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Limits the size of files: writes beyond it fail, as Python ignores SIGXFSZ."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
@pytest.mark.parametrize("size_bytes", [0, 1000, 20_000])
def test_a_write_that_fails_is_one_line_and_leaves_the_last_good_one(
    tmp_path: Path, size_bytes: int, async_mode: str
) -> None:
    job = Job(tmp_path, async_mode=async_mode)
    job.step_and_save(2)
    there = job.everything()
    job.train(2)
    job.checkpointer.wait()
    with largest_file(size_bytes), pytest.raises(CheckpointFailed) as failure:
        job.checkpointer.save(4)
        job.checkpointer.wait()
    file = tmp_path / "checkpoint/step-4.partial/__0_0.distcp"
    assert str(failure.value) == f"checkpoint: step 4 not saved: File too large ({file}); step 2 is the last good one"
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-2"]
    resumed = Job(tmp_path)
    assert resumed.checkpointer.load() == 2
    assert same(resumed.everything(), there) and resumed.log.warnings == []
    job.checkpointer.save(4)  # there is room again
    job.checkpointer.close()
    assert steps_in(tmp_path) == [2, 4]


@pytest.mark.parametrize("failing", ["fsync", "rename", "mkdir"])
def test_a_disk_that_fills_up_anywhere_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    job = Job(tmp_path)
    job.step_and_save(2)
    job.train(1)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some file")

    with monkeypatch.context() as patch, pytest.raises(CheckpointFailed) as failure:
        patch.setattr(*{"fsync": (os, "fsync"), "rename": (Path, "rename"), "mkdir": (Path, "mkdir")}[failing], full)
        job.checkpointer.save(3)
    assert re.fullmatch(
        r"checkpoint: step 3 not saved: No space left on device \(.+\); step 2 is the last good one", str(failure.value)
    )
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["step-2"]


def test_the_first_save_may_fail_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("a file where the folder should be")
    job = Job(tmp_path)
    assert job.checkpointer.load() is None
    message = r"checkpoint: step 2 not saved: Not a directory \(.*/step-2\.partial\); there is no earlier one"
    with pytest.raises(CheckpointFailed, match=message):
        job.step_and_save(2)


def test_a_full_and_a_read_only_disk(tmp_path: Path) -> None:
    Job(tmp_path).step_and_save(2)
    files = [*(tmp_path / "checkpoint/step-2").iterdir()]
    room = int(1.5 * sum(file.stat().st_blocks * 512 for file in files))
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "pharos", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        job = Job(disk)
        (disk / METRICS).write_text('{"step": 1}\n')
        job.step_and_save(2)
        with pytest.raises(
            CheckpointFailed, match=r"step 4 not saved: No space left on device \(.*\); step 2 is the last"
        ):
            job.step_and_save(4, 6)
        assert steps_in(disk) == [2]
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(
            CheckpointFailed, match=r"step 5 not saved: Read-only file system \(.*\); step 2 is the last"
        ):
            job.checkpointer.save(5)
        resumed = Job(disk)
        assert resumed.checkpointer.load() == 2
        assert last_rows(disk / METRICS, since=1, until=1) == [{"step": 1}]
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_save_that_failed_is_due_again_after_a_pause(tmp_path: Path, async_mode: str) -> None:
    now = [0.0]
    job = Job(tmp_path, async_mode=async_mode, clock=lambda: now[0])
    job.step_and_save(2)
    job.train(1)
    job.checkpointer.wait()
    assert not job.checkpointer.overdue(3)
    with largest_file(0):
        if async_mode == "disabled":
            with pytest.raises(CheckpointFailed):
                job.checkpointer.save(3)
        else:
            job.checkpointer.save(3)
            assert job.checkpointer.saving and job.checkpointer.saving.exception()  # it has failed by now
            assert job.checkpointer.overdue(4), "it is told at the next step, not at the next checkpoint"
            with pytest.raises(CheckpointFailed):
                job.checkpointer.save(4)
    now[0] = SAVE_RETRY_S - 1
    assert not job.checkpointer.overdue(5)
    now[0] = SAVE_RETRY_S
    assert job.checkpointer.overdue(5)
    job.train(1)
    job.checkpointer.save(5)
    job.checkpointer.wait()
    now[0] = 3 * SAVE_RETRY_S
    assert not job.checkpointer.overdue(6) and steps_in(tmp_path) == [2, 5]


def test_a_checkpoint_that_storage_does_not_show_now_is_neither_counted_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may lose and regain its server (ESTALE); `newest` then returns an earlier step instead of failing."""
    Job(tmp_path, keep_latest_k=0).step_and_save(2, 4, 6, 8)
    folder, stat, read = tmp_path / "checkpoint", Path.stat, Path.read_text

    def gone(path: Path, real: Any, *args: Any, **more: Any) -> Any:
        if path.parent.name in ("step-4", "step-8"):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path, *args, **more)

    with monkeypatch.context() as context:
        context.setattr(Path, "stat", lambda path, **more: gone(path, stat, **more))
        context.setattr(Path, "read_text", lambda path, *args, **more: gone(path, read, *args, **more))
        assert checkpoint_files.newest(folder) == 6
        assert checkpoint_files.remove_older(folder, 1, written=6) == [2]
    assert checkpoint_files.newest(folder) == 8 and steps_in(tmp_path) == [4, 6, 8]


class Leaving:
    """The part of a manager that a save uses."""

    step, writer_quorum, may_exit, needs_new_quorum, finished = 3, ("epoch", 1), True, False, False
    rewinds = ()

    def regroup(self, until: int) -> None: ...

    def finish(self, *, saved: bool) -> None: ...


def test_who_leaves_is_told_that_its_save_in_the_background_has_failed(tmp_path: Path) -> None:
    job = Job(tmp_path, async_mode="async")
    saver = Saver(job.checkpointer, Leaving(), Progress(), sync=lambda: None, report=print, info=print)
    job.train(3)
    with largest_file(0), pytest.raises(CheckpointFailed, match="step 3 not saved"):
        saver.save_due()
    job.checkpointer.close()


def test_a_failure_in_the_background_of_who_closes_is_only_logged(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("a file where the folder should be")
    job = Job(tmp_path, async_mode="async")
    job.step_and_save(2)
    job.checkpointer.close()
    assert "checkpoint: step 2 not saved" in job.log.warnings[-1]


class Staying(Leaving):
    may_exit = False


def test_a_save_in_the_background_counts_once_it_is_written(tmp_path: Path) -> None:
    """A group that is no longer the writer reports its failed save, once."""
    job, told, manager = Job(tmp_path, async_mode="async"), list[str](), Staying()
    saver = Saver(job.checkpointer, manager, Progress(), sync=lambda: None, report=told.append, info=print)

    def save(step: int) -> None:
        job.train(step - job.ledger.state["step"])
        manager.step = step
        saver.save_due()

    def failed() -> bool:
        return job.checkpointer.saving is not None and job.checkpointer.saving.exception() is not None

    with largest_file(0):
        save(2)
        assert failed()
        save(3)  # raises the failure of step 2
        save(4)
        assert failed() and [line.partition(":")[2][:17] for line in told] == [" step 2 not saved"]
        save(5)
    assert len(told) == 2 and "step 4 not saved" in told[1]
    save(6)
    assert job.checkpointer.saving
    job.checkpointer.saving.result()
    with largest_file(0):
        save(7)
        assert failed()
    manager.writer_quorum = None  # type: ignore[assignment]
    assert job.checkpointer.overdue(7)
    saver.save_due()
    assert not job.checkpointer.overdue(8)
    job.checkpointer.close()
    assert told[2] == "checkpoint: step 6 is saved; earlier saves had failed"
    assert "step 7 not saved" in told[3] and told[3].endswith("; another group writes the checkpoints now")
    assert len(told) == 4


def test_who_leaves_saves_although_an_earlier_save_has_failed(tmp_path: Path) -> None:
    """Storage works again after a failed background save; the leaving group has no later step to retry in."""
    job = Job(tmp_path, async_mode="async")
    with largest_file(0):
        job.step_and_save(2)
        assert job.checkpointer.saving and job.checkpointer.saving.exception()  # it has failed by now
    saver = Saver(job.checkpointer, Leaving(), Progress(), sync=lambda: None, report=print, info=print)
    job.train(1)
    saver.save_due()
    assert steps_in(tmp_path) == [3], "it is there when the call returns"


# In the background


class HeldBackWrites:
    """Blocks the next write of a checkpoint until it is released."""

    def __init__(self, job: Job) -> None:
        self.go = threading.Event()
        self.began = threading.Event()
        job.at["begin"] = self.hold

    def hold(self) -> None:
        self.began.set()
        assert self.go.wait(30)


def test_training_goes_on_while_a_copy_is_written(tmp_path: Path) -> None:
    job = Job(tmp_path, async_mode="async")
    job.checkpointer.load()
    job.train(2)
    there = job.everything()
    writes = HeldBackWrites(job)
    job.checkpointer.save(2)
    assert writes.began.wait(30)
    job.train(3)  # changes every state while its copy waits to be written
    assert steps_in(tmp_path) == []
    writes.go.set()
    job.checkpointer.close()
    resumed = Job(tmp_path, seed=1)
    assert resumed.checkpointer.load() == 2
    assert same(resumed.everything(), there)


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    job = Job(tmp_path, async_mode="async", keep_latest_k=2)
    writes = HeldBackWrites(job)
    job.train(1)
    job.checkpointer.save(1)
    assert writes.began.wait(30)
    job.train(1)
    second = threading.Thread(target=job.checkpointer.save, args=(2,))
    second.start()
    second.join(0.05)
    assert second.is_alive() and steps_in(tmp_path) == []
    writes.go.set()
    second.join(30)
    job.step_and_save(3, 4)
    job.checkpointer.save(5, last=True)  # in the foreground
    assert steps_in(tmp_path) == [4, 5]
