"""Memory of freed tensors is reused without further first-touch page faults. Tested in a child, as the setting is permanent."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytest.importorskip("torch")

TWENTY_ROUNDS = """
import resource, sys, torch
from parallelisms.device import keep_freed_memory

def page_faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        tensors = [torch.ones(10 << 20) for _ in range(2)]  # 40 MiB each: 10,240 pages
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

assert keep_freed_memory()
page_faults()
print(page_faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of another C library cannot be asked")
def test_memory_is_used_again() -> None:
    done = subprocess.run([sys.executable, "-c", TWENTY_ROUNDS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20 * 2 * 10_240 / 100  # without: each page in each round
