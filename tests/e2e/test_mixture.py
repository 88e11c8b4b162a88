"""A mixture of stores in a job of groups: a kill and another number of groups change neither the weights nor exactly-once."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from bench.job import rows
from configs.load import load
from configs.schema import RunConfig
from scripts import prepare_data
from scripts.samples import prove, read
from tests.scripts.tiny_job import CONFIG, ENV, FILES, ROOT, WAIT_S, Started
from tests.unit.data_corpus import write_jsonl
from tests.unit.fakes import Lines
from training.data.dataset import open_data
from training.data.order import PATTERN, Mixture, rounded
from training.signals import STEPS_TO_STOP
from training.tokenizer import ByteTokenizer

WEIGHTS = {"prose": 5.0, "code": 2.0, "poems": 1.3}
SOURCES = "".join(
    f'[[training.sources]]\npath = "stores/{name}"\nweight = {weight}\n' for name, weight in WEIGHTS.items()
)
MIXED = CONFIG.replace(FILES, 'dataset = "store"') + SOURCES


def make_stores(folder: Path) -> None:
    for name in WEIGHTS:
        write_jsonl(folder / f"{name}.jsonl", [f"{name} {number} " * 9 for number in range(200)])
        assert prepare_data.main([f"{name}.jsonl", "--out", f"stores/{name}", "--processes=1"]) == 0


def mixture() -> tuple[RunConfig, Mixture]:
    config = load(["tiny.toml"])
    data = open_data(config.training, config.validation, ByteTokenizer(), "unused", log=Lines())
    order = data.order(seed=config.training.seed, seq_len=config.training.seq_len)
    assert isinstance(order, Mixture)
    return config, order


@pytest.mark.timeout(2 * WAIT_S)
def test_a_job_of_groups_ends_before_its_budgets(tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch):
    """The budgets last for all steps of one group, but not of two; a start after the end is refused."""
    monkeypatch.chdir(tmp_path)
    make_stores(tmp_path)
    budgets = "".join(f'[[training.sources]]\npath = "stores/{name}"\ntokens = {64 * 32}\n' for name in WEIGHTS)
    (tmp_path / "tiny.toml").write_text(MIXED.replace(SOURCES, budgets))
    config, order = mixture()
    assert order.end is not None
    batch = config.training.local_batch_size
    command = [f"{ROOT}/scripts/run_replicas.sh", "tiny.toml", "--groups=2", f"--training.steps={order.end // batch}"]
    job = cleanup.enter_context(closing(Started(command, tmp_path / "job.txt", cwd=tmp_path, **ENV)))
    assert job.end() == 0
    assert f"the budgets of training.sources end at sequence {order.end}: the run stops" in job.text
    samples = read(tmp_path / "outputs" / "tiny" / "samples.jsonl")
    frontier = max(span.end for row in samples for span in row.positions)
    assert prove(samples).exact and order.end - 2 * batch * STEPS_TO_STOP < frontier <= order.end
    again = cleanup.enter_context(
        closing(Started([*command, "--groups=1"], tmp_path / "again.txt", cwd=tmp_path, **ENV))
    )
    assert again.end() == 2 and "set fewer steps, or larger budgets" in again.text


@pytest.mark.timeout(3 * WAIT_S)
def test_each_source_has_its_weight(tmp_path: Path, cleanup: ExitStack, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make_stores(tmp_path)
    (tmp_path / "tiny.toml").write_text(MIXED + "\n[validation]\nenable = true\nfreq = 5\nsteps = 1\n")

    def job(groups: int) -> Started:
        command = [f"{ROOT}/scripts/run_replicas.sh", "tiny.toml", f"--groups={groups}", "--training.steps=100000"]
        return cleanup.enter_context(closing(Started(command, tmp_path / f"{groups}.txt", cwd=tmp_path, **ENV)))

    run = tmp_path / "outputs" / "tiny"
    first = job(2)
    [pid] = re.findall(r"1 \(pid (\d+)\)", first.until_all_train(2))
    os.kill(int(pid), signal.SIGKILL)
    first.until("its second life", lambda text: "group 1 restarts" in text)
    first.until_all_train(2, after="group 1 restarts")
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 0
    second = job(3)
    second.until_all_train(3)
    second.until("a checkpoint with three groups", lambda text: "checkpoint: step" in text)
    second.process.send_signal(signal.SIGTERM)
    assert second.end() == 0

    samples = read(run / "samples.jsonl")
    assert prove(samples).exact
    assert max(len({slot.partition(":")[0] for slot in row.slots.values()}) for row in samples) == 3
    _, order = mixture()
    frontier = max(span.end for row in samples for span in row.positions)
    parts = rounded(list(WEIGHTS.values()))
    for end in (frontier, frontier // 2, 7):
        counts = Counter(order.find(position)[0] for position in range(end))
        assert all(abs(counts[source] - end * part / PATTERN) < 1 for source, part in enumerate(parts))
    validations = [row for row in rows(run) if "validation_loss" in row]
    assert validations and all({f"validation_loss/{name}" for name in WEIGHTS} <= set(row) for row in validations)
