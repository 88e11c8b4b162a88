"""Fixtures: a lighthouse for two groups, and session fixtures that install torchft (peer.py)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ft import LighthouseServer
from tests.rpc.peer import Peer, Unavailable, install


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", 2, quorum_tick_ms=10)
    yield server
    server.shutdown()


@pytest.fixture(scope="session")
def torchft() -> Path:
    """The folder that a process needs in its path to import torchft. Skips if torchft is not available."""
    try:
        return install()
    except Unavailable as error:
        pytest.skip(f"torchft's wheel cannot be had, so nothing is shown of it here: {error}")


@pytest.fixture(scope="session")
def peer(torchft: Path) -> Iterator[Peer]:
    process = Peer(torchft)
    yield process
    process.close()
