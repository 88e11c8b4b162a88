"""The entry point: the data of a run as reported, and as its checkpoint requires it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts import prepare_data
from tests.unit.data_corpus import OneSeparator, files_config, write_jsonl
from tests.unit.fakes import Lines
from training.config import DataloaderConfig, SkipConfig, SourceConfig, TrainingConfig, ValidationConfig
from training.data.dataset import CachedData, DataSegment, StoredData, open_data
from training.data.loader import SlotPartition
from training.loss import IGNORED
from training.tokenizer import ByteTokenizer


def open_it(config: TrainingConfig, cache: Path) -> CachedData:
    data = open_data(config, ValidationConfig(enable=True), ByteTokenizer(), cache, log=Lines())
    assert isinstance(data, CachedData)
    return data


def test_summary_names_the_corpus_and_its_splits(tmp_path: Path) -> None:
    texts = ["x" * 998] * 3 + [f"{number:0998}" for number in range(97)]
    for number in range(2):
        write_jsonl(tmp_path / f"{number}.jsonl", texts[50 * number : 50 * number + 50])
    data = open_it(files_config(tmp_path, dataset_held_out=0.0), tmp_path / "cache")
    summary = data.summary()
    assert summary.startswith("files: 2 files, 101kB, digest ")
    assert summary.endswith(", 100k training tokens, 0 validation tokens")
    assert len(data.digest) == 32


def test_loaders_follow_the_section(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(200)])
    config = files_config(path, seq_len=16, local_batch_size=2, seed=5, dataset_held_out=0.2)
    data = open_it(config, tmp_path / "cache")
    partition = SlotPartition(4, config.local_batch_size, 1, 2)
    held_out = data.validation_orders(seq_len=16)
    [validation] = data.validation_loaders(held_out, partition).values()
    orders = (data.order(seed=5, seq_len=16), held_out[""])
    for loader, order in zip((data.loader(partition), validation), orders, strict=True):
        with closing(loader):
            (batch,) = loader.load([8])
        assert batch.inputs.tolist() == [order.sequence(position)[:-1].tolist() for position in (10, 11)]


def test_a_segment_goes_on_with_the_same_documents_left_out() -> None:
    plain = TrainingConfig(dataset="store", dataset_path="c4")
    one = replace(plain, skip=(SkipConfig(3, 5, "c4"),))
    saved = DataSegment.of(one, "digest")
    moved = replace(one, dataset_path="elsewhere/c4", skip=(SkipConfig(3, 5, "elsewhere/c4"),))
    positions = replace(one, skip=(*one.skip, SkipConfig(3, 5)))
    for same in (one, moved, positions):
        assert saved.continues(DataSegment.of(same, "digest"))
    older = DataSegment(0, "digest", {k: v for k, v in DataSegment.of(plain, "digest").settings.items() if k != "skip"})
    for other in (plain, replace(one, skip=(SkipConfig(3, 6, "c4"),))):
        assert not saved.continues(DataSegment.of(other, "digest"))
    assert older.continues(DataSegment.of(plain, "digest")) and not older.continues(saved)
    assert saved.config(moved).skip == (SkipConfig(3, 5, "c4"),)


def test_a_checkpoint_of_other_text_is_refused(tmp_path: Path) -> None:
    data = open_it(files_config(write_jsonl(tmp_path / "a.jsonl", ["one", "two"])), tmp_path / "cache")
    data.load_state_dict(data.state_dict())
    with pytest.raises(ValueError) as caught:
        data.load_state_dict({"digest": "0123456789abcdef"})
    assert str(caught.value) == (
        f"training.dataset: the text or its tokenizer changed since the checkpoint (digest 01234567, now {data.digest[:8]}), so the "
        "position in the data is invalid; restore the text, or start a new run from the weights alone: --job.name NAME "
        "--checkpoint.initial_load_path RUN/checkpoint/step-N --checkpoint.initial_load_model_only true"
    )


def test_a_checkpoint_with_other_tokens_held_out_names_the_setting(tmp_path: Path) -> None:
    """The held-out tokens are the end of a document that is cut there."""
    config = files_config(write_jsonl(tmp_path / "a.jsonl", ["one document"]), dataset_held_out=0.2)
    validated = open_it(config, tmp_path / "cache")
    data = open_data(config, ValidationConfig(), ByteTokenizer(), tmp_path / "cache", log=Lines())
    with pytest.raises(ValueError, match=r"^validation\.enable = false: it was true in this run, .*; restore it$"):
        data.load_state_dict(validated.state_dict())
    with pytest.raises(ValueError, match=r"^validation\.enable = true: it was false in this run, .*; restore it$"):
        validated.load_state_dict(data.state_dict())


def test_the_standard_library_is_enough_to_train_on(tmp_path: Path) -> None:
    data = open_it(TrainingConfig(), tmp_path)
    assert data.order(seed=0, seq_len=256).sequences_per_epoch > 10_000
    assert data.validation_orders(seq_len=256)[""].sequences_per_epoch > 50
    assert data.summary().startswith("stdlib: ")


def resumed(data: StoredData | CachedData, state: dict[str, str], position: int, holes: Sequence[int] = ()) -> str:
    data.load_state_dict(state)
    return data.continue_segments(position, holes, (), 10)


def first_ids(data: StoredData | CachedData, positions: Sequence[int]) -> list[list[int]]:
    partition = SlotPartition(1, 1, 0, 1)
    with closing(data.loader(partition)) as loader:
        return [[*batch.inputs[0].tolist(), int(batch.labels[0, -1])] for batch in loader.load(positions)]


def test_a_token_that_is_bos_and_eos_is_a_target_as_eos(tmp_path: Path) -> None:
    config = files_config(write_jsonl(tmp_path / "a.jsonl", ["a", "bc"] * 40), seq_len=16, document_mask=True)
    data = open_data(config, ValidationConfig(), tokenizer := OneSeparator(), tmp_path / "cache", log=Lines())
    with closing(data.loader(SlotPartition(1, 1, 0, 1))) as loader:
        [batch] = loader.load([1])
    assert torch.equal(batch.labels[:, :-1], batch.inputs[:, 1:])
    assert batch.document_starts is not None
    begins = (batch.inputs == tokenizer.bos_id)[:, 1:]
    assert torch.equal((batch.document_starts == torch.arange(16))[:, 1:], begins) and begins.any()


def test_each_branch_of_a_corpus_begins_a_segment(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(200)])
    config = files_config(path, seq_len=16, seed=5)
    first = open_it(config, tmp_path / "cache")
    order = first.order(seed=5, seq_len=16)
    longer = open_it(replace(config, seq_len=20, seed=6), tmp_path / "cache")
    left = order.sequences_per_epoch - 7
    assert resumed(longer, first.state_dict(), 7, [3]) == (
        f"data: a new epoch begins at sequence 7; {left} sequences of the one before are left over"
    )
    new = longer.order(seed=6 + (1 << 32), seq_len=20)
    assert first_ids(longer, [7, 8]) == [new.sequence(position).tolist() for position in (0, 1)]
    [late] = first_ids(longer, [3])  # a hole: 17 tokens, and 4 that are neither inputs nor targets
    assert late == [*order.sequence(3).tolist(), 0, 0, 0, IGNORED]
    masked = open_it(replace(config, seq_len=20, seed=6, document_mask=True), tmp_path / "cache")
    # for the seed, not the mask
    assert resumed(masked, first.state_dict(), 7, [3]).startswith("data: a new epoch begins")
    with closing(masked.loader(SlotPartition(1, 1, 0, 1))) as loader:
        [batch] = loader.load([3])
    assert batch.document_starts is not None
    assert batch.document_starts[0].tolist() == [*order.document_starts(3).tolist(), 17, 17, 17]

    again = open_it(replace(config, seq_len=20, seed=6), tmp_path / "cache")
    assert resumed(again, longer.state_dict(), 50) == ""  # no second branch
    assert first_ids(again, [7, 8]) == first_ids(longer, [7, 8])
    back = open_it(config, tmp_path / "cache")  # to the first settings: other sequences than those from position 0 on
    assert "sequence 60" in resumed(back, again.state_dict(), 60)
    assert [segment.first for segment in back.segments] == [0, 7, 60]
    assert first_ids(back, [60]) != first_ids(first, [0])
    assert first_ids(back, [3]) == first_ids(first, [3])
    (tmp_path / "elsewhere").mkdir()
    there = shutil.copy(path, tmp_path / "elsewhere")
    moved = open_it(replace(config, dataset_path=str(there), seq_len=20, seed=6), tmp_path / "cache")
    assert resumed(moved, longer.state_dict(), 50) == ""  # the same text elsewhere
    assert first_ids(moved, [7, 8]) == first_ids(longer, [7, 8])
    earlier = open_it(replace(config, seed=9), tmp_path / "cache")  # from a checkpoint before the second branch
    assert "sequence 7" in resumed(earlier, first.state_dict(), 7)
    assert [segment.first for segment in earlier.segments] == [0, 7]
    for seed in (5, 6):  # without the ledger the data begins anew, with the present settings
        anew, fresh = (open_it(replace(config, seed=seed, seq_len=4 * seed - 4), tmp_path / "cache") for _ in range(2))
        resumed(anew, longer.state_dict(), 0)
        assert anew.segments == fresh.segments and first_ids(anew, [0, 8]) == first_ids(fresh, [0, 8])
    shares = [
        resumed(open_it(replace(config, dataset_held_out=share), tmp_path / "cache"), first.state_dict(), 7)
        for share in (0.01, 0.2)
    ]
    assert ["trained on before" in text for text in shares] == [False, True]


def test_worker_processes_read_the_new_order(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(200)])
    config = files_config(path, seq_len=16, dataloader=DataloaderConfig(num_workers=1))
    first = open_it(replace(config, seed=4), tmp_path / "cache")
    data = open_it(replace(config, seed=5), tmp_path / "cache")
    with closing(data.loader(SlotPartition(1, 1, 0, 1))) as loader:
        next(loader.load([0]))  # starts the worker, with the order of now
        resumed(data, first.state_dict(), 7)
        rows = [batch.inputs[0].tolist() for batch in loader.load([3, 7])]
    orders = (first.order(seed=4, seq_len=16).sequence(3), data.order(seed=5 + (1 << 32), seq_len=16).sequence(0))
    assert rows == [order[:-1].tolist() for order in orders]


def test_a_checkpoint_before_segments(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(200)])
    config = files_config(path, seq_len=16, seed=5)
    data = open_it(config, tmp_path / "cache")
    old = {"digest": data.digest}
    assert resumed(data, old, 7) == "" and [segment.first for segment in data.segments] == [0]
    assert first_ids(data, [8]) == [data.order(seed=5, seq_len=16).sequence(8).tolist()]
    with pytest.raises(ValueError, match=r"training\.seed: this run's checkpoint is of a version that did not save it"):
        data.load_state_dict(old)
        data.continue_segments(7, (), ["optimizer.lr", "training.seed"], 10)


def test_a_setting_that_this_version_does_not_have(tmp_path: Path) -> None:
    """A checkpoint of a fork that has added one: the same data goes on; of data that differs in another setting, too, nothing is known."""
    path = write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(200)])
    data = open_it(files_config(path, seq_len=16, seed=5), tmp_path / "cache")
    (segment,) = json.loads(data.state_dict()["digest"])
    forks = {**segment, "settings": {**segment["settings"], "dataset_window": 3}}
    assert resumed(data, {"digest": json.dumps([forks])}, 7) == "" and [each.first for each in data.segments] == [0]
    assert first_ids(data, [8]) == [data.order(seed=5, seq_len=16).sequence(8).tolist()]
    for other in ({"dataset_window": 3, "seed": 4}, {"sources": [{"path": "a", "window": 3}]}):
        forks["settings"] = {**segment["settings"], **other}
        assert "a new epoch begins at sequence 7" in resumed(data, {"digest": json.dumps([forks])}, 7)
        assert data.orders()[0] == (0, None)


def test_other_stores_and_weights(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {number} " * 9 for number in range(50)])
        assert prepare_data.main([str(tmp_path / f"{name}.jsonl"), "--out", str(tmp_path / name), "--processes=1"]) == 0

    def stored(epochs: float = 0.0, **weights: float) -> StoredData:
        sources = tuple(
            SourceConfig(str(tmp_path / name), weight=weight, epochs=epochs) for name, weight in weights.items()
        )
        config = TrainingConfig(dataset="store", sources=sources, seq_len=16)
        data = open_data(config, ValidationConfig(), ByteTokenizer(), tmp_path, log=Lines())
        assert isinstance(data, StoredData)
        return data

    before = stored(a=1.0, b=3.0)
    after = stored(b=1.0, c=1.0)
    assert "a new epoch begins at sequence 40" in resumed(after, before.state_dict(), 40, [5])
    order = after.order(seed=1 << 32, seq_len=16)
    assert first_ids(after, [5, 40, 41, 90]) == [
        *first_ids(before, [5]),
        *(order.sequence(position).tolist() for position in (0, 1, 50)),
    ]
    limited = stored(epochs=1.0, a=1.0, c=1.0)
    end = limited.order(seed=0, seq_len=16).end
    assert end is not None
    assert limited.continue_segments(0, (), (), end) == ""
    with pytest.raises(ValueError, match=f"budgets of training.sources end after {end - 40}"):
        limited.continue_segments(40, (), (), end)
    limited.load_state_dict(before.state_dict())
    assert "sequence 40" in limited.continue_segments(40, (), (), end)  # budgets begin at the branch
    shutil.rmtree(tmp_path / "a")
    gone = stored(b=1.0, c=1.0)
    assert "sequence 40" in resumed(gone, before.state_dict(), 40)
    with pytest.raises(ValueError, match="1 sequences from 5 on were assigned, but not trained on"):
        resumed(gone, before.state_dict(), 40, [5])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the mappings of a process")
def test_a_store_is_mapped_once_whatever_the_number_of_segments(tmp_path: Path) -> None:
    """A store has thousands of shards, and a process may have 65,530 mappings."""
    write_jsonl(tmp_path / "a.jsonl", [f"{number} " * 9 for number in range(50)])
    assert prepare_data.main([str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "a"), "--processes=1"]) == 0
    state = dict[str, str]()
    for seed in range(4):
        config = TrainingConfig(dataset="store", dataset_path=str(tmp_path / "a"), seq_len=16, seed=seed)
        data = open_data(config, ValidationConfig(), ByteTokenizer(), tmp_path, log=Lines())
        assert isinstance(data, StoredData)
        if state:
            resumed(data, state, 10 * seed)
        state = data.state_dict()
    orders = data.orders()
    assert [first for first, order in orders if order is not None and len(order.sequence(0))] == [0, 10, 20, 30]
    assert Path("/proc/self/maps").read_text().count(str(tmp_path.resolve() / "a" / "00000.bin")) == 1
