"""The header is untrusted: any input is refused with a message, or is exactly the output of `encode`."""

from __future__ import annotations

import json
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ft.healing.format import (
    CHUNK_BYTES,
    DTYPES,
    MAX_HEADER_BYTES,
    FormatError,
    StateManifest,
    chunk_digest,
    from_json,
    to_json,
)


def write(header: Any) -> bytes:
    """Writes JSON as `encode` does: other white space alone is a reason for refusal."""
    return json.dumps(header, separators=(",", ":")).encode()


def header(**changes: Any) -> dict[str, Any]:
    kinds = {"a": ((3, 4), torch.float32), "b": ((), torch.bfloat16), "c": ((0, 5), torch.int64)}
    state = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}
    entries = StateManifest.describe({"m": state}).entries
    values = {"m": {"dict": [["a", {"tensor": 0}], ["b", {"tensor": 1}], ["c", {"tensor": 2}], ["lr", 0.1]]}}
    return json.loads(StateManifest(entries, values).encode()) | changes


def tensors(*changes: tuple[int, int, Any]) -> dict[str, Any]:
    """changes: (tensor, field, value)."""
    found = header()
    for index, field, value in changes:
        found["tensors"][index][field] = value
    return found


def test_round_trip():
    assert StateManifest.parse(write(model(*THREE, {"tuple": [{"float": "nan"}, []]}))).chunks == 1
    manifest = StateManifest.parse(write(header()))
    assert [(e.name, e.dtype, e.shape, e.offset) for e in manifest.entries] == [
        ("m/a", "float32", (3, 4), 0),
        ("m/b", "bfloat16", (), 64),
        ("m/c", "int64", (0, 5), 128),
    ]
    assert manifest.total_bytes == 128 and manifest.chunks == 1
    assert StateManifest.parse(manifest.encode()) == manifest


def model(*content: Any) -> dict[str, Any]:
    """values: as `header` has them, with these in place of its tensors."""
    return header(values={"m": {"dict": [[name, it] for name, it in zip("abcd", content, strict=False)]}})


THREE = [{"tensor": i} for i in range(3)]
HOSTILE = {
    "huge shape": tensors((0, 2, [1 << 45, 1 << 45])),
    "huge size": tensors((0, 2, [1 << 60])),
    "negative size": tensors((0, 2, [-3, 4])),
    "a size that is a float": tensors((0, 2, [3.0, 4])),
    "a size that is true": tensors((0, 2, [True, 4])),
    "65 dims": tensors((0, 2, [1] * 65)),
    "overlapping offsets": tensors((1, 3, 0)),
    "negative offset": tensors((1, 3, -64)),
    "a gap": tensors((1, 3, 128)),
    "offset true": tensors((0, 3, False)),
    "unknown dtype": tensors((0, 1, "float12")),
    "a dtype of torch that is none of ours": tensors((0, 1, "quint8")),
    "dtype no text": tensors((0, 1, [])),
    "a name twice": tensors((1, 0, "m/a")),
    "a long name": tensors((1, 0, "x" * 2000)),
    "three fields": header(tensors=[["a", "float32", []]]),
    "tensors no list": header(tensors={}),
    "other total": header(total_bytes=129),
    "total true": header(total_bytes=True),
    "other format": header(format="pharos healing 2"),
    "other order of bytes": header(byte_order="big"),
    "other chunks": header(chunk_bytes=CHUNK_BYTES * 2),
    "chunks as a float": header(chunk_bytes=float(CHUNK_BYTES)),
    "a field more": header(code="print()"),
    "values no object": header(values=[]),
    "no tensor of that number": model(*({"tensor": i} for i in (0, 1, 3))),
    "a negative tensor": model(*({"tensor": i} for i in (0, 1, -1))),
    "a tensor twice": model(*({"tensor": i} for i in (0, 1, 2, 0))),
    "a tensor that is true": model(*({"tensor": i} for i in (0, True, 2))),
    "a tensor that nobody has": model(*({"tensor": i} for i in (0, 1))),
    "unknown kind": model(*THREE, {"pickle": "gASVBAAAAAAAAABLAS4="}),
    "two kinds": model({"tensor": 0, "tuple": []}, *THREE[1:]),
    "a dict that is no list": model(*THREE, {"dict": {"a": 1}}),
    "a dict's key is a list": model(*THREE, {"dict": [[[], 1]]}),
    "a dict's key is true": model(*THREE, {"dict": [[True, 1]]}),
    "a dict's key twice": model(*THREE, {"dict": [["a", 1], ["a", 2]]}),
    "float that is text": model(*THREE, {"float": "1e5"}),
    "a list": [],
    "another order of tensors": model(*({"tensor": i} for i in (1, 0, 2))),
    "a tensor that stands elsewhere": header(values={"n": header()["values"]["m"]}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused(case: str):
    with pytest.raises(FormatError):
        StateManifest.parse(write(HOSTILE[case]))


@pytest.mark.parametrize(
    "data",
    {
        "nothing": b"",
        "NaN": write(header()).replace(b"0.1", b"NaN"),
        "Infinity": write(header()).replace(b"0.1", b"-Infinity"),
        "twice": write(header()).replace(b'"values"', b'"values":1,"values"'),
        "deep": b"[" * 100_000,
        "deep values": write(header(values={"m": json.loads("[" * 80 + "]" * 80)})),
        "many digits": write(header()).replace(b"0.1", b"1" * 5000),
        "no ASCII": write(header()).replace(b"lr", b"\xff"),
        "too long": b" " * (MAX_HEADER_BYTES + 1),
        "surrogates in UTF-8": b"\xed\xa0\x80",
    }.values(),
)
def test_what_is_no_json_of_ours_is_refused(data: bytes):
    with pytest.raises(FormatError):
        StateManifest.parse(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(header())), JSON)
def test_any_field_may_hold_anything(name: str, value: Any):
    parse_or_refuse(write(header() | {name: value}))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2), st.integers(0, 3), JSON)
def test_any_part_of_a_tensor_may_hold_anything(index: int, field: int, value: Any):
    parse_or_refuse(write(tensors((index, field, value))))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_bytes_may_be_changed(data: st.DataObject):
    text = bytearray(write(header()))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place : place + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    parse_or_refuse(bytes(text))


def parse_or_refuse(data: bytes) -> None:
    """Checks that a manifest that parses is as good as ours: entries in order, encodable again, values constructible."""
    try:
        manifest = StateManifest.parse(data)
    except FormatError:
        return
    assert StateManifest.parse(manifest.encode()) == manifest
    end = 0
    for entry in manifest.entries:
        assert end <= entry.offset < end + 64 and entry.dtype in DTYPES
        end = entry.offset + entry.nbytes
    assert end <= manifest.total_bytes
    for tree in manifest.values.values():
        from_json(tree, [torch.zeros(0)] * len(manifest.entries))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=6) | st.integers(), inner, max_size=4)
    ),
    max_leaves=15,
)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_values_come_back_exactly(value: Any):
    """repr tells -0.0 from 0.0, 1 from 1.0 and True, a tuple from a list; and a float's is exact."""
    names: list[str] = []
    manifest = StateManifest((), {"x": to_json(value, "x", lambda name, _: names.append(name))})
    back = from_json(StateManifest.parse(manifest.encode()).values["x"], [])
    assert repr(back) == repr(value)


@pytest.mark.parametrize(
    "value",
    [
        np.float64(0.1),
        np.float64("inf"),
        np.int64(-(1 << 63)),
        np.uint64((1 << 64) - 1),
        {np.int64(3): 1},
        signal.SIGTERM,
    ],
)
def test_subclasses_of_numbers_and_integers_of_numpy_keep_their_value(value: Any):
    """A value keeps its value as Python's own type: a numpy step of a learning-rate schedule makes float64."""
    manifest = StateManifest((), {"x": to_json(value, "x", lambda name, it: 0)})
    back = from_json(StateManifest.parse(manifest.encode()).values["x"], [])
    assert back == value and type(back) in (int, float, dict)
    assert not isinstance(back, dict) or type(next(iter(back))) is int


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    "value", [b"x", {1, 2}, object(), 1j, {(1, 2): 3}, {True: 1}, {1.5: 2}, lambda: 0, torch.float32, LOOP]
)
def test_what_cannot_be_sent_is_refused_by_name(value: Any):
    with pytest.raises(FormatError, match="^opt/groups/1.*nested deeper" if value is LOOP else r"^opt/groups/1.*: "):
        to_json({"groups": [0, value]}, "opt", lambda name, it: 0)


def test_names_of_tensors_differ_where_keys_differ():
    names: list[str] = []
    keys = [1, "1", "'1'", -1, "-1", "a", "a/b", "'a/b'", "b"]
    tree = {key: torch.zeros(1) for key in keys} | {"a": {"b": torch.zeros(1)}}
    to_json(tree, "x", lambda name, _: names.append(name) or 0)
    assert len(set(names)) == len(keys), names


# ------------------------------------------------------------------------------------------------ digests


def words(data: bytes) -> tuple[int, int]:
    """Computes the definition, slowly."""
    xored = added = 0
    for i in range(0, len(data), 8):
        word = int.from_bytes(data[i : i + 8].ljust(8, b"\0"), "little")
        xored, added = xored ^ word, (added + word) % 2**64
    return xored, added


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 1 << 40))
def test_digest_is_its_definition(data: bytes, chunk: int):
    place = (chunk * 0x9E3779B97F4A7C15 + len(data) + 1) % 2**64
    xored, added = words(data)
    expected = (xored ^ place).to_bytes(8, "little") + ((added + place) % 2**64).to_bytes(8, "little")
    assert chunk_digest(chunk, memoryview(data)) == expected


def test_digest_sees_every_flipped_bit_and_misplaced_chunk():
    draw = random.Random(1)
    data = bytearray(draw.randbytes(CHUNK_BYTES))
    right = chunk_digest(5, memoryview(data))
    for _ in range(200):
        place, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
        data[place] ^= bit
        assert chunk_digest(5, memoryview(data)) != right
        data[place] ^= bit
    assert chunk_digest(5, memoryview(data)) == right
    assert chunk_digest(6, memoryview(data)) != right
    assert chunk_digest(5, memoryview(data)[:-8]) != right
    assert chunk_digest(5, memoryview(bytes(64))) != chunk_digest(5, memoryview(bytes(128)))


def test_pieces_cover_the_body():
    shapes = [(300_000,), (), (0,), (700_001,), (3, 3), (1_000_000,)]
    manifest = StateManifest.describe({str(i): torch.empty(shape, device="meta") for i, shape in enumerate(shapes)})
    seen: dict[int, list[tuple[int, int]]] = {}
    for chunk in range(manifest.chunks):
        for index, low, high in manifest.pieces(*manifest.span(chunk)):
            seen.setdefault(index, []).append((low, high))
    for index, entry in enumerate(manifest.entries):
        parts = seen.get(index, [])
        assert sum(high - low for low, high in parts) == entry.nbytes
        assert all(one[1] == other[0] for one, other in zip(parts, parts[1:], strict=False))
