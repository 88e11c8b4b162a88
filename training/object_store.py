"""Checkpoints in an object store (S3, Google Cloud Storage) through fsspec; the local folder keeps a copy (checkpoint_files.py).

Flow: checkpoint_fetch.py fetches what a launch or a rewind continues from; checkpoint.py offers each save to Uploader, whose thread puts
it into the store.

    <checkpoint.folder>/<job.name>/step-40/__0_0.distcp.5d41402abc4b...    a file, under its name and digest
    <checkpoint.folder>/<job.name>/step-40/manifest.json                   put last, unless there is one: now the checkpoint exists
    <checkpoint.folder>/<job.name>/files/metrics.jsonl/000000000004096.5d4... a segment: what the file has from there on

A store has no rename. A file's name has its digest, so that a repeated upload sends only what is missing, and a checkpoint that replaces
one of the same step leaves the files of the old one alone until the new manifest exists. Removal takes the manifest first. A segment that
replaces older ones has a higher generation number as its suffix (.1, .2, ...); readers use the newest generation, so the replacement takes
effect with that one object."""

from __future__ import annotations

import difflib
import functools
import hashlib
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from training import checkpoint_files
from training.checkpoint_files import MANIFEST, CheckpointFailed, Damaged, FileRecord, Manifest
from training.config import need
from training.durable_files import replace_file
from training.log import Log
from training.progress import Clock, duration
from training.writer_lease import FETCH, WriterLease

RETRY_S = 30.0  # from a failed upload to its retry
FETCH_THREADS = 8  # objects that are fetched at once; a segment of a checkpoint takes twice its size of memory
SLOW_S = 10.0  # a longer upload is reported when the next checkpoint waits for it
# scheme -> package, extra of pyproject.toml. memory:// lasts as long as the process, for tests
DRIVERS = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs"), "memory": ("fsspec", "s3")}
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
FILES = "files"  # beside the steps: segments of the run's other files
ABANDONED = "abandoned"  # beside the steps: checkpoints newer than a load_step from which the run began again
_OBJECT = re.compile(r"step-(\d+)/([^/]+)")


def is_url(folder: str) -> bool:
    """Returns True for the URL of an object store, False for a folder."""
    return _URL.match(folder) is not None


def check_url(key: str, url: str) -> None:
    """Raises ValueError unless the URL names a place in a store whose driver is installed. Connects to nothing."""
    match = _URL.fullmatch(url)
    assert match
    scheme, place = match.groups()
    if scheme not in DRIVERS:
        legal = [name for name in DRIVERS if name != "memory"]
        near = difflib.get_close_matches(scheme.lower(), legal, n=1, cutoff=0) or legal
        names = ", ".join(f"{name}://" for name in legal)
        raise ValueError(f'{key} = "{url}": no such store; legal: a folder, {names}; nearest: "{near[0]}://{place}"')
    if not place.strip("/"):
        raise ValueError(f'{key} = "{url}": must name a bucket; nearest: "{scheme}://BUCKET/checkpoints"')
    package, extra = DRIVERS[scheme]
    need(package, extra=extra, setting=f'{key} = "{url}"')


class ObjectStore:
    """The checkpoints below `url`. Methods raise OSError, and Damaged where they read a manifest. Credentials and endpoint are those of
    the driver's environment variables."""

    def __init__(self, url: str) -> None:
        self.url = url
        # step -> hash of its objects, all of which its manifest was found to refer to
        self._without_leftovers = dict[int, int]()

    @functools.cached_property
    def file_system_and_root(self) -> tuple[Any, str]:
        """The file system and the path in it. Made when first used: the import of a driver takes a second."""
        from fsspec.core import url_to_fs

        file_system, path = url_to_fs(self.url, use_listings_cache=False)  # other processes write there
        return file_system, str(path).rstrip("/")

    def objects(self) -> dict[int, dict[str, int]]:
        """Returns the bytes of each object of each step: {40: {"manifest.json": 912, ...}}, with and without a manifest."""
        with _os_errors(self.url):
            file_system, root = self.file_system_and_root
            found: dict[int, dict[str, int]] = {}
            for path, entry in file_system.find(root, detail=True).items():
                if match := _OBJECT.fullmatch(path[len(root) + 1 :]):
                    found.setdefault(int(match[1]), {})[match[2]] = entry["size"]
            return found

    def steps(self) -> list[int]:
        """Returns the steps whose checkpoints exist, ascending."""
        return sorted(step for step, objects in self.objects().items() if MANIFEST in objects)

    def manifests(self) -> dict[int, Manifest | None]:
        """Returns the manifest of each step, ascending; None: it is damaged."""

        def manifest(step: int) -> Manifest | None:
            try:
                return self.manifest(step)
            except Damaged:
                return None

        steps = self.steps()
        with ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="checkpoint-manifests") as pool:
            return dict(zip(steps, pool.map(manifest, steps), strict=True))

    def is_ahead_of(self, folder: Path) -> bool:
        """Returns True if the newest full checkpoint here is newer than that of a folder."""
        local_recency = checkpoint_files.recency(folder, checkpoint_files.newest(folder))
        return any(
            found.recency > local_recency for found in self.manifests().values() if found and found.kind == "full"
        )

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of a step. Raises Damaged if there is none."""
        try:
            return Manifest.from_json(self._call("cat_file", f"step-{step}/{MANIFEST}"))
        except FileNotFoundError:
            raise Damaged(f"{MANIFEST}: missing") from None

    def put(
        self, path: Path, *, replaces: Callable[[Manifest | None], bool] = lambda found: False, again: bool = False
    ) -> Manifest:
        """Copies the checkpoint in the folder `path` into the store; its manifest last, and only if the step has none, or an equal one, or
        one that `replaces` accepts (None: damaged). `again`: files that the store has are sent again, as they may be damaged."""
        manifest = checkpoint_files.read_manifest(path)
        folder, present = f"step-{manifest.step}/", {} if again else self.objects().get(manifest.step, {})
        for file in manifest.files:
            if present.get(object_name(file)) != file.size_bytes:
                self._call("put_file", folder + object_name(file), source=str(path / file.name))
        present = self.objects().get(manifest.step, {})
        if missing := [file.name for file in manifest.files if present.get(object_name(file)) != file.size_bytes]:
            raise OSError(
                f"{missing[0]} was removed during the upload: has another launch or writer of this run begun?"
            )
        text = manifest.to_json().encode()
        try:
            self._call("pipe_file", folder + MANIFEST, text, mode="create")
        except OSError as error:  # FileExistsError, but not every store with S3's interface says why it refuses
            if MANIFEST not in self.objects().get(manifest.step, {}):
                raise error from None
            found: Manifest | None = None
            with suppress(Damaged):
                found = self.manifest(manifest.step)
            if found != manifest and not replaces(found):
                why = f"another writer has put step {manifest.step} there: is this run trained twice?"
                raise FileExistsError(why) from None
            if found != manifest:
                self._call("pipe_file", folder + MANIFEST, text)
        return manifest

    def fetch(
        self,
        step: int,
        folder: Path,
        *,
        fetcher: str = "",
        again: bool = False,
        on_bytes: Callable[[int], object] = lambda count: None,
    ) -> Path:
        """Copies a checkpoint into `folder`, several segments at once, verifies it, and returns its place. Unless `again`, a local
        checkpoint with an equal manifest and files of those sizes stays, unverified. An interrupted fetch continues: the segments that are
        on disk stay, if they verify; those of another step are removed. `fetcher`: sets apart processes that share the folder. `on_bytes`:
        called for the bytes of each segment; what it raises ends the fetch. Raises Damaged."""
        manifest, target = self.manifest(step), checkpoint_files.step_folder(folder, step)

        def is_present() -> bool:
            with suppress(Damaged):
                return not again and checkpoint_files.read_manifest(target) == manifest
            return False

        if is_present():
            return target
        present, suffix = self.objects().get(step, {}), fetch_suffix(fetcher)
        is_begun = checkpoint_files.step_folder(folder, step, f".partial{suffix}").exists()
        partial = checkpoint_files.begin(folder, step, suffix, keep=True)
        for other in folder.glob("step-*"):
            if other != partial and other.name.endswith(f".partial{suffix}"):
                shutil.rmtree(other)  # the disk may have no room for both

        def fetch_segment(segment: checkpoint_files.FileSegment) -> int:
            file, first, end, _ = segment
            if is_begun:
                with suppress(Damaged):
                    checkpoint_files.verify_segment(partial, segment)
                    return end - first
            content = self._call("cat_file", f"step-{step}/{object_name(file)}", start=first, end=end)
            with (partial / file.name).open("r+b") as copy:
                copy.seek(first)
                copy.write(content)
                copy.flush()
                os.fsync(copy.fileno())
            checkpoint_files.verify_segment(partial, segment)
            return end - first

        try:
            for stray in {path.name for path in partial.iterdir()} - {file.name for file in manifest.files}:
                (partial / stray).unlink()  # of another checkpoint of this step
            for file in manifest.files:
                if (size_bytes := present.get(object_name(file))) != file.size_bytes:
                    found = "missing" if size_bytes is None else f"{size_bytes:,} bytes"
                    raise Damaged(f"{object_name(file)}: {found}, {file.size_bytes:,} bytes were put")
                with (partial / file.name).open("ab") as copy:
                    copy.truncate(file.size_bytes)
            with ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="checkpoint-fetch") as pool:
                # an exception here cancels the rest
                for count in pool.map(fetch_segment, checkpoint_files.segments(manifest)):
                    on_bytes(count)
            if is_present():  # another group that shares the folder was faster, and reads it now
                checkpoint_files.remove_partial(folder, step, suffix)
                return target
            return checkpoint_files.publish(folder, manifest, suffix, is_copy=True)
        except Damaged:
            checkpoint_files.remove_partial(folder, step, suffix)
            raise

    def set_aside(self, step: int, manifest: Manifest) -> None:
        """Moves a checkpoint to abandoned/step-N, where no launch finds it, unless another one is in its place. A store has no rename, so
        its objects are copied, and `remove_leftovers` removes those that no manifest refers to any more."""
        try:
            if self.manifest(step) != manifest:
                return
        except Damaged:
            return
        digest = hashlib.blake2b(manifest.to_json().encode(), digest_size=16).hexdigest()
        for name in self.objects()[step]:
            copy = f"{name}.{digest}" if name == MANIFEST else name
            self._call(
                "cp_file", f"step-{step}/{name}", f"{self.file_system_and_root[1]}/{ABANDONED}/step-{step}/{copy}"
            )
        self._call("rm_file", f"step-{step}/{MANIFEST}")

    def file_segments(self) -> dict[str, list[tuple[int, int, str]]]:
        """Returns first byte, bytes and object of each segment of each file that was put, in order: {"metrics.jsonl": [...]}."""
        with _os_errors(self.url):
            file_system, root = self.file_system_and_root
            found: dict[str, list[tuple[int, int, str]]] = {}
            for path, entry in sorted(file_system.find(f"{root}/{FILES}", detail=True).items()):
                key = path[len(root) + 1 :]
                name, _, segment = key.removeprefix(f"{FILES}/").rpartition("/")
                found.setdefault(name, []).append((int(segment.partition(".")[0]), entry["size"], key))
            return found

    def put_files(self, folder: Path, patterns: Iterable[str]) -> None:
        """Puts what the store lacks of files that grow, and are cut when a run resumes. A store has no append, so each file is a sequence
        of segments: a new segment has what follows the last one that equals the file, and segments that differ are removed after it has
        been put, so that a kill leaves the old file or the new one."""
        names = {
            str(path.relative_to(folder)) for pattern in patterns for path in folder.glob(pattern) if path.is_file()
        }
        stored = self.file_segments() if names else {}
        for name in sorted(names):
            segments = _current_segments(stored.get(name, []))
            with (folder / name).open("rb") as file:
                while segments:
                    first, size, key = segments[-1]
                    file.seek(first)
                    if key == _segment_name(name, first, file.read(size), _generation(key)):
                        break
                    segments.pop()
                end, generation = (sum(segments[-1][:2]), _generation(segments[-1][2])) if segments else (0, 0)
                if stale := [each for each in stored.get(name, []) if each not in segments]:
                    generation = max(_generation(key) for _, _, key in stored[name]) + 1
                file.seek(end)
                if rest := file.read():
                    self._call("pipe_file", _segment_name(name, end, rest, generation), rest)
            for _, _, key in stale:  # the first one first: without it none of the others follows those that stay
                self._call("rm_file", key)

    def fetch_files(self, folder: Path, names: Collection[str] = ()) -> None:
        """Replaces files in `folder` by those that were put (`names`; none: all). Each upload has put a segment: thousands."""

        def fetch_segment(segment: tuple[int, int, str]) -> bytes:
            return bytes(self._call("cat_file", segment[2]))

        with ThreadPoolExecutor(FETCH_THREADS, thread_name_prefix="checkpoint-fetch") as pool:
            for name, segments in self.file_segments().items():
                if not names or name in names:
                    content = b"".join(pool.map(fetch_segment, _current_segments(segments)))
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    replace_file(folder / name, content)

    def remove_older(self, keep: int, *, written: int, branch: int = 0) -> None:
        """Removes what checkpoint_files.remove_older would of a folder."""
        found = self.manifests() if keep or branch else {}
        steps = [step for step, each in found.items() if each and step > written and each.branch < branch]
        kinds = {step: each.kind if each else "damaged" for step, each in found.items() if step not in steps}
        outside_quorum = [step for step, each in found.items() if each and each.outside_quorum]
        for step in [*steps, *checkpoint_files.steps_to_remove(kinds, keep, written=written, uncounted=outside_quorum)]:
            # no manifest refers to the files then: `remove_leftovers` removes them
            self._call("rm_file", f"step-{step}/{MANIFEST}")

    def unfinished(self) -> list[tuple[int, str, str, str]]:
        """Returns step, bucket, key and ID of each unfinished multipart upload: it takes space in S3, and is in no listing."""
        with _os_errors(self.url):
            file_system, root = self.file_system_and_root
            if not hasattr(file_system, "call_s3"):
                return []
            bucket, prefix, _ = file_system.split_path(f"{root}/step-")
            answer = file_system.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
            keys = ((upload["Key"], upload["UploadId"]) for upload in answer.get("Uploads", ()))
            found = ((_OBJECT.fullmatch(key[len(prefix) - len("step-") :]), key, upload) for key, upload in keys)
            return [(int(match[1]), bucket, key, upload) for match, key, upload in found if match]

    def remove_leftovers(self, until: float = math.inf) -> None:
        """Ends unfinished uploads, and removes the files that no manifest refers to, of steps up to `until`. Requires that no process
        uploads these steps. Reads a manifest once, unless the step's objects have changed: a store that keeps all checkpoints has many."""
        for step, *upload in self.unfinished():
            if step <= until:
                with _os_errors(self.url):
                    self.file_system_and_root[0].abort_mpu(*upload)
        for step, objects in self.objects().items():
            if step > until or self._without_leftovers.get(step) == hash(frozenset(objects.items())):
                continue
            referenced = {MANIFEST}
            if MANIFEST in objects:
                try:
                    referenced.update(object_name(file) for file in self.manifest(step).files)
                except Damaged:
                    continue
            for name in objects.keys() - referenced:
                self._call("rm_file", f"step-{step}/{name}")
                del objects[name]
            if objects:
                self._without_leftovers[step] = hash(frozenset(objects.items()))

    def _call(self, method: str, name: str, *arguments: Any, source: str = "", **options: Any) -> Any:
        """Calls a method of the file system for an object. `source`: a first argument, before the object's path."""
        with _os_errors(self.url):
            file_system, root = self.file_system_and_root
            first = (source, f"{root}/{name}") if source else (f"{root}/{name}",)
            return getattr(file_system, method)(*first, *arguments, **options)


class Uploader:
    """A thread that puts the newest checkpoint of a folder into the store, so that a slow, full or broken store delays no step. A save that
    comes meanwhile waits; of those that wait, only the newest is put. `extra_files`, `lease`: see Checkpointer. `report`: called when the
    store fails, is slow, or recovers."""

    def __init__(
        self,
        store: ObjectStore,
        folder: Path,
        keep: int,
        *,
        extra_files: Sequence[str] = (),
        lease: WriterLease,
        log: Log,
        report: Callable[[str], None],
        clock: Clock = time.monotonic,
        retry_s: float = RETRY_S,
    ) -> None:
        self.store = store
        self.done = set[int]()  # steps that this launch has put
        self.replaceable = set[int]()  # steps of this run in the store, which this launch may put again
        self.abandoned = dict[int, Manifest]()  # checkpoints in the store that are set aside before the next one is put
        self._folder = folder
        self._keep = keep
        self._extra_files = extra_files
        self.lease = lease
        self._log = log
        self._report = report
        self._clock = clock
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._busy: int | None = None  # step that is on its way
        self._pending: int | None = None  # newest step that is not in the store
        self._offers = 0  # calls of `enqueue`
        self._since_s = 0.0  # when the oldest save that waits was enqueued
        self._failure = ""  # of the newest try
        self._refused = False  # a try has failed since the last `retry`
        self._refusal_raised = False
        self._retry_now = self._closed = self._slow_reported = False
        self._thread: threading.Thread | None = None

    def enqueue(self, step: int) -> None:
        """Asks for an upload of a local checkpoint. Returns at once."""
        with self._changed:
            waited_s = self._clock() - self._since_s
            if self._pending is not None and (self._failure or waited_s >= SLOW_S):
                self._report(f"checkpoint: step {step} waits: {self._waiting()}; training continues")
            if self._pending is None:
                self._since_s = self._clock()
            self._pending, self._offers = step, self._offers + 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="checkpoint-uploader", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def in_use(self) -> set[int]:
        """Local steps that must not be removed yet."""
        return {step for step in (self._busy, self._pending) if step is not None}

    def retry(self) -> None:
        """Tries at once what has failed."""
        with self._changed:
            self._retry_now, self._refused, self._refusal_raised = True, False, False
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Returns True once the store has the newest step that was offered, False after `timeout_s`; reports a long wait. Raises
        CheckpointFailed if a try has failed since `retry`; the thread continues to try."""
        with self._changed:
            if self._changed.wait_for(lambda: self._pending is None or self._refused, timeout_s):
                if self._pending is not None:
                    self._refusal_raised = True
                    where = checkpoint_files.step_folder(self._folder, self._pending)
                    raise CheckpointFailed(
                        f"checkpoint: step {self._pending} is not in {self.store.url}: {self._failure}; it is in {where}, and the same "
                        "command puts it there"
                    )
                return True
            if not self._slow_reported and self._clock() - self._since_s >= SLOW_S:
                self._slow_reported = True
                self._report(f"checkpoint: the end of the run waits: {self._waiting()}")
            return False

    def _waiting(self) -> str:
        waited = duration(self._clock() - self._since_s)
        return f"{self.store.url} has not taken step {self._pending} for {waited}: {self._failure or 'no answer yet'}"

    def close(self) -> None:
        """Waits for the upload of the newest step, and ends the thread. Raises CheckpointFailed, unless `wait` has. May be called twice."""
        if self._thread is None or self._closed:
            return
        try:
            while not self._refusal_raised and not self.wait(SLOW_S):
                pass
        finally:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._failure:
                    self._changed.wait_for(lambda: self._closed or self._retry_now, self._retry_s)
                else:
                    self._changed.wait_for(lambda: self._closed or self._pending is not None)
                if self._closed:
                    return
                self._busy, self._retry_now, offers = self._pending, False, self._offers
            failure = self._try(self._busy) if self._busy is not None else ""
            with self._changed:
                if failure and not self._failure:
                    self._report(
                        f"checkpoint: step {self._busy} is not in {self.store.url} yet: {failure}; "
                        f"retried every {self._retry_s:g} s"
                    )
                elif self._failure and not failure:
                    waited = duration(self._clock() - self._since_s)
                    result = "is in" if self._busy in self.done else "is no longer needed in"
                    self._report(f"checkpoint: step {self._busy} {result} {self.store.url}, after {waited}")
                # A try that had begun before `retry` says nothing about the store now: another follows at once
                self._failure, self._refused = failure, bool(failure) and not self._retry_now
                if not failure:
                    self._since_s, self._slow_reported = self._clock(), False
                    if self._offers == offers:  # else a newer save waits, or the same step was saved again meanwhile
                        self._pending = None
                self._busy = None
                self._changed.notify_all()

    def _try(self, step: int) -> str:
        """Puts a step into the store and removes older ones there. Returns why it failed, or ""."""
        began, lease = time.perf_counter(), self.lease

        def replaces(found: Manifest | None) -> bool:
            if found is not None and found.branch != manifest.branch:
                return found.branch < manifest.branch
            if found is None or found.outside_quorum or step in self.replaceable:
                return True
            return lease.shared and not manifest.outside_quorum and not lease.is_superseded()

        try:
            path, again = checkpoint_files.step_folder(self._folder, step), step in self.replaceable
            manifest = checkpoint_files.read_manifest(path)
            for newer in list(self.abandoned):
                self.store.set_aside(newer, self.abandoned[newer])
                del self.abandoned[newer]
            # before the checkpoint: a run that resumes from it needs the rows of the steps up to it
            self.store.put_files(self._folder.parent, self._extra_files)
            self.store.put(path, replaces=replaces, again=again)
        except (OSError, Damaged) as error:
            if lease.shared and (here := checkpoint_files.list_steps(self._folder)) and step not in here:
                self._log.info(
                    "checkpoint: step %d not put into %s: the group that writes now has removed it",
                    step,
                    self.store.url,
                )
                return ""
            if lease.shared and isinstance(error, FileExistsError):
                self._log.info(
                    "checkpoint: step %d not put into %s: another group has put it there", step, self.store.url
                )
                return ""
            return checkpoint_files.reason(error) if isinstance(error, OSError) else str(error)
        except Exception as error:  # noqa: BLE001 (a thread that has ended would leave the run waiting)
            return f"{type(error).__name__}: {error}"
        self.done.add(step)
        self.replaceable.add(step)
        size, seconds = manifest.size_bytes / 1e6, time.perf_counter() - began
        self._log.info("checkpoint: step %d put into %s: %.1f MB in %.2f s", step, self.store.url, size, seconds)
        self.remove_unneeded(written=step, branch=manifest.branch)
        return ""

    def remove_unneeded(self, *, written: int | None = None, branch: int = 0) -> None:
        """Removes leftovers in the store, and older checkpoints if one was `written`, of `branch`; nothing if this group left outside of a
        quorum. A store may forbid it, which is only reported."""
        if self.lease.outside_quorum:
            return
        try:
            if written is not None:
                self.store.remove_older(self._keep, written=written, branch=branch)
            if not self.lease.shared:
                self.store.remove_leftovers()
            elif written is not None and not self.lease.is_superseded():  # another group may be uploading a later one
                self.store.remove_leftovers(until=written)
        except OSError as error:
            why = checkpoint_files.reason(error)
            self._log.warning("checkpoint: what %s no longer needs could not be removed: %s", self.store.url, why)


def object_name(file: FileRecord) -> str:
    """Returns the name of a file in the store."""
    return f"{file.name}.{hashlib.blake2b(''.join(file.digests).encode(), digest_size=16).hexdigest()}"


def fetch_suffix(fetcher: str) -> str:
    """Returns the suffix of the folders into which `ObjectStore.fetch` copies."""
    return f"{FETCH}{fetcher and f'.{fetcher}'}-0"


def _segment_name(name: str, first: int, content: bytes, generation: int) -> str:
    """Returns the object of a segment. `generation`: how often segments of the file were replaced before; absent if 0."""
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return f"{FILES}/{name}/{first:015}.{digest}{f'.{generation}' if generation else ''}"


def _generation(key: str) -> int:
    """Returns the generation at the end of a segment's name."""
    return int((*key.rpartition("/")[2].split("."), "0")[2])


def _current_segments(segments: Iterable[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """Returns the segments that make up the newest version of a file. At each offset the newest generation counts; segments of an older
    generation after it are ignored."""
    found, end, newest = list[tuple[int, int, str]](), 0, 0
    for first, size, key in sorted(segments, key=lambda each: (each[0], -_generation(each[2]))):
        if first == end and (generation := _generation(key)) >= newest:
            found.append((first, size, key))
            end, newest = first + size, generation
    return found


@contextmanager
def local_run(run: str, step: int) -> Iterator[Path]:
    """Yields the folder of a run: `run` itself or, of a URL such as s3://BUCKET/runs/NAME, a temporary one with its settings and its newest
    intact checkpoint, or that of `step` if >= 0. Raises ValueError, OSError, Damaged."""
    if not is_url(run):
        yield Path(run)
        return
    check_url("RUN", run)
    store = ObjectStore(run.rstrip("/"))
    with TemporaryDirectory(prefix="pharos-") as name:
        folder, found = Path(name), store.manifests()
        if step >= 0 and step not in found or not found:
            raise ValueError(f"{run} has {'steps ' + ', '.join(map(str, found)) if found else 'no checkpoint'}")
        store.fetch_files(folder, ["config.toml"])
        oldest_first = sorted(found, key=lambda each: (manifest.branch if (manifest := found[each]) else 0, each))
        for candidate in [step] if step >= 0 else reversed(oldest_first):
            try:
                store.fetch(candidate, folder / "checkpoint")
                break
            except Damaged:
                if candidate in (step, oldest_first[0]):
                    raise
        yield folder


@contextmanager
def _os_errors(url: str) -> Iterator[None]:
    """Turns what a driver raises into OSError: botocore and aiohttp raise other classes for a lost connection."""
    try:
        yield
    except (OSError, Damaged):
        raise
    except Exception as error:  # of an optional package, which may be missing
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error
