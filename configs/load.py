"""Builds a RunConfig from the command line: reads TOML and overrides, checks each value, reports all problems together (see check.py)."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs import document
from configs.document import Origin
from configs.errors import ConfigError, nearest_key, nearest_section, raise_problems, unknown_key
from configs.keys import Key, convert, from_text, keys_of, to_text, walk

if TYPE_CHECKING:
    from configs.schema import RunConfig

CONFIG_FILE = "config.toml"  # in the run's folder; see configs/saved.py
HELD_OUT = "training.dataset_held_out"
_OPTION = re.compile(r"--([A-Za-z_][\w.\-\[\]]*)(?:=(.*))?", re.DOTALL)
USAGE = "CONFIG.toml, then overrides: --section.key value"
Overrides = Mapping[str, str | None]  # key -> text; None: without a value, which means true for a bool


def load(argv: Sequence[str]) -> RunConfig:
    """Returns the RunConfig of `CONFIG.toml --section.key value ...`. Raises ConfigError with all problems."""
    file, given = parse_argv(argv)
    tables, origin = document.read(file)
    sections = sections_of((tables, origin), given)
    from configs import schema

    values, origin = build(sections, (tables, origin), given)
    if not values["job"].name:
        values["job"] = dataclasses.replace(values["job"], name=Path(file).stem)
    return with_held_out_share(schema.RunConfig(**values, origin=origin))


def with_held_out_share(config: RunConfig) -> RunConfig:
    """Returns `config` with its training.dataset_held_out or, if that is not set, with the share of its run. A new run holds nothing out if
    it validates nothing."""
    if config.origin.has(HELD_OUT):
        return config
    default: float = type(config.training).dataset_held_out
    share: Any = default if config.validation.enable else 0.0
    with suppress(ConfigError):  # configs/check.py and check_saved report it
        if (saved := read_saved(config.run_folder)) is not None:  # a key that it lacks has the default
            share = saved.get("training", {}).get("dataset_held_out", default)
    return dataclasses.replace(config, training=dataclasses.replace(config.training, dataset_held_out=float(share)))


def read_saved(folder: Path) -> dict[str, Any] | None:
    """Returns the tables of a run's saved settings, None without that file. Raises ConfigError for a file that cannot be
    read, or that no launch has written."""
    path = folder / CONFIG_FILE
    try:
        if not exists(path):
            return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        tables, origin = document.read(str(path))
        for name, table in tables.items():
            if not isinstance(table, dict):
                raise ConfigError(f"{origin.place(name)} = {to_text(table)}: must be a table")
        numbers: dict[str, tuple[type, ...]] = {"global_batch_size": (int,), "dataset_held_out": (int, float)}
        for name, kinds in numbers.items():  # all other saved values are compared as text
            value = tables.get("training", {}).get(name, 0)
            if type(value) not in kinds:  # True is an int
                raise ConfigError(f"{origin.place(f'training.{name}')} = {to_text(value)}: must be a number")
    except ConfigError as error:
        raise ConfigError(f"{error}; an earlier launch of this run wrote it: restore it, or remove it") from None
    return tables


def exists(path: Path) -> bool:
    """Returns False if there is no such file or folder. Raises OSError if that is not known, as below a folder that this user may not
    search: Path.exists does so only before Python 3.14."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def sections_of(written: tuple[Mapping[str, Any], Origin], given: Overrides) -> dict[str, type]:
    """Returns the sections and their classes; model.name determines that of [model]. `written`: see document.read. Raises ConfigError."""
    from configs import schema  # imports torch, two seconds: after the file has been read

    tables, origin = written
    sections = section_types(schema.RunConfig)
    # a value of a wrong type is reported later
    default, table = keys_of(sections["model"])["name"].default, tables.get("model")
    name = given.get("model.name", table.get("name", default) if isinstance(table, Mapping) else default)
    try:
        return {**sections, "model": schema.model_module(name if isinstance(name, str) else default).Config}
    except ValueError as error:
        origin = dataclasses.replace(origin, overrides=frozenset(given))
        raise ConfigError(origin.explain(str(error))) from None


def section_types(root: type) -> dict[str, type]:
    """Returns the sections of a root dataclass and their classes, in order."""
    return {name: key.type for name, key in keys_of(root).items() if key.type is not Origin}


def build(
    sections: Mapping[str, type], written: tuple[dict[str, Any], Origin], given: Overrides
) -> tuple[dict[str, Any], Origin]:
    """Returns one instance per section, and the origin of their values. `written`: see document.read. Raises ConfigError."""
    reader = _Reader(sections, *written)
    reader.override(given)
    for name, table in reader.tables.items():
        if name not in sections:
            reader.unknown_section(name, table)
    # Sections that are not in the file have their defaults
    values = {name: reader.table(kind, reader.tables.get(name, {}), name) for name, kind in sections.items()}
    raise_problems(reader.problems, reader.origin.file)
    return values, reader.origin


class _Reader:
    """Converts tables to dataclasses and collects the problems."""

    def __init__(self, sections: Mapping[str, type], tables: Mapping[str, Any], origin: Origin) -> None:
        self.sections, self.tables, self.origin = sections, copy.deepcopy(dict(tables)), origin
        self.problems = list[str]()
        self.legal = [path for name, section in sections.items() for path, _ in walk(section, name)]

    def override(self, given: Overrides) -> None:
        """Merges the overrides into the tables, which are then checked as a whole."""
        for path, text in given.items():
            section, *names = path.split(".")
            kind, key = self.sections.get(section), None
            for name in names:
                key = keys_of(kind).get(name) if kind else None
                kind = key.table if key else None
            if key is None:
                self.problems.append(f"--{path}: {self._unknown(path)}")
                continue
            if text is None and key.type is not bool:
                example = "VALUE" if key.default is dataclasses.MISSING else to_text(key.default)
                self.problems.append(f"--{path}: no value, as in --{path}={example}; it takes {key.legal()}")
                continue
            table: Any = self.tables
            for part in (section, *names[:-1]):
                table = table.setdefault(part, {}) if isinstance(table, dict) else None
            if isinstance(table, dict):  # else the file has a value in place of a table, which is reported by `table`
                table[names[-1]] = True if text is None else from_text(key, text)
                self.origin = dataclasses.replace(self.origin, overrides=self.origin.overrides | {path})

    def table(self, section: type, table: Any, path: str) -> Any:
        """Returns an instance of a section (or nested table), or None after a problem."""
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
            text = to_text(value)
            self._add(path, f" = {text if len(text) <= 60 else text[:57] + '...'}: {error}")
            return None

    def unknown_section(self, name: str, table: Any) -> None:
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
        self.problems.append(self.origin.place(path) + text)


def parse_argv(argv: Sequence[str]) -> tuple[str, dict[str, str | None]]:
    """Returns CONFIG and its overrides, --section.key value, --section.key=value, or --section.flag. Raises ConfigError for others."""
    if not argv:
        raise ConfigError(f"no config file; wanted {USAGE}")
    path, *rest = argv
    if path.startswith("-"):
        raise ConfigError(f"{path}: the config file comes first; wanted {USAGE}")
    problems = list[str]()
    found: dict[str, str | None] = {}
    while rest:
        word = rest.pop(0)
        option = _OPTION.fullmatch(word)
        if not option:
            problems.append(f"{word}: not an override; wanted {USAGE}")
            continue
        key, text = option.groups()
        if text is None and rest and not rest[0].startswith("--"):
            text = rest.pop(0)
        if key in found:
            first, second = ("without a value" if value is None else value for value in (found[key], text))
            problems.append(f"--{key}: given twice, {first} and {second}; keep one")
        found[key] = text
    raise_problems(problems)
    return path, found
