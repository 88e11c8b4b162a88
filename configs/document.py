"""A TOML file as it was read, with the line of every key; and Origin, what a Config keeps of it for messages."""

from __future__ import annotations

import difflib
import re
import sys
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
        raise ConfigError(_broken(file, text, str(error))) from None
    return Document(file, tables, key_lines(text))


def _broken(file: str, text: str, error: str) -> str:
    """tomllib's message, its "(at line 3, column 7)" turned into file:line, and the line itself."""
    lines = text.split("\n")
    cause, _, position = error.rpartition(" (at ")
    numbers = re.fullmatch(r"line (\d+), column (\d+)\)", position)
    number = int(numbers.group(1)) if numbers else len(lines)
    shown = lines[number - 1].strip() if number <= len(lines) else ""
    hint = ""
    if cause == "Invalid value":
        hint = "; no value" if shown.endswith("=") else "; strings need quotes"
    return f"{file}:{number}: not TOML: {cause or error}{hint}: {shown[:80] or 'end of file'}"


def _beside(path: Path) -> str:
    names = [str(other) for other in path.parent.glob("*.toml")] or [
        str(other) for other in Path("configs").glob("*.toml")
    ]
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
_SCALAR = re.compile(r"[^,\]}#\n]+")


def key_lines(text: str) -> dict[str, int]:
    """The line of every table and key of a valid TOML text: {"training": 3, "training.steps": 4, "a.list[0].b": 9}.

    A key that several statements build up (dotted keys, sub-tables) has the line where it is first named.
    """
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.lines: dict[str, int] = {}
        self._elements: dict[str, int] = {}  # how many [[headers]] an array of tables has had

    def document(self) -> None:
        table = ""
        while self._skip(_BLANK) and self.at < len(self.text):
            if self.text.startswith("[[", self.at):
                table = self._header("[[", "]]")
            elif self.text[self.at] == "[":
                table = self._header("[", "]")
            else:
                self._pair(table)

    def _header(self, opening: str, closing: str) -> str:
        line = self._line()
        self.at += len(opening)
        path = ""
        parts = self._key()
        for i, part in enumerate(parts):
            path = _join(path, part)
            if opening == "[[" and i == len(parts) - 1:
                self._elements[path] = self._elements.get(path, 0) + 1
            self._note(path, line)
            if path in self._elements:
                path = f"{path}[{self._elements[path] - 1}]"
                self._note(path, line)
        self.at = self.text.index(closing, self.at) + len(closing)
        return path

    def _pair(self, table: str) -> None:
        line = self._line()
        path = table
        for part in self._key():
            path = _join(path, part)
            self._note(path, line)
        self.at = self.text.index("=", self.at) + 1
        self._skip(_SPACE)
        self._value(path)

    def _key(self) -> list[str]:
        parts = []
        while True:
            self._skip(_SPACE)
            parts.append(self._skip(_KEY_PART).group().strip("\"'"))
            self._skip(_SPACE)
            if not self.text.startswith(".", self.at):
                return parts
            self.at += 1

    def _value(self, path: str) -> None:
        opening = self.text[self.at]
        if opening == "[":
            self._list(path)
        elif opening == "{":
            self._table(path)
        else:
            self._skip(_STRING if opening in "\"'" else _SCALAR)

    def _list(self, path: str) -> None:
        index = 0
        while self._separator("]"):
            self._note(f"{path}[{index}]", self._line())
            self._value(f"{path}[{index}]")
            index += 1

    def _table(self, path: str) -> None:
        while self._separator("}"):
            self._pair(path)

    def _separator(self, closing: str) -> bool:
        """Steps over the opening bracket or a comma; False once it has stepped over the closing one."""
        self._skip(_BLANK)
        if self.text[self.at] != closing:
            self.at += 1
            self._skip(_BLANK)
        if self.text[self.at] != closing:
            return True
        self.at += 1
        return False

    def _skip(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self.text, self.at)
        assert match, f"not TOML at line {self._line()}: {self.text[self.at : self.at + 20]!r}"
        self.at = match.end()
        return match

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _note(self, path: str, line: int) -> None:
        self.lines.setdefault(path, line)


def _join(path: str, part: str) -> str:
    return f"{path}.{part}" if path else part
