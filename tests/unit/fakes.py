"""A clock that the test moves, and a log that remembers."""

from __future__ import annotations


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Lines:
    def __init__(self, is_terminal: bool = False) -> None:
        self.is_terminal = is_terminal
        self.infos: list[str] = []
        self.warnings: list[str] = []
        self.overwritten: list[str] = []

    def info(self, message: str, *args: object) -> None:
        self.infos.append(message % args if args else message)

    def warning(self, message: str, *args: object) -> None:
        self.warnings.append(message % args if args else message)

    def overwrite(self, text: str) -> None:
        self.overwritten.append(text)
