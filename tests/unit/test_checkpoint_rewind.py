"""Checkpoints of a run that rewinds: the checkpoint that it loads, and the replacement of later ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.unit.checkpoint_job import Job, data_file, flip_a_bit, same, steps_in
from tests.unit.test_checkpoint_groups import Group
from training.checkpoint import CheckpointFailed
from training.checkpoint_files import newest
from training.object_store import ObjectStore


def never() -> None:
    raise AssertionError("there is a checkpoint")


def gone_back(folder: Path, **settings: Any) -> Job:
    """Returns a run that has saved steps 2, 4 and 6, and has gone back to step 4 by rewind(5)."""
    job = Job(folder, **settings)
    job.checkpointer.load()
    job.step_and_save(2, 4, 6)
    job.checkpointer.rewind(5, [], never)
    assert job.ledger.state["step"] == 4
    return job


def save(job: Job, step: int, branch: int) -> None:
    job.train(step - job.ledger.state["step"])
    job.checkpointer.save(step, branch=branch)


def test_what_load_step_has_left_is_not_gone_back_to(tmp_path: Path) -> None:
    Job(tmp_path).step_and_save(2, 4, 6)
    job = Job(tmp_path, load_step=2)
    assert job.checkpointer.load() == 2
    job.checkpointer.rewind(5, [], never)
    assert job.ledger.state["step"] == 2 and steps_in(tmp_path) == [2]


def test_it_goes_back_bit_for_bit_to_the_newest_before_the_spike(tmp_path: Path) -> None:
    once = Job(tmp_path / "once")
    once.train(4)
    job = gone_back(tmp_path / "run")
    assert same(job.everything(), once.everything())
    losses = once.train(3)
    assert job.train(3) == losses, "and goes on as if nothing had been"
    job.checkpointer.rewind(3, [4], never)
    assert job.ledger.state["step"] == 2


def test_it_goes_back_to_its_own_history_alone(tmp_path: Path) -> None:
    """Step 6, of the branch abandoned at step 4 and written late by a stopped group, is not loaded."""
    job = gone_back(tmp_path)
    shutil.copytree(tmp_path / "checkpoint" / "step-6", tmp_path / "late")
    save(job, 5, branch=1)
    shutil.copytree(tmp_path / "late", tmp_path / "checkpoint" / "step-6")
    job.checkpointer.rewind(8, [4], never)
    assert job.ledger.state["step"] == 5
    job.checkpointer.rewind(6, [4, 3], never)  # of the branch after that, from step 3 on: only step 2 is before
    assert job.ledger.state["step"] == 2


@pytest.mark.parametrize("keep", [0, 2])
def test_a_save_of_the_new_branch_replaces_what_lies_beyond(tmp_path: Path, keep: int) -> None:
    """A kill may leave both: a step of an older branch counts as older, whatever its number."""
    job = gone_back(tmp_path, keep_latest_k=keep)
    beyond = tmp_path / "checkpoint" / "step-6"
    there: list[bool] = []
    job.at["publish"] = lambda: there.append(beyond.exists())  # not before its successor is there
    shutil.copytree(beyond, tmp_path / "kept")
    save(job, 5, branch=1)
    assert there == [True] and steps_in(tmp_path) == [2, 4, 5][-keep:]

    shutil.copytree(tmp_path / "kept", beyond)  # killed before it was removed
    assert newest(tmp_path / "checkpoint") == 5
    after = Job(tmp_path, seed=1, keep_latest_k=keep)
    assert after.checkpointer.newest_step() == after.checkpointer.load() == 5
    assert same(after.everything(), job.everything())
    save(after, 6, branch=1)  # in the place of the other step 6
    assert after.checkpointer.newest_step() == 6 == Job(tmp_path, seed=2).checkpointer.load()


@pytest.mark.parametrize("url", ["checkpoint", "memory://rewinds"])
def test_a_step_that_another_group_made_alone_is_not_gone_back_to(tmp_path: Path, url: str) -> None:
    """A group saves its own version of step 5 as it leaves; the run rewinds to it only if it has continued from it."""
    MemoryFileSystem.store.clear()
    a, b, c = (Group(tmp_path / "run", quorum, url=url, seed=1) for quorum in (1, None, 2))
    a.checkpointer.load()
    for step in (2, 4):
        a.step_and_save(step)
        assert a.checkpointer.wait_uploaded(50.0)
    b.train(5)
    b.checkpointer.save(5, outside_quorum=True)
    b.checkpointer.close()
    a.train(3)
    a.checkpointer.rewind(7, [], never)
    assert a.ledger.state["step"] == 4
    a.checkpointer.close()
    assert c.checkpointer.load() == 5
    c.train(2)
    c.checkpointer.rewind(7, [], never)
    assert c.ledger.state["step"] == 5
    c.checkpointer.close()
    if url != "checkpoint":  # a disk that has only what the group saved as it left
        d = Group(tmp_path / "d" / "run", None, url=url, seed=2)
        assert d.checkpointer.load() == 5
        again = Group(tmp_path / "d" / "run", None, url=url, seed=3)
        again.checkpointer.rewind(7, [], never)
        assert again.ledger.state["step"] == 4 and steps_in(tmp_path / "d" / "run") == [4, 5]
    MemoryFileSystem.store.clear()


def test_without_a_checkpoint_it_begins_anew(tmp_path: Path) -> None:
    job, resets = Job(tmp_path), list[int]()
    assert job.checkpointer.load() is None
    job.checkpointer.rewind(3, [], lambda: resets.append(1))
    assert resets == [1] and job.checkpointer.due(500)
    job.step_and_save(4)  # beyond the spike: no checkpoint to go back to
    job.checkpointer.rewind(3, [0], lambda: resets.append(2))
    assert resets == [1, 2]


def test_damaged_ones_are_passed_over_and_never_lead_to_a_new_beginning(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.checkpointer.load()
    job.step_and_save(2, 4)
    flip_a_bit(data_file(tmp_path, 4))
    job.checkpointer.rewind(5, [], never)
    assert job.ledger.state["step"] == 2 and "step 4 is damaged and not used" in job.log.warnings[0]
    flip_a_bit(data_file(tmp_path, 2))
    with pytest.raises(CheckpointFailed, match=r"none before step 5 in .* is intact"):
        job.checkpointer.rewind(5, [], never)


def test_in_an_object_store_too(tmp_path: Path) -> None:
    MemoryFileSystem.store.clear()
    url = "memory://rewinds"
    job, store = gone_back(tmp_path / "run", url=url), ObjectStore(f"{url}/run")

    def stored() -> None:
        job.checkpointer.retry_upload()
        assert job.checkpointer.wait_uploaded(50.0)

    stored()
    assert store.steps()[-1] == 6
    beyond = {path: content for path, content in MemoryFileSystem.store.items() if "step-6" in path}
    save(job, 5, branch=1)
    stored()
    assert store.steps()[-1] == 5
    MemoryFileSystem.store.update(beyond)  # killed before it was removed
    other = Job(tmp_path / "elsewhere" / "run", seed=1, url=url)
    assert other.checkpointer.newest_step() == other.checkpointer.load() == 5
    assert same(other.everything(), job.everything())
    other.checkpointer.close()
    save(job, 6, branch=1)
    stored()
    manifest = store.manifest(6)
    assert manifest.branch == 1, "in the place of the other step 6"
    job.checkpointer.close()
    MemoryFileSystem.store.clear()
