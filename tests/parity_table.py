"""Parses the table of tests/README.md: torchft's tests, and the tests of this repository that show the same."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).with_name("README.md")
OURS = re.compile(r"`([\w/]+\.(?:py|txt))::(\w+)`")  # a test, or a transcript by the words of its title


@dataclass(frozen=True)
class Row:
    file: str  # of torchft
    names: tuple[str, ...]  # of its tests, without test_; or a file name, if a whole file is left out
    text: str  # second column

    @property
    def ours(self) -> list[tuple[str, str]]:
        """The tests of this repository: (file below tests/, name)."""
        return OURS.findall(self.text)


def rows() -> list[Row]:
    """Returns the rows of all tables below headings `### FILE`."""
    found, file = [], ""
    for line in README.read_text(encoding="utf-8").splitlines():
        if line.startswith("### "):
            file = line.removeprefix("### ").strip("`")
        elif file and line.startswith("| `"):
            _, theirs, text, _ = line.split("|")
            found.append(Row(file, tuple(re.findall(r"`([\w.]+)`", theirs)), text.strip()))
    return found
