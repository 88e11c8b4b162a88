"""The lock of a run: one start at a time."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.unit.fakes import forbid_locks, replace_system_call
from training.durable_files import DEAD_LOCK_S, RunLock, cause_of, replace_file, sync_path

HOLD = """
import sys
from pathlib import Path
from training.durable_files import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_start_is_told_who_has_the_run(tmp_path: Path) -> None:
    first = RunLock(tmp_path / "run")
    with pytest.raises(ValueError, match=rf"is in use by process {os.getpid()} on .*--job.name NAME"):
        RunLock(tmp_path / "run")
    RunLock(tmp_path / "other").close()
    first.close()
    first.close()
    RunLock(tmp_path / "run").close()


def test_a_killed_start_holds_nothing(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout and child.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=f"process {child.pid} on"):
        RunLock(tmp_path)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    RunLock(tmp_path).close()


def test_what_an_unlocked_file_has_does_not_matter(tmp_path: Path) -> None:
    """After a power failure its content may be that of anything."""
    (tmp_path / "lock").write_bytes(b"\xff\x00")
    with closing(RunLock(tmp_path)), pytest.raises(ValueError, match=f"process {os.getpid()} on"):
        RunLock(tmp_path)


def test_a_lock_of_another_machine_is_waited_for_as_that_one_may_have_died(tmp_path: Path) -> None:
    """A file server keeps it for minutes, and the launch that takes its place would end as one with bad input."""
    dead, waits, said = RunLock(tmp_path), list[float](), list[str]()
    (tmp_path / "lock").write_text("process 7 on node-3\nanother kernel")
    with pytest.raises(ValueError, match="is in use by process 7 on node-3; wait for it"):
        RunLock(tmp_path, log=said.append, pause=waits.append)
    assert sum(waits) == DEAD_LOCK_S
    assert said == [f"{tmp_path} is in use by process 7 on node-3: waits 300 s, as that machine may have died"]
    with (
        closing(RunLock(tmp_path, pause=lambda seconds: dead.close())),
        pytest.raises(ValueError, match=f"process {os.getpid()} on"),
    ):
        RunLock(tmp_path, log=said.append)
    assert len(said) == 1


def test_replica_groups_share_the_folder_with_each_other_only(tmp_path: Path) -> None:
    with closing(RunLock(tmp_path)), pytest.raises(ValueError, match=f"is in use by process {os.getpid()} on"):
        RunLock(tmp_path, shared=True)
    first, second = RunLock(tmp_path, shared=True), RunLock(tmp_path, shared=True)
    first.close()
    with pytest.raises(ValueError, match=r"is in use by replica groups, named in groups/\*/lock;"):
        RunLock(tmp_path)
    RunLock(tmp_path, shared=True).close()
    second.close()
    RunLock(tmp_path).close()


def test_a_file_system_without_locks_guards_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_locks(monkeypatch)
    with closing(RunLock(tmp_path)), closing(RunLock(tmp_path, shared=True)), closing(RunLock(tmp_path)):
        pass


def test_an_error_is_told_with_its_file_and_one_of_a_write_with_that_of_the_program() -> None:
    full, refused = OSError(errno.ENOSPC, "full"), ConnectionRefusedError(errno.ECONNREFUSED, "host:1 refuses")
    assert cause_of(full, "out") == "out: full"
    assert cause_of(PermissionError(errno.EACCES, "denied", "in"), "out") == "in: denied"
    assert cause_of(refused, "out") == str(refused), "it is not of that folder"


def test_containers_with_equal_names_and_ids_replace_a_file_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This thread writes again in the middle of its own write: the other has its host name and its IDs."""
    path, fsync = tmp_path / "lease", os.fsync

    def other_writes(descriptor: int) -> None:
        fsync(descriptor)
        replace_system_call(monkeypatch, "fsync", fsync)
        replace_file(path, b"other")

    replace_system_call(monkeypatch, "fsync", other_writes)
    replace_file(path, b"this")
    assert path.read_bytes() == b"this" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc, which cannot be synced")
def test_a_folder_that_its_file_system_cannot_sync_is_no_error() -> None:
    sync_path(Path("/proc/self"))
    with pytest.raises(OSError, match="Invalid argument"):
        sync_path(Path("/proc/self/stat"))
