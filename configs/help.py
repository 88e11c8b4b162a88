"""The text of `train.py [CONFIG] --help [section]`: every key, its default, meaning and legal values."""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap

from configs import document
from configs.errors import ConfigError, nearest_key, nearest_section
from configs.keys import Key, to_text, walk

COLUMNS = 100
_HELP_AT = 38  # column of the help texts
_USAGE = """\
CONFIG.toml, then overrides: --section.key value | --section.key=value | --section.flag (for true)
Values are TOML, strings need no quotes; a list of tables: --optimizer.groups '[{pattern = "*"}]'
"""


def print_help(*words: str) -> None:
    """Prints `help_text`, as far as it is read: `--help | head` is no error."""
    try:
        print(help_text(*words), flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's own flush fails


def help_text(*words: str) -> str:
    """Returns the keys of one section, or of all. `words`: [CONFIG.toml [--section.key value ...]] [--help] [section]; the keys of [model]
    are those of CONFIG's model, without it Llama's. Raises ConfigError with the nearest section."""
    at = next((at for at, word in enumerate(words) if word in ("--help", "-h")), len(words))
    command, rest = words[:at], words[at + 1 :]
    if not (command and command[0].endswith(".toml")):
        command, rest = (), (*command, *rest)
        if rest and rest[0].endswith(".toml"):
            command, rest = rest[:1], rest[1:]
    if command:
        from configs.load import parse_argv, sections_of

        file, given = parse_argv(command)
        sections = sections_of(document.read(file), given)
    else:
        sections = all_sections()
    section = next((word for word in rest if not word.startswith("-")), None)
    if section is None:
        return "\n\n".join([_USAGE.strip(), *(_section_text(name, kind) for name, kind in sections.items())]) + "\n"
    name = section.strip("[]").split(".")[0]
    if name not in sections:
        near = nearest_section(name, sections)
        key = nearest_key(f".{name}", [path for other, kind in sections.items() for path, _ in walk(kind, other)])
        meant = f"did you mean {near}?" if near else f"there are {', '.join(sections)}"
        if key and not near:
            own = key.split(".")[0]
            meant = f"{key} is in [{own}]: --help {own}"
        raise ConfigError(f"--help {section}: no such section; {meant}")
    return _section_text(name, sections[name]) + "\n"


def _section_text(name: str, kind: type) -> str:
    lines = [sentence(name, kind)]
    for path, key in walk(kind, name):
        head = f"  {path.removeprefix(f'{name}.')} = {default_text(key)}"
        # legal values, unless they follow from the default
        limits = "|".join(map(str, key.choices)) or ", ".join(bound.replace(" ", "") for bound in key.bounds)
        lines += textwrap.wrap(
            f"{key.help} ({limits})" if limits else key.help,
            COLUMNS,
            initial_indent=f"{head:{_HELP_AT - 2}}  ",
            subsequent_indent=" " * _HELP_AT,
            break_on_hyphens=False,
        ) or [head]
    return "\n".join(lines)


def default_text(key: Key) -> str:
    return "(required)" if key.default is dataclasses.MISSING else to_text(key.default)


def sentence(name: str, kind: type) -> str:
    """Returns the headline of a section, the first line of its docstring, which begins with "[section]"."""
    doc = (kind.__doc__ or "").strip().split("\n")[0]
    if doc.startswith(f"[{name}]"):
        return doc
    return f"[{name}]: {doc}" if doc and not doc.startswith(f"{kind.__name__}(") else f"[{name}]"


def all_sections() -> dict[str, type]:
    from configs import load, schema  # imports torch

    sections = load.section_types(schema.RunConfig)
    return {**sections, "model": schema.model_module("llama").Config}
