"""training.on_spike = "rewind": what a job of one group and of two does with a step that is a spike, with a SIGKILL in the middle. It ends
with the bits of a copy of the run folder that was cut at the checkpoint and started with the data since left out.

The window is short, so that an ordinary run has several spikes. The processes are forks of one that has imported train.py. Two groups have
keep_global_batch and deterministic_reduce, so that the bits do not depend on the kill; a single group runs their copy."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from bench.job import LighthouseProcess, our_lighthouse, rows
from bench.resume import checkpoint, checkpoint_digests, checkpoint_values
from scripts.samples import SampleRow, prove, read
from tests.e2e.test_interventions import Launch
from tests.scripts.tiny_job import CONFIG, ROOT, VARIED, WAIT_S, write_job

pytestmark = [pytest.mark.timeout(3 * WAIT_S), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
REWIND = ("--training.on_spike=rewind", "--training.spike_window=8", "--training.spike_factor=3.3")
START = 10  # the first checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewind")
    config = CONFIG.replace("keep_latest_k = 2", "keep_latest_k = 0")
    write_job(folder, config.replace("enable_tensorboard = false", "enable_tensorboard = true"), VARIED)
    return folder


@pytest.fixture
def start(folder: Path, monkeypatch: pytest.MonkeyPatch, cleanup: ExitStack) -> Callable[..., Launch]:
    """Starts a launch, which ends with the test."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return lambda *argv, **group: cleanup.enter_context(closing(Launch(*argv, *REWIND, **group)))


@pytest.fixture
def lighthouse(cleanup: ExitStack) -> Iterator[str]:
    yield f"http://{cleanup.enter_context(closing(LighthouseProcess(our_lighthouse(1, join_timeout_ms=1000)))).address}"


def state(run: Path, step: int) -> dict[str, Any]:
    """Digests of weights, optimizer, spike window and tokens; the position in the data."""
    ledger = json.loads(checkpoint_values(checkpoint(run, step))["ledger.ledger"])
    digests = checkpoint_digests(checkpoint(run, step), ("model.", "optimizer.state", "spikes."))
    assert len(digests) > 20
    return digests | {key: ledger[key] for key in ("position", "holes")}


def rewinds(run: Path) -> list[SampleRow]:
    """The first steps of branches in the record, which must be exact, once for each step."""
    samples = read(run / "samples.jsonl")
    proof = prove(samples)
    assert proof.exact, proof.wrong
    found = [row for row in samples if row.rewind]
    told = [(row["step"], row["rewind"]) for row in rows(run) if "rewind" in row]
    assert told == [(row.step, dict(zip(("back_to", "from", "why"), row.rewind or (), strict=True))) for row in found]
    assert [row["step"] for row in rows(run)] == [row.step for row in samples] == list(range(1, len(samples) + 1))
    return found


def rewinds_in(run: Path, step: int) -> list[tuple[int, int]]:
    """Returns the rewinds in the ledger of a checkpoint: to which step each led, and from which."""
    ledger = json.loads(checkpoint_values(checkpoint(run, step))["ledger.ledger"])
    return [(back_to, spiked) for back_to, spiked, _, _ in ledger.get("rewinds", ())]


def events(run: Path, name: str, group: str = "") -> list[dict[str, Any]]:
    path = run / "groups" / group / "events.jsonl" if group else run / "events.jsonl"
    return [event for line in path.read_text().splitlines() if (event := json.loads(line))["event"] == name]


def test_one_group(start: Callable[..., Launch]):
    calm, killed, cut = (Path("outputs") / name for name in ("calm", "killed", "cut"))
    said = start("calm", "--training.steps=40").end()
    first = rewinds(calm)[0]
    assert first.rewind and (first.step, first.rewind.step) == (START + 1, START) and first.rewind.spiked > START
    [left_out] = first.skipped
    assert f"back to step {START} as branch 1: step {first.rewind.spiked} was a spike; positions " in said
    assert left_out.first == 2 * START and left_out.end == 2 * first.rewind.spiked, "all since the checkpoint"
    assert len(rewinds(calm)) >= 2 and rewinds_in(calm, 40)[0] == (START, first.rewind.spiked)

    # killed after the return, before the next checkpoint, and after that
    for step in (START + 2, 2 * START + 2):
        launch = start("killed", "--training.steps=100000")
        launch.until_text(f"] step {step}/", after=f"back to step {step - 2} as branch ")
        launch.kill()
    start("killed", "--training.steps=40").end()
    assert state(killed, 40) == state(calm, 40) and rewinds(killed) == rewinds(calm)
    assert rewinds_in(killed, 40) == rewinds_in(calm, 40)

    # the run cut at the checkpoint, with the data left out; the later spikes are spikes there, too
    shutil.copytree(calm, cut)
    for path in cut.glob("checkpoint/step-*"):
        if path.name != f"step-{START}":
            shutil.rmtree(path)
    config = (cut / "config.toml").read_text().replace('name = "calm"', 'name = "cut"')
    (cut / "config.toml").write_text(config)
    skip = f"--training.skip=[{{first = {left_out.first}, end = {left_out.end - 1}}}]"
    start("cut", skip, "--resume.allow=training.skip", "--training.steps=40").end()
    assert state(cut, 2 * START) == state(calm, 2 * START), "not a bit differs until the next spike"
    assert state(cut, 40) == state(calm, 40) and rewinds(cut) == rewinds(calm)[1:]


def test_two_groups_one_away(start: Callable[..., Launch], lighthouse: str):
    run, calm_run = Path("outputs/two"), Path("outputs/two-calm")
    argv = ("two", "--training.steps=100000", "--training.spike_max_skips=1000")
    staying, away = (start(*argv, group=group, lighthouse=lighthouse) for group in ("0", "1"))
    away.until_text("back to step ")  # both have gone back together
    away.kill()
    together = staying.text.count("back to step ")
    staying.until_text("back to step ", count=together + 1)
    again = start(*argv, group="1", lighthouse=lighthouse)
    [healed] = re.findall(r"step (\d+) is healed", again.until_text(" is healed"))
    again.until_step(int(healed) + 15)
    for group in (staying, again):
        group.process.terminate()
    for group in (staying, again):
        group.end()
    theirs, mine = ([event["words"] for event in events(run, "rewind", group)] for group in ("0", "1"))
    assert set(mine) < set(theirs), "one that is away does not go back by itself"
    assert len(rewinds(run)) >= 2

    # the newest checkpoint that a run of so many steps ends with: no earlier branch had come so far
    saved = [int(path.name.removeprefix("step-")) for path in run.glob("checkpoint/step-*")]
    last = max(step for step in saved if all(spiked < step for _, spiked in rewinds_in(run, step)))
    assert len(rewinds_in(run, last)) > together
    start("two-calm", f"--training.steps={last}", *argv[2:], group="calm", lighthouse=lighthouse).end()
    assert state(run, last) == state(calm_run, last) and rewinds_in(run, last) == rewinds_in(calm_run, last)


def test_before_the_first_checkpoint_it_begins_anew_behind_the_data(start: Callable[..., Launch]):
    anew, cut = Path("outputs/anew"), Path("outputs/behind")
    argv = ("--training.steps=20", "--checkpoint.interval=1000")
    said = start("anew", *argv).end()
    [(back_to, spiked), *_] = rewinds_in(anew, 20)
    assert back_to == 0 and f"back to step 0 as branch 1: step {spiked} was a spike; positions 0 to " in said
    first = rewinds(anew)[0]
    start("behind", *argv, f"--training.skip=[{{first = 0, end = {2 * spiked - 1}}}]").end()
    assert first.step == 1 and state(anew, 20) == state(cut, 20)
