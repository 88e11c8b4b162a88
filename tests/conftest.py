"""Configures pytest: two tiers, tests that run exclusively, seconds per suite, and skipping of tests without torch (make compat)."""

from __future__ import annotations

import fcntl
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ft.children import die_with

ROOT = Path(__file__).resolve().parents[1]
SEEDS_OUTPUT = pytest.StashKey[str]()
_seconds: Counter[str] = Counter()

# The first tier (10 minutes on two cores) is all tests except these prefixes of test names. `--all` adds them; so does naming them or their
# folder on the command line.
ONLY_WITH_ALL = {
    "dryrun/": "every layout on a fake device; the first tier has replica groups and the default config",
    "e2e/": "whole jobs, under every fault among others; the first tier has one of two groups, with spikes, one killed",
    "ft/test_soak.py": "the soak test, with few membership changes",
    "ft/test_torchft_": "programs written for torchft; the first tier has ft/test_manager.py",
    "ft/test_train_ddp.py": "examples/train_ddp.py with one group killed",
    "multiproc/test_expert.py::test_a_layout_computes_what_one_process_computes[fsdp 2 + tp 2": "other layouts are in the first tier",
    "multiproc/test_expert.py::test_a_layout_computes_what_one_process_computes[hsdp 2x2, ep 2-Muon": "other layouts are in the first tier",
    "multiproc/test_expert.py::test_a_layout_computes_what_one_process_computes[cp 2, ep 2-AdamW": "other layouts are in the first tier",
    "multiproc/test_expert.py::test_a_layout_computes_what_one_process_computes[tp 2, ep 2": "other layouts are in the first tier",
    "multiproc/test_explain.py": "--explain compared with real ranks",
    "multiproc/test_managed_group.py": "hooks of programs written for torchft; the first tier has unit/test_torchft_names.py",
    "multiproc/test_mutations.py": "injected errors in each layout",
    "multiproc/test_checkpoint_ranks.py::test_any_number_of_ranks_loads_it[2-": "from two ranks; the first tier has one to three",
    "multiproc/test_layouts.py::test_every_layout_gives_what_one_process_gives[cp2, by operation": "compiled; the first tier has tp",
    "multiproc/test_parity.py": "layouts of the parity proof; the first tier has test_layouts.py",
    "multiproc/test_pipeline.py::test_composed": "pipelines with other parallelism; the first tier has each schedule",
    "multiproc/test_pipeline.py::test_every_schedule[4-4]": "four ranks; the first tier has each schedule on two",
    "multiproc/test_process_groups.py::test_forming_fifty_times_leaks_nothing": "fifty times",
    "multiproc/test_reshard.py": "checkpoints from layout to layout",
    "multiproc/test_retries.py": "retried steps in pipelines",
    "rpc/test_torchft_": "with torchft's clients, servers and tests, from its wheel",
    "scripts/test_add_a_model.py": "follows docs/add_a_model.md",
    "scripts/test_bad_groups.py::test_each_is_told_why_and_the_job_goes_on": "groups that a job refuses, in one job",
    "scripts/test_check_cluster.py": "injected faults of a cluster",
    "scripts/test_distributed_basics.py": "examples/distributed_basics.py, which nothing else uses",
    "scripts/test_documents_run.py": "every command of the documentation",
    "scripts/test_explain.py::test_512_ranks_are_explained_here": "a large layout explained",
    "scripts/test_generate.py::test_generate_reads_the_newest_whole_checkpoint": "generate.py during a run",
    "scripts/test_hf": "import and export of Hugging Face weights",
    "scripts/test_kubernetes.py": "a pod's commands",
    "scripts/test_prepare_data.py::test_processes_and_kills": "a killed preparation with several processes",
    "scripts/test_resume.py": "killed and resumed, bit for bit",
    "scripts/test_run_replicas.py": "a lighthouse and groups on one machine",
    "scripts/test_seed_checkpoint.py::test_memory": "peak memory of a seed checkpoint",
    "scripts/test_slurm.py": "a real Slurm",
    "scripts/test_torchx.py": "TorchX's own scheduler",
    "scripts/test_train.py::test_signals_save[2]": "two ranks; the first tier has one",
    "sim/test_seeds.py": "seeds that failed once",
    "sim/test_writers.py::test_the_bug_is_found[settles nothing anew]": "a rare bug; the first tier has the others",
    "sim/test_writers.py::test_many_seeds": "the writers of metrics and checkpoints; the first tier has their injected bugs",
    "unit/test_activation_checkpoint.py::test_a_compiled_block_is_one_graph[full]": "compiled; the first tier has op",
    "unit/test_activation_checkpoint.py::test_gradients_are_the_same_from_fewer_bytes[torch.bfloat16": "the first tier has fp32",
    "unit/test_data_streaming.py::test_a_real_data_set_is_taken_up_exactly[2]": "with two workers; the first tier has none",
    "unit/test_ops.py::test_flex_attention_of_documents_gives_the_same[300-300": "compiled; the first tier has others",
    "unit/test_ops.py::test_flex_attention_of_documents_gives_the_same[150-290": "compiled; the first tier has others",
    "unit/test_ops.py::test_flex_attention_of_documents_gives_the_same[37-37": "compiled; the first tier has others",
    "unit/test_replicas.py::test_ranks_that_die_once_a_day_are_started_again_for_years[43200": "the first tier has a day",
    "unit/test_tiers.py::test_the_bare_command": "what the command selects",
}
# While one of these runs, no other pytest-xdist worker runs a test, as they use all cores or have time bounds. They come last, so that no
# worker waits while other tests remain.
ALONE = ("e2e/test_drill.py", "e2e/test_semi_sync.py", "scripts/test_check_cluster.py", "scripts/test_slurm.py")
MANY_SEEDS = "sim/test_many_seeds.py"  # the last test; in a tier it only waits for the process of pytest_sessionstart
IN_BOTH = (
    "e2e/test_spikes.py::test_two_groups_one_killed",
    "dryrun/test_dryrun.py::test_a_step_does_what_it_may_and_nothing_else[a group",
    "dryrun/test_dryrun.py::test_a_step_does_what_it_may_and_nothing_else[llama]",
)


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    """An ExitStack that is closed after the test."""
    with ExitStack() as stack:
        yield stack


if find_spec("hypothesis"):  # not installed where only tests/gpu run
    from hypothesis import settings

    settings.load_profile("ci")  # the same examples in each run, without a deadline


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="both tiers of tests/; without it and without a path the first")
    parser.addoption("--long", action="store_true", help="the tests that both tiers leave out for time: make long")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "long: left out of both tiers for time, unless its file is named; run by make long"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (_is_in(item, MANY_SEEDS), _is_in(item, ALONE)))
    if not (tier := _tier(config)):
        return
    later = {
        item
        for item in items
        if (item.get_closest_marker("long") is None) is (tier == "long")
        or (tier == "first" and is_only_with_all(item.nodeid.removeprefix("tests/")))
    }
    config.hook.pytest_deselected(items=list(later))
    items[:] = [item for item in items if item not in later]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # imports leave no garbage
    try:
        return (yield)
    finally:
        gc.freeze()  # later collections need not visit all of torch and pytest
        gc.enable()


def _tier(config: pytest.Config) -> str:
    """Returns which tests of tests/ this session runs: "first", "all" or "long"; "": those named. A pytest-xdist worker gets that from its
    controller."""
    if hasattr(config, "workerinput"):
        return str(config.workerinput["tier"])
    if config.args_source is pytest.Config.ArgsSource.ARGS:
        return ""
    return "long" if config.option.long else "all" if config.option.all else "first"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["tier"] = _tier(node.config)
    node.workerinput["many_seeds"] = node.config.stash.get(SEEDS_OUTPUT, "")


def many_seeds_command(config: pytest.Config) -> list[str]:
    """Returns the command of tests/sim/test_many_seeds.py, which uses all cores for some minutes."""
    count = os.environ.get("PHAROS_SEEDS", "50" if config.option.all else "20")
    return [sys.executable, "-m", "tests.simulator", "--seeds", count]


def _yield_to_others(parent: int) -> None:
    """Gives a new process the lowest priority, and makes it die with its parent."""
    die_with(parent)
    os.setsid()
    os.nice(19)
    with suppress(OSError):  # on Linux, where a session has as large a share as each other one
        Path("/proc/self/autogroup").write_text("19", encoding="utf-8")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Starts the simulation of many seeds in the background of a whole tier, at the lowest priority. Its test waits for the lock of its
    output, and reads the result."""
    config = session.config
    if _tier(config) not in ("first", "all") or config.option.keyword or not config.getoption("numprocesses", None):
        return
    with tempfile.NamedTemporaryFile(prefix="pharos-seeds-", delete=False) as output:
        fcntl.flock(output, fcntl.LOCK_EX)  # inherited by the process, so locked until it ends
        process = subprocess.Popen(
            many_seeds_command(config),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=partial(_yield_to_others, os.getpid()),
        )
    config.stash[SEEDS_OUTPUT] = output.name

    def end() -> None:
        process.kill()  # its own processes end with it
        process.wait()
        Path(output.name).unlink()

    config.add_cleanup(end)


def _is_in(item: pytest.Item, beginnings: str | tuple[str, ...]) -> bool:
    return item.nodeid.removeprefix("tests/").startswith(beginnings)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before pytest-timeout's clock starts
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = signal.getsignal(signal.SIGTERM)
    try:
        if not hasattr(item.config, "workerinput") or _is_in(item, MANY_SEEDS):
            return (yield)
        lock = Path(tempfile.gettempdir(), f"pharos-tests-{item.config.workerinput['testrunuid']}")
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX if _is_in(item, ALONE) else fcntl.LOCK_SH)
            return (yield)
    finally:
        signal.signal(signal.SIGTERM, before)  # scripts that are run in this process set it


def is_only_with_all(name: str) -> bool:
    return name.startswith(tuple(ONLY_WITH_ALL)) and not name.startswith(IN_BOTH)


def pytest_report_header(config: pytest.Config) -> str:
    headers = {
        "first": "first tier; --all adds the second",
        "all": "both tiers",
        "long": "those that both tiers leave out",
    }
    return f"tests: {headers[tier]}" if (tier := _tier(config)) else ""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    suite = report.nodeid.partition("::")[0].split("/")
    _seconds[suite[1] if len(suite) > 2 else suite[0]] += report.duration  # type: ignore[assignment]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _seconds:
        spent = ", ".join(f"{suite} {seconds:.1f}" for suite, seconds in _seconds.most_common())
        terminalreporter.write_line(f"seconds per suite: {spent}")


if find_spec("torch") is None:
    # Tests that import a missing package are skipped. A missing module of this repository is an error.

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        collector: pytest.Collector,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        missing = re.search(r"ModuleNotFoundError: No module named '(\w+)", str(report.longrepr))
        if report.outcome == "failed" and missing and not _is_ours(missing.group(1)):
            report.outcome = "skipped"
            report.longrepr = (str(collector.path), 0, f"needs {missing.group(1)}")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call() -> Generator[None, object, object]:
        try:
            return (yield)
        except ModuleNotFoundError as error:
            if error.name is None or _is_ours(error.name.partition(".")[0]):
                raise
            pytest.skip(f"needs {error.name}")


def _is_ours(package: str) -> bool:
    return (ROOT / package).is_dir() or (ROOT / f"{package}.py").is_file()
