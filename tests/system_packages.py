"""Packages of the system, such as a browser: tests bring them only where that is wanted, for this may be somebody's own machine."""

from __future__ import annotations

import os


def refusal() -> str:
    """Why nothing may be installed here, and how to have it; "": it may."""
    if os.environ.get("PHAROS_NO_INSTALL") == "1":
        return "PHAROS_NO_INSTALL=1"
    if os.environ.get("CI") == "true" or os.environ.get("PHAROS_TEST_INSTALL") == "1":
        return ""
    return "PHAROS_TEST_INSTALL=1 lets the tests bring it with apt-get, as CI=true does"
