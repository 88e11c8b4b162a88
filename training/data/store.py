"""Token stores: a corpus that scripts/prepare_data.py tokenised once, in shards that every rank maps into memory.

    <store>/manifest.json   see StoreManifest; written last: a folder without it is not a store yet
            00000.bin       ids of the shard's documents, those that are held out last
            00000.npy       [documents + 1] int64: document d of the shard is ids[bounds[d] : bounds[d + 1]]
            journal.jsonl   only while the store is written: its settings, then a line per finished shard, from which a killed run goes on

Opening a store reads the manifest alone, so that its time does not depend on the number of documents."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from training.config import os_errors_of
from training.data.sources import TOKEN_TYPES, map_ids, save_array, write_array
from training.durable_files import replace_file, sync_path, try_lock

FORMAT = 1
MANIFEST, JOURNAL = "manifest.json", "journal.jsonl"
DIGEST_BYTES = 1 << 24
NPY_HEADER_BYTES = 128  # of an array with one axis, in .npy's version 1.0
# shards of all stores that a process has mapped at once: each takes one of the 1,024 descriptors that a shell allows a process
MAPPED = 256


@dataclass(frozen=True)
class StoreSettings:
    """The settings that decide the content of a store: a killed `prepare_data` goes on only with equal ones."""

    format: int
    tokenizer: str  # Tokenizer.fingerprint
    vocab_size: int
    text_key: str
    held_out: float  # share of the documents that is held out, chosen by their content
    dtype: str  # of the ids: a name of TOKEN_TYPES
    shard_tokens: int  # a shard ends at the first batch of documents at which it has as many
    files: tuple[tuple[str, int], ...]  # names and sizes, in the order in which they are read


@dataclass(frozen=True)
class Shard:
    """A shard of a store. Its first `train_documents` documents, `train_tokens` ids, are not held out."""

    documents: int
    tokens: int
    train_documents: int
    train_tokens: int
    largest_id: int
    digest: str  # sha256 of both files


@dataclass(frozen=True)
class StoreManifest:
    """manifest.json. `digest`: of the settings without the files, and of all shards; equal digests mean equal sequences."""

    settings: StoreSettings
    shards: tuple[Shard, ...]
    digest: str

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)


class MappedShards(Sequence[np.ndarray]):
    """The ids of each shard, [tokens], memory-mapped when they are read. Thread-safe."""

    def __init__(self, folder: Path, dtype: str, count: int) -> None:
        self.folder, self.dtype, self._count = folder, dtype, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._count:
            raise IndexError(index)
        return _mapped(self, index)


@lru_cache(MAPPED)
def _mapped(shards: MappedShards, index: int) -> np.ndarray:
    return map_ids(shards.folder / f"{index:05}.bin", shards.dtype)


class Store:
    """An open store, memory-mapped. Pickled by its folder, for workers."""

    def __init__(self, folder: Path, setting: str) -> None:
        """`setting`: begins messages. Raises ValueError if the folder is not a finished store, or damaged."""
        self.folder, self._setting = folder, setting
        self.manifest = read_manifest(folder, setting)
        self.key = self.manifest.digest
        itemsize = TOKEN_TYPES[self.manifest.settings.dtype].itemsize
        for index, shard in enumerate(self.manifest.shards):
            sizes = {".bin": shard.tokens * itemsize, ".npy": NPY_HEADER_BYTES + 8 * (shard.documents + 1)}
            for suffix, wanted in sizes.items():
                path = folder / f"{index:05}{suffix}"
                size = path.stat().st_size if path.is_file() else None
                if size != wanted:
                    have = "is missing" if size is None else f"has {size} bytes instead of {wanted}"
                    raise ValueError(f"{setting}: {path} {have}; copy the store again, or prepare it again")
        self.shards = MappedShards(folder, self.manifest.settings.dtype, len(self.manifest.shards))

    def __reduce__(self) -> tuple[object, ...]:
        return Store, (self.folder, self._setting)

    def bounds(self, shard: int) -> np.ndarray:
        """Returns the bounds of a shard's documents, [documents + 1] int64, memory-mapped."""
        return np.asarray(np.load(self.folder / f"{shard:05}.npy", mmap_mode="r", allow_pickle=False))

    def check_tokenizer(self, fingerprint: str, vocab_size: int) -> None:
        """Raises ValueError unless the store was made with this tokenizer and its ids are below the model's `vocab_size`."""
        if self.manifest.settings.tokenizer != fingerprint:
            raise ValueError(
                f"{self._setting}: the store was made with another tokenizer than model.tokenizer_path; set that to the one "
                "of prepare_data's --tokenizer, or prepare the store with this one"
            )
        if (largest := max(shard.largest_id for shard in self.manifest.shards)) >= vocab_size:
            raise ValueError(
                f"{self._setting}: has id {largest}, but model.vocab_size = {vocab_size}; nearest: {largest + 1}"
            )

    def damaged_shards(self) -> list[int]:
        """Returns the shards whose files differ from their digests. Reads all of them."""
        return [i for i, shard in enumerate(self.manifest.shards) if file_digest(self.folder, i) != shard.digest]


def read_manifest(folder: Path, setting: str) -> StoreManifest:
    """Returns the manifest of a store. Raises ValueError, beginning with `setting`, if there is none or it cannot be read."""
    path = folder / MANIFEST
    with os_errors_of(setting):
        content, unfinished = path.read_bytes() if path.is_file() else None, (folder / JOURNAL).is_file()
    if content is None:
        why = (
            "is not finished: run the same prepare_data command again, which continues it"
            if unfinished
            else f"has no {MANIFEST}"
        )
        made = "" if unfinished else "; make one with scripts/prepare_data.py SOURCE... --out DIR"
        raise ValueError(f"{setting}: the token store {folder} {why}{made}")
    try:
        stored = json.loads(content)
        settings = StoreSettings(**stored["settings"] | {"files": tuple(map(tuple, stored["settings"]["files"]))})
        manifest = StoreManifest(settings, tuple(Shard(**shard) for shard in stored["shards"]), stored["digest"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{setting}: {path} is not a manifest of a token store: {error}") from error
    if settings.format != FORMAT:
        raise ValueError(
            f"{setting}: {path} has format {settings.format}; this version reads {FORMAT}: prepare it again"
        )
    return manifest


def file_digest(folder: Path, shard: int) -> str:
    digest = hashlib.sha256()
    for suffix in (".bin", ".npy"):
        with (folder / f"{shard:05}{suffix}").open("rb") as file:
            while chunk := file.read(DIGEST_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


class StoreWriter:
    """Writes a store, shard by shard. A killed run's finished shards are kept: the next writer continues at `file` and `document`."""

    def __init__(self, folder: Path, settings: StoreSettings) -> None:
        """Raises ValueError if the folder has a store or an unfinished one of other settings, or another process writes it; OSError."""
        self._folder, self._settings = folder, settings
        self.shards = list[Shard]()
        self.file = self.document = 0  # the next document: its file, and its number in the file
        finished = f"--out {folder}: has a store already; name another folder, or remove it"
        if (folder / MANIFEST).exists():
            raise ValueError(finished)
        folder.mkdir(parents=True, exist_ok=True)
        self._journal = (folder / JOURNAL).open("a+b")
        if try_lock(self._journal.fileno()) is False:
            raise ValueError(f"--out {folder}: another process is writing this store")
        # again, with the lock: another process may have finished since; an NFS client remembers for half a minute that a file was missing
        if (folder / MANIFEST).exists():
            (folder / JOURNAL).unlink(missing_ok=True)
            raise ValueError(finished)
        self._continue()
        self._begin_shard()

    def _begin_shard(self) -> None:
        self._file = (self._folder / f"{len(self.shards):05}.bin").open("wb")
        self._lengths = list[np.ndarray]()
        self._held = list[tuple[np.ndarray, np.ndarray]]()  # ids and lengths of documents that are held out
        self._tokens = self._largest_id = 0
        self._is_full = False

    def add(self, ids: np.ndarray, lengths: np.ndarray, held_out: np.ndarray) -> None:
        """Appends a batch of documents: concatenated `ids`, `lengths` [D] and `held_out` [D] bool."""
        if self._is_full:  # ended only now, as the last shard may have to be split
            self._end_shard()
            self._begin_shard()
        ids = ids.astype(TOKEN_TYPES[self._settings.dtype], copy=False)
        self._largest_id = max(self._largest_id, int(ids.max()))
        if held_out.any():
            held = np.repeat(held_out, lengths)
            self._held.append((ids[held], lengths[held_out]))
            ids, lengths = ids[~held], lengths[~held_out]
        write_array(self._file, ids)
        self._lengths.append(lengths)
        self._tokens += len(ids)

    def end_batch(self, file: int, document: int) -> None:
        """Ends the shard, if it is full and documents follow. `file`, `document`: the first document that was not added."""
        self.file, self.document = file, document
        self._is_full = self._tokens + sum(len(ids) for ids, _ in self._held) >= self._settings.shard_tokens

    def finish(self) -> StoreManifest:
        """Ends the last shard and writes the manifest. Raises ValueError if there is no document; OSError."""
        self._end_shard(last=True)
        if not self.shards:
            raise ValueError("the sources have no text")
        identity = asdict(self._settings) | {"files": ()}
        digest = hashlib.sha256(json.dumps([identity, *map(asdict, self.shards)]).encode()).hexdigest()[:32]
        manifest = StoreManifest(self._settings, tuple(self.shards), digest)
        replace_file(self._folder / MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
        (self._folder / JOURNAL).unlink(missing_ok=True)  # without locks, one that sees the manifest removes it, too
        return manifest

    def close(self) -> None:
        try:
            self._file.close()  # may write, and fail
        finally:
            self._journal.close()

    def _continue(self) -> None:
        """Reads the journal of a killed run, without a torn last line; begins one if there is none."""
        self._journal.seek(0)
        head = json.dumps(asdict(self._settings)).encode() + b"\n"
        lines = [line for line in self._journal.read().splitlines(keepends=True) if line.endswith(b"\n")]
        if lines and lines[0] != head:
            raise ValueError(
                f"--out {self._folder}: has an unfinished store of other settings or sources; name another folder, or remove it"
            )
        for line in lines[1:]:
            entry = json.loads(line)
            self.file, self.document = entry.pop("next")
            self.shards.append(Shard(**entry))
        self._journal.truncate(sum(map(len, lines)))
        if not lines:
            self._journal.write(head)
            self._sync_journal()

    def _end_shard(self, *, last: bool = False) -> None:
        """Writes the rest of a shard, then its line in the journal. Removes a last shard without a document."""
        number, train_tokens = len(self.shards), self._tokens
        train_documents = sum(map(len, self._lengths))
        for ids, lengths in self._held:
            write_array(self._file, ids)
            self._lengths.append(lengths)
            self._tokens += len(ids)
        self._file.close()
        if not self._tokens:
            (self._folder / f"{number:05}.bin").unlink()
            return
        lengths = np.concatenate(self._lengths)
        bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        total = self._tokens + sum(shard.tokens for shard in self.shards)
        all_documents = len(lengths) + sum(shard.documents for shard in self.shards)
        held = all_documents - train_documents - sum(shard.train_documents for shard in self.shards)
        cut = round(total * self._settings.held_out)
        # If the hashes of the documents leave a split empty, as with one document, the last share of the tokens is held out
        if last and held in (0, all_documents) and 0 < cut < self._tokens:
            train_tokens = self._tokens - cut
            train_documents = int(np.searchsorted(bounds, train_tokens))
            bounds = np.union1d(bounds, [train_tokens])
        save_array(self._folder / f"{number:05}.npy", bounds)
        for path in (self._folder / f"{number:05}.bin", self._folder / f"{number:05}.npy", self._folder):
            sync_path(path)
        shard = Shard(
            len(bounds) - 1,
            self._tokens,
            train_documents,
            train_tokens,
            self._largest_id,
            file_digest(self._folder, number),
        )
        self.shards.append(shard)
        entry: dict[str, Any] = asdict(shard) | {"next": [self.file, self.document]}
        self._journal.write(json.dumps(entry).encode() + b"\n")
        self._sync_journal()

    def _sync_journal(self) -> None:
        self._journal.flush()
        os.fsync(self._journal.fileno())
