"""Saves and loads states by torch.distributed.checkpoint (DCP), with digests computed while the bytes are written.

The files are an ordinary DCP checkpoint. StreamingPlanner creates the tensors of a model that is larger than memory (a seed, an
import) one at a time, when they are written. A separate module, since importing DCP takes a second, too slow for a configuration check.

*States* are nested dictionaries {"model": {name: tensor}, ...}. DCP joins the keys: "model.layers.0.attention.wq.weight"."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from io import BufferedWriter, FileIO
from os import PathLike
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from training.checkpoint_files import EMA_STATE, ROWS_STATE, SPIKES_STATE, Digest, FileRecord

States = dict[str, dict[str, Any]]

# may be missing in the run or in the checkpoint
_OPTIONAL = ("optimizer.param_groups.", f"{ROWS_STATE}.", f"{SPIKES_STATE}.", f"{EMA_STATE}.")
_HASHED_IN_THREAD_BYTES = 1 << 20  # longer writes are hashed in a second thread while the kernel copies them
# A rank reads all of a chunk that overlaps its shard: with one chunk of gigabytes, each of a thousand ranks would read all of it.
CHUNK_BYTES = 64 << 20


class OtherRankFailed(RuntimeError):
    """Another rank could not write its share; the message is that rank's error."""


class Fit(NamedTuple):
    """A comparison of a run's states with a checkpoint. With pipeline stages a rank has only some of the names: a name is missing in the
    run only if all ranks have it in `only_in_checkpoint`, and an entry of `exclude` is unused only if all have it in `unused_excludes`."""

    states: States  # that `load_into` can load
    misfits: list[str]  # a phrase for each name that does not fit
    only_in_checkpoint: set[str]
    unused_excludes: set[str]  # entries of `exclude` that match no name


def write(
    states: Mapping[str, Any], path: Path, *, group: dist.ProcessGroup | None, planner: StreamingPlanner | None = None
) -> list[FileRecord]:
    """Writes this rank's share of `states` into the folder `path` and to disk (fsync); returns the records of its files. Collective over
    `group` (None: one process); all ranks fail together: those that could not write raise their OSError, the others OtherRankFailed."""
    _ignore_no_dist_warning()
    writer = _StreamingWriter(path) if planner else FileSystemWriter(path)
    crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # no CRCs of the zip format: torch.load does not check them
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-digest") as digester:
            writer.fs = file_system = _DigestingFileSystem(digester)
            save(dict(states), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as failure:
        # torch.save turns a failed write into a RuntimeError about a file position
        here, _ = failure.failures.get(dist.get_rank(group) if group is not None else 0, (None, None))
        cause = file_system.failure or (here if isinstance(here, OSError) else None)
        raise cause or OtherRankFailed(_first_failure(failure)) from None
    finally:
        torch.serialization.set_crc32_options(crc32)
    return list(file_system.records.values())


def load_into(
    states: Mapping[str, Any], path: Path, *, group: dist.ProcessGroup | None, reader: FileSystemReader | None = None
) -> str:
    """Loads the states that `fit` returned: tensors in place, each rank its shards; other values are replaced.
    Returns "", or why a rank could not read its part (the same on all ranks of `group`); the states are then partly loaded."""
    _ignore_no_dist_warning()
    try:
        load(dict(states), storage_reader=reader or FileSystemReader(path), process_group=group, no_dist=group is None)
    except CheckpointException as failure:
        return _first_failure(failure)
    return ""


def read_metadata(path: Path) -> Metadata:
    """Returns names, sizes and dtypes of a checkpoint's tensors. Unpickles, so verify the file's digest first."""
    return FileSystemReader(path).read_metadata()


def read_values(path: Path, state: str) -> dict[str, Any]:
    """Returns the values of one state that are not tensors, such as those of "ledger", and reads nothing else. Verifies no digest: what it
    unpickles may raise anything."""
    _ignore_no_dist_warning()
    saved, prefix = read_metadata(path).state_dict_metadata, f"{state}."
    names = [name for name, kind in saved.items() if name.startswith(prefix) and isinstance(kind, BytesStorageMetadata)]
    values = dict.fromkeys(names)
    load(values, storage_reader=FileSystemReader(path), no_dist=True)
    return {name.removeprefix(prefix): value for name, value in values.items()}


def fit(states: States, metadata: Metadata, *, compared: Collection[str], exclude: Sequence[str], exact: bool) -> Fit:
    """Compares names and sizes (`exact`: dtypes too) of the states in `compared` with those of the checkpoint. Names that equal, lie
    below, or match an entry of `exclude` are ignored on both sides. These may be missing: the optimizer state of a parameter that never
    had a gradient, optimizer settings that a different version of torch lacks, the metrics of replica groups, the values for
    training.spike_window, and averages of weights."""
    saved = {name: value for name, value in metadata.state_dict_metadata.items() if name.split(".")[0] in compared}
    here = [f"{state}.{key}" for state, values in states.items() for key in values]
    unused_excludes = {prefix for prefix in exclude if not any(_has_prefix(name, [prefix]) for name in (*saved, *here))}
    saved = {name: value for name, value in saved.items() if not _has_prefix(name, exclude)}
    with_state = {name.rpartition(".")[0] for name in saved}

    def is_required(name: str) -> bool:
        unmade = name.startswith("optimizer.state.") and name.rpartition(".")[0] not in with_state
        may_be_missing = name.startswith(_OPTIONAL) or unmade
        return (name in saved or not may_be_missing) and not _has_prefix(name, exclude)

    required = {
        state: {key: value for key, value in values.items() if is_required(f"{state}.{key}")}
        for state, values in states.items()
    }
    states = {state: values for state, values in required.items() if values}
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(states))
    present = dict(planner.state_dict)  # under DCP's joined names
    misfits = [misfit for name, value in present.items() if (misfit := _misfit(name, value, saved.get(name), exact))]
    only_in_checkpoint = {name for name in saved.keys() - present.keys() if not name.startswith(_OPTIONAL)}
    return Fit(states, misfits, only_in_checkpoint, unused_excludes)


def other_size(name: str, states: States, metadata: Metadata) -> bool:
    """Returns True if the tensor "state.name" of the checkpoint has another size than that of `states`."""
    state, _, key = name.partition(".")
    saved, value = metadata.state_dict_metadata.get(name), states.get(state, {}).get(key)
    return isinstance(saved, TensorStorageMetadata) and value is not None and saved.size != value.size()


class _DigestingFileSystem(FileSystem):
    """DCP's file system for one save: hashes the bytes written and keeps the first OSError."""

    def __init__(self, digester: ThreadPoolExecutor) -> None:
        self.records: dict[str, FileRecord] = {}
        self.failure: OSError | None = None
        self._digester = digester

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", "write only"
        name = Path(path).name
        try:
            with DigestingStream(Path(path), self._digester) as stream:
                yield stream
                self.records[name] = stream.digest.record(name)
        except OSError as error:
            # The error of write() has no file name, and torch.save replaces it with another error.
            self.failure = self.failure or OSError(error.errno, error.strerror, str(path))
            raise

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        super().rename(path, new_path)
        name = Path(new_path).name
        self.records[name] = replace(self.records.pop(Path(path).name), name=name)


class DigestingStream(BufferedWriter):
    """A new file that hashes the bytes written to it."""

    def __init__(self, path: Path, digester: ThreadPoolExecutor) -> None:
        super().__init__(FileIO(path, "wb"))
        self._digester = digester
        self.digest = Digest()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < _HASHED_IN_THREAD_BYTES:
            self.digest.update(view)
            return super().write(view)
        hashed = self._digester.submit(self.digest.update, view)  # both release the GIL
        try:
            return super().write(view)
        finally:
            hashed.result()

    def fileno(self) -> int:
        self.flush()  # DCP calls fileno() before it fsyncs
        return super().fileno()


def _ignore_no_dist_warning() -> None:
    """Silences DCP's warning that a single process saves or loads without torch.distributed, which is intended."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _has_prefix(name: str, prefixes: Iterable[str]) -> bool:
    """Returns True if the name equals one of the prefixes, lies below it, or matches it as a shell pattern."""
    return any(f"{name}.".startswith(prefix.rstrip(".") + ".") or fnmatchcase(name, prefix) for prefix in prefixes)


def _misfit(name: str, value: Any, saved: Any, exact: bool) -> str:
    """Returns why the checkpoint's `saved` cannot be loaded into `value`, or ""."""
    if saved is None:
        return f"{name} is in this run but not in the checkpoint"
    if not isinstance(value, torch.Tensor) or not isinstance(saved, TensorStorageMetadata):
        return ""
    if saved.size != value.size():
        return f"{name} is {list(saved.size)} there and {list(value.size())} here"
    if exact and saved.properties.dtype != value.dtype:
        return f"{name} is {saved.properties.dtype} there and {value.dtype} here"
    return ""


def _first_failure(failure: CheckpointException) -> str:
    rank, (cause, _) = min(failure.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {' '.join(str(cause).split())}"


class StreamingPlanner(DefaultSavePlanner):
    """Save planner for states whose tensors are on the meta device. `make(name)` returns the values; it is called once for each name, when
    DCP writes that tensor and the previous one has been freed. `written` is called with the size of each finished chunk in bytes."""

    def __init__(
        self,
        make: Callable[[str], torch.Tensor],
        *,
        written: Callable[[int], None] = lambda count: None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        self._make = make
        self._written = written
        self._chunk_bytes = chunk_bytes
        self._name = ""
        self._tensor = torch.empty(0)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[part for item in plan.items for part in _parts(item, self._chunk_bytes)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """Returns the values of one chunk, in a storage of the chunk's size."""
        name, data = write_item.index.fqn, write_item.tensor_data
        assert data is not None, f"{name}: only tensors can be streamed"
        if name != self._name:
            self._tensor = torch.empty(0)  # frees the memory before the next tensor is created
            self._name, self._tensor = name, self._make(name)
            assert (self._tensor.shape, self._tensor.dtype) == (data.size, data.properties.dtype), name
        chunk = self._tensor
        if write_item.type == WriteItemType.SHARD:
            first, rows = data.chunk.offsets[0], data.chunk.sizes[0]
            chunk = chunk[first : first + rows].clone()  # torch.save of a view would write the complete tensor
        self._written(chunk.nbytes)
        return chunk


class _StreamingWriter(FileSystemWriter):
    """Writes DCP's file format one tensor at a time; the base class keeps all tensors until the file is complete."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        results = []
        with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
            for item in plan.items:
                begin = stream.tell()
                torch.save(planner.resolve_data(item), cast(IO[bytes], stream))
                length = stream.tell() - begin
                results.append(WriteResult(item.index, length, _StorageInfo(name, begin, length)))
            os.fsync(stream.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done


def _parts(item: WriteItem, chunk_bytes: int) -> list[WriteItem]:
    """Returns the item, or items for ranges of its rows of at most `chunk_bytes` each (at least one row)."""
    data = item.tensor_data
    if data is None or not data.size or data.size.numel() * data.properties.dtype.itemsize <= chunk_bytes:
        return [item]
    row, total = data.size[1:], data.size[0]
    step = max(1, chunk_bytes // (row.numel() * data.properties.dtype.itemsize))
    parts = []
    for first in range(0, total, step):
        offsets = torch.Size((first, *[0] * len(row)))
        chunk = ChunkStorageMetadata(offsets, torch.Size((min(step, total - first), *row)))
        index = MetadataIndex(item.index.fqn, offsets)
        parts.append(WriteItem(index, WriteItemType.SHARD, tensor_data=replace(data, chunk=chunk)))
    return parts
