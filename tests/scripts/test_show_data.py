"""scripts/show_data.py: positions before the first launch, and bad input. After a change of settings: e2e/test_interventions.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.nn import Linear

from configs.load import load
from configs.saved import save
from ft import SoloManager
from scripts import prepare_data, show_data
from tests.scripts.tiny_job import CONFIG, FILES
from tests.unit.data_corpus import write_jsonl
from training.checkpoint import Checkpointer
from training.checkpoint_config import CheckpointConfig
from training.data.dataset import open_data
from training.log import Log
from training.states import ModelState
from training.tokenizer import ByteTokenizer


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "c4.jsonl", [f"document {number}." for number in range(40)])
    assert prepare_data.main(["c4.jsonl", "--out", "c4", "--processes=1", "--held-out=0"]) == 0
    config = CONFIG.replace(FILES, 'dataset = "store"\ndataset_path = "c4"')
    (tmp_path / "run.toml").write_text(config)
    skip = 'skip = [{source = "c4", first = 3, end = 41}]\n\n[lr_scheduler]'
    (tmp_path / "skip.toml").write_text(config.replace("[lr_scheduler]", skip))


def test_documents_have_their_numbers_in_the_store(capsys: pytest.CaptureFixture[str]):
    assert show_data.main(["run.toml", "0-19"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("  ")] == [
        f"position {position}: sequence {position} of c4" for position in range(20)
    ]
    whole = [line for line in lines if line.endswith(".'") and ": 'document " in line]
    assert len(whole) > 10
    for line in whole:
        number, text = line.removeprefix("  document ").partition(",")[0], line.partition("'document ")[2]
        assert text == f"{number}.'"


def test_a_last_save_of_the_weights_alone_leaves_the_data_of_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = load(["run.toml"])
    save(config, config.run_folder)
    log = Log(stream=sys.stderr)
    data = open_data(config.training, config.validation, ByteTokenizer(), tmp_path, log=log)
    both = {"data": data, "model": ModelState([Linear(1, 1)]), "ledger": SoloManager(4)}
    for step, states in ((2, both), (4, {"model": both["model"]})):
        checkpoints = Checkpointer(
            CheckpointConfig(last_save_model_only="data" not in states), config.run_folder, states, log=log
        )
        checkpoints.save(step, last=True)
    assert show_data.main(["run.toml", "0-19"]) == 0
    before = capsys.readouterr().out
    assert show_data.main([str(config.run_folder), "0-19"]) == 0
    assert capsys.readouterr().out == before


def test_settings_that_changed_since_the_newest_checkpoint_hold_from_its_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config, log, ledger = load(["run.toml"]), Log(stream=sys.stderr), SoloManager(4)
    for _ in range(2):
        ledger.begin_step()
        ledger.commit(ledger.reduce([1.0], 1.0, True))
    states = {
        "data": open_data(config.training, config.validation, ByteTokenizer(), tmp_path, log=log),
        "ledger": ledger,
    }
    Checkpointer(CheckpointConfig(), config.run_folder, states, log=log).save(2)
    save(load(["run.toml", "--training.seed=7"]), config.run_folder)
    initial = (
        f'[checkpoint]\ninitial_load_path = "{config.run_folder}/checkpoint/step-2"\ninitial_load_model_only = false'
    )
    continued = (
        Path("run.toml").read_text().replace("[checkpoint]", initial).replace("[training]", "[training]\nseed = 7")
    )
    Path("continued.toml").write_text(continued)
    shown = []
    for run in ("run.toml", str(config.run_folder), "continued.toml"):
        assert show_data.main([run, "0-19"]) == 0
        shown.append(capsys.readouterr().out.partition("position 8: "))
    assert shown[0][0] == shown[1][0] and shown[0][2] != shown[1][2]
    assert shown[2] == shown[1], "another run that continues this one's data has the same, before its first checkpoint"


def test_token_files_with_more_numbers_than_the_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    np.full(4000, 300, dtype="<u2").tofile(tmp_path / "a.bin")
    config = CONFIG.replace(FILES, 'dataset = "tokens"\ndataset_path = "a.bin"')
    (tmp_path / "run.toml").write_text(config.replace("[model]", "[model]\nvocab_size = 512"))
    assert show_data.main(["run.toml", "0"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "code", "error"),
    [
        (["run.toml", "9-8"], 2, "positions = 9-8: legal: one, such as 40, or a range with its last, such as 40-47"),
        (["outputs/none", "1"], 2, "outputs/none: no such file"),
        (["skip.toml", "1"], 2, "training.skip[0].end = 41: the store c4 has 40 documents; nearest: 40"),
        (["full.toml", "1"], 1, "the data cache loop/data_cache cannot be written: Too many levels of symbolic links"),
    ],
)
def test_bad_input_and_failing_storage(argv: list[str], code: int, error: str, capsys: pytest.CaptureFixture[str]):
    Path("full.toml").write_text(f'[job]\ndump_folder = "loop"\n{CONFIG.replace("text/*.txt", "c4.jsonl")}')
    Path("loop").symlink_to("loop")  # fails for every user, as a disk may
    assert show_data.main(argv) == code
    assert capsys.readouterr().err == f"show_data: {error}\n"


@pytest.mark.parametrize("run", ["../outputs/files", ".", ".."])
def test_the_cache_is_that_of_the_run_from_whatever_folder(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    Path("files.toml").write_text(CONFIG.replace("text/*.txt", f"{tmp_path}/c4.jsonl"))
    config = load(["files.toml"])
    save(config, config.run_folder)
    there = tmp_path / {".": "outputs/files", "..": "outputs/files/tb"}.get(run, "elsewhere")
    there.mkdir(exist_ok=True)
    before = sorted(there.iterdir())
    monkeypatch.chdir(there)
    assert show_data.main([run, "0"]) == 0
    assert capsys.readouterr().out.startswith("position 0: ")
    assert sorted(there.iterdir()) == before
    assert [path.name for path in (tmp_path / "outputs").iterdir() if path.name != "files"] == ["data_cache"]


PATHS_PROGRAM = """\
import contextlib, io, runpy, sys
folder = sys.argv[1]
for name in ("generate", "hf", "make_seed_checkpoint", "prepare_data", "show_data"):
    sys.argv, sys.path[0] = [name], folder  # as Python begins a program that is named by its path
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
    assert folder not in sys.path, name
"""


def test_no_file_of_scripts_shadows_a_package():
    folder = str(Path(show_data.__file__).parent)
    subprocess.run([sys.executable, "-c", PATHS_PROGRAM, folder], check=True)
