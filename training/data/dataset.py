"""Entry point of the data: open_data returns the `TrainingData` of [training], which opens a loader per split."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from training.config import TrainingConfig
from training.data.cache import Corpus, open_corpus
from training.data.loader import BatchSource, MicrobatchSampler, open_loader
from training.data.order import SPLITS, Order, in_split
from training.data.sources import find_source
from training.data.streaming import StreamingLoader, open_stream
from training.log import Log
from training.tokenizer import Tokenizer


class _Data:
    """Base of both kinds of data. Its checkpoint state is the digest of content and tokenizer, which with (seed, seq_len, position)
    determines every sequence; "" for a stream, whose loader saves its cursor."""

    digest = ""

    def state_dict(self) -> dict[str, str]:
        return {"digest": self.digest}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Raises ValueError if the text or its tokenizer changed since the checkpoint."""
        if state["digest"] != self.digest:
            raise ValueError(
                "training.dataset: the text or its tokenizer changed since this run's checkpoint (digest "
                f"{state['digest'][:8]}, now {self.digest[:8]}), so the position in the data is invalid; restore the text, or "
                "start a new run with --job.name NAME --checkpoint.initial_load_path RUN/checkpoint/step-N"
            )


class StoredData(_Data):
    """A tokenised corpus in the cache."""

    def __init__(self, config: TrainingConfig, corpus: Corpus) -> None:
        self._config, self._corpus, self.digest = config, corpus, corpus.key

    def summary(self) -> str:
        meta, lengths = self._corpus.meta, np.diff(self._corpus.bounds)
        train, validation = (
            short(int(lengths[in_split(self._corpus, split, self._config.dataset_held_out)].sum())) for split in SPLITS
        )
        files = f"{meta.files} file{'s' * (meta.files != 1)}, {short(meta.bytes, 'B')}, digest {meta.content[:8]}"
        return f"{self._config.dataset}: {files}, {train} training tokens, {validation} validation tokens"

    def order(self, split: str, *, seed: int, seq_len: int) -> Order:
        """Returns the order of a split ("train", "validation"). Raises ValueError if it is too small."""
        return Order(self._corpus, split, held_out=self._config.dataset_held_out, seed=seed, seq_len=seq_len)

    def loader(self, split: str, sampler: MicrobatchSampler, *, pin_memory: bool = False) -> BatchSource:
        """Opens a loader, which the caller closes. Raises ValueError as `order` does. `pin_memory`: for copies to CUDA."""
        order = self.order(split, seed=self._config.seed, seq_len=self._config.seq_len)
        return open_loader(order, sampler, self._config.dataloader, pin_memory=pin_memory)


class StreamedData(_Data):
    """A Hugging Face data set, in its own order."""

    def __init__(self, config: TrainingConfig, tokenizer: Tokenizer) -> None:
        self._config, self._tokenizer = config, tokenizer

    def summary(self) -> str:
        config = self._config
        subset = f" ({config.dataset_subset})" if config.dataset_subset else ""
        return f"huggingface: {config.dataset_path}{subset}, split {config.dataset_split}, streamed in its own order"

    def loader(self, split: str, sampler: MicrobatchSampler, *, pin_memory: bool = False) -> BatchSource:
        stream = open_stream(self._config, dp_rank=sampler.dp_rank, dp_size=sampler.dp_size)
        return StreamingLoader(stream, self._tokenizer, self._config, sampler, split=split, pin_memory=pin_memory)


TrainingData = StoredData | StreamedData


def open_data(
    config: TrainingConfig, tokenizer: Tokenizer, cache_folder: str | Path, *, log: Log, vocab_size: int = 0
) -> TrainingData:
    """Opens the data of [training], tokenised or mapped; every rank calls it. `vocab_size` and errors: see `open_corpus`."""
    if config.dataset == "huggingface":
        return StreamedData(config, tokenizer)
    corpus = open_corpus(find_source(config), tokenizer, Path(cache_folder), log=log, vocab_size=vocab_size)
    return StoredData(config, corpus)


def short(count: int, unit: str = "") -> str:
    """Formats 12345678 as "12.3 M", with unit "B" as "12.3 MB"."""
    for prefix, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {prefix}{unit}"
    return f"{count} {unit}".rstrip()
