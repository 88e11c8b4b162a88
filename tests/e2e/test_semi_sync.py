"""The drill on jobs whose groups step by themselves: its checks are the same, for a round is a step to it. In CI two groups of
two ranks, sharded and in stages, are killed, stopped and joined; `make e2e` does everything to three."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.test_drill import ALL, HOLES, LIMIT_S, QUICK, drill, injected

pytestmark = pytest.mark.timeout(LIMIT_S + 60)
SEMI = (
    HOLES,
    "--fault_tolerance.semi_sync_method=diloco",
    "--fault_tolerance.sync_steps=4",
    "--fault_tolerance.num_fragments=2",
    "--fault_tolerance.fragment_sync_delay=1",
    "--fault_tolerance.fragment_update_alpha=0.5",
)
LOCAL_SGD = (HOLES, "--fault_tolerance.semi_sync_method=local_sgd", "--fault_tolerance.sync_steps=5")


def test_shards_that_are_killed_and_stopped(tmp_path: Path):
    # weights of a group alone are compared with nobody's
    kinds = [kind for kind in QUICK if kind != "corrupt"] if ALL else ["kill", "stop"]
    eight_bits = "--fault_tolerance.should_quantize=true"
    said = drill(tmp_path, 3 if ALL else 2, sorted(kinds), *SEMI, eight_bits, *([] if ALL else ["--brief"]), ranks=2)
    assert injected(said) >= {"kill", "stop"}


def test_stages_that_are_killed(tmp_path: Path):
    """Each stage has fragments of its own, and sums them with the same stage of the other group."""
    said = drill(
        tmp_path, 2, ["kill"], *SEMI, "--parallelism.pipeline_parallel_degree=2", *([] if ALL else ["--brief"]), ranks=2
    )
    assert "kill" in injected(said)


@pytest.mark.long
def test_weights_that_are_averaged(tmp_path: Path):
    """All state is lost but the newest checkpoint, which has what the groups had agreed on."""
    often = "--checkpoint.interval=5"  # one is there when the fault begins: what it waits for would count as after it
    said = drill(tmp_path, 2, ["all", "add"], *LOCAL_SGD, often)
    assert injected(said) == {"all", "add"}
