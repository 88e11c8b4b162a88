"""docs/add_a_model.md, followed step by step in a copy of the repository without Qwen3: the files are taken unchanged from the page."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from bench.job import rows
from tests.scripts.tiny_job import ROOT, copy_repository, finished

pytestmark = pytest.mark.timeout(900)  # many starts in one test, each with an import of torch
FENCE = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGE = (ROOT / "docs" / "add_a_model.md").read_text()
FILES = dict(FENCE.findall(PAGE))


def test_the_page_shows_the_files_of_the_tree():
    assert sorted(FILES) == ["configs/tiny_qwen3.toml", "models/qwen3.py", "models/qwen3_hf.py"]
    for name in ("models/qwen3.py", "models/qwen3_hf.py"):
        assert FILES[name] == (ROOT / name).read_text(), f"{name} has changed: copy it into docs/add_a_model.md"


def test_the_guide_leads_to_a_model_that_holds_in_every_layout(tmp_path: Path):
    copy_repository(tmp_path)
    for package in ("bench", "tests"):
        shutil.copytree(ROOT / package, tmp_path / package)
    for name in ("qwen3.py", "qwen3_hf.py"):
        (tmp_path / "models" / name).unlink()
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    commands = re.findall(r"^(?:\./scripts/run_train\.sh|\.venv/bin/python) .*$", PAGE, re.MULTILINE)
    assert len(commands) == 5
    said = ""
    for command in commands:
        only = ["--only", "^(one rank|tp 2|fsdp 2), SGD"] if "parity" in command else []  # the others take minutes
        words = [sys.executable if word == ".venv/bin/python" else word for word in command.split()]
        said = finished([*words, *only], cwd=tmp_path).stdout
    assert "3 of 3 cases hold" in said
    losses = [row["loss"] for row in rows(tmp_path / "outputs/tiny_qwen3") if "loss" in row]
    assert len(losses) == 20 and losses[-1] < losses[0]


def test_a_model_without_a_cache_trains_and_saves_and_says_so(tmp_path: Path):
    copy_repository(tmp_path)
    (tmp_path / "models" / "uncached.py").write_text(
        "from models import contract, llama\n\n"
        "class Config(llama.Config): ...\n\n"
        "class Uncached(llama.Llama):\n    new_cache = contract.Model.new_cache\n\n"
        "def build(config, **sizes):\n    return Uncached(config, **sizes)\n"
    )
    (tmp_path / "uncached.toml").write_text(
        FILES["configs/tiny_qwen3.toml"].replace('"qwen3"\n', '"uncached"\n').replace("head_dim = 24\n", "")
    )
    done = finished(["./scripts/run_train.sh", "uncached.toml", "--training.steps=3"], cwd=tmp_path)
    assert "no text sample: the model has no new_cache" in done.stdout and "Traceback" not in done.stdout + done.stderr
    assert (tmp_path / "outputs/uncached/checkpoint/step-3/manifest.json").exists()
    done = finished([sys.executable, "scripts/generate.py", "outputs/uncached"], cwd=tmp_path, code=2)
    assert done.stderr.startswith("generate: the model has no new_cache")
