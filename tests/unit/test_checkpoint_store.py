"""Checkpoints in an object store: a run resumes from it on a different machine, and a failing store ends no run."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem

from configs.errors import ConfigError
from configs.load import load
from configs.saved import CONFIG_FILE, check_saved, fetch_saved, save
from configs.schema import RunConfig
from parallelisms.distributed import World
from tests.unit.checkpoint_job import Job, data_file, flip_a_bit, same, steps_in
from tests.unit.storage import SlowStore
from tests.unit.test_checkpoint_groups import Group
from tests.unit.test_saver import End
from training.checkpoint import CheckpointFailed
from training.checkpoint_config import CheckpointConfig
from training.checkpoint_files import MANIFEST, begin
from training.components import check_same_settings
from training.object_store import ObjectStore, fetch_suffix

URL = "memory://checkpoints"
WAIT_S = 50.0
STORE = ObjectStore(f"{URL}/run")


@pytest.fixture(autouse=True)
def empty_store() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    yield
    MemoryFileSystem.store.clear()


def start(machine: Path, **settings: Any) -> Job:
    """A launch of the run on a machine with a disk of its own."""
    return Job(machine / "run", url=URL, **settings)


def stored(job: Job) -> None:
    """Waits until the store has the newest save, or rejects it."""
    job.checkpointer.retry_upload()
    assert job.checkpointer.wait_uploaded(WAIT_S)


def saved(machine: Path, *steps: int, **settings: Any) -> Job:
    """Returns a job that has saved these steps, each in the store before the next one."""
    job = start(machine, **settings)
    assert job.checkpointer.load() is None
    for step in steps:
        job.step_and_save(step)
        stored(job)
    return job


def denied(*_: object, **__: object) -> None:
    raise PermissionError("denied")


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_another_machine_goes_on_from_the_store(tmp_path: Path, async_mode: str):
    job = saved(tmp_path / "1", 2, 4, 6, keep_latest_k=2, async_mode=async_mode)
    job.checkpointer.close()
    assert steps_in(tmp_path / "1" / "run") == STORE.steps() == [4, 6]
    other = start(tmp_path / "2", seed=1, keep_latest_k=2)
    assert other.checkpointer.newest_step() == other.checkpointer.load() == 6
    assert same(other.everything(), job.everything()) and other.log.warnings == []
    assert other.train(1) == job.train(1)
    other.checkpointer.save(7)
    other.checkpointer.close()
    assert STORE.steps() == [6, 7]
    assert start(tmp_path / "1", seed=2).checkpointer.load() == 7


def test_a_long_copy_is_waited_for_while_bytes_arrive(tmp_path: Path):
    """The last file arrives only after the waiting ranks have seen bytes of the first one."""
    job = saved(tmp_path / "1", 2)
    SlowStore.lets_go.clear()
    other = Job(tmp_path / "2" / "run", url="slow://checkpoints", seed=1, on_bytes=SlowStore.lets_go.set)
    assert other.checkpointer.load() == 2 and same(other.everything(), job.everything())
    assert SlowStore.lets_go.is_set()


def test_damage_in_the_store_costs_one_checkpoint(tmp_path: Path):
    job = saved(tmp_path / "1", 2, 4)
    file_system, root = STORE.file_system_and_root
    name = next(name for name in STORE.objects()[4] if ".distcp" in name)
    content = file_system.cat_file(f"{root}/step-4/{name}")
    file_system.pipe_file(f"{root}/step-4/{name}", content[:-1] + bytes([content[-1] ^ 1]))
    other = start(tmp_path / "2", seed=1)
    assert other.checkpointer.load() == 2
    [warning] = other.log.warnings
    assert warning.startswith(
        "checkpoint: step 4 in memory://checkpoints/run is damaged and not used: __0_0.distcp: bytes 0 to "
    )
    other.step_and_save(4)
    other.checkpointer.close()
    assert len(other.log.warnings) == 1
    again = start(tmp_path / "3", seed=2)
    assert again.checkpointer.load() == 4 and same(again.everything(), job.everything())


def test_settings_of_another_machine_are_those_of_the_run(tmp_path: Path):
    (tmp_path / "run.toml").write_text("[optimizer]\nlr = 1e-3\n")

    def configured(machine: str, *argv: str) -> RunConfig:
        settings = [f"--job.dump_folder={tmp_path / machine}", f"--checkpoint.folder={URL}"]
        return load([str(tmp_path / "run.toml"), *settings, *argv])

    own, other = configured("1", "--validation.enable"), configured("2", "--optimizer.lr=5e-4", "--validation.enable")
    for machine, config, step in (("1", own, 2), ("2", other, 4)):
        job = start(tmp_path / machine)
        job.checkpointer.load()
        job.step_and_save(step)
        save(config, tmp_path / machine / "run")
        STORE.put_files(tmp_path / machine / "run", [CONFIG_FILE])
        stored(job)
        assert check_saved(fetch_saved(config), tmp_path / machine / "run", world_size=1) == {}
    assert check_saved(fetch_saved(own, newer=False), own.run_folder, world_size=1) == {}, "asks for no manifest"
    with pytest.raises(ConfigError, match=r"optimizer.lr: saved 0\.0005, now 0\.001"):
        check_saved(fetch_saved(own), own.run_folder, world_size=1)
    third = configured("3", "--optimizer.lr=5e-4")  # without validation: the run goes on without what it has held out
    assert third.training.dataset_held_out == 0.0 and fetch_saved(third, newer=False).training.dataset_held_out == 0.03
    store = dist.HashStore()

    def rank(global_rank: int) -> World:
        return cast(World, SimpleNamespace(global_rank=global_rank, store=store))

    check_same_settings(fetch_saved(third), {}, rank(0))
    check_same_settings(fetch_saved(third), {}, rank(1))
    for config, changes in ((third, {}), (fetch_saved(third), {"optimizer.lr": "0.001 -> 0.0005"})):
        with pytest.raises(CheckpointFailed, match=r"was fetched from memory://checkpoints/run after this rank"):
            check_same_settings(config, changes, rank(1))
    ahead = start(tmp_path / "2")
    ahead.checkpointer.load()
    ahead.checkpointer.close()
    save(own, tmp_path / "2" / "run")  # a change that the store does not have yet
    assert check_saved(fetch_saved(configured("2", "--validation.enable")), tmp_path / "2" / "run", world_size=1) == {}


def test_damage_on_the_disk_is_repaired_from_the_store(tmp_path: Path):
    job = saved(tmp_path / "1", 2, 4)
    flip_a_bit(data_file(tmp_path / "1" / "run", 4))
    again = start(tmp_path / "1", seed=1)
    assert again.checkpointer.load() == 4 and same(again.everything(), job.everything())
    [warning] = again.log.warnings
    assert warning.startswith("checkpoint: step 4 is damaged (__0_0.distcp: bytes 0 to ")
    assert warning.endswith(f"), fetched again from {URL}/run")


def test_what_a_group_saves_as_it_leaves_replaces_no_other_save(tmp_path: Path):
    """A save outside of a quorum replaces no other save, except its own damaged copy on the disk."""
    left = start(tmp_path / "1")
    left.checkpointer.load()
    left.train(2)
    left.checkpointer.save(2, outside_quorum=True)
    stored(left)
    stays = Job(tmp_path / "2" / "run", seed=1)
    stays.step_and_save(2)
    for machine, job in (("2", stays), ("1", left)):
        again = start(tmp_path / machine, seed=2)
        assert again.checkpointer.load() == 2 and same(again.everything(), job.everything())
        flip_a_bit(data_file(tmp_path / "1" / "run", 2))


def test_a_group_that_leaves_removes_nothing(tmp_path: Path):
    """Neither the writer's pending upload nor an earlier checkpoint is removed: the saved step may not be the job's."""
    writer, leaves = (Group(tmp_path / "run", quorum, url=URL, keep_latest_k=1) for quorum in (1, None))
    writer.checkpointer.load()
    writer.step_and_save(2)
    stored(writer)
    leaves.checkpointer.load()
    leaves.train(2)
    file_system, root = STORE.file_system_and_root
    file_system.pipe_file(f"{root}/step-4/__0_0.distcp.d1e5", b"whose manifest follows")
    leaves.checkpointer.save(4, outside_quorum=True)
    stored(leaves)
    assert STORE.steps() == steps_in(tmp_path / "run") == [2, 4] and "__0_0.distcp.d1e5" in STORE.objects()[4]
    assert leaves.log.warnings == []


def test_a_copy_on_its_way_is_left_to_its_group(tmp_path: Path):
    """The writer of a shared folder removes leftovers of older writers, not another group's partial copy; that group removes it."""
    writer = Group(tmp_path / "run", 1, url=URL)
    writer.checkpointer.load()
    writer.step_and_save(2)
    stored(writer)
    partial = begin(tmp_path / "run" / "checkpoint", 2, fetch_suffix(""))
    writer.step_and_save(4)
    stored(writer)
    assert partial.exists()
    assert Group(tmp_path / "run", None, url=URL, seed=1).checkpointer.load() == 4 and not partial.exists()


def test_a_copy_that_no_launch_needs_any_more_is_removed(tmp_path: Path):
    """Its group never returns, and its step is older than the oldest that keep_latest_k keeps."""
    writer = Group(tmp_path / "run", 1, url=URL, keep_latest_k=2)
    writer.checkpointer.load()
    partial = begin(tmp_path / "run" / "checkpoint", 2, fetch_suffix("3"))
    for step, is_left in ((2, True), (4, True), (6, False)):
        writer.step_and_save(step)
        stored(writer)
        assert partial.exists() == is_left
    assert steps_in(tmp_path / "run") == [4, 6]


def test_a_rewind_is_not_held_to_load_step_and_asks_no_store(tmp_path: Path):
    saved(tmp_path / "1", 2)
    job = Job(tmp_path / "1" / "run", url="slow://checkpoints", load_step=2, keep_latest_k=2)
    job.checkpointer.load()
    for step in (4, 6, 8):
        job.step_and_save(step)
        stored(job)
    assert STORE.steps() == steps_in(tmp_path / "1" / "run") == [6, 8]
    SlowStore.is_away = True
    job.checkpointer.rewind(7, [], lambda: None)
    SlowStore.is_away = False
    assert job.ledger.state["step"] == 6


def test_what_load_step_has_left_is_not_gone_back_to(tmp_path: Path):
    saved(tmp_path / "1", 2, 4, 6)
    job = start(tmp_path / "2", load_step=2)
    job.checkpointer.load()
    job.checkpointer.rewind(5, [], lambda: None)
    assert job.ledger.state["step"] == 2


def test_an_earlier_step_is_trained_again(tmp_path: Path):
    """New checkpoints replace those of the abandoned steps."""
    saved(tmp_path / "1", 2, 4, 6)
    other = start(tmp_path / "2", load_step=2)
    assert other.checkpointer.load() == 2 and steps_in(tmp_path / "2" / "run") == [2]
    other.ledger.state["position"] = 100
    other.step_and_save(4)
    other.checkpointer.close()
    assert other.log.warnings == []
    assert STORE.steps() == [2, 4], "step 6 is set aside"
    [manifest] = [name for name in MemoryFileSystem.store if f"/abandoned/step-6/{MANIFEST}." in name]
    assert MemoryFileSystem.store[manifest].getvalue()
    again = start(tmp_path / "3")
    assert again.checkpointer.load() == 4 and again.ledger.state["position"] == other.ledger.state["position"]


def test_a_launch_puts_what_a_killed_one_could_not(tmp_path: Path):
    saved(tmp_path / "1", 2, 4)
    file_system, root = STORE.file_system_and_root
    file_system.rm_file(f"{root}/step-4/{MANIFEST}")
    job = start(tmp_path / "1")
    assert job.checkpointer.load() == 4
    job.checkpointer.close()
    assert STORE.steps() == [2, 4]


def test_a_store_that_refuses_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = saved(tmp_path / "1", 2)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", denied)
        job.step_and_save(4, 6)
        with pytest.raises(
            CheckpointFailed, match=r"^checkpoint: step 6 is not in memory://checkpoints/run: denied; it is in "
        ):
            stored(job)
    stored(job)
    assert STORE.steps() == [2, 6]
    assert any(line.endswith("denied; retried every 30 s") for line in job.log.warnings)
    assert job.log.warnings[-1].startswith("checkpoint: step 6 is in memory://checkpoints/run, after ")


def test_no_answer_at_the_start_is_no_new_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def gone(*_: object, **__: object) -> None:
        raise ValueError("no route")

    monkeypatch.setattr(MemoryFileSystem, "find", gone)
    with pytest.raises(
        CheckpointFailed, match=r"ValueError: no route; refusing to start: it may hold this run's checkpoints"
    ):
        start(tmp_path / "1").checkpointer.load()


def test_a_disk_that_takes_no_copy_is_named(tmp_path: Path):
    saved(tmp_path / "1", 2)
    (tmp_path / "2" / "run").mkdir(parents=True)
    (tmp_path / "2" / "run" / "checkpoint").touch()
    with pytest.raises(
        CheckpointFailed,
        match=r"^checkpoint: step 2 cannot be copied from memory://checkpoints/run to .*/2/run/checkpoint: Not a dir",
    ):
        start(tmp_path / "2").checkpointer.load()


def test_a_run_starts_from_another_ones_checkpoint(tmp_path: Path):
    job = saved(tmp_path / "1", 2, 4)
    shutil.rmtree(tmp_path / "1")
    other = Job(tmp_path / "2", seed=1, initial_load_path=f"{URL}/run/step-4", initial_load_model_only=False)
    assert other.checkpointer.load() == 4 and same(other.everything(), job.everything())
    assert other.checkpointer.checkpoint_to_continue() == tmp_path / "2" / "initial" / "step-4"
    for number, name in enumerate(("ledger", "ledger.", "led*"), 4):
        settings = {"initial_load_model_only": False, "exclude_from_loading": (name,)}
        begins = Job(tmp_path / str(number), seed=1, initial_load_path=f"{URL}/run/step-4", **settings)
        assert begins.checkpointer.load() is None is begins.checkpointer.checkpoint_to_continue()
        assert begins.ledger.state["step"] == 0
    wrong = Job(tmp_path / "3", initial_load_path=f"{URL}/run/step-3")
    with pytest.raises(ValueError, match=r"run/step-3\": not a checkpoint; steps there: 2, 4; nearest: 4"):
        wrong.checkpointer.load()


def test_the_local_copy_has_a_folder_of_its_own():
    assert CheckpointConfig(folder="s3://b/x").local_folder == CheckpointConfig().local_folder == "checkpoint"


def test_groups_with_disks_of_their_own_share_a_store(tmp_path: Path):
    """A group that heals downloads no checkpoint."""
    a = Group(tmp_path / "a" / "run", 1, url=URL)
    a.step_and_save(2)
    stored(a)
    b = Group(tmp_path / "b" / "run", None, url=URL, seed=1)
    assert b.checkpointer.newest_step() == 2 and steps_in(tmp_path / "b" / "run") == []
    assert b.checkpointer.load() == 2 and same(a.everything(), b.everything())
    b.quorum = 2
    b.step_and_save(4)
    b.checkpointer.close()
    assert STORE.steps() == [2, 4]


def test_a_group_that_does_not_save_keeps_no_more_on_its_disk(tmp_path: Path):
    """Each of its starts downloads a checkpoint, and no save of its own removes the earlier ones."""
    writer = Group(tmp_path / "1" / "run", 1, url=URL, keep_latest_k=2)
    writer.checkpointer.load()
    for step in (2, 4, 6):
        writer.step_and_save(step)
        stored(writer)
        other = Group(tmp_path / "2" / "run", None, url=URL, seed=1, keep_latest_k=2)
        assert other.checkpointer.load() == step
        other.checkpointer.close()
    assert steps_in(tmp_path / "2" / "run") == [4, 6]


def test_a_group_that_is_passed_over_puts_nothing_in_its_successors_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    a, b = (Group(tmp_path / "run", quorum, url=URL, seed=quorum) for quorum in (1, 2))
    put, first = MemoryFileSystem.pipe_file, threading.Event()

    def passed_over(self: MemoryFileSystem, *arguments: Any, **options: Any) -> None:
        if not first.is_set():
            first.set()
            b.step_and_save(2)
            stored(b)
        put(self, *arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", passed_over)
    a.step_and_save(2)
    stored(a)
    a.checkpointer.close()
    assert a.log.infos[-1] == f"checkpoint: step 2 not put into {URL}/run: another group has put it there"
    other = start(tmp_path / "2", seed=3)
    assert other.checkpointer.load() == 2 and same(other.everything(), b.everything())


def test_a_step_that_the_next_writer_has_removed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The store rejected the former writer's upload and accepts those of the next writer, which removes older checkpoints from the disk."""
    a, b = (Group(tmp_path / "run", quorum, url=URL, seed=quorum, keep_latest_k=2) for quorum in (1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", denied)
        a.step_and_save(2)
        with pytest.raises(CheckpointFailed, match="denied"):
            stored(a)
    for step in (4, 6, 8):
        b.step_and_save(step)
        stored(b)
    assert steps_in(tmp_path / "run") == [6, 8]
    stored(a)
    a.checkpointer.close()
    assert f"checkpoint: step 2 not put into {URL}/run: the group that writes now has removed it" in a.log.infos
    assert STORE.steps() == [6, 8] and not any(" is in " in line for line in a.log.warnings)


def test_the_last_step_is_put_until_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The run counts as finished only when its last checkpoint is in the store."""
    ends = [End(tmp_path / "run", 1, url=URL) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "pipe_file", denied)
        ends[0].happens[100.0] = lambda: setattr(ends[0], "asked", True)
        with pytest.raises(CheckpointFailed, match=r"^checkpoint: step 4 is not in memory://checkpoints/run: denied;"):
            ends[0].make()
        assert ends[0].manager.told == [False] and STORE.steps() == []
        [told] = ends[0].told
        assert told.endswith("; this is the last step: tried again until SIGTERM")

        def works() -> None:
            patch.undo()
            ends[1].group.checkpointer.retry_upload()

        ends[1].happens[5.0] = works
        ends[1].make()
    assert ends[1].manager.told == [True] and STORE.steps() == [4]


def test_damage_everywhere_is_no_new_run(tmp_path: Path):
    saved(tmp_path / "1", 2).checkpointer.close()
    file_system, root = STORE.file_system_and_root
    for name in STORE.objects()[2]:
        file_system.pipe_file(f"{root}/step-2/{name}", b"damaged")
    with pytest.raises(CheckpointFailed, match=r"^checkpoint: no checkpoint in memory://checkpoints/run is intact"):
        start(tmp_path / "2").checkpointer.load()
    with pytest.raises(ValueError, match=r"^checkpoint.load_step = 3: not in memory://.*; steps there: 2; nearest: 2"):
        start(tmp_path / "2", load_step=3).checkpointer.load()


def test_a_run_that_has_only_exported_weights_is_no_new_run(tmp_path: Path):
    job = start(tmp_path / "1", last_save_model_only=True)
    job.train(4)
    job.checkpointer.save(4, last=True)
    job.checkpointer.close()
    other = start(tmp_path / "2")
    assert other.checkpointer.newest_step("model") == 4
    with pytest.raises(ValueError, match="has only the weights"):
        other.checkpointer.load()


def test_a_seed_is_put_and_another_machine_starts_from_it(tmp_path: Path):
    job = start(tmp_path / "1", create_seed_checkpoint=True)
    assert job.checkpointer.load() is None
    job.checkpointer.save_seed()
    assert STORE.steps() == [0]
    other = start(tmp_path / "2", seed=1)
    assert other.checkpointer.load() == 0
    assert same(other.states["model"].state_dict(), job.states["model"].state_dict())
