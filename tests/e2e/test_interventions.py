"""Interventions on a run, with a SIGKILL in the middle: each key of resume.allow by itself, on one group and on two, ends with the bits of
a copy of the run that has the new settings in its config.toml. And a run that continues another run's checkpoint.

All continue one short run. Its processes are forks of one that has imported train.py, as a start would cost more than all steps. Two groups
have keep_global_batch and deterministic_reduce, so that the bits do not depend on the kill; a single group runs their copy."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

import train
from bench.job import Forked, LighthouseProcess, our_lighthouse, rows, until
from bench.resume import checkpoint, checkpoint_digests, checkpoint_values
from scripts import prepare_data, show_data
from scripts.samples import Range, RunBegin, prove, read, sentences
from tests.scripts.tiny_job import CONFIG, FILES, ROOT, WAIT_S, newest
from tests.unit.data_corpus import write_jsonl

pytestmark = [pytest.mark.timeout(WAIT_S), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
MIXTURE = CONFIG.replace(FILES, 'dataset = "store"')
WEIGHTS = "[{path = 'stores/a', weight = %s}, {path = 'stores/b', weight = %s}]"
CHANGED_AT = 11  # the first step after the short run
FRONTIER = 20  # its position
CASES = {
    # the update rule
    "lr": ("optimizer.lr", "0.0002"),
    "schedule": ("lr_scheduler.warmup_steps", "50"),
    "decay": ("optimizer.weight_decay", "0.9"),
    "clipping": ("training.max_norm", "0.5"),
    "documents": ("training.document_mask", "true"),
    # a new epoch
    "seq_len": ("training.seq_len", "48"),
    "sources": ("training.sources", WEIGHTS % (1.0, 3.0)),
    "seed": ("training.seed", "7"),
    "documents-left-out": ("training.skip", "[{first = 12, end = 22, source = 'a'}]"),
    # the ledger
    "batch": ("training.global_batch_size", "4"),
    "skip": ("training.skip", "[{first = 24, end = 27}]"),
}
LONG = ("schedule", "decay", "clipping", "sources", "seed", "batch")  # both tiers have one of each kind of change
PARAMETERS = [pytest.param(case, marks=pytest.mark.long) if case in LONG else case for case in CASES]
TWO_SLOTS = (
    "--fault_tolerance.enable=true",
    "--fault_tolerance.keep_global_batch=true",
    "--fault_tolerance.deterministic_reduce=true",
    "--fault_tolerance.slots_per_step=2",
)


def launch(argv: list[str], out: Path, env: dict[str, str], pipe: Any) -> None:
    """train.py in a fork."""
    file = out.open("a", buffering=1)
    os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    sys.stdout = sys.stderr = file
    os.environ.update(env)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())  # blocked by Forked
    torch.set_num_threads(1)
    sys.exit(train.main(argv))


class Launch(Forked):
    """A launch of the run `name`; group `group` of a job with a lighthouse."""

    def __init__(self, name: str, *argv: str, group: str = "", lighthouse: str = "") -> None:
        self.out = Path.cwd() / f"{name}.{group or 'solo'}.txt"
        self.out.touch()
        self._before = len(self.out.read_text())
        env = {"REPLICA_GROUP_ID": group, "TORCHFT_LIGHTHOUSE": lighthouse} if group else {}
        argv = ("tiny.toml", f"--job.name={name}", *(TWO_SLOTS if group else ()), *argv)
        super().__init__([__name__], launch, list(argv), self.out, env)

    @property
    def text(self) -> str:
        return self.out.read_text()[self._before :]

    def until_step(self, step: int) -> None:
        def made() -> bool:
            assert self.process.is_alive(), self.text
            return any(int(number) >= step for number in re.findall(r"\] step (\d+)/", self.text))

        until(f"step {step}:\n{self.text[-2000:]}", made, WAIT_S)

    def until_text(self, words: str, *, after: str = "", count: int = 1) -> str:
        """Waits until `words` were said `count` times since `after`."""

        def said() -> bool:
            assert self.process.is_alive(), self.text
            return after in self.text and self.text[self.text.index(after) :].count(words) >= count

        until(f"{words!r}:\n{self.text[-2000:]}", said, WAIT_S)
        return self.text

    def end(self, code: int = 0) -> str:
        self.process.join(WAIT_S)
        assert self.process.exitcode == code, self.text
        return self.text

    def close(self) -> None:
        self.kill()


@pytest.fixture(scope="module")
def short_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run of ten steps."""
    folder = tmp_path_factory.mktemp("interventions")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("OMP_NUM_THREADS", "1")
        for name in ("a", "b"):
            write_jsonl(folder / f"{name}.jsonl", [f"{name} {number} " * 9 for number in range(200)])
            assert prepare_data.main([f"{name}.jsonl", "--out", f"stores/{name}", "--processes=1"]) == 0
        (folder / "tiny.toml").write_text(MIXTURE.replace("[lr", f"sources = {WEIGHTS % (3.0, 1.0)}\n\n[lr"))
        Launch("short", f"--training.steps={CHANGED_AT - 1}").end()
        yield folder


@pytest.fixture
def start(short_run: Path, monkeypatch: pytest.MonkeyPatch, cleanup: ExitStack) -> Callable[..., Launch]:
    """Starts a launch, which ends with the test."""
    monkeypatch.chdir(short_run)
    return lambda *argv, **group: cleanup.enter_context(closing(Launch(*argv, **group)))


@pytest.fixture
def start_group(start: Callable[..., Launch], cleanup: ExitStack) -> Callable[..., Launch]:
    """Starts a group: its name, then as `start`. The job has a lighthouse of its own."""
    lighthouse = cleanup.enter_context(closing(LighthouseProcess(our_lighthouse(1, join_timeout_ms=1000))))
    return lambda group, *argv: start(*argv, group=group, lighthouse=f"http://{lighthouse.address}")


def copy(name: str, settings_of: Path | None = None) -> Path:
    """A copy of the short run, with the settings of another one."""
    run = Path(shutil.copytree("outputs/short", f"outputs/{name}"))
    source = settings_of or run
    text = (source / "config.toml").read_text().replace(f'name = "{source.name}"', f'name = "{name}"')
    (run / "config.toml").write_text(text.replace('name = "short"', f'name = "{name}"'))
    return run


def state(run: Path, step: int) -> dict[str, Any]:
    """Digests of weights and optimizer; what was trained on."""
    ledger = json.loads(checkpoint_values(checkpoint(run, step))["ledger.ledger"])
    digests = checkpoint_digests(checkpoint(run, step), ("model.", "optimizer.state"))
    assert len(digests) > 20
    return digests | {key: ledger[key] for key in ("position", "holes", "skipped")}


def assert_changed(run: Path, case: str) -> None:
    """The change is in the record once, which is exact, and the settings are saved."""
    key, value = CASES[case]
    assert [row["step"] for row in rows(run) if key in row.get("changed", {})] == [CHANGED_AT]
    samples = read(run / "samples.jsonl")
    proof = prove(samples)
    assert [row.step for row in samples if key in row.changed] == [CHANGED_AT] and proof.exact, proof.wrong
    assert proof.skipped == ([Range(24, 28)] if case == "skip" else [])
    assert any(f"settings changed from step {CHANGED_AT} on: {key} " in line for line in sentences(samples, proof))
    if case == "lr":
        assert all((row["lr"] <= float(value)) == (row["step"] >= CHANGED_AT) for row in rows(run) if row["step"] > 5)
    table, _, name = key.rpartition(".")
    assert (run / "config.toml").read_text().partition(f"[{table}]")[2].count(f"\n{name} = {value[:2]}") == 1


def documents_of(shown: str, source: str) -> set[int]:
    """The documents of a source in the output of show_data.py."""
    blocks = [
        block for block in re.split(r"position \d+: ", shown) if block.partition("\n")[0].endswith(f" of {source}")
    ]
    return {int(number) for block in blocks for number in re.findall(r"^  document (\d+), ", block, re.MULTILINE)}


ONE_GROUP = [case if case in ("lr", "seq_len") else pytest.param(case, marks=pytest.mark.long) for case in CASES]


@pytest.mark.parametrize("case", ONE_GROUP)  # two groups have the others
def test_one_group(start: Callable[..., Launch], case: str, capsys: pytest.CaptureFixture[str]):
    key, value = CASES[case]
    run, change, allow = copy(f"{case}-1"), f"--{key}={value}", f"--resume.allow={key}"
    if case == "lr":
        saved = (run / "config.toml").read_bytes()
        refused = start(run.name, "--training.steps=30", change)
        assert f"from the next step on: {allow}" in refused.end(code=2)
        assert (run / "config.toml").read_bytes() == saved
    killed = start(run.name, "--training.steps=100000", change, allow)
    killed.until_step(CHANGED_AT + 2)
    killed.kill()
    assert killed.text.count(f"settings changed from the next step on: {key} ") == 1
    epoch = f"data: a new epoch begins at sequence {FRONTIER}; " in killed.text
    assert epoch is (case in ("seq_len", "sources", "seed", "documents-left-out"))
    last = (newest(run) // 10 + 1) * 10
    resumed = start(run.name, f"--training.steps={last}", change, allow)
    assert "settings changed" not in resumed.end(), "the same command is no second change"
    assert_changed(run, case)

    if case == "documents-left-out":
        assert show_data.main([f"outputs/{run.name}", f"0-{FRONTIER + 500}"]) == 0
        shown = capsys.readouterr().out.partition(f"position {FRONTIER}: ")
        left_out = set(range(12, 22))
        assert documents_of(shown[0], "a") & left_out and not documents_of(shown[2], "a") & left_out
        assert documents_of(shown[2], "a") >= {*range(12), *range(22, 60)}
    other, unchanged = copy(f"{run.name}-copy", run), copy(f"{run.name}-unchanged")
    start(other.name, f"--training.steps={last}", change).end()
    start(unchanged.name, f"--training.steps={last}").end()
    assert state(run, last) == state(other, last) != state(unchanged, last)


@pytest.mark.parametrize("case", PARAMETERS)
def test_two_groups(start_group: Callable[..., Launch], case: str):
    key, value = CASES[case]
    run, change = copy(f"{case}-2"), f"--{key}={value}"
    last = two_groups(start_group, run.name, change, f"--resume.allow={key}")
    assert_changed(run, case)

    other = copy(f"{run.name}-copy", run)
    start_group("calm", other.name, change, f"--training.steps={last}").end()
    assert state(run, last) == state(other, last)


def two_groups(start_group: Callable[..., Launch], *argv: str) -> int:
    """Runs a job of two groups, kills one, which returns, then sends SIGTERM to both. Returns the last step, which is saved."""
    argv = (*argv, "--training.steps=100000")
    first, killed = (start_group(group, *argv) for group in ("0", "1"))
    for group in (first, killed):
        group.until_step(CHANGED_AT + 1)
    killed.kill()
    again = start_group("1", *argv)
    again.until_step(CHANGED_AT + 1)
    for group in (first, again):
        group.process.terminate()
    for group in (first, again):
        group.end()
    return newest(Path("outputs") / argv[0])


@pytest.mark.parametrize("groups", [1, 2])
def test_a_run_that_continues_the_data_of_another(
    start: Callable[..., Launch], start_group: Callable[..., Launch], groups: int
):
    name, key = f"begun-{groups}", "--checkpoint.initial_load"
    argv = (name, f"{key}_path=outputs/short/checkpoint/step-10", f"{key}_model_only=false")
    if groups == 1:
        killed = start(*argv, "--training.steps=100000")
        killed.until_step(CHANGED_AT + 2)
        killed.kill()
        start(*argv, f"--training.steps={CHANGED_AT + 100}").end()
    else:
        two_groups(start_group, *argv)
    rows = read(Path("outputs") / name / "samples.jsonl")
    assert rows[0].step == CHANGED_AT and rows[0].begin == RunBegin(FRONTIER)
    assert prove(rows).exact and not any(row.begin for row in rows[1:])


def test_load_only_saves_nothing(start: Callable[..., Launch]):
    def files() -> dict[Path, bytes]:
        others = ("lock", "events.jsonl")  # who holds the run's folder, and what happened when
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name not in others}

    run = copy("looked-at")
    before = files()
    changes = ("--optimizer.lr=0.0002", "--resume.allow=optimizer.lr", "--metrics.enable_tensorboard")
    looking = start(run.name, "--checkpoint.load_only", "--training.steps=13", *changes)
    assert "finished step 13" in looking.end() and files() == before


def test_a_run_that_begins_again_before_its_newest_checkpoint_and_is_killed_before_a_save(start: Callable[..., Launch]):
    """The run's rows are of the history that the next launch resumes from."""
    run = copy("begun-again")
    start(run.name, "--training.steps=20").end()
    killed = start(run.name, "--checkpoint.load_step=10", "--checkpoint.interval=100000", "--training.steps=100000")
    killed.until_text("step 20, newer than checkpoint.load_step = 10, set aside as ")
    killed.kill()
    start(run.name, "--training.steps=21").end()
    assert [row["step"] for row in rows(run)] == [*range(1, 22)] and prove(read(run / "samples.jsonl")).exact
