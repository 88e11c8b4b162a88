"""Fixtures: a lighthouse, simulated groups, and a browser (Debian's chromium, installed if permitted; otherwise tests of the page are
skipped)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest

from bench.lighthouse_load import Herd
from tests import system_packages
from tests.dashboard.house import THREE, Herds, House, Houses, Jobs

INSTALL_S = 300


@pytest.fixture
def house() -> Iterator[Houses]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(closing(House(**options)))


@pytest.fixture
def herd(house: Houses) -> Iterator[Herds]:
    """Simulated groups, which end before the lighthouse."""
    with ExitStack() as stack:
        yield lambda of: stack.enter_context(closing(Herd(of.address, of.token, loop=of.loop)))


@pytest.fixture
def job(house: Houses, herd: Herds) -> Jobs:
    """A lighthouse that requires all of these groups, which have formed a quorum and committed a step."""

    def build(ids: Sequence[str] = THREE, **options: Any) -> tuple[House, Herd]:
        one = house(**{"min_replicas": len(ids), **options})
        groups = herd(one)
        groups.open(ids)
        groups.form()
        groups.beat()
        return one, groups

    return build


@pytest.fixture(scope="package")  # playwright holds an event loop in this thread: no test elsewhere could run one
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    path = _chromium()
    with playwright.sync_playwright() as running:
        made = running.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield made
        made.close()


def _chromium() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if found := shutil.which(name):
            return found
    if why := system_packages.refusal():
        pytest.skip(f"no chromium here: {why}")
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip("no chromium here, and this user cannot install Debian's")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in ("update -qq", "install -qq -y --no-install-recommends chromium fonts-dejavu-core"):
        words = ["apt-get", *command.split()]  # no shell: at the limit apt-get itself is killed, which has dpkg's lock
        try:
            done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=INSTALL_S)
        except subprocess.TimeoutExpired:
            pytest.skip(f"no chromium here: apt-get {command.split()[0]} took more than {INSTALL_S} s")
        if done.returncode:
            pytest.skip(f"no chromium here, and apt-get cannot bring it: {done.stderr.strip()[-300:]}")
    found = shutil.which("chromium")
    assert found, "installed, and not to be found"
    return found
