"""Fixtures: groups that heal over HTTP in one process, and the pool of tests/multiproc for the transport that needs two processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.healing.http_world import World
from tests.multiproc.conftest import pool

__all__ = ["pool"]


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        world = World(stack)
        yield world
        world.open_gates()
