"""What lies beside published weights and goes where they go: the tokenizer's files, and how text is drawn.

Flow: hf_import.py takes them into OUT/tokenizer, which model.tokenizer_path names; hf_export.py takes them from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from contrib.interchange.landing import copy

TOKENIZER = "tokenizer.json"
GENERATION = "generation_config.json"
_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
)


def carried(folder: Path) -> list[Path]:
    """Those of a folder that go along."""
    return [folder / name for name in (TOKENIZER, *_BESIDE) if (folder / name).is_file()]


def of_tokenizer(path: str) -> Iterator[tuple[Path, str]]:
    """(file, the name it is published by) of what is there of model.tokenizer_path, be it a file or its folder."""
    given = Path(path).expanduser()
    file = given / TOKENIZER if given.is_dir() else given
    if file.is_file():
        yield file, TOKENIZER
    for beside in carried(file.parent):
        if beside.name != TOKENIZER:
            yield beside, beside.name


def carry(files: list[Path], folder: Path) -> None:
    """Copies them, onto the disk. Raises OSError."""
    folder.mkdir()
    for file in files:
        copy(file, folder / file.name)
