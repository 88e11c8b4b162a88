"""Checkpoints in one process: the round trip, what is refused, what is kept, and every way a save can fail."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from ft.materialise import materialise
from tests.unit.checkpoint_job import Job, Lines, data_file, flip_a_bit, same, steps_in
from training import checkpoint_files
from training.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    CheckpointFailed,
    ModelState,
    OptimizerState,
)
from training.checkpoint_dcp import Snapshot

# The round trip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, dtype: torch.dtype, async_mode: str) -> None:
    straight = Job(tmp_path, dtype=dtype, async_mode=async_mode)
    assert straight.checkpointer.load() is None
    straight.train(3)
    straight.checkpointer.save(3)
    losses = straight.train(4)
    straight.checkpointer.close()

    resumed = Job(tmp_path, seed=1, dtype=dtype, async_mode=async_mode)
    assert resumed.checkpointer.load() == 3
    assert resumed.train(4) == losses
    assert same(resumed.everything(), straight.everything())


def test_an_optimizer_is_given_its_first_state_without_a_bit_of_the_weights_changing() -> None:
    weight = nn.Parameter(torch.tensor([-0.0, 0.0, 1e-42, 3.0]))
    fresh, given = (torch.optim.AdamW([nn.Parameter(weight.detach().clone())], lr=0.1) for _ in range(2))
    materialise(given)
    (parameter,) = given.param_groups[0]["params"]
    assert parameter.detach().view(torch.int32).equal(weight.detach().view(torch.int32))
    assert given.param_groups[0]["lr"] == 0.1 and parameter.grad is None
    assert {name: value.sum().item() for name, value in given.state[parameter].items()} == {
        "step": 0,
        "exp_avg": 0,
        "exp_avg_sq": 0,
    }
    for optimizer in (fresh, given):
        (parameter,) = optimizer.param_groups[0]["params"]
        parameter.grad = torch.full_like(parameter, 0.3)
        optimizer.step()
    assert fresh.param_groups[0]["params"][0].equal(given.param_groups[0]["params"][0])


def test_an_optimizer_that_has_gradients_is_left_alone() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight])
    materialise(optimizer)
    assert not optimizer.state and weight.grad.equal(torch.ones(2))


def test_the_names_are_those_of_dcp(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

    job = Job(tmp_path)
    job.train(1)
    flattened = get_optimizer_state_dict(
        job.model, job.optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    kernels = ("fused", "foreach", "capturable", "differentiable")
    names = {name for name in flattened if not name.endswith(kernels)}
    assert ModelState([job.model]).state_dict().keys() == get_model_state_dict(job.model).keys()
    assert OptimizerState([job.model], job.optimizer).state_dict().keys() == names


def test_names_do_not_tell_what_wraps_a_module(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = Job(tmp_path), Job(tmp_path, seed=1)
    wrapped.model[0] = cast(nn.Module, torch.compile(wrapped.model[0], backend="eager"))
    wrapped.model[2] = checkpoint_wrapper(wrapped.model[2])
    assert wrapped.everything().keys() == plain.everything().keys()
    plain.step_and_save(2)
    assert wrapped.checkpointer.load() == 2
    assert same(wrapped.everything(), plain.everything())


def test_a_parameter_without_gradient_is_saved_and_loaded(tmp_path: Path) -> None:
    def job() -> Job:
        made = Job(tmp_path)
        made.model.get_parameter("0.weight").requires_grad_(False)
        return made

    first = job()
    first.step_and_save(2)
    second = job()
    assert second.checkpointer.load() == 2
    assert same(first.everything(), second.everything())


def test_a_save_of_a_step_that_is_held_does_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step_and_save(2)
    before = data_file(tmp_path, 2).stat().st_mtime_ns
    job.checkpointer.save(2, last=True)
    resumed = Job(tmp_path)
    resumed.checkpointer.load()
    resumed.checkpointer.save(2, last=True)
    assert data_file(tmp_path, 2).stat().st_mtime_ns == before


def test_due() -> None:
    def due(**settings: Any) -> list[int]:
        checkpointer = Checkpointer(CheckpointConfig(**settings), Path("nowhere"), {}, log=Lines())
        return [step for step in range(1, 8) if checkpointer.due(step)]

    assert due(interval=3) == [3, 6]
    assert due(interval=3, enable_first_step_checkpoint=True) == [1, 3, 6]
    assert due(interval=3, enable=False) == due(interval=3, load_only=True) == []


def test_checkpoints_can_be_off_or_read_only(tmp_path: Path) -> None:
    off = Job(tmp_path, enable=False)
    assert off.checkpointer.load() is None
    off.step_and_save(1)
    assert steps_in(tmp_path) == []
    Job(tmp_path).step_and_save(2)
    assert Job(tmp_path, enable=False).checkpointer.load() is None
    read_only = Job(tmp_path, load_only=True)
    assert read_only.checkpointer.load() == 2
    read_only.step_and_save(3)
    assert steps_in(tmp_path) == [2]


def test_the_manifest_says_what_the_checkpoint_is(tmp_path: Path) -> None:
    Job(tmp_path).step_and_save(2)
    manifest = json.loads((tmp_path / "checkpoint/step-2/manifest.json").read_text())
    assert {
        key: manifest[key] for key in ("format", "step", "kind", "states", "world_size", "torch", "config_digest")
    } == {
        "format": 1,
        "step": 2,
        "kind": "full",
        "states": ["model", "optimizer", "ledger"],
        "world_size": 1,
        "torch": torch.__version__,
        "config_digest": "cafe",
    }
    assert {file["name"] for file in manifest["files"]} == {".metadata", "__0_0.distcp"}


# Damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def change_manifest(path: Path) -> None:
    path.write_text(path.read_text().replace('"world_size": 1', '"world_size": 3'))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (lambda p: truncate(data_file(p, 4)), r"__0_0\.distcp: [\d,]+ bytes, [\d,]+ were written"),
    "flipped bit": (
        lambda p: flip_a_bit(data_file(p, 4)),
        r"__0_0\.distcp: bytes 0 to [\d,]+ are not what was written",
    ),
    "flipped last bit": (lambda p: flip_a_bit(data_file(p, 4), 0.9999), r"__0_0\.distcp: bytes 0 to .* not what was"),
    "flipped index": (
        lambda p: flip_a_bit(p / "checkpoint/step-4/.metadata"),
        r"\.metadata: bytes 0 to [\d,]+ are not",
    ),
    "missing file": (lambda p: data_file(p, 4).rename(p / "elsewhere"), r"__0_0\.distcp: missing"),
    "missing manifest": (lambda p: (p / "checkpoint/step-4/manifest.json").unlink(), r"manifest\.json: missing"),
    "flipped manifest": (lambda p: flip_a_bit(p / "checkpoint/step-4/manifest.json"), r"manifest\.json: "),
    "changed manifest": (
        lambda p: change_manifest(p / "checkpoint/step-4/manifest.json"),
        r"manifest\.json: its checksum",
    ),
    "empty folder": (
        lambda p: [f.rename(p / f.name) for f in (p / "checkpoint/step-4").iterdir()],
        r"manifest\.json: missing",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_is_used(tmp_path: Path, kind: str) -> None:
    first = Job(tmp_path)
    first.step_and_save(2)
    there = first.everything()
    first.step_and_save(4)
    damage, message = DAMAGE[kind]
    damage(tmp_path)

    second = Job(tmp_path, seed=1)
    assert second.checkpointer.load() == 2
    assert same(second.everything(), there)
    (line,) = second.log.warnings
    assert re.fullmatch(f"checkpoint: step 4 is damaged and not used: {message}.*", line)
    second.step_and_save(4)  # takes the damaged one's place
    third = Job(tmp_path)
    assert third.checkpointer.load() == 4
    assert third.log.warnings == []


def test_every_bit_of_a_checkpoint_counts(tmp_path: Path) -> None:
    Job(tmp_path).step_and_save(2)
    path = tmp_path / "checkpoint/step-2"
    manifest = checkpoint_files.read_manifest(path)
    file = data_file(tmp_path, 2)
    content = file.read_bytes()
    for where in torch.randperm(len(content), generator=torch.Generator().manual_seed(0))[:200].tolist():
        changed = bytearray(content)
        changed[where] ^= 1 << (where % 8)
        file.write_bytes(changed)
        with pytest.raises(checkpoint_files.Damaged, match=r"__0_0\.distcp: bytes 0 to"):
            checkpoint_files.verify(path, manifest)
    file.write_bytes(content)
    checkpoint_files.verify(path, manifest)


def test_every_segment_is_looked_at_by_one_of_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_files, "SEGMENT_BYTES", 256 << 10)
    content = torch.arange(200_001, dtype=torch.int64).numpy().tobytes() + b"end"
    digest = checkpoint_files.Digest()
    for start, stop in ((0, 1), (1, 300_000), (300_000, 300_000), (300_000, len(content))):
        digest.update(memoryview(content)[start:stop])
    record = digest.record("file")
    assert (record.size_bytes, len(record.digests)) == (len(content), 7)
    manifest = checkpoint_files.Manifest(2, "full", (), 1, "", "", (record,))
    for segment in range(7):
        changed = bytearray(content)
        changed[min((segment << 18) + 200_000, len(content) - 1)] ^= 1
        (tmp_path / "file").write_bytes(changed)
        told = {share: line for share in range(3) if (line := damage_seen_by(tmp_path, manifest, share, 3))}
        assert list(told) == [segment % 3]
        assert told[segment % 3].startswith(f"file: bytes {segment << 18:,} to ")


def damage_seen_by(path: Path, manifest: checkpoint_files.Manifest, share: int, shares: int) -> str:
    try:
        checkpoint_files.verify(path, manifest, share=share, shares=shares)
    except checkpoint_files.Damaged as damage:
        return str(damage)
    return ""


def test_words_that_change_places_are_seen() -> None:
    def digests(words: list[int]) -> tuple[str, ...]:
        digest = checkpoint_files.Digest()
        digest.update(memoryview(torch.tensor(words).numpy().tobytes()))
        return digest.record("").digests

    assert len({digests([1, 2, 3]), digests([2, 1, 3]), digests([1, 2]), digests([1, 2, 0]), digests([3, 0, 3])}) == 5
    assert digests([]) == ()


def test_where_none_is_whole_the_run_does_not_begin_from_nothing(tmp_path: Path) -> None:
    Job(tmp_path).step_and_save(2, 4)
    flip_a_bit(data_file(tmp_path, 2))
    data_file(tmp_path, 4).unlink()
    with pytest.raises(
        CheckpointFailed, match=r"none .* is whole \(step 4: __0_0.distcp: missing; step 2: __0_0.distcp: by"
    ):
        Job(tmp_path).checkpointer.load()


def test_without_verification_only_lengths_are_looked_at(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step_and_save(2, 4)
    content = data_file(tmp_path, 4).read_bytes()
    place = content.index(job.model.get_parameter("2.weight").detach().numpy().tobytes())
    data_file(tmp_path, 4).write_bytes(content[:place] + b"\x01" + content[place + 1 :])
    assert Job(tmp_path, verify_digests=False).checkpointer.load() == 4
    data_file(tmp_path, 4).write_bytes(bytes(len(content)))  # and what cannot even be read is still not the end
    job = Job(tmp_path, verify_digests=False)
    assert job.checkpointer.load() == 2
    assert len(job.log.warnings) == 1


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    Job(tmp_path).step_and_save(2)

    def refused(model: nn.Sequential, match: str) -> None:
        job = Job(tmp_path)
        job.states["model"] = ModelState([model])
        with pytest.raises(ValueError, match=r"^checkpoint\.folder = .*step-2: does not fit this run: " + match):
            job.checkpointer.load()

    layers = Job(tmp_path).layers
    refused(nn.Sequential(*layers[:2], nn.Linear(5, 4)), r"model\.2\.weight is \[3, 5\] there and \[4, 5\] here; ")
    refused(nn.Sequential(*layers, nn.Linear(3, 3)), r"model\.3\.weight is here and not there; model\.3\.bias is here")
    refused(
        nn.Sequential(*layers[:2]), r"model\.2\.bias is there and not here; model\.2\.weight is there and not here$"
    )
    refused(nn.Sequential(*layers[:1]), r".* \(and 4 more\)$")
    with pytest.raises(ValueError, match=r"model\.0\.weight is torch.float32 there and torch.bfloat16 here"):
        Job(tmp_path, dtype=torch.bfloat16).checkpointer.load()


def test_no_state_is_forgotten_when_the_loader_of_a_stream_has_one(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.states["loader"] = stream = Lines()  # any object will do
    stream.state_dict = lambda: {"dp_rank_0": b"cursor"}  # type: ignore[attr-defined]
    job.step_and_save(2)
    with pytest.raises(ValueError, match=r"loader\.dp_rank_0 is there and not here"):
        Job(tmp_path).checkpointer.load()


# What is kept


def test_the_newest_k_are_kept(tmp_path: Path) -> None:
    job = Job(tmp_path, keep_latest_k=2)
    job.step_and_save(1, 2, 3, 4)
    assert steps_in(tmp_path) == [3, 4]
    Job(tmp_path, keep_latest_k=0).step_and_save(5, 6)
    assert steps_in(tmp_path) == [3, 4, 5, 6]


def test_a_checkpoint_below_newer_ones_is_kept_and_removes_none_of_them(tmp_path: Path) -> None:
    Job(tmp_path, keep_latest_k=0).step_and_save(2, 4, 6, 8)
    again = Job(tmp_path, keep_latest_k=2, load_step=2)
    assert again.checkpointer.load() == 2
    again.step_and_save(3)
    assert steps_in(tmp_path) == [3, 4, 6, 8]


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
    done = "removed step-1.partial, put back step-2, which was being replaced, removed step-4.partial"
    assert line == f"checkpoint: a save was cut short by a kill: {done}"
    assert [path.name for path in folder.iterdir()] == ["step-2"]


def test_a_reader_leaves_leftovers_alone(tmp_path: Path) -> None:
    Job(tmp_path).step_and_save(2)
    (tmp_path / "checkpoint/step-4.partial").mkdir()
    assert Job(tmp_path, load_only=True).checkpointer.load() == 2
    assert (tmp_path / "checkpoint/step-4.partial").exists()


# Saves that fail


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """The system refuses every byte of a file beyond that; Python leaves SIGXFSZ ignored, so the write fails."""
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
    finally:
        subprocess.run(["umount", disk], check=True)


# In the background


class HeldBackWrites:
    """Every write of a checkpoint waits here until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.began = threading.Event()
        begin = checkpoint_files.begin

        def held_back(*where: Any) -> Path:
            self.began.set()
            assert self.go.wait(30)
            return begin(*where)

        monkeypatch.setattr(checkpoint_files, "begin", held_back)


def test_training_goes_on_while_a_copy_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, async_mode="async")
    job.checkpointer.load()
    job.train(2)
    there = job.everything()
    writes = HeldBackWrites(monkeypatch)
    job.checkpointer.save(2)
    assert writes.began.wait(30)
    job.train(3)  # changes every state while its copy waits to be written
    assert steps_in(tmp_path) == []
    writes.go.set()
    job.checkpointer.close()
    resumed = Job(tmp_path, seed=1)
    assert resumed.checkpointer.load() == 2
    assert same(resumed.everything(), there)


def test_a_save_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path, async_mode="async", keep_latest_k=2)
    writes = HeldBackWrites(monkeypatch)
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


def test_a_failure_in_the_background_is_raised_once_by_the_next_call(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_text("a file where the folder should be")
    job = Job(tmp_path, async_mode="async")
    job.step_and_save(2)
    with pytest.raises(CheckpointFailed, match="checkpoint: step 2 not saved"):
        job.checkpointer.save(3)
    job.checkpointer.wait()


def test_buffers_are_made_before_training_and_used_again(tmp_path: Path) -> None:
    job = Job(tmp_path, async_mode="async")
    job.checkpointer.load()
    snapshot, _ = job.checkpointer._prepared()
    buffers = {name: buffer.data_ptr() for name, buffer in snapshot._buffers.items()}
    assert len(buffers) == 8 + 3 * 5  # weights and buffers of the model, three tensors a parameter of the optimizer
    job.step_and_save(2, 4)
    job.checkpointer.close()
    assert {name: buffer.data_ptr() for name, buffer in snapshot._buffers.items()} == buffers


def test_a_copy_is_of_everything_that_can_change() -> None:
    live: dict[str, Any] = {"model": {"w": torch.ones(3)}, "ledger": {"step": 1, "pending": {"a": [1]}}}
    snapshot = Snapshot(pinned=False)
    taken = snapshot.take(live)
    live["model"]["w"].zero_()
    live["ledger"]["pending"]["a"].append(2)
    assert taken["ledger"] == {"step": 1, "pending": {"a": [1]}}
    assert snapshot._buffers["model.w"].equal(torch.ones(3))


# Weights alone, and beginnings


def test_the_last_save_can_be_the_weights_alone(tmp_path: Path) -> None:
    job = Job(tmp_path, last_save_model_only=True, export_dtype="bfloat16")
    job.step_and_save(2)
    job.train(2)
    job.checkpointer.save(4, last=True)
    assert job.checkpointer.exported_step() == 4
    copy = Job(tmp_path, seed=1)
    assert copy.checkpointer.exported_step() == 4
    assert copy.checkpointer.load() == 2  # what can be gone on from

    weights = Job(tmp_path / "other", seed=1, initial_load_path=str(tmp_path / "checkpoint/step-4"))
    assert weights.checkpointer.load() is None
    expected = {name: value.bfloat16().float() for name, value in job.model.named_parameters()}
    assert same(dict(weights.model.named_parameters()), expected)
    assert weights.model.get_buffer("1.num_batches_tracked") == 4


def test_the_weights_alone_take_the_place_of_a_full_checkpoint_of_the_last_step(tmp_path: Path) -> None:
    job = Job(tmp_path, last_save_model_only=True)
    job.step_and_save(2, 4)
    job.checkpointer.save(4, last=True)
    assert job.checkpointer.exported_step() == 4
    assert Job(tmp_path).checkpointer.load() == 2


def test_weights_alone_are_not_gone_on_from(tmp_path: Path) -> None:
    job = Job(tmp_path, last_save_model_only=True)
    job.checkpointer.save_seed()
    job.train(2)
    job.checkpointer.save(2, last=True)
    with pytest.raises(
        ValueError, match=r"step 2 in .* holds the weights alone .*checkpoint.initial_load_path = \".*/step-2\""
    ):
        Job(tmp_path).checkpointer.load()
    assert Job(tmp_path, load_step=0).checkpointer.load() == 0


def test_a_run_begins_with_its_seed(tmp_path: Path) -> None:
    Job(tmp_path, seed=3).checkpointer.save_seed()
    job = Job(tmp_path, seed=4)
    assert job.checkpointer.load() == 0
    assert job.checkpointer.exported_step() is None
    assert same(job.everything(), Job(tmp_path, seed=3).everything())


def test_a_seed_is_made_of_fresh_weights(tmp_path: Path) -> None:
    for _ in range(2):  # the second takes the place of the first
        job = Job(tmp_path, seed=3, create_seed_checkpoint=True)
        assert job.checkpointer.load() is None
        job.checkpointer.save_seed()
    Job(tmp_path).step_and_save(2)
    with pytest.raises(ValueError, match=r"create_seed_checkpoint = true: .* holds step 2 of a run that has begun"):
        Job(tmp_path, create_seed_checkpoint=True).checkpointer.load()


def test_load_step(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.step_and_save(2)
    there = job.everything()
    job.step_and_save(4, 6)
    again = Job(tmp_path, load_step=2)
    assert again.checkpointer.load() == 2
    assert same(again.everything(), there)
    with pytest.raises(ValueError, match=r"checkpoint\.load_step = 5: not in .*; steps there: 2, 4, 6; nearest: 4"):
        Job(tmp_path, load_step=5).checkpointer.load()
    with pytest.raises(ValueError, match=r"checkpoint\.load_step = 5: not in .*; there are no checkpoints in it"):
        Job(tmp_path / "other", load_step=5).checkpointer.load()
    flip_a_bit(data_file(tmp_path, 4))
    with pytest.raises(CheckpointFailed, match=r"\(step 4: __0_0\.distcp: bytes .*\); set another load_step"):
        Job(tmp_path, load_step=4).checkpointer.load()


def test_another_runs_weights_are_a_beginning(tmp_path: Path) -> None:
    first = Job(tmp_path / "first")
    first.step_and_save(2)
    path = str(tmp_path / "first/checkpoint/step-2")

    tuned = Job(tmp_path / "tuned", seed=1, initial_load_path=path)
    assert tuned.checkpointer.load() is None
    assert same(tuned.model.state_dict(), first.model.state_dict())
    assert tuned.ledger.state == {"step": 0, "position": 0}

    whole = Job(tmp_path / "whole", seed=1, initial_load_path=path, initial_load_model_only=False)
    assert whole.checkpointer.load() == 2
    assert same(whole.everything(), first.everything())

    tuned.step_and_save(1)
    resumed = Job(tmp_path / "tuned", seed=2, initial_load_path=path)
    assert resumed.checkpointer.load() == 1  # its own now
    assert same(resumed.everything(), tuned.everything())


def test_a_part_of_another_runs_weights(tmp_path: Path) -> None:
    first = Job(tmp_path / "first")
    first.step_and_save(2)
    path = str(tmp_path / "first/checkpoint/step-2")
    tuned = Job(tmp_path / "tuned", seed=1, initial_load_path=path, exclude_from_loading=("model.2",))
    tuned.model[2] = head = nn.Linear(5, 9)
    before = head.weight.detach().clone()
    tuned.checkpointer.load()
    assert head.weight.equal(before)
    assert tuned.model.get_parameter("0.weight").equal(first.model.get_parameter("0.weight"))
    with pytest.raises(ValueError, match=r'exclude_from_loading: no name begins with "model\.head"'):
        Job(tmp_path / "other", initial_load_path=path, exclude_from_loading=("model.head",)).checkpointer.load()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_another_programs_checkpoint_is_a_beginning_with_a_warning(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import save

    first = Job(tmp_path / "first")
    save({"model": first.model.state_dict()}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    job = Job(tmp_path / "mine", seed=1, initial_load_path=str(tmp_path / "theirs"))
    assert job.checkpointer.load() is None
    assert same(job.model.state_dict(), first.model.state_dict())
    assert len(job.log.warnings) == 1 and "not verified" in job.log.warnings[0]


def test_a_beginning_that_is_damaged_or_none(tmp_path: Path) -> None:
    Job(tmp_path / "first").step_and_save(2)
    run = tmp_path / "first"

    def message(path: Path) -> str:
        with pytest.raises(ValueError) as error:
            CheckpointConfig(initial_load_path=str(path)).check_files()
        return str(error.value).removeprefix(f'checkpoint.initial_load_path = "{path}": ')

    assert message(run) == f'a folder of checkpoints, not one of them; nearest: "{run}/checkpoint/step-2"'
    assert message(run / "checkpoint/step-4") == "no such folder; steps there: 2; nearest: 2"
    assert message(tmp_path) == "not a checkpoint, as it has no file .metadata"
    flip_a_bit(data_file(run, 2))
    with pytest.raises(CheckpointFailed, match=r"initial_load_path = .*: damaged: __0_0\.distcp: bytes"):
        Job(tmp_path / "mine", initial_load_path=str(run / "checkpoint/step-2")).checkpointer.load()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"initial_load_path": "x", "enable": False}, 'initial_load_path = "x": needs checkpoint.enable = true'),
        ({"create_seed_checkpoint": True, "enable": False}, "create_seed_checkpoint = true: needs checkpoint.enable"),
        ({"folder": "./"}, 'folder = "./": must be a folder of its own; nearest: "checkpoint"'),
        ({"create_seed_checkpoint": True, "load_only": True}, "load_only = true: no seed checkpoint would be written"),
        ({"create_seed_checkpoint": True, "initial_load_path": "x"}, 'initial_load_path = "x": a seed holds freshly'),
        ({"exclude_from_loading": ("a", "b")}, 'exclude_from_loading = ["a", "b"]: needs checkpoint.initial_load_path'),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"checkpoint.{message}")):
        CheckpointConfig(**settings).check()
