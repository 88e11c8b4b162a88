"""Writes docs/config.md, a table per section (`make docs`)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run by path from any folder

from configs.help import all_sections, default_text, sentence
from configs.keys import walk

DOCS = Path(__file__).resolve().parents[1] / "docs" / "config.md"
_HEAD = """\
# Settings

Generated from the dataclasses by `make docs`; do not edit. `python train.py [CONFIG] --help [section]` prints the same.

A run takes one TOML file and, after it, overrides: `--section.key value`, `--section.key=value`, or `--section.flag`
without a value for true. Strings on the command line need no quotes; lists and tables are written as TOML. A key that
is not given has its default. The keys of `[model]` are those of `models/llama.py`; a different `model.name` has its own.
"""


def docs_markdown(*, sections: Mapping[str, type] | None = None) -> str:
    parts = [_HEAD.strip()]
    for name, kind in (sections or all_sections()).items():
        table = ["| key | default | legal | what it does |", "| --- | --- | --- | --- |"]
        for path, key in walk(kind, name):
            default = default_text(key) if key.default is dataclasses.MISSING else f"`{default_text(key)}`"
            cells = (f"`{path}`", default, key.legal(), key.help)
            table.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        text = sentence(name, kind).removeprefix(f"[{name}]").lstrip(": ")
        parts += [f"## [{name}]", text[:1].upper() + text[1:], "\n".join(table)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    DOCS.write_text(docs_markdown(), encoding="utf-8")
