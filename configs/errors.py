"""ConfigError, and the list that gathers every problem of a config before it is raised."""

from __future__ import annotations

import sys

MOST_SHOWN = 10


class ConfigError(ValueError):
    """The user's settings cannot be used. str() is the whole message, one line per problem; the caller exits with 2."""


class Problems:
    """Gathers one-line problems, each with its line in the file, and raises them together in the order of the file."""

    def __init__(self) -> None:
        self._found: list[tuple[int, str]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, text: str, *, line: int | None = None) -> None:
        """Problems without a line (overrides, cross-checks) come after those of the file, in the order found."""
        self._found.append((sys.maxsize if line is None else line, " ".join(text.split("\n"))))

    def raise_any(self) -> None:
        if not self._found:
            return
        texts = [text for _, text in sorted(self._found, key=lambda found: found[0])]
        if len(texts) > MOST_SHOWN:
            texts[MOST_SHOWN:] = [f"... and {len(texts) - MOST_SHOWN} more"]
        raise ConfigError("\n".join(texts))
