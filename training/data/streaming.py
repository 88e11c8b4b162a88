"""Hugging Face data sets, streamed in their own order without shuffling; documents are held out by content, as for other sources.

Each rank's cursor in the stream is saved in the checkpoint; only the same numbers of data-parallel ranks and of workers can resume from it,
since the workers of a rank share its documents. Fault tolerance does not support streams. With num_workers = 0 a rank reads within its
step: use at least one worker for a remote stream."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from torch.utils.data import IterableDataset

from training.config import TrainingConfig, need
from training.data.cache import bucket_of
from training.data.loader import (
    Batch,
    BatchLoader,
    SlotPartition,
    Task,
    end_with_trainer,
    end_workers,
    iterate,
    make_batch,
    separator_of,
    unsignalled_workers,
)
from training.data.order import buckets_of
from training.data.sources import text_of_record
from training.tokenizer import Tokenizer


class Stream(Protocol):
    """The used part of `datasets.IterableDataset`: one pass over the records, and a cursor. Later `iter`s start at the loaded cursor; {}
    is the beginning. `state_dict` returns the cursor of the newest iterator. (No `set_epoch`: it would void a cursor.)"""

    def __iter__(self) -> Iterator[dict[str, Any]]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def open_stream(config: TrainingConfig, *, dp_rank: int, dp_size: int) -> Stream:
    """Opens this rank's share of a data set on the hub or in a folder. Raises ValueError, beginning with the setting."""
    path, subset, split = config.dataset_path, config.dataset_subset, config.dataset_split
    setting = f'training.dataset_path = "{path}"'
    need("datasets", extra="hf", setting=setting)
    import datasets
    from datasets.distributed import split_dataset_by_node

    try:
        stream = datasets.load_dataset(path, name=subset or None, split=split, streaming=True)
    except (ValueError, FileNotFoundError, ConnectionError, datasets.exceptions.DatasetsError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{setting}: {reason}; see training.dataset_subset and training.dataset_split") from error
    share: Stream = split_dataset_by_node(stream, rank=dp_rank, world_size=dp_size)
    return share


class PackedStream(IterableDataset[np.ndarray]):
    """Infinite iterator over rows [seq_len + 1] int64, packed from documents in `buckets`. Its state: cursor, tokens still to return."""

    def __init__(self, stream: Stream, tokenizer: Tokenizer, config: TrainingConfig, buckets: range) -> None:
        self._stream, self._tokenizer, self._buckets = stream, tokenizer, buckets
        self._text_key, self._seq_len = config.dataset_text_key, config.seq_len
        self._place = f'training.dataset_path = "{config.dataset_path}": a record of the stream'
        self._waiting = np.empty(0, dtype=np.int64)
        self._records: Iterator[dict[str, Any]] | None = None
        self._cursor: dict[str, Any] = {}  # cursor of the next iterator over the records
        self._found = False  # True once any pass has found a document of the split

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        pieces, count = [self._waiting], len(self._waiting)
        while count <= self._seq_len:
            pieces.append(self._next_document())
            count += len(pieces[-1])
        tokens = np.concatenate(pieces)
        self._waiting = tokens[self._seq_len :]  # the last target is the next row's first input
        return tokens[: self._seq_len + 1]

    def state_dict(self) -> dict[str, Any]:
        cursor = self._cursor if self._records is None else self._stream.state_dict()
        return {"found": self._found, "waiting": self._waiting.tolist(), "stream": cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._found, self._cursor = state["found"], state["stream"]
        self._waiting = np.array(state["waiting"], dtype=np.int64)
        self._records = None

    def _next_document(self) -> np.ndarray:
        """Returns the tokens of the split's next document. Raises StopIteration if a whole pass has none (a worker without a shard)."""
        while True:
            if self._records is None:
                self._stream.load_state_dict(self._cursor)
                self._records = iter(self._stream)
            for record in self._records:
                text = text_of_record(record, self._text_key, self._place)
                if text and bucket_of(text) in self._buckets:
                    self._found = True
                    return self._tokenizer.encode_documents([text])[0].astype(np.int64)
            if not self._found:
                raise StopIteration
            self._cursor, self._records = {}, None


class StreamingLoader(BatchLoader):
    """Loads batches from a stream. For validation every load returns the same first batches, which stay in memory."""

    def __init__(
        self,
        stream: Stream,
        tokenizer: Tokenizer,
        config: TrainingConfig,
        partition: SlotPartition,
        *,
        split: str,
        pin_memory: bool,
    ) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader

        super().__init__(partition, pin_memory=pin_memory)
        self._repeats, self._validation_rows = split == "validation", list[np.ndarray]()
        self._first_token = tokenizer.bos_id if config.document_mask else None  # of each document
        self._separator = separator_of(tokenizer)
        self._key = f"rank {partition.dp_rank} of {partition.dp_size}"
        self._rows: Iterator[np.ndarray] | None = None
        self._workers = workers = config.dataloader.num_workers
        # torchdata 0.11 makes this call, and torch 2.13 warns of it
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")
        self._loader = StatefulDataLoader(
            PackedStream(stream, tokenizer, config, buckets_of(split, config.dataset_held_out)),
            batch_size=partition.local_batch_size,
            collate_fn=np.stack,
            num_workers=workers,
            prefetch_factor=config.dataloader.prefetch_factor if workers else None,
            multiprocessing_context="forkserver" if workers else None,
            worker_init_fn=end_with_trainer,
        )

    def start(self, tasks: list[Task]) -> Callable[[], Batch]:
        """Starts reading rows in the order of the stream, whichever slots are requested."""
        numbered = iter(enumerate(tasks))

        def read() -> Batch:
            index, (slot, _, ends_slot) = next(numbered)
            while self._repeats and len(self._validation_rows) <= index:
                self._validation_rows.append(self._next_rows())
            rows = self._validation_rows[index] if self._repeats else self._next_rows()
            begins = None if self._first_token is None else rows == self._first_token
            starts = None if begins is None else np.maximum.accumulate(begins * np.arange(rows.shape[1]), axis=1)
            return make_batch(rows, (slot, (), ends_slot), starts, separator=self._separator)

        return read

    def state_dict(self) -> dict[str, Any]:
        """Returns one JSON string under a key of this rank; a checkpoint has those of all ranks."""
        with unsignalled_workers():  # the first call starts them, if nothing has been read yet
            return {self._key: json.dumps(self._loader.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on at the cursor of this rank, which the checkpoint has if as many data-parallel ranks saved it (CheckpointLoader._restore).
        Raises ValueError if another number of workers saved it."""
        cursor = json.loads(state[self._key])
        # torchdata's keys; its own check comes with the first batch
        saved = cursor["_snapshot"]["_main_snapshot"]["_num_workers"] if "_snapshot" in cursor else 0
        if saved != self._workers:
            raise ValueError(
                f"training.dataloader.num_workers = {self._workers}: the checkpoint has the cursors of {saved}, which another number "
                f"cannot continue; nearest: {saved}"
            )
        self._rows = None
        self._loader.load_state_dict(cursor)

    def close(self) -> None:
        super().close()
        end_workers(self._loader)
        self._rows = None
        self._validation_rows.clear()

    def _next_rows(self) -> np.ndarray:
        """Returns the next rows of the stream, [B, T + 1] int64."""
        if self._rows is None:
            self._rows = iterate(self._loader)
        return next(self._rows)
