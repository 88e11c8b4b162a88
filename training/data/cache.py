"""Tokenises a corpus once and memory-maps it afterwards; the cache is named by content, so a changed file has a new cache.

    <cache>/<key>/tokens.bin      ids of all documents, concatenated (text only; token files are mapped in place)
                  documents.npy   [documents + 1] int64: document d is ids[documents[d] : documents[d + 1]]
                  buckets.npy     [documents] uint16: hash of a document's content mod 1000, which decides its split
                  meta.json       see Meta
    <cache>/seen/<stamps>         key of the files with these names, sizes and times, so that they are not read again
    <cache>/lock                  locked while a process builds; contains its progress

The key is the digest of the files' names and contents, how they are read, and the tokenizer. A folder gets its final
name by one rename. The lock saves work; the rename ensures correctness: without working locks (some network folders) two
concurrent launches both build, and the second to finish uses the folder of the first."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
from array import array
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from training.data.sources import (
    Source,
    TextSource,
    TokenSource,
    check_ids,
    map_ids,
    no_text,
    save_array,
    stamp_of,
    write_array,
)
from training.durable_files import replace_file, sync_path, try_lock
from training.log import Log
from training.progress import Bar
from training.tokenizer import Tokenizer

FORMAT = 1
BUCKETS = 1000
BATCH_BYTES = 4 << 20  # text per call of the tokenizer
POLL_S = 0.05
PROGRESS_S = 0.2  # interval of the builder's progress reports
PROGRESS_BYTES = 120  # size of a report: one line of the bar
SCAN_IDS = 1 << 22  # token ids scanned at a time
PIECE_IDS = 1 << 16  # ids per document of a token file without BOS and EOS
STUCK_S = 1800.0  # a builder without progress for this long is reported
MIN_AGE_NS = 2_000_000_000  # younger files may change without a new time stamp (resolution of the file system's clock)
# a time stamp that is further ahead is one of a wrong clock: no write of the next hour gets it
MAX_AHEAD_NS = 3_600_000_000_000
# a restart does not help
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
FOREIGN_LEFTOVER_S = 3600.0  # age from which a different host's temporary folder counts as left over by a kill


@dataclass(frozen=True)
class Meta:
    """meta.json, a description of the cache. `content`: digest of the corpus, independent of the tokenizer."""

    format: int
    content: str
    files: int
    bytes: int
    skipped: tuple[str, ...]
    documents: int
    tokens: int
    largest_id: int
    dtype: str


class Corpus:
    """A tokenised corpus, memory-mapped. Equal `key`s (content and tokenizer) mean equal documents. Pickled by file names, for workers."""

    def __init__(self, folder: Path, meta: Meta, paths: tuple[Path, ...]) -> None:
        """`paths`: files of ids, which form one array. Raises OSError, ValueError or EOFError if they cannot be mapped."""
        self.folder, self.meta, self._paths, self.key = folder, meta, paths, folder.name
        self._parts = [map_ids(path, meta.dtype) for path in paths]
        self._ends = np.cumsum([len(part) for part in self._parts])
        self.tokens = int(self._ends[-1])
        self.spans = dict[tuple[str, float, bool], tuple[np.ndarray, np.ndarray]]()  # see order.document_spans
        self.bounds, self.buckets = (  # [documents + 1] int64, [documents] uint16
            np.asarray(np.load(folder / name, mmap_mode="r", allow_pickle=False))
            for name in ("documents.npy", "buckets.npy")
        )

    def __reduce__(self) -> tuple[object, ...]:
        return Corpus, (self.folder, self.meta, self._paths)

    def unmarked(self, tokenizer: Tokenizer) -> Path | None:
        """Returns a file of ids in which neither BOS nor EOS marks a document, so that it is read in pieces; None: there is none."""
        for path, ids, end in zip(self._paths, self._parts, self._ends.tolist(), strict=True):
            first = end - len(ids)
            inner = int(self.bounds[np.searchsorted(self.bounds, first, side="right")]) - first
            begins = {int(ids[0]), *ids[inner : inner + 1].tolist()}
            if tokenizer.bos_id not in begins and tokenizer.eos_id not in {int(ids[inner - 1]), int(ids[-1])}:
                return path
        return None

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns ids[start : start + count] as a view; the range must lie within one file, as every document does."""
        index = int(np.searchsorted(self._ends, start, side="right")) if len(self._parts) > 1 else 0
        part = self._parts[index]
        start -= int(self._ends[index]) - len(part)
        return part[start : start + count]


def open_corpus(source: Source, tokenizer: Tokenizer, folder: Path, *, log: Log, vocab_size: int = 0) -> Corpus:
    """Maps the cache of `source` under `folder` and builds it if missing; processes may call it concurrently. `vocab_size`: the model's.
    Raises ValueError (bad input, beginning with the setting) or OSError (no room, or a builder without progress)."""
    vocab_size = max(vocab_size, tokenizer.vocab_size)
    cache = _Cache(source, tokenizer, folder, log, vocab_size)
    try:
        corpus = cache.find() or cache.make()
    except TimeoutError:
        raise
    except OSError as error:
        why = f"the data cache {folder} cannot be written: {error.strerror or error}"
        if error.errno in _REFUSED:
            raise ValueError(f"job.dump_folder: {why}; set it to a folder that this user may write") from None
        raise OSError(why) from error
    if corpus.meta.skipped:
        log.info("%s: left out, not UTF-8: %s", source.kind, ", ".join(corpus.meta.skipped))
    if isinstance(source, TokenSource) and corpus.meta.largest_id >= vocab_size:
        for file in source.files:  # the cache was built with a larger vocabulary
            check_ids(source.open(file), vocab_size, file, source.setting)
    return corpus


def bucket_of(content: bytes) -> int:
    """Returns the bucket of a document by its content only, so that it stays in its split when the rest of the corpus changes."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "big") % BUCKETS


class _Cache:
    def __init__(self, source: Source, tokenizer: Tokenizer, folder: Path, log: Log, vocab_size: int) -> None:
        self._source, self._tokenizer, self._folder = source, tokenizer, folder
        self._log, self._vocab_size = log, vocab_size
        stamps = [(str(file.path.absolute()), file.name, file.stamp) for file in source.files]
        self._seen = folder / "seen" / _digest([stamps, self._identity()])

    def find(self) -> Corpus | None:
        """Returns the cache of these files by their stamps, without reading them; None if they are new or were written to."""
        try:
            return self._open(self._seen.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def make(self) -> Corpus:
        self._seen.parent.mkdir(parents=True, exist_ok=True)
        with closing(_BuildLock(self._folder / "lock", self._log)) as lock:
            lock.wait(until=self.find)
            if (corpus := self.find()) is not None:  # the previous holder of the lock may have built it
                return corpus
            if lock.held:
                _remove_leftovers(self._folder, self._log)
            content = self._content(lock)
            key = _digest([content, self._identity()])[:32]
            if (corpus := self._open(key)) is None:
                self._build(key, content, lock)
                corpus = self._open(key)
            assert corpus is not None, "a cache that was just built is complete"
            now_ns, stamps_ns = time.time_ns(), [at_ns for file in self._source.files for at_ns in file.stamp[1:]]
            if not any(-MAX_AHEAD_NS <= now_ns - at_ns <= MIN_AGE_NS for at_ns in stamps_ns):
                replace_file(self._seen, key.encode())
        return corpus

    def _identity(self) -> list[object]:
        return [FORMAT, self._source.kind, self._source.reading, self._tokenizer.fingerprint()]

    def _open(self, key: str) -> Corpus | None:
        """Returns the cache under `key`, None if it is missing or incomplete."""
        folder, source = self._folder / key, self._source
        try:
            meta = Meta(**json.loads((folder / "meta.json").read_bytes()))
            own = isinstance(source, TextSource)
            paths = (folder / "tokens.bin",) if own else tuple(file.path for file in source.files)
            corpus = Corpus(folder, meta, paths)
        except (FileNotFoundError, ValueError, TypeError, EOFError):
            return None
        complete = len(corpus.bounds) == meta.documents + 1 and len(corpus.buckets) == meta.documents
        return corpus if complete and corpus.tokens == meta.tokens == corpus.bounds[-1] else None

    def _content(self, lock: _BuildLock) -> str:
        """Returns the digest of the files' names and contents."""
        lock.begin("reading", sum(file.size for file in self._source.files))
        digests = []
        for file in self._source.files:
            digest = hashlib.sha256()
            for chunk in self._source.chunks(file):
                digest.update(chunk)
                lock.advance(len(chunk))
            digests.append((file.name, digest.hexdigest()))
        return _digest(digests)

    def _build(self, key: str, content: str, lock: _BuildLock) -> None:
        """Writes the folder under a temporary name and renames it; keeps the folder of another process that has finished first."""
        temporary = self._folder / f"{key}.tmp-{socket.gethostname()}-{secrets.token_hex(8)}"
        try:
            temporary.mkdir()
            dtype = "uint16" if self._tokenizer.vocab_size <= 1 << 16 else "uint32"
            with closing(_Writer(temporary, dtype, self._tokenizer)) as writer:
                if isinstance(self._source, TextSource):
                    skipped = self._tokenise(self._source, writer, lock)
                else:
                    skipped, dtype = (), self._source.dtype
                    self._scan(self._source, writer, lock)
            for file in self._source.files:
                if not file.path.is_file() or stamp_of(file.path) != file.stamp:
                    raise ValueError(f"{self._source.setting}: file {file.path} changed while it was read; start again")
            if not writer.tokens:
                raise no_text(self._source.setting, len(self._source.files))
            meta = Meta(
                format=FORMAT,
                content=content,
                files=len(self._source.files) - len(skipped),
                bytes=sum(file.size for file in self._source.files if file.name not in skipped),
                skipped=skipped,
                documents=len(writer.buckets),
                tokens=writer.tokens,
                largest_id=writer.largest_id,
                dtype=dtype,
            )
            writer.finish(meta)
            final = self._folder / key
            for is_last in (False, True):
                try:
                    temporary.rename(final)
                    break
                except OSError:  # the folder is there: another process has finished first, or it is damaged
                    if self._open(key) is not None:
                        return
                    if is_last:
                        raise
                    shutil.rmtree(final, ignore_errors=True)
            sync_path(self._folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _tokenise(self, source: TextSource, writer: _Writer, lock: _BuildLock) -> tuple[str, ...]:
        """Writes every document; returns the names of the files left out."""
        lock.begin("tokenising", sum(file.size for file in source.files))
        skipped = []
        for file in source.files:
            documents = source.documents(file, lock.advance)
            if source.skips_bad_files:
                try:
                    documents = iter(list(documents))  # the file as a whole, or nothing of it
                except ValueError:
                    skipped.append(file.name)
                    continue
            for document in documents:
                writer.add(document)
                lock.advance(0)  # shows that it goes on: one read of the file may give many documents
        writer.flush()
        return tuple(skipped)

    def _scan(self, source: TokenSource, writer: _Writer, lock: _BuildLock) -> None:
        """Finds the documents of token files and checks every id."""
        lock.begin("scanning", sum(file.size for file in source.files))
        for file in source.files:
            ids = source.open(file)
            starts = [np.zeros(1, dtype=np.int64)]
            for at in range(0, len(ids), SCAN_IDS):
                chunk = ids[at : at + SCAN_IDS]
                check_ids(chunk, self._vocab_size, file, source.setting, at=at)
                writer.largest_id = max(writer.largest_id, int(chunk.max()))
                starts.append(at + 1 + np.flatnonzero(chunk == self._tokenizer.eos_id))
                if self._tokenizer.bos_id != self._tokenizer.eos_id:
                    starts.append(at + np.flatnonzero(chunk == self._tokenizer.bos_id))
                lock.advance(chunk.nbytes)
            bounds = np.unique(np.concatenate(starts))
            if len(bounds[bounds < len(ids)]) == 1:
                bounds = np.arange(0, len(ids), PIECE_IDS)
            writer.add_spans(ids, np.append(bounds[bounds < len(ids)], len(ids)))


class _Writer:
    """Writes documents into the files of one cache folder."""

    def __init__(self, folder: Path, dtype: str, tokenizer: Tokenizer) -> None:
        self._folder, self._dtype, self._tokenizer = folder, np.dtype(dtype).newbyteorder("<"), tokenizer
        self._file = (folder / "tokens.bin").open("wb")
        self._waiting: list[bytes] = []
        self._lengths: list[np.ndarray] = []
        self.buckets = array("H")
        self.waiting_bytes = self.tokens = self.largest_id = 0

    def close(self) -> None:
        self._file.close()

    def add(self, document: bytes) -> None:
        self.buckets.append(bucket_of(document))
        self._waiting.append(document)
        self.waiting_bytes += len(document)
        if self.waiting_bytes >= BATCH_BYTES:
            self.flush()

    def add_spans(self, ids: np.ndarray, bounds: np.ndarray) -> None:
        """Adds documents of a mapped file without copying them: ids[bounds[i] : bounds[i + 1]]."""
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            self.buckets.append(bucket_of(ids[start:end].astype("<u4").tobytes()))
        self._lengths.append(np.diff(bounds))
        self.tokens += len(ids)

    def flush(self) -> None:
        if self._waiting:
            ids, lengths = self._tokenizer.encode_documents(self._waiting)
            write_array(self._file, ids.astype(self._dtype, copy=False))
            self._lengths.append(lengths)
            self.tokens += len(ids)
            self.largest_id = max(self.largest_id, int(ids.max()))
        self._waiting, self.waiting_bytes = [], 0

    def finish(self, meta: Meta) -> None:
        lengths = np.concatenate(self._lengths)
        save_array(self._folder / "documents.npy", np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths))))
        save_array(self._folder / "buckets.npy", np.frombuffer(self.buckets, dtype=np.uint16))
        (self._folder / "meta.json").write_text(json.dumps(asdict(meta), indent=1))
        for path in (*self._folder.iterdir(), self._folder):
            sync_path(path)


class _BuildLock:
    """The lock for building in the cache folder, until `close` or a kill. Its file has the builder's progress, for waiting processes."""

    def __init__(self, path: Path, log: Log) -> None:
        self._path, self._log, self._noted_s = path, log, 0.0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        self.held = False  # always False if the file system has no locks
        self.bar = Bar(0, "", log=log)

    def wait(self, until: Callable[[], object]) -> None:
        """Waits until this process may build, or until `until()` is true. Raises TimeoutError after STUCK_S without progress."""
        progress, changed_s = b"", time.monotonic()
        while (is_locked := try_lock(self._descriptor)) is False and not until():
            before, progress = progress, os.pread(self._descriptor, PROGRESS_BYTES, 0)
            changed_s = changed_s if progress == before else time.monotonic()
            if progress:
                self.bar.show(progress.decode().rstrip())
            if time.monotonic() - changed_s > STUCK_S:
                raise TimeoutError(f"the process that holds {self._path} has shown no progress for {STUCK_S:.0f} s")
            time.sleep(POLL_S)
        self.held = bool(is_locked)
        if self.held:
            os.ftruncate(self._descriptor, 0)

    def begin(self, label: str, total_bytes: int) -> None:
        self.bar.close()
        self.bar = Bar(total_bytes, label, log=self._log)

    def advance(self, amount_bytes: float) -> None:
        self.bar.update(amount_bytes)
        now_s = time.monotonic()
        if self.held and now_s - self._noted_s > PROGRESS_S:
            self._noted_s = now_s
            os.pwrite(self._descriptor, self.bar.text().ljust(PROGRESS_BYTES).encode(), 0)

    def close(self) -> None:
        self.bar.close()
        os.close(self._descriptor)


def _remove_leftovers(folder: Path, log: Log) -> None:
    """Removes temporary folders of killed builders. Requires the lock, so that on this host none is being written. Ages are those of the
    file system's clock, that of the lock's time stamp, since this host's may be wrong."""
    os.utime(folder / "lock")
    now_s = (folder / "lock").stat().st_mtime
    for path in folder.glob("*.tmp-*"):
        own = path.name.split(".tmp-", 1)[1].rpartition("-")[0] == socket.gethostname()
        with suppress(OSError):  # where locks hold on one host only, another host may rename it meanwhile
            newest_s = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
            if own or now_s - newest_s > FOREIGN_LEFTOVER_S:
                log.warning("data cache: removed %s, which a killed launch had left half-written", path.name)
                shutil.rmtree(path, ignore_errors=True)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
