"""Data sources: Python's standard library, local text files, token files. Finds the files and reads their documents.

Flow: configs/check.py calls `check_sources` before any process starts; dataset.py calls `find_source`; cache.py reads the files when it
builds a cache, scripts/prepare_data.py when it builds a token store."""

from __future__ import annotations

import difflib
import glob
import gzip
import io
import json
import os
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from shutil import copyfileobj
from typing import IO, Any, cast

import numpy as np

from training.config import TrainingConfig, need, os_errors_of

TEXT_SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")  # .json: a record per line, as C4 is published
COMPRESSIONS = (".gz", ".zst")  # after a suffix of text
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
TOKEN_SUFFIXES = (".npy", ".bin")
TOKEN_TYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
STDLIB_EXCLUDED = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"})
# A longer .txt is split into parts, which can be shuffled, held out, and tokenised in bounded memory.
LONG_TEXT_BYTES = 1 << 20
PART_BYTES = 1 << 16
READ_BYTES = 1 << 20
PARQUET_ROWS = 1024
CHECKED_BYTES = 4 << 20  # text that check_sources reads
CHECKED_IDS = 1 << 16


@dataclass(frozen=True)
class SourceFile:
    """One input file. The digest of the corpus depends on `name`, not on `path`."""

    path: Path
    name: str
    stamp: tuple[int, int, int]  # size in bytes, mtime_ns, ctime_ns: changes when the file is written to

    @property
    def size(self) -> int:
        return self.stamp[0]


def stamp_of(path: Path) -> tuple[int, int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


@dataclass(frozen=True)
class _Files:
    kind: str
    setting: str  # 'training.dataset_path = "..."', the beginning of error messages
    files: tuple[SourceFile, ...]

    def chunks(self, file: SourceFile) -> Iterator[bytes]:
        """Yields the bytes of one file, for its digest. Raises ValueError that names the file."""
        try:
            with file.path.open("rb") as stream:
                while chunk := stream.read(READ_BYTES):
                    yield chunk
        except OSError as error:
            raise unreadable(file, self.setting, error) from error


@dataclass(frozen=True)
class TextSource(_Files):
    """Text files. `skips_bad_files`: a file that is not UTF-8 is skipped and logged instead of rejected."""

    text_key: str
    skips_bad_files: bool = False
    key_setting: str = "training.dataset_text_key"

    @property
    def reading(self) -> str:
        """A string that differs if the same files would be read as different documents."""
        return f"text, key {self.text_key}, parts of {PART_BYTES} above {LONG_TEXT_BYTES}"

    def documents(self, file: SourceFile, count: Callable[[float], object] = lambda size: None) -> Iterator[bytes]:
        """Yields the documents of one file: UTF-8, none empty. Raises ValueError that names file and position. `count`: called with the
        number of bytes of each read of the file."""
        kinds = {".jsonl": self._read_jsonl, ".json": self._read_jsonl, ".parquet": self._read_parquet}
        read = kinds.get(suffix_of(file.path), self._read_text)
        try:
            with opened(file.path, count) as stream:
                yield from filter(None, read(file, stream))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{self.setting}: file {file.path} cannot be decompressed: {error}") from error
        except OSError as error:
            raise unreadable(file, self.setting, error) from error
        except Exception as error:
            if type(error).__name__ != "ZstdError":  # of a package that may be missing
                raise
            raise ValueError(f"{self.setting}: file {file.path} cannot be decompressed: {error}") from error

    def _read_text(self, file: SourceFile, stream: IO[bytes]) -> Iterator[bytes]:
        at, text = 0, stream.read(LONG_TEXT_BYTES + 1)
        if len(text) <= LONG_TEXT_BYTES:
            yield self._checked(text, file, at=0)
            return
        while text:
            if len(text) < 2 * PART_BYTES + 4:  # less than the longest part and the byte after it
                text += stream.read(READ_BYTES)
            # a line end, if one is near
            end = text.find(b"\n", PART_BYTES, 2 * PART_BYTES) + 1 or min(2 * PART_BYTES, len(text))
            for _ in range(3):  # extends the part to a character boundary
                end += end < len(text) and 0x80 <= text[end] < 0xC0
            yield self._checked(text[:end], file, at=at)
            at, text = at + end, text[end:]

    def _read_jsonl(self, file: SourceFile, stream: IO[bytes]) -> Iterator[bytes]:
        at = 0
        for number, line in enumerate(stream, start=1):
            self._checked(line, file, at=at)
            at += len(line)
            if not line.strip():
                continue
            place = f"{self.setting}: file {file.path} line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{place} is not JSON: {error}") from error
            except RecursionError:
                raise ValueError(f"{place} is nested too deeply") from None
            yield text_of_record(record, self.text_key, place, self.key_setting)

    def _read_parquet(self, file: SourceFile, stream: IO[bytes]) -> Iterator[bytes]:
        from pyarrow import ArrowInvalid, parquet

        key, place = self.text_key, f"{self.setting}: file {file.path}"
        with ExitStack() as stack:
            if file.path.suffix in COMPRESSIONS:  # parquet is read from its end
                seekable = stack.enter_context(tempfile.TemporaryFile())
                copyfileobj(stream, seekable)
                stream = seekable
            try:
                table = stack.enter_context(parquet.ParquetFile(stream))
            except ArrowInvalid as error:
                raise ValueError(f"{place} is not parquet: {error}") from error
            text_of_record(dict.fromkeys(table.schema_arrow.names, ""), key, place, self.key_setting)
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[key]):
                yield from (text_of_record(row, key, place) for row in batch.to_pylist())

    def _checked(self, data: bytes, file: SourceFile, *, at: int) -> bytes:
        try:
            data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.setting}: file {file.path} is not UTF-8 at byte {at + error.start}; convert it, for instance: "
                f"iconv -f latin1 -t utf-8 {file.path}"
            ) from error
        return data


@dataclass(frozen=True)
class TokenSource(_Files):
    """Files of token ids, mapped in place. A document begins at each BOS and after each EOS; see cache.py."""

    dtype: str  # of .bin files; a .npy has its own

    @property
    def reading(self) -> str:
        return f"tokens, {self.dtype}"

    def open(self, file: SourceFile) -> np.ndarray:
        """Returns the ids of one file, [N] uint16 or uint32, memory-mapped. Raises ValueError that names the file."""
        is_raw, subject = file.path.suffix == ".bin", f"{self.setting}: file {file.path} has {file.size} bytes"
        if is_raw and (file.size == 0 or file.size % TOKEN_TYPES[self.dtype].itemsize):
            raise ValueError(f"{subject}, not a whole number of {self.dtype} ids; see training.dataset_token_dtype")
        try:
            ids = map_ids(file.path, self.dtype)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{self.setting}: file {file.path} is not a .npy of ids: {error}") from error
        if ids.ndim != 1 or ids.dtype not in TOKEN_TYPES.values() or not ids.size:
            raise ValueError(
                f"{self.setting}: file {file.path} is {ids.dtype} of shape {list(ids.shape)}; "
                "legal: one axis of uint16 or uint32, not empty"
            )
        # uint32 ids of a usual vocabulary, read as uint16, alternate with their high halves, which are small.
        head, may_be_wide = ids[:CHECKED_IDS], is_raw and self.dtype == "uint16" and not file.size % 4
        if may_be_wide and len(head) >= 64 and head[1::2].max() <= 3 < head[::2].max():
            raise ValueError(f'{subject} that look like uint32 ids; set training.dataset_token_dtype = "uint32"')
        return ids


Source = TextSource | TokenSource


def check_sources(config: TrainingConfig, *, vocab_size: int = 0) -> None:
    """Raises ValueError, beginning with the setting, for missing files, wrong suffixes, missing packages or no text; and, in the first
    megabytes, for text that is not UTF-8, invalid JSON, a missing text key, or token ids >= `vocab_size` (0: not checked)."""
    if config.dataset == "huggingface":
        need("datasets", extra="hf", setting=f'training.dataset = "{config.dataset}"')
    if config.dataset in ("huggingface", "store"):
        return
    source = find_source(config)
    if isinstance(source, TokenSource):
        for file in source.files:
            check_ids(source.open(file)[:CHECKED_IDS], vocab_size, file, source.setting)
        return
    found = read = 0
    for file in source.files if not source.skips_bad_files else ():
        for document in source.documents(file):
            found, read = found + 1, read + len(document)
            if read > CHECKED_BYTES:
                return
    if not found and not source.skips_bad_files:
        raise no_text(source.setting, len(source.files))


def no_text(setting: str, files: int) -> ValueError:
    return ValueError(
        f"{setting}: the corpus is empty: no text in {files} file{'s' * (files != 1)}; name files with text"
    )


def check_ids(ids: np.ndarray, vocab_size: int, file: SourceFile, setting: str, *, at: int = 0) -> None:
    """Raises ValueError that names the first of `ids` not below `vocab_size` (0: no limit). `at`: position of ids[0] in the file."""
    if not vocab_size or not len(ids) or ids.max() < vocab_size:
        return
    first = int(np.argmax(ids >= vocab_size))
    raise ValueError(
        f"{setting}: file {file.path} has id {ids[first]} at token {at + first}, but the vocabulary has {vocab_size} ids; "
        "set model.tokenizer_path to the tokenizer that made the file, or model.vocab_size to its size"
    )


def find_source(config: TrainingConfig) -> Source:
    """Returns the source of [training], with its files in a fixed order. Raises ValueError, beginning with the setting."""
    if config.dataset == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        found = list[Path]()
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in STDLIB_EXCLUDED]
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        files = tuple(_as_file(path, root) for path in sorted(found) if os.access(path, os.R_OK))
        if not files:
            raise ValueError(
                f'training.dataset = "stdlib": no .py files in {root}; '
                'legal for this Python: training.dataset = "files", "tokens", "store" or "huggingface"'
            )
        return TextSource("stdlib", 'training.dataset = "stdlib"', files, config.dataset_text_key, skips_bad_files=True)
    setting = f'training.dataset_path = "{config.dataset_path}"'
    if config.dataset == "tokens":
        files = find_files(config.dataset_path.split(","), TOKEN_SUFFIXES, setting)
        return TokenSource("tokens", setting, files, config.dataset_token_dtype)
    files = find_files(config.dataset_path.split(","), TEXT_SUFFIXES, setting)
    return text_source(files, setting, config.dataset_text_key)


def text_source(
    files: tuple[SourceFile, ...], setting: str, text_key: str, *, key_setting: str = "training.dataset_text_key"
) -> TextSource:
    """Returns the source of text files. Raises ValueError, beginning with `setting`, if the package for one of them is missing."""
    if any(suffix_of(file.path) == ".parquet" for file in files):
        need("pyarrow", extra="parquet", setting=setting)
    if any(file.path.suffix == ".zst" for file in files):
        need(ZSTD, extra="zstd", setting=setting)
    return TextSource("files", setting, files, text_key, key_setting=key_setting)


def suffix_of(path: Path) -> str:
    """Returns the suffix of a file's content: ".jsonl" of "part.jsonl.zst"."""
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


class _Counted(io.FileIO):
    """A file that reports each read."""

    count: Callable[[float], object]

    def readinto(self, buffer: Any, /) -> int | None:
        size = super().readinto(buffer)
        self.count(size or 0)
        return size


@contextmanager
def opened(path: Path, count: Callable[[float], object] = lambda size: None) -> Iterator[IO[bytes]]:
    """Opens a file for reading, decompressed if its name ends in .gz or .zst. Reads may raise EOFError, zlib.error or ZstdError."""
    with _Counted(path) as file, io.BufferedReader(file, READ_BYTES) as stream:
        file.count = count
        if path.suffix == ".gz":
            with gzip.GzipFile(fileobj=stream) as text:
                yield cast("IO[bytes]", text)
        elif path.suffix == ".zst":
            with import_module(ZSTD).open(stream) as text:
                yield text
        else:
            yield stream


def text_of_record(record: Any, key: str, place: str, setting: str = "training.dataset_text_key") -> bytes:
    """Returns record[key] as UTF-8, b"" for null. Raises ValueError, beginning with `place`, if it is missing or not a string."""
    if not isinstance(record, dict):
        raise ValueError(f'{place} is not an object like {{"{key}": "..."}}')
    if key not in record:
        texts = [name for name, value in record.items() if isinstance(value, str)]
        near = difflib.get_close_matches(key, texts, n=1) or texts[:1]
        hint = f'; nearest: {setting} = "{near[0]}"' if near else ""
        raise ValueError(f'{place} has no "{key}", only {", ".join(map(repr, record)) or "nothing"}{hint}')
    text = "" if record[key] is None else record[key]
    if not isinstance(text, str):
        raise ValueError(f'{place}: "{key}" is {type(text).__name__}, not a string')
    try:
        return text.encode()
    except UnicodeEncodeError as error:  # JSON can have half of a surrogate pair, which is not valid Unicode
        raise ValueError(f'{place}: "{key}" is not Unicode at character {error.start}') from error


class _Written:
    """A file of which np.save knows only `write`."""

    def __init__(self, file: IO[bytes]) -> None:
        self.write = file.write


def write_array(file: IO[bytes], array: np.ndarray) -> None:
    """Appends the elements. Raises OSError with its cause (a full disk), which ndarray.tofile does not report."""
    file.write(np.ascontiguousarray(array).data)


def save_array(path: Path, array: np.ndarray) -> None:
    """Writes a .npy file. Raises OSError with its cause, which np.save does not report for a file: it uses ndarray.tofile."""
    with path.open("wb") as file:
        np.save(_Written(file), array)


def map_ids(path: Path, dtype: str) -> np.ndarray:
    """Returns the ids [N] of a .npy, or of a .bin of `dtype`, memory-mapped. Raises OSError or ValueError."""
    if path.suffix == ".npy":
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    return np.asarray(np.memmap(path, dtype=TOKEN_TYPES[dtype], mode="r"))


def unreadable(file: SourceFile, setting: str, error: OSError) -> ValueError:
    return ValueError(f"{setting}: file {file.path} cannot be read: {error.strerror or error}")


def _as_file(path: Path, root: Path) -> SourceFile:
    return SourceFile(path, path.relative_to(root).as_posix(), stamp_of(path))


def find_files(
    patterns: Iterable[str], suffixes: tuple[str, ...], setting: str, *, every: bool = False
) -> tuple[SourceFile, ...]:
    """Returns the files of names, globs and folders: in the given order, sorted within each, none twice. Of a folder of text, compressed
    and .json files count only with `every` or if it has no others: a run from before these could be read resumes with the same files.
    Raises ValueError."""
    found: dict[Path, SourceFile] = {}
    for pattern in filter(None, (pattern.strip() for pattern in patterns)):
        with os_errors_of(setting):
            for path, root in _matches(pattern, suffixes, setting, every):
                found.setdefault(path.resolve(), _as_file(path, root))
    if not found:
        raise ValueError(
            f"{setting}: is empty; legal: {named_suffixes(suffixes)} files, globs and folders, comma-separated"
        )
    if not any(file.size for file in found.values()):
        raise no_text(setting, len(found))
    return tuple(found.values())


def _matches(pattern: str, suffixes: tuple[str, ...], setting: str, every: bool) -> list[tuple[Path, Path]]:
    """Returns (file, folder to which its name in the digest is relative) for one name, glob or folder."""
    path, legal = Path(pattern).expanduser(), named_suffixes(suffixes)
    if path.is_dir():
        inside = [file for file in sorted(path.rglob("*")) if _has(file, suffixes) and file.is_file()]
        if not inside:
            raise ValueError(f"{setting}: folder {pattern} has no {legal} file")
        plain = [file for file in inside if file.suffix not in (".json", *COMPRESSIONS)]
        return [(file, path) for file in (inside if every else plain or inside)]
    found = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    files = [path] if path.is_file() else [file for name in sorted(found) if (file := Path(name)).is_file()]
    if not files:
        raise ValueError(f"{setting}: no file matches {pattern}{_nearest(path, suffixes)}")
    for file in files:
        if not _has(file, suffixes):
            raise ValueError(f"{setting}: file {file} ends in {file.suffix or 'nothing'!r}; legal: {legal}")
        if not os.access(file, os.R_OK):
            raise ValueError(f"{setting}: file {file} cannot be read: permission denied")
    return [(file, file.parent) for file in files]


def _nearest(path: Path, suffixes: tuple[str, ...]) -> str:
    """Returns the end of the message for a missing file: the existing path with the most similar name, or the legal ones."""
    folder = path.parent
    if not folder.is_dir():
        return f"; there is no folder {folder}"
    names = [file.name for file in folder.iterdir() if file.is_dir() or _has(file, suffixes)]
    near = [] if glob.has_magic(path.name) else difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    legal = f"; legal: {named_suffixes(suffixes)} files, globs and folders, comma-separated"
    return f"; nearest: {folder / near[0]}" if near else legal


def _has(file: Path, suffixes: tuple[str, ...]) -> bool:
    return (suffix_of(file) if suffixes == TEXT_SUFFIXES else file.suffix) in suffixes


def named_suffixes(suffixes: tuple[str, ...]) -> str:
    names = ", ".join(suffixes)
    return f"{names} (also with {' or '.join(COMPRESSIONS)})" if suffixes == TEXT_SUFFIXES else names
