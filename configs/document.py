"""Reading of a TOML file with the line of every key, and Origin, by which messages locate a key."""

from __future__ import annotations

import difflib
import re
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
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
    """The file of a RunConfig's settings, the line of each key, and the keys set by overrides."""

    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    overrides: frozenset[str] = frozenset()

    def has(self, key: str) -> bool:
        """Returns True if the file or an override sets the key."""
        return key in self.lines or key in self.overrides

    def place(self, key: str) -> str:
        """Returns a key with its location: "configs/llama.toml:12: training.steps", or "--training.steps"."""
        if any(key == name or key.startswith((f"{name}.", f"{name}[")) for name in self.overrides):
            return f"--{key}"
        line = self.lines.get(key)
        where = f"{self.file}:{line}: " if line else f"{self.file}: " if self.file else ""
        return where + key

    def explain(self, message: str) -> str:
        """Prepends the location to a message "section.key = value: cause"."""
        key = _KEY_AHEAD.match(message)
        return self.place(key.group()) + message[key.end() :] if key else message


def read(file: str) -> tuple[dict[str, Any], Origin]:
    """Returns the tables of a TOML file and their Origin. Raises ConfigError: missing, unreadable, not UTF-8, or not TOML."""
    try:
        raw = Path(file).read_bytes()
    except FileNotFoundError:
        names = list(map(str, Path(file).parent.glob("*.toml"))) or list(map(str, Path("configs").glob("*.toml")))
        close = difflib.get_close_matches(file, names, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else _inside(Path(file).parent)
        raise ConfigError(f"{file}: no such file{hint}") from None
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


def parse(text: str, file: str) -> tuple[dict[str, Any], Origin]:
    """Parses TOML text; `file`: its name in messages. Raises ConfigError: not TOML."""
    try:
        tables = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or an integer of thousands of digits
        # tomllib's message with "(at line 3, column 7)" converted to file:line, and that line
        lines = text.split("\n")
        cause, _, position = str(error).rpartition(" (at ")
        numbers = re.fullmatch(r"line (\d+), column (\d+)\)", position)
        number = int(numbers[1]) if numbers else len(lines)
        shown = lines[number - 1].strip() if number <= len(lines) else ""
        hint = "; no value" if shown.endswith("=") else "; strings need quotes"
        why = f"{cause or error}{hint if cause == 'Invalid value' else ''}"
        raise ConfigError(f"{file}:{number}: not TOML: {why}: {shown[:80] or 'end of file'}") from None
    return tables, Origin(file, key_lines(text))


def _inside(folder: Path) -> str:
    names = sorted(str(path) for path in folder.glob("*.toml"))
    return f"; there are {', '.join(names[:5])}" if names else ""


def key_lines(text: str) -> dict[str, int]:
    """Returns the line of every table and key of valid TOML text, which tomllib does not provide: {"training": 3, "training.steps": 4,
    "a.list[0].b": 9}. A key that several statements build up (dotted keys, sub-tables) has the line of the first one."""
    lines, array_lengths = dict[str, int](), Counter[str]()
    header, statement, start = "", "", 1  # start: first line of the statement

    def note(value: Any, path: str = "", *, starts_element: bool = False) -> None:
        if path:
            lines.setdefault(path, start)
        array_lengths[path] += starts_element and isinstance(value, list)
        if array_lengths[path]:  # an array of tables: its last element
            path, value = f"{path}[{array_lengths[path] - 1}]", value[0] if isinstance(value, list) else value
            lines.setdefault(path, start)
        for name, item in value.items() if isinstance(value, dict) else ():
            note(item, f"{path}.{name}" if path else name, starts_element=starts_element)
        for index, item in enumerate(value) if isinstance(value, list) else ():
            note(item, f"{path}[{index}]")

    for number, line in enumerate(text.split("\n"), 1):
        if not statement and line.lstrip().startswith("["):
            header = f"{line}\n"
            note(tomllib.loads(header), starts_element=line.lstrip().startswith("[["))
            start = number + 1
            continue
        statement += f"{line}\n"
        for closing in ("", "]"):  # a complete statement, or a list up to here
            with suppress(ValueError):
                note(tomllib.loads(header + statement + closing))
                statement, start = statement if closing else "", number + 1
                break
    return lines
