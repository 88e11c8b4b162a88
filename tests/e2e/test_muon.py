"""A job of two groups with Muon and an average of the weights: a kill and a resume change no bit, and the average can be exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.bits import KEEP, REDUCE
from bench.drill_job import DrillJob
from bench.job import ROOT
from bench.resume import TINY, checkpoint, checkpoint_digests, checkpoint_values
from configs.load import load
from scripts import generate, hf, make_seed_checkpoint
from training.tokenizer import ByteTokenizer

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
INTERVAL = 20
OPTIONS = (
    "--optimizer.name=Muon", "--optimizer.ema_decay=0.9", KEEP, REDUCE, "--fault_tolerance.slots_per_step=2",
    "--training.mixed_precision_param=float32", "--training.steps=100000", f"--checkpoint.interval={INTERVAL}",
)  # fmt: skip


def test_a_kill_and_a_resume_change_no_bit_and_the_average_goes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("NPROC", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    argv = [str(ROOT / "configs" / "llama.toml"), f"--job.dump_folder={tmp_path}", *TINY.split(), *OPTIONS]
    with DrillJob([*argv, "--job.name=killed"], 2) as job:
        job.until("a checkpoint", lambda: job.has(INTERVAL))
        job.together()
        before = job.quorum.quorum_id
        job.kill("0")
        job.until("a quorum without it", lambda: job.quorum.quorum_id > before)
        job.together()  # it has healed
        last = (job.step // INTERVAL + 1) * INTERVAL
        job.until(f"checkpoint {last}", lambda: job.has(last))
        digests = [
            {line.step: line.digest for line in job.event_logs[name].ranks[0] if line.event == "commit"}
            for name in "01"
        ]
    both = sorted(digests[0].keys() & digests[1].keys())
    assert both[-1] > both[0] + 2 and [digests[0][step] for step in both] == [digests[1][step] for step in both]
    killed, resumed = tmp_path / "killed", tmp_path / "resumed"
    shutil.copytree(checkpoint(killed, INTERVAL), checkpoint(resumed, INTERVAL))
    with DrillJob([*argv, "--job.name=resumed"], 1) as job:
        job.until(f"checkpoint {last}", lambda: job.has(last))
    kinds = ("model.", "optimizer.state.", "ema.")
    found, expected = (checkpoint_digests(checkpoint(run, last), kinds) for run in (killed, resumed))
    assert found == expected
    assert {
        "optimizer.state.layers.0.attention.wq.weight.momentum_buffer",
        "ema.norm.weight",
        "ema.n_averaged",
    } <= found.keys()
    assert "optimizer.state.output.weight.exp_avg" in found

    values = checkpoint_values(checkpoint(killed, last))
    assert values["ema.n_averaged"] == last
    config, path = load([str(killed / "config.toml")]), checkpoint(killed, last)
    for state, options in (("ema", ["--ema"]), ("model", [])):
        out = tmp_path / f"exported-{state}"
        assert hf.main(["export", str(path), str(out), *options]) == 0
        exported = load_file(out / "model.safetensors")
        assert torch.equal(exported["lm_head.weight"], values[f"{state}.output.weight"])
        model = generate.load_model(config, path, ByteTokenizer(), length=8, dtype="float32", state=state)
        assert all(torch.equal(p, values[f"{state}.{name}"]) for name, p in model.named_parameters())
        assert generate.main([str(killed), f"--step={last}", "--tokens=3", *options]) == 0
    assert not torch.equal(values["ema.output.weight"], values["model.output.weight"])

    seed = [str(ROOT / "configs" / "llama.toml"), f"--job.dump_folder={tmp_path}", *TINY.split(), "--job.name=seed"]
    assert make_seed_checkpoint.main(seed) == 0
    capsys.readouterr()
    said = f"--ema: {checkpoint(tmp_path / 'seed', 0)} has no average of the weights, as it was saved with optimizer.ema_decay = 0.0\n"
    assert generate.main([str(tmp_path / "seed"), "--ema"]) == 2
    assert capsys.readouterr().err == f"generate: {said}"
    assert hf.main(["export", str(tmp_path / "seed"), str(tmp_path / "out"), "--ema"]) == 2
    assert capsys.readouterr().err == f"hf: {said}"
