"""From the command line to a Config: TOML, overrides on top, every value checked, every problem told at once.

train.py -> load -> (document) -> here -> check.py. What spans sections or touches files is check.py's.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import document
from configs.document import Document, Origin
from configs.errors import ConfigError, Problems, nearest_key, nearest_section, unknown_key
from configs.keys import Key, convert, from_text, keys_of, to_text, walk

if TYPE_CHECKING:
    from configs.schema import Config


import re
from dataclasses import dataclass


def load(argv: Sequence[str]) -> Config:
    """The Config of `CONFIG.toml --section.key value ...`. Raises ConfigError with all that is wrong."""
    file, given = parse_argv(argv)
    written = document.read(file)
    from configs import schema  # brings torch with it, two seconds: not before the file has been read

    sections = section_types(schema.Config)
    name = _model_name(sections, written, given)
    try:
        sections["model"] = schema.model_module(name).Config
    except ValueError as error:
        raise ConfigError(Origin(file, written.lines, frozenset(o.key for o in given)).explain(str(error))) from None
    values, origin = build(sections, written, given)
    if not values["job"].name:
        values["job"] = dataclasses.replace(values["job"], name=Path(file).stem)
    return schema.Config(**values, origin=origin)


def section_types(root: type) -> dict[str, type]:
    """The sections of a root dataclass and their classes, in order."""
    return {name: key.type for name, key in keys_of(root).items() if key.type is not Origin}


def build(sections: Mapping[str, type], written: Document, given: Sequence[Override]) -> tuple[dict[str, Any], Origin]:
    """One instance per section, and where their values came from. Raises ConfigError."""
    reader = _Reader(sections, written)
    reader.override(given)
    values = reader.document()
    reader.problems.raise_any()
    return values, reader.origin


def _model_name(sections: Mapping[str, type], written: Document, given: Sequence[Override]) -> str:
    """model.name, which decides the class of [model]; a value of a wrong type is told later."""
    default = keys_of(sections["model"])["name"].default
    table = written.tables.get("model")
    named = table.get("name", default) if isinstance(table, Mapping) else default
    for override in given:
        if override.key == "model.name":
            named = override.text
    return named if isinstance(named, str) else default


class _Reader:
    """Walks tables and dataclasses side by side and gathers the problems."""

    def __init__(self, sections: Mapping[str, type], written: Document) -> None:
        self.sections = sections
        self.tables = copy.deepcopy(dict(written.tables))
        self.origin = Origin(written.file, written.lines)
        self.problems = Problems()
        self.legal = [path for name, section in sections.items() for path, _ in walk(section, name)]

    def override(self, given: Sequence[Override]) -> None:
        """Puts the overrides into the tables, so that one path checks both."""
        for override in given:
            key = self._find(override.key)
            if key is None:
                self.problems.add(f"--{override.key}: {self._unknown(override.key)}")
                continue
            value = from_text(key, override.text) if override.text is not None else True
            if override.text is None and key.type is not bool:
                example = "VALUE" if key.default is dataclasses.MISSING else to_text(key.default)
                self.problems.add(
                    f"--{override.key}: no value, as in --{override.key}={example}; it takes {key.legal()}"
                )
                continue
            *tables, name = override.key.split(".")
            table = self.tables
            for part in tables:
                table = table.setdefault(part, {})
                if not isinstance(table, dict):
                    break  # the file has a value where a table belongs: told when that is read
            else:
                table[name] = value
                self.origin = dataclasses.replace(self.origin, overrides=self.origin.overrides | {override.key})

    def document(self) -> dict[str, Any]:
        """All sections; those that are not in the file have their defaults."""
        for name, table in self.tables.items():
            if name not in self.sections:
                self._unknown_section(name, table)
        return {name: self.table(section, self.tables.get(name, {}), name) for name, section in self.sections.items()}

    def table(self, section: type, table: Any, path: str) -> Any:
        """One instance of a section (or nested table), or None after a problem."""
        if not isinstance(table, dict):
            self._add(path, f" = {to_text(table)}: must be a table: [{path}], then its keys")
            return None
        keys = keys_of(section)
        before = len(self.problems)
        for name in [name for name in table if name not in keys]:
            self._add(f"{path}.{name}", f": {self._unknown(f'{path}.{name}')}")
        missing = [key for key in keys.values() if key.default is dataclasses.MISSING and key.name not in table]
        for key in missing if len(self.problems) == before else ():
            self._add(path, f": needs {key.name}: {key.legal()}")
        values = {name: self._value(keys[name], table[name], f"{path}.{name}") for name in table if name in keys}
        return section(**values) if len(self.problems) == before else None

    def _value(self, key: Key, value: Any, path: str) -> Any:
        if key.table:
            return self.table(key.table, value, path)
        if key.row and isinstance(value, list):
            return tuple(self.table(key.row, item, f"{path}[{i}]") for i, item in enumerate(value))
        try:
            return convert(key, value)
        except ValueError as error:
            self._add(path, f" = {_short(value)}: {error}")
            return None

    def _find(self, path: str) -> Key | None:
        """The key that an override names."""
        section, *names = path.split(".")
        table, key = self.sections.get(section), None
        for name in names:
            key = keys_of(table).get(name) if table else None
            table = key.table if key else None
        return key

    def _unknown_section(self, name: str, table: Any) -> None:
        near = nearest_section(name, self.sections)
        if not isinstance(table, dict):
            found = nearest_key(f".{name}", self.legal)
            self._add(name, ": a key outside of any section" + (f"; did you mean {found}?" if found else ""))
        elif near or not table:
            meant = f"; did you mean [{near}]?" if near else f"; there are {', '.join(self.sections)}"
            self._add(name, f": no such section{meant}")
        for key in table if isinstance(table, dict) and not near else ():
            self._add(f"{name}.{key}", f": {self._unknown(f'{name}.{key}')}")

    def _unknown(self, path: str) -> str:
        if "." not in path:
            found = nearest_key(f".{path}", self.legal)
            return "overrides are --section.key" + (f"; did you mean --{found}?" if found else "")
        cause = unknown_key(path, self.legal)
        return f"no such section; there are {', '.join(self.sections)}" if cause == "no such key" else cause

    def _add(self, path: str, text: str) -> None:
        place = self.origin.place(path)
        self.problems.add(place + text, line=None if place.startswith("--") else self.origin.lines.get(path))


def _short(value: Any) -> str:
    text = to_text(value)
    return text if len(text) <= 60 else text[:57] + "..."


# ---- overrides: CONFIG, then --section.key value, --section.key=value, or --section.flag alone for true


_OPTION = re.compile(r"--([A-Za-z_][\w.\-\[\]]*)(?:=(.*))?", re.DOTALL)
USAGE = "CONFIG.toml, then overrides: --section.key value"


@dataclass(frozen=True)
class Override:
    """One override as typed. `text` None: no value was given, which means true to a flag."""

    key: str
    text: str | None


def parse_argv(argv: Sequence[str]) -> tuple[str, list[Override]]:
    """The config file and its overrides. Raises ConfigError for what is neither, and for a key given twice."""
    if not argv:
        raise ConfigError(f"no config file; wanted {USAGE}")
    path, *rest = argv
    if path.startswith("-"):
        raise ConfigError(f"{path}: the config file comes first; wanted {USAGE}")
    problems = Problems()
    found: dict[str, Override] = {}
    while rest:
        word = rest.pop(0)
        option = _OPTION.fullmatch(word)
        if not option:
            problems.add(f"{word}: not an override; wanted {USAGE}")
            continue
        key, text = option.groups()
        if text is None and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        if key in found:
            problems.add(f"--{key}: given twice, {_said(found[key].text)} and {_said(text)}; keep one")
        found[key] = Override(key, text)
    problems.raise_any()
    return path, list(found.values())


def _said(text: str | None) -> str:
    return "without a value" if text is None else text
