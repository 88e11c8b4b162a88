"""Folders of published weights: one that appears whole or not at all, and what goes along beside weights.

Flow: hf_import.py and hf_export.py fill one. Until the last line it is called OUT.partial, which no program takes for what OUT will be.
The tokenizer's files, and how text is drawn, go where weights go: on import into OUT/tokenizer, which model.tokenizer_path names.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    """An empty folder to fill; it becomes `out` when the block ends well, and is removed when it does not.

    What a killed process left of one is cleared away. Raises ValueError if `out` is there, or another process is filling it.
    The files must be on the disk when the block ends: `put` and `copy` see to that.
    """
    refuse(out)
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends
        except BlockingIOError:
            raise ValueError(f"{out}: another process is writing it; wait for it, or name another folder") from None
        except OSError:  # a file system without locks: better an unguarded folder than none
            pass
        refuse(out)  # the other process may have ended in between
        try:
            for path in partial.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            yield partial
            for folder, _, _ in os.walk(partial, topdown=False):
                sync(Path(folder))
            refuse(out)
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)
    sync(out.absolute().parent)


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
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def copy(source: Path, target: Path) -> None:
    """The content of a file, on the disk when this returns. Raises OSError."""
    shutil.copyfile(source, target)
    sync(target)


def sync(path: Path) -> None:
    """Flushes a file's contents, or a folder's names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def carried(folder: Path) -> list[Path]:
    """Returns the files of a folder that go along."""
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
