"""Steps as an accelerator would walk them, on a device that computes nothing: where the host waits, what is gathered, in which dtype is
multiplied, what a checkpoint would write. Every shipped configuration and every layout of up to eight ranks, at full width."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch.utils import backend_registration

from tests.dryrun.cases import DEEP, SCHEDULES, Case, layouts, shipped

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="this torch has no slot for a device that is written in Python",
    ),
]

ROOT = Path(__file__).resolve().parents[2]
READS = {  # of the host, a step, by who asks: two alone, three with other groups
    "compute_step": "the loss sum, and the vote that rides with it: whether the step holds, and who wishes to stop or to save",
    "step": "the norm of the gradients, which clips them, and may end the run",
}
READS_OF_GROUPS = {"wait": "the tail that all groups have summed: valid tokens by slot, loss sum, who leaves"}
READ_BESIDES = {"digest": "the weights of this rank, where groups compare them: every digest_interval steps, here once"}

GROUPS = {
    "a group of one rank": Case("llama3_1b", (1, 1, 1, 1, 1), groups=True),
    "a group of copies": Case("llama3_8b", (1, 2, 1, 1, 1), groups=True),
}
COMPILED = {  # not where attention is computed again: torch's operation for that knows no such device (torch 2.13)
    f"compiled: {case.sizes}": case
    for case in (
        Case("llama3_1b", (1, 1, 1, 1, 1), compile=True),
        Case("llama3_8b", (1, 1, 2, 1, 1), passes=3, compile=True),
        Case("llama3_8b", (1, 2, 1, 1, 1), compile=True),
        Case("llama3_8b", (1, 1, 2, 2, 2), compile=True),
        Case("llama3_8b", (2, 1, 1, 1, 1), 1, local_batch_size=2, schedule="1F1B", compile=True),
    )
}
BREAKS = {  # and by what each is seen
    "a copy to the host": "reads",
    "a second read": "reads",
    "a read by itself": "reads",
    "a copy from the host": "from_host",
    "a full gather": "gathered",
    "a whole weight in fp32": "wide",
    "a state on the host": "on_host",
    "a state in another dtype": "dtypes",
    "a product in fp32": "products",
    "a wait for the device": "waits",
    "a state that is not saved": "planned",
    "blocks that differ": "graphs",
}
CASES = {
    **shipped(),
    **layouts(),
    **GROUPS,
    **COMPILED,
    "documents": Case("llama3_8b", (1, 1, 2, 1, 1), passes=3, documents=True),
    **{
        plant: Case("llama3_8b", (1, 1, 2, 1, 1), compile=seen_by == "graphs", plant=plant)
        for plant, seen_by in BREAKS.items()
    },
}


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Results of the cases that were asked for, from a process apart: torch has one slot for such a device, and no way to free it."""
    items = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.path == Path(__file__)
    ]
    here = [item.callspec.params for item in items]
    chosen = [params.get("name") or params["plant"] for params in here]
    command = [sys.executable, "-W", "ignore", "-m", "tests.dryrun.step"]
    cases = json.dumps([asdict(CASES[name]) for name in chosen])
    done = subprocess.run(command, cwd=ROOT, input=cases, capture_output=True, text=True)
    lines = {
        line["case"]: line for text in done.stdout.splitlines() if text.startswith("{") for line in [json.loads(text)]
    }
    ended = {"error": f"its process ended: {done.stderr[-3000:]}"}
    return {name: lines.get(number, ended) for number, name in enumerate(chosen)}


def verdict(case: Case, result: dict[str, Any]) -> set[str]:
    """Returns the names of the checks that a step fails."""
    assert "error" not in result, result["error"]
    reads = READS | READ_BESIDES | (READS_OF_GROUPS if case.groups else {})
    wrong = {
        "reads": result["reads"] != dict.fromkeys(reads, 1),
        "from_host": result["from_host"] != {},
        "waits": result["waits"] != {},
        "gathered": result["gathered"] > 2 << 20,  # bytes of fp32; two numbers for each token of a chunk are less
        "wide": result["wide"] > 0,
        "products": result["products"] != {},
        "on_host": result["on_host"] > 0,
        "dtypes": result["dtypes"] != ["torch.float32"],
        "planned": result["planned"] != result["held"],
        "graphs": result["graphs"] != (2 if case.compile else 0),  # of all blocks, and of the loss
    }
    return {name for name, holds in wrong.items() if holds}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long)
        if name.endswith(DEEP) or (name in layouts().keys() - SCHEDULES and CASES[name].sizes.world_size > 2)
        else name
        for name in CASES
        if name not in BREAKS
    ],
)
def test_a_step_does_what_it_may_and_nothing_else(seen: dict[str, dict[str, Any]], name: str) -> None:
    assert verdict(CASES[name], seen[name]) == set(), seen[name]


@pytest.mark.parametrize("plant", BREAKS)
def test_what_is_broken_on_purpose_is_seen(seen: dict[str, dict[str, Any]], plant: str) -> None:
    assert BREAKS[plant] in verdict(CASES[plant], seen[plant]), seen[plant]
