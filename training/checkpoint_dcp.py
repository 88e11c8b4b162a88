"""States to files and back by torch.distributed.checkpoint (DCP), with digests computed while the bytes are written.

The files are an ordinary DCP checkpoint. `Streamed` makes the tensors of a model that is larger than memory (a seed, an import) one after
the other, each when it is written. A separate module, since DCP takes a second to import, which checking a configuration must not cost.

*States* are nested dictionaries {"model": {name: tensor}, ...}. DCP joins the keys: "model.layers.0.attention.wq.weight"."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from io import BufferedWriter, FileIO
from os import PathLike
from pathlib import Path
from typing import IO, Any, cast

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
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from training.checkpoint_files import METRICS_STATE, Digest, FileRecord

States = dict[str, dict[str, Any]]

_OPTIONAL = ("optimizer.param_groups.", f"{METRICS_STATE}.")  # may be missing here or there
_HASHED_IN_THREAD_BYTES = 1 << 20  # from this length on a write is hashed by a second thread while the kernel copies it
# A reader loads whole each chunk that it needs a piece of: of one chunk of gigabytes, each of a thousand ranks would read all.
CHUNK_BYTES = 64 << 20


class OtherRankFailed(RuntimeError):
    """Another rank could not write its share; the message is its error's."""


def write(
    states: Mapping[str, Any], path: Path, *, group: dist.ProcessGroup | None, planner: Streamed | None = None
) -> list[FileRecord]:
    """Writes this rank's share of `states` into the folder `path`; returns the records of its files, on the disk by then. All ranks of
    `group` (None: one process) take part and fail together: those that could not write with their OSError, others with OtherRankFailed."""
    _quiet()
    writer = _OneAtATime(path) if planner else FileSystemWriter(path)
    crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # of the zip format: no reader of torch checks them
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-digest") as digester:
            writer.fs = file_system = _DigestingFileSystem(digester)
            save(dict(states), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as failure:
        # torch.save turns a failed write into a RuntimeError about its own file position
        own, _ = failure.failures.get(dist.get_rank(group) if group is not None else 0, (None, None))
        cause = file_system.failure or (own if isinstance(own, OSError) else None)
        raise cause or OtherRankFailed(_first_failure(failure)) from None
    finally:
        torch.serialization.set_crc32_options(crc32)
    return list(file_system.records.values())


def read(
    states: Mapping[str, Any], path: Path, *, group: dist.ProcessGroup | None, reader: FileSystemReader | None = None
) -> str:
    """Fills `states` from the checkpoint in place: each rank its own shards of tensors; other values are replaced. `fit` must have found
    every name. Returns "", or why a rank could not read its part (the same on all ranks of `group`); the states are then a mixture."""
    _quiet()
    try:
        load(dict(states), storage_reader=reader or FileSystemReader(path), process_group=group, no_dist=group is None)
    except CheckpointException as failure:
        return _first_failure(failure)
    return ""


def read_metadata(path: Path) -> Metadata:
    """Names, sizes and dtypes of the tensors of a checkpoint. Unpickles, so verify the file's digest first."""
    return FileSystemReader(path).read_metadata()


def fit(
    states: States, metadata: Metadata, *, wanted: Collection[str], exclude: Sequence[str], exact: bool
) -> tuple[States, list[str], set[str]]:
    """Returns the states that the checkpoint can fill, for `read`; a phrase for each name that cannot be filled; and the names that the
    checkpoint alone has. Compares names and sizes (`exact`: dtypes too) with those of the states in `wanted`. Names that are, or begin
    with, one in `exclude` are left out on both sides. A parameter whose optimizer state was never made (it had no gradient), settings of
    the optimizer that another version of torch does not know and the metrics of groups may be missing."""
    saved = {name: value for name, value in metadata.state_dict_metadata.items() if name.split(".")[0] in wanted}
    misfits = [
        f'exclude_from_loading: no name begins with "{prefix}"'
        for prefix in exclude
        if not any(_has_prefix(name, [prefix]) for name in saved)
    ]
    saved = {name: value for name, value in saved.items() if not _has_prefix(name, exclude)}
    with_state = {name.rpartition(".")[0] for name in saved}

    def is_asked_for(name: str) -> bool:
        unmade = name.startswith("optimizer.state.") and name.rpartition(".")[0] not in with_state
        may_be_missing = name.startswith(_OPTIONAL) or unmade
        return (name in saved or not may_be_missing) and not _has_prefix(name, exclude)

    asked = {
        state: {key: value for key, value in values.items() if is_asked_for(f"{state}.{key}")}
        for state, values in states.items()
    }
    states = {state: values for state, values in asked.items() if values}
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(states))
    present = dict(planner.state_dict)  # under the joined names that DCP saves them by
    misfits += [misfit for name, value in present.items() if (misfit := _misfit(name, value, saved.get(name), exact))]
    unknown = {name for name in saved.keys() - present.keys() if not name.startswith(_OPTIONAL)}
    return states, misfits, unknown


class _DigestingFileSystem(FileSystem):
    """DCP's file system for one save: hashes the bytes written, and keeps the cause of a failure."""

    def __init__(self, digester: ThreadPoolExecutor) -> None:
        self.records: dict[str, FileRecord] = {}
        self.failure: OSError | None = None
        self._digester = digester

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[Any]:
        assert mode == "wb", "made for one save; reading needs no digests"
        name = Path(path).name
        try:
            with DigestingStream(Path(path), self._digester) as stream:
                yield stream
                self.records[name] = stream.digest.record(name)
        except OSError as error:
            # A failed write() carries no file name, and torch.save turns it into an error of its own.
            self.failure = self.failure or OSError(error.errno, error.strerror, str(path))
            raise

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        super().rename(path, new_path)
        name = Path(new_path).name
        self.records[name] = replace(self.records.pop(Path(path).name), name=name)


class DigestingStream(BufferedWriter):
    """A new file that hashes what is written to it."""

    def __init__(self, path: Path, digester: ThreadPoolExecutor) -> None:
        super().__init__(FileIO(path, "wb"))
        self._digester, self.digest = digester, Digest()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < _HASHED_IN_THREAD_BYTES:
            self.digest.update(view)
            return super().write(view)
        hashed = self._digester.submit(self.digest.update, view)  # both release the interpreter's lock
        try:
            return super().write(view)
        finally:
            hashed.result()

    def fileno(self) -> int:
        self.flush()  # DCP asks before it fsyncs
        return super().fileno()


def _quiet() -> None:
    """DCP warns each time a single process saves or loads that it does so alone: that is what was asked for."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def _has_prefix(name: str, prefixes: Iterable[str]) -> bool:
    """True when the name is one of the prefixes or lies below it."""
    return any(name == prefix or name.startswith(prefix.rstrip(".") + ".") for prefix in prefixes)


def _misfit(name: str, value: Any, saved: Any, exact: bool) -> str:
    """Why the checkpoint's `saved` cannot go into `value`; "" if it can."""
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


class Streamed(DefaultSavePlanner):
    """The planner for states whose tensors lie on the meta device: names, sizes and dtypes, but no values. `make(name)` gives them; it is
    called once for each name, when DCP writes it and the tensor before has been freed. `written` gets the bytes of each finished chunk."""

    def __init__(
        self,
        make: Callable[[str], torch.Tensor],
        *,
        written: Callable[[int], None] = lambda count: None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        super().__init__()
        self._make, self._written, self._chunk_bytes = make, written, chunk_bytes
        self._name, self._tensor = "", torch.empty(0)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        self.plan = replace(plan, items=[part for item in plan.items for part in _parts(item, self._chunk_bytes)])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The values of one chunk, in memory of their own size."""
        name, data = write_item.index.fqn, write_item.tensor_data
        assert data is not None, f"{name}: tensors alone can be streamed"
        if name != self._name:
            self._tensor = torch.empty(0)  # before memory is taken for the next
            self._name, self._tensor = name, self._make(name)
            assert (self._tensor.shape, self._tensor.dtype) == (data.size, data.properties.dtype), name
        chunk = self._tensor
        if write_item.type == WriteItemType.SHARD:
            first, rows = data.chunk.offsets[0], data.chunk.sizes[0]
            chunk = chunk[first : first + rows].clone()  # torch.save of a view would write the whole tensor
        self._written(chunk.nbytes)
        return chunk


class _OneAtATime(FileSystemWriter):
    """DCP's writer and file format; but DCP's own keeps each tensor until the file is complete."""

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
    """The item itself, or the ranges of rows, each of at most `chunk_bytes` if a row is, that make it up."""
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
