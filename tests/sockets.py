"""Tests of processes and sockets whose code is not finished: `make ft` plays them, CI does not until the Manager stands on it."""

from __future__ import annotations

import os

import pytest

by_make_ft = pytest.mark.skipif("PHAROS_FT" not in os.environ, reason="played by `make ft`")
