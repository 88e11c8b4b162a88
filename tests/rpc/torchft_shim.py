"""A plugin of pytest (-p tests.rpc.torchft_shim): torchft's own tests, with our lighthouse in the place of theirs."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from ft import LighthouseServer

socket.gethostname = lambda: "localhost"  # before torchft asks: the machine's own name need not resolve
import torchft._torchft as extension  # type: ignore[import-not-found]  # noqa: E402

made = 0


class Ours(LighthouseServer):  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        global made
        made += 1


extension.LighthouseServer = Ours


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"lighthouses of ours: {made}")
