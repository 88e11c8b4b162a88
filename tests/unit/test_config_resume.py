"""Checks before the start that need a checkpoint: the positions at which budgets began, and the training data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
import torch

from configs.check import check, check_resume
from configs.errors import ConfigError
from configs.load import load
from configs.saved import CONFIG_FILE, save
from configs.schema import RunConfig
from ft.seam import to_checkpoint
from scripts import launch, prepare_data
from tests.unit.data_corpus import write_jsonl
from tests.unit.fakes import Lines
from tests.unit.test_object_store import checkpoint
from training import checkpoint_dcp as dcp
from training import checkpoint_files
from training.data.dataset import open_data
from training.object_store import ObjectStore
from training.tokenizer import ByteTokenizer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TOML = """\
[training]
dataset = "store"
seq_len = 16
local_batch_size = 2
sources = [{path = "a", epochs = 1.0}]

[lr_scheduler]
warmup_steps = 2
"""
STEP, POSITION = 10, 40
SEED = "--training.seed=7"


def configured(*argv: str) -> RunConfig:
    return load(["run.toml", *argv])


def save_run(name: str, holes: Sequence[int] = ()) -> tuple[Path, int]:
    """Writes a run's settings and its checkpoint of two ranks. Returns that, and the sequences until the budget ends."""
    config = configured(f"--job.name={name}")
    data = open_data(config.training, config.validation, ByteTokenizer(), "", log=Lines())
    order = data.order(seed=0, seq_len=16)
    ledger = {"slot_size": 4, "position": POSITION, "holes": [*holes], "unable": [], "skipped": [], "pending": []}
    step = {"step": STEP, "commit_id": "", "commit_quorum_id": 0, "ledger": ledger}
    states = {"ledger": to_checkpoint(step), "data": data.state_dict()}
    folder = config.run_folder / "checkpoint"
    records = tuple(dcp.write(states, checkpoint_files.begin(folder, STEP), group=None))
    checkpoint_files.publish(
        folder, checkpoint_files.Manifest(STEP, "full", tuple(states), 1, torch.__version__, records)
    )
    save(config, config.run_folder)
    return checkpoint_files.step_folder(folder, STEP), order.end


def refused(*argv: str, changed: Collection[str] = ()) -> str:
    """Returns the message that refuses two ranks, or ""."""
    try:
        check(config := configured(*argv), world_size=2, device_type="cpu")
        check_resume(config, changed, world_size=2)
    except ConfigError as error:
        return str(error)
    return ""


def test_budgets_end_where_the_checkpoint_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(TOML)
    write_jsonl(tmp_path / "a.jsonl", [f"{number} " * 9 for number in range(200)])
    assert prepare_data.main(["a.jsonl", "--out", "a", "--processes=1", "--held-out=0"]) == 0
    path, end = save_run("old")
    last = end // 4

    own = ["--job.name=old", f"--training.steps={last}"]
    assert refused(*own) == ""
    assert refused(*own[:1], f"--training.steps={last + 1}") == (
        f"--training.steps: {(last + 1 - STEP) * 4} sequences are needed from 40 on, but the budgets of training.sources end after "
        f"{end - 40}; set fewer steps, or larger budgets"
    )
    save_run("holes", [8, 16])
    assert refused("--job.name=holes", f"--training.steps={last + 2}") == "", "the next two steps take the holes"
    assert "needed from 40 on" in refused("--job.name=holes", f"--training.steps={last + 3}")
    # they stop at the end of the budgets
    skipping = (
        "--training.skip=[{first = 4, end = 8}]",
        f"--training.steps={last + 1}",
    )
    assert refused(*own[:1], *skipping) == ""
    # with another seed the budget begins at the change of settings
    later = f"--training.steps={last + STEP}"
    assert refused(own[0], later, SEED, changed=["training.seed"]) == ""
    assert "budgets" in refused(own[0], f"--training.steps={last + STEP + 1}", SEED, changed=["training.seed"])

    new = ("--job.name=new", f"--checkpoint.initial_load_path={path}", "--checkpoint.initial_load_model_only=false")
    assert refused(*new, f"--training.steps={last}") == refused(*new, later, SEED) == ""
    assert "sequences are needed from 40 on" in refused(*new, f"--training.steps={last + 1}")
    without = (*new, later, "--checkpoint.exclude_from_loading=['data']")
    assert "sequences are needed from 40 on" in refused(*without), "the order begins at 0, the position does not"

    # on another machine the settings in the object store say that the run is not new
    run, elsewhere = (*own[:1], later), ("--job.dump_folder=elsewhere", "--checkpoint.folder=memory://budgets")
    with pytest.raises(ConfigError, match="budgets"):
        launch.check(configured(*run, *elsewhere), world_size=2, environ={})
    ObjectStore("memory://budgets/old").put_files(Path("outputs/old"), [CONFIG_FILE])
    launch.check(configured(*run, *elsewhere), world_size=2, environ={})
    here = configured(*own[:1], f"--training.steps={last + 1}", elsewhere[1])
    with pytest.raises(ConfigError, match="sequences are needed from 40 on"):
        launch.check(here, world_size=2, environ={})
    ObjectStore("memory://budgets/old").put(checkpoint(tmp_path / "there", STEP + 1))
    launch.check(here, world_size=2, environ={})  # it is not step 10 that this launch continues

    (path / ".metadata").write_bytes(b"damaged")
    assert refused(*own[:1], f"--training.steps={last + 1}") == "", "the ranks tell"
