"""--help and the page of settings: every key is there, in 100 columns; an error about an unknown section names the nearest one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

import models.llama
from configs.errors import ConfigError
from configs.help import COLUMNS, help_text
from configs.keys import walk
from configs.load import section_types
from configs.schema import RunConfig
from tests.unit.fakes import add_models
from tools.config_docs import DOCS, docs_markdown

ROOT = Path(__file__).resolve().parents[2]

SECTIONS = {**section_types(RunConfig), "model": models.llama.Config}


@dataclass(frozen=True)
class Piped:
    choice: Annotated[str, "either | or"] = "|"


def test_every_key_has_its_line() -> None:
    text = help_text()
    for name, section in SECTIONS.items():
        own = help_text(name)
        assert own.startswith(f"[{name}]")
        assert own.strip() in text
        words = " ".join(own.split())
        for path, key in walk(section, name):
            assert f"\n  {path.removeprefix(f'{name}.')} = " in own
            assert " ".join(key.help.split()) in words


def test_a_reader_that_ends_early_sees_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = "from configs.help import print_help; print_help()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=True)
    os.close(writer)
    assert done.stderr == b""


def test_a_configuration_has_the_keys_of_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama = "configs/llama.toml"
    assert help_text(llama) == help_text(llama, "--help") == help_text("--help", llama) == help_text()
    assert help_text(llama, "--help", "model") == help_text("--help", llama, "model") == help_text("model", "-h")
    fork = """
from dataclasses import dataclass
from typing import Annotated
from models import llama

@dataclass(frozen=True)
class Config(llama.Config):
    power: Annotated[int, "exponent of the activation", ">= 1"] = 2

build = llama.build
"""
    (tmp_path / "relu_n.py").write_text(fork)
    (tmp_path / "mine.toml").write_text('[model]\nname = "relu_n"\n')
    add_models(monkeypatch, tmp_path)
    mine, key = str(tmp_path / "mine.toml"), "\n  power = 2 "
    assert key in help_text(mine, "--help", "model") and key not in help_text("model")
    assert key in help_text(llama, "--model.name", "relu_n", "--help", "model")
    assert key in help_text(mine)
    with pytest.raises(ConfigError, match=r"there is no models/relu_m.py; there are: llama"):
        help_text(mine, "--model.name=relu_m", "--help", "model")
    with pytest.raises(ConfigError, match=r"lama.toml: no such file; did you mean configs/llama.toml"):
        help_text("configs/lama.toml", "--help", "model")


def test_lines_fit() -> None:
    too_long = [line for line in help_text().split("\n") if len(line) > COLUMNS]
    assert too_long == []


def test_a_key_says_default_meaning_and_limits() -> None:
    lines = help_text("training").split("\n")
    assert "  steps = 10000                       optimizer steps of the run (>=1)" in lines
    assert '  dtype = "float32"                   master weights and optimizer state (float32|bfloat16)' in lines
    assert "  dataloader.num_workers = 0          worker processes that prepare batches; 0: one thread (>=0)" in lines


@pytest.mark.parametrize("name", ["training", "[training]", "training.steps", "training.dataloader"])
def test_a_section_may_be_named_by_what_is_in_it(name: str) -> None:
    assert help_text(name) == help_text("training")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("trainig", "--help trainig: no such section; did you mean training?"),
        ("lr", "--help lr: no such section; optimizer.lr is in [optimizer]: --help optimizer"),
        ("qqqqqq", f"--help qqqqqq: no such section; there are {', '.join(SECTIONS)}"),
    ],
)
def test_an_unknown_section(section: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        help_text(section)
    assert str(error.value) == message


def test_the_page_has_a_row_for_every_key() -> None:
    page = docs_markdown().split("\n")
    for name, section in SECTIONS.items():
        assert f"## [{name}]" in page
        for path, key in walk(section, name):
            rows = [line for line in page if line.startswith(f"| `{path}` |")]
            assert len(rows) == 1
            assert key.help.replace("|", "\\|") in rows[0]


def test_the_page_is_fresh() -> None:
    assert DOCS.read_text(encoding="utf-8") == docs_markdown(), "docs/config.md is stale: run `make docs`"


def test_bars_do_not_break_the_table() -> None:
    page = docs_markdown(sections={"piped": Piped}).split("\n")
    assert page[-2] == '| `piped.choice` | `"\\|"` | a string | either \\| or |'
