"""One value on its way in (TOML or override -> what the dataclass holds) and out (-> TOML text). Knows no section."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from configs.document import parse
from configs.keys import Key

_INT_LIMIT = 1 << 63  # TOML's, and what fits into a tensor
_MEANT_AS_BOOL = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}


def convert(key: Key, value: Any) -> Any:
    """The value as the dataclass holds it: an int becomes a float where one is due, a list a tuple. No tables.

    Raises ValueError with what is legal and the nearest legal value: "must be an integer >= 1; did you mean 20?".
    """
    accepted = _accepted(key, value)
    if accepted is not None:
        return accepted
    legal = key.legal()
    if isinstance(value, float) and not math.isfinite(value):
        legal = legal.replace("a number", "a finite number")
    if type(value) is key.type and any(bound.text.startswith("!=") for bound in key.bounds):
        legal += f" ({key.help})"  # why one number in the middle is refused is not obvious
    nearest = _nearest(key, value)
    raise ValueError(f"must be {legal}" + ("" if nearest is None else f"; did you mean {to_text(nearest)}?"))


def from_text(key: Key, text: str) -> Any:
    """Parses an override's text for this key, as tomllib would give it: strings need no quotes, all else is TOML."""
    is_string = key.type is str or (not key.element and any(isinstance(choice, str) for choice in key.choices))
    if is_string and text[:1] not in ("'", '"'):
        return text
    try:
        parsed = parse(f"value = {text}", "").tables
    except ValueError:
        return _float_or_text(text) if key.type is float else text
    return parsed["value"] if list(parsed) == ["value"] else text


def to_text(value: Any) -> str:
    """A value as TOML that reads back as the same value; a dataclass or mapping becomes an inline table."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)  # repr of a float is the shortest text that reads back to the same bits, and legal TOML
    if isinstance(value, str):
        return '"' + "".join(_escaped(letter) for letter in value) + '"'
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(to_text(item) for item in value) + "]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name} = {to_text(item)}" for name, item in value.items()) + "}"
    return str(value)  # dates: TOML has them, no key takes them, and an error message still has to name them


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    if letter == "\n":
        return "\\n"
    return letter if letter >= " " and letter != "\x7f" else f"\\u{ord(letter):04X}"


def _accepted(key: Key, value: Any) -> Any:
    """The converted value, or None if it is not legal."""
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
        return value if _is_text(value) else None
    return value if math.isfinite(value) and all(bound.holds(value) for bound in key.bounds) else None


def _nearest(key: Key, value: Any) -> Any:
    """A legal value that the user may have meant by an illegal one, or None."""
    if key.element:
        alone = (
            None if isinstance(value, (list, dict)) else _accepted(dataclasses.replace(key, type=key.element), value)
        )
        return None if alone is None else [alone]
    said = value if isinstance(value, str) else to_text(value)
    if key.choices:
        by_text = {str(choice).lower(): choice for choice in key.choices}
        close = difflib.get_close_matches(said.lower(), by_text, n=1, cutoff=0.5)
        return by_text[close[0]] if close else None
    if key.type is bool:
        return _MEANT_AS_BOOL.get(said.lower())
    if key.type is str:
        return None if isinstance(value, (str, list, dict)) else said
    number = _float_or_text(said)
    if isinstance(number, str) or not math.isfinite(number) or isinstance(value, bool):
        return None
    if key.type is int:
        if not number.is_integer():
            return None
        number = int(number)
    return number if type(value) is not type(number) and all(bound.holds(number) for bound in key.bounds) else None


def _float_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _is_text(value: str) -> bool:
    """False for lone surrogates, which the command line can bring in and no UTF-8 file can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
