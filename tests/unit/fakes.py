"""A clock that the test moves, and a log that keeps its lines; fakes of packages, of CUDA and of models."""

import errno
import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import models


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


def set_package(monkeypatch: pytest.MonkeyPatch, name: str, content: dict[str, Any] | None) -> None:
    """Replaces a package by a module with `content`; None: it is not installed."""
    module = SimpleNamespace(**content, __spec__=ModuleSpec(name, None)) if content is not None else None
    monkeypatch.setitem(sys.modules, name, module)


def forbid_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes locks fail on every file, as on some network file systems."""

    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)


def replace_system_call(monkeypatch: pytest.MonkeyPatch, name: str, function: Any) -> None:
    """Replaces os.`name`, or a function with its module, since no file system and kernel here refuses it."""
    monkeypatch.setattr(name if "." in name else f"os.{name}", function, raising=False)


def set_device_module(monkeypatch: pytest.MonkeyPatch, fake: Any, *, name: str = "torch.cuda") -> None:
    """Replaces a module of torch for devices, as there is no other way to have a GPU."""
    monkeypatch.setattr(name, fake)


def add_models(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Adds the models of `folder`, as files of a fork in models/, and removes those of the test before."""
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(folder)])
    for file in folder.glob("*.py"):
        monkeypatch.delitem(sys.modules, f"models.{file.stem}", raising=False)
