"""Checkpoints in an object store, without tensors: the objects after each operation, and the uploader's messages if the store fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.s3_server import BUCKET, S3Server, use
from tests.unit.fakes import Lines, set_package
from training import checkpoint_files
from training.checkpoint_files import CheckpointFailed, Damaged, Digest, FileRecord, Manifest
from training.object_store import ObjectStore, Uploader, check_url, local_run, object_name
from training.writer_lease import SoloLease

WAIT_S = 50.0


class Killed(BaseException):
    """The end of a process; no handler for Exception catches it."""


class MortalStore(MemoryFileSystem):
    """A store whose client is killed before its `left`th change."""

    protocol = "mortal"
    left: int | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(str(path).removeprefix("mortal:/"))

    def _change(self) -> None:
        cls = type(self)
        if cls.left is not None:
            if cls.left == 0:
                raise Killed
            cls.left -= 1

    def pipe_file(self, *arguments: Any, **options: Any) -> None:
        self._change()
        super().pipe_file(*arguments, **options)

    def put_file(self, *arguments: Any, **options: Any) -> None:
        self._change()
        super().put_file(*arguments, **options)

    def rm_file(self, path: str) -> None:
        self._change()
        super()._rm(path)


class CountedStore(MemoryFileSystem):
    """A store that counts what is read of it. `both`: each read waits for another one."""

    protocol = "counted"
    reads: ClassVar[list[str]] = []
    both: threading.Barrier | None = None

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return MemoryFileSystem._strip_protocol(str(path).removeprefix("counted:/"))

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        self.reads.append(path)
        if self.both is not None:
            self.both.wait(WAIT_S)
        return super().cat_file(path, *arguments, **options)


fsspec.register_implementation("mortal", MortalStore, clobber=True)
fsspec.register_implementation("counted", CountedStore, clobber=True)


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    if request.param == "memory":
        MemoryFileSystem.store.clear()
        yield ObjectStore("memory://runs/a")
    else:
        use(request.getfixturevalue("server"), monkeypatch)
        yield ObjectStore(f"s3://{BUCKET}/runs/a")


@pytest.fixture
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.close()


def checkpoint(
    folder: Path,
    step: int,
    content: str = "",
    kind: str = "full",
    *,
    outside_quorum: bool = False,
    size_bytes: int = 999,
    branch: int = 0,
) -> Path:
    """Saves two files on disk."""
    partial, records = checkpoint_files.begin(folder, step), list[FileRecord]()
    for name in ("__0_0.distcp", ".metadata"):
        data, digest = f"{step} {content} {name}".ljust(size_bytes).encode(), Digest()
        (partial / name).write_bytes(data)
        digest.update(memoryview(data))
        records.append(digest.record(name))
    manifest = Manifest(step, kind, ("model",), 1, "2", tuple(records), outside_quorum, branch=branch)
    return checkpoint_files.publish(folder, manifest)


def newest(store: ObjectStore, folder: Path) -> int:
    """Returns the newest step of the store, all of whose checkpoints are complete and verified."""
    return max(checkpoint_files.read_manifest(store.fetch(step, folder)).step for step in store.steps())


def test_what_was_put_comes_back(store: ObjectStore, tmp_path: Path):
    path = checkpoint(tmp_path / "here", 4)
    assert store.steps() == []
    store.put(path)
    assert store.steps() == [4]
    there = store.fetch(4, tmp_path / "there")
    assert {file.name: file.read_bytes() for file in there.iterdir()} == {
        file.name: file.read_bytes() for file in path.iterdir()
    }
    before = (there / ".metadata").stat().st_ino
    assert store.fetch(4, tmp_path / "there") == there and (there / ".metadata").stat().st_ino == before


def test_a_second_writer_is_refused(store: ObjectStore, tmp_path: Path):
    first, second = checkpoint(tmp_path / "1", 4), checkpoint(tmp_path / "2", 4, "other")
    manifest = store.put(first)
    store.put(first)  # the answer to the first attempt was lost
    with pytest.raises(OSError, match="another writer has put step 4 there"):
        store.put(second)
    store.remove_leftovers()
    assert store.manifest(4) == manifest
    assert checkpoint_files.read_manifest(store.fetch(4, tmp_path / "3")) == manifest
    other = store.put(second, replaces=lambda found: found == manifest)
    store.remove_leftovers()
    assert checkpoint_files.read_manifest(store.fetch(4, tmp_path / "3")) == other
    assert len(store.objects()[4]) == 3


def test_damage_is_found(store: ObjectStore, tmp_path: Path):
    manifest = store.put(checkpoint(tmp_path / "here", 4))
    file_system, root = store.file_system_and_root
    for damage in (b"x" * manifest.files[0].size_bytes, b"short", None):
        path = f"{root}/step-4/{object_name(manifest.files[0])}"
        file_system.rm_file(path) if damage is None else file_system.pipe_file(path, damage)
        with pytest.raises(Damaged, match=r"__0_0\.distcp"):
            store.fetch(4, tmp_path / "there")
        assert list((tmp_path / "there").iterdir()) == []
    store.put(checkpoint(tmp_path / "here", 4))  # sends what is missing
    store.fetch(4, tmp_path / "there")
    file_system.pipe_file(path, b"x" * manifest.files[0].size_bytes)
    store.put(checkpoint(tmp_path / "here", 4), again=True)
    store.fetch(4, tmp_path / "elsewhere")


def test_an_interrupted_fetch_goes_on(store: ObjectStore, tmp_path: Path):
    """Segments on the disk are not fetched again (here those of the first file); files of another run's fetch are removed."""
    manifest, sizes = store.put(checkpoint(tmp_path / "here", 4)), list[int]()

    def killed(count: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        store.fetch(4, tmp_path / "there", on_bytes=killed)
    [partial] = (tmp_path / "there").iterdir()
    assert partial.name == "step-4.partial-fetch-0"
    (partial / "__9_0.distcp").touch()
    (partial / ".metadata").unlink()
    file_system, root = store.file_system_and_root
    file_system.pipe_file(f"{root}/step-4/{object_name(manifest.files[0])}", b"x" * manifest.files[0].size_bytes)
    path = store.fetch(4, tmp_path / "there", on_bytes=sizes.append)
    assert checkpoint_files.read_verified(path) == manifest and sizes == [999, 999]
    assert [*(tmp_path / "there").iterdir()] == [path] and len([*path.iterdir()]) == 3
    with pytest.raises(Damaged):
        store.fetch(4, tmp_path / "there", fetcher="b", again=True)
    assert checkpoint_files.read_verified(path) == manifest


def test_a_fetch_leaves_nothing_of_an_earlier_step_and_replaces_no_equal_one(store: ObjectStore, tmp_path: Path):
    """Two groups share a folder and fetch at the same time: the first copy is read while the second fetch ends."""
    for step in (4, 6):
        store.put(checkpoint(tmp_path / "here", step))

    def killed(count: int) -> None:
        raise Killed

    with pytest.raises(Killed):
        store.fetch(4, tmp_path / "there", on_bytes=killed)
    assert store.fetch(6, tmp_path / "there") == tmp_path / "there" / "step-6"
    assert checkpoint_files.list_steps(tmp_path / "there") == [6] and len([*(tmp_path / "there").iterdir()]) == 1
    read = set[int]()

    def faster(count: int) -> None:
        read.add((store.fetch(4, tmp_path / "there", fetcher="b") / ".metadata").stat().st_ino)

    path = store.fetch(4, tmp_path / "there", fetcher="a", on_bytes=faster)
    assert read == {(path / ".metadata").stat().st_ino} and len([*(tmp_path / "there").iterdir()]) == 2


def test_a_file_of_several_segments_comes_back(tmp_path: Path):
    store, sizes = ObjectStore("memory://runs/long"), list[int]()
    manifest = store.put(checkpoint(tmp_path / "here", 4, size_bytes=checkpoint_files.SEGMENT_BYTES + 999))
    assert checkpoint_files.read_verified(store.fetch(4, tmp_path / "there", on_bytes=sizes.append)) == manifest
    assert sizes == [checkpoint_files.SEGMENT_BYTES, 999] * 2
    MemoryFileSystem.store.clear()


def test_old_ones_are_removed(store: ObjectStore, tmp_path: Path):
    for step, kind in ((1, "full"), (2, "model"), (3, "full"), (4, "full"), (5, "full")):
        store.put(checkpoint(tmp_path, step, kind=kind))
    store.remove_older(2, written=5)
    store.remove_leftovers()
    assert sorted(store.objects()) == store.steps() == [2, 4, 5]
    store.remove_older(0, written=5)
    assert store.steps() == [2, 4, 5]


def test_an_upload_does_not_read_the_manifest_of_each_earlier_one(tmp_path: Path):
    """A run that keeps all of thousands would read them all after each save."""
    MemoryFileSystem.store.clear()
    store, reads = ObjectStore("counted://runs/a"), CountedStore.reads
    for step in range(1, 9):
        store.put(checkpoint(tmp_path, step))
        reads.clear()
        store.remove_older(0, written=step)
        store.remove_leftovers()
        assert [path.rpartition("runs/a/")[2] for path in reads] == [f"step-{step}/manifest.json"]
    store.put(checkpoint(tmp_path, 3, "again"), replaces=lambda found: True)
    store.remove_leftovers()
    assert store.objects().keys() == set(range(1, 9)) and {len(objects) for objects in store.objects().values()} == {3}
    MemoryFileSystem.store.clear()


def test_a_start_asks_for_several_objects_at_once(tmp_path: Path):
    """A store has the manifest of each checkpoint, and a segment of each file for each upload: thousands after weeks."""
    MemoryFileSystem.store.clear()
    store, here, there = ObjectStore("counted://runs/a"), tmp_path / "here", tmp_path / "there"
    for step in (1, 2, 3, 4):
        store.put(checkpoint(here, step))
        with (here / "rows.jsonl").open("a") as rows:
            rows.write(f"{step}\n")
        store.put_files(here, ["rows.jsonl"])
    CountedStore.both = threading.Barrier(2)
    try:
        assert [found.step for found in store.manifests().values() if found] == [1, 2, 3, 4]
        store.fetch_files(there)
    finally:
        CountedStore.both = None
    assert (there / "rows.jsonl").read_text() == "1\n2\n3\n4\n"
    MemoryFileSystem.store.clear()


def test_unfinished_uploads_are_ended(server: S3Server, monkeypatch: pytest.MonkeyPatch):
    file_system, store = use(server, monkeypatch), ObjectStore(f"s3://{BUCKET}/runs/a")
    for key in ("runs/a/step-4/x", "runs/other/step-4/x"):
        file_system.call_s3("create_multipart_upload", Bucket=BUCKET, Key=key)
    file_system.pipe_file(f"{BUCKET}/runs/a/step-4/y", b"of no checkpoint")
    store.remove_leftovers()
    left = file_system.call_s3("list_multipart_uploads", Bucket=BUCKET)["Uploads"]
    assert [upload["Key"] for upload in left] == ["runs/other/step-4/x"]
    assert store.objects() == {}


def test_a_kill_at_any_operation_leaves_the_newest_checkpoint(tmp_path: Path):
    """Requests of an upload that follows two others, one of which it removes."""
    paths = [checkpoint(tmp_path / "here", step) for step in (2, 4, 6)]
    found, kills = [], 0
    while True:
        MemoryFileSystem.store.clear()
        store = ObjectStore(f"mortal://runs/{kills}")
        MortalStore.left = None
        store.put(paths[0])
        store.put(paths[1])
        MortalStore.left = kills
        try:
            store.put(paths[2])
            store.remove_older(2, written=6)
            store.remove_leftovers()
            break
        except Killed:
            MortalStore.left = None
            step = newest(store, tmp_path / f"after{kills}")
            found.append(step)
            store.remove_leftovers()  # of the next start
            assert store.objects().keys() == set(store.steps())
            assert newest(store, tmp_path / f"again{kills}") == step
            store.put(paths[2])
            store.remove_older(2, written=6)
            store.remove_leftovers()
        finally:
            MortalStore.left = None
        assert store.steps() == sorted(store.objects()) == [4, 6]
        kills += 1
    assert found == [4, 4, 4, 6, 6, 6]  # two files and the manifest; then the old manifest and its files


def test_files_that_grow_are_put_as_segments(store: ObjectStore, tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    for count, lines in enumerate(
        ["1\n2\n", "1\n2\n3\n", "1\n2\n3\n4\n", "1\n2\nthree\n", "1\n2\nthree\n", "1\n", "1\n2\n"]
    ):
        (here / "tb").mkdir(parents=True, exist_ok=True)
        (here / "rows.jsonl").write_text(lines)
        (here / "tb" / f"events.{count}").write_bytes(b"charts")
        store.put_files(here, ["rows.jsonl", "tb/*", "missing"])
        store.put_files(here, ["rows.jsonl"])
        store.fetch_files(there)
        assert (there / "rows.jsonl").read_text() == lines
        assert len([*(there / "tb").iterdir()]) == count + 1
    assert [(first, size) for first, size, _ in store.file_segments()["rows.jsonl"]] == [(0, 2), (2, 2)]
    assert store.objects() == {}


@pytest.mark.parametrize(
    "after", ["1\n2\nthree\n4\n5\n", "1\n2\nthree\n", "1\n2\n3\nfour\n", "one\n", "one\n2\nthree\n4\n5\n6\n"]
)
def test_a_kill_at_any_operation_leaves_the_old_or_the_new_files(tmp_path: Path, after: str):
    """The old segments of a file whose end changed are removed after the new one is there."""
    before, kills = ["1\n2\n", "1\n2\n3\n4\n", "1\n2\n3\n4\n5\n"], 0
    here, there, killed = tmp_path / "here", tmp_path / "there", True
    for folder in (here, there):
        folder.mkdir()
    while killed:
        MemoryFileSystem.store.clear()
        store = ObjectStore(f"mortal://runs/{kills}")
        for text in before:
            (here / "rows.jsonl").write_text(text)
            store.put_files(here, ["rows.jsonl"])
        (here / "rows.jsonl").write_text(after)
        MortalStore.left = kills
        try:
            store.put_files(here, ["rows.jsonl"])
            killed = False
        except Killed:
            pass
        finally:
            MortalStore.left = None
        store.fetch_files(there)
        assert (there / "rows.jsonl").read_text() in ([before[-1], after] if killed else [after])
        for text in ([after], ["1\n2\n3\n", after], ["1\n2\n3\n4\n5\n6\n"])[kills % 3]:  # whatever the next launch puts
            (here / "rows.jsonl").write_text(text)
            store.put_files(here, ["rows.jsonl"])
            store.fetch_files(there)
            assert (there / "rows.jsonl").read_text() == text
            sizes = [size for _, size, _ in store.file_segments()["rows.jsonl"]]
            assert sum(sizes) == len(text), "no leftovers"
        kills += 1
    assert kills > 2
    MemoryFileSystem.store.clear()


def test_a_run_is_read_from_its_url(store: ObjectStore, tmp_path: Path):
    (tmp_path / "config.toml").write_text("the settings")
    store.put_files(tmp_path, ["config.toml"])
    for step, branch in ((2, 0), (4, 1), (6, 0)):  # step 6 is of the history before the run went back
        store.put(checkpoint(tmp_path, step, branch=branch))
    with local_run(store.url, -1) as run:
        assert (run / "config.toml").read_text() == "the settings" and checkpoint_files.list_steps(
            run / "checkpoint"
        ) == [4]
        # a damaged one is passed over, as on a disk
        file_system, root = store.file_system_and_root
        file_system.pipe_file(f"{root}/step-4/manifest.json", b"")
        file_system.rm_file(f"{root}/step-6/manifest.json")
    assert not run.exists()
    with local_run(store.url, -1) as run:
        assert checkpoint_files.list_steps(run / "checkpoint") == [2]
    with pytest.raises(Damaged), local_run(store.url, 4):
        pass
    with pytest.raises(ValueError, match=r"runs/a has steps 2, 4"), local_run(store.url, 3):
        pass
    with pytest.raises(ValueError, match=r"runs/b has no checkpoint"), local_run(store.url[:-1] + "b", -1):
        pass
    with local_run("outputs/llama", -1) as run:
        assert run == Path("outputs/llama")


class Uploads:
    """An uploader over the store of a server."""

    def __init__(
        self, server: S3Server, folder: Path, monkeypatch: pytest.MonkeyPatch, retry_s: float = 1000.0
    ) -> None:
        use(server, monkeypatch)
        self.now_s, self.told, self.log, self.folder, self.stored = 0.0, list[str](), Lines(), folder, threading.Event()
        self.store = ObjectStore(f"s3://{BUCKET}/runs/a")
        self.uploader = Uploader(
            self.store,
            folder,
            2,
            lease=SoloLease(),
            log=self.log,
            report=self.report,
            clock=lambda: self.now_s,
            retry_s=retry_s,
        )

    def report(self, text: str) -> None:
        self.told.append(text)
        if " is in " in text:
            self.stored.set()

    def wait(self) -> None:
        """Waits until the store has the newest save, or refuses it."""
        self.uploader.retry()
        assert self.uploader.wait(WAIT_S)

    def save(self, step: int) -> None:
        checkpoint(self.folder, step)
        self.uploader.enqueue(step)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("full", "as the test wants it"), ("denied", "as the test wants it"), ("broken", "s3://bucket/runs/a: ")],
)
def test_a_store_that_fails_delays_no_save(
    fault: str, reason: str, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    uploads = Uploads(server, tmp_path, monkeypatch)
    server.fault = fault
    uploads.save(2)
    with pytest.raises(
        CheckpointFailed, match=r"^checkpoint: step 2 is not in s3://bucket/runs/a: .*; it is in .*/step-2, and"
    ) as failed:
        uploads.wait()
    assert reason in str(failed.value)
    assert (
        uploads.told[0].startswith("checkpoint: step 2 is not in s3://bucket/runs/a yet: ")
        and reason in uploads.told[0]
    )
    assert uploads.told[0].endswith("; retried every 1000 s")
    uploads.now_s = 50.0
    uploads.save(4)
    assert uploads.told[1].startswith("checkpoint: step 4 waits: s3://bucket/runs/a has not taken step 2 for 50 s: ")
    server.fault = ""
    uploads.wait()
    assert uploads.store.steps() == [4]
    assert uploads.told[2:] == ["checkpoint: step 4 is in s3://bucket/runs/a, after 50 s"]
    uploads.save(6)
    uploads.uploader.close()
    uploads.uploader.close()
    assert uploads.store.steps() == [4, 6] and len(uploads.told) == 3


def test_a_slow_store_delays_no_save(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Saves continue; of the waiting ones only the newest is uploaded next."""
    uploads = Uploads(server, tmp_path, monkeypatch)
    uploads.save(2)
    uploads.wait()
    server.fault = "slow"
    uploads.save(4)
    assert server.met.wait(WAIT_S)
    uploads.now_s = 40.0
    uploads.save(6)
    uploads.save(8)
    assert uploads.told[0] == (
        "checkpoint: step 6 waits: s3://bucket/runs/a has not taken step 4 for 40 s: no answer yet; training continues"
    )
    assert uploads.uploader.in_use == {4, 8}
    assert not uploads.uploader.wait(0.0) and not uploads.uploader.wait(0.0)
    assert uploads.told[2:] == [
        "checkpoint: the end of the run waits: s3://bucket/runs/a has not taken step 8 for 40 s: no answer yet"
    ]
    server.fault = ""
    server.lets_go.set()
    uploads.uploader.close()
    assert uploads.store.steps() == [4, 8]


def test_a_step_that_is_saved_again_during_its_upload_is_put_again(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    uploads = Uploads(server, tmp_path, monkeypatch)
    server.fault = "slow"
    uploads.save(2)
    assert server.met.wait(WAIT_S)
    checkpoint(tmp_path, 2, "other")
    uploads.uploader.enqueue(2)
    server.fault = ""
    server.lets_go.set()
    uploads.wait()
    uploads.uploader.close()
    assert checkpoint_files.read_verified(uploads.store.fetch(2, tmp_path / "there")) == checkpoint_files.read_manifest(
        tmp_path / "step-2"
    )


def test_a_failed_upload_is_retried_by_itself(server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uploads = Uploads(server, tmp_path, monkeypatch, retry_s=0.01)
    server.fault = "denied"
    uploads.save(2)
    assert server.met.wait(WAIT_S)
    server.fault = ""
    assert uploads.stored.wait(WAIT_S) and uploads.store.steps() == [2]
    uploads.uploader.close()


def test_which_urls_are_legal(monkeypatch: pytest.MonkeyPatch):
    check_url("checkpoint.folder", "memory://bucket/runs")
    with pytest.raises(
        ValueError, match=r'^k = "s4://b/x": no such store; legal: a folder, s3://, gs://; nearest: "s3://b/x"$'
    ):
        check_url("k", "s4://b/x")
    with pytest.raises(ValueError, match=r'^k = "s3://": must name a bucket; nearest: "s3://BUCKET/checkpoints"$'):
        check_url("k", "s3://")
    set_package(monkeypatch, "gcsfs", None)
    with pytest.raises(
        ValueError, match=r'^k = "gs://b/x": needs the package gcsfs, .* -m pip install -e "\.\[gcs\]"$'
    ):
        check_url("k", "gs://b/x")
