"""A plugin of pytest (-p tests.rpc.torchft_shim): torchft's own tests, with our lighthouse in the place of theirs."""

from __future__ import annotations

import functools
import socket
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ft import LighthouseServer

socket.gethostname = lambda: "127.0.0.1"  # before torchft asks: the machine's own name need not resolve
import torchft._torchft as extension  # type: ignore[import-not-found]  # noqa: E402

made = 0


class Ours(LighthouseServer):  # type: ignore[misc]
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        global made
        made += 1


extension.LighthouseServer = Ours


def pytest_collection_finish() -> None:
    """One race of those tests is mended, for it fails on any lighthouse.

    Their groups are threads: each seeds torch's one generator and makes its weights under INIT_LOCK, but draws its batches
    outside of it, so that a group which came first may draw between another's seed and its weights. Without the weights of
    step 0 from a peer (init_sync=False) these two then differ for good. Batches are drawn under that lock here, too.
    """
    import torch

    tests = sys.modules.get("torchft.manager_integ_test")
    if tests is None:
        return

    def locked(draw: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(draw)
        def drawn(*args: Any, **options: Any) -> Any:
            with tests.INIT_LOCK:
                return draw(*args, **options)

        return drawn

    torch.rand, torch.randint = locked(torch.rand), locked(torch.randint)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"lighthouses of ours: {made}")
