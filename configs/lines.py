"""Line numbers of the keys of a TOML file: tomllib gives values without positions, and a message without a line is a riddle.

Runs after tomllib has accepted the text, so it may assume valid TOML and only has to find the ends of keys and values.
"""

from __future__ import annotations

import re

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
