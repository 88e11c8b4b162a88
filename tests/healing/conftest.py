"""The pool of tests/multiproc, for the transport that needs two processes."""

from __future__ import annotations

from tests.multiproc.conftest import pool

__all__ = ["pool"]
