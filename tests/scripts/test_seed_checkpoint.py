"""scripts/make_seed_checkpoint.py: the seed that train.py would write, in the memory of one tensor."""

from __future__ import annotations

import pickle
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.resume import checkpoint_digests
from configs.load import load
from models.contract import Model
from models.init import draw
from scripts import make_seed_checkpoint as script
from tests.scripts.tiny_job import ROOT, peak_bytes, python, struck
from tests.unit.fakes import add_models
from training.checkpoint_files import list_steps, read_manifest, verify
from training.log import Log

# several starts in one test, each with an import of torch
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("in_the_folder")]


def seed(*overrides: str, draw: script.Draw = draw) -> int:
    """Runs the script in this process. Returns the exit code."""
    return script.main(["tiny.toml", *overrides], draw=draw)


def step_0(job: str) -> Path:
    return Path("outputs", job, "checkpoint", "step-0")


def metadata(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def test_it_is_the_seed_of_train_py_byte_for_byte_and_train_py_goes_on_from_it():
    # of a mixture of experts, whose routers stay fp32
    settings = ("--model.name=moe", "--training.dtype=bfloat16", "--training.steps=2", "--validation.enable=false")
    train = (str(ROOT / "train.py"), "tiny.toml", *settings)
    python(*train, "--job.name=theirs", "--checkpoint.create_seed_checkpoint=true")
    assert seed(*settings, "--job.name=ours") == 0
    theirs, ours = step_0("theirs"), step_0("ours")
    assert sorted(file.name for file in ours.iterdir()) == sorted(file.name for file in theirs.iterdir())
    assert (ours / "__0_0.distcp").read_bytes() == (theirs / "__0_0.distcp").read_bytes()
    for part in ("state_dict_metadata", "storage_data", "planner_data", "version"):
        assert getattr(metadata(ours), part) == getattr(metadata(theirs), part), part
    manifests = [read_manifest(path) for path in (ours, theirs)]
    for part in ("step", "kind", "states", "world_size", "torch"):
        assert getattr(manifests[0], part) == getattr(manifests[1], part), part
    verify(ours, manifests[0])
    said = python(*train, "--job.name=ours")
    assert "model loaded from outputs/ours/checkpoint/step-0" in said and "finished" in said


def test_large_tensors_are_cut_into_rows_of_the_same_bits():
    config = load(["tiny.toml", "--checkpoint.create_seed_checkpoint=true", "--job.name=cut", "--model.vocab_size=300"])
    assert seed("--job.name=whole", "--model.vocab_size=300") == 0
    script.make_seed(config, Log(), chunk_bytes=1000)  # a row has 64 bytes
    verify(step_0("cut"), read_manifest(step_0("cut")))
    chunks = metadata(step_0("cut")).state_dict_metadata["model.output.weight"].chunks
    assert [(*chunk.offsets, *chunk.sizes) for chunk in chunks] == [(row, 0, 15, 16) for row in range(0, 300, 15)]
    assert checkpoint_digests(step_0("cut")) == checkpoint_digests(step_0("whole"))
    frame = 3000  # at most, of torch.save around each chunk; the largest tensor has 19,200 bytes
    assert all(entry.length <= 1000 + frame for entry in metadata(step_0("cut")).storage_data.values())


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc")
def test_memory_is_that_of_a_tensor_not_of_the_model():
    """Each layer has 14.5 MiB, the largest tensor 4 MiB."""
    model = ("--model.dim=512", "--model.hidden_dim=2048", "--model.n_heads=8", "--model.n_kv_heads=2")
    peaks = [
        peak_bytes("scripts.make_seed_checkpoint", "tiny.toml", f"--job.name={n}", f"--model.n_layers={n}", *model)
        for n in (1, 16)
    ]
    size_bytes = read_manifest(step_0("16")).size_bytes
    shutil.rmtree("outputs")
    assert size_bytes > 220 << 20
    assert peaks[1] - peaks[0] < 24 << 20  # of the 220 MiB; one tensor has 4


def test_every_tensor_is_drawn_once_and_no_two_at_a_time():
    live: list[Callable[[], bool]] = []
    drawn = []

    def watched(model: Model, tensor: torch.Tensor, at: int) -> torch.Tensor:
        assert not any(alive() for alive in live)
        values = draw(model, tensor, at)
        storage = torch.multiprocessing.reductions.StorageWeakRef(values.untyped_storage())
        live.append(lambda: not storage.expired())
        drawn.append(tuple(values.shape))
        return values

    assert seed(draw=watched) == 0
    assert len(drawn) == len(metadata(step_0("tiny")).state_dict_metadata) == 13


def test_it_refuses_to_write_over_anything_and_says_what_is_in_the_way(capsys: pytest.CaptureFixture[str]):
    assert seed() == 0
    before = (step_0("tiny") / "__0_0.distcp").read_bytes()
    assert seed() == 2
    there = f"tiny.toml: job.name: {step_0('tiny')} exists"
    line = f"make_seed_checkpoint: {there}; remove it, or set a different job.name"
    assert capsys.readouterr().err.splitlines() == [line]
    assert (step_0("tiny") / "__0_0.distcp").read_bytes() == before
    step_0("tiny").rename(step_0("tiny").with_name("step-4"))
    assert seed() == 2
    assert "has step 4 of an earlier run" in capsys.readouterr().err


def test_bad_settings_are_told_but_neither_data_nor_machines_are_needed(capsys: pytest.CaptureFixture[str]):
    assert seed("--model.n_heads=3") == 2
    assert "model.n_heads = 3" in capsys.readouterr().err
    assert seed("--checkpoint.enable=false") == 2
    assert "checkpoint.create_seed_checkpoint = true: needs checkpoint.enable = true" in capsys.readouterr().err
    assert seed("--model.tokenizer_path=nowhere") == 2
    assert 'model.tokenizer_path = "nowhere": there is no file' in capsys.readouterr().err
    assert not Path("outputs").exists()
    shutil.rmtree("text")
    others = ("--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=4", "--float8.enable")
    assert seed(*others) == 0
    assert list_steps(step_0("tiny").parent) == [0]


def test_a_disk_without_room_is_told_before_anything_is_written(capsys: pytest.CaptureFixture[str]):
    assert seed(f"--model.dim={1 << 20}", f"--model.hidden_dim={1 << 30}") == 1  # petabytes
    message = capsys.readouterr().err
    assert message.startswith("make_seed_checkpoint: outputs/tiny/checkpoint: ") and "B are free" in message
    assert not Path("outputs/tiny/checkpoint").exists()


def test_an_error_of_the_disk_is_told_with_its_file(capsys: pytest.CaptureFixture[str]):
    Path("outputs/tiny").mkdir(parents=True)
    Path("outputs/tiny/lock").mkdir()
    assert seed() == 1
    assert capsys.readouterr().err == "make_seed_checkpoint: outputs/tiny/lock: Is a directory\n"


KILL = """
import signal
from models.init import draw
from tests.scripts.test_seed_checkpoint import seed
from tests.scripts.tiny_job import struck
seed(draw=struck(draw, 5, signal.SIGKILL))
"""


def test_a_kill_leaves_nothing_that_is_taken_for_a_checkpoint():
    python("-c", KILL, code=-signal.SIGKILL)
    there = Path("outputs/tiny/checkpoint")
    assert [path.name for path in there.iterdir()] == ["step-0.partial"] and list_steps(there) == []
    assert seed() == 0
    assert [path.name for path in there.iterdir()] == ["step-0"]
    verify(step_0("tiny"), read_manifest(step_0("tiny")))


def test_a_signal_to_stop_frees_what_was_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assert seed(draw=struck(draw, 5, signal.SIGTERM)) == 1
    assert "step 0 not saved" in capsys.readouterr().err
    assert list(Path("outputs/tiny/checkpoint").iterdir()) == []
    (tmp_path / "stopped.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    add_models(monkeypatch, tmp_path)  # before anything is written
    assert seed("--model.name=stopped") == 1
    assert capsys.readouterr().err == "make_seed_checkpoint: interrupted\n"
