"""The keys of a section, read from its dataclass: `lr: Annotated[float, "peak learning rate", "> 0"] = 8e-4` becomes a Key.

A section is a frozen dataclass next to the code that uses it. A field is Annotated[type, help with its unit, bounds ...]; the type is bool,
int, float, str, Literal, a dataclass (a nested table), or tuple[X, ...] of one of these (a list, a list of tables).

A new key must be equal in all replica groups, and may change in a run if resume.allow names it, unless configs/saved.py lists it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import math
import operator
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from configs.document import parse

_COMPARE = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le, "!=": operator.ne}
_BOUND = re.compile(r"(>=|<=|!=|>|<) -?[0-9.]+(e-?[0-9]+)?")
_NOUNS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
_PLURALS = {bool: "true or false", int: "integers", float: "numbers", str: "strings"}
_INT_LIMIT = 1 << 63  # of TOML integers and int64 tensors
_MEANT_AS_BOOL = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a section (or of a table in it): its name, bare type, help text, bounds and default."""

    name: str
    type: Any
    help: str
    bounds: tuple[str, ...]  # of a number, such as (">= 1",)
    default: Any  # dataclasses.MISSING: the key is required

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
        """X of tuple[X, ...]; None for other types."""
        return typing.get_args(self.type)[0] if typing.get_origin(self.type) is tuple else None

    @property
    def choices(self) -> tuple[Any, ...]:
        """The legal values of a Literal or of a list of them."""
        kind = self.element or self.type
        return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()

    def legal(self) -> str:
        """The legal values as a noun phrase: "an integer >= 1", '"fused", "foreach" or "for-loop"'."""
        if self.choices:
            *others, last = (f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in self.choices)
            named = f"{', '.join(others)} or {last}" if others else last
            return f"a list of {named}" if self.element else named
        plural = _PLURALS.get(self.element, "tables")
        noun = f"a list of {plural}" if self.element else _NOUNS.get(self.type, "a table")
        return " ".join([noun, " and ".join(self.bounds)]).strip()

    def is_within_bounds(self, value: float) -> bool:
        limits = (bound.split(" ") for bound in self.bounds)
        return all(_COMPARE[sign](value, float(limit)) for sign, limit in limits)


@functools.cache
def keys_of(section: type) -> Mapping[str, Key]:
    """Returns the keys of a section's dataclass, in order. Raises TypeError for a field that cannot be read from TOML."""
    hints, keys = typing.get_type_hints(section, include_extras=True), {}
    for field in dataclasses.fields(section):
        kind, notes = hints[field.name], []
        if typing.get_origin(kind) is Annotated:
            kind, *notes = typing.get_args(kind)
        where = f"{section.__module__}.{section.__qualname__}.{field.name}"
        if not _readable(kind):
            raise TypeError(f"{where}: {kind} is not a type of config keys; configs/keys.py lists them")
        text, *bounds = [note for note in notes if isinstance(note, str)] or [""]
        is_number = {kind, *typing.get_args(kind)} & {int, float}
        for bound in bounds:
            if not is_number or not _BOUND.fullmatch(bound):
                raise TypeError(f"{where}: {bound!r} is not a bound (>, >=, <, <=, != and a number, on int and float)")
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        keys[field.name] = Key(field.name, kind, text, tuple(bounds), default)
    return keys


def walk(section: type, path: str) -> Iterator[tuple[str, Key]]:
    """Yields every key of a section with its full path, also those of nested tables, and of a list of tables as "groups[].lr"."""
    for key in keys_of(section).values():
        full = f"{path}.{key.name}"
        if key.table:
            yield from walk(key.table, full)
            continue
        yield full, key
        if key.row:
            yield from walk(key.row, f"{full}[]")


def _dataclass(kind: Any) -> type | None:
    return kind if isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def _readable(kind: Any) -> bool:
    if kind in _NOUNS or _dataclass(kind) or typing.get_origin(kind) is Literal:
        return True
    inner, *rest = typing.get_args(kind) or (None,)
    is_list = typing.get_origin(kind) is tuple and rest == [Ellipsis]
    return is_list and typing.get_origin(inner) is not tuple and _readable(inner)


def convert(key: Key, value: Any) -> Any:
    """Converts a value, other than a table, to the type of the field: an int to float if needed, a list to a tuple. Raises ValueError with
    the legal values and the nearest one: "must be an integer >= 1; did you mean 20?"."""
    if (accepted := _accepted(key, value)) is not None:
        return accepted
    legal = key.legal()
    if isinstance(value, float) and not math.isfinite(value):
        legal = legal.replace("a number", "a finite number")
    if type(value) is key.type and any(bound.startswith("!=") for bound in key.bounds):
        legal += f" ({key.help})"  # the help text explains why this number is illegal
    nearest = _nearest(key, value)
    raise ValueError(f"must be {legal}" + ("" if nearest is None else f"; did you mean {to_text(nearest)}?"))


def from_text(key: Key, text: str) -> Any:
    """Parses the text of an override for this key: strings need no quotes, everything else is TOML."""
    is_string = key.type is str or (not key.element and any(isinstance(choice, str) for choice in key.choices))
    if is_string and text[:1] not in ("'", '"'):
        return text
    try:
        parsed, _ = parse(f"value = {text}", "")
    except ValueError:
        return _float_or_text(text) if key.type is float else text
    return parsed["value"] if list(parsed) == ["value"] else text


def to_text(value: Any) -> str:
    """Formats a value as TOML that is read back as the same value; a dataclass or mapping becomes an inline table."""
    if isinstance(value, (bool, str)):  # JSON's escapes are TOML's, which does not allow DEL either
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    if isinstance(value, (int, float)):
        return repr(value)  # repr of a float is legal TOML and is read back with the same bits
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(to_text(item) for item in value) + "]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {to_text(item)}" for name, item in value.items()) + "}"
    return str(value)  # dates, which no key accepts, for error messages


def _accepted(key: Key, value: Any) -> Any:
    """Returns the converted value, or None if it is not legal."""
    if key.element:
        one = dataclasses.replace(key, type=key.element)
        items = [_accepted(one, item) for item in value] if isinstance(value, list) else [None]
        return None if None in items else tuple(items)
    if key.choices:
        return value if any(value == choice and type(value) is type(choice) for choice in key.choices) else None
    if type(value) is int and not -_INT_LIMIT <= value < _INT_LIMIT:
        return None
    if key.type is float and type(value) is int:
        value = float(value)
    if type(value) is not key.type:
        return None
    if isinstance(value, str):
        # no lone surrogates, which the command line can contain but a UTF-8 file cannot
        return None if re.search("[\ud800-\udfff]", value) else value
    return value if math.isfinite(value) and key.is_within_bounds(value) else None


def _nearest(key: Key, value: Any) -> Any:
    """Returns a legal value that the user may have meant by an illegal one, or None."""
    if key.element:
        one = dataclasses.replace(key, type=key.element)
        item = None if isinstance(value, (list, dict)) else _accepted(one, value)
        return None if item is None else [item]
    given = value if isinstance(value, str) else to_text(value)
    if key.choices:
        by_text = {str(choice).lower(): choice for choice in key.choices}
        close = difflib.get_close_matches(given.lower(), by_text, n=1, cutoff=0.5)
        return by_text[close[0]] if close else None
    if key.type is bool:
        return _MEANT_AS_BOOL.get(given.lower())
    if key.type is str:
        return None if isinstance(value, (str, list, dict)) else given
    number = _float_or_text(given)
    if isinstance(number, str) or not math.isfinite(number) or isinstance(value, bool):
        return None
    if key.type is int:
        if not number.is_integer():
            return None
        number = int(number)
    return number if type(value) is not type(number) and key.is_within_bounds(number) else None


def _float_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
