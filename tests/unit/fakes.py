"""A clock that the test moves, and a log that keeps its lines."""

from dataclasses import dataclass


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Lines:
    def __init__(self, is_terminal: bool = False) -> None:
        self.is_terminal = is_terminal
        self.infos, self.warnings, self.overwritten = list[str](), list[str](), list[str]()

    def info(self, message: str, *args: object) -> None:
        self.infos.append(message % args if args else message)

    def warning(self, message: str, *args: object) -> None:
        self.warnings.append(message % args if args else message)

    def overwrite(self, text: str) -> None:
        self.overwritten.append(text)
