"""The real RunConfig: its sections, its defaults, the result of `load`, and the model that a name selects."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

import models.llama
from configs import load as loading
from configs.check import check
from configs.errors import GONE, OTHER_NAMES, ConfigError, unknown_key
from configs.keys import convert, walk
from configs.load import load, section_types
from configs.schema import JobConfig, RunConfig

SECTIONS = {**section_types(RunConfig), "model": models.llama.Config}
KEYS = {path: key for name, section in SECTIONS.items() for path, key in walk(section, name)}


def written(folder: Path, text: str = "", name: str = "run.toml") -> str:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_the_sections() -> None:
    assert list(SECTIONS) == [
        "job", "model", "training", "optimizer", "lr_scheduler", "parallelism", "activation_checkpoint", "compile",
        "float8", "checkpoint", "resume", "validation", "metrics", "profiling",
        "fault_tolerance", "comm", "sample",
    ]  # fmt: skip


@pytest.mark.parametrize("path", KEYS)
def test_every_default_is_legal_and_every_key_explained(path: str) -> None:
    key = KEYS[path]
    assert key.help, "a key without a word of help"
    if "[]" in path or (key.element and key.default == ()):
        return
    value = list(key.default) if key.element else key.default
    assert convert(key, value) == key.default


def test_names_used_elsewhere_point_at_real_keys() -> None:
    assert set(OTHER_NAMES.values()) - KEYS.keys() == set()
    assert not (OTHER_NAMES.keys() | GONE.keys()) & KEYS.keys()


def test_a_key_that_two_sections_have_is_looked_for_in_its_own_first() -> None:
    assert unknown_key("sample.sed", list(KEYS)) == "no such key; did you mean sample.seed?"
    assert unknown_key("training.sed", list(KEYS)) == "no such key; did you mean training.seed?"
    assert unknown_key("debug.seed", list(KEYS)) == "no such key; did you mean training.seed?"


def test_load_fills_in_the_name_of_the_run(tmp_path: Path) -> None:
    config = load([written(tmp_path, "[training]\nsteps = 3\n", "small.run.toml"), "--job.dump_folder", "there"])
    assert config.job == JobConfig(name="small.run", dump_folder="there")
    assert config.run_folder == Path("there/small.run")
    assert config.training.steps == 3
    assert type(config.model) is models.llama.Config


@pytest.mark.parametrize(("folder", "found"), [("~/runs", "/users/me/runs/small"), ("~here", "~here/small")])
def test_a_folder_may_begin_at_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, found: str):
    """A shell expands no ~ after `=` in a word, and none of a TOML file."""
    monkeypatch.setenv("HOME", "/users/me")
    argv = [f"--job.dump_folder={folder}", "--checkpoint.folder=~/ck"]
    config = load([written(tmp_path, "", "small.toml"), *argv])
    assert config.run_folder == Path(found)
    assert config.run_folder / config.checkpoint.local_folder == Path("/users/me/ck")
    assert config.checkpoint.location(config.run_folder) == "/users/me/ck"


def test_a_config_is_frozen_hashable_and_picklable(tmp_path: Path) -> None:
    config = load([written(tmp_path, "[training]\nsteps = 3\n")])
    copied = pickle.loads(pickle.dumps(config))
    assert copied == config
    assert hash(copied) == hash(config)
    assert copied.origin == config.origin
    with pytest.raises(FrozenInstanceError):
        config.training.steps = 4  # type: ignore[misc]


def test_where_a_setting_was_written_is_no_setting(tmp_path: Path) -> None:
    one = load([written(tmp_path, "[training]\nsteps = 3\n")])
    other = load([written(tmp_path, "\n\n[training]\nseed = 0\n"), "--training.steps=3"])
    assert one == other
    assert one.origin != other.origin


@pytest.mark.parametrize("name", ["a/b", "..", ".", "a\\0"])
def test_job_name_is_one_folder(name: str) -> None:
    name = name.replace("\\0", "\0")
    with pytest.raises(ValueError, match=r"^job\.name = "):
        JobConfig(name=name).check()


FORK = """
from dataclasses import dataclass
from typing import Annotated
from models.contract import ModelConfig

@dataclass(frozen=True)
class Config(ModelConfig):
    width: Annotated[int, "of everything", ">= 1"] = 4

def build(config, *, vocab_size, max_seq_len): ...
"""


def test_a_fork_adds_a_model_by_a_file(tmp_path: Path) -> None:
    models.__path__.insert(0, str(tmp_path))
    written(tmp_path, FORK, "mine.py")
    written(tmp_path, "class Config: ...\ndef build(): ...\n", "unfinished.py")
    toml = written(tmp_path, '[model]\nname = "mine"\nwidth = 8\n')
    try:
        config = load([toml])
        assert (config.model.name, config.model.width) == ("mine", 8)  # type: ignore[attr-defined]
        for name, cause in {
            "mien": "there is no models/mien.py",
            "unfinished": "models/unfinished.py does not define a model: it needs `Config`, a subclass of ModelConfig, and `build`",
            "../mine": "there is no models/../mine.py",
        }.items():
            with pytest.raises(ConfigError) as error:
                load([toml, "--model.name", name])
            assert str(error.value) == f'--model.name = "{name}": {cause}; there are: mine'
        with pytest.raises(ConfigError) as error:
            load([toml, "--model.dim", "8"])
        assert str(error.value) == "--model.dim: no such key; [model] has name, tokenizer_path, vocab_size, width"
    finally:
        models.__path__.remove(str(tmp_path))
        for name in ("mine", "unfinished"):
            sys.modules.pop(f"models.{name}", None)


def test_a_model_name_of_the_wrong_type(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'run\.toml:2: model\.name = 5: must be a string; did you mean "5"\?'):
        load([written(tmp_path, "[model]\nname = 5\n")])


def test_a_file_that_cannot_be_read_is_told_before_torch_is_imported() -> None:
    """A typo in the file name is reported without the two seconds of importing torch."""
    code = """if 1:
        import sys, configs.load
        try: configs.load.load(["nope.toml"])
        except ValueError as error: print(error, "torch" in sys.modules)
    """
    root = Path(loading.__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert ran.stdout.startswith("nope.toml: no such file")
    assert ran.stdout.endswith("False\n")


@pytest.mark.parametrize("file", sorted(Path(loading.__file__).parent.glob("*.toml")), ids=lambda file: file.stem)
def test_the_configs_we_ship_load(file: Path) -> None:
    assert load([str(file)]).job.name == file.stem


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_main_job_passes_every_check(world_size: int) -> None:
    check(load([str(Path(loading.__file__).with_name("llama.toml"))]), world_size=world_size)
