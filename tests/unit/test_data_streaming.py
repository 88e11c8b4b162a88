"""Streams: rows equal those packed by hand, and a saved position is resumed exactly."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.data_corpus import OneSeparator, write_jsonl
from tests.unit.fakes import Lines
from training.config import DataloaderConfig, TrainingConfig, ValidationConfig
from training.data.cache import bucket_of
from training.data.dataset import open_data
from training.data.loader import Batch, DataFailed, SlotPartition
from training.data.streaming import StreamingLoader
from training.loss import IGNORED
from training.tokenizer import ByteTokenizer

TEXTS = [f"document {number}" + "x" * (number % 7) for number in range(40)]
HELD_OUT = 0.3


class FakeStream:
    """Behaves as `datasets.IterableDataset`: a loaded state applies to every later iterator."""

    def __init__(self, texts: Sequence[str | None], key: str = "text") -> None:
        self._texts, self._key = texts, key
        self._start: dict[str, Any] = {}
        self._place: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first = self._start["next"] if self._start else 0
        for number in range(first, len(self._texts)):
            self._place = {"next": number + 1}
            yield {self._key: self._texts[number]}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._place)  # type: ignore[arg-type]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._start = state


def loader_of(
    stream: FakeStream,
    *,
    split: str = "train",
    dp_rank: int = 0,
    dp_size: int = 1,
    document_mask: bool = False,
    num_workers: int = 0,
    tokenizer: ByteTokenizer | None = None,
) -> StreamingLoader:
    config = TrainingConfig(
        dataset_held_out=HELD_OUT,
        seq_len=8,
        local_batch_size=2,
        document_mask=document_mask,
        dataloader=DataloaderConfig(num_workers=num_workers),
    )
    partition = SlotPartition(4 * dp_size, config.local_batch_size, dp_rank, dp_size)
    return StreamingLoader(stream, tokenizer or ByteTokenizer(), config, partition, split=split, pin_memory=False)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), OneSeparator()])
def test_documents_start_at_bos(tokenizer: ByteTokenizer) -> None:
    with closing(loader_of(FakeStream(TEXTS), document_mask=True, tokenizer=tokenizer)) as loader:
        batches = list(loader.load([0, 4, 8]))
    for batch in batches:
        assert batch.document_starts is not None
        begins = batch.inputs == ByteTokenizer.bos_id
        assert torch.equal(batch.document_starts, torch.arange(8).where(begins, 0).cummax(1).values)
        ignored = batch.labels[:, :-1] == IGNORED
        assert torch.equal(ignored, begins[:, 1:]) if tokenizer.eos_id != tokenizer.bos_id else not ignored.any()
    assert any(batch.document_starts.any() for batch in batches)  # type: ignore[union-attr]


def rows(batches: Iterator[Batch]) -> list[list[int]]:
    """Returns each row's inputs and its last target."""
    return [
        [*inputs, labels[-1]]
        for batch in batches
        for inputs, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True)
    ]


def packed(texts: list[str], count: int) -> list[list[int]]:
    line = [i for text in texts for i in (256, *text.encode(), 257)] * 20
    return [line[8 * row : 8 * row + 9] for row in range(count)]


def in_split(texts: list[str], split: str) -> list[str]:
    return [text for text in texts if (bucket_of(text.encode()) < 1000 * HELD_OUT) == (split == "validation")]


def test_rows_are_the_split_back_to_back_over_and_over() -> None:
    batches = list(loader_of(FakeStream(TEXTS)).load([0, 4, 8] * 20))
    assert [batch.slot for batch in batches[:6]] == [0, 0, 4, 4, 8, 8]
    assert all(batch.sequence_positions == () for batch in batches)
    assert rows(iter(batches)) == packed(in_split(TEXTS, "train"), 240)
    with_null = loader_of(FakeStream([*TEXTS[:5], None, *TEXTS[5:]]))
    assert rows(with_null.load([0, 4, 8] * 20)) == rows(iter(batches))


@pytest.mark.parametrize("steps", [0, 1, 3, 17, 40])
@pytest.mark.parametrize("texts", [TEXTS, ["one document, and nothing after it"]])
def test_a_place_is_taken_up_exactly_even_twice(steps: int, texts: list[str]) -> None:
    stretch = [4 * step for step in range(60)]
    whole = rows(loader_of(FakeStream(texts)).load(stretch))
    first = loader_of(FakeStream(texts))
    before = rows(first.load(stretch[:steps]))
    state = first.state_dict()
    for _ in range(2):  # the second start saves before it has read anything
        resumed = loader_of(FakeStream(texts))
        resumed.load_state_dict(json.loads(json.dumps(state)))
        state = resumed.state_dict()
    assert before + rows(resumed.load(stretch[steps:])) == whole


WORKERS_PROGRAM = """\
import multiprocessing, os
from ft.children import LAUNCHER_SIGNALS
from tests.unit.test_data_streaming import TEXTS, FakeStream, in_split, loader_of, packed, rows

loader = loader_of(FakeStream(TEXTS), num_workers=1)
loader.state_dict()  # as a checkpoint that is loaded, before anything is read
[worker] = multiprocessing.active_children()
for pid in (worker.pid, multiprocessing.forkserver._forkserver._forkserver_pid):
    for number in LAUNCHER_SIGNALS:  # a scheduler's, for the rank
        os.kill(pid, number)
assert rows(loader.load([0, 4])) == packed(in_split(TEXTS, "train"), 8)
loader.close()
"""


def test_workers_that_start_for_a_checkpoint_ignore_the_signals_of_the_rank() -> None:
    subprocess.run([sys.executable, "-c", WORKERS_PROGRAM], check=True, timeout=200)  # with a fork server of its own


def test_validation_is_the_same_at_every_look() -> None:
    held = loader_of(FakeStream(TEXTS), split="validation")
    first = rows(held.load([0, 4]))
    assert rows(held.load([0, 4])) == first == packed(in_split(TEXTS, "validation"), 8)
    assert rows(held.load([0, 4, 8])) == packed(in_split(TEXTS, "validation"), 12)


def test_a_later_load_and_close_abandon_the_earlier() -> None:
    loader = loader_of(FakeStream(TEXTS))
    earlier = loader.load([0, 4])
    first = rows(iter([next(earlier)]))
    assert first + rows(loader.load([4])) == packed(in_split(TEXTS, "train"), 6)
    later = loader.load([8])
    loader.close()
    for batches in (earlier, later):
        with pytest.raises(RuntimeError, match=r"^stale iterator: "):
            next(batches)


def test_what_goes_wrong_in_the_stream_is_told() -> None:
    with pytest.raises(DataFailed, match=r'^reading data failed: training.* has no "text", only \'body\'; nea'):
        next(loader_of(FakeStream(TEXTS, key="body")).load([0]))
    with pytest.raises(DataFailed, match=r"^the data stream has no document of this split for this rank$"):
        next(loader_of(FakeStream([])).load([0]))


def test_a_stream_has_no_digest() -> None:
    config = TrainingConfig(dataset="huggingface", dataset_path="owner/name", dataset_subset="en")
    data = open_data(config, ValidationConfig(), ByteTokenizer(), "unused", log=Lines())
    assert data.digest == ""
    assert data.summary() == "huggingface: owner/name (en), split train, streamed in its own order"


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_real_data_set_is_taken_up_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    pytest.importorskip("datasets")
    (tmp_path / "data").mkdir()
    others = set(multiprocessing.active_children())  # another test's, for the whole session
    for number in range(4):
        write_jsonl(tmp_path / "data" / f"{number}.jsonl", TEXTS[10 * number : 10 * number + 5 * number + 1])
    config = TrainingConfig(
        dataset="huggingface",
        dataset_path=str(tmp_path / "data"),
        seq_len=8,
        local_batch_size=2,
        dataloader=DataloaderConfig(num_workers=num_workers),
    )
    data = open_data(config, ValidationConfig(), ByteTokenizer(), tmp_path / "unused", log=Lines())
    stretch = [8 * step for step in range(40)]
    stays, resumes = (data.loader(SlotPartition(8, 2, 0, 2)) for _ in range(2))
    with closing(stays), closing(resumes):
        list(stays.load(stretch[:25]))  # past the end of the records: each pass has few rows
        resumes.load_state_dict(json.loads(json.dumps(stays.state_dict())))
        assert rows(resumes.load(stretch[25:])) == rows(stays.load(stretch[25:]))
        other = loader_of(FakeStream(TEXTS), dp_size=2, num_workers=1)
        with pytest.raises(ValueError, match=rf"num_workers = 1: the checkpoint has the cursors of {num_workers}, "):
            other.load_state_dict(stays.state_dict())
    assert set(multiprocessing.active_children()) <= others
