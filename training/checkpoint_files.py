"""Checkpoint folders: their files, verification, and atomic publication and removal.

Flow: train.py -> components.py (load), saver.py (retries, and the last save) -> checkpoint.py (one save), checkpoint_load.py (which
checkpoint to load) -> checkpoint_dcp.py (tensors to files) and this file. No torch, no process group: one rank calls the functions that
change a folder, any rank those that read.

    <run>/checkpoint/step-40/            complete: renamed to this after fsync (it may be damaged later)
        __0_0.distcp, ..., .metadata     DCP's files
        manifest.json                    the length and the digests of each of these files
    <run>/checkpoint/step-50.partial/    being written or removed, or left over from a killed process
    <run>/checkpoint/step-50.replaced/   the earlier step-50, between two renames
    <run>/checkpoint/step-50.partial-fetch-0/    being copied out of an object store; the next launch continues a leftover one
    <run>/checkpoint/step-60.abandoned/  newer than checkpoint.load_step, from which the run began again; no launch uses or removes it

With several replica groups the quorum of the writer is appended (step-50.partial-EPOCH-ID, writer_lease.py), so that a stopped process that
continues in the middle of a save changes no files of a later writer. Everything is on disk (fsync) before the rename that makes it visible,
so a kill or a power failure leaves the old state or the new one (POSIX rename; Linux fsync(2) on the folder for the name itself)."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from training.durable_files import sync_path

MANIFEST = "manifest.json"
# keys of states in a checkpoint; two of format 1 have names that say less than their constants
TOKENS_STATE = "meter"  # of metrics.py: valid tokens so far
ROWS_STATE = "figures"  # of metrics_writer.py: the newest rows, saved only with replica groups
SPIKES_STATE = "spikes"  # of spikes.py, saved only with on_spike other than stop, or a spike_window
EMA_STATE = "ema"  # of ema.py, saved only with optimizer.ema_decay
FORMAT = 1  # of the manifest; other numbers are rejected
SEGMENT_BYTES = 64 << 20  # bytes per digest: small enough to divide among ranks and to locate damage
_HASHED_BYTES = 256 << 10  # bytes hashed at a time: fits the second-level cache between write and digest

_NAME = re.compile(r"step-(\d+)")
_LEFTOVER = re.compile(r"step-(\d+)\.(partial|replaced)(-.*)?")


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written, or no existing one is intact. The message is one line, the same on every rank."""


class Damaged(RuntimeError):
    """A checkpoint differs from what was written; the message names the file and the difference."""


class Removed(Damaged):
    """A run removed the checkpoint, or replaced it by another one of its step, while it was read."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} was removed or replaced while it was read")


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint as it was written, with one digest per segment of SEGMENT_BYTES."""

    name: str
    size_bytes: int
    digests: tuple[str, ...]


class FileSegment(NamedTuple):
    """Bytes `first` to `end` of a file, which have one digest."""

    file: FileRecord
    first: int
    end: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """Contents of a checkpoint. `kind`: "full" resumes; "model" has only weights (an export, the seed). `outside_quorum`: see
    OutsideQuorumLease."""

    step: int
    kind: str
    states: tuple[str, ...]
    world_size: int
    torch: str  # its version
    files: tuple[FileRecord, ...]
    outside_quorum: bool = False  # in the file as "settled", which is its negation
    # how often the run had gone back to a checkpoint (training.on_spike = "rewind"); absent in the file if 0
    branch: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def recency(self) -> tuple[int, int]:
        """Orders checkpoints, the newest last: steps of an older branch are older, whatever their numbers."""
        return self.branch, self.step

    def to_json(self) -> str:
        # the digest is always empty, and part of format 1
        body = {"format": FORMAT, "config_digest": "", **asdict(self)}
        body["settled"] = not body.pop("outside_quorum")
        if not self.branch:  # as versions without it write, and read
            del body["branch"]
        return json.dumps({**body, "checksum": checksum(body)}, indent=1)

    @staticmethod
    def from_json(text: str | bytes) -> Manifest:
        """Returns the manifest. Raises Damaged for text that `to_json` did not write or that was changed since."""
        try:
            body = json.loads(text)
            if body["format"] != FORMAT:
                raise Damaged(f"{MANIFEST}: format {body['format']}, this version reads {FORMAT}")
            if body.pop("checksum") != checksum(body):
                raise Damaged(f"{MANIFEST}: checksum mismatch")
            del body["format"], body["config_digest"]
            files = tuple(FileRecord(**{**file, "digests": tuple(file["digests"])}) for file in body["files"])
            outside_quorum = not body.pop("settled", True)
            return Manifest(
                **{**body, "states": tuple(body["states"]), "files": files, "outside_quorum": outside_quorum}
            )
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{MANIFEST}: cannot be read ({type(error).__name__}: {error})") from None


class Digest:
    """Digests of a byte stream, at memory speed, which detect accidental damage, not tampering. A chunk's value is the sum of word * weight
    over its little-endian 64-bit words, modulo 2^64, with fixed odd weights (multilinear hashing): a change within one word is always
    detected, others are missed with a probability of about 2^-63. A segment's digest is BLAKE2b over its chunks' values and its length."""

    def __init__(self) -> None:
        self._words = np.zeros(_HASHED_BYTES // 8, dtype="<u8")
        self._weights = _hash_coefficients()
        self._bytes = self._words.view(np.uint8)
        self._filled = self._size_bytes = 0
        self._values = list[bytes]()
        self._digests = list[str]()

    def update(self, data: memoryview) -> None:
        """Appends bytes of any length; the digests do not depend on how the stream is split into calls."""
        source = np.frombuffer(data, dtype=np.uint8)
        start = 0
        while start < len(source):
            count = min(_HASHED_BYTES - self._filled, len(source) - start)
            self._bytes[self._filled : self._filled + count] = source[start : start + count]
            self._filled += count
            start += count
            if self._filled == _HASHED_BYTES:
                self._close_chunk()

    def record(self, name: str) -> FileRecord:
        """Returns the record of the stream as file `name`. The digest is unusable afterwards."""
        if self._filled:
            self._close_chunk()
        if self._values:
            self._close_segment()
        return FileRecord(name, self._size_bytes, tuple(self._digests))

    def _close_chunk(self) -> None:
        count = -(-self._filled // 8)
        self._bytes[self._filled : 8 * count] = 0  # pads the last word of a file
        value = int(np.dot(self._words[:count], self._weights[:count]))
        self._values.append(value.to_bytes(8, "little"))
        self._size_bytes += self._filled
        self._filled = 0
        if len(self._values) * _HASHED_BYTES == SEGMENT_BYTES:
            self._close_segment()

    def _close_segment(self) -> None:
        length = self._size_bytes - SEGMENT_BYTES * len(self._digests)
        content = b"".join(self._values) + length.to_bytes(8, "little")
        self._digests.append(hashlib.blake2b(content, digest_size=16).hexdigest())
        self._values.clear()


def step_folder(folder: Path, step: int, suffix: str = "") -> Path:
    return folder / f"step-{step}{suffix}"


def list_steps(folder: Path) -> list[int]:
    """Returns the steps that have a folder, intact or not, ascending; [] for a missing or unreadable `folder`."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def by_recency(folder: Path) -> list[int]:
    """Returns the steps that have a folder, the newest first."""
    return sorted(list_steps(folder), key=lambda step: recency(folder, step), reverse=True)


def recency(folder: Path, step: int | None) -> tuple[int, int]:
    """Returns Manifest.recency of a step, as far as its manifest can be read; None: older than each."""
    return (-1, -1) if step is None else (branch_of(step_folder(folder, step)), step)


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint after checking the lengths of all files; `verify` checks their contents. Raises Damaged."""
    try:
        manifest = Manifest.from_json((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST}: missing") from None
    except OSError as error:
        raise Damaged(f"{MANIFEST}: cannot be read ({error})") from error
    for file in manifest.files:
        try:
            size_bytes = (path / file.name).stat().st_size
        except FileNotFoundError:
            raise Damaged(f"{file.name}: missing") from None
        except OSError as error:
            raise Damaged(f"{file.name}: {error}") from error
        if size_bytes != file.size_bytes:
            raise Damaged(f"{file.name}: {size_bytes:,} bytes, {file.size_bytes:,} were written")
    return manifest


def manifest_or_problem(path: Path) -> Manifest | str:
    """Returns the manifest, or the damage to the checkpoint as far as the sizes of its files show it."""
    try:
        return read_manifest(path)
    except Damaged as damage:
        return str(damage)


def verify(path: Path, manifest: Manifest, *, share: int = 0, shares: int = 1) -> None:
    """Compares the files with their digests; each of `shares` callers reads every `shares`-th segment. Raises Damaged with the place."""
    for segment in islice(segments(manifest), share, None, shares):
        verify_segment(path, segment)


def segments(manifest: Manifest) -> Iterator[FileSegment]:
    for file in manifest.files:
        for index, digest in enumerate(file.digests):
            first = index * SEGMENT_BYTES
            yield FileSegment(file, first, min(first + SEGMENT_BYTES, file.size_bytes), digest)


def verify_segment(path: Path, segment: FileSegment) -> None:
    """Compares one segment of a checkpoint's file with its digest. Raises Damaged with the place."""
    file, first, end, expected = segment
    buffer, digest, left = memoryview(bytearray(_HASHED_BYTES)), Digest(), end - first
    try:
        with (path / file.name).open("rb", buffering=0) as stream:
            stream.seek(first)
            while left and (count := stream.readinto(buffer[:left])):
                digest.update(buffer[:count])
                left -= count
    except OSError as error:
        raise Damaged(f"{file.name}: cannot be read ({error})") from None
    if digest.record(file.name).digests != (expected,):
        raise Damaged(f"{file.name}: bytes {first:,} to {end:,} are not what was written (digests differ)")


def read_verified(path: Path) -> Manifest:
    """Returns the manifest after comparing all files with it. Raises Damaged, Removed."""
    manifest = None
    try:
        manifest = read_manifest(path)
        verify(path, manifest)
    except Damaged:
        if not is_same(path, manifest):
            raise Removed(path) from None
        raise
    return manifest


def is_same(path: Path, manifest: Manifest | None) -> bool:
    """Returns False if the checkpoint was removed or replaced since its manifest was read (None: it could not be read)."""
    if manifest is None:
        return path.exists()
    try:
        return Manifest.from_json((path / MANIFEST).read_bytes()) == manifest
    except (OSError, Damaged):
        return False


def begin(folder: Path, step: int, suffix: str = "", *, keep: bool = False) -> Path:
    """Creates an empty folder for a checkpoint of `step` and removes leftovers of a failed save. `suffix`: the writer's. `keep`: a leftover
    with this suffix stays, with its files."""
    partial, replaced = step_folder(folder, step, f".partial{suffix}"), step_folder(folder, step, ".replaced")
    final = step_folder(folder, step)
    if not folder.exists():
        folder.mkdir(parents=True)
        sync_path(folder.parent)
    if replaced.exists() and not final.exists():
        replaced.rename(final)
    for leftover in filter(Path.exists, [replaced] if keep else [partial, replaced]):
        shutil.rmtree(leftover)
    partial.mkdir(exist_ok=keep)
    return partial


def publish(folder: Path, manifest: Manifest, suffix: str = "", *, is_copy: bool = False) -> Path:
    """Renames the folder that `begin` created, whose files are on disk, to its final name. It replaces an existing checkpoint of the same
    step, and one of the two exists at any instant; a checkpoint that was saved outside of a quorum replaces none, unless it is the copy of
    one in an object store. Raises OSError."""
    partial = step_folder(folder, manifest.step, f".partial{suffix}")
    replaced, final = step_folder(folder, manifest.step, ".replaced"), step_folder(folder, manifest.step)
    for file in manifest.files:
        if not (partial / file.name).exists():
            raise OSError(
                f"{file.name}, which another rank wrote, is not in {partial}: do all nodes share this folder?"
            )
    (partial / MANIFEST).write_text(manifest.to_json())
    for path in (partial / MANIFEST, partial):
        sync_path(path)
    if (is_copy or not manifest.outside_quorum) and final.exists():
        final.rename(replaced)
    try:
        partial.rename(final)
    except OSError:
        if replaced.exists():
            replaced.rename(final)
        raise
    sync_path(folder)
    shutil.rmtree(replaced, ignore_errors=True)  # `remove_leftovers` removes what is left
    return final


def remove_partial(folder: Path, step: int, suffix: str = "") -> None:
    """Removes the files of a failed save as far as possible; does not raise."""
    shutil.rmtree(step_folder(folder, step, f".partial{suffix}"), ignore_errors=True)


def set_aside(folder: Path, step: int) -> None:
    """Renames a checkpoint so that it counts as none. Raises OSError."""
    suffixes = (".abandoned", *(f".abandoned-{number}" for number in range(2, 1000)))
    places = (step_folder(folder, step, suffix) for suffix in suffixes)
    step_folder(folder, step).rename(next(place for place in places if not place.exists()))


def remove_leftovers(
    folder: Path,
    until: int | None = None,
    may_remove: Callable[[str], bool] = lambda suffix: True,
    *,
    restore_only: bool = False,
) -> list[str]:
    """Removes leftovers of killed processes, of steps up to `until` (None: all) and of writers whose suffix `may_remove` accepts. Returns a
    phrase for each. Requires that no process is writing them, unless `restore_only`: that only brings back checkpoints that were being
    replaced. Raises OSError."""
    notes = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or (until is not None and int(match[1]) > until):
            continue
        if not restore_only and not may_remove(match[3] or ""):
            continue
        final = step_folder(folder, int(match[1]))
        if match[2] == "replaced" and not final.exists():
            with suppress(FileNotFoundError):  # another group has restored it
                path.rename(final)
                notes.append(f"restored {final.name}, which was being replaced")
        elif not restore_only:
            shutil.rmtree(path)
            notes.append(f"removed {path.name}")
    return notes


def remove_older(
    folder: Path,
    keep: int,
    *,
    written: int,
    branch: int = 0,
    damaged: Collection[int] = (),
    in_use: Collection[int] = (),
) -> list[int]:
    """Removes the `steps_to_remove`, and steps above `written`, the step just put there, of branches older than `branch`; none of those
    `in_use`. Returns the removed steps. Raises OSError."""
    paths = {step: step_folder(folder, step) for step in list_steps(folder) if step not in in_use}
    # what cannot be read now may be read later
    steps = [step for step, path in paths.items() if step > written and branch_of(path, unreadable=branch) < branch]
    if keep:
        kinds = {step: _kind(path) for step, path in paths.items() if step not in steps}
        outside_quorum = {step for step, path in paths.items() if _is_outside_quorum(path)}
        steps += steps_to_remove(kinds, keep, written=written, uncounted={*damaged, *outside_quorum})
    for step in steps:  # renamed first, so that no incomplete folder has the final name
        remove_partial(folder, step)
        shutil.rmtree(step_folder(folder, step).rename(step_folder(folder, step, ".partial")))
    return steps


def steps_to_remove(kinds: Mapping[int, str], keep: int, *, written: int, uncounted: Collection[int] = ()) -> list[int]:
    """Returns the steps older than the `keep` newest full ones (0: none). Those in `uncounted`, which are damaged or were saved outside of
    a quorum, do not count as such. Keeps `written` (just published), newer ones, those without a manifest, and those of kind "model".
    `kinds`: by step, ascending."""
    counted = [step for step, kind in kinds.items() if kind == "full" and step not in uncounted]
    oldest_kept = min([*counted[-keep:], written]) if keep else -1
    return [step for step, kind in kinds.items() if step < oldest_kept and kind in ("full", "damaged")]


def newest(folder: Path, *, kind: str = "full", exclude: Collection[int] = ()) -> int | None:
    """Returns the newest checkpoint of that kind whose files all exist; contents are not read."""
    steps = (step for step in by_recency(folder) if step not in exclude)
    return next((step for step in steps if _kind(step_folder(folder, step)) == kind), None)


def reason(error: OSError) -> str:
    """Returns the system's message, and the file."""
    cause = error.strerror or str(error)
    return f"{cause} ({error.filename})" if error.filename else cause


def branch_of(path: Path, unreadable: int = 0) -> int:
    """Returns the branch of a checkpoint; `unreadable` if its manifest cannot be read."""
    try:
        return Manifest.from_json((path / MANIFEST).read_bytes()).branch
    except (OSError, Damaged):
        return unreadable


def _is_outside_quorum(path: Path) -> bool:
    """Returns Manifest.outside_quorum of a checkpoint; False if its manifest cannot be read."""
    try:
        return Manifest.from_json((path / MANIFEST).read_bytes()).outside_quorum
    except (OSError, Damaged):
        return False


def _kind(path: Path) -> str:
    """Returns "full", "model", "damaged", or "unreadable" (no manifest, or it cannot be read at present)."""
    try:
        return read_manifest(path).kind
    except Damaged as damage:
        if isinstance(damage.__cause__, OSError):  # it may be intact once storage works again
            return "unreadable"
        return "damaged" if (path / MANIFEST).exists() else "unreadable"


@functools.cache
def _hash_coefficients() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Returns fixed odd 64-bit weights, one per word of a chunk: the finaliser of SplitMix64 (Steele, Lea, Flood 2014) over 1, 2, 3, ..."""
    z = np.arange(1, _HASHED_BYTES // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((z ^ (z >> np.uint64(31))) | np.uint64(1))


def checksum(body: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(body, sort_keys=True).encode(), digest_size=16).hexdigest()
