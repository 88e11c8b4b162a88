"""The door: what a run says of its data, and what its checkpoint holds it to."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.unit.data_corpus import files_config, write_jsonl
from tests.unit.fakes import Lines
from training.config import TrainingConfig, ValidationConfig
from training.data.dataset import CachedData, open_data, short
from training.data.loader import MicrobatchSampler
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
    assert summary.startswith("files: 2 files, 101.1 kB, digest ")
    assert summary.endswith(", 100.0 k training tokens, 0 validation tokens")
    assert len(data.digest) == 32


def test_loaders_follow_the_section(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(200)])
    config = files_config(path, seq_len=16, local_batch_size=2, seed=5, dataset_held_out=0.2)
    data = open_it(config, tmp_path / "cache")
    sampler = MicrobatchSampler(4, config.local_batch_size, 1, 2)
    [validation] = data.validation_loaders(sampler).values()
    orders = (data.order(seed=5, seq_len=16), data.validation_orders(seq_len=16)[""])
    for loader, order in zip((data.loader(sampler), validation), orders, strict=True):
        with closing(loader):
            (batch,) = loader.load([8])
        assert batch.inputs.tolist() == [order.sequence(position)[:-1].tolist() for position in (10, 11)]


def test_a_checkpoint_of_other_text_is_refused(tmp_path: Path) -> None:
    data = open_it(files_config(write_jsonl(tmp_path / "a.jsonl", ["one", "two"])), tmp_path / "cache")
    data.load_state_dict(data.state_dict())
    with pytest.raises(ValueError) as caught:
        data.load_state_dict({"digest": "0123456789abcdef"})
    assert str(caught.value) == (
        "training.dataset: the text or its tokenizer changed since this run's checkpoint (digest 01234567, now "
        f"{data.digest[:8]}), so the position in the data is invalid; restore the text, or start a new "
        "run with --job.name NAME --checkpoint.initial_load_path RUN/checkpoint/step-N"
    )


def test_the_standard_library_is_enough_to_train_on(tmp_path: Path) -> None:
    data = open_it(TrainingConfig(), tmp_path)
    assert data.order(seed=0, seq_len=256).sequences_per_epoch > 10_000
    assert data.validation_orders(seq_len=256)[""].sequences_per_epoch > 50
    assert data.summary().startswith("stdlib: ")


@pytest.mark.parametrize(
    ("count", "unit", "text"),
    [
        (0, "", "0"),
        (999, "B", "999 B"),
        (1000, "B", "1.0 kB"),
        (10_912_345, "", "10.9 M"),
        (2_500_000_000, "B", "2.5 GB"),
    ],
)
def test_short(count: int, unit: str, text: str) -> None:
    assert short(count, unit) == text
