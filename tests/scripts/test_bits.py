"""bench/bits.py, the quick one: a kill does not change the weights, and the check detects when one does."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from bench.bits import apart, compare
from bench.resume import checkpoint, checkpoint_values
from tests.scripts.tiny_job import ROOT, python

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


@pytest.mark.long  # both tiers have e2e/test_interventions.py, whose jobs with a kill equal undisturbed ones
def test_a_kill_does_not_reach_the_weights(tmp_path: Path) -> None:
    said = python(ROOT / "bench" / "bits.py", "--quick", "--keep", tmp_path)
    found = re.search(r"killed: \d in step \d+; (\d+) steps .* equal$", said.strip())
    assert found, said

    last = int(found[1])
    killed, calm = (tmp_path / f"both-{history}" for history in ("killed", "calm"))
    values = checkpoint_values(checkpoint(calm, last))
    assert compare(killed, calm, last)[1] == [] and apart(checkpoint_values(checkpoint(killed, last)), values) == 0
    shutil.rmtree(checkpoint(calm, last))
    shutil.copytree(checkpoint(calm, last - 20), checkpoint(calm, last))  # as if one step had trained on something else
    log = calm / "metrics.jsonl"
    log.write_text(re.sub(r'("step": 9, .*"grad_norm": )', r"\g<1>1", log.read_text()))
    differing = compare(killed, calm, last)[1]
    assert "logged step 9" in differing and "ledger.position" in differing and differing[0].startswith("model.")
    assert apart(checkpoint_values(checkpoint(calm, last)), values) > 0
