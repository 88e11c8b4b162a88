"""docs/add_a_model.md, followed step by step in a copy of the repository: the files are taken from the page as they stand."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.scripts.tiny_job import ENV, copy_repository

pytestmark = pytest.mark.timeout(300)  # several starts in one test, each with an import of torch
ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_guide_leads_to_a_trained_model(tmp_path: Path):
    copy_repository(tmp_path)
    page = (ROOT / "docs" / "add_a_model.md").read_text()
    files = FENCE.findall(page)
    assert [name for name, _ in files] == ["models/relu2.py", "configs/relu2.toml"]
    for name, text in files:
        (tmp_path / name).write_text(text)
    command = "./scripts/run_train.sh configs/relu2.toml"
    assert command in page
    env = {**os.environ, **ENV}
    done = subprocess.run(command.split(), cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "outputs" / "relu2" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 20 and losses[-1] < losses[0]
