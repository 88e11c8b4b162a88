"""The keys of a section, read from its dataclass: `lr: Annotated[float, "peak learning rate", "> 0"] = 8e-4` becomes a Key.

The sections are plain frozen dataclasses beside the code they belong to; everything generic (reading, checking, help,
docs) goes through here. A field is Annotated[type, help with its unit, bounds ...]; the type is bool, int, float, str,
Literal, another such dataclass (a nested table), or tuple[X, ...] of one of these (a list, a list of tables).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "!=": operator.ne}
_BOUND = re.compile(r"(>=|<=|!=|>|<) *(-?[0-9.]+(?:e-?[0-9]+)?)")
_NOUNS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_PLURALS = {bool: "true or false", int: "integers", float: "numbers", str: "strings"}


@dataclasses.dataclass(frozen=True)
class Bound:
    """One limit of a number, ">= 1"."""

    text: str

    def holds(self, value: float) -> bool:
        sign, limit = _BOUND.fullmatch(self.text).groups()  # type: ignore[union-attr]
        return bool(_COMPARE[sign](value, float(limit)))


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a section (or of a table in it): its name, bare type, help text, bounds and default."""

    name: str
    type: Any
    help: str
    bounds: tuple[Bound, ...]
    default: Any  # dataclasses.MISSING: the key must be given

    @property
    def table(self) -> type | None:
        """The dataclass of a nested table."""
        return _dataclass(self.type)

    @property
    def row(self) -> type | None:
        """The dataclass of the elements of a list of tables."""
        return _dataclass(self.element)

    @property
    def element(self) -> Any:
        """X of tuple[X, ...]; None for everything else."""
        return typing.get_args(self.type)[0] if typing.get_origin(self.type) is tuple else None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The legal values of a Literal or of a list of them."""
        kind = self.element or self.type
        return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()

    def legal(self) -> str:
        """The legal values as a noun phrase: "an integer >= 1", '"fused", "foreach" or "for-loop"'."""
        if self.choices:
            named = either([f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in self.choices])
            return f"a list of {named}" if self.element else named
        plural = _PLURALS.get(self.element, "tables")
        noun = f"a list of {plural}" if self.element else _NOUNS.get(self.type, "a table")
        return " ".join([noun, " and ".join(bound.text for bound in self.bounds)]).strip()


def either(names: list[str]) -> str:
    """a, b or c"""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


@functools.cache
def keys_of(section: type) -> Mapping[str, Key]:
    """The keys of a section's dataclass, in its order. TypeError: a field that cannot be read from TOML."""
    hints = typing.get_type_hints(section, include_extras=True)
    return {field.name: _key(section, field, hints[field.name]) for field in dataclasses.fields(section) if field.init}


def walk(section: type, path: str) -> Iterator[tuple[str, Key]]:
    """Every key of a section with its full path; those of nested tables too, of a list of tables as "groups[].lr"."""
    for key in keys_of(section).values():
        full = f"{path}.{key.name}"
        if key.table:
            yield from walk(key.table, full)
            continue
        yield full, key
        if key.row:
            yield from walk(key.row, f"{full}[]")


def _key(section: type, field: dataclasses.Field[Any], hint: Any) -> Key:
    kind, notes = hint, []
    if typing.get_origin(hint) is Annotated:
        kind, *notes = typing.get_args(hint)
    where = f"{section.__module__}.{section.__qualname__}.{field.name}"
    if not _readable(kind):
        raise TypeError(f"{where}: {kind} is no type for a config key; configs/keys.py says which are")
    texts = [note for note in notes if isinstance(note, str)]
    bounds = tuple(Bound(text) for text in texts[1:])
    is_number = {kind, *typing.get_args(kind)} & {int, float}
    for bound in bounds:
        if not is_number or not _BOUND.fullmatch(bound.text):
            raise TypeError(f"{where}: {bound.text!r} is no bound (>, >=, <, <=, != and a number, on int and float)")
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return Key(field.name, kind, texts[0] if texts else "", bounds, default)


def _dataclass(kind: Any) -> type | None:
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _readable(kind: Any) -> bool:
    if kind in _NOUNS or _dataclass(kind) or typing.get_origin(kind) is Literal:
        return True
    inner = typing.get_args(kind)
    return (
        typing.get_origin(kind) is tuple
        and len(inner) == 2
        and inner[1] is Ellipsis
        and typing.get_origin(inner[0]) is not tuple
        and _readable(inner[0])
    )
