"""The GPU memory that --explain predicts, beside what CUDA's allocator handed out."""

from __future__ import annotations

import json

import pytest

from tests.gpu.devices import one_device
from tests.scripts.tiny_job import python

pytestmark = [one_device, pytest.mark.timeout(600)]


@pytest.mark.parametrize("checkpoint", ["none", "selective", "full"])
def test_the_peak_is_within_15_percent(checkpoint: str) -> None:
    found = json.loads(python("-m", "tests.gpu.explained_step", checkpoint).splitlines()[-1])
    assert abs(found["said"] / found["took"] - 1) <= 0.15, found
