"""Reads and writes folders of published weights: writes atomically, checks all headers before reading values, one tensor in memory at a
time.

The format (safetensors): 8 bytes with the length of the header, little-endian; the header in JSON, {name: {"dtype", "shape",
"data_offsets": [begin, end]}}; the values in row-major order, without gaps.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from training.durable_files import sync_path, try_lock

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # supported dtypes
_WIDTHS = {"F32": 4, "BF16": 2, "F16": 2}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_MAX_SHOWN = 3
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
_BESIDE = (
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION,
)


@dataclass(frozen=True)
class Found:
    """A tensor in a file, as described by the header."""

    file: Path
    shape: tuple[int, ...]
    code: str

    def __str__(self) -> str:
        return f"{self.code} {list(self.shape)}"


class Weights:
    """The tensors of a folder. The constructor reads headers, `read` the values."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError: a folder without weights, an incomplete file, or an index that does not match its files."""
        single, index = folder / SINGLE, folder / INDEX
        self.listed = single if single.exists() else index
        self.found: dict[str, Found] = {}
        if single.exists() and index.exists():
            raise ValueError(f"{folder}: has {SINGLE} and {INDEX}, two sets of weights; remove one")
        if single.exists():
            self._add(single, None)
            return
        if not index.exists():
            pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
            hint = "is a pickle, which could execute code and is not read; save it as safetensors"
            hint = f"; {pickles[0]} {hint}" if pickles else ""
            raise ValueError(f"{folder}: has neither {SINGLE} nor {INDEX}{hint}")
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise ValueError(f"{index}: has no weight_map, the file of each tensor")
        for name, file in where.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{index}: {name}: {file!r}: must be the name of a file in {folder}")
        for file in sorted({*where.values()}):
            self._add(folder / file, {name for name, at in where.items() if at == file})

    def check(self, wanted: Mapping[str, tuple[int, ...]], *, code: str, ignore: str, architecture: str) -> None:
        """Raises ValueError unless the tensors, but for names ending with `ignore`, are `wanted` (name -> shape), of `code` ("": any)."""
        problems = []
        for name, shape in wanted.items():
            found = self.found.get(name)
            if found is None:
                problems.append(f"{self.listed}: {name}: missing; expected {code or 'values'} {list(shape)}")
            elif found.shape != shape:
                actual = f"shape {list(found.shape)}"
                problems.append(f"{found.file}: {name}: {actual}, expected {list(shape)} by config.json")
            elif found.code not in ([code] if code else CODES.values()):
                expected = code or f"one of {', '.join(CODES.values())}"
                problems.append(f"{found.file}: {name}: dtype {found.code}, expected {expected}")
        problems += [
            f"{other.file}: {name}: {other}, which {architecture} does not have"
            for name, other in self.found.items()
            if name not in wanted and not name.endswith(ignore)
        ]
        raise_all(problems)

    def read(self, name: str) -> Tensor:
        """Returns the tensor, memory-mapped if possible."""
        with safe_open(self.found[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        # torch.save writes the whole storage, which in some versions of the package is the whole file: then copy the tensor.
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()

    def _add(self, file: Path, expected: set[str] | None) -> None:
        """Adds the tensors of a file; `expected`: the names that the index gives for it."""
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no mapping)
                    part = opened.get_slice(name)
                    self.found[name] = Found(file, tuple(part.get_shape()), part.get_dtype())
                names = set(opened.keys())
        except SafetensorError as error:
            raise ValueError(
                f"{file}: not a whole safetensors file: {' '.join(str(error).split())}; {_diagnosis(file)}"
            ) from None
        except FileNotFoundError:
            raise ValueError(f"{file}: missing; {self.listed} names it") from None
        except OSError as error:
            raise ValueError(f"{file}: cannot be read: {error}") from None
        if expected is None:
            return
        problems = [f"{file}: {name}: missing; {INDEX} lists it for this file" for name in sorted(expected - names)]
        problems += [
            f"{file}: {name}: {self.found[name]}, which {INDEX} does not list for this file"
            for name in sorted(names - expected)
        ]
        raise_all(problems)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises ValueError: no such file, or not a JSON object."""
    try:
        body = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{path}: nested too deeply") from None
    if not isinstance(body, dict):
        raise ValueError(f"{path}: must be a JSON object, {{...}}")
    return body


def raise_all(problems: Sequence[str]) -> None:
    """Raises one ValueError with the first few problems, if there are any."""
    if problems:
        more = f"; and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise ValueError("; ".join(problems[:_MAX_SHOWN]) + more)


def _diagnosis(file: Path) -> str:
    """Returns why a file is not valid: the tensor with a wrong size, or actual and expected number of bytes."""
    size_bytes = file.stat().st_size
    actual = f"it has {size_bytes:,} bytes"
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length)) if length < size_bytes else {}
        ends = [0]
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
            needed = math.prod(shape) * _WIDTHS.get(code, 0)
            if code in _WIDTHS and needed != end - begin:
                return f"{name}: {code} {shape} takes {needed:,} bytes, but has {end - begin:,} by its header"
            ends.append(end)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # not a valid header
        return actual
    return f"{actual}, expected {8 + length + max(ends):,} by its header" if header else actual


# Tensors to write are given by name, on the meta device, for their shapes and dtypes


def shards(tensors: Mapping[str, Tensor], limit_bytes: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields (file name, tensors), in order. Only a file with a single tensor may exceed the limit."""
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if parts[-1] and sum(each.nbytes for each in [*parts[-1].values(), tensor]) > limit_bytes:
            parts.append({})
        parts[-1][name] = tensor
    for number, part in enumerate(parts, 1):
        yield SINGLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors", part


def index_json(files: Sequence[tuple[str, Mapping[str, Tensor]]]) -> str:
    total_bytes = sum(tensor.nbytes for _, tensors in files for tensor in tensors.values())
    where = {name: file for file, tensors in files for name in tensors}
    body = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(where.items()))}
    return json.dumps(body, indent=2) + "\n"


def write_file(
    path: Path, tensors: Mapping[str, Tensor], make: Callable[[str], Tensor], written: Callable[[int], None]
) -> None:
    """Writes a file, one tensor of `make(name)` in memory at a time; calls `written(bytes)` after each. Raises OSError."""
    begin, header = 0, dict[str, Any](__metadata__={"format": "pt"})
    codes = {getattr(torch, name): code for name, code in CODES.items()}
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[name] = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the values begin at a multiple of 8
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            values = make(name)
            assert (values.shape, values.dtype) == (tensor.shape, tensor.dtype), name
            stream.write(values.contiguous().flatten().view(torch.uint8).numpy().data)
            del values
            written(tensor.nbytes)
        stream.flush()
        os.fsync(stream.fileno())  # per file, so that the progress is that of the disk
    with safe_open(path, framework="pt") as file:
        assert set(file.keys()) == set(tensors), path


@contextmanager
def landing(out: Path) -> Iterator[Path]:
    """Yields an empty folder, which is synced and renamed to `out` when the block succeeds, and removed when it fails. Removes leftovers of
    a killed process. Raises ValueError if `out` exists, or if a different process is writing it."""
    refuse(out)
    partial = out.with_name(f"{out.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        if try_lock(descriptor) is False:
            raise ValueError(f"{out}: a different process is writing it; wait for it, or name a different folder")
        refuse(out)  # a different process may have completed it in between
        try:
            for path in partial.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            yield partial
            for path in [*partial.rglob("*"), partial]:
                sync_path(path)
            refuse(out)
            partial.rename(out)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)
    sync_path(out.absolute().parent)


def refuse(out: Path) -> None:
    """Raises ValueError if the path exists, has no name, or lies below a file."""
    if not out.name or out.name == "..":
        raise ValueError(f"{out}: must be the name of a new folder")
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: exists; remove it, or name a different folder")
    parent = next(parent for parent in out.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise ValueError(f"{out}: {parent} is a file, not a folder")


def tokenizer_files(folder: Path) -> list[Path]:
    return [folder / name for name in (TOKENIZER, *_BESIDE) if (folder / name).is_file()]
