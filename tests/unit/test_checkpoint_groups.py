"""Checkpoints shared by several replica groups: one group saves, and a group that was stopped resumes as if it still were the writer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from tests.unit.checkpoint_job import Job, Ledger, same, steps_in
from tests.unit.fakes import set_device_module
from training import checkpoint_files
from training.checkpoint import CheckpointFailed
from training.checkpoint_files import ROWS_STATE
from training.object_store import ObjectStore
from training.writer_lease import LEASE_FILE, WriterLease, acquire

EPOCH, WAIT_S = "epoch", 50.0


class Group(Job):
    """A job of a group. `quorum`: id of the quorum in which it is the writer; None: it is not."""

    def __init__(self, folder: Path, quorum: int | None, **settings: Any) -> None:
        self.quorum = quorum
        self.lease = WriterLease(folder, lambda: None if self.quorum is None else (EPOCH, self.quorum))
        super().__init__(folder, lease=self.lease, **settings)


def resumes(folder: Path, step: int, group: Group) -> Job:
    """Asserts that a new job resumes from `step` with the state of `group`, and returns it."""
    resumed = Job(folder)
    assert resumed.checkpointer.load() == step and same(resumed.everything(), group.everything())
    return resumed


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


def test_one_that_wakes_before_its_save_leaves_the_others_alone(tmp_path: Path):
    """During the other group's save, nothing of that save is removed, and no older checkpoint replaces it."""
    a, b = Group(tmp_path, 1), Group(tmp_path, 2)
    a.step_and_save(2)
    b.step_and_save(4)
    a.train(2)
    b.train(2)
    b.at["publish"] = lambda: a.checkpointer.save(4)
    b.checkpointer.save(6)
    assert steps_in(tmp_path) == [2, 4, 6] and names(tmp_path) == ["step-2", "step-4", "step-6"]
    assert a.log.infos[-1] == "checkpoint: step 4 not saved: another group is the checkpoint writer now"
    resumes(tmp_path, 6, b)


@pytest.mark.parametrize("instant", ["begin", "write", "publish"])
@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_one_that_wakes_in_its_save_is_passed_over(tmp_path: Path, instant: str, async_mode: str):
    """The step that the other group saved meanwhile is kept, and no save fails, at whatever stage the first was stopped."""
    a, b = Group(tmp_path, 1, async_mode=async_mode), Group(tmp_path, 2, seed=1)
    a.train(2)
    a.at[instant] = lambda: b.step_and_save(2)
    a.checkpointer.save(2)
    a.checkpointer.close()
    assert a.log.infos[-1] == "checkpoint: step 2 not saved: another group has saved since"
    assert a.log.warnings == [] and names(tmp_path) == ["step-2"]
    resumes(tmp_path, 2, b)


def test_each_writes_into_a_folder_of_its_own(tmp_path: Path):
    """A group stopped before its write resumes after the other has written the same step, but not yet published it."""
    a, b = Group(tmp_path, 1), Group(tmp_path, 2, seed=1)
    a.train(2)
    b.train(2)
    stopped, wakes = threading.Event(), threading.Event()
    zombie = threading.Thread(target=a.checkpointer.save, args=(2,), name="zombie")

    def stops() -> None:
        stopped.set()
        assert wakes.wait(WAIT_S)

    def meets() -> None:
        wakes.set()
        zombie.join(WAIT_S)

    a.at["write"], b.at["publish"] = stops, meets
    zombie.start()
    assert stopped.wait(WAIT_S)
    b.checkpointer.save(2)
    assert names(tmp_path) == ["step-2"]
    resumes(tmp_path, 2, b)


def test_the_role_moves_while_a_save_is_written_in_the_background(tmp_path: Path):
    """Both groups live, so the earlier step is published too: no other group has saved it."""
    a, b = Group(tmp_path, 1, async_mode="async"), Group(tmp_path, None)
    a.train(2)

    def moves() -> None:
        a.quorum, b.quorum = None, 2
        assert b.lease.acquire()  # it has figures to write, and no checkpoint yet

    a.at["publish"] = moves
    a.checkpointer.save(2)
    a.checkpointer.close()
    b.step_and_save(4)
    assert steps_in(tmp_path) == [2, 4]


def test_who_saves_clears_away_what_is_older(tmp_path: Path):
    """A save removes leftovers of other groups for steps up to its own, but not those of a newer writer."""
    a, b = Group(tmp_path, 1), Group(tmp_path, 3)
    (tmp_path / "checkpoint/step-4.partial-epoch-2").mkdir(parents=True)
    a.step_and_save(2, 4)
    assert names(tmp_path) == ["step-2", "step-4", "step-4.partial-epoch-2"]
    b.step_and_save(3)
    assert names(tmp_path) == ["step-2", "step-3", "step-4", "step-4.partial-epoch-2"]
    b.step_and_save(6)
    assert names(tmp_path) == ["step-2", "step-3", "step-4", "step-6"]
    assert b.log.warnings == ["checkpoint: a save was interrupted by a kill: removed step-4.partial-epoch-2"]


def test_a_step_that_was_being_replaced_is_not_lost(tmp_path: Path):
    """The step survives when its writer died between two renames and the next writer's save fails."""
    a, b = Group(tmp_path, 1), Group(tmp_path, 2)
    a.step_and_save(2)
    (tmp_path / "checkpoint/step-2").rename(tmp_path / "checkpoint/step-2.replaced")
    b.train(2)

    def full() -> None:
        raise OSError("no room")

    b.at["publish"] = full
    with pytest.raises(CheckpointFailed):
        b.checkpointer.save(2)
    assert steps_in(tmp_path) == [2]
    (tmp_path / "checkpoint/step-2").rename(tmp_path / "checkpoint/step-2.replaced")
    (tmp_path / "checkpoint/step-4.partial-epoch-9").mkdir()  # of a newer writer
    c = Group(tmp_path, None, seed=1)
    assert c.checkpointer.load() == 2 and same(c.everything(), a.everything())
    assert names(tmp_path) == ["step-2", "step-4.partial-epoch-9"]


def test_the_lease_is_looked_at_with_the_rest_of_the_save(tmp_path: Path):
    """The lease is read in the background thread, so that slow storage delays no step."""
    a, threads = Group(tmp_path, 1, async_mode="async"), list[str]()
    a.at["begin"] = lambda: threads.append(threading.current_thread().name)  # it has just looked
    a.train(2)
    a.checkpointer.save(2)
    a.checkpointer.close()
    assert steps_in(tmp_path) == [2]
    [name] = threads
    assert name.startswith("checkpoint-writer")


def test_the_background_thread_is_on_this_ranks_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """CUDA begins each thread on device 0, and DCP's writer waits for the current stream: that would create a context there."""
    set_on = list[tuple[str, int]]()
    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "synchronize": lambda: None,
        "current_device_index": lambda: 3,
        "set_device_index": lambda index: set_on.append((threading.current_thread().name, index)),
    }
    a = Group(tmp_path, 1, async_mode="async")
    a.train(2)
    set_device_module(monkeypatch, SimpleNamespace(**vars(torch.accelerator) | fakes), name="torch.accelerator")
    a.checkpointer.save(2)
    a.checkpointer.close()
    [(name, index)] = set_on
    assert name.startswith("checkpoint-writer") and index == 3


def test_a_lease_that_cannot_be_noted_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    a = Group(tmp_path / "file", 1)
    a.train(2)
    with pytest.raises(CheckpointFailed, match=r"^checkpoint: step 2 not saved: .*Not a directory|File exists"):
        a.checkpointer.save(2)


class Figures(Ledger):
    """A stand-in for the state of metrics_writer.py."""

    def __init__(self, rows: str) -> None:
        self.state = {"rows": rows}


def test_figures_are_of_this_run_and_may_be_missing(tmp_path: Path):
    """A run may resume with or without rows, also from a checkpoint without them; a run that starts from its checkpoint has its own."""

    def start(folder: Path, figures: str, **settings: Any) -> Job:
        job = Job(folder, **settings)
        if figures:
            job.states[ROWS_STATE] = Figures(figures)
        return job

    own = tmp_path / "own"
    start(own, "of step 2").step_and_save(2)
    again = start(own, "none yet")
    assert again.checkpointer.load() == 2 and again.states[ROWS_STATE].state == {"rows": "of step 2"}
    without = start(own, "")
    assert without.checkpointer.load() == 2
    without.step_and_save(4)
    again = start(own, "none yet")
    assert again.checkpointer.load() == 4 and again.states[ROWS_STATE].state == {"rows": "none yet"}
    settings = {"initial_load_path": str(own / "checkpoint/step-2"), "initial_load_model_only": False}
    other = start(tmp_path / "other", "none yet", **settings)
    assert other.checkpointer.load() == 2 and other.states[ROWS_STATE].state == {"rows": "none yet"}


def test_a_group_that_goes_while_it_waits_saves_whoever_has_the_role(tmp_path: Path):
    a, b = Group(tmp_path, 1), Group(tmp_path, None)
    a.step_and_save(2)
    b.train(3)
    b.checkpointer.save(3, outside_quorum=True)
    assert names(tmp_path) == ["step-2", "step-3"] and ", outside of a quorum, saved" in b.log.infos[-1]
    assert "left while it waited" in resumes(tmp_path, 3, b).log.infos[-1]


@pytest.mark.parametrize("url", ["checkpoint", "memory://outside"])
def test_what_leaving_groups_save_displaces_no_writers_checkpoint(tmp_path: Path, url: str):
    """Checkpoints saved outside of a quorum do not count towards keep_latest_k, and are removed once older than the kept ones."""
    MemoryFileSystem.store.clear()
    run = tmp_path / "run"

    def save(group: Group, *steps: int, outside_quorum: bool = False) -> list[int]:
        for step in steps:
            group.train(step - group.ledger.state["step"])
            group.checkpointer.save(step, outside_quorum=outside_quorum)
            assert group.checkpointer.wait_uploaded(WAIT_S)
        in_store = steps_in(run) if url == "checkpoint" else ObjectStore(f"{url}/run").steps()
        assert in_store == steps_in(run)
        return in_store

    writer = Group(run, 1, url=url, keep_latest_k=2)
    save(writer, 2, 4)
    for step in (5, 6):
        save(Group(run, None, url=url), step, outside_quorum=True)
    assert save(writer, 8) == [4, 5, 6, 8]
    assert save(writer, 10) == [8, 10]
    MemoryFileSystem.store.clear()


def test_a_writers_checkpoint_of_the_same_step_stays_or_takes_the_place(tmp_path: Path):
    a, b, c = (Group(tmp_path, quorum) for quorum in (1, None, None))
    a.train(1)
    a.step_and_save(4)
    b.train(4)
    b.checkpointer.save(4, outside_quorum=True)
    assert not checkpoint_files.read_manifest(tmp_path / "checkpoint" / "step-4").outside_quorum
    assert "another group has saved since" in b.log.infos[-1]
    c.train(6)
    c.checkpointer.save(6, outside_quorum=True)
    assert checkpoint_files.read_manifest(tmp_path / "checkpoint" / "step-6").outside_quorum
    a.step_and_save(6)
    assert not checkpoint_files.read_manifest(tmp_path / "checkpoint" / "step-6").outside_quorum
    resumes(tmp_path, 6, a)


def test_of_two_saved_outside_of_a_quorum_the_first_stays(tmp_path: Path):
    """Both groups got SIGTERM: the second finds the first one's checkpoint at the last moment."""
    a, b = Group(tmp_path, None), Group(tmp_path, None)
    a.train(3)
    b.train(3)
    a.at["publish"] = lambda: b.checkpointer.save(3, outside_quorum=True)
    a.checkpointer.save(3, outside_quorum=True)
    assert names(tmp_path) == ["step-3"] and "another group has saved since" in a.log.infos[-1]


def test_a_manifest_of_before_was_saved_in_a_quorum():
    manifest = checkpoint_files.Manifest(1, "full", ("model",), 1, "2.13", (), outside_quorum=True)
    assert checkpoint_files.Manifest.from_json(manifest.to_json()).outside_quorum
    assert json.loads(manifest.to_json())["settled"] is False
    body = {key: value for key, value in json.loads(manifest.to_json()).items() if key not in ("settled", "checksum")}
    old = json.dumps({**body, "checksum": checkpoint_files.checksum(body)})
    assert not checkpoint_files.Manifest.from_json(old).outside_quorum


@pytest.mark.parametrize("instant", ["begin", "write", "publish"])
def test_who_takes_the_role_over_saves_what_was_due(tmp_path: Path, instant: str):
    """The former writer died at any stage of its save; the others have committed a step since."""
    looks: list[Callable[[], None]] = []
    a, b = Group(tmp_path, 1, interval=4), Group(tmp_path, None, interval=4, in_thread=looks.append)
    for group in (a, b):
        group.train(4)

    def dies() -> None:
        raise KeyboardInterrupt

    a.at[instant] = dies
    with pytest.raises(KeyboardInterrupt):
        a.checkpointer.save(4)
    assert steps_in(tmp_path) == [] and not b.checkpointer.overdue(4), "another one writes"
    b.train(1)
    b.quorum = 2
    assert not b.checkpointer.overdue(5), "nobody waits for the folder"
    looks.pop()()
    assert b.checkpointer.overdue(5)
    b.checkpointer.save(5)
    assert steps_in(tmp_path) == [5] and not b.checkpointer.overdue(6)


def test_who_takes_the_role_over_saves_nothing_that_is_there(tmp_path: Path):
    looks: list[Callable[[], None]] = []
    a, b = Group(tmp_path, 1, interval=4), Group(tmp_path, None, interval=4, in_thread=looks.append)
    for group in (a, b):
        group.train(4)
    a.checkpointer.save(4)
    for step in (5, 6, 7):
        b.quorum = step
        assert not b.checkpointer.overdue(step)
        while looks:
            looks.pop()()
        assert not b.checkpointer.overdue(step)
        b.quorum = None
        assert not b.checkpointer.overdue(step)


@pytest.mark.parametrize("content", ["", "5", "null", '["e", null]', "{"])
def test_a_note_that_a_disk_has_damaged_is_none(tmp_path: Path, content: str):
    (tmp_path / LEASE_FILE).write_text(content)
    assert acquire(tmp_path, ("epoch", 3)) and (tmp_path / LEASE_FILE).read_text() == '["epoch", 3]'


def test_two_threads_of_a_rank_note_the_same_lease(tmp_path: Path):
    """The background writer (for metrics) and the trainer acquire the lease at the same moment."""
    together, noted = threading.Barrier(2), list[bool]()

    def note() -> None:
        for number in range(50):
            together.wait(WAIT_S)
            noted.append(acquire(tmp_path, (EPOCH, number)))
            together.wait(WAIT_S)

    threads = [threading.Thread(target=note) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert noted == [True] * 100
    assert [path.name for path in tmp_path.iterdir()] == [LEASE_FILE]
