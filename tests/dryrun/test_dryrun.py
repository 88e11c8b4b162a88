"""What a step on a GPU would make the host wait for, and what it would gather: on a device that computes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch has no slot for a device that is written in Python",
    ),
]

ROOT = Path(__file__).resolve().parents[2]
# The host reads five numbers at once, which are the vote of the ranks (loss, broken, two wishes, tokens of the slot), and the norm of
# the gradients, which may end the run. A tensor without memory is read number by number.
READS = 5 + 1


def case(ranks: int, plant: str = "", config: str = "llama3_8b", **degrees: int) -> dict[str, Any]:
    parallelism = {f"{axis}_degree": degree for axis, degree in {"data_parallel_shard": ranks, **degrees}.items()}
    return {"config": config, "ranks": ranks, "layers": 2, "parallelism": parallelism, "compile": False, "plant": plant}


LAYOUTS = {
    "one rank": case(1, config="llama3_1b"),
    "two shards": case(2),
    "two copies": case(2, data_parallel_shard=1, data_parallel_replicate=2),
    "two parts of each matrix": case(2, data_parallel_shard=1, tensor_parallel=2),
    "two parts of each sequence": case(2, data_parallel_shard=1, context_parallel=2),
    "four: copies of shards": case(4, data_parallel_shard=2, data_parallel_replicate=2),
    "four: shards of parts": case(4, data_parallel_shard=2, tensor_parallel=2),
    "eight shards": case(8),
    "eight: three axes": case(8, data_parallel_shard=2, tensor_parallel=2, context_parallel=2),
}
BREAKS = {
    "a copy to the host": "to_host",
    "a second read": "to_host",
    "a full gather": "gathered",
    "a state on the host": "on_host",
    "a wrong dtype": "dtypes",
}


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, Any]]:
    """One process for all: torch has one slot for such a device, and no way to free it."""
    cases = {**LAYOUTS, **{plant: case(2, plant) for plant in BREAKS}}
    command = [sys.executable, "-W", "ignore", "-m", "tests.dryrun.step", json.dumps(list(cases.values()))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(cases), done.stderr[-3000:]
    return dict(zip(cases, lines, strict=True))


def verdict(result: dict[str, Any]) -> set[str]:
    """What is wrong with a step."""
    assert "error" not in result, result["error"]
    wrong = {
        "to_host": result["to_host"] != {"aten._local_scalar_dense.default": READS},
        "waits": result["waits"] != {},
        "gathered": result["gathered"] > 2 << 20,  # bytes of fp32; two numbers for each token of a chunk are less
        "on_host": result["on_host"] > 0,
        "dtypes": result["dtypes"] != ["torch.float32"],
    }
    return {name for name, holds in wrong.items() if holds}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_host_reads_what_decides_and_nothing_else(seen: dict[str, dict[str, Any]], name: str) -> None:
    assert verdict(seen[name]) == set(), seen[name]
    assert seen[name]["planned"] > 0, "a checkpoint has tensors"


@pytest.mark.parametrize("plant", BREAKS)
def test_what_is_broken_on_purpose_is_seen(seen: dict[str, dict[str, Any]], plant: str) -> None:
    assert BREAKS[plant] in verdict(seen[plant]), seen[plant]
