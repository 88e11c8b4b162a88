"""The command line: CONFIG, then --section.key value, --section.key=value, or --section.flag alone for true."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from configs.errors import ConfigError, Problems

_OPTION = re.compile(r"--([A-Za-z_][\w.\-\[\]]*)(?:=(.*))?", re.DOTALL)
USAGE = "CONFIG.toml, then overrides: --section.key value"


@dataclass(frozen=True)
class Override:
    """One override as typed. `text` None: no value was given, which means true to a flag."""

    key: str
    text: str | None


def parse(argv: Sequence[str]) -> tuple[str, list[Override]]:
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
