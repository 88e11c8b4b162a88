"""The format in which a state is sent: a header that describes it, then the bytes of all tensors, in chunks with a digest each.

Flow: capture.py makes a StateManifest of the registered state; a transport sends `StateManifest.encode()`, then chunk after chunk with its
`chunk_digest`; the joiner parses the header by `StateManifest.parse`, which validates everything, and verifies every chunk.

The header is JSON, without pickle or code: names, dtypes, shapes and offsets of the tensors, and the rest of the state as values. Tensors
follow each other in the header's order, each aligned to 64 bytes, with zeros between.
"""

from __future__ import annotations

import json
import math
import numbers
import struct
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

CHUNK_BYTES = 1 << 20  # stays in a core's L2 between the copy and its digest
DIGEST_BYTES = 16
ALIGN = 64  # bytes: a multiple of every element size, and of the digest's words
MAX_HEADER_BYTES = 8 << 20  # about 50,000 tensors
MAX_TOTAL_BYTES = 1 << 46  # of one rank's shards
MAX_DIMS = 64
MAX_NAME = 1024  # characters
MAX_DEPTH = 64  # of nested values
_WORD = (1 << 64) - 1
# constant fields of a header
_FIXED = {"format": "pharos healing 1", "byte_order": sys.byteorder, "chunk_bytes": CHUNK_BYTES}

NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    )
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


class FormatError(ValueError):
    """Data that was received, or is to be sent, is not in this format. No part of it was used."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor, or its local shard if it is sharded."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # in the body, in bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class StateManifest:
    """A state without the bytes of its tensors. `values`: by registered name, a tree as returned by `to_json`."""

    entries: tuple[TensorEntry, ...]
    values: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def total_bytes(self) -> int:
        return _end_of(self.entries)

    @property
    def chunks(self) -> int:
        return -(-self.total_bytes // CHUNK_BYTES)

    def span(self, chunk: int) -> tuple[int, int]:
        """Returns begin and end of chunk number `chunk` in the body, in bytes."""
        assert 0 <= chunk < self.chunks, f"chunk {chunk} of {self.chunks}"
        return chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self.total_bytes)

    def pieces(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Returns the parts of tensors in bytes start..end of the body: (tensor's index, begin and end of the part in its bytes)."""
        found = []
        for index in range(max(0, bisect_right(self.offsets, start) - 1), len(self.entries)):
            entry = self.entries[index]
            if entry.offset >= end:
                break
            low, high = max(start, entry.offset), min(end, entry.offset + entry.nbytes)
            if low < high:
                found.append((index, low - entry.offset, high - entry.offset))
        return found

    @cached_property
    def offsets(self) -> list[int]:
        return [entry.offset for entry in self.entries]

    def encode(self) -> bytes:
        """Returns the header. Raises FormatError if it is longer than a joiner accepts."""
        header = {
            **_FIXED,
            "total_bytes": self.total_bytes,
            "tensors": [[entry.name, entry.dtype, list(entry.shape), entry.offset] for entry in self.entries],
            "values": dict(self.values),
        }
        data = json.dumps(header, allow_nan=False, separators=(",", ":")).encode("ascii")
        if (size := len(data)) > MAX_HEADER_BYTES:
            raise FormatError(f"a header of {size} bytes, of {MAX_HEADER_BYTES} at most: send large values as tensors")
        return data

    @staticmethod
    def describe(state: Mapping[str, Any], local: Callable[[str, Any], Any] = lambda name, it: it) -> StateManifest:
        """Returns the manifest of a state, given by registered names. `local`: returns the tensor that is sent in place of the one with
        that name. Raises FormatError, with the name, for values that cannot be sent."""
        entries: list[TensorEntry] = []

        def number(name: str, tensor: Any) -> int:
            found = local(name, tensor)
            dtype = NAMES.get(found.dtype) if isinstance(found.dtype, torch.dtype) else found.dtype
            if dtype not in DTYPES:
                raise FormatError(f"{name[:80]}: a tensor of {str(found.dtype)[:40]} cannot be sent")
            if len(name) > MAX_NAME:
                raise FormatError(f"{name[:80]}...: a name of more than {MAX_NAME} characters")
            entries.append(TensorEntry(name, dtype, tuple(found.shape), _end_of(entries)))
            return len(entries) - 1

        values = {name: to_json(value, name, number) for name, value in state.items()}
        return StateManifest(tuple(entries), values)

    @staticmethod
    def parse(data: bytes | bytearray | memoryview) -> StateManifest:
        """Parses a header. Raises FormatError if `encode` does not write it: rebuilding and encoding must give the same bytes."""
        if len(data) > MAX_HEADER_BYTES:
            raise FormatError(f"a header of {len(data)} bytes, of {MAX_HEADER_BYTES} at most")
        try:
            header = json.loads(bytes(data).decode("ascii"))
            for name, value in _FIXED.items():
                if header[name] != value:
                    raise FormatError(f"the header's {name} is {str(header[name])[:100]!r}, ours {value!r}")
            entries = [TensorEntry(name, dtype, _shape(shape), at) for name, dtype, shape, at in header["tensors"]]
            manifest = StateManifest.describe({key: from_json(tree, entries) for key, tree in header["values"].items()})
            if (total := manifest.total_bytes) > MAX_TOTAL_BYTES:
                raise FormatError(f"the header's tensors have {total} bytes, of {MAX_TOTAL_BYTES} at most")
            if manifest.encode() != data:
                raise FormatError("the header is not in canonical form")
        except FormatError:
            raise
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            why = str(error)[:200] or type(error).__name__
            raise FormatError(f"the header is not valid JSON of this format: {why}") from None
        return manifest


def _end_of(entries: Sequence[TensorEntry]) -> int:
    """Returns the first aligned offset after all entries."""
    return -(-(entries[-1].offset + entries[-1].nbytes) // ALIGN) * ALIGN if entries else 0


def _shape(listed: Any) -> tuple[int, ...]:
    if len(listed) > MAX_DIMS or not all(type(size) is int and 0 <= size <= MAX_TOTAL_BYTES for size in listed):
        raise FormatError(f"a shape is a list of at most {MAX_DIMS} sizes, not {str(listed)[:100]}")
    return tuple(listed)


def chunk_digest(chunk: int, data: memoryview) -> bytes:
    """Returns XOR and wrapping sum of the 64-bit words, combined with the chunk's number and length, so that misplaced chunks differ. It
    guards against accidents; tokens and TLS against attacks. numpy is twice as fast as torch, which has no XOR reduction."""
    aligned = len(data) & ~7
    words = np.frombuffer(data[:aligned], dtype=np.uint64)
    xored, added = int(np.bitwise_xor.reduce(words)), int(np.add.reduce(words, dtype=np.uint64))
    if rest := bytes(data[aligned:]):
        word = int.from_bytes(rest.ljust(8, b"\0"), sys.byteorder)
        xored, added = xored ^ word, added + word
    place = (chunk * 0x9E3779B97F4A7C15 + len(data) + 1) & _WORD  # any odd factor spreads the numbers
    return struct.pack("<QQ", xored ^ place, (added + place) & _WORD)


def to_json(value: Any, name: str, tensor: Callable[[str, Any], int], depth: int = 0) -> Any:
    """Returns a value as JSON. Numbers, strings, None and lists stay as they are; all others become an object with one key: `tensor` (its
    number, from `tensor(name, it)`), `tuple`, `dict` (pairs, so keys may be integers) or `float` (NaN or infinite); else FormatError.
    Subclasses of float and all integers, such as numpy's float64 and int64, are sent as Python's: these have the same value."""
    if depth > MAX_DEPTH:
        raise FormatError(f"{name[:200]}...: nested deeper than {MAX_DEPTH}")
    inner = lambda key, item: to_json(item, f"{name}/{key}"[: MAX_NAME + 1], tensor, depth + 1)  # noqa: E731
    kind = type(value)
    if isinstance(value, torch.Tensor | TensorEntry):
        return {"tensor": tensor(name, value)}
    if value is None or kind in (bool, str):
        return value
    if _is_integer(value):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, dict):
        if bad := [type(key).__name__ for key in value if type(key) is not str and not _is_integer(key)]:
            raise FormatError(f"{name}: a key of type {bad[0]} cannot be sent, only strings and integers")
        keys = [key if type(key) is str else int(key) for key in value]
        return {"dict": [[key, inner(_part(key), item)] for key, item in zip(keys, value.values(), strict=True)]}
    if kind in (list, tuple, torch.Size):
        items = [inner(index, item) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    raise FormatError(
        f"{name}: a {kind.__name__} cannot be sent, only tensors, numbers, strings, lists, tuples and dicts"
    )


def from_json(tree: Any, tensors: Sequence[Any]) -> Any:
    """Undoes `to_json`, with `tensors` by number. Raises FormatError for an unknown kind, else Python's own errors."""
    if isinstance(tree, list):
        return [from_json(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "float":
        return float(content)
    if kind == "tuple":
        return tuple(from_json(item, tensors) for item in content)
    if kind == "dict":
        return {key: from_json(item, tensors) for key, item in content}
    raise FormatError(f"an object of an unknown kind, {kind[:40]}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _part(key: str | int) -> str:
    """Returns a key's part of a value's name, different for all keys of a dict."""
    return repr(key) if isinstance(key, int) or "/" in key or key.lstrip("-").isdigit() or "'" in key else key
