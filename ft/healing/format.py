"""The format of a state on a wire: a header that describes it, then the bytes of all tensors, in chunks with a digest each.

Flow: capture.py makes a Manifest of the registered state; a transport sends `Manifest.encode()`, then chunk after chunk with its
`digest`; the other side reads the header by `Manifest.parse`, which believes nothing, and compares every chunk.

The header is JSON: names, dtypes, shapes and offsets of the tensors, and the rest of the state as values. There is no pickle and no
code in it. Tensors follow each other in the header's order, each beginning at a multiple of 64 bytes, with zeros between.
"""

from __future__ import annotations

import json
import math
import struct
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch

CHUNK_BYTES = 1 << 20  # stays in a core's L2 between the copy and its digest
DIGEST_BYTES = 16
ALIGN = 64  # bytes: a multiple of every item size, and of the digest's words
MAX_HEADER_BYTES = 8 << 20  # some 50,000 tensors
MAX_TOTAL_BYTES = 1 << 46  # of one rank's shards
MAX_DIMS = 64
MAX_NAME = 1024  # characters
MAX_DEPTH = 64  # of values in each other
_FIXED = {"format": "pharos healing 1", "byte_order": sys.byteorder, "chunk_bytes": CHUNK_BYTES}  # of a header

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
    """Data that was received, or is to be sent, is not of this format. Nothing of it was used."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor: its local shard, where it is sharded."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes, in the body

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class StateManifest:
    """A whole state except for the tensors' bytes. `values`: per registered name, a tree as `to_json` makes it."""

    entries: tuple[TensorEntry, ...]
    values: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def total_bytes(self) -> int:
        return _aligned(self.entries[-1].offset + self.entries[-1].nbytes) if self.entries else 0

    @property
    def chunks(self) -> int:
        return -(-self.total_bytes // CHUNK_BYTES)

    def span(self, chunk: int) -> tuple[int, int]:
        """First byte of chunk number `chunk` in the body, and the byte after its last."""
        assert 0 <= chunk < self.chunks, f"chunk {chunk} of {self.chunks}"
        return chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, self.total_bytes)

    def pieces(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The tensors that lie in bytes start..end of the body: (index, its first byte in there, the byte after its last)."""
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
        """Raises FormatError where it would be longer than a reader takes."""
        header = {
            **_FIXED,
            "total_bytes": self.total_bytes,
            "tensors": [[entry.name, entry.dtype, list(entry.shape), entry.offset] for entry in self.entries],
            "values": dict(self.values),
        }
        try:
            data = json.dumps(header, allow_nan=False, separators=(",", ":")).encode("ascii")
        except RecursionError:
            raise FormatError("values are nested too deep") from None
        if len(data) > MAX_HEADER_BYTES:
            raise FormatError(
                f"a header of {len(data)} bytes; at most {MAX_HEADER_BYTES}: large values belong into tensors"
            )
        return data

    @staticmethod
    def parse(data: bytes | bytearray | memoryview) -> StateManifest:
        """Raises FormatError for anything that `encode` would not have written; every field is looked at before any is used."""
        if len(data) > MAX_HEADER_BYTES:
            raise FormatError(f"a header of {len(data)} bytes; at most {MAX_HEADER_BYTES}")
        try:
            header = json.loads(bytes(data).decode("ascii"), parse_constant=_no_constant, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:  # JSON's and ASCII's own errors are ValueErrors
            raise FormatError(f"the header is no JSON of ours: {str(error)[:200] or type(error).__name__}") from None
        if not isinstance(header, dict) or header.keys() != {*_FIXED, "total_bytes", "tensors", "values"}:
            raise FormatError("the header has other fields")
        for name, value in _FIXED.items():
            if header[name] != value or type(header[name]) is not type(value):
                raise FormatError(f"the header's {name} is {str(header[name])[:100]!r}, ours {value!r}")
        entries, values = _entries(header["tensors"]), header["values"]
        if not isinstance(values, dict):
            raise FormatError("the header's values are no object")
        used: set[int] = set()
        for name, tree in values.items():
            _check_tree(tree, name[:80], len(entries), used, MAX_DEPTH + 2)
        if len(used) != len(entries):
            raise FormatError("a tensor of the header belongs to no value")
        manifest = StateManifest(entries, values)
        if type(header["total_bytes"]) is not int or header["total_bytes"] != manifest.total_bytes:
            raise FormatError("the header's total_bytes is not what its tensors add up to")
        return manifest


def lay_out(named: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> tuple[TensorEntry, ...]:
    """Entries one after another. Raises FormatError for a dtype that has no name here."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, dtype, shape in named:
        if dtype not in NAMES:
            raise FormatError(f"{name}: a tensor of {dtype} cannot be sent")
        if len(name) > MAX_NAME:
            raise FormatError(f"{name[:80]}...: a name of {len(name)} characters; at most {MAX_NAME}")
        entries.append(TensorEntry(name, NAMES[dtype], tuple(shape), offset))
        offset = _aligned(offset + entries[-1].nbytes)
    return tuple(entries)


# ------------------------------------------------------------------------------------------------ digests


def digest(chunk: int, data: memoryview) -> bytes:
    """XOR and wrapping sum of the 64-bit words, each moved by the chunk's number and length: a chunk of right bytes in a wrong place is
    wrong. It guards against accidents, not against people: for those there are tokens and TLS.

    numpy reduces a chunk in cache at twice the speed of torch, which has no XOR reduction.
    """
    whole = len(data) & ~7
    words = np.frombuffer(data[:whole], dtype=np.uint64)
    xored, added = int(np.bitwise_xor.reduce(words)), int(np.add.reduce(words, dtype=np.uint64))
    if rest := bytes(data[whole:]):
        word = int.from_bytes(rest.ljust(8, b"\0"), sys.byteorder)
        xored, added = xored ^ word, added + word
    place = (chunk * 0x9E3779B97F4A7C15 + len(data) + 1) & _WORD  # any odd factor spreads the numbers
    return struct.pack("<QQ", xored ^ place, (added + place) & _WORD)


_WORD = (1 << 64) - 1


# ------------------------------------------------------------------------------------------------ values


def to_json(value: Any, name: str, tensor: Any) -> Any:
    """The tree as JSON. Numbers, texts, None and lists stand for themselves; what JSON lacks stands in an object of one key: `tensor`
    (its number, from `tensor(name, it)`), `tuple`, `dict` (pairs, so keys may be whole numbers, as in a torch optimizer's state) and
    `float` (what is no number, or infinite). Raises FormatError, which names the place, for anything else."""
    if name.count("/") > MAX_DEPTH:
        raise FormatError(f"{name[:200]}...: nested deeper than {MAX_DEPTH}")
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return {"tensor": tensor(name, value)}
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, dict):
        bad = next((key for key in value if type(key) not in (str, int)), None)
        if bad is not None:
            raise FormatError(
                f"{name}: a key of type {type(bad).__name__} cannot be sent, only texts and whole numbers"
            )
        return {"dict": [[key, to_json(item, f"{name}/{_part(key)}", tensor)] for key, item in value.items()]}
    if kind in (list, tuple, torch.Size):
        items = [to_json(item, f"{name}/{index}", tensor) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    raise FormatError(
        f"{name}: a {kind.__name__} cannot be sent, only tensors, numbers, texts, lists, tuples and dicts"
    )


def from_json(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The value that `to_json` was given, with `tensors` by their numbers. The tree has passed `Manifest.parse`."""
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
    return {key: from_json(item, tensors) for key, item in content}


def _part(key: str | int) -> str:
    """Part of a name: no two keys of a dict have the same."""
    return repr(key) if isinstance(key, int) or "/" in key or key.lstrip("-").isdigit() or "'" in key else key


# ------------------------------------------------------------------------------------------------ what is believed


def _entries(listed: Any) -> tuple[TensorEntry, ...]:
    if not isinstance(listed, list):
        raise FormatError("the header's tensors are no list")
    named, offsets = [], []
    for item in listed:
        if not isinstance(item, list) or len(item) != 4:
            raise FormatError("a tensor of the header is not [name, dtype, shape, offset]")
        name, dtype, shape, offset = item
        if type(name) is not str:
            raise FormatError("a tensor's name is no text")
        if type(dtype) is not str or dtype not in DTYPES:
            raise FormatError(f"{name[:80]}: unknown dtype {str(dtype)[:40]!r}")
        if not isinstance(shape, list) or len(shape) > MAX_DIMS:
            raise FormatError(f"{name[:80]}: a shape is a list of at most {MAX_DIMS} sizes")
        if not all(type(number) is int and 0 <= number <= MAX_TOTAL_BYTES for number in (*shape, offset)):
            raise FormatError(f"{name[:80]}: a size of its shape, or its offset, is no count")
        named.append((name, DTYPES[dtype], shape))
        offsets.append(offset)
    entries = lay_out(named)
    if len({entry.name for entry in entries}) != len(entries):
        raise FormatError("two tensors of one name")
    for entry, offset in zip(entries, offsets, strict=True):
        if entry.offset != offset or offset + entry.nbytes > MAX_TOTAL_BYTES:
            raise FormatError(
                f"{entry.name}: at byte {offset}, where {entry.offset} comes next, of {MAX_TOTAL_BYTES} at most"
            )
    return entries


def _check_tree(tree: Any, name: str, tensors: int, used: set[int], depth: int) -> None:
    if not depth:
        raise FormatError(f"{name}: nested too deep")
    if tree is None or type(tree) in (bool, int, float, str):
        return
    kind, items = "list", tree
    if isinstance(tree, dict):
        if len(tree) != 1:
            raise FormatError(f"{name}: an object with {len(tree)} keys")
        ((kind, items),) = tree.items()
    if kind == "tensor":
        if type(items) is not int or not 0 <= items < tensors or items in used:
            raise FormatError(f"{name}: no such tensor, or it is named twice")
        used.add(items)
    elif kind != "float" or items not in ("nan", "inf", "-inf"):
        if kind not in ("list", "tuple", "dict") or not isinstance(items, list):
            raise FormatError(f"{name}: an object of an unknown kind")
        if kind == "dict":
            if not all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) in (str, int) for pair in items):
                raise FormatError(f"{name}: a dict's item is no pair of a key and a value")
            if len({key for key, _ in items}) != len(items):
                raise FormatError(f"{name}: a dict with one key twice")
            items = [value for _, value in items]
        for item in items:
            _check_tree(item, name, tensors, used, depth - 1)


def _no_constant(text: str) -> Any:
    raise FormatError(f"{text} is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a name stand twice in an object; two readers may then see different things."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise FormatError("a name stands twice in an object")
    return found


def _aligned(offset: int) -> int:
    return -(-offset // ALIGN) * ALIGN
