"""Folders of published weights, which appear whole or not at all, and the tokenizer's files beside the weights.

Flow: hf_import.py and hf_export.py fill one. Until the last line it is called OUT.partial. On import the tokenizer's files go into
OUT/tokenizer, which model.tokenizer_path names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from training.appended import sync_path, try_lock

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


@contextmanager
def landing(out: Path) -> Iterator[Path]:
    """An empty folder to fill, by `put` and `copy`; it becomes `out` when the block ends well, and is removed when it does not. Leftovers
    of a killed process are removed. Raises ValueError if `out` is there, or another process is filling it."""
    refuse(out)
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        if try_lock(descriptor) is False:
            raise ValueError(f"{out}: another process is writing it; wait for it, or name another folder")
        refuse(out)  # the other process may have ended in between
        try:
            for path in partial.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            yield partial
            for folder, _, _ in os.walk(partial, topdown=False):
                sync_path(Path(folder))
            refuse(out)
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)
    sync_path(out.absolute().parent)


def refuse(out: Path) -> None:
    """Raises ValueError if there is anything by that name, or the name says nothing."""
    if not out.name or out.name == "..":
        raise ValueError(f"{out}: must be the name of a folder that is not there yet")
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: is there already; remove it, or name another folder")
    for parent in out.absolute().parents:
        if parent.exists():
            if not parent.is_dir():
                raise ValueError(f"{out}: {parent} is a file, not a folder")
            return


def put(path: Path, text: str) -> None:
    """Writes a file that is on the disk when this returns. Raises OSError."""
    path.write_text(text, encoding="utf-8")
    sync_path(path)


def copy(source: Path, target: Path) -> None:
    """The content of a file, on the disk when this returns. Raises OSError."""
    shutil.copyfile(source, target)
    sync_path(target)


def carried(folder: Path) -> list[Path]:
    """The tokenizer's files in a folder."""
    return [folder / name for name in (TOKENIZER, *_BESIDE) if (folder / name).is_file()]
