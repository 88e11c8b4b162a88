"""Weights that are made while they are saved, one tensor after the other: for a model that is larger than memory (a seed, an import)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

# A reader loads every chunk that it needs a piece of, whole. Of a tensor of gigabytes in one chunk, each of a thousand
# ranks would read all of it.
CHUNK_BYTES = 64 << 20


class Streamed(DefaultSavePlanner):
    """The planner for states whose tensors lie on the meta device: names, sizes and dtypes, but no values. `make(name)` gives the values;
    it is called once for each name, when DCP writes it, and by then the tensor before has been freed. `written` gets the bytes of each
    chunk that is done."""

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

    def writer(self, path: Path) -> FileSystemWriter:
        return _OneAtATime(path)

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
