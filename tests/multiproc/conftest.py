"""The `pool` fixture: one pool of gloo workers for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multiproc.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool()
    yield workers
    workers.close()
