"""A damaged checkpoint is refused by name, and the one before it is used."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.checkpoint_job import Job, data_file, flip_a_bit, same
from tests.unit.fakes import Lines
from training import checkpoint_files
from training.checkpoint import CheckpointFailed
from training.states import ModelState


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
        r"manifest\.json: checksum mismatch",
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


def test_every_segment_is_looked_at_by_one_of_the_ranks(tmp_path: Path) -> None:
    segment_bytes = checkpoint_files.SEGMENT_BYTES
    content, digest = bytes(2 * segment_bytes + 300_003), checkpoint_files.Digest()
    for start, stop in ((0, 1), (1, 300_000), (300_000, 300_000), (300_000, len(content))):
        digest.update(memoryview(content)[start:stop])
    record = digest.record("file")
    assert (record.size_bytes, len(record.digests)) == (len(content), 3)
    manifest = checkpoint_files.Manifest(2, "full", (), 1, "", (record,))
    for segment in range(3):
        with (tmp_path / "file").open("wb") as file:
            file.truncate(len(content))
            file.seek(segment * segment_bytes + 200_000)
            file.write(b"\1")
        told = {share: line for share in range(2) if (line := damage_seen_by(tmp_path, manifest, share, 2))}
        assert list(told) == [segment % 2]
        assert told[segment % 2].startswith(f"file: bytes {segment * segment_bytes:,} to ")


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
        CheckpointFailed, match=r"no .* is intact \(step 4: __0_0.distcp: missing; step 2: __0_0.distcp: by"
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
    refused(
        nn.Sequential(*layers, nn.Linear(3, 3)),
        r"model\.3\.weight is in this run but not in the checkpoint; model\.3\.bias is in this run",
    )
    refused(
        nn.Sequential(*layers[:2]),
        r"model\.2\.bias is in the checkpoint but not in this run; model\.2\.weight is in the checkpoint but not in this run$",
    )
    refused(nn.Sequential(*layers[:1]), r".* \(and 4 more\)$")
    with pytest.raises(ValueError, match=r"model\.0\.weight is torch.float32 there and torch.bfloat16 here"):
        Job(tmp_path, dtype=torch.bfloat16).checkpointer.load()


def test_no_state_is_forgotten_when_the_loader_of_a_stream_has_one(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.states["loader"] = stream = Lines()  # any object will do
    stream.state_dict = lambda: {"dp_rank_0": b"cursor"}  # type: ignore[attr-defined]
    job.step_and_save(2)
    with pytest.raises(ValueError, match=r"loader\.dp_rank_0 is in the checkpoint but not in this run"):
        Job(tmp_path).checkpointer.load()
