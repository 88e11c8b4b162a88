"""A TOML file as it was read, with the line of every key; and Origin, what a Config keeps of it for messages."""

from __future__ import annotations

import difflib
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]


_KEY_AHEAD = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[\d+\])+")


@dataclass(frozen=True)
class Origin:
    """The origin of a Config's settings: the file, the line of each key, and the keys set by overrides."""

    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    overrides: frozenset[str] = frozenset()

    def place(self, key: str) -> str:
        """How a message names a key: "configs/llama.toml:12: training.steps", or "--training.steps"."""
        if any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in self.overrides):
            return f"--{key}"
        line = self.lines.get(key)
        where = f"{self.file}:{line}: " if line else f"{self.file}: " if self.file else ""
        return where + key

    def explain(self, message: str) -> str:
        """A section's own "section.key = value: cause" with the place in front."""
        key = _KEY_AHEAD.match(message)
        return self.place(key.group()) + message[key.end() :] if key else message

    def line_of(self, message: str) -> int | None:
        """The line that such a message is about, None if no line of the file wrote the key."""
        key = _KEY_AHEAD.match(message)
        return self.lines.get(key.group()) if key and not self.place(key.group()).startswith("--") else None


@dataclass(frozen=True)
class Document:
    """The tables of a TOML file and the line of every key."""

    file: str
    tables: Mapping[str, Any]
    lines: Mapping[str, int]


def read(file: str) -> Document:
    """Reads a TOML file. Raises ConfigError: it is missing, unreadable, not UTF-8, or not TOML."""
    try:
        raw = Path(file).read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such file{_beside(Path(file))}") from None
    except IsADirectoryError:
        raise ConfigError(f"{file}: a folder, not a TOML file{_inside(Path(file))}") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{file}:{line}: not UTF-8: byte 0x{raw[error.start]:02x}; save the file as UTF-8") from None
    return parse(text, file)


def parse(text: str, file: str) -> Document:
    """TOML text under the name of its file. Raises ConfigError: it is not TOML."""
    try:
        tables = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        # tomllib's message, its "(at line 3, column 7)" turned into file:line, and the line itself
        lines = text.split("\n")
        cause, _, position = str(error).rpartition(" (at ")
        numbers = re.fullmatch(r"line (\d+), column (\d+)\)", position)
        number = int(numbers[1]) if numbers else len(lines)
        shown = lines[number - 1].strip() if number <= len(lines) else ""
        hint = "; no value" if shown.endswith("=") else "; strings need quotes"
        said = f"{cause or error}{hint if cause == 'Invalid value' else ''}"
        raise ConfigError(f"{file}:{number}: not TOML: {said}: {shown[:80] or 'end of file'}") from None
    return Document(file, tables, key_lines(text))


def _beside(path: Path) -> str:
    names = list(map(str, path.parent.glob("*.toml"))) or list(map(str, Path("configs").glob("*.toml")))
    close = difflib.get_close_matches(str(path), names, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else _inside(path.parent)


def _inside(folder: Path) -> str:
    names = sorted(str(path) for path in folder.glob("*.toml"))
    return f"; there are {', '.join(names[:5])}" if names else ""


# ---- lines of keys: tomllib gives values without positions, and a message without a line is a riddle


_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_SPACE = re.compile(r"[ \t]*")
_KEY_PART = re.compile(r""" "(?:\\.|[^"\\])*" | '[^']*' | [A-Za-z0-9_-]+ """, re.VERBOSE)
_STRING = re.compile(
    r"""
    \"{3} (?:\\.|[^\\])*? \"{3,5} | '{3} .*? '{3,5}     # up to two quotes may stand before the closing three
    | "(?:\\.|[^"\\])*" | '[^']*'
    """,
    re.VERBOSE | re.DOTALL,
)
_HEADER = re.compile(r"\[{0,2}")
_SCALAR = re.compile(r"[^,\]}#\n]+")


def key_lines(text: str) -> dict[str, int]:
    """The line of every table and key of a valid TOML text: {"training": 3, "training.steps": 4, "a.list[0].b": 9}.

    A key that several statements build up (dotted keys, sub-tables) has the line where it is first named.
    """
    at, lines = 0, dict[str, int]()
    elements = Counter[str]()  # how many [[headers]] an array of tables has had

    def skip(pattern: re.Pattern[str]) -> str:
        nonlocal at
        match = pattern.match(text, at)
        assert match, f"not TOML at line {text.count(chr(10), 0, at) + 1}: {text[at : at + 20]!r}"
        at = match.end()
        return match.group()

    def note(path: str) -> None:
        lines.setdefault(path, text.count("\n", 0, at) + 1)

    def key(path: str, header: str = "") -> str:
        """Reads a dotted key below `path`, and notes each table on the way."""
        nonlocal at
        while True:
            skip(_SPACE)
            part = skip(_KEY_PART).strip("\"'")
            path = f"{path}.{part}" if path else part
            note(path)
            skip(_SPACE)
            is_last = text[at] != "."
            elements[path] += is_last and header == "[["
            if elements[path]:
                path = f"{path}[{elements[path] - 1}]"
                note(path)
            if is_last:
                return path
            at += 1

    def pair(table: str) -> None:
        nonlocal at
        path = key(table)
        at = text.index("=", at) + 1
        skip(_SPACE)
        value(path)

    def value(path: str) -> None:
        nonlocal at
        if text[at] not in "[{":
            skip(_STRING if text[at] in "\"'" else _SCALAR)
            return
        closing, index = "]" if text[at] == "[" else "}", 0
        at += 1
        while skip(_BLANK) is not None and text[at] != closing:
            if closing == "}":
                pair(path)
            else:
                note(f"{path}[{index}]")
                value(f"{path}[{index}]")
                index += 1
            skip(_BLANK)
            at += text[at] == ","
        at += 1

    table = ""
    while skip(_BLANK) is not None and at < len(text):
        if header := skip(_HEADER):
            table = key("", header)
            at = text.index("]" * len(header), at) + len(header)
        else:
            pair(table)
    return lines
