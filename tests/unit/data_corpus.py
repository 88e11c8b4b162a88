"""Small corpora for the tests of training/data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from tests.unit.fakes import Lines
from training.config import TrainingConfig
from training.data.cache import Corpus, open_corpus
from training.data.sources import find_source
from training.tokenizer import ByteTokenizer, Tokenizer


class OneSeparator(ByteTokenizer):
    """One token begins a document and ends the one before, as GPT-2's."""

    eos_id = ByteTokenizer.bos_id

    def encode_documents(self, documents: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
        pieces = [self.encode(document, bos=True) for document in documents]
        return np.concatenate(pieces), np.array([len(piece) for piece in pieces])

    def fingerprint(self) -> str:
        return "one separator"


def write_jsonl(path: Path, documents: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return path


def files_config(path: Path | str, **keys: Any) -> TrainingConfig:
    return TrainingConfig(dataset="files", dataset_path=str(path), **keys)


def open_small(
    config: TrainingConfig,
    cache: Path,
    *,
    tokenizer: Tokenizer | None = None,
    log: Lines | None = None,
    limits: Mapping[str, int] = MappingProxyType({}),
    **more: Any,
) -> Corpus:
    """`limits`: temporary values of constants in training/data/cache.py."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            patch.setattr(f"training.data.cache.{name}", value)
        return open_corpus(find_source(config), tokenizer or ByteTokenizer(), cache, log=log or Lines(), **more)


def document(corpus: Corpus, number: int) -> list[int]:
    start, end = (int(bound) for bound in corpus.bounds[number : number + 2])
    ids: list[int] = corpus.read(start, end - start).tolist()
    return ids
