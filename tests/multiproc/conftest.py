"""The `pool` fixture: one pool of gloo workers for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.multiproc.pool import Pool

# torch's TCPStore looks up the name of its peer at each connection: a lost packet would cost the resolver's 5 seconds
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()
