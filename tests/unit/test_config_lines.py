"""The scanner for line numbers finds every key that tomllib finds, at the line where it is written."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.document import key_lines, parse
from configs.keys import to_text

EVERYTHING = '''\
# a comment with = and [brackets]
top = 1

[model]   # [not.a.header]
dim = 256
"quoted key" = 1
rope.theta = 5e5   # dotted
text = """
[fake]
dim = 7
\\""" still """""
after_text = 1
raw = \'\'\'
lr = 3 '\'\'\'
path = 'C:\\new "x" # not a comment'
when = 1979-05-27 07:32:00

[training.dataloader]
num_workers = 2
list = [
    1, # one
    [2, 3],
    "]",
    {a = "}", b.c = 4},
]

[[optimizer.groups]]
pattern = "a"
[optimizer.groups.inner]
x = 1
[[optimizer.groups]]
pattern = "b"
inline = { first = [1, 2], second = { third = "," } }
'''


def paths(value: Any, path: str = "") -> set[str]:
    """Returns every key and element of a TOML document, as key_lines names them."""
    if isinstance(value, dict):
        items = [(f"{path}.{name}" if path else name, item) for name, item in value.items()]
    elif isinstance(value, list):
        items = [(f"{path}[{i}]", item) for i, item in enumerate(value)]
    else:
        return set()
    return {name for name, _ in items}.union(*(paths(item, name) for name, item in items), set())


def test_every_kind_of_statement() -> None:
    lines = key_lines(EVERYTHING)
    assert lines.keys() == paths(parse(EVERYTHING, "x")[0])
    written = EVERYTHING.split("\n")
    at = {key: written[line - 1].strip() for key, line in lines.items()}
    assert at["top"] == "top = 1"
    assert at["model"] == "[model]   # [not.a.header]"
    assert at["model.dim"] == "dim = 256"
    assert at["model.quoted key"] == '"quoted key" = 1'
    assert at["model.rope"] == at["model.rope.theta"] == "rope.theta = 5e5   # dotted"
    assert at["model.text"] == 'text = """'
    assert at["model.after_text"] == "after_text = 1"
    assert at["model.when"] == "when = 1979-05-27 07:32:00"
    assert at["training"] == at["training.dataloader"] == "[training.dataloader]"
    assert at["training.dataloader.list[0]"] == "1, # one"
    assert at["training.dataloader.list[3].b.c"] == '{a = "}", b.c = 4},'
    assert at["optimizer.groups[0].inner.x"] == "x = 1"
    assert at["optimizer.groups[1].pattern"] == 'pattern = "b"'
    assert at["optimizer.groups[1].inline.second.third"] == written[-2]


def test_what_is_named_again_has_its_first_line() -> None:
    lines = key_lines("[a.b]\nx = 1\n[a]\ny.p = 1\ny.q = 1\n")
    assert (lines["a"], lines["a.b"], lines["a.y"], lines["a.y.q"]) == (1, 1, 4, 5)


@pytest.mark.parametrize(
    "text", ["", "\n\n", "# only a comment", "a = 1", "a = 1 # no newline", "\r\n[x]\r\na = 1\r\n"]
)
def test_small_documents(text: str) -> None:
    assert key_lines(text).keys() == paths(parse(text, "x")[0])


NAMES = st.text("ab_-1", min_size=1, max_size=3)
TEXTS = st.text("ab\"'\\\n\r\t#[]{}=, \0\x7fé\U0001f600", max_size=8)
SCALARS = st.one_of(st.booleans(), st.integers(-9, 9), st.floats(allow_nan=False, allow_infinity=False), TEXTS)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))
TABLES = st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=3), max_size=3)


@given(TABLES, st.sampled_from(["", "  # ] = \" '", "\n\n# x = 1"]))
def test_finds_what_tomllib_finds(tables: dict[str, Any], noise: str) -> None:
    """Values written by `to_text` are read back by tomllib with equal value and type."""
    text = "".join(
        f"[{name}]{noise}\n" + "".join(f"{key} = {to_text(value)}{noise}\n" for key, value in table.items())
        for name, table in tables.items()
    )
    read, origin = parse(text, "x")
    assert repr(read) == repr(tables)
    assert origin.lines.keys() == paths(tables)
    for key, line in origin.lines.items():
        assert key.split(".")[-1].split("[")[0] in text.split("\n")[line - 1]
