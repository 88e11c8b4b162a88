"""bench/resume.py, the quick one: the claim is checked with every change, and the proof detects when it does not hold."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from bench.resume import checkpoint, checkpoint_digests, compare
from tests.scripts.tiny_job import ROOT, python

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    said = python(ROOT / "bench" / "resume.py", "--quick", "--keep", tmp_path)
    assert "killed in step" in said and "12 steps" in said

    calm, killed = tmp_path / "bfloat16", tmp_path / "bfloat16-1"
    assert compare(calm, killed, 12) == compare(calm, calm, 12)
    shutil.rmtree(checkpoint(calm, 12))
    shutil.copytree(checkpoint(calm, 6), checkpoint(calm, 12))
    log = calm / "metrics.jsonl"
    log.write_text(log.read_text().replace('"step": 9, "loss": ', '"step": 9, "loss": 1'))
    compared, differing = compare(calm, killed, 12)
    assert compared.endswith("12 steps") and differing[:2] == ["ledger.ledger", "ledger.step"]
    assert differing[2].startswith("m") and len(differing) > 3


def test_digests_are_of_value_dtype_and_shape(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import save

    def digests(name: str, value: object) -> dict[str, str]:
        save({"state": {"a": value, "b": [1, 2.5]}}, checkpoint_id=tmp_path / name, no_dist=True)
        return checkpoint_digests(tmp_path / name)

    values = [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.tensor([-0.0, 0, 0, 0]), 0.0]
    found = [digests(str(index), value) for index, value in enumerate(values)]
    assert len({entry["state.a"] for entry in found}) == len(values)
    assert len({entry["state.b"] for entry in found}) == 1
    assert digests("again", torch.zeros(4)) == found[0]
