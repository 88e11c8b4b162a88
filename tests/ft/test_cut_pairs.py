"""Groups on machines of their own, two of which lose each other's packets while all reach the lighthouse (cut_pairs.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.drill_machines import Network
from tests.ft.cut_pairs import Job

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        made = Network()
    except RuntimeError as error:
        pytest.skip(f"no network namespaces here: {error}")
    yield made
    made.close()


def test_a_pair_that_is_cut_in_a_sum_costs_one_generation_and_one_of_them_sits_out(network: Network, tmp_path: Path):
    job = Job(network, tmp_path, "abc", min_replicas=2)
    try:
        job.until("abc", 0.0)
        network.part("a", "b", True)
        cut_s = time.monotonic()
        parted_s = job.until("ac", cut_s)
        network.part("a", "b", False)
        together_s = job.until("abc", parted_s)
        during = [x for x in job.commits if cut_s < x.at_s < together_s and x.members != "abc"]
        assert {x.members for x in during} == {"ac"} and len({x.quorum_id for x in during}) == 1, during
    finally:
        job.close()
